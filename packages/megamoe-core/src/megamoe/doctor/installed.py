"""What is installed, as the metadata say: a snapshot that the checks look at, and that a test can make up."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megamoe import metadata


@dataclass(frozen=True, slots=True)
class Package:
    """One record of an installed distribution.

    Attributes:
        name: normalized.
        version: as its metadata say.
        location: the folder it was installed into.
        files: hash by path (relative to ``location``) of what it installed; empty hash where its RECORD has none. Only for the families
            whose files are known to collide.
    """

    name: str
    version: str
    location: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


FAMILIES = ("megamoe-", "nvidia-cutlass-dsl", "nvidia-nvshmem", "nvshmem4py")
"""Beginnings of the names of distributions that share folders with their siblings."""

Installed = Mapping[str, tuple[Package, ...]]
"""Every record of every distribution by name, in the order of ``sys.path``: the first is the one that Python imports."""


def snapshot() -> Installed:
    """Read the metadata of everything on ``sys.path``."""
    found: dict[str, list[Package]] = defaultdict(list)
    seen = set()
    for distribution in metadata.distributions():
        name, version = metadata.name_of(distribution), metadata.field(distribution, "Version")
        place = metadata.folder(distribution)
        if not version or (name, version, place) in seen:
            continue
        seen.add((name, version, place))
        files = _record(metadata.read(distribution, "RECORD")) if name.startswith(FAMILIES) else {}
        found[name].append(Package(name, version, place, files))
    return {name: tuple(packages) for name, packages in found.items()}


def version(installed: Installed, name: str) -> str | None:
    """The version of a distribution that counts, ``None`` when it is not installed."""
    packages = installed.get(name)
    return packages[0].version if packages else None


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare releases by: ``"4.8.1rc1"`` is ``(4, 8, 1)``."""
    parts = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def public(text: str) -> str:
    """A version without its local part: ``0.6.16+cu130`` is a build of 0.6.16, not another release."""
    return text.partition("+")[0]


def absent(package: Package) -> tuple[str, ...]:
    """Files that a distribution installed and that are gone. Compiled bytecode does not count, nor do scripts: nothing imports them, and
    ``pip install --target`` puts them elsewhere than it writes down."""
    root = Path(package.location)
    kept = (path for path in package.files if not path.endswith(".pyc") and not path.startswith("../"))
    return tuple(path for path in kept if not (root / path).exists())


def _record(text: str) -> dict[str, str]:
    return {row[0]: row[1] for row in csv.reader(text.splitlines()) if len(row) >= 2}
