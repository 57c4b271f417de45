"""Examine this installation: the verdict and the command that mends it first, then the facts.

Needs only Python's standard library, and never fails for the damage it finds.
"""

from __future__ import annotations

import argparse

import megamoe
from megamoe import doctor
from megamoe.cli import codes
from megamoe.cli.output import Output
from megamoe.doctor import Examination

SUMMARY = "find what is wrong with this installation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """Print the verdict, the findings and the facts. 0 without errors, 1 with."""
    out = Output.of(args)
    found = doctor.examine()
    _verdict(out, found)
    _findings(out, found)
    _facts(out, found)
    out.document(
        "doctor",
        {
            "healthy": not found.errors,
            "backend": found.backend,
            "findings": found.findings,
            "python": doctor.python_facts(),
            "gpus": found.gpus,
            "backends": [{"name": record.name, "state": record.state, "version": record.version} for record in found.records],
            "packages": [{"name": name, "version": version, "location": place} for name, version, place in found.packages],
            "environment": [
                {"name": name, "value": value, "default": default, "meaning": meaning}
                for name, value, default, meaning in doctor.settings_table()
            ],
        },
    )
    return codes.FAILED if found.errors else codes.OK


def _verdict(out: Output, found: Examination) -> None:
    if found.errors:
        first = next((finding for finding in found.errors if finding.fix), found.errors[0])
        out.text(f"NOT HEALTHY: {len(found.errors)} problem(s). {first.text}", style="bold red")
        if first.fix:
            out.text(f"Fix first: {first.fix}", style="bold")
        return
    out.text(f"HEALTHY: backend {found.backend!r} runs on this machine.", style="bold green")


def _findings(out: Output, found: Examination) -> None:
    if found.findings:
        out.text()
    for finding in found.findings:
        out.text(f"{finding.level}: {finding.text}", style={"error": "red", "warning": "yellow", "note": ""}[finding.level])
        if finding.fix:
            out.text(f"  fix: {finding.fix}")


def _facts(out: Output, found: Examination) -> None:
    out.text()
    facts = {"megamoe": f"{megamoe.__version__} in {megamoe.__path__[0]}", **doctor.python_facts()}
    gpus = found.gpus
    facts["driver"] = f"{gpus.driver}, CUDA {gpus.cuda[0]}.{gpus.cuda[1]}" if gpus.driver and gpus.cuda else f"none ({gpus.problem})"
    out.facts(facts.items(), title="This Python")
    if gpus.devices:
        out.text()
        out.table(
            ("GPU", "name", "compute capability", "memory GiB", "UUID"),
            [(d.index, d.name, f"{d.capability[0]}.{d.capability[1]}", round(d.memory_bytes / 2**30, 1), d.uuid) for d in gpus.devices],
        )
    out.text()
    out.table(("backend", "version", "state"), [(record.name, record.version, record.state) for record in found.records])
    out.text()
    out.table(("package", "version", "folder"), found.packages)
    out.text()
    out.table(("variable", "value", "when unset", "meaning"), doctor.settings_table())
