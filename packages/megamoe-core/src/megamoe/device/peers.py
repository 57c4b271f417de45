"""Words in peers' memory: system-scope loads and stores, waits that end, and telling peers that this rank gave up.

A peer's region lies at `table[rank] + offset`. The table is read from global memory, so that any number of ranks fits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory, wire

POLLS = 256  # polls between two looks at the clock and the abort words


def ld_acquire(address):
    return cute.arch.inline_ptx("ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def ld_relaxed(address):
    return cute.arch.inline_ptx("ld.relaxed.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def st_relaxed(address, value):
    cute.arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def st_release_gpu(address, value):
    """For words between CTAs of this rank."""
    cute.arch.inline_ptx("st.release.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def fence():
    """Orders what this thread wrote, and what it has seen of other threads' writes, before its later stores to peers."""
    cute.arch.inline_ptx("fence.acq_rel.sys;")


def base_of(table, rank):
    """Where the heap of `rank` lies in this process."""
    return memory.ld_i64(table + Int64(rank) * 8)


def word(launch, value):
    return (Int64(launch) << 32) | Int64(value)


def source_of(route, ranks):
    """Source rank of a travelling route. An aborted launch may see a route that was never written: stay among the ranks."""
    return cutlass.min((route >> wire.ROUTE_BITS) & 0x7F, ranks - 1)


def route_of(route, most):
    """Route within its source rank, below `most`."""
    return cutlass.min(route & (wire.MOST_ROUTES - 1), most - 1)


@cute.jit
def delay(on: cutlass.Constexpr):
    """Up to 16 us, different every time: a test's way to shake the order of things."""
    if cutlass.const_expr(on):
        time = Int32(cute.arch.globaltimer())
        nanoseconds = (time * Int32(-1640531535)) & 0x3FFF
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[nanoseconds])


@cute.jit
def wait_word(address: Int64, launch: Int32, control: Int64, signal: Int64, site: cutlass.Constexpr, index: Int32, wait_ms: Int32):
    """Wait for the word of this launch and return its value; 0 when the launch is aborted. Orders later reads (acquire, system scope)."""
    seen = ld_acquire(address)
    if Int32(seen >> 32) != launch:
        start = deadline.ticks()
        polls = Int32(0)
        waiting = Int32(1)
        while waiting != 0:
            seen = ld_acquire(address)
            polls = polls + 1
            if Int32(seen >> 32) == launch:
                waiting = Int32(0)
            else:
                if polls == POLLS:
                    polls = Int32(0)
                    told = Int32(ld_relaxed(signal + wire.TOLD))
                    if deadline.aborted(control) != 0:
                        waiting = Int32(0)
                    else:
                        if told != 0:
                            deadline.fail(control, Int32(wire.SITE_TOLD), told - 1, Int32(0), Int32(0))
                            waiting = Int32(0)
                        else:
                            if deadline.ticks() - start > wait_ms:
                                deadline.fail(control, Int32(site), index, launch, Int32(seen >> 32))
                                waiting = Int32(0)
    return Int32(seen) * Int32(Int32(seen >> 32) == launch)


@cute.jit
def look(address: Int64, launch: Int32):
    """The value of the word of this launch, -1 while it is not there. Orders later reads (acquire, system scope)."""
    seen = ld_acquire(address)
    value = Int32(-1)
    if Int32(seen >> 32) == launch:
        value = Int32(seen)
    return value


@cute.jit
def tell_abort(table: Int64, rank: Int32, ranks: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr):
    """Let the launches of all peers end, by `threads` threads."""
    peer = thread
    while peer < ranks:
        if peer != rank:
            st_relaxed(base_of(table, peer) + wire.TOLD, Int64(rank + 1))
        peer = peer + threads
