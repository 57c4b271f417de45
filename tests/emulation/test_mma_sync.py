"""Block-scaled mma.sync on the GPU against the fragment figures of the specification, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from . import kernels, model_numbers


def container(codes, name):
    """A byte an element: E2M1 in bits 2 to 5, the others from bit 0."""
    return (codes << 2 if name == "e2m1" else codes).astype(np.uint8)


def fragments(bytes_, rows_of):
    """Registers [lane, i] of 4 bytes of K: row `rows_of(lane)[i][0]`, bytes from `rows_of(lane)[i][1]`."""
    out = np.empty((32, len(rows_of(0))), np.uint32)
    for lane in range(32):
        for index, (row, byte) in enumerate(rows_of(lane)):
            out[lane, index] = int.from_bytes(bytes_[row, byte : byte + 4].tobytes(), "little")
    return out


def a_rows(lane):
    g, t = divmod(lane, 4)
    return [(g, 4 * t), (g + 8, 4 * t), (g, 16 + 4 * t), (g + 8, 16 + 4 * t)]


def b_rows(lane):
    g, t = divmod(lane, 4)
    return [(g, 4 * t), (g, 16 + 4 * t)]


CASES = [
    ("mxf8f6f4", "m16n8k32", 1, a, b, "ue8m0", s)
    for a, b, s in (
        ("e4m3", "e4m3", (0, 0, 0, 0)),
        ("e5m2", "e4m3", (1, 1, 2, 3)),
        ("e2m1", "e4m3", (3, 0, 1, 2)),
        ("e4m3", "e2m1", (2, 1, 0, 1)),
        ("e2m3", "e3m2", (0, 1, 3, 0)),
        ("e2m1", "e2m1", (1, 0, 1, 1)),
    )
] + [
    ("mxf4", "m16n8k64", 2, "e2m1", "e2m1", "ue8m0", (0, 0, 2, 1)),
    ("mxf4nvf4", "m16n8k64", 2, "e2m1", "e2m1", "ue8m0", (2, 1, 0, 3)),
    ("mxf4nvf4", "m16n8k64", 4, "e2m1", "e2m1", "ue4m3", (0, 0, 0, 0)),
    ("mxf4nvf4", "m16n8k64", 4, "e2m1", "e2m1", "ue4m3", (0, 1, 0, 2)),
]


@pytest.mark.parametrize(("kind", "shape", "vectors", "name_a", "name_b", "scale", "selectors"), CASES)
def test_products(emulated, kind, shape, vectors, name_a, name_b, scale, selectors):
    byte_a, thread_a, byte_b, thread_b = selectors
    packed, k = kind != "mxf8f6f4", int(shape[6:])
    rng = np.random.default_rng(k + vectors + sum(selectors))
    tables = [model_numbers.table(name) for name in (name_a, name_b)]
    a, b = (rng.choice(np.flatnonzero(np.isfinite(t)), (rows, k)) for t, rows in zip(tables, (16, 8), strict=True))
    if packed:
        data = [(x[:, 0::2] | x[:, 1::2] << 4).astype(np.uint8) for x in (a, b)]
    else:
        data = [container(x, name) for x, name in ((a, name_a), (b, name_b))]
    words = rng.integers(118, 138, (2, 32, 4)) if scale == "ue8m0" else rng.integers(8, 120, (2, 32, 4))
    scales = np.ascontiguousarray(words.astype(np.uint8).transpose(1, 0, 2)).view(np.uint32).reshape(32, 2)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4
    c_fragment = np.stack([c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1]], 1).astype(np.float32)
    kernel = kernels.mma_sync(kind, shape, vectors, name_a, name_b, scale)
    arguments = (fragments(data[0], a_rows), fragments(data[1], b_rows), c_fragment.view(np.uint32), scales, np.array(selectors, np.uint16))
    out = emulated(kernel, *arguments, np.zeros((32, 4), np.float32), block=32)[5]

    table = model_numbers.ue8m0_table() if scale == "ue8m0" else model_numbers.table("e4m3")[:128]
    rows_a = table[words[0, [4 * (r % 8) + 2 * thread_a + r // 8 for r in range(16)], byte_a : byte_a + vectors]]
    rows_b = table[words[1, [4 * n + thread_b for n in range(8)], byte_b : byte_b + vectors]]
    x = tables[0][a] * np.repeat(rows_a, k // vectors, 1)
    y = tables[1][b] * np.repeat(rows_b, k // vectors, 1)
    expected, bound = c + x @ y.T, (np.abs(c) + np.abs(x) @ np.abs(y).T) * 2.0**-20
    got = np.empty((16, 8))
    got[g, 2 * t], got[g, 2 * t + 1], got[g + 8, 2 * t], got[g + 8, 2 * t + 1] = out.T
    assert (np.abs(got - expected) <= bound).all()
