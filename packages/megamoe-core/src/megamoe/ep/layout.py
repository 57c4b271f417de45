"""Named regions one after another in a block of memory. Plain Python: planners and kernel configurations use it without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megamoe.errors import InvalidInput

ALIGN = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """Named regions one after another.

    Attributes:
        offsets: region name -> (byte offset, bytes).
        nbytes: of all of them.
    """

    offsets: Mapping[str, tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Layout:
        """From region name -> bytes, in order; each starts at a multiple of :data:`ALIGN`."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            if size < 0:
                raise InvalidInput(f"region {name} has {size} bytes; allowed: 0 and more.", hint="check the sizes of the plan")
            offsets[name] = (end, size)
            end += -(-size // ALIGN) * ALIGN
        return cls(offsets, end)
