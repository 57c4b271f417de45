"""Take a new drop in: copy, patch, rewrite, record. All or nothing."""

from __future__ import annotations

import datetime
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import megamoe
from megamoe.drop import manifest as manifests
from megamoe.drop.faults import DropRefused, Fault
from megamoe.drop.locate import find_package, namespace_of
from megamoe.drop.manifest import INIT, TREE, Manifest, Patch
from megamoe.drop.module import SUFFIXES, Unreadable, parse
from megamoe.drop.patches import FOLDER, PatchFailed, apply
from megamoe.drop.rewrite import rewrite
from megamoe.drop.scan import Findings, Scanner
from megamoe.drop.source import collect
from megamoe.drop.verify import init_problems, verify
from megamoe.errors import DropError

_INIT_TEXT = b'"""The kernel drop, imported by shim/ alone. Taken in by `megamoe drop update`; not edited by hand."""\n'
_STAGE = ".drop-update"


@dataclass(frozen=True, slots=True)
class Update:
    """What :func:`update` did, or would do.

    Attributes:
        package: the package that was updated.
        manifest: the new ``drop.toml``.
        added, removed, changed: paths of original files against the drop before.
        notes: what was taken but is worth knowing, see ``scan.Findings``.
        external: top-level modules that the kernels need from outside.
        written: False for a dry run.
    """

    package: Path
    manifest: Manifest
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    notes: tuple[Fault, ...]
    external: tuple[str, ...]
    written: bool


def update(
    wheel: str | Path,
    source: str | Path,
    packages: Sequence[str] = (),
    *,
    commit: str = "",
    date: str = "",
    upstream: str = "",
    patches: Sequence[tuple[str | Path, str]] = (),
    without_patches: Sequence[str] = (),
    dry_run: bool = False,
) -> Update:
    """Replace a wheel's drop by the given packages of a source tree.

    Args:
        wheel: see ``locate.find_package``.
        source: the folder that holds the packages.
        packages: top-level packages to take; empty for those of the drop before.
        commit: upstream commit of the source.
        date: ISO date of the drop; today when empty.
        upstream: name of the upstream project; as before when empty.
        patches: (unified diff, reason) pairs to add to the pending local diffs. Those recorded before are kept and applied first.
        without_patches: names of recorded diffs to give up, because upstream has taken them.
        dry_run: check everything, write nothing.

    Raises:
        DropRefused: every reason why the source cannot be taken in, or why the target may not be overwritten.
        DropError: no such wheel, or writing failed; the wheel is as it was.
    """
    package, source = find_package(wheel), Path(source)
    if package == Path(megamoe.__file__).resolve().parent:
        raise DropError(f"{wheel} is in megamoe-core, which holds no kernel drop; allowed: a wheel of its own.", hint="megamoe new-backend")
    before = manifests.read(package) or Manifest()
    _refuse_dirty(package, before)
    packages = tuple(packages) or before.packages
    kept = _kept_patches(package, before, without_patches)
    diffs = [*kept, *_new_patches(kept, patches)]
    originals = collect(source, packages, before.exclude)
    namespace = namespace_of(package)
    private, findings = _private(_apply_all(originals, diffs, packages), source, namespace, packages)
    manifest = replace(
        before,
        origin=manifests.UPSTREAM,
        upstream=upstream or before.upstream or source.resolve().name,
        commit=commit,
        date=_iso(date),
        namespace=namespace,
        packages=packages,
        patches=tuple(Patch(f"{FOLDER}/{name}", hashlib.sha256(diff).hexdigest(), reason) for name, _, diff, reason in diffs),
        files={name: hashlib.sha256(data).hexdigest() for name, data in originals.items()},
    )
    if not dry_run:
        _write(package, manifest, private, {name: diff for name, _, diff, _ in diffs})
    old, new = before.files, manifest.files
    return Update(
        package=package,
        manifest=manifest,
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        changed=tuple(sorted(name for name in new.keys() & old.keys() if new[name] != old[name])),
        notes=tuple(sorted(findings.notes)),
        external=tuple(sorted(findings.external)),
        written=not dry_run,
    )


_Diff = tuple[str, str, bytes, str]
"""A pending diff in memory: name, path for messages, bytes, reason."""


def _refuse_dirty(package: Path, before: Manifest) -> None:
    faults = []
    hint = "undo the local changes, or keep them as a diff with --patch FILE REASON"
    if (package / _STAGE).exists():
        faults.append(Fault(str(package / _STAGE), 1, "an interrupted update left this: move back what is in its `old`, delete it"))
    if before.first_party and manifests.kernel_files(package):
        faults.append(Fault(str(package / manifests.NAME), 1, "the kernels of this wheel are first-party; a drop would replace them"))
        hint = f"remove them and {manifests.NAME} first, or make a wheel for the drop with `megamoe new-backend`"
    elif before.files:
        faults += verify(package).problems
    else:
        faults += [
            Fault(str(path), 1, f"is in {TREE} but recorded in no {manifests.NAME}") for path in manifests.kernel_files(package).values()
        ]
        init = package / TREE / INIT
        faults += init_problems(init) if init.exists() else []
    if faults:
        raise DropRefused(
            f"{package / TREE} holds what an update would lose; nothing was changed.",
            faults,
            hint=hint,
        )


def _kept_patches(package: Path, before: Manifest, without: Sequence[str]) -> list[_Diff]:
    names = {patch.file.removeprefix(f"{FOLDER}/"): patch for patch in before.patches}
    if unknown := sorted(set(without) - names.keys()):
        raise DropError(f"no pending local diff {unknown[0]!r}; there are: {', '.join(names) or 'none'}.", hint="name one of them")
    return [
        (name, str(package / patch.file), (package / patch.file).read_bytes(), patch.reason)
        for name, patch in names.items()
        if name not in without
    ]


def _new_patches(kept: Sequence[_Diff], patches: Sequence[tuple[str | Path, str]]) -> list[_Diff]:
    new: list[_Diff] = []
    for file, reason in patches:
        path = Path(file)
        if not path.is_file():
            raise DropRefused("A local diff cannot be read; nothing was changed.", [Fault(str(path), 1, "no such file")])
        if any(path.name == name for name, *_ in [*kept, *new]):
            raise DropError(f"there is already a pending local diff {path.name!r}.", hint=f"--without-patch {path.name}, or another name")
        if not reason.strip():
            raise DropError(f"the local diff {path.name!r} has no reason.", hint="say why it is needed and where it was reported")
        new.append((path.name, str(path), path.read_bytes(), reason))
    return new


def _apply_all(files: dict[str, bytes], diffs: Sequence[_Diff], packages: Sequence[str]) -> dict[str, bytes]:
    for name, shown, diff, _ in diffs:
        try:
            files = apply(files, diff, shown)
            for path in files:
                if path.partition("/")[0] not in packages or ".." in path.split("/"):
                    raise PatchFailed(Fault(shown, 1, f"adds {path}, which is in none of the packages {', '.join(packages)}"))
        except PatchFailed as error:
            raise DropRefused(
                "A pending local diff does not fit this source; nothing was changed.",
                [error.fault],
                hint=f"if upstream has taken it, --without-patch {name}; else make the diff anew against this source",
            ) from None
    return files


def _private(files: dict[str, bytes], source: Path, namespace: str, packages: tuple[str, ...]) -> tuple[dict[str, bytes], Findings]:
    scanner, findings, private = Scanner(namespace, packages, files), Findings(), dict(files)
    for name, data in files.items():
        if name.endswith(SUFFIXES):
            try:
                module = parse(data, name, str(source / name))
            except Unreadable as error:
                findings.faults.append(error.fault)
                continue
            before = len(findings.faults)
            scanner.scan(module, str(source / name), findings)
            if len(findings.faults) == before:
                private[name] = rewrite(module, namespace, packages)
    if findings.faults:
        raise DropRefused(
            f"{source} cannot be moved to the namespace {namespace}; nothing was changed.",
            findings.faults,
            hint="have upstream change these lines, or change them in a local diff: --patch FILE REASON",
        )
    return private, findings


def _iso(date: str) -> str:
    try:
        return (datetime.date.fromisoformat(date) if date else datetime.datetime.now(datetime.UTC).date()).isoformat()
    except ValueError:
        raise DropError(f"date {date!r}; allowed: an ISO date.", hint="for example --date 2026-07-31") from None


def _write(package: Path, manifest: Manifest, private: dict[str, bytes], diffs: dict[str, bytes]) -> None:
    try:
        with _staged(package) as (new, swap):
            init = package / TREE / INIT
            tree = {INIT: init.read_bytes() if init.is_file() else _INIT_TEXT, **private}
            for name, data in {**{f"{TREE}/{n}": d for n, d in tree.items()}, **{f"{FOLDER}/{n}": d for n, d in diffs.items()}}.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(data)
            (new / manifests.NAME).write_text(manifest.to_toml(), encoding="utf-8", newline="\n")
            swap()
    except OSError as error:
        raise DropError(f"writing to {package} failed ({error}); the drop there is as it was.", hint="check space and rights") from error


@contextmanager
def _staged(package: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder to write the new state into, and the call that puts it in place; on any error the old state comes back."""
    stage = package / _STAGE
    new, old = stage / "new", stage / "old"

    moved: list[tuple[Path, Path]] = []

    def swap() -> None:
        for name in (TREE, FOLDER, manifests.NAME):
            for source, target in ((package / name, old / name), (new / name, package / name)):
                if source.exists():
                    source.rename(target)
                    moved.append((source, target))

    stage.mkdir()
    try:
        new.mkdir()
        old.mkdir()
        yield new, swap
    except BaseException:
        for source, target in reversed(moved):
            target.rename(source)
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
