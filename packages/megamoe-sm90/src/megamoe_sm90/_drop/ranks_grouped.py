"""The kernel on several ranks whose results return in groups: FC2 rows are staged, and a CTA that completes a block adds and sends them.

The scheduler hears of a complete block when its last FC2 task comes back. It then puts a task without a tile into the ring: the math warps,
which have many registers and nothing in them between two tiles, take the rows of the block to their groups. See megamoe.device.grouped.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, grouped, memory, stream

from .layer_config import MATH_WARPS
from .ranks import RanksMoE


class GroupedMoE(RanksMoE):
    """`self.c` is a RanksConfig with combine "grouped"."""

    @cute.jit
    def schedule(self, control, bank, ring, tfull, tempty, counts, base, bidx, grid, lane):
        """As on one rank, and a task that sends before the next one where a block has been completed; the end comes when all else is back.

        Slots come back in the order in which they were filled: `filled` tasks have been, `back` slots are or were free.
        """
        c = self.c
        words = cute.make_tensor(ring, cute.make_layout(c.task_slots * self.slot_words))
        count = cute.make_tensor(counts, cute.make_layout(c.experts))
        offsets = cute.make_tensor(base, cute.make_layout(c.experts + 1))
        blocks = offsets[c.experts]
        slot, taken, phase = Int32(0), Int32(0), Int32(1)
        filled, back = Int32(0), Int32(0)
        task = bidx
        kind = Int32(0)
        while kind != stream.END:
            kind, block, tile = stream.decode(task, blocks, c.group, c.n1, c.n2)
            if deadline.aborted(control) != 0:
                kind = Int32(stream.END)
            until = filled + 1
            if kind == stream.END:
                until = filled + c.task_slots
            while back < until or back == filled:
                self.take_back(bank, words, tempty, taken, phase, back >= c.task_slots, lane)
                complete, sent, valid = self.completed(words, taken * self.slot_words, back >= c.task_slots, control, lane)
                back = back + 1
                taken, phase = self._advance(taken, phase, c.task_slots)
                if complete != 0:
                    at = slot * self.slot_words
                    if lane == 0:
                        words[at + 4] = valid
                        words[at + 5] = sent
                        words[at] = Int32(stream.SEND)
                        cute.arch.mbarrier_arrive(tfull + slot)
                    cute.arch.sync_warp()
                    filled = filled + 1
                    slot = (slot + 1) * Int32(slot != c.task_slots - 1)
            at = slot * self.slot_words
            if kind != stream.END:
                self.describe(words, at, block, tile, count, offsets, base, lane)
            if lane == 0:
                words[at] = kind
                cute.arch.mbarrier_arrive(tfull + slot)
            task = self.claim(task, bank, grid, True, lane)
            filled = filled + 1
            slot = (slot + 1) * Int32(slot != c.task_slots - 1)

    @cute.jit
    def completed(self, words, at, used, control, lane):
        """(Whether the task that has come back was the last FC2 task of its block, the block, its rows)."""
        c, w = self.c, self.w
        block = words[at + 5]
        valid = words[at + 4]
        complete = Int32(0)
        if used and lane == 0:
            if words[at] == stream.FC2:
                if memory.add_acq_rel(w.fc2_done + Int64(block) * 4, Int32(1)) == c.n2 - 1:
                    complete = Int32(1)
        complete = cute.arch.shuffle_sync(complete, 0)
        return complete, block, valid

    def returned(self, words, at, used, lane):
        """Blocks are looked at in `schedule`."""

    @cute.jit
    def other_task(self, kind, words, at, warp, lane):
        if kind == stream.SEND:
            self.send(words[at + 5], words[at + 4], warp, MATH_WARPS, lane)

    def send(self, block, valid, warp, warps, lane):
        """The rows of a block, complete, to their groups."""
        c, w = self.c, self.w
        grouped.send_rows(
            w.table,
            w.stage,
            w.row_route,
            c.row_groups,
            c.route_rows,
            w.arrived,
            c.offset("inbox"),
            c.offset("inbox_scale"),
            c.offset("flags"),
            c.offset("weights"),
            block * c.tile_m,
            valid,
            w.launch,
            c.ranks,
            c.max_tokens,
            c.top_k,
            c.hidden,
            not c.early,
            c.mxfp8,
            c.tile_m,
            c.delays,
            w.control,
            warp,
            warps,
            lane,
        )

    @cute.jit
    def row_word(self, row_route, row, kind):
        """A row's route, below zero; where its FC2 row waits for others of its group, its number instead."""
        c = self.c
        word = memory.ld_i32(row_route + Int64(row) * 4) | Int32(-(1 << 31))
        if cutlass.const_expr(c.staged > 0):
            if kind == stream.FC2:
                if memory.ld_i32(row_route + (Int64(row) * 4 + c.row_groups)) != 0:
                    word = row
        return word

    @cute.jit
    def result_row(self, stage, word):
        c = self.c
        # An aborted launch may see a group that was never written: stay inside the staged rows.
        address = stage + Int64(cutlass.min(word, c.staged * c.tile_m - 1)) * (c.hidden * 2)
        if word < 0:
            address = self.at_source("inbox", word, c.hidden * 2)
        return address

    def collect(self):
        c, w = self.c, self.w
        grouped.collect_rows(
            w.heap,
            c.offset("inbox"),
            c.offset("inbox_scale"),
            c.offset("flags"),
            w.ids,
            w.topk_w,
            w.out,
            w.tokens,
            c.top_k,
            c.total,
            w.place,
            c.copies,
            c.experts,
            c.hidden,
            not c.early,
            c.mxfp8,
            w.launch,
            w.control,
            w.wait_ms,
            w.bidx * MATH_WARPS + w.warp,
            w.grid * MATH_WARPS,
            w.lane,
        )
