"""The GPU machine code inside a compiled object, and what it uses: read from the ELF images themselves, no CUDA tool needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MACHINE_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8
# Attribute codes and formats of .nv.info (ELF sections that ptxas writes): one byte format, one byte code, then a value or a length.
_SIZED = 4
_REGISTERS = 0x2F
_FRAME = 0x11


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses.

    Attributes:
        kernel: its symbol name.
        registers: per thread at launch (``setmaxnreg`` redistributes them later).
        stack_bytes: local memory per thread for its stack frame: 0 when nothing spills.
        code_bytes: size of its machine code.
    """

    kernel: str
    registers: int
    stack_bytes: int
    code_bytes: int


def images(data: bytes) -> Iterator[bytes]:
    """Every CUDA ELF image that lies in ``data`` (a compiled object), in order."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if len(data) - at >= _HEADER.size:
            header = _HEADER.unpack_from(data, at)
            if header[2] == _MACHINE_CUDA:
                # Section and program headers may lie before or after the sections, so the end is the largest of the three.
                sections = _sections(data, at)
                ends = [offset + size for _, kind, offset, size, _ in sections if kind != _NOBITS]
                end = max(header[6] + header[11] * header[12], header[5] + header[9] * header[10], *ends)
                yield data[at : at + end]
        at = data.find(b"\x7fELF", at + 4)


def resources(image: bytes) -> tuple[Resources, ...]:
    """What each kernel of a CUDA ELF image uses, by name."""
    sections = _sections(image, 0)
    names = _HEADER.unpack_from(image, 0)[13]
    strings = _bytes(image, sections[names])
    by_name = {_string(strings, section[0]): section for section in sections}
    symbols = _symbols(image, by_name)
    per_symbol: dict[int, dict[int, int]] = {}
    for code, payload in _info(_bytes(image, by_name[".nv.info"])):
        if code in (_REGISTERS, _FRAME):
            symbol, value = struct.unpack_from("<II", payload)
            per_symbol.setdefault(symbol, {})[code] = value
    found = []
    for symbol, values in per_symbol.items():
        text = by_name.get(f".text.{symbols[symbol]}")
        if text and _REGISTERS in values:
            found.append(Resources(symbols[symbol], values[_REGISTERS], values.get(_FRAME, 0), text[3]))
    return tuple(sorted(found, key=lambda r: r.kernel))


def _sections(data: bytes, base: int) -> list[tuple[int, int, int, int, int]]:
    """(name offset, type, offset, size, link) of every section of the image at ``base``."""
    header = _HEADER.unpack_from(data, base)
    rows = (_SECTION.unpack_from(data, base + header[6] + i * header[11]) for i in range(header[12]))
    return [(row[0], row[1], row[4], row[5], row[6]) for row in rows]


def _bytes(image: bytes, section: tuple[int, int, int, int, int]) -> bytes:
    return image[section[2] : section[2] + section[3]]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _symbols(image: bytes, by_name: dict[str, tuple[int, int, int, int, int]]) -> list[str]:
    table, strings = _bytes(image, by_name[".symtab"]), _bytes(image, by_name[".strtab"])
    return [_string(strings, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)]


def _info(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, code, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield code, data[at : at + size]
            at += size
