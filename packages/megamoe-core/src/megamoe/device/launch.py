"""Begin and end of a launch: the epoch, the two banks of counters, and the exit of the last CTA.

The epoch lives in device memory and is advanced by the last CTA, so a replayed graph advances it like an eager launch. Counters have
two banks by the parity of the epoch; a launch counts in its own bank and clears the other one, which nobody uses until the next launch.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import memory, regions


def epoch_of(control):
    return memory.ld_i32(control + regions.EPOCH)


def bank_of(control, epoch, bank_bytes):
    return control + regions.BANKS + Int64((epoch & 1) * bank_bytes)


@cute.jit
def clear_next_bank(control: Int64, epoch: Int32, bank_bytes: Int32, thread: Int32, threads: Int32):
    """Zero the bank of the next launch; `thread` of `threads` over the whole grid."""
    base = bank_of(control, epoch + 1, bank_bytes)
    i = thread
    while i < bank_bytes // 4:
        memory.st_i32(base + Int64(i) * 4, Int32(0))
        i = i + threads


@cute.jit
def leave(control: Int64, grid: Int32):
    """Called by one thread a CTA after its last access to the workspace: the last CTA advances the epoch."""
    if memory.add_acq_rel(control + regions.EXITS, Int32(1)) == grid - 1:
        memory.st_i32(control + regions.EXITS, Int32(0))
        memory.st_i32(control + regions.EPOCH, memory.ld_relaxed(control + regions.EPOCH) + 1)
