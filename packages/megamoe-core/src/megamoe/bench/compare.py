"""Two result files point by point: the ratio of their times, and the geometric mean over the points that both have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megamoe.bench.results import Point


@dataclass(frozen=True, slots=True)
class Ratio:
    """One workload in both files; ``ratio`` above 1 means that the second is slower. ``noise`` is the larger of the two spreads."""

    old: Point
    new: Point

    @property
    def ratio(self) -> float:
        return self.new.ms / self.old.ms

    @property
    def noise(self) -> float:
        return max(self.old.spread, self.new.spread)

    def slower(self, tolerance: float) -> bool:
        """Whether the second is slower by more than the tolerance and by more than the spread of the measurements."""
        return self.ratio > 1 + max(tolerance, self.noise)


def ratios(old: Sequence[Point], new: Sequence[Point]) -> list[Ratio]:
    """Workloads that both have, in the order of the second."""
    before = {point.key: point for point in old}
    return [Ratio(before[point.key], point) for point in new if point.key in before]


def geometric_mean(values: Iterable[float]) -> float:
    """NaN for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
