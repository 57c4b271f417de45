"""The fault record of an emulated module: what the device writes, as an error that names the instruction."""

from __future__ import annotations

import struct

from megamoe.emulation.rewrite import Rewritten
from megamoe.errors import EmulationFault

RECORD = struct.Struct("<IIIIQQ")
"""claimed, code, line, CTA, two values: ``struct Fault`` of ``device/state.cuh``."""

CODES: dict[int, tuple[str, str]] = {
    1: ("timeout", "waited past its deadline on barrier 0x{first:x}: an arrival, a commit or its bytes never came"),
    2: ("tmem-bounds", "touches tensor memory columns {first} to {last} that its CTA has not allocated"),
    3: ("tmem-alloc-size", "asks for {first} tensor memory columns; allowed: 32, 64, 128, 256, 512"),
    4: ("tmem-relinquished", "allocates {first} tensor memory columns after relinquish_alloc_permit"),
    5: ("tmem-dealloc", "frees {second} tensor memory columns at 0x{first:x} that its CTA does not hold"),
    6: ("tmem-leftover", "leaves tensor memory behind (32-column chunks, as bits: 0x{first:x})"),
    7: ("sub-partition", "address 0x{first:x} names lanes that warp {second} of its warpgroup cannot reach"),
    8: ("descriptor", "has an illegal shared-memory matrix descriptor 0x{first:016x}: {descriptor}"),
    9: ("idesc", "has an illegal instruction descriptor 0x{first:08x}: {idesc}"),
    10: ("shared-limit", "is launched with {first} bytes of shared memory; the real architecture has {second}"),
    11: ("shared-bounds", "has matrix descriptors 0x{first:016x} and 0x{second:016x} that reach beyond the CTA's shared memory"),
    12: ("tensor-map", "has a tensor map that cannot be emulated ({map})"),
    13: ("not-emulated", "uses a part of its instruction descriptor 0x{first:08x} that has no replacement"),
    14: ("mma-pair", "issues a cta_group::2 operation from CTA {first} of its cluster, which is not the even one of its pair"),
    15: ("tmem-alignment", "begins at tensor memory column {first}, which is no multiple of {second}: legal, but not emulated"),
}
_DESCRIPTOR = ("", "bits 46-48 must hold 1", "no such swizzle", "a base offset", "bits 53-60 must be 0", "the leading-dimension mode")
_IDESC = (
    "",
    "sparse",
    "type of D",
    "type of A",
    "type of B",
    "N",
    "M",
    "a reserved bit",
    "type of the scales",
    "a transposed operand",
    "K = 96",
    "scale id",
)
_MAP = ("", "version", "interleave, fill or swizzle atoms", "element strides")


def read_fault(record: bytes, module: Rewritten) -> EmulationFault | None:
    """The error in a record; ``None`` when the kernel did nothing wrong.

    Args:
        record: bytes of ``megamoe_fault``.
        module: where the line is looked up.
    """
    _, code, line, cta, first, second = RECORD.unpack_from(record)
    if not code:
        return None
    name, text = CODES[code]

    def word(words: tuple[str, ...]) -> str:
        return words[second] if second < len(words) else str(second)

    what = text.format(
        first=first, second=second, last=first + second - 1, descriptor=word(_DESCRIPTOR), idesc=word(_IDESC), map=word(_MAP)
    )
    subject = f"Line {line} of the PTX, {module.instruction(line)}," if line else "A kernel"
    return EmulationFault(f"{subject} {what} (CTA {cta}).", code=name, line=line)
