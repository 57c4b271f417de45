"""The check for missing proxy fences finds planted ones, and only those."""

from __future__ import annotations

import pytest

from megamoe.emulation import unfenced_loads

from . import kernels

ACQUIRE = "ld.acquire.gpu.global.b32 %r1, [%rd1];"
FENCE = "fence.proxy.async;"
LOADS = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd2, {%r3, %r4}], [%r5];",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2], 128, [%r5];",
)


def found(body):
    text = kernels.kernel("sm_100a", "u64 d", body)
    return [(text.splitlines()[f.acquire_line - 1].strip(), text.splitlines()[f.load_line - 1].strip()) for f in unfenced_loads(text)]


@pytest.mark.parametrize("load", LOADS)
def test_a_fence_on_every_path(load):
    assert found(f"{ACQUIRE}\n{FENCE}\n{load}") == []
    assert found(f"{ACQUIRE}\n{load}") == [(ACQUIRE, load)]
    assert found(f"{load}\n{ACQUIRE}") == []


@pytest.mark.parametrize(
    "acquire", ["atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1;", "fence.acq_rel.gpu;", "ld.global.acquire.sys.b32 %r1, [%rd1];"]
)
def test_other_acquires(acquire):
    assert found(f"{acquire}\n{LOADS[0]}") == [(acquire, LOADS[0])]


def test_acquires_of_shared_memory_and_stores_do_not_count():
    assert found(f"ld.acquire.cta.shared.b32 %r1, [%r2];\nst.release.gpu.global.b32 [%rd1], %r1;\n{LOADS[0]}") == []


def test_the_fence_of_one_branch_is_not_enough():
    body = f"{ACQUIRE}\n@%p1 bra $skip;\n{FENCE}\n$skip:\n{LOADS[0]}"
    assert found(body) == [(ACQUIRE, LOADS[0])]
    assert found(f"{ACQUIRE}\n@%p1 bra $skip;\n$skip:\n{FENCE}\n{LOADS[0]}") == []


def test_around_a_loop():
    assert found(f"$again:\n{LOADS[0]}\n{ACQUIRE}\n@%p1 bra $again;") == [(ACQUIRE, LOADS[0])]
    assert found(f"$again:\n{FENCE}\n{LOADS[0]}\n{ACQUIRE}\n@%p1 bra $again;") == []


def test_a_guarded_fence_may_not_happen():
    assert found(f"{ACQUIRE}\n@%p1 {FENCE}\n{LOADS[0]}") == [(ACQUIRE, LOADS[0])]


def test_code_that_is_not_reached():
    assert found(f"{ACQUIRE}\nbra $end;\n{LOADS[0]}\n$end:") == []


def test_a_spin_in_inline_assembly():
    spin = "{\n.reg .pred P;\nL:\n" + ACQUIRE + "\nsetp.ne.b32 P, %r1, 1;\n@P bra L;\n}"
    assert found(f"{spin}\n{LOADS[0]}\n{spin}") == [(ACQUIRE, LOADS[0])]
    assert found(f"{spin}\n{FENCE}\n{LOADS[0]}\n{spin}") == []


def test_the_wrong_fence():
    assert found(f"{ACQUIRE}\nfence.proxy.async.shared::cta;\n{LOADS[0]}") == [(ACQUIRE, LOADS[0])]
