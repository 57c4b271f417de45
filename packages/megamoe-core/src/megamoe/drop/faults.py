"""What is wrong with a drop, and where: one line per fault, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megamoe.errors import DropError


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One thing that is not as it must be.

    Attributes:
        file: the file, as a path the reader can open.
        line: line in it, from 1; 1 also where the fault is the whole file.
        text: what is wrong.
        expected: what was relied on, where the fault is a difference.
        found: what is there instead.
    """

    file: str
    line: int
    text: str
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        difference = f" (expected {self.expected}, found {self.found})" if self.expected or self.found else ""
        return f"{self.file}:{self.line}: {self.text}{difference}"


class DropRefused(DropError):
    """A drop operation that was refused before anything changed on disk.

    Attributes:
        faults: every fault found, in file and line order; each stands on its own line of the message.
    """

    def __init__(self, what: str, faults: Iterable[Fault], *, hint: str | None = None) -> None:
        self.faults = tuple(sorted(faults))
        super().__init__("\n".join([what, *(f"  {fault}" for fault in self.faults)]) + ("\n" if hint else ""), hint=hint)
