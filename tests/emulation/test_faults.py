"""Each strict check finds the fault that was planted for it, and names it; the kernel without it passes (in the other files)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from megamoe.emulation import Options
from megamoe.errors import EmulationFault

from . import kernels
from . import model_mma as model
from .test_tensor import PACKED, tensor_map

IDESC = 1 << 4 | 64 >> 3 << 17 | 128 >> 4 << 24


def changed(text, *replacements):
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


def multiply(emulated, text, idesc=IDESC, change_a=0, shared=kernels.OPERANDS + 128 * 128 + 64 * 128 + 1024, scales=None, limit_ms=2000):
    rng = np.random.default_rng(1)
    a, b = (model.k_major_image(model.slab_bytes(model.random_codes(rng, (rows, 64), "f16"), model.F16, 16), 128) for rows in (128, 64))
    arguments = (
        a[0],
        b[0],
        np.zeros(1024, np.uint8) if scales is None else scales,
        np.zeros((128, 64), np.float32),
        a[0].nbytes,
        b[0].nbytes,
    )
    descriptors = (ctypes.c_uint64(a[1] ^ change_a), ctypes.c_uint64(b[1]), 2, 2)
    return emulated(text, *arguments, *descriptors, idesc, shared=shared, options=Options(limit_ms=limit_ms))[3]


def found(emulated, code, text, instruction="", **how):
    with pytest.raises(EmulationFault) as raised:
        multiply(emulated, text, **how)
    assert raised.value.code == code, str(raised.value)
    assert instruction in str(raised.value)
    return raised.value


MMA = kernels.mma("f16", 64, 2)


def test_columns_outside_the_allocation(emulated):
    text = changed(MMA, ("mov.b32 %r5, 512;", "mov.b32 %r5, 32;"), ("%r7, 512;", "%r7, 32;"))
    fault = found(emulated, "tmem-bounds", text, "tcgen05.mma")
    assert MMA.splitlines()[fault.line - 1].strip().startswith("tcgen05.mma")


def test_size_of_an_allocation(emulated):
    found(emulated, "tmem-alloc-size", changed(MMA, ("mov.b32 %r5, 512;", "mov.b32 %r5, 48;")), "tcgen05.alloc")


def test_allocation_after_relinquishing(emulated):
    relinquish = "\ttcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
    text = changed(MMA, (relinquish, ""), ("\ttcgen05.alloc", relinquish + "\ttcgen05.alloc"))
    found(emulated, "tmem-relinquished", text, "tcgen05.alloc")


def test_freeing_what_is_not_held(emulated):
    found(
        emulated,
        "tmem-dealloc",
        changed(
            MMA,
            ("%r7, 512;", "%r9, 512;"),
            ("\tbar.sync 0;\n\t@%p1 bra $freed;", "\tadd.u32 %r9, %r7, 32;\n\tbar.sync 0;\n\t@%p1 bra $freed;"),
        ),
    )


def test_leftover_allocation(emulated):
    found(emulated, "tmem-leftover", changed(MMA, ("\ttcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 512;\n", "")))
    multiply(emulated, MMA)  # and the next kernel is not hindered


def test_lanes_of_another_warp(emulated):
    with pytest.raises(EmulationFault) as raised:
        emulated(
            changed(kernels.ld_st("32x32b", 8, 8), ("add.u32 %r9, %r9, %r7;", "xor.b32 %r9, %r9, 0x200000;\n\tadd.u32 %r9, %r9, %r7;")),
            np.zeros((4, 32, 8), np.uint32),
            shared=1024,
        )
    assert raised.value.code == "sub-partition"
    assert "tcgen05.st" in str(raised.value)


def test_column_that_several_registers_at_once_cannot_begin_at(emulated):
    with pytest.raises(EmulationFault, match="no multiple of 4") as raised:
        emulated(
            changed(kernels.ld_st("32x32b", 8, 8), ("add.u32 %r9, %r9, %r7;", "add.u32 %r9, %r9, %r7;\n\tadd.u32 %r9, %r9, 2;")),
            np.zeros((4, 32, 8), np.uint32),
            shared=1024,
        )
    assert raised.value.code == "tmem-alignment"


def test_matrix_descriptor(emulated):
    assert "bits 46-48" in str(found(emulated, "descriptor", MMA, "tcgen05.mma", change_a=1 << 46))
    assert "swizzle" in str(found(emulated, "descriptor", MMA, change_a=1 << 61))


@pytest.mark.parametrize(("change", "word"), [(3 << 24, "M"), (6 << 7, "type of A"), (4, "sparse"), (3 << 4, "type of D")])
def test_instruction_descriptor(emulated, change, word):
    assert f": {word} " in str(found(emulated, "idesc", MMA, "tcgen05.mma", idesc=IDESC ^ change))


def test_what_is_legal_but_not_emulated(emulated):
    found(emulated, "not-emulated", MMA, "tcgen05.mma", idesc=IDESC ^ 1 << 4)  # sums in halves


def test_operands_beyond_shared_memory(emulated):
    found(emulated, "shared-bounds", MMA, "tcgen05.mma", change_a=0x3000)


def test_shared_memory_of_sm_120(emulated):
    kernel = kernels.mma_sync("mxf8f6f4", "m16n8k32", 1, "e4m3", "e4m3", "ue8m0")
    arguments = [np.zeros((32, n), np.uint32) for n in (4, 2, 4, 2)]
    for size, legal in ((99 * 1024, True), (100 * 1024, False)):
        if legal:
            emulated(kernel, *arguments, np.zeros(4, np.uint16), np.zeros((32, 4), np.float32), block=32, shared=size)
            continue
        with pytest.raises(EmulationFault) as raised:
            emulated(kernel, *arguments, np.zeros(4, np.uint16), np.zeros((32, 4), np.float32), block=32, shared=size)
        assert raised.value.code == "shared-limit"
        assert str(size) in str(raised.value)


def test_a_commit_that_never_comes(emulated):
    found(emulated, "timeout", kernels.mma("f16", 64, 2, omit=("commit",)), "mbarrier.try_wait", limit_ms=200)
    multiply(emulated, MMA)


def test_never_written_tensor_memory_is_nan(emulated):
    """Scales that were not copied, and an accumulator that is added to before it was written."""
    text = changed(MMA, ("setp.ne.u32 %p7, 0, 0;", "setp.ne.u32 %p7, 1, 0;"))
    assert np.isnan(multiply(emulated, text)).all()
    idesc = 8 << 17 | 1 << 23 | 1 << 27
    text = kernels.mma("mxf8f6f4", 64, 1, block=".block32", omit=("cp",))
    assert np.isnan(multiply(emulated, text, idesc=idesc)).all()


def test_never_written_shared_memory_is_nan(emulated):
    text = changed(MMA, ("\tst.shared.b32 [%r12], %r11;\n", ""))
    assert np.isnan(multiply(emulated, text)).all()


def test_a_pair_is_led_by_its_even_cta(emulated):
    text = changed(kernels.mma("f16", 64, 2, group=2), ("setp.ne.u32 %p4, %r4, 0;", "setp.ne.u32 %p4, %r4, 1;"))
    rng = np.random.default_rng(1)
    a, b = (model.k_major_image(model.slab_bytes(model.random_codes(rng, (rows, 64), "f16"), model.F16, 16), 128) for rows in (128, 32))
    both = [np.concatenate([image, image]) for image in (a[0], b[0])]
    arguments = (*both, np.zeros(1024, np.uint8), np.zeros((256, 64), np.float32), a[0].nbytes, b[0].nbytes)
    idesc = 1 << 4 | 64 >> 3 << 17 | 256 >> 4 << 24
    with pytest.raises(EmulationFault) as raised:
        emulated(text, *arguments, ctypes.c_uint64(a[1]), ctypes.c_uint64(b[1]), 2, 2, idesc, grid=2, shared=40960)
    assert raised.value.code == "mma-pair"


def test_tensor_map(emulated):
    encoded = bytearray(tensor_map(1 << 40, PACKED, 256, (512, 100), (256, 64)))
    encoded[9] |= 8  # interleaved
    with pytest.raises(EmulationFault) as raised:
        emulated(kernels.tensor_load(8192), bytes(encoded), 0, 0, np.zeros(8192, np.uint8), shared=16384, options=Options(limit_ms=200))
    assert raised.value.code == "tensor-map"
