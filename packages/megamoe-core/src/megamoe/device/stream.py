"""The order of tasks: FC1 of a group of row blocks, then FC2 of the group before it, so that FC2 never waits behind its own FC1.

A task number is decoded in closed form from four figures: blocks in all, blocks a group, FC1 tasks and FC2 tasks a block. Groups are cut by
block count, not by expert, so nothing has to be stored. Inside a group the weight tile is the slow index and the row block the fast one:
CTAs that work at the same time share weights.

    FC1(0)  FC1(1) FC2(0)  FC1(2) FC2(1)  ...  FC1(last) FC2(last - 1) FC2(last)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

FC1 = 0
FC2 = 1
END = 2
SEND = 3  # not in the stream: a CTA that completes FC2 of a block returns its rows


@cute.jit
def decode(task: Int32, blocks: Int32, group: cutlass.Constexpr, n1: cutlass.Constexpr, n2: cutlass.Constexpr):
    """Task number -> (kind, block, weight tile)."""
    kind = Int32(END)
    block = Int32(0)
    tile = Int32(0)
    if task < blocks * (n1 + n2):
        groups = (blocks + group - 1) // group
        if task < cutlass.min(blocks, group) * n1:
            kind = Int32(FC1)
            size = cutlass.min(blocks, group)
            tile = task // size
            block = task - tile * size
        else:
            r = task - cutlass.min(blocks, group) * n1
            # Step s holds FC1(s + 1) and FC2(s); the last one also FC2(s + 1) where there is more than one group.
            s = cutlass.max(cutlass.min(r // (group * (n1 + n2)), groups - 2), 0)
            r = r - s * (group * (n1 + n2))
            second = cutlass.max(cutlass.min(blocks - (s + 1) * group, group), 0)
            first = cutlass.min(blocks - s * group, group)
            if r < second * n1:
                kind = Int32(FC1)
                tile = r // second
                block = (s + 1) * group + (r - tile * second)
            else:
                kind = Int32(FC2)
                r = r - second * n1
                if r < first * n2:
                    tile = r // first
                    block = s * group + (r - tile * first)
                else:
                    r = r - first * n2
                    tile = r // second
                    block = (s + 1) * group + (r - tile * second)
    return kind, block, tile
