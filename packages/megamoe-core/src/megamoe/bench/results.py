"""The result file: ``{"environment": {...}, "points": [{"shape", "tokens", "format", "ms", "spread", "peer", "peer_ms", ...}]}``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megamoe.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Point:
    """One measured workload.

    Attributes:
        shape, tokens, format, routing: the workload; a file has one point for each combination.
        ms: median time of one launch from quantized activations, in milliseconds.
        spread: (slowest - fastest repeat) / median.
        bf16_ms: the whole layer call from bf16 activations; ``None`` when not run or the same thing.
        peer, peer_ms: whom the same run measured beside it, when there was one.
        others: time of every other contestant, in milliseconds.
        floor_ms: least time under the roof of the environment.
        touched: experts with at least one route, mean over the input sets.
        rel_l2: error of the sampled tokens against the oracle in the same run.
        commit: source that was measured.
        detail: what the contestants chose to run.
    """

    shape: str
    tokens: int
    format: str
    routing: str
    ms: float
    spread: float
    floor_ms: float
    touched: float
    tflops: float
    tb_s: float
    rel_l2: float | None = None
    bf16_ms: float | None = None
    peer: str | None = None
    peer_ms: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    commit: str = ""
    detail: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What identifies the workload."""
        return self.shape, self.format, self.routing, self.tokens

    @property
    def over_floor(self) -> float:
        """Time as a multiple of the floor."""
        return self.ms / self.floor_ms


def environment(roof: Mapping[str, float]) -> dict[str, object]:
    """Where and with what the points were measured."""
    import torch

    from megamoe import backends

    found: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "wheels": {str(record.name): str(record.version) for record in backends()},
        "roof": dict(roof),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "sms": torch.cuda.get_device_properties(0).multi_processor_count}
    return found


def commit(folder: Path | None = None) -> str:
    """Short hash of the source tree's commit, ``"+"`` behind it when it has changes; empty outside a checkout."""
    where = folder or Path(__file__).parent
    try:
        head = _git(where, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(where, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def save(path: Path, env: Mapping[str, object], points: Iterable[Point]) -> None:
    """Write a result file."""
    rounded = [{k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(point).items() if v not in (None, {})} for point in points]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": env, "points": rounded}, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Point]]:
    """Read a result file.

    Raises:
        InvalidInput: not such a file.
    """
    known = {f.name for f in fields(Point)}
    try:
        content = json.loads(path.read_text())
        points = [Point(**{k: v for k, v in point.items() if k in known}) for point in content["points"]]
        return dict(content["environment"]), points
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path} is not a result file: {error}.", hint="make one with `megamoe bench --output FILE`") from error
