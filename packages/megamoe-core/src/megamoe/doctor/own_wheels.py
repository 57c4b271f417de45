"""Faults of megamoe's own wheels: missing requirements, versions that have drifted apart, copies that shadow each other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType

import megamoe
from megamoe import metadata
from megamoe.doctor.finding import Finding
from megamoe.doctor.installed import FAMILIES, Installed, absent, public, version

NEEDS = {
    "importlib_metadata": "importlib-metadata",
    "numpy": "numpy",
    "packaging": "packaging",
    "rich": "rich",
    "torch": "torch",
}
"""What core requires: import name and distribution."""


def missing_requirements(found: Mapping[str, bool] | None = None) -> list[Finding]:
    """Requirements of core that cannot be imported. Asked of the import system, so it works where core has no metadata."""
    present = {name: importlib.util.find_spec(name) is not None for name in NEEDS} if found is None else found
    lacking = [NEEDS[name] for name, is_there in present.items() if not is_there]
    if not lacking:
        return []
    return [Finding("error", f"megamoe-core needs {', '.join(lacking)}, which cannot be imported.", f"pip install {' '.join(lacking)}")]


def version_drift(installed: Installed) -> list[Finding]:
    """Arch wheels of another version than core: they are made and tested together."""
    core = megamoe.__version__
    drifted = {
        name: found
        for name in (metadata.CORE, *metadata.ARCH_WHEELS)
        if (found := version(installed, name)) is not None and public(found) != public(core)
    }
    if not drifted:
        return []
    named = ", ".join(f"{name} is {found}" for name, found in drifted.items())
    # Core's own record disagreeing with the code that runs is a stale installation of the same kind.
    return [
        Finding(
            "error",
            f"Version drift: the running megamoe-core is {core}, but {named} by its metadata.",
            f"pip install --upgrade {' '.join(dict.fromkeys((metadata.CORE, *drifted)))}",
        )
    ]


def module_drift(installed: Installed, modules: Mapping[str, ModuleType] | None = None) -> list[Finding]:
    """Arch wheels whose imported package says another version than their metadata: two copies are mixed."""
    loaded = sys.modules if modules is None else modules
    findings = []
    for name in metadata.ARCH_WHEELS:
        module, recorded = loaded.get(name.replace("-", "_")), version(installed, name)
        imported = getattr(module, "__version__", recorded)
        if recorded is not None and imported != recorded:
            text = f"{name} is {recorded} by its metadata, but its package in {getattr(module, '__file__', 'memory')} says {imported}."
            findings.append(Finding("error", text, f"pip install --force-reinstall --no-deps {name}"))
    return findings


def shadowed_copies(installed: Installed) -> list[Finding]:
    """Several versions of one distribution on ``sys.path``: the first is imported, whatever pip shows."""
    findings = []
    for name, packages in sorted(installed.items()):
        versions = {package.version for package in packages}
        if (name == "torch" or name.startswith(FAMILIES)) and len(versions) > 1:
            places = ", ".join(f"{p.version} in {p.location}" for p in packages)
            text = f"{name} is there more than once ({places}); Python imports the first."
            findings.append(Finding("warning", text, f"pip uninstall {name}  (until none is left), then install it once"))
    return findings


def missing_files(installed: Installed) -> list[Finding]:
    """Distributions of which files are gone, as after the removal of a sibling that had shared them."""
    findings = []
    for name, packages in sorted(installed.items()):
        gone = absent(packages[0]) if name.startswith(FAMILIES) else ()
        if gone:
            text = f"{len(gone)} file(s) of {name} {packages[0].version} are gone, for example {gone[0]}."
            findings.append(Finding("error", text, f"pip install --force-reinstall --no-deps {name}=={packages[0].version}"))
    return findings
