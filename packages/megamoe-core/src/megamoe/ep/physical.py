"""Where logical experts live, as kernels read it: physical expert ``rank * width + slot``, and for every logical expert its copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe.problem import Placement


@dataclass(frozen=True, slots=True)
class PhysicalExperts:
    """A placement as a table.

    Attributes:
        width: physical experts of a rank: the most that any rank holds, at least 1. A rank that holds fewer leaves its last ones unused.
        copies: columns of copies in the table; 0 when every expert has one copy and physical experts are the logical ones in order, so
            that no table is needed.
        rows: for every logical expert the number of its copies, then the copies, padded with zeros: ``copies + 1`` numbers (two columns
            where ``copies`` is 0).
    """

    width: int
    copies: int
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placement: Placement, experts: int) -> PhysicalExperts:
        """From a placement of ``experts`` logical experts."""
        width = max(1, *map(len, placement.local))
        found = [[rank * width + slot for rank, slot in pairs] for pairs in placement.replicas(experts)]
        most = max(map(len, found))
        ordered = found == [[expert] for expert in range(experts)]
        rows = tuple((len(copies), *copies, *[0] * (most - len(copies))) for copies in found)
        return cls(width, 0 if ordered else most, rows)
