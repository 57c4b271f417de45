"""Find the import package that a user means, without importing it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from megamoe.drop.manifest import NAME, TREE
from megamoe.errors import DropError
from megamoe.protocol import ENTRY_POINT_GROUP


def find_package(wheel: str | Path) -> Path:
    """The folder of the import package that ``wheel`` names.

    Args:
        wheel: an installed package (``megamoe_sm90``), distribution (``megamoe-sm90``) or backend (``sm90``), a wheel's project folder
            (``packages/megamoe-sm90``), or the package folder itself.

    Raises:
        DropError: nothing of that name; or a project folder with no package, or several.
    """
    text = str(wheel)
    path = Path(text)
    if path.is_dir() and (isinstance(wheel, Path) or "/" in text or (path / "pyproject.toml").exists() or (path / "__init__.py").exists()):
        return _package_in(path.resolve())
    found = _installed(text.replace("-", "_")) or next(filter(None, map(_installed, _tops_of(text))), None)
    if found is None:
        raise DropError(
            f"{text!r} is neither an installed package nor a folder with one.",
            hint="name an installed wheel (megamoe backends lists them), or a path such as packages/megamoe-sm90",
        )
    return found


def namespace_of(package: Path) -> str:
    """The dotted name of the package's ``_drop``, following ``__init__.py`` files upwards."""
    parts = [package.name, TREE]
    parent = package.parent
    while (parent / "__init__.py").is_file():
        parts.insert(0, parent.name)
        parent = parent.parent
    return ".".join(parts)


def installed_drops() -> list[Path]:
    """The packages behind the installed backends that carry a ``drop.toml``, sorted; reads metadata, imports nothing of them."""
    tops = {entry.module.partition(".")[0] for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(place for place in map(_installed, tops) if place is not None and (place / NAME).is_file())


def _installed(dotted: str) -> Path | None:
    """Folder of an installed package, without importing it or a package that holds it."""
    top, *inner = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    places = (Path(place, *inner) for place in (spec.submodule_search_locations or ())) if spec else ()
    return next((place.resolve() for place in places if place.is_dir()), None)


def _tops_of(name: str) -> set[str]:
    """Packages of the backend, or the distribution with backends, of this name."""
    wanted = name.replace("_", "-").lower()
    return {
        entry.module.partition(".")[0]
        for entry in entry_points(group=ENTRY_POINT_GROUP)
        if entry.name == name or (entry.dist is not None and entry.dist.name.replace("_", "-").lower() == wanted)
    }


def _package_in(folder: Path) -> Path:
    if (folder / "__init__.py").is_file() or (folder / NAME).is_file():
        return folder
    base = folder / "src" if (folder / "src").is_dir() else folder
    packages = sorted(p.parent for p in base.glob("*/__init__.py"))
    if len(packages) != 1:
        names = ", ".join(p.name for p in packages) or "none"
        raise DropError(
            f"{folder} holds {len(packages)} import packages ({names}); allowed: one, in it or in its src folder.",
            hint="name the package folder itself",
        )
    return packages[0]
