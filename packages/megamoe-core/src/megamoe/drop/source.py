"""Read the chosen packages of a kernel team's source tree into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megamoe.drop.faults import DropRefused, Fault
from megamoe.drop.module import Unreadable, decode


def collect(source: Path, packages: Sequence[str], exclude: Sequence[str]) -> dict[str, bytes]:
    """The files of ``packages``, by path relative to ``source``.

    Args:
        source: the folder that holds the packages (not a package itself).
        packages: names of top-level packages.
        exclude: patterns to leave out, see ``manifest.DEFAULT_EXCLUDE``.

    Raises:
        DropRefused: every fault found: a package that is not there or overlaps another, links that leave the tree, files that are not
            UTF-8.
    """
    root = source.resolve()
    faults = list(_bad_packages(source, packages, exclude))
    files: dict[str, bytes] = {}
    if not faults:
        for package in packages:
            walk = _Walk(source, root, exclude, faults)
            for path in walk.files(source / package, (root,)):
                relative = path.relative_to(source).as_posix()
                try:
                    files[relative] = path.read_bytes()
                    decode(files[relative], str(path))
                except Unreadable as error:
                    faults.append(error.fault)
                except OSError as error:
                    faults.append(Fault(str(path), 1, f"cannot be read ({error.strerror})"))
            if not any(name.startswith(f"{package}/") and name.endswith(".py") for name in files):
                faults.append(Fault(str(source / package), 1, f"package {package!r} holds no Python file"))
    if faults:
        raise DropRefused(
            f"{source} cannot be taken in; nothing was changed.",
            faults,
            hint="correct the source, name other packages, or leave files out with `exclude` in drop.toml",
        )
    return dict(sorted(files.items()))


def excluded(relative: str, patterns: Sequence[str]) -> str | None:
    """The pattern that leaves this path out, ``None`` when none does."""
    name = relative.rpartition("/")[2]
    for pattern in patterns:
        if fnmatchcase(relative, pattern[1:]) if pattern.startswith("/") else fnmatchcase(name, pattern):
            return pattern
    return None


def _bad_packages(source: Path, packages: Sequence[str], exclude: Sequence[str]) -> Iterator[Fault]:
    if not source.is_dir():
        yield Fault(str(source), 1, "no such folder")
        return
    if not packages:
        here = sorted(p.name for p in source.iterdir() if p.is_dir() and any(p.glob("*.py")))
        yield Fault(str(source), 1, f"no package named; --package takes one of: {', '.join(here) or 'none found'}")
    parts = [tuple(filter(None, package.replace(".", "/").split("/"))) for package in packages]
    for index, (package, mine) in enumerate(zip(packages, parts, strict=True)):
        where = str(source / package)
        for other, theirs in zip(packages[:index], parts[:index], strict=True):
            shorter = min(len(mine), len(theirs))
            if [p.casefold() for p in mine[:shorter]] == [p.casefold() for p in theirs[:shorter]]:
                yield Fault(where, 1, f"packages {other!r} and {package!r} overlap; name each package once, by its top")
                break
        if not package.isidentifier():
            yield Fault(where, 1, f"{package!r} is not the name of a top-level package; SOURCE is the folder that holds the packages")
        elif not (source / package).is_dir():
            yield Fault(where, 1, f"the source has no package {package!r}")
        elif pattern := excluded(package, exclude):
            yield Fault(where, 1, f"package {package!r} is left out by the pattern {pattern!r} of `exclude`")


class _Walk:
    """A walk that follows links inside the tree and reports those that leave it."""

    def __init__(self, source: Path, root: Path, exclude: Sequence[str], faults: list[Fault]) -> None:
        self._source, self._root, self._exclude, self._faults = source, root, exclude, faults

    def files(self, folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
        real = self._inside(folder, above)
        if real is None:
            return
        for path in sorted(folder.iterdir()):
            if excluded(path.relative_to(self._source).as_posix(), self._exclude):
                continue
            if path.is_dir():
                yield from self.files(path, (*above, real))
            elif self._inside(path, above) is not None:
                if path.is_file():
                    yield path
                else:
                    self._faults.append(Fault(str(path), 1, "is neither a file nor a folder"))

    def _inside(self, path: Path, above: tuple[Path, ...]) -> Path | None:
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            self._faults.append(Fault(str(path), 1, "is a link to nothing"))
            return None
        if not real.is_relative_to(self._root):
            self._faults.append(Fault(str(path), 1, f"is a link that leaves the tree, to {real}"))
            return None
        if real in above:
            self._faults.append(Fault(str(path), 1, "is a link to a folder that holds it"))
            return None
        return real
