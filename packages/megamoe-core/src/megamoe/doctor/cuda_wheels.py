"""Traps of the CUDA wheels around us: CuTe DSL's flavours, NVSHMEM's libraries, a torch without CUDA. All seen in the field.

A flavour is the CUDA major version that a wheel is built for. ``nvidia-cutlass-dsl`` brings CUDA 12; its extra ``cu13`` adds CUDA 13, and
of those installed the newest that the driver supports becomes active.
"""

from __future__ import annotations

import re

from megamoe.doctor.finding import Finding
from megamoe.doctor.installed import FAMILIES, Installed, numbers, version
from megamoe.nvml import Gpus

DSL = "nvidia-cutlass-dsl"
DSL_RANGE = ">=4.8,<4.9"
WITH_CU13 = f'pip install --upgrade "{DSL}[cu13]{DSL_RANGE}"'

_SEPARATE_FLAVOURS = (4, 8)
_BLACKWELL = 10


def dsl_overwritten(installed: Installed) -> list[Finding]:
    """CuTe DSL before 4.8: its CUDA 12 and CUDA 13 wheels write the same files, and the one that was installed last wins."""
    base, cu13 = version(installed, f"{DSL}-libs-base"), version(installed, f"{DSL}-libs-cu13")
    if base is None or cu13 is None or min(numbers(base), numbers(cu13)) >= _SEPARATE_FLAVOURS:
        return []
    text = (
        f"{DSL}-libs-base {base} (CUDA 12) and {DSL}-libs-cu13 {cu13} (CUDA 13) overwrite each other's files; which one works is chance."
        " From 4.8 on they are apart."
    )
    return [Finding("error", text, f"pip uninstall -y {DSL} {DSL}-libs-base {DSL}-libs-cu13; {WITH_CU13}")]


def dsl_drift(installed: Installed) -> list[Finding]:
    """Parts of CuTe DSL of different versions; they only work as one release."""
    parts = {name: packages[0].version for name, packages in sorted(installed.items()) if name == DSL or name.startswith(f"{DSL}-libs-")}
    if len(set(parts.values())) < 2:
        return []
    listed = ", ".join(f"{name} {found}" for name, found in parts.items())
    extra = "[cu13]" if f"{DSL}-libs-cu13" in parts else ""
    return [Finding("error", f"The parts of CuTe DSL have drifted apart: {listed}.", f'pip install --upgrade "{DSL}{extra}{DSL_RANGE}"')]


def dsl_flavour(installed: Installed, gpus: Gpus) -> list[Finding]:
    """The active flavour of CuTe DSL does not fit the driver, or is CUDA 12 on a Blackwell GPU whose driver has CUDA 13."""
    flavours = _flavours(installed, rf"{DSL}-libs-cu(\d+)")
    base = version(installed, f"{DSL}-libs-base")
    if base is not None and numbers(base) < _SEPARATE_FLAVOURS:
        flavours.add(12)  # before 4.8 the base wheel was the CUDA 12 flavour
    if not flavours or gpus.cuda is None or not gpus.devices:
        return []
    driver = gpus.cuda[0]
    fitting = [flavour for flavour in flavours if flavour <= driver]
    if not fitting:
        have = ", ".join(f"CUDA {flavour}" for flavour in sorted(flavours))
        text = f"CuTe DSL is installed for {have}, but the driver {gpus.driver} supports CUDA {gpus.cuda[0]}.{gpus.cuda[1]} at most."
        return [Finding("error", text, f'pip install "{DSL}{DSL_RANGE}" for CUDA 12, or update the driver')]
    blackwell = [d for d in gpus.devices if d.capability[0] >= _BLACKWELL]
    if max(fitting) < 13 <= driver and blackwell:
        text = (
            f"CuTe DSL's CUDA {max(fitting)} flavour is active for {blackwell[0].name}, whose driver has CUDA {driver};"
            " it has made wrong code for such GPUs."
        )
        return [Finding("error", text, WITH_CU13)]
    return []


def nvshmem_library(installed: Installed, gpus: Gpus) -> list[Finding]:
    """nvshmem4py without the NVSHMEM library of its flavour, in two flavours at once, or newer than the driver."""
    python, library = _flavours(installed, r"nvshmem4py-cu(\d+)"), _flavours(installed, r"nvidia-nvshmem-cu(\d+)")
    findings = []
    for flavour in sorted(python - library):
        other = f" (there is one for CUDA {', '.join(map(str, sorted(library)))})" if library else ""
        text = f"nvshmem4py-cu{flavour} has no library to load: nvidia-nvshmem-cu{flavour} is not installed{other}."
        findings.append(Finding("error", text, f"pip install nvidia-nvshmem-cu{flavour}"))
    if len(python) > 1:
        names = [f"nvshmem4py-cu{flavour}" for flavour in sorted(python)]
        keep = min(gpus.cuda[0], max(python)) if gpus.cuda else max(python)
        fix = f"pip uninstall -y {' '.join(names)}; pip install nvshmem4py-cu{keep}"
        findings.append(Finding("error", f"{' and '.join(names)} are both installed and share one folder; keep one.", fix))
    elif gpus.cuda is not None and python and min(python) > gpus.cuda[0]:
        (flavour,) = python
        text = f"nvshmem4py-cu{flavour} needs a driver with CUDA {flavour}; driver {gpus.driver} has CUDA {gpus.cuda[0]}.{gpus.cuda[1]}."
        fix = f"pip uninstall -y nvshmem4py-cu{flavour}; pip install nvshmem4py-cu{gpus.cuda[0]}, or update the driver"
        findings.append(Finding("error", text, fix))
    return findings


def torch_without_cuda(installed: Installed, gpus: Gpus) -> list[Finding]:
    """A CPU build of torch on a machine with a GPU."""
    found = version(installed, "torch")
    if found is None or not found.endswith("+cpu") or not gpus.devices:
        return []
    return [
        Finding(
            "error",
            f"torch {found} is built without CUDA, so {gpus.devices[0].name} cannot be used.",
            f'pip install --force-reinstall "torch=={found.removesuffix("+cpu")}"',
        )
    ]


def overwritten_files(installed: Installed) -> list[Finding]:
    """Two distributions that installed the same file with different contents: only one of them got its own."""
    owner: dict[tuple[str, str], tuple[str, str]] = {}
    clashes: dict[tuple[str, str], list[str]] = {}
    for name, packages in sorted(installed.items()):
        if not name.startswith(FAMILIES):
            continue
        for path, digest in packages[0].files.items():
            first, other = owner.setdefault((packages[0].location, path), (name, digest))
            if digest and other and digest != other:
                clashes.setdefault((first, name), []).append(path)
    return [
        Finding(
            "error",
            f"{first} and {second} installed {len(paths)} file(s) with different contents over each other, for example {paths[0]}.",
            f"pip uninstall -y {first} {second}, then install the one that is wanted",
        )
        for (first, second), paths in sorted(clashes.items())
    ]


def _flavours(installed: Installed, pattern: str) -> set[int]:
    return {int(match[1]) for name in installed if (match := re.fullmatch(pattern, name))}
