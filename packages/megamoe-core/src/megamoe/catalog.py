"""Which backends are installed, and the state of each. Looking never raises and loads neither torch nor CuTe DSL.

An installed wheel claims a backend name by an entry point of the group ``megamoe.backends``. Every claimed name becomes one record:

    disabled       MEGAMOE_DISABLE lists it                                    decided from the name
    ambiguous      two distributions claim it                                  decided from metadata
    incompatible   a requirement of its wheel is not met                       decided from metadata, before its import
    broken         importing it raised, or what it names is no description     its light description is imported
    incompatible   it was written for another protocol                         decided from the description
    unavailable    it has no kernel yet, or there is no such GPU here          decided from the description and NVML
    ok             nothing speaks against it
"""

from __future__ import annotations

import importlib
import os
import re
import threading
import traceback
from dataclasses import dataclass
from typing import Literal

from megamoe import env, metadata, nvml
from megamoe.errors import MegaMoEError
from megamoe.metadata import Claim, Distribution
from megamoe.protocol import PROTOCOL, BackendSpec, Reason

State = Literal["ok", "unavailable", "incompatible", "broken", "disabled", "ambiguous"]


@dataclass(frozen=True, slots=True)
class Record:
    """One backend name and what is known about it.

    Attributes:
        name: the entry-point name.
        state: see the module's page.
        reasons: everything that speaks against it; empty exactly when ``state`` is ``"ok"``.
        spec: its description; ``None`` when that was not or could not be loaded.
        distributions: the wheels that claim the name; more than one only when ambiguous (or disabled).
        exception: what loading it raised, with its traceback; ``None`` unless broken by one.
        traceback: the same as text.
    """

    name: str
    state: State
    reasons: tuple[Reason, ...] = ()
    spec: BackendSpec | None = None
    distributions: tuple[Distribution, ...] = ()
    exception: BaseException | None = None
    traceback: str = ""

    @property
    def version(self) -> str:
        """Version of the wheel; several, separated by ``" / "``, when several claim the name."""
        return " / ".join(d.version for d in self.distributions)

    @property
    def location(self) -> str:
        """Folder the wheel lies in (its project folder when installed as editable); several like ``version``."""
        return " / ".join(d.location for d in self.distributions)

    def __str__(self) -> str:
        why = f": {'; '.join(reason.text for reason in self.reasons)}" if self.reasons else ""
        return f"{self.name} {self.version} ({self.state}{why})"


_lock = threading.RLock()
_known: tuple[Record, ...] | None = None
_looking = False


def _fresh_lock() -> None:
    """A fork copies a lock held by another thread of the parent, and nobody in the child would ever release it."""
    global _lock, _looking
    _lock = threading.RLock()
    _looking = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)


def backends(refresh: bool = False) -> tuple[Record, ...]:
    """Every installed backend with its state, sorted by name (``sm90`` before ``sm100``). Never raises.

    The answer is found once and remembered.

    Args:
        refresh: look again: after installing a wheel, changing ``MEGAMOE_DISABLE``, or a change of the visible GPUs. A module that was
            imported before stays as it is until Python starts anew.
    """
    global _known, _looking
    with _lock:
        if _looking:
            raise MegaMoEError(
                "A backend's wheel asked for the list of backends while that list was being made.",
                hint="ask when the backend is used, not while its package is imported",
            )
        if _known is None or refresh:
            _looking = True
            try:
                _known = _look(refresh)
            finally:
                _looking = False
        return _known


def refresh() -> tuple[Record, ...]:
    """Look again; the same as ``backends(refresh=True)``."""
    return backends(refresh=True)


def missing_gpu(spec: BackendSpec, gpus: nvml.Gpus) -> Reason | None:
    """Why no visible GPU can run a backend; ``None`` when one can, or when it needs none."""
    if not spec.archs or any(match(spec, device.capability) for device in gpus.devices):
        return None
    needs = f"needs compute capability {capabilities(spec)}"
    if not gpus.devices:
        return Reason(f"{needs}, found no GPU ({gpus.problem})", "run on a machine with this GPU, or use backend='reference'")
    found = ", ".join(sorted({str(device) for device in gpus.devices}))
    return Reason(f"{needs}, found {found}", "use the backend of this GPU, or backend='reference'")


def capabilities(spec: BackendSpec) -> str:
    """Compute capabilities of a backend for people, for example ``"10.0 or 10.3"``; ``12.x`` is the whole family."""
    return " or ".join(f"{major}.{'x' if minor is None else minor}" for major, minor in spec.archs)


def match(spec: BackendSpec, capability: tuple[int, int]) -> Literal["exact", "family", ""]:
    """How a backend's machine code fits a GPU: made for exactly this compute capability, for its whole family, or not at all."""
    if capability in spec.archs:
        return "exact"
    return "family" if (capability[0], None) in spec.archs else ""


def _look(refresh: bool) -> tuple[Record, ...]:
    if refresh:
        importlib.invalidate_caches()
    gpus = nvml.gpus(refresh)
    disabled = env.disabled_backends()
    claims, silent = metadata.claims()
    records = [_judge(name, claimed, name in disabled, gpus) for name, claimed in claims.items()]
    records += [record for record in map(_silent, silent) if record.name not in claims]
    return tuple(sorted(records, key=lambda record: metadata.natural(record.name)))


def _silent(distribution: Distribution) -> Record:
    name = distribution.name.removeprefix("megamoe-")
    again = f"pip install --force-reinstall --no-deps {distribution.name}"
    reason = Reason(f"{distribution.name} is installed in {distribution.location}, but its metadata names no entry points", again)
    return Record(name, "broken", (reason,), distributions=(distribution,))


def _judge(name: str, claims: tuple[Claim, ...], disabled: bool, gpus: nvml.Gpus) -> Record:
    distributions = tuple(claim.distribution for claim in claims)
    if disabled:
        reason = Reason(f"{env.DISABLE.name} lists it", f"take {name} out of {env.DISABLE.name}")
        return Record(name, "disabled", (reason,), distributions=distributions)
    if len(claims) > 1:
        return Record(name, "ambiguous", (_two_claims(name, claims),), distributions=distributions)
    claim = claims[0]
    unmet = metadata.unmet(claim)
    if unmet:
        return Record(name, "incompatible", unmet, distributions=distributions)
    try:
        spec = claim.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  a wheel may raise anything, also SystemExit, and must not take the others with it
        text = "".join(traceback.format_exception(error))
        reason = Reason(f"loading {claim.value} raised {root_cause(error)}", f"pip install --force-reinstall {claim.distribution.name}")
        return Record(name, "broken", (reason,), distributions=distributions, exception=error, traceback=text)
    faults = _spec_faults(name, claim, spec)
    if faults:
        return Record(name, "broken", faults, distributions=distributions)
    assert isinstance(spec, BackendSpec)
    other = _other_protocol(claim, spec)
    if other:
        return Record(name, "incompatible", (other,), spec, distributions)
    against = [Reason(spec.missing, "use backend='reference'")] if spec.missing else []
    gpu = missing_gpu(spec, gpus)
    if gpu:
        against.append(gpu)
    return Record(name, "unavailable" if against else "ok", tuple(against), spec, distributions)


def root_cause(error: BaseException) -> str:
    """An exception in one line, with the one at the bottom of its chain when that is another."""
    bottom, seen = error, {id(error)}
    while (deeper := bottom.__cause__ or (None if bottom.__suppress_context__ else bottom.__context__)) and id(deeper) not in seen:
        bottom = deeper
        seen.add(id(bottom))
    line = _line(error)
    return line if bottom is error else f"{line} (at the bottom: {_line(bottom)})"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _two_claims(name: str, claims: tuple[Claim, ...]) -> Reason:
    named = " and ".join(f"{c.distribution.name} {c.distribution.version} in {c.distribution.location} ({c.value})" for c in claims)
    keep = ", or ".join(f"pip uninstall {other}" for other in sorted({claim.distribution.name for claim in claims}))
    return Reason(f"the name {name!r} is claimed by {named}", f"keep one: {keep}")


def _spec_faults(name: str, claim: Claim, spec: object) -> tuple[Reason, ...]:
    repair = f"install another version of {claim.distribution.name}, or tell its authors"
    if not isinstance(spec, BackendSpec):
        return (Reason(f"{claim.value} is a {type(spec).__name__}; allowed: a megamoe.protocol.BackendSpec", repair),)
    checks = (
        (spec.name == name, f"its description is named {spec.name!r}; allowed: its entry-point name {name!r}"),
        (_is_version(spec.protocol), f"its protocol is {spec.protocol!r}; allowed: (major, minor)"),
        (_are_archs(spec.archs), f"its archs are {spec.archs!r}; allowed: a tuple of (major, minor) or (major, None)"),
        (bool(re.fullmatch(r"[\w.]+:[\w.]+", str(spec.factory))), f"its factory is {spec.factory!r}; allowed: 'module:Class'"),
    )
    return tuple(Reason(text, repair) for fine, text in checks if not fine)


def _is_version(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(number, int) for number in value)


def _are_archs(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(arch, tuple) and len(arch) == 2 and isinstance(arch[0], int) and isinstance(arch[1], int | None) for arch in value
    )


def _other_protocol(claim: Claim, spec: BackendSpec) -> Reason | None:
    (major, minor), (core_major, core_minor) = spec.protocol, PROTOCOL
    if major == core_major and minor <= core_minor:
        return None
    newer = (major, minor) > (core_major, core_minor)
    text = f"written for backend protocol {major}.{minor}; this megamoe-core speaks {core_major}.0 to {core_major}.{core_minor}"
    return Reason(text, f"pip install --upgrade {'megamoe-core' if newer else claim.distribution.name}")
