"""Give a drop back: the verbatim tree, as it was taken in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megamoe.drop import manifest as manifests
from megamoe.drop.faults import DropRefused, Fault
from megamoe.drop.folder import in_use, write_folder
from megamoe.drop.locate import find_package
from megamoe.drop.verify import originals


@dataclass(frozen=True, slots=True)
class Export:
    """The result of :func:`export`.

    Attributes:
        package: the package whose drop was written out.
        target: the folder it was written to.
        files: paths written, relative to it.
    """

    package: Path
    target: Path
    files: tuple[str, ...]


def original_files(package: Path) -> dict[str, bytes]:
    """The drop's files as upstream has them (a first-party drop: as they are), by path relative to the source root.

    Raises:
        DropRefused: the installed drop is not the recorded one, so its original cannot be recomputed.
    """
    manifest = manifests.require(package)
    if manifest.first_party:
        return {name: path.read_bytes() for name, path in manifests.kernel_files(package).items() if path.is_file()}
    files, faults = originals(package, manifest)
    if faults:
        raise DropRefused(f"The drop in {package} is not the recorded one.", faults, hint="take it in again with `megamoe drop update`")
    return files


def export(wheel: str | Path, target: str | Path) -> Export:
    """Write the verbatim tree to ``target``, which must not exist yet or be empty.

    Raises:
        DropRefused: the drop was edited, or the target holds files.
        DropError: writing failed; nothing is left behind.
    """
    package, target = find_package(wheel), Path(target)
    files = original_files(package)
    if in_use(target):
        raise DropRefused("The target is in use.", [Fault(str(target), 1, "exists and is not an empty folder")], hint="name a new folder")
    write_folder(target, files)
    return Export(package, target, tuple(files))
