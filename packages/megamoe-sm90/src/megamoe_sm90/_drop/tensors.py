"""Tensors of a launch from their addresses, and tensor maps to load boxes of them."""

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2
from cutlass.cute.nvgpu import cpasync, warpgroup

DTYPES = {"fp8_block128": Float8E4M3FN, "fp8_tensor": Float8E4M3FN, "fp8_tensor_e5m2": Float8E5M2, "bf16": BFloat16}


def tensor(dtype, address, shape, stride):
    """Global memory at a multiple of 16 bytes."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def matrix(dtype, address, rows, columns):
    """Rows one behind the other."""
    return tensor(dtype, address, (rows, columns), (columns, 1))


def swizzled(dtype, *shape):
    """The layout in shared memory of K blocks, each row a swizzled line: (rows, elements of a K block), and stages of them."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def loads(source, layout, box):
    """(Copy, coordinates) of TMA loads of boxes into one stage of a layout."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, cute.select(layout, mode=[0, 1]), box)
