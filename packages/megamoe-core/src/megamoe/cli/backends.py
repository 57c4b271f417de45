"""List the installed backends: their state, what they are for, and the reasons of those that cannot run here."""

from __future__ import annotations

import argparse

from megamoe import catalog, nvml
from megamoe.catalog import Record
from megamoe.cli import codes
from megamoe.cli.output import Output
from megamoe.errors import MegaMoEError
from megamoe.select import choose

SUMMARY = "list backends, their state and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("-v", "--verbose", action="store_true", help="also print where each comes from, and tracebacks")


def run(args: argparse.Namespace) -> int:
    """Print the list. 0 when some backend would be chosen here, 3 when none would."""
    out = Output.of(args)
    records = catalog.backends()
    gpus = nvml.gpus()
    chosen, refusal = _choice()
    out.table(
        ("backend", "version", "state", "kernels", "GPU", "formats", "what it is"),
        [_row(record) for record in records],
    )
    for record in records:
        _reasons(out, record)
    out.text()
    out.facts([("GPUs", _gpus(gpus)), ("chosen here", f"{chosen.name}" if chosen else f"none: {refusal}")])
    if args.verbose:
        for record in records:
            _details(out, record)
    out.document(
        "backends",
        {
            "backends": [_entry(record) for record in records],
            "gpus": gpus,
            "chosen": chosen.name if chosen else None,
            "refusal": refusal or None,
        },
    )
    return codes.OK if chosen else codes.NOTHING_SUITABLE


def _choice() -> tuple[Record | None, str]:
    try:
        return choose(), ""
    except MegaMoEError as error:
        return None, str(error)


def _row(record: Record) -> tuple[str, ...]:
    spec = record.spec
    if spec is None:
        return (record.name, record.version, record.state, "-", "-", "-", "-")
    gpu = catalog.capabilities(spec) or "none needed"
    return (record.name, record.version, record.state, spec.status, gpu, " ".join(spec.formats), spec.summary)


def _reasons(out: Output, record: Record) -> None:
    for reason in record.reasons:
        out.text(f"{record.name}: {reason.text}")
        if reason.hint:
            out.text(f"{' ' * len(record.name)}  fix: {reason.hint}")


def _gpus(gpus: nvml.Gpus) -> str:
    named = [f"{d.index}: {d}" for d in gpus.devices]
    return ", ".join(named) or f"none ({gpus.problem})"


def _details(out: Output, record: Record) -> None:
    out.text()
    pairs: list[tuple[str, object]] = []
    for d in record.distributions:
        pairs.append(("wheel", f"{d.name} {d.version} in {d.location}{' (editable)' if d.editable else ''}"))
    if record.spec is not None:
        spec = record.spec
        pairs += [("protocol", f"{spec.protocol[0]}.{spec.protocol[1]}"), ("factory", spec.factory)]
        pairs.append(("features", ", ".join(spec.features) or "-"))
        if spec.drop is not None:
            pairs.append(("kernel drop", f"{spec.drop.origin} {spec.drop.commit}, taken in {spec.drop.date}"))
        if spec.docs_url:
            pairs.append(("documentation", spec.docs_url))
    out.facts(pairs, title=record.name)
    if record.traceback:
        out.text(record.traceback)


def _entry(record: Record) -> dict[str, object]:
    return {
        "name": record.name,
        "state": record.state,
        "reasons": record.reasons,
        "spec": record.spec,
        "distributions": record.distributions,
        "traceback": record.traceback or None,
    }
