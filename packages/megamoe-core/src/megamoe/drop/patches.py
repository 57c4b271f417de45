"""Pending local diffs: unified diffs against the original files, applied and undone strictly (no fuzz, no offset)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megamoe.drop.faults import Fault

FOLDER = "drop_patches"
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_NOWHERE = b"/dev/null"


class PatchFailed(Exception):
    """A diff that is malformed or does not fit. Carries the :class:`Fault`, whose place is in the diff."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))


@dataclass(slots=True)
class _Hunk:
    line: int
    start: dict[bool, int]
    text: dict[bool, list[bytes]] = field(default_factory=lambda: {False: [], True: []})


@dataclass(slots=True)
class _FileDiff:
    line: int
    path: dict[bool, str | None]
    hunks: list[_Hunk] = field(default_factory=list)


def apply(files: dict[str, bytes], diff: bytes, shown: str, *, undo: bool = False) -> dict[str, bytes]:
    """Files with a unified diff applied, or undone.

    Args:
        files: contents by path relative to the root of the drop; left as it is.
        diff: the diff; paths may have git's ``a/`` and ``b/`` in front.
        shown: the diff's path for messages.
        undo: go from the patched files to the originals.

    Raises:
        PatchFailed: malformed, or a line differs from what the diff expects.
    """
    result = dict(files)
    for change in _parse(diff, shown):
        source, target = change.path[undo], change.path[not undo]
        if source is not None and source not in result:
            raise PatchFailed(Fault(shown, change.line, f"changes {source}, which is not there"))
        if source is None and target in result:
            raise PatchFailed(Fault(shown, change.line, f"adds {target}, which is there already"))
        before = result.pop(source) if source is not None else b""
        after = _patched(before, change, shown, undo)
        if target is not None:
            result[target] = after
        elif after:
            raise PatchFailed(Fault(shown, change.line, f"removes {source}, but not all of its lines"))
    return result


def _patched(before: bytes, change: _FileDiff, shown: str, undo: bool) -> bytes:
    lines = _LINE.findall(before)
    out: list[bytes] = []
    at = 0
    for hunk in change.hunks:
        old, new = hunk.text[undo], hunk.text[not undo]
        # A hunk without old lines names the line that it follows.
        begin = hunk.start[undo] - 1 if old else hunk.start[undo]
        if begin < at or lines[begin : begin + len(old)] != old:
            raise PatchFailed(Fault(shown, hunk.line, f"this hunk does not fit {change.path[undo]} at line {begin + 1}"))
        out += [*lines[at:begin], *new]
        at = begin + len(old)
    return b"".join([*out, *lines[at:]])


def _parse(diff: bytes, shown: str) -> Iterator[_FileDiff]:
    lines = _LINE.findall(diff)
    index, current = 0, None
    while index < len(lines):
        line = lines[index]
        if line.startswith(b"--- ") and index + 1 < len(lines) and lines[index + 1].startswith(b"+++ "):
            if current:
                yield current
            current = _FileDiff(index + 1, {False: _path(line), True: _path(lines[index + 1])})
            index += 2
        elif header := _HUNK.match(line):
            if current is None:
                raise PatchFailed(Fault(shown, index + 1, "a hunk comes before the file it is for"))
            hunk = _Hunk(index + 1, {False: int(header[1]), True: int(header[3])})
            index = _read_hunk(lines, index + 1, hunk, int(header[2] or 1), int(header[4] or 1), shown)
            current.hunks.append(hunk)
        elif line.startswith((b"GIT binary", b"Binary files", b"rename ", b"copy ")):
            raise PatchFailed(Fault(shown, index + 1, "only changes of text are taken, no binaries, renames or copies"))
        else:
            index += 1  # headings between the files
    if current is None:
        raise PatchFailed(Fault(shown, 1, "holds no unified diff"))
    yield current


def _read_hunk(lines: list[bytes], index: int, hunk: _Hunk, old: int, new: int, shown: str) -> int:
    left = {False: old, True: new}
    sides = {b" ": (False, True), b"-": (False,), b"+": (True,)}
    last: tuple[bool, ...] = ()
    while index < len(lines) and (left[False] or left[True] or lines[index].startswith(b"\\")):
        mark, text = lines[index][:1], lines[index][1:]
        if mark == b"\\":  # "\ No newline at end of file", about the line before
            for side in last:
                hunk.text[side][-1] = hunk.text[side][-1].removesuffix(b"\n")
        elif mark in sides:
            last = sides[mark]
            for side in last:
                hunk.text[side].append(text)
                left[side] -= 1
        else:
            break
        index += 1
    if left[False] or left[True]:
        raise PatchFailed(Fault(shown, index + 1, "the hunk ends before the number of lines in its heading"))
    return index


def _path(line: bytes) -> str | None:
    name = line[4:].rstrip(b"\r\n").split(b"\t")[0]
    if name == _NOWHERE:
        return None
    text = name.decode(errors="replace")
    return text[2:] if text.startswith(("a/", "b/")) else text
