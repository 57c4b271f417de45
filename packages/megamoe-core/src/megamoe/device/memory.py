"""Loads, stores and atomics on 64-bit global addresses and on shared-memory pointers, with the ordering that each name states.

Plain Python wrappers around one PTX instruction each: they can be called from any `@cute.jit` or `@cute.kernel` body.
"""

from cutlass import Float32, Int32, Int64
from cutlass.cute import arch


def ld_i32(address):
    return arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def ld_i64(address):
    return arch.inline_ptx("ld.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def ld_i32_if(address, condition):
    """The int32 at `address`, or -1 where `condition` does not hold (nothing is read then)."""
    return arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, -1; @p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[address, Int32(condition)],
    )


def ld_f32(address):
    return arch.inline_ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def ld_v4(address):
    """Four 32-bit words from a 16-byte aligned address."""
    return arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def ld_v2(address):
    """Two 32-bit words from an 8-byte aligned address."""
    return arch.inline_ptx("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[address])


def st_i32(address, value):
    arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def st_i64(address, value):
    arch.inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def st_f32(address, value):
    arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def st_v2(address, a, b):
    arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, a, b])


def st_v4(address, a, b, c, d):
    arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, a, b, c, d])


def ld_relaxed(address):
    return arch.inline_ptx("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def ld_acquire(address):
    return arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def st_release(address, value):
    arch.inline_ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def red_release(address, value):
    arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def red_or(address, value):
    arch.inline_ptx("red.relaxed.gpu.global.or.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def add_relaxed(address, value):
    """Old value."""
    return arch.inline_ptx(
        "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def add_acq_rel(address, value):
    """Old value."""
    return arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def exchange(address, value):
    """Old value."""
    return arch.inline_ptx(
        "atom.relaxed.gpu.global.exch.b32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def shared_add(pointer, value):
    """Old value; `pointer` points into shared memory."""
    return arch.inline_ptx("atom.shared.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[pointer, value])


def shared_increment(pointer):
    arch.inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[pointer])


def copy_16(shared, address, size=16):
    """cp.async of 16 bytes, past L1; only the first `size` are read, the rest becomes zero."""
    arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared, address, size])


def copy_4(shared, address):
    """cp.async of 4 bytes, through L1: neighbouring words of the sector follow in the next steps."""
    arch.inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[shared, address])


def bulk_load(shared, address, size, barrier):
    """Asynchronous copy of `size` bytes (a multiple of 16) into shared memory; completes on `barrier`. One thread."""
    arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, address, size, barrier],
    )


def bulk_store(address, shared, size):
    """Asynchronous copy of `size` bytes (a multiple of 16) from shared memory, in the thread's bulk group. One thread."""
    arch.inline_ptx("cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=[address, shared, size])


def fence():
    """Orders this thread's earlier accesses, and what it has seen of other threads', before its later ones (gpu scope)."""
    arch.inline_ptx("fence.acq_rel.gpu;")


def proxy_fence():
    """Order what this thread has acquired before its later asynchronous-proxy (TMA, bulk copy) accesses."""
    arch.inline_ptx("fence.proxy.async;")


def shared_address(pointer):
    """The 32-bit shared-window address of a shared-memory pointer."""
    return pointer.toint()


def shared_v4(address):
    """Four int32 words from a 16-byte aligned shared-window address."""
    return arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def unsigned(word):
    """A 32-bit word as an unsigned 64-bit offset."""
    return arch.inline_ptx("cvt.u64.u32 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[word])
