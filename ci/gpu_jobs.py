"""Rows of gpu-matrix.toml that a change needs, as JSON for a GitHub matrix: changed paths on stdin, one a line; ``--all`` for every row.

A change to one arch wheel or its tests needs the GPUs of that wheel; a change that all wheels build on needs every GPU; documentation
needs none.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

SHARED = (
    "packages/megamoe-core/src/",
    "packages/megamoe-core/pyproject.toml",
    "tests/core/",
    "tests/ranks/",
    "tests/conftest.py",
    "pyproject.toml",
    "noxfile.py",
    "constraints.txt",
    "ci/",
    ".github/workflows/",
)


ALSO = {"sm90": ("tests/emulation/",)}  # emulated Blackwell code runs on Hopper


def rows() -> list[dict[str, object]]:
    """Every row, as written."""
    return list(tomllib.loads(Path(__file__).with_name("gpu-matrix.toml").read_text())["row"])


def needed(changed: Iterable[str]) -> list[dict[str, object]]:
    """The rows that a change of these paths needs."""
    paths = list(changed)
    if any(path.startswith(SHARED) for path in paths):
        return rows()
    return [row for row in rows() if any(path.startswith(_own(str(row["wheel"]))) for path in paths)]


def _own(wheel: str) -> tuple[str, ...]:
    return (f"packages/megamoe-{wheel}/", f"tests/{wheel}/", *ALSO.get(wheel, ()))


if __name__ == "__main__":
    chosen = rows() if sys.argv[1:] == ["--all"] else needed(sys.stdin.read().splitlines())
    sys.stdout.write(json.dumps(chosen) + "\n")
