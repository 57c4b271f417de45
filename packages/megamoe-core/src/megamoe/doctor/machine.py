"""The machine and the settings: GPUs, environment variables, the cache folder, and what became of the backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megamoe import env, select
from megamoe.catalog import Record
from megamoe.doctor.finding import Finding
from megamoe.errors import MegaMoEError
from megamoe.nvml import Gpus


def gpu_order(gpus: Gpus) -> list[Finding]:
    """Unlike GPUs whose numbers depend on what CUDA holds for fastest."""
    if len({device.capability for device in gpus.devices}) < 2 or env.device_order() == "PCI_BUS_ID":
        return []
    text = "The visible GPUs are of different kinds, and CUDA numbers them by speed: an index can mean another GPU than nvidia-smi shows."
    return [Finding("warning", text, f"export {env.DEVICE_ORDER.name}=PCI_BUS_ID")]


def visible_gpus(gpus: Gpus) -> list[Finding]:
    """No GPU, or hidden ones."""
    if not gpus.devices:
        return [Finding("note", f"No GPU is visible: {gpus.problem}.")]
    if gpus.hidden:
        return [Finding("note", f"{env.VISIBLE_DEVICES.name} hides {gpus.hidden} GPU(s).")]
    return []


def settings() -> list[Finding]:
    """Environment variables whose values cannot be used."""
    findings = []
    readers: tuple[tuple[env.Variable, Callable[[], object]], ...] = ((env.TIMEOUT, env.timeout_seconds), (env.LOG, env.log_level))
    for variable, read in readers:
        try:
            read()
        except MegaMoEError as error:
            findings.append(Finding("error", error.message, error.hint or f"unset {variable.name}"))
    return findings


def names_in_settings(records: Sequence[Record]) -> list[Finding]:
    """Backend names in the environment that nobody offers."""
    known = {record.name for record in records}
    findings = []
    wish = env.requested_backend()
    if wish not in (None, select.AUTO, *known):
        text = f"{env.BACKEND.name}={wish} names a backend that is not installed; there are {', '.join(record.name for record in records)}."
        findings.append(Finding("error", text, f"unset {env.BACKEND.name}"))
    for name in sorted(env.disabled_backends() - known):
        findings.append(Finding("note", f"{env.DISABLE.name} lists {name}, which is not installed."))
    return findings


def cache_folder() -> list[Finding]:
    """A cache folder that cannot be written: every start would compile anew."""
    if env.cache_writable():
        return []
    return [
        Finding(
            "warning", f"The cache folder {env.cache_dir()} cannot be written.", f"export {env.CACHE_DIR.name}=<a folder you can write>"
        )
    ]


def backends(records: Sequence[Record]) -> list[Finding]:
    """Backends that are installed wrongly, and wheels that are just not for this machine."""
    findings = []
    for record in records:
        level = {"ok": None, "unavailable": "note", "disabled": "note"}.get(record.state, "error")
        for reason in record.reasons if level else ():
            text = f"Backend {record.name} is {record.state}: {reason.text}."
            findings.append(Finding("note", text) if level == "note" else Finding("error", text, reason.hint))
    return findings


def choice() -> tuple[str | None, list[Finding]]:
    """The backend that would run here, or why none would."""
    try:
        return select.choose().name, []
    except MegaMoEError as error:
        return None, [Finding("error", error.message, error.hint or "")]
