"""Examination of an installation: what is wrong, what ends it, and the facts that a bug report needs.

Each check is a function that returns findings; it looks at what it is given, so that a test can hand it a planted fault. A check that fails
itself becomes a finding. The standard library is enough to run all of them: what else is missing is one of the things they look for.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megamoe import catalog, env, nvml
from megamoe.catalog import Record
from megamoe.doctor import cuda_wheels, machine, own_wheels
from megamoe.doctor.finding import ORDER, Finding
from megamoe.doctor.installed import FAMILIES, Installed, snapshot
from megamoe.nvml import Gpus

T = TypeVar("T")
_NO_RECORDS: tuple[Record, ...] = ()
_NO_CHOICE: tuple[str | None, list[Finding]] = (None, [])

_REPORTED = ("apache-tvm-ffi", "cuda-bindings", "cuda-python", "importlib-metadata", "numpy", "packaging", "rich", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything found.

    Attributes:
        backend: the backend that would run here; ``None`` when none would.
        findings: errors first, then warnings, then notes.
        records: every backend's record.
        gpus: what the driver's library says.
        packages: name, version and folder of our wheels and those around them.
    """

    backend: str | None
    findings: tuple[Finding, ...]
    records: tuple[Record, ...]
    gpus: Gpus
    packages: tuple[tuple[str, str, str], ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that stop something from working."""
        return tuple(finding for finding in self.findings if finding.level == "error")


def examine() -> Examination:
    """Run every check. Never raises."""
    findings: list[Finding] = []
    nothing: Installed = {}
    installed = _guard(findings, snapshot, nothing)
    gpus = _guard(findings, lambda: nvml.gpus(refresh=True), Gpus(problem="the driver's library could not be asked"))
    records = _guard(findings, catalog.refresh, _NO_RECORDS)
    for check in _checks(installed, gpus, records):
        findings += _guard(findings, check, [])
    chosen, refusal = _guard(findings, machine.choice, _NO_CHOICE)
    if refusal and not any(finding.level == "error" for finding in findings):
        # Otherwise it repeats an error that has been named with its own fix.
        findings += refusal
    return Examination(
        backend=chosen,
        findings=tuple(sorted(dict.fromkeys(findings), key=lambda finding: ORDER.index(finding.level))),
        records=records,
        gpus=gpus,
        packages=tuple(_packages(installed)),
    )


def python_facts() -> dict[str, str]:
    """The Python that runs, for a bug report."""
    return {
        "version": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "platform": platform.platform(),
    }


def settings_table() -> list[tuple[str, str | None, str, str]]:
    """Every environment variable that megamoe reads: name, value, default, meaning."""
    return [(v.name, v.shown(), v.default, v.meaning) for v in (*env.VARIABLES, *env.CUDA_VARIABLES)]


def _checks(installed: Installed, gpus: Gpus, records: Sequence[Record]) -> list[Callable[[], list[Finding]]]:
    of_installed = (
        own_wheels.version_drift,
        cuda_wheels.dsl_overwritten,
        cuda_wheels.dsl_drift,
        own_wheels.module_drift,
        own_wheels.missing_files,
        cuda_wheels.overwritten_files,
        own_wheels.shadowed_copies,
    )
    of_both = (cuda_wheels.torch_without_cuda, cuda_wheels.dsl_flavour, cuda_wheels.nvshmem_library)
    return [
        own_wheels.missing_requirements,
        machine.settings,
        *(functools.partial(check, installed) for check in of_installed),
        *(functools.partial(check, installed, gpus) for check in of_both),
        functools.partial(machine.names_in_settings, records),
        functools.partial(machine.backends, records),
        functools.partial(machine.gpu_order, gpus),
        functools.partial(machine.visible_gpus, gpus),
        machine.cache_folder,
    ]


def _guard(findings: list[Finding], step: Callable[[], T], otherwise: T) -> T:
    """The step's result; when it fails, that is a finding, and ``otherwise`` takes its place."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001  a doctor has to outlive every damage it looks at
        name = getattr(getattr(step, "func", step), "__name__", "a check")
        text = f"The check {name!r} itself failed: {catalog.root_cause(error)}."
        findings.append(Finding("warning", text, "report this at the project's issue page"))
        return otherwise


def _packages(installed: Installed) -> list[tuple[str, str, str]]:
    names = sorted(name for name in installed if name in _REPORTED or name.startswith(FAMILIES))
    return [(p.name, p.version, p.location) for name in names for p in installed[name]]
