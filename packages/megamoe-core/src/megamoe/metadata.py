"""Installed distributions, read from their metadata alone: who claims which backend name, and whether its requirements are met.

Nothing is imported here but the metadata reader. ``importlib-metadata`` is used where it is installed; the standard library's older copy
of it does where not, so that ``megamoe doctor`` can still say what is missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import megamoe
from megamoe.protocol import ENTRY_POINT_GROUP, Reason

if TYPE_CHECKING:
    import importlib.metadata as reader
else:
    try:
        import importlib_metadata as reader
    except ImportError:
        import importlib.metadata as reader

CORE = "megamoe-core"
ARCH_WHEELS = {"megamoe-sm90": 9, "megamoe-sm100": 10, "megamoe-sm120": 12}
"""The wheels that core's extras install, and the major compute capability each is for: to name what to install or repair."""

_BUILT_IN = ("reference", "megamoe.reference:SPEC")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution.

    Attributes:
        name: normalized, for example ``"megamoe-sm90"``.
        version: as its metadata says; ``"unknown"`` when they do not.
        location: the folder it lies in, or its project folder when it is editable.
        editable: installed from a project folder that can change under it.
    """

    name: str
    version: str
    location: str
    editable: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """One entry point: a distribution offers a backend under a name.

    Attributes:
        name: the backend's name.
        value: ``"module:object"`` of its description.
        distribution: who offers it.
        requires: the distribution's requirements, as its metadata spell them.
    """

    name: str
    value: str
    distribution: Distribution
    requires: tuple[str, ...] = ()

    def load(self) -> object:
        """Import the module and fetch the object. Raises whatever the module raises."""
        return reader.EntryPoint(name=self.name, value=self.value, group=ENTRY_POINT_GROUP).load()


def claims() -> tuple[dict[str, tuple[Claim, ...]], tuple[Distribution, ...]]:
    """Every claimed backend name with its claims, and wheels that should claim one but whose metadata names none.

    Of several copies of a distribution the one that Python would import counts: the first on ``sys.path`` whose metadata can be read.
    """
    found: dict[str, dict[tuple[str, str], Claim]] = defaultdict(dict)
    silent = []
    for name in sorted(_candidates()):
        winner = first(name)
        mine = [] if winner is None else list(_claims_of(winner))
        for claim in mine:
            # One distribution may list an entry twice (its .egg-info beside its .dist-info); that is one claim.
            found[claim.name].setdefault((claim.distribution.name, claim.value), claim)
        if not mine:
            silent.append(_identity(winner, name) if winner else _husk(name))
    name, value = _BUILT_IN
    if not any(distribution == CORE for distribution, _ in found[name]):
        # Core run from a zip or a bare source folder has no metadata, and still has its own backend.
        here = Distribution(CORE, megamoe.__version__, str(Path(megamoe.__file__).parent.parent))
        found[name][CORE, value] = Claim(name, value, here)
    in_order = {name: tuple(by_key[key] for key in sorted(by_key)) for name, by_key in found.items()}
    return in_order, tuple(d for d in silent if d.name != CORE)


def distributions() -> Iterator[reader.Distribution]:
    """Every record of every installed distribution, in the order of ``sys.path``."""
    yield from reader.distributions()


def first(name: str) -> reader.Distribution | None:
    """The copy of a distribution that counts: first on ``sys.path`` with readable metadata; ``None`` when there is none."""
    readable = [d for d in reader.distributions(name=name) if _readable(d)]
    if not readable:
        return None
    place = folder(readable[0])
    # Several records of one distribution in one folder are left behind by interrupted or competing installers. File-system order must not
    # decide, so a wheel's record comes before a stray .egg-info, and a higher version before a lower one.
    together = [d for d in readable if folder(d) == place]
    if len(together) == 1:
        return together[0]
    return max(together, key=lambda d: (d.read_text("METADATA") is not None, natural(_version(d))))


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, ``None`` when it is not installed. For core it is the version that is running."""
    if normalize(name) == CORE:
        return megamoe.__version__
    found = first(name)
    return None if found is None else _version(found)


def unmet(claim: Claim) -> tuple[Reason, ...]:
    """Requirements of a claim's distribution that this environment does not meet; extras are left out."""
    if not claim.requires:
        return ()
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return (Reason("requirements cannot be checked: packaging is not installed", "pip install packaging"),)
    reasons = []
    for text in claim.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            reasons.append(Reason(f"{claim.distribution.name} has a requirement that cannot be read: {text!r}", "tell its authors"))
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        found = installed_version(requirement.name)
        if found is None:
            reasons.append(Reason(f"needs {needed}, which is not installed", _install(claim, requirement.name, needed)))
        elif not requirement.specifier.contains(found, prereleases=True):
            reasons.append(Reason(f"needs {needed}, found {found}", _install(claim, requirement.name, needed)))
    return tuple(reasons)


def normalize(name: str) -> str:
    """A distribution's name as the packaging standard compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Sort key that puts ``sm90`` before ``sm100``, and version 0.9 before 0.10."""
    return tuple((text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name))


def _install(claim: Claim, name: str, needed: str) -> str:
    if normalize(name).startswith("megamoe-"):
        # Pinned to each other: only taking both along ends in a pair that fits.
        return f"pip install --upgrade {name} {claim.distribution.name}"
    return f'pip install "{needed}"'


def _candidates() -> set[str]:
    names = set()
    for distribution in distributions():
        if ENTRY_POINT_GROUP in read(distribution, "entry_points.txt") or stem(distribution) in ARCH_WHEELS:
            names.add(name_of(distribution))
    return names


def _claims_of(distribution: reader.Distribution) -> Iterator[Claim]:
    try:
        entries = [e for e in distribution.entry_points if e.group == ENTRY_POINT_GROUP]
        requires = tuple(distribution.requires or ())
    except Exception:  # noqa: BLE001  a damaged file; the distribution is then reported as naming no entry points
        return
    identity = _identity(distribution)
    for entry in entries:
        yield Claim(entry.name, entry.value, identity, requires)


def _identity(distribution: reader.Distribution, name: str = "") -> Distribution:
    origin = getattr(distribution, "origin", None)
    url = str(getattr(origin, "url", ""))
    editable = bool(getattr(getattr(origin, "dir_info", None), "editable", False))
    location = unquote(urlparse(url).path) if editable else folder(distribution)
    return Distribution(name or name_of(distribution), _version(distribution), location, editable)


def _husk(name: str) -> Distribution:
    left: Iterable[Any] = reader.distributions(name=name)
    return Distribution(name, "unknown", next((folder(d) for d in left), "unknown"))


def _version(distribution: reader.Distribution) -> str:
    return field(distribution, "Version") or "unknown"


def field(distribution: reader.Distribution, name: str) -> str:
    """One field of the metadata. Parsing all of them, with the description, would take most of the time of a look."""
    head = (read(distribution, "METADATA") or read(distribution, "PKG-INFO")).partition("\n\n")[0]
    found = re.search(rf"^{name}:(.*)$", head, re.MULTILINE | re.IGNORECASE)
    return found[1].strip() if found else ""


def folder(distribution: reader.Distribution) -> str:
    """The folder that a distribution was installed into."""
    return str(distribution.locate_file(""))


def name_of(distribution: reader.Distribution) -> str:
    """Normalized name of a distribution, also of one whose metadata are empty."""
    return stem(distribution) or normalize(field(distribution, "Name"))


def stem(distribution: reader.Distribution) -> str:
    """Normalized name by the metadata folder's own name, which costs no reading; empty for other kinds of finders."""
    path = getattr(distribution, "_path", None)
    return normalize(Path(str(path)).name.partition("-")[0].removesuffix(".egg-info").removesuffix(".dist-info")) if path else ""


def _readable(distribution: reader.Distribution) -> bool:
    return bool(read(distribution, "METADATA") or read(distribution, "PKG-INFO"))


def read(distribution: reader.Distribution, file: str) -> str:
    """A metadata file's text; empty when there is none that can be read."""
    try:
        return distribution.read_text(file) or ""
    except (OSError, UnicodeDecodeError):
        return ""
