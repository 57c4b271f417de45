"""Delayed mode: right kernels stay right with every seed, and a kernel without one of its waits or commits is found within 20."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from megamoe.emulation import Options, rewrite
from megamoe.errors import EmulationFault

from . import kernels
from . import model_mma as model

SEEDS = range(1, 21)


def multiply(emulated, seed, group=1, limit_ms=2000, loads_wait=True, **variant):
    rng = np.random.default_rng(1)
    a, b = model.random_codes(rng, (128 * group, 64), "f16"), model.random_codes(rng, (64, 64), "f16")
    images = [[model.k_major_image(model.slab_bytes(half, model.F16, 16), 128) for half in np.split(x, group)] for x in (a, b)]
    data = [np.concatenate([image for image, _, _ in halves]) for halves in images]
    idesc = 1 << 4 | 64 >> 3 << 17 | 128 * group >> 4 << 24
    sizes, descriptors = [d.nbytes // group for d in data], [ctypes.c_uint64(halves[0][1]) for halves in images]
    arguments = (*data, np.zeros(1024, np.uint8), np.zeros((128 * group, 64), np.float32), *sizes, *descriptors, 2, 2, idesc)
    shared, options = kernels.OPERANDS + sum(sizes) + 1024, Options(seed=seed, limit_ms=limit_ms, loads_wait=loads_wait)
    out = emulated(kernels.mma("f16", 64, 4, group=group, **variant), *arguments, grid=group, shared=shared, options=options)[3]
    return np.array_equal(out, model.values(a, "f16") @ model.values(b, "f16").T)


@pytest.mark.parametrize("group", [1, 2])
def test_a_right_kernel_stays_right(emulated, group):
    assert all(multiply(emulated, seed, group) for seed in SEEDS)


def test_a_right_kernel_that_elects_no_thread_stays_right(emulated):
    assert all(multiply(emulated, seed, elected=False) for seed in SEEDS[:3])


def by_four_warps(emulated, seed):
    """Whether four warps that issue at the same time, each for 64 columns of its own, get what one gets."""
    text = kernels.mma("f16", 256, 4)
    for old, new in (
        ("setp.ne.u32 %p4, %r3, 0;", "setp.gt.u32 %p4, %r3, 3;"),
        ("mov.b32 %r6, 1;", "mov.b32 %r6, 4;"),
        ("add.u32 %r50, %r7, 256;", "mad.lo.u32 %r70, %r3, 64, %r7;"),
        ("[%r7], %rd10", "[%r70], %rd10"),
    ):
        assert old in text
        text = text.replace(old, new)
    rng = np.random.default_rng(2)
    a, b = model.random_codes(rng, (128, 64), "f16"), model.random_codes(rng, (64, 64), "f16")
    images = [model.k_major_image(model.slab_bytes(x, model.F16, 16), 128) for x in (a, b)]
    idesc = 1 << 4 | 64 >> 3 << 17 | 128 >> 4 << 24
    sizes, descriptors = [image.nbytes for image, _, _ in images], [ctypes.c_uint64(word) for _, word, _ in images]
    arguments = (images[0][0], images[1][0], np.zeros(1024, np.uint8), np.zeros((128, 256), np.float32), *sizes, *descriptors, 2, 2, idesc)
    options = Options(seed=seed, limit_ms=2000)
    out = emulated(text, *arguments, shared=kernels.OPERANDS + sum(sizes) + 1024, options=options)[3]
    return np.array_equal(out, np.tile(model.values(a, "f16") @ model.values(b, "f16").T, 4))


def test_four_warps_that_issue(emulated):
    assert all(by_four_warps(emulated, seed) for seed in SEEDS[:5])


@pytest.mark.parametrize("omitted", ["wait", "wait::ld"])
def test_a_missing_wait_is_found(emulated, omitted):
    assert not all(multiply(emulated, seed, omit=(omitted,)) for seed in SEEDS)


def test_a_kernel_that_never_waits_for_its_loads_is_noted_and_can_be_trusted(emulated):
    """Some compilers leave that wait to ptxas, which tracks the registers."""
    kernel = kernels.mma("f16", 64, 4, omit=("wait::ld",))
    assert any("never waits" in note for note in rewrite(kernel, Options(seed=1)).notes)
    assert not rewrite(kernel, Options(seed=1, loads_wait=False)).notes
    assert multiply(emulated, 1, omit=("wait::ld",), loads_wait=False)


def test_a_missing_commit_is_found(emulated):
    with pytest.raises(EmulationFault, match="deadline"):
        multiply(emulated, 1, omit=("commit",), limit_ms=300)


def test_without_delays_a_missing_wait_passes(emulated):
    """Why there is a delayed mode."""
    assert multiply(emulated, None, omit=("wait::ld",))


@pytest.mark.parametrize("waits", [True, False])
def test_wait_for_stores(emulated, waits):
    kernel = kernels.ld_st("32x32b", 8, 8, wait_store=waits)
    (out,) = emulated(kernel, np.zeros((128, 8), np.uint32), shared=1024, options=Options(seed=1))
    lanes = np.arange(128)
    expected = (lanes % 32 * 1000 + lanes // 32 * 100000)[:, None] + np.arange(8)
    assert np.array_equal(out, expected) == waits


def test_one_instruction_that_stores_several_times_before_the_wait(emulated):
    (out,) = emulated(kernels.st_in_a_loop(8), np.zeros((128, 8), np.uint32), shared=1024, options=Options(seed=1))
    lanes = np.arange(128)
    np.testing.assert_array_equal(out, (lanes % 32 * 1000 + lanes // 32 * 100000)[:, None] + np.arange(8))


def test_stores_of_code_that_relies_on_the_order_of_its_accesses(emulated):
    kernel = kernels.ld_st("32x32b", 8, 8, wait_store=False)
    (out,) = emulated(kernel, np.zeros((128, 8), np.uint32), shared=1024, options=Options(seed=1, loads_wait=False))
    lanes = np.arange(128)
    np.testing.assert_array_equal(out, (lanes % 32 * 1000 + lanes // 32 * 100000)[:, None] + np.arange(8))


def bulk_stored(emulated, **how):
    (out,) = emulated(kernels.bulk_store(**how), np.zeros(128, np.uint32), shared=1024, options=Options(seed=1))
    return set(out.tolist())


@pytest.mark.parametrize("times", [1, 4])
def test_bulk_stores(emulated, times):
    """Also when one instruction stores several times before the wait."""
    assert bulk_stored(emulated, times=times) == {7}


@pytest.mark.parametrize("how", [{"omit": "wait"}, {"omit": "commit"}, {"open_groups": 1}])
def test_a_missing_wait_or_commit_of_bulk_stores_is_found(emulated, how):
    """And a wait that leaves the last group open."""
    assert bulk_stored(emulated, **how) == {9}
