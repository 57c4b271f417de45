"""Which backend runs, and why: the caller's argument, then ``MEGAMOE_BACKEND``, then the GPU."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from megamoe import catalog, env, metadata, nvml
from megamoe.catalog import Record
from megamoe.errors import (
    BackendAmbiguous,
    BackendBroken,
    BackendIncompatible,
    BackendNotFound,
    BackendUnavailable,
    InvalidInput,
    MegaMoEError,
)
from megamoe.log import logger
from megamoe.protocol import Backend, Verdict

if TYPE_CHECKING:
    import torch

AUTO = "auto"
REFERENCE = "reference"

_ERRORS: dict[str, type[MegaMoEError]] = {
    "unavailable": BackendUnavailable,
    "disabled": BackendUnavailable,
    "incompatible": BackendIncompatible,
    "broken": BackendBroken,
    "ambiguous": BackendAmbiguous,
}


def get_backend(name: str | None = None, *, device: torch.device | str | int | None = None) -> Backend:
    """Create the backend that is asked for, or the one for a GPU, after its full check of the device.

    A name, given here or by ``MEGAMOE_BACKEND``, never falls back to another backend. Without one, the GPU's compute capability
    decides: machine code for exactly this capability comes before code for its family. The plain torch backend ``reference`` is taken
    when no GPU is visible (said once in the log) or ``device`` is the CPU.

    Args:
        name: entry-point name; ``None`` or ``"auto"`` leave the choice open.
        device: the device to run on; ``None`` is the current GPU.

    Raises:
        BackendNotFound: nobody offers this name.
        BackendUnavailable: it, or every backend for this GPU, cannot run here; lists every reason.
        BackendIncompatible: its protocol or requirements do not fit what is installed.
        BackendBroken: it could not be loaded; the original exception is the cause.
        BackendAmbiguous: two distributions claim the name, or two backends fit the GPU equally well.
        InvalidInput: ``device`` is no device, or not a visible one.
    """
    record = choose(name, device)
    if device is None and _wish(name) is None and record.name == REFERENCE:
        _say_reference(nvml.gpus().problem)
    backend = _create(record)
    _probe(record, backend, device)
    return backend


def load_backend(name: str) -> Backend:
    """Create a backend for planning and compiling, which need no GPU: nothing is asked of this machine's devices.

    Raises:
        BackendNotFound, BackendIncompatible, BackendBroken, BackendAmbiguous: as :func:`get_backend`.
        BackendUnavailable: it is disabled or has no kernel yet.
    """
    record = _find(name)
    lacks_gpu_only = record.state == "unavailable" and record.spec is not None and not record.spec.missing
    if record.state != "ok" and not lacks_gpu_only:
        _refuse(record)
    return _create(record)


def choose(name: str | None = None, device: torch.device | str | int | None = None) -> Record:
    """The record that :func:`get_backend` would create, by metadata, description and NVML alone: loads no torch.

    Raises:
        as :func:`get_backend`.
    """
    kind, index = _kind_and_index(device)
    wish = _wish(name)
    if wish is not None:
        return _named(wish)
    if kind == "cpu":
        return _named(REFERENCE)
    gpus = nvml.gpus()
    if gpus.devices:
        return _for_gpu(_visible(index, gpus, device))
    if device is not None:
        raise BackendUnavailable(f"device={device!r} is asked for, but no GPU is visible: {gpus.problem}.", hint="megamoe doctor")
    return _named(REFERENCE)


def _wish(name: str | None) -> str | None:
    """The name that was given by argument or environment; ``None`` when the choice is open."""
    wish = env.requested_backend() if name in (None, AUTO) else name
    return None if wish == AUTO else wish


def _named(name: str) -> Record:
    record = _find(name)
    if record.state != "ok":
        _refuse(record)
    return record


def _for_gpu(gpu: nvml.Device) -> Record:
    fits: dict[str, list[Record]] = {"exact": [], "family": []}
    for record in catalog.backends():
        how = catalog.match(record.spec, gpu.capability) if record.spec is not None else ""
        if how and record.state == "ok":
            fits[how].append(record)
    for records in fits.values():
        if len(records) == 1:
            return records[0]
        if records:
            names = " and ".join(str(record) for record in records)
            raise BackendAmbiguous(
                f"{names} fit {gpu} equally well.",
                hint=f"name one: backend={records[0].name!r}, or {env.BACKEND.name}={records[0].name}",
            )
    raise BackendUnavailable(f"No backend can run on {gpu}. Installed: {_installed()}.", hint=_cure(gpu))


def _cure(gpu: nvml.Device) -> str:
    """The command that gives this GPU a backend."""
    reference = "backend='reference' runs everywhere, slowly"
    for wheel, major in metadata.ARCH_WHEELS.items():
        if gpu.capability[0] != major:
            continue
        name = wheel.removeprefix("megamoe-")
        record = next((r for r in catalog.backends() if r.name == name), None)
        if record is None:
            return f"{_pip(name)}; {reference}"
        return "; ".join([*dict.fromkeys(r.hint for r in record.reasons if r.hint and "reference" not in r.hint), reference])
    return f"no wheel is made for compute capability {gpu.capability[0]}.{gpu.capability[1]}; {reference}"


def _find(name: str) -> Record:
    for record in catalog.backends():
        if record.name == name:
            return record
    extra = f"megamoe-{name}" in metadata.ARCH_WHEELS
    hint = _pip(name) if extra else f"use one of: {', '.join(record.name for record in catalog.backends())}"
    asked = f" ({env.BACKEND.name} asks for it)" if env.requested_backend() == name else ""
    raise BackendNotFound(f"No backend named {name!r}{asked}. Installed: {_installed()}.", hint=f"{hint}. Details: megamoe backends -v")


def _refuse(record: Record) -> NoReturn:
    reasons = record.reasons
    listed = str(reasons[0]) if len(reasons) == 1 else " ".join(f"({i}) {reason}" for i, reason in enumerate(reasons, 1))
    raise _ERRORS[record.state](f"Backend {record.name!r} is {record.state}: {listed} Details: megamoe backends -v") from record.exception


def _create(record: Record) -> Backend:
    assert record.spec is not None
    module, _, attribute = record.spec.factory.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        backend = factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # kernels' imports may raise anything, also SystemExit
        raise BackendBroken(
            f"Backend {record.name!r} is broken: creating {record.spec.factory} raised {catalog.root_cause(error)}.",
            hint=_repair(record),
        ) from error
    if not isinstance(backend, Backend):
        lacks = [
            method for method in ("spec", "probe", "supports", "plan", "prepare_weights", "open_session") if not hasattr(backend, method)
        ]
        raise BackendBroken(
            f"Backend {record.name!r} is broken: {record.spec.factory} gives a {type(backend).__name__} without {', '.join(lacks)};"
            " allowed: a megamoe.protocol.Backend.",
            hint=_repair(record),
        )
    return backend


def _probe(record: Record, backend: Backend, device: torch.device | str | int | None) -> None:
    try:
        verdict = backend.probe(_torch_device(device))
    except MegaMoEError:
        raise
    except Exception as error:
        raise BackendBroken(
            f"Backend {record.name!r} is broken: its check of the device raised {catalog.root_cause(error)}.", hint=_repair(record)
        ) from error
    if not isinstance(verdict, Verdict):
        raise BackendBroken(
            f"Backend {record.name!r} is broken: its check of the device gives a {type(verdict).__name__}; allowed: a"
            " megamoe.protocol.Verdict.",
            hint=_repair(record),
        )
    if not verdict.ok:
        _refuse(Record(record.name, "unavailable", verdict.reasons, record.spec, record.distributions))


def _torch_device(device: torch.device | str | int | None) -> torch.device | None:
    if device is None:
        return None
    import torch

    return torch.device(f"cuda:{device}" if isinstance(device, int) else device)


def _kind_and_index(device: torch.device | str | int | None) -> tuple[str, int | None]:
    """``("cuda", 1)`` for anything that names that device; the index is ``None`` for the current one. Loads no torch."""
    if device is None:
        return "cuda", None
    kind, _, index = ("cuda", "", str(device)) if isinstance(device, int) else str(device).partition(":")
    if kind not in ("cuda", "cpu") or not (index.isdecimal() or not index):
        raise InvalidInput(
            f"device={device!r} is not a device megamoe knows; allowed: 'cpu', 'cuda', 'cuda:0', 0.", hint="pass device='cuda'"
        )
    return kind, int(index) if index else None


def _visible(index: int | None, gpus: nvml.Gpus, device: object) -> nvml.Device:
    chosen = _current() if index is None else index
    if chosen >= len(gpus.devices):
        raise InvalidInput(
            f"device={device!r}, but {len(gpus.devices)} GPU(s) are visible; allowed: 'cuda:0' to 'cuda:{len(gpus.devices) - 1}'.",
            hint=f"check {env.VISIBLE_DEVICES.name}",
        )
    return gpus.devices[chosen]


def _current() -> int:
    """Torch's current GPU when torch runs already, else the first; asking must not start CUDA."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


@functools.cache
def _say_reference(problem: str) -> None:
    logger().warning("no GPU is visible (%s): using the plain torch backend %r, which is slow", problem, REFERENCE)


def _installed() -> str:
    return ", ".join(str(record) for record in catalog.backends()) or "none"


def _pip(extra: str) -> str:
    return f'pip install "{metadata.CORE}[{extra}]"'


def _repair(record: Record) -> str:
    names = " ".join(distribution.name for distribution in record.distributions)
    return f"pip install --force-reinstall {names}" if names else "megamoe doctor"
