"""Tunables: what may be set, stated once and used by validation, heuristics and tuners alike. Importing this package loads no torch."""

from __future__ import annotations

from megamoe.tune.search import Tunable
from megamoe.tune.space import Knob, Space

__all__ = ["Knob", "Space", "Tunable"]
