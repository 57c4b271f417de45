"""Addresses and descriptors on the host, from the source that the GPU runs, against models of the specification's figures."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from . import model_layout as model


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.parametrize("width", [128, 64, 32, 16])
def test_k_major_addresses(pure, width):
    start = 5 * 1024
    offsets, leading, stride = model.k_major_bytes(64, max(width, 32), width)
    for slab in range(max(width // 32, 1)):  # the start address advances by 32 bytes for every slab of K
        out = np.empty((64, 32), np.uint32)
        pure.k_major(ctypes.c_uint64(model.descriptor(start + 32 * slab, leading, stride, width)), 64, pointer(out))
        np.testing.assert_array_equal(out, start + offsets[:, 32 * slab : 32 * slab + 32])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("width", [128, 64, 32, 16])
def test_mn_major_addresses(pure, width, size):
    start, mn, k = 3 * 1024, 128, 32 // size
    offsets, leading, stride = model.mn_major_elements(mn, k, size, width)
    out = np.empty((mn, k), np.uint32)
    pure.mn_major(ctypes.c_uint64(model.descriptor(start, leading, stride, width)), mn, k, size, pointer(out))
    np.testing.assert_array_equal(out, start + offsets)
    assert len(np.unique(offsets)) == mn * k


@pytest.mark.parametrize(("code", "shape", "registers"), [(0, "32x32b", 16), (1, "16x256b", 16), (2, "16x128b", 16), (3, "16x64b", 16)])
def test_cells_of_registers(pure, code, shape, registers):
    rows, columns = np.empty((32, registers), np.uint32), np.empty((32, registers), np.uint32)
    pure.cells(code, registers, pointer(rows), pointer(columns))
    expected = model.load_cells(shape, registers)
    np.testing.assert_array_equal(np.stack([rows, columns], -1), expected)
    # Every cell of the rectangle belongs to exactly one register.
    height = 32 if shape == "32x32b" else 16
    assert len(np.unique(expected.reshape(-1, 2), axis=0)) == height * (32 * registers // height)


def test_rewritten_register_offsets_are_the_cells():
    from megamoe.emulation.replacements import LOAD_SHAPES, register_offset

    for shape, code in LOAD_SHAPES.items():
        cells = model.load_cells(shape, 32)
        for register in range(32):
            distance = (cells[:, register] - cells[:, 0]) @ np.array([2048, 4])
            assert set(distance) == {register_offset(code, register)}, (shape, register)


def test_accumulator_cells(pure):
    def cells(rows, columns, group):
        lanes, at = np.empty((rows, columns), np.uint32), np.empty((rows, columns), np.uint32)
        pure.accumulator(rows, columns, group, pointer(lanes), pointer(at))
        return lanes, at

    lanes, at = cells(128, 64, 1)
    assert (lanes == np.arange(128)[:, None]).all()
    assert (at == np.arange(64)).all()
    lanes, at = cells(64, 64, 1)  # 16 lanes of each sub-partition
    assert list(lanes[:, 0]) == [*range(16), *range(32, 48), *range(64, 80), *range(96, 112)]
    lanes, at = cells(64, 64, 2)  # the columns' halves one below the other
    assert list(lanes[:, 0]) == list(range(64))
    assert list(lanes[:, 32]) == list(range(64, 128))
    assert list(at[0]) == [*range(32), *range(32)]


LEGAL = model.descriptor(1024, 16, 1024, 128)


@pytest.mark.parametrize(
    ("descriptor", "fault"),
    [
        (LEGAL, 0),
        (LEGAL & ~(1 << 46), 1),  # no version
        (LEGAL | 1 << 47, 1),
        (LEGAL & ~(7 << 61) | 3 << 61, 2),  # no such swizzle
        (LEGAL | 1 << 49, 3),  # a base offset
        (LEGAL | 1 << 55, 4),  # reserved
        (LEGAL | 1 << 52, 5),
    ],
)
def test_descriptor_legality(pure, descriptor, fault):
    assert pure.descriptor_legal(ctypes.c_uint64(descriptor)) == fault


def idesc(m, n, a=0, b=0, d=1, extra=0):
    return d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24 | extra


F16, TF32, F8F6F4, I8, MXF8, MXF4, NVF4 = range(7)


@pytest.mark.parametrize(
    ("value", "kind", "group", "block", "fault"),
    [
        (idesc(128, 256), F16, 1, 0, 0),
        (idesc(64, 8), F16, 1, 0, 0),
        (idesc(256, 128), F16, 2, 0, 0),
        (idesc(256, 128), F16, 1, 0, 6),  # M of a pair
        (idesc(64, 128), F16, 2, 0, 6),
        (idesc(128, 0), F16, 1, 0, 5),
        (idesc(128, 24), F16, 2, 0, 5),  # N of a pair: steps of 16
        (idesc(128, 128, a=2, b=2), F16, 1, 0, 3),
        (idesc(128, 128, a=1, b=0), F16, 1, 0, 4),  # both halves or both bfloat16
        (idesc(128, 128, d=2), F16, 1, 0, 2),
        (idesc(128, 128, a=5, b=3), F8F6F4, 1, 0, 0),
        (idesc(128, 128, a=2), F8F6F4, 1, 0, 3),
        (idesc(128, 128, b=6), F8F6F4, 1, 0, 4),
        (idesc(128, 128, a=2, b=2), TF32, 1, 0, 0),
        (idesc(128, 128, a=1, b=1, d=2), I8, 1, 0, 0),
        (idesc(128, 128, a=1, b=1, d=1), I8, 1, 0, 2),
        (idesc(128, 128, extra=4), F16, 1, 0, 1),  # sparse
        (idesc(128, 128, d=0, extra=1 << 23), MXF8, 1, 32, 0),
        (idesc(64, 128, d=0, extra=1 << 23), MXF8, 1, 32, 6),
        (idesc(128, 128, d=0), MXF8, 1, 32, 8),  # E4M3 scales of 32
        (idesc(128, 128, a=1, b=1, d=0), NVF4, 1, 16, 0),
        (idesc(128, 128, a=5, b=1, d=0), NVF4, 1, 16, 3),
        (idesc(128, 128, a=1, b=1, d=0, extra=1 << 31), NVF4, 1, 16, 10),
        (idesc(128, 128, a=1, b=1, d=0, extra=1 << 15), NVF4, 1, 16, 9),
        (idesc(128, 128, a=1, b=1, d=0, extra=1 << 29), NVF4, 1, 16, 11),
        (idesc(128, 128, a=1, b=1, d=2, extra=1 << 23 | 2 << 29), MXF4, 1, 32, 0),
    ],
)
def test_instruction_descriptor_legality(pure, value, kind, group, block, fault):
    assert pure.idesc_legal(ctypes.c_uint32(value), kind, group, block) == fault


# Maps that CuTe DSL 4.8.1 encoded for these tensors: (words, address, strides, sizes, box, type, swizzle).
MAPS = [
    ((0x7F0000001000, 0x0000004000246312, 0, 0, 0x000003E7000001F3, 0, 0x3F << 56, 0x1F), (1024,), (500, 1000), (64, 32), 6, 3),
    ((0x7F0000001000, 0x0000004000244312, 0, 0, 0x000003E7000001FF, 0, 0x1F << 56, 0x3F), (1024,), (512, 1000), (32, 64), 6, 2),
    ((0x7F0000001000, 0x0000004000240312, 0, 0, 0x000003E7000001FF, 0, 0x07 << 56, 0x3F), (1024,), (512, 1000), (8, 64), 6, 0),
    ((0x7F0000001000, 0x0000002000246012, 0, 0, 0x000003E7000001FF, 0, 0x7F << 56, 0x3F), (512,), (512, 1000), (128, 64), 0, 3),
    ((0x7F0000001000, 0x0000001000246592, 0, 0, 0x000003FF000001FF, 0, 0xFF << 56, 0x3F), (256,), (512, 1024), (256, 64), 11, 3),
    ((0x7F0000001000, 0x0000001000246612, 0, 0, 0x000003FF000001FF, 0, 0x7F << 56, 0x3F), (256,), (512, 1024), (128, 64), 12, 3),
    (
        (0x7F0000001000, 0x0000000A00240022, 0, 0x0000002000000000, 0x000000100000009F, 0x11, 0x0F << 56, 0x0302),
        (160, 1 << 37),
        (160, 17, 18),
        (16, 3, 4),
        0,
        0,
    ),
]


@pytest.mark.parametrize(("words", "strides", "sizes", "box", "kind", "swizzle"), MAPS)
def test_tensor_maps_decode_to_what_they_were_made_of(pure, words, strides, sizes, box, kind, swizzle):
    rank = len(sizes)
    q, base = np.array(words, np.uint64), np.empty(1, np.uint64)
    got_strides, got_sizes, got_box, rest = np.empty(4, np.uint64), np.empty(5, np.uint32), np.empty(5, np.uint32), np.empty(4, np.uint32)
    assert pure.tensor_map(pointer(q), pointer(base), pointer(got_strides), pointer(got_sizes), pointer(got_box), pointer(rest)) == 0
    assert int(base[0]) == words[0]
    assert tuple(got_strides[: rank - 1]) == strides
    assert tuple(got_sizes[:rank]) == sizes
    assert tuple(got_box[:rank]) == box
    bits = {0: 8, 6: 16, 11: 4, 12: 8}[kind]
    assert tuple(rest) == (rank, kind, swizzle, int(np.prod(box)) * bits // 8)


@pytest.mark.parametrize(("word", "bit", "fault"), [(1, 0, 1), (1, 11, 2), (1, 19, 2), (6, 33, 3)])
def test_tensor_maps_that_are_refused(pure, word, bit, fault):
    q = np.array(MAPS[0][0], np.uint64)
    q[word] ^= np.uint64(1 << bit)
    assert pure.tensor_map(pointer(q), *(pointer(np.empty(5, np.uint64)) for _ in range(5))) == fault


@pytest.mark.parametrize(
    ("corner", "padded"), [((0, 0), False), ((256, 1000), False), ((-32, 5), False), ((480, -3), False), ((448, 1020), True)]
)
def test_boxes_of_four_bit_elements(pure, corner, padded):
    """Every element of a box comes from its place in the tensor, or is outside; and goes to its swizzled place."""
    words = MAPS[5 if padded else 4][0]
    per_chunk, columns = (16, 128) if padded else (32, 256)
    n = 64 * columns // per_chunk
    bits, inside, places = np.empty(n, np.uint64), np.empty(n, np.uint32), np.empty(n, np.uint32)
    at, q, start = np.array([*corner, 0, 0, 0], np.int32), np.array(words, np.uint64), 2048
    pure.tensor_chunks(pointer(q), pointer(at), start, n, pointer(bits), pointer(inside), pointer(places))
    for chunk in range(n):
        row, first = divmod(chunk, columns // per_chunk)
        x, y = corner[0] + first * per_chunk, corner[1] + row
        valid = sum(0 <= x + i < 512 for i in range(per_chunk)) if 0 <= y < 1024 else 0
        assert inside[chunk] == valid
        if valid:
            assert int(bits[chunk]) == y * 256 * 8 + 4 * x
        assert places[chunk] == start + row * 128 + model.chunk_place(row, chunk % 8, 128) * 16
