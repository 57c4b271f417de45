"""tcgen05.mma on the GPU: kinds, types, layouts and scales against products in float64. Commits and fences come along."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from . import kernels, model_numbers
from . import model_mma as model

TYPES = {
    "f16": (model.F16, 0),
    "bf16": (model.F16, 1),
    "tf32": (model.TF32, 2),
    "e4m3": (model.F8F6F4, 0),
    "e5m2": (model.F8F6F4, 1),
    "e2m3": (model.F8F6F4, 3),
    "e3m2": (model.F8F6F4, 4),
    "e2m1": (model.F8F6F4, 5),
    "u8": (model.I8, 0),
    "s8": (model.I8, 1),
}
KINDS = {
    model.F16: "f16",
    model.TF32: "tf32",
    model.F8F6F4: "f8f6f4",
    model.I8: "i8",
    model.MXF8F6F4: "mxf8f6f4",
    model.MXF4: "mxf4",
    model.MXF4NVF4: "mxf4nvf4",
}
NARROW = {"e2m1": 4, "e2m3": 6, "e3m2": 6}


def launch(emulated, kernel, a, b, a_descriptor, b_descriptor, a_step, b_step, idesc, lanes, columns, scales=None, **how):
    scales = np.zeros(1024, np.uint8) if scales is None else scales
    out = np.zeros((lanes, columns), np.uint32)
    rank = 2 if lanes == 256 else 1
    a_bytes, b_bytes = a.nbytes // rank, b.nbytes // rank
    arguments = (a, b, scales, out, a_bytes, b_bytes, ctypes.c_uint64(a_descriptor), ctypes.c_uint64(b_descriptor), a_step, b_step, idesc)
    shared = kernels.OPERANDS + a_bytes + b_bytes + 1024
    return emulated(kernel, *arguments, grid=rank, shared=shared, **how)[3]


def product(emulated, name_a, name_b, m=128, n=64, steps=2, width=128, major="kk", negate=0, elected=True):
    kind = TYPES[name_a][0]
    slab = 256 // model.BITS[kind]
    rng = np.random.default_rng(abs(hash((m, n, width))) % 1000 + ord(name_a[-1]))
    images = []
    for rows, name, order in ((m, name_a, major[0]), (n, name_b, major[1])):
        codes = model.random_codes(rng, (rows, slab * steps), name)
        if order == "k":
            image = model.k_major_image(model.slab_bytes(codes, kind, NARROW.get(name, 8)), width)
        else:
            image = model.mn_major_image(codes, model.BITS[kind] // 8, width, slab)
        images.append((codes, *image))
    (a, a_image, a_descriptor, a_step), (b, b_image, b_descriptor, b_step) = images
    idesc = (
        (2 if kind == model.I8 else 1) << 4 | TYPES[name_a][1] << 7 | TYPES[name_b][1] << 10 | n >> 3 << 17 | m >> 4 << 24 | negate << 13
    )
    idesc |= (major[0] != "k") << 15 | (major[1] != "k") << 16
    kernel = kernels.mma(KINDS[kind], n, steps, elected=elected)
    out = launch(emulated, kernel, a_image, b_image, a_descriptor, b_descriptor, a_step, b_step, idesc, 128, n)
    expected = model.values(a, name_a) @ model.values(b, name_b).T * (-1 if negate in (1, 2) else 1)
    lanes = np.arange(128) if m == 128 else np.array([lane for lane in range(128) if lane % 32 < 16])
    got = out[lanes].view(np.int32 if kind == model.I8 else np.float32).astype(np.float64)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", TYPES)
def test_types(emulated, name):
    product(emulated, name, name)


def test_mixed_types(emulated):
    product(emulated, "e4m3", "e2m1")
    product(emulated, "e3m2", "e5m2")


@pytest.mark.parametrize("width", [128, 64, 32])
def test_swizzles(emulated, width):
    product(emulated, "f16", "f16", steps=width // 32, width=width)


def test_without_swizzle(emulated):
    product(emulated, "f16", "f16", steps=1, width=16)


@pytest.mark.parametrize("major", ["mk", "km", "mm"])
@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_mn_major_operands(emulated, name, major):
    product(emulated, name, name, n=128, steps=2, major=major)


@pytest.mark.parametrize("width", [64, 32])
def test_mn_major_swizzles(emulated, width):
    product(emulated, "f16", "f16", steps=1, width=width, major="mm")


@pytest.mark.parametrize(("m", "n"), [(64, 8), (64, 256), (128, 8), (128, 256)])
def test_shapes(emulated, m, n):
    product(emulated, "f16", "f16", m=m, n=n)


@pytest.mark.parametrize("negate", [1, 2, 3])
def test_negated_operands(emulated, negate):
    product(emulated, "f16", "f16", n=16, negate=negate)


@pytest.mark.parametrize("name", ["f16", "e4m3"])
def test_one_thread_does_what_the_warp_does(emulated, name):
    """Without an election the issuing thread does it all, slowly: other code, same result."""
    product(emulated, name, name, m=64, n=8, steps=1, width=32, elected=False)


def test_a_pair_of_ctas(emulated):
    rng = np.random.default_rng(5)
    a, b = model.random_codes(rng, (256, 64), "f16"), model.random_codes(rng, (64, 64), "f16")
    images_a = [model.k_major_image(model.slab_bytes(half, model.F16, 16), 128) for half in np.split(a, 2)]
    images_b = [model.k_major_image(model.slab_bytes(half, model.F16, 16), 128) for half in np.split(b, 2)]
    image_a, image_b = (np.concatenate([image for image, _, _ in images]) for images in (images_a, images_b))
    idesc = 1 << 4 | 64 >> 3 << 17 | 256 >> 4 << 24
    kernel = kernels.mma("f16", 64, 4, group=2)
    out = launch(emulated, kernel, image_a, image_b, images_a[0][1], images_b[0][1], 2, 2, idesc, 256, 64)
    np.testing.assert_array_equal(out.view(np.float32), model.values(a, "f16") @ model.values(b, "f16").T)


SCALED = [
    # kind, block, types, scale type, code of the types, scale ids
    (model.MXF8F6F4, 32, "e4m3", "e4m3", "ue8m0", (0, 0), (0, 0)),
    (model.MXF8F6F4, 32, "e5m2", "e4m3", "ue8m0", (1, 0), (2, 1)),
    (model.MXF8F6F4, 32, "e2m1", "e3m2", "ue8m0", (5, 4), (0, 3)),
    (model.MXF4, 32, "e2m1", "e2m1", "ue8m0", (1, 1), (0, 2)),
    (model.MXF4NVF4, 32, "e2m1", "e2m1", "ue8m0", (1, 1), (2, 0)),
    (model.MXF4NVF4, 16, "e2m1", "e2m1", "ue4m3", (1, 1), (0, 0)),
    (model.MXF4NVF4, 16, "e2m1", "e2m1", "ue8m0", (1, 1), (0, 0)),
]


@pytest.mark.parametrize(("kind", "block", "name_a", "name_b", "scale", "types", "ids"), SCALED)
def test_block_scales(emulated, kind, block, name_a, name_b, scale, types, ids):
    m = n = 128
    k = 256 // model.BITS[kind]
    rng = np.random.default_rng(kind * 10 + block)
    blocks = k // block
    a, b = model.random_codes(rng, (m, k), name_a), model.random_codes(rng, (n, k), name_b)
    images = [
        model.k_major_image(model.slab_bytes(c, kind, 4 if kind > 4 else NARROW.get(t, 8)), 32) for c, t in ((a, name_a), (b, name_b))
    ]
    table = model_numbers.ue8m0_table() if scale == "ue8m0" else model_numbers.table("e4m3")[:128]
    scales = [rng.integers(120, 135, (m, 4)) if scale == "ue8m0" else rng.integers(8, 120, (m, 4)) for _ in range(2)]
    idesc = ids[1] << 4 | types[0] << 7 | types[1] << 10 | n >> 3 << 17 | (scale == "ue8m0") << 23 | m >> 7 << 27 | ids[0] << 29
    kernel = kernels.mma(KINDS[kind], n, 1, block=f".block{block}")
    image = model.scale_image(*scales)
    out = launch(emulated, kernel, images[0][0], images[1][0], images[0][1], images[1][1], 0, 0, idesc, 128, n, image).view(np.float32)
    factors = [np.repeat(table[s[:, i : i + blocks]], block, 1) for s, i in zip(scales, ids, strict=True)]
    x, y = model.values(a, name_a) * factors[0], model.values(b, name_b) * factors[1]
    bound = np.abs(x) @ np.abs(y).T * 2.0**-20
    assert (np.abs(out - x @ y.T) <= bound).all()
