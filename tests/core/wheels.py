"""Distributions planted in an empty site folder, as discovery would find them installed, and GPUs as the driver would report them."""

import itertools
import sys
from pathlib import Path

import importlib_metadata  # noqa: F401  planted sites have no third-party modules, so what discovery needs is loaded first
import packaging.requirements  # noqa: F401

from megamoe import catalog, nvml

SPEC = """
from megamoe.protocol import BackendSpec
SPEC = BackendSpec(name={name!r}, protocol={protocol!r}, archs={archs!r}, formats=("bf16",), summary="planted", factory={factory!r}, {more})
"""

BACKEND = """
from megamoe.protocol import Reason, Verdict
from {module} import SPEC
class Backend:
    spec = SPEC
    asked = []
    def probe(self, device=None):
        self.asked.append(device)
        return Verdict({reasons})
    def supports(self, problem, ranks=1): return Verdict()
    def plan(self, problem, *, ranks=1, knobs=None): raise NotImplementedError
    def prepare_weights(self, plan, weights): raise NotImplementedError
    def open_session(self, plan, packed, group=None): raise NotImplementedError
"""

HOPPER = nvml.Device(0, "NVIDIA H200", "GPU-1", (9, 0), 150_000_000_000)
WORKSTATION = nvml.Device(1, "RTX PRO 6000", "GPU-2", (12, 0), 96_000_000_000)
_serial = itertools.count()


def gpus(*devices):
    """What NVML reports on a machine with these GPUs, or on one without a driver."""
    return nvml.Gpus(devices=devices, driver="580.65.06", cuda=(13, 0)) if devices else nvml.Gpus(problem="no NVIDIA driver")


class Site:
    """A site folder that holds planted wheels alone."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def info(self, dist, version="0.1.0", *, entries="", requires=(), kind="dist-info"):
        """Metadata of a distribution. ``entries`` is the text of entry_points.txt."""
        place = self.folder / (
            f"{dist.replace('-', '_')}-{version}.dist-info" if kind == "dist-info" else f"{dist.replace('-', '_')}.egg-info"
        )
        place.mkdir()
        lines = [f"Metadata-Version: 2.4\nName: {dist}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        (place / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text("\n".join(lines) + "\n\nDescription.\n")
        if entries:
            (place / "entry_points.txt").write_text(entries)
        return place

    def module(self, source):
        """A module of a name used nowhere else; returns the name."""
        name = f"planted_{next(_serial)}"
        (self.folder / f"{name}.py").write_text(source)
        return name

    def wheel(self, name, source, *, dist="", version="0.1.0", requires=(), value=""):
        """A distribution claiming the backend ``name``, whose description is in a module with this source; returns the module's name."""
        module = self.module(source)
        self.info(dist or f"planted-{name}", version, entries=claim(name, value or f"{module}:SPEC"), requires=requires)
        return module

    def backend(self, name, archs=((9, 0),), *, protocol=(1, 0), more="", reasons="", dist="", version="0.1.0", requires=(), factory=""):
        """A whole backend: its wheel, its description and a class that answers ``probe`` with ``reasons``; returns the module's name."""
        module = f"planted_{next(_serial)}"
        made_by = factory or f"{module}_kernels:Backend"
        text = SPEC.format(name=name, protocol=protocol, archs=archs, factory=made_by, more=more)
        (self.folder / f"{module}.py").write_text(text)
        (self.folder / f"{module}_kernels.py").write_text(BACKEND.format(module=module, reasons=reasons))
        self.info(dist or f"planted-{name}", version, entries=claim(name, f"{module}:SPEC"), requires=requires)
        return module


def claim(name, value):
    """The text of an entry_points.txt with one backend."""
    return f"[console_scripts]\nother = other:main\n\n[megamoe.backends]\n{name} = {value}\n"


def see_only(monkeypatch, *folders):
    """Let discovery see these folders, no GPU and no settings; everything is as before when the test ends."""
    monkeypatch.setattr(sys, "path", [*map(str, folders), *without_site_packages()])
    for name in ("MEGAMOE_BACKEND", "MEGAMOE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(catalog, "_known", None)
    see_gpus(monkeypatch)


def see_gpus(monkeypatch, *devices):
    """Let the driver report these GPUs."""
    monkeypatch.setattr(nvml, "query", lambda: gpus(*devices))
    monkeypatch.setattr(nvml, "_known", None)


def without_site_packages():
    """``sys.path`` less every folder that holds installed or editable distributions."""
    hides = ("site-packages", "dist-packages", str(Path("packages", "megamoe")))
    return [entry for entry in sys.path if not any(part in entry for part in hides)]
