"""Fingerprints of source files: the same wherever a package is installed, different as soon as one byte of it is."""

from __future__ import annotations

import functools
import hashlib
from importlib.util import find_spec
from pathlib import Path

from megamoe.errors import MegaMoEError


def fingerprint(packages: tuple[str, ...]) -> str:
    """SHA-256 over the names (relative to their package) and bytes of all files of these packages, as they lie on disk now.

    Args:
        packages: importable names; the packages themselves are not imported, their parents are.

    Raises:
        MegaMoEError: a package is not on disk.
    """
    total = hashlib.sha256()
    for package in sorted(packages):
        for name, path in _files(package):
            data = path.read_bytes()
            # Lengths keep two different sets of files from giving the same stream of bytes.
            total.update(f"{package}/{name}\0{len(data)}\0".encode())
            total.update(data)
    return total.hexdigest()


@functools.cache
def loaded(packages: tuple[str, ...]) -> str:
    """The fingerprint when this process first asked for it: that of the code it has in memory, whatever is edited meanwhile."""
    return fingerprint(packages)


def _files(package: str) -> list[tuple[str, Path]]:
    spec = find_spec(package)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [
        (path.relative_to(root).as_posix(), path)
        for root in map(Path, roots)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]
    if not found:
        raise MegaMoEError(f"Package {package!r} has no source files on disk; kernels are compiled from them.", hint="reinstall its wheel")
    return sorted(found)
