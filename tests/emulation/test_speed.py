"""How long an emulated product takes on a Hopper GPU, issued one after the other by one CTA as kernels issue them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from . import kernels
from . import model_layout as model
from .test_mma import launch

MOST_MICROSECONDS = 200
FEW, MANY, LAUNCHES = 1, 33, 5
ROWS = COLUMNS = 128
BYTES_OF_K = 32


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("kind", "block", "types"),
    [("f16", "", 1 << 4), ("f8f6f4", "", 1 << 4), ("mxf8f6f4", ".block32", 1 << 23), ("mxf4nvf4", ".block16", 1 << 7 | 1 << 10)],
)
def test_a_product_of_128_by_128_takes_less_than_the_limit(toolkit, kind, block, types):
    from .launch import run

    idesc = types | COLUMNS >> 3 << 17 | (ROWS >> 7 << 27 if block else ROWS >> 4 << 24)
    data, descriptor = np.zeros((ROWS, BYTES_OF_K), np.uint8), model.descriptor(0, 128, 256, 16)

    def milliseconds(steps):
        text, times = kernels.mma(kind, COLUMNS, steps, block=block), []
        for _ in range(LAUNCHES):
            start = time.perf_counter()
            assert not launch(run, text, data, data, descriptor, descriptor, 0, 0, idesc, ROWS, COLUMNS).any()
            times.append((time.perf_counter() - start) * 1e3)
        return min(times)

    each = (milliseconds(MANY) - milliseconds(FEW)) * 1e3 / (MANY - FEW)
    print(f"{kind}: {each:.0f} us for each 128 by 128 product of {BYTES_OF_K} bytes of K")
    assert each < MOST_MICROSECONDS
