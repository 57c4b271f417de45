"""Prove that an installed drop is the recorded original, the private prefix and the pending local diffs aside."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

from megamoe.drop import manifest as manifests
from megamoe.drop.faults import Fault
from megamoe.drop.locate import find_package, namespace_of
from megamoe.drop.manifest import INIT, TREE, Manifest
from megamoe.drop.module import SUFFIXES, Unreadable, parse
from megamoe.drop.patches import FOLDER, PatchFailed, apply
from megamoe.drop.rewrite import remove_prefix
from megamoe.drop.scan import Scanner


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of :func:`verify`.

    Attributes:
        package: the package that carries the drop.
        manifest: its ``drop.toml``.
        files: number of drop files found.
        digest: hash of the installed kernels, see ``manifest.tree_digest``.
        problems: every file that is not what was recorded; empty when the drop is proved.
    """

    package: Path
    manifest: Manifest
    files: int
    digest: str
    problems: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether the drop is proved."""
        return not self.problems


def verify(wheel: str | Path) -> Verification:
    """Compare what is installed with ``drop.toml``. Needs neither the source tree nor the kernels' own dependencies.

    A first-party drop has no originals; there it is checked that the kernels keep to the private namespace.

    Raises:
        DropError: no such wheel, or it carries no drop.
    """
    package = find_package(wheel)
    manifest = manifests.require(package)
    installed = manifests.kernel_files(package)
    problems = list(_namespace_problems(package, manifest))
    if manifest.first_party:
        problems += _first_party_problems(manifest.namespace, installed)
    else:
        problems += originals(package, manifest)[1]
    return Verification(package, manifest, len(installed), manifests.tree_digest(package), tuple(sorted(problems)))


def originals(package: Path, manifest: Manifest) -> tuple[dict[str, bytes], list[Fault]]:
    """The original files of an upstream drop, recomputed from what is installed, and everything that contradicts the record."""
    installed = manifests.kernel_files(package)
    files: dict[str, bytes] = {}
    faults: list[Fault] = []
    for name, path in installed.items():
        try:
            files[name] = _stripped(name, path, manifest, faults)
        except Unreadable as error:
            faults.append(error.fault)
            files[name] = b""
    damaged = {fault.file for fault in faults}
    for patch in reversed(manifest.patches):
        files = _unpatched(files, package / patch.file, patch.sha256, faults)
    for name, path in installed.items():
        if name not in files or str(path) in damaged:
            continue  # added by a patch, or already reported
        if name not in manifest.files:
            faults.append(Fault(str(path), 1, "is not part of the recorded drop"))
    for name, digest in manifest.files.items():
        path = package / TREE / name
        if name not in files:
            faults.append(Fault(str(path), 1, "is part of the recorded drop but is not there"))
        elif str(path) not in damaged and (found := hashlib.sha256(files[name]).hexdigest()) != digest:
            faults.append(Fault(str(path), 1, "was edited: it is not the recorded original", f"sha256 {digest}", f"sha256 {found}"))
    return {name: data for name, data in files.items() if name in manifest.files}, faults


def _read(path: Path) -> bytes:
    if path.is_symlink():
        raise Unreadable(Fault(str(path), 1, "is a link, not a file of the drop"))
    return path.read_bytes()


def _stripped(name: str, path: Path, manifest: Manifest, faults: list[Fault]) -> bytes:
    data = _read(path)
    if not name.endswith(SUFFIXES):
        return data
    module = parse(data, name, str(path))
    original = remove_prefix(module, manifest.namespace, manifest.packages)
    # Without this, taking a prefix out by hand would go unseen: stripping leaves such a file as it was.
    faults += Scanner(manifest.namespace, manifest.packages, ()).private(module, str(path))
    return original


def _unpatched(files: dict[str, bytes], path: Path, digest: str, faults: list[Fault]) -> dict[str, bytes]:
    if not path.is_file():
        faults.append(Fault(str(path), 1, "is a pending local diff of the recorded drop but is not there"))
        return files
    diff = path.read_bytes()
    if (found := hashlib.sha256(diff).hexdigest()) != digest:
        faults.append(Fault(str(path), 1, "was edited: this is not the recorded diff", f"sha256 {digest}", f"sha256 {found}"))
    try:
        return apply(files, diff, str(path), undo=True)
    except PatchFailed as error:
        faults.append(error.fault)
        return files


def _namespace_problems(package: Path, manifest: Manifest) -> list[Fault]:
    found = []
    expected = namespace_of(package)
    if manifest.namespace != expected:
        found.append(
            Fault(str(package / manifests.NAME), 1, "the package has another name than recorded", expected, manifest.namespace or "nothing")
        )
    init = package / TREE / INIT
    if manifest.packages or init.exists() or manifests.kernel_files(package):
        found += init_problems(init)
    listed = {patch.file for patch in manifest.patches}
    for path in sorted((package / FOLDER).glob("*")) if (package / FOLDER).is_dir() else ():
        if path.relative_to(package).as_posix() not in listed:
            found.append(Fault(str(path), 1, f"is not listed in {manifests.NAME}"))
    return found


def init_problems(init: Path) -> list[Fault]:
    """What is wrong with ``_drop/__init__.py``: it is the wheel's own, so no hash vouches for it, and it runs before every kernel."""
    if not init.is_file():
        return [Fault(str(init), 1, "is missing")]
    try:
        body = parse(init.read_bytes(), INIT, str(init)).tree.body
    except Unreadable as error:
        return [error.fault]
    code = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str))]
    return [Fault(str(init), code[0].lineno, "holds code; this file is a docstring at most")] if code else []


def _first_party_problems(namespace: str, installed: dict[str, Path]) -> list[Fault]:
    faults: list[Fault] = []
    tops = {name.partition("/")[0].removesuffix(".py") for name in installed}
    scanner = Scanner(namespace, tops, installed)
    for name, path in installed.items():
        try:
            data = _read(path)
            if name.endswith(SUFFIXES):
                faults += scanner.private(parse(data, name, str(path)), str(path))
        except Unreadable as error:
            faults.append(error.fault)
    return faults
