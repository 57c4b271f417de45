"""Waits on global counters that always end: at the value, at the deadline, or when some other wait of the launch has failed.

Once the abort word is set no wait blocks any more and the task stream ends, so that every CTA leaves by itself; the host then reads the
record of the first wait that failed. Waits on shared-memory barriers need no deadline: what they wait for depends on warps of
the same CTA alone, and those pass every global wait in bounded time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import memory, regions

TICK = 20  # deadlines count 2 ** 20 ns (about a millisecond), so that they fit 32 bits
POLLS = 1024  # polls between two looks at the clock and the abort word


def ticks():
    return Int32(cute.arch.globaltimer() >> TICK)


def aborted(control):
    return memory.ld_relaxed(control + regions.ABORT)


@cute.jit
def tell_host(control: Int64, word: cutlass.Constexpr, value: Int32):
    """Set a word that the host can read without asking the device, if it gave one."""
    host = memory.ld_i64(control + regions.REPORT)
    if host != 0:
        memory.st_i32(host + word, value)


@cute.jit
def bad_id(control: Int64):
    """Remember that an expert id was out of range."""
    memory.red_or(control + regions.STICKY, Int32(regions.STICKY_BAD_ID))
    tell_host(control, regions.REPORT_STICKY, Int32(regions.STICKY_BAD_ID))


@cute.jit
def fail(control: Int64, site: Int32, index: Int32, expected: Int32, seen: Int32):
    """Record the wait that failed, if it is the first, and set the abort word."""
    record = control + regions.RECORD
    if memory.exchange(record, Int32(1)) == 0:
        cta, _, _ = cute.arch.block_idx()
        memory.st_i64(record + 8, Int64(site))
        memory.st_i64(record + 16, Int64(cta))
        memory.st_i64(record + 24, Int64(expected))
        memory.st_i64(record + 32, Int64(seen))
        memory.st_i64(record + 40, Int64(memory.ld_i32(control + regions.EPOCH)))
        memory.st_i64(record + 48, Int64(index))
    memory.st_release(control + regions.ABORT, Int32(1))
    tell_host(control, regions.REPORT_ABORT, Int32(1))


@cute.jit
def wait_ge(address: Int64, want: Int32, control: Int64, site: cutlass.Constexpr, index: Int32, deadline: Int32):
    """Wait until the count at `address` (int32) is at least `want`, then order all later reads behind it (acquire, gpu scope)."""
    _wait(address, want, False, control, site, index, deadline)


@cute.jit
def wait_tag(address: Int64, tag: Int32, control: Int64, site: cutlass.Constexpr, index: Int32, deadline: Int32):
    """Wait until the int32 at `address` is `tag`, a launch's own number. Numbers wrap, so there is no at least. Acquire, gpu scope."""
    _wait(address, tag, True, control, site, index, deadline)


def _lacks(seen, want, equal):
    return seen != want if equal else seen < want


@cute.jit
def _wait(
    address: Int64,
    want: Int32,
    equal: cutlass.Constexpr,
    control: Int64,
    site: cutlass.Constexpr,
    index: Int32,
    deadline: Int32,
):
    seen = memory.ld_acquire(address)
    if _lacks(seen, want, equal):
        start = ticks()
        polls = Int32(0)
        while _lacks(seen, want, equal):
            seen = memory.ld_relaxed(address)
            polls = polls + 1
            if _lacks(seen, want, equal) and polls == POLLS:
                polls = Int32(0)
                if aborted(control) != 0:
                    seen = want
                else:
                    if ticks() - start > deadline:
                        fail(control, Int32(site), index, want, seen)
                        seen = want
        memory.ld_acquire(address)
