"""The task order and the expert search, run on the host by CuTe DSL: every task once, FC1 before FC2, and room between them."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int32
from cutlass.cute.runtime import make_ptr

from megamoe.device import routing, stream


@cute.jit
def _decode_all(out: cute.Pointer, tasks: Int32, blocks: Int32, group: cutlass.Constexpr, n1: cutlass.Constexpr, n2: cutlass.Constexpr):
    table = cute.make_tensor(out, cute.make_layout((tasks, 3), stride=(3, 1)))
    for i in cutlass.range(tasks, unroll=1):
        kind, block, tile = stream.decode(i, blocks, group, n1, n2)
        table[i, 0] = kind
        table[i, 1] = block
        table[i, 2] = tile


@cute.jit
def _search_all(out: cute.Pointer, base: cute.Pointer, blocks: Int32, experts: cutlass.Constexpr):
    table = cute.make_tensor(out, cute.make_layout(blocks))
    for i in cutlass.range(blocks, unroll=1):
        table[i] = routing.search_expert(i, base, experts)


def _pointer(array):
    return make_ptr(Int32, array.ctypes.data, cute.AddressSpace.generic, assumed_align=4)


@pytest.mark.parametrize(("group", "n1", "n2"), [(1, 1, 1), (2, 3, 4), (17, 16, 28), (44, 6, 8), (5, 24, 1)])
def test_every_task_once_and_in_order(group, n1, n2):
    largest = 4 * group + 3
    table = np.empty((largest * (n1 + n2) + 5, 3), np.int32)
    run = cute.compile(_decode_all, _pointer(table), Int32(1), Int32(1), group, n1, n2)
    for blocks in sorted({0, 1, 2, group - 1, group, group + 1, 2 * group, 2 * group + 1, 3 * group, largest}):
        total = blocks * (n1 + n2)
        run(_pointer(table), Int32(total + 5), Int32(blocks))
        tasks = [tuple(int(v) for v in row) for row in table[: total + 5]]
        assert [kind for kind, _, _ in tasks[total:]] == [stream.END] * 5
        expected = {(kind, b, t) for kind, n in ((stream.FC1, n1), (stream.FC2, n2)) for b in range(blocks) for t in range(n)}
        assert len(tasks[:total]) == len(expected)
        assert set(tasks[:total]) == expected
        at = {task: i for i, task in enumerate(tasks[:total])}
        for b in range(blocks):
            last_fc1 = max(at[stream.FC1, b, t] for t in range(n1))
            first_fc2 = min(at[stream.FC2, b, t] for t in range(n2))
            assert last_fc1 < first_fc2
            # All of the next group's FC1 lies between, where there is a next group.
            following = range((b // group + 1) * group, min((b // group + 2) * group, blocks))
            assert first_fc2 - last_fc1 > len(following) * n1 - 1


@pytest.mark.parametrize("experts", [1, 2, 3, 31, 32, 33, 128, 511, 512])
def test_expert_of_every_block(experts):
    generator = np.random.default_rng(experts)
    base = np.zeros(experts + 1, np.int32)
    run = cute.compile(_search_all, _pointer(base), _pointer(base), Int32(1), experts)
    for most in (1, 2, 5):
        owned = generator.integers(0, most + 1, experts)  # experts without a block among them
        base[1:] = np.cumsum(owned)
        found = np.full(max(int(base[-1]), 1), -1, np.int32)
        run(_pointer(found), _pointer(base), Int32(int(base[-1])))
        assert found[: base[-1]].tolist() == np.repeat(np.arange(experts), owned).tolist()
