"""What an examination finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
ORDER: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying.

    Attributes:
        level: ``"error"`` stops something from working, ``"warning"`` may, ``"note"`` is for information.
        text: what was found, as a sentence.
        fix: the command or the change that ends it; empty when there is nothing to do.
    """

    level: Level
    text: str
    fix: str = ""
