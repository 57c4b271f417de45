"""Kernel drops: take a kernel team's source tree into a wheel, prove it verbatim, audit it, compare it, give it back.

WHEEL is an installed backend (sm90) or wheel (megamoe-sm90), a wheel's project folder (packages/megamoe-sm90) or its package folder.
docs/kernel_drops.md walks through taking a new drop in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megamoe.cli import codes
from megamoe.cli.output import Output, add_json_flag
from megamoe.drop.faults import DropRefused, Fault
from megamoe.errors import DropError

SUMMARY = "take kernel drops in, prove, audit, compare and give them back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each part of the workflow."""
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)

    update = _action(actions, "update", _update, "take packages of a source tree in, all or nothing")
    update.add_argument("wheel", metavar="WHEEL", help="the wheel to update")
    update.add_argument("source", metavar="SOURCE", help="the folder that holds the packages")
    update.add_argument(
        "--package",
        metavar="P",
        nargs="+",
        action="extend",
        default=[],
        help="top-level packages to take (default: those of the drop before)",
    )
    update.add_argument("--commit", default="", metavar="SHA", help="upstream commit")
    update.add_argument("--date", default="", metavar="D", help="ISO date of the drop (default: today)")
    update.add_argument("--upstream", default="", metavar="NAME", help="name of the upstream project (default: as before)")
    update.add_argument(
        "--patch",
        nargs=2,
        action="append",
        default=[],
        metavar=("FILE", "REASON"),
        help="add a pending local diff (unified) and why it is needed",
    )
    update.add_argument(
        "--without-patch", action="append", default=[], metavar="NAME", help="give up a pending local diff that upstream has taken"
    )
    update.add_argument("--dry-run", action="store_true", help="check everything, write nothing")

    verify = _action(actions, "verify", _verify, "prove that what is installed is the recorded original")
    verify.add_argument("wheel", metavar="WHEEL", nargs="*", help="wheels to verify (default: every installed backend with a drop)")

    diff = _action(actions, "diff", _diff, "what a source tree changes: files and public symbols")
    diff.add_argument("wheel", metavar="WHEEL", help="the wheel to compare with")
    diff.add_argument("source", metavar="SOURCE", help="the folder that holds the packages")
    diff.add_argument(
        "--package", metavar="P", nargs="+", action="extend", default=[], help="packages that would be taken (default: those of the drop)"
    )

    export = _action(actions, "export", _export, "write the verbatim tree out, byte for byte")
    export.add_argument("wheel", metavar="WHEEL", help="the wheel to export from")
    export.add_argument("target", metavar="DIR", help="a new or empty folder")

    audit = _action(actions, "audit", _audit, "check what shim/ relies on against the kernels, without importing them")
    audit.add_argument("wheel", metavar="WHEEL", nargs="*", help="wheels to audit (default: every installed backend with a drop)")
    audit.add_argument("--source", metavar="SOURCE", help="check against this source tree instead: what would break if it were taken in")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action. A refused operation prints every fault and ends with 1."""
    out = Output.of(args)
    action: Callable[[argparse.Namespace, Output], int] = args.action_function
    try:
        return action(args, out)
    except DropError as error:
        faults = error.faults if isinstance(error, DropRefused) else ()
        out.document(f"drop {args.action}", {"ok": False, "message": error.message.splitlines()[0], "fix": error.hint, "faults": faults})
        out.error(error)
        return codes.of_error(error)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace, Output], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(action_function=function)
    add_json_flag(parser)
    return parser


def _update(args: argparse.Namespace, out: Output) -> int:
    from megamoe.drop.update import update

    done = update(
        args.wheel, args.source, args.package, commit=args.commit, date=args.date, upstream=args.upstream,
        patches=args.patch, without_patches=args.without_patch, dry_run=args.dry_run,
    )  # fmt: skip
    out.text(f"{'took in' if done.written else 'would take in'} {len(done.manifest.files)} files of {', '.join(done.manifest.packages)}")
    out.facts(
        [
            ("into", done.package),
            ("namespace", done.manifest.namespace),
            ("upstream", " ".join(filter(None, (done.manifest.upstream, done.manifest.commit, done.manifest.date)))),
            ("files", f"{len(done.added)} added, {len(done.removed)} removed, {len(done.changed)} changed"),
            ("local diffs", ", ".join(patch.file for patch in done.manifest.patches) or "none"),
            ("needs from outside", ", ".join(done.external) or "nothing"),
        ]
    )
    _faults(out, "note", done.notes)
    out.document("drop update", {"ok": True, "written": done.written, **_fields(done)})
    return codes.OK


def _verify(args: argparse.Namespace, out: Output) -> int:
    from megamoe.drop.verify import verify

    results = [verify(wheel) for wheel in _wheels(args)]
    for result in results:
        manifest = result.manifest
        origin = manifest.origin if manifest.first_party else " ".join(filter(None, (manifest.upstream, manifest.commit, manifest.date)))
        proof = "keep to their namespace" if manifest.first_party else "are the recorded original"
        verdict = f"ok, {result.files} kernel files {proof}" if result.ok else f"{len(result.problems)} problems"
        out.text(f"{result.package.name} ({origin}): {verdict}", style="green" if result.ok else "bold red")
        _faults(out, "", result.problems)
    return _checked("drop verify", [{"ok": result.ok, **_fields(result)} for result in results], out)


def _diff(args: argparse.Namespace, out: Output) -> int:
    from megamoe.drop.diff import diff

    found = diff(args.wheel, args.source, args.package)
    out.text(f"{len(found.added)} files added, {len(found.removed)} removed, {len(found.changed)} changed, {found.unchanged} unchanged")
    for mark, paths in (("+", found.added), ("-", found.removed), ("~", found.changed)):
        for path in paths:
            out.text(f"  {mark} {path}")
    if found.symbols:
        out.table(("module", "symbol", "before", "after"), [(s.module, s.name, s.before or "-", s.after or "-") for s in found.symbols])
    out.document("drop diff", _fields(found))
    return codes.OK


def _export(args: argparse.Namespace, out: Output) -> int:
    from megamoe.drop.export import export

    done = export(args.wheel, args.target)
    out.text(f"wrote {len(done.files)} files of {done.package.name} to {done.target}")
    out.document("drop export", {"ok": True, **_fields(done)})
    return codes.OK


def _audit(args: argparse.Namespace, out: Output) -> int:
    from megamoe.drop.audit import audit

    results = [audit(wheel, args.source) for wheel in _wheels(args)]
    for result in results:
        verdict = f"ok, {result.checks} checks" if result.ok else f"{len(result.problems)} problems"
        out.text(f"{result.package.name} against {result.tree}: {verdict}", style="green" if result.ok else "bold red")
        _faults(out, "", result.problems)
    return _checked("drop audit", [{"ok": result.ok, **_fields(result)} for result in results], out)


def _wheels(args: argparse.Namespace) -> list[str | Path]:
    if args.wheel:
        return list(args.wheel)
    from megamoe.drop.locate import installed_drops

    return list(installed_drops())


def _checked(command: str, results: list[dict[str, object]], out: Output) -> int:
    out.document(command, {"ok": all(result["ok"] for result in results), "wheels": results})
    if not results:
        out.text("no installed backend carries a kernel drop; name a wheel")
        return codes.NOTHING_SUITABLE
    return codes.OK if all(result["ok"] for result in results) else codes.FAILED


def _faults(out: Output, word: str, faults: Iterable[Fault]) -> None:
    for fault in faults:
        out.text(f"  {word + ': ' if word else ''}{fault}")


def _fields(result: Any) -> dict[str, object]:
    return asdict(result)
