"""Latency against tokens, one panel a shape, with the floor under the measured roof. Written as SVG, so nothing is needed to draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from megamoe.bench.results import Point

_WIDTH, _HEIGHT = 420, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 44
_LEGEND = 30
_STYLES = {  # colour, dash
    "megamoe": ("#0b6e4f", ""),
    "megamoe from bf16": ("#6abf9e", "6 3"),
    "flashinfer": ("#b5179e", ""),
    "unfused": ("#f08a24", ""),
    "floor": ("#555555", "2 3"),
}
_OTHER = ("#4361ee", "")


@dataclass(frozen=True, slots=True)
class _Axis:
    """Logarithmic axis from ``low`` to ``high`` onto pixels ``first`` to ``last``."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.first + share * (self.last - self.first)


def svg(environment: Mapping[str, object], points: Sequence[Point]) -> str:
    """A figure of all points: panels by shape, format and routing; at most three beside each other."""
    panels: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        panels.setdefault(point.key[:3], []).append(point)
    across = min(3, max(1, len(panels))) if len(panels) != 4 else 2
    down = -(-len(panels) // across)
    width, height = across * _WIDTH, down * _HEIGHT + _LEGEND
    title = f"{environment.get('gpu', '')} {environment.get('date', '')}".strip()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f"<title>{escape(f'latency against tokens, {title}')}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    names: dict[str, None] = {}
    for index, (key, group) in enumerate(panels.items()):
        lines = _lines(group)
        names |= dict.fromkeys(lines)
        parts.append(f'<g transform="translate({index % across * _WIDTH},{index // across * _HEIGHT + _LEGEND})">')
        parts += _panel(" ".join(part for part in key if part != "random"), lines)
        parts.append("</g>")
    parts += _legend(names, title, width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(points: Iterable[Point]) -> dict[str, list[tuple[int, float]]]:
    """Name -> (tokens, microseconds), by tokens."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for point in sorted(points, key=lambda p: p.tokens):
        times: list[tuple[str | None, float | None]] = [("megamoe", point.ms), ("megamoe from bf16", point.bf16_ms)]
        times += [(point.peer, point.peer_ms), *point.others.items(), ("floor", point.floor_ms)]
        for name, ms in times:
            if name is not None and ms is not None:
                lines.setdefault(name, []).append((point.tokens, 1000 * ms))
    return lines


def _panel(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> list[str]:
    tokens = sorted({x for line in lines.values() for x, _ in line})
    times = [y for line in lines.values() for _, y in line]
    # A single token count still needs an axis of some length.
    x = _Axis(tokens[0] / 1.2, tokens[-1] * 1.2, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(min(times) / 1.4, max(times) * 1.4, _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<text x="{_LEFT}" y="{_TOP - 12}" font-size="13" font-weight="bold">{escape(title)}</text>']
    for count in tokens:
        parts.append(f'<line x1="{x(count):.1f}" x2="{x(count):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x(count):.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{count}</text>')
    for value in _ticks(y.low, y.high):
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">tokens</text>'
        f'<text x="14" y="{(_TOP + _HEIGHT - _BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(_TOP + _HEIGHT - _BOTTOM) / 2})">microseconds</text>'
    )
    for name, line in lines.items():
        colour, dash = _STYLES.get(name, _OTHER)
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>')
        if name != "floor":
            parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6" fill="{colour}"/>' for a, b in line]
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the ends."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in (1, 2, 5) if low <= digit * 10.0**decade <= high]


def _legend(names: Iterable[str], title: str, width: int) -> list[str]:
    parts, at = [], 12
    for name in names:
        colour, dash = _STYLES.get(name, _OTHER)
        parts.append(f'<line x1="{at}" x2="{at + 24}" y1="16" y2="16" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(f'<text x="{at + 29}" y="20">{escape(name)}</text>')
        at += 45 + 7 * len(name)
    return [*parts, f'<text x="{width - 12}" y="20" text-anchor="end" fill="#777777">{escape(title)}</text>']
