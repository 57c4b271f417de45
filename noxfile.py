"""Every check of the project, one session each. ``nox`` alone runs all that a machine without a GPU can; ``nox -l`` lists them.

Wheels are built once, by ``build``, into ``dist/``; every session that tests one installs it from there into a fresh environment and
runs its tests from a temporary folder, so that nothing can come from the source tree.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent.resolve()
DIST = ROOT / "dist"
ARCHS = ("sm90", "sm100", "sm120")
PACKAGES = {f"megamoe-{part}": "megamoe" if part == "core" else f"megamoe_{part}" for part in ("core", *ARCHS)}
"""Import package of every wheel."""
SOURCES = tuple(str(ROOT / "packages" / name / "src") for name in PACKAGES)
ON_SOURCE = {"PYTHONPATH": os.pathsep.join(SOURCES), "MYPYPATH": os.pathsep.join(SOURCES)}
CAPABILITIES = {"sm90": ((9, 0),), "sm100": ((10, 0), (10, 3)), "sm120": ((12, 0), (12, 1))}
VERSION = re.search(r'^__version__ = "(.+)"', Path(SOURCES[0], "megamoe", "__init__.py").read_text(), re.MULTILINE).group(1)

CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PYTEST = ("pytest>=9,<10", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.120")
TRANSFORMERS = "transformers>=5.24,<6"  # the client that tests of core bring; as in core's extra
CUTLASS = "nvidia-cutlass-dsl[cu13]==4.8.*"
TVM_FFI = "apache-tvm-ffi>=0.1.15"
LIGHT = ("importlib-metadata>=8.5", "numpy>=1.26", "packaging>=24.0", "rich>=13.7")  # what core needs apart from torch
RUFF = "ruff==0.17.6"  # pinned: its rules and its formatting change between releases
# What builds the emulation's device functions; the parts must be of one release.
NVCC = tuple(f"nvidia-{part}==13.1.*" for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl"))
SANITIZER = "nvidia-cuda-sanitizer-api>=13.5"
MYPY = "mypy==2.4.1"

OTHER_PYTHONS = tuple(f"3.{minor}" for minor in range(11, 15) if minor != sys.version_info.minor)

# Threads of several test processes would fight over two cores.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

nox.needs_version = ">=2025.2.9"
nox.options.error_on_external_run = True
nox.options.sessions = (
    *("lint", "types", "build", "inspect", "minimal", "upgrade", "coexist", "wheel_tests", "tests"),
    *("compile", "machine", "compile-python", "drop"),
    *(f"gpu-{arch}" for arch in ARCHS),
    "multigpu",
)


def _dist(session: nox.Session, name: str, pattern: str = "-py3-none-any.whl") -> str:
    """Path of a built distribution."""
    path = DIST / f"{name.replace('-', '_')}-{VERSION}{pattern}"
    if not path.exists():
        session.error(f"{path.relative_to(ROOT)} is not there: run `nox -s build` first")
    return str(path)


def _pytest(session: nox.Session, *arguments: str, environment: str = "", env: dict[str, str] | None = None) -> None:
    """Run tests of the checkout against what is installed, from a folder that holds no source."""
    chosen = ("--environment", environment) if environment else ()
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    with tempfile.TemporaryDirectory(prefix="megamoe-") as folder, session.chdir(folder):
        session.run("python", "-m", "pytest", *config, *chosen, *arguments, *session.posargs, env={**THREADS, **(env or {})})


def _install_arch(session: nox.Session, arch: str, *others: str, extra: str = "") -> None:
    """Core and one arch wheel as a user gets them: through core's extra, with ``extra`` beside it."""
    extras = ",".join(filter(None, (arch, extra)))
    session.install(*CONSTRAINTS, *PYTEST, *others, f"{_dist(session, 'megamoe-core')}[{extras}]", "--find-links", str(DIST))


def _tests(*folders: str) -> list[str]:
    return [str(ROOT / "tests" / folder) for folder in folders]


@nox.session
def lint(session: nox.Session) -> None:
    """Style, layers, package metadata, and the kernel drops: verbatim, and all that the shims rely on still there."""
    session.install(RUFF, "import-linter>=2.16", "validate-pyproject[all]>=0.24", *LIGHT, *PYTEST)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("validate-pyproject", *(f"packages/{name}/pyproject.toml" for name in PACKAGES), silent=True)
    session.run("lint-imports", "--no-logo", env=ON_SOURCE)
    session.run("python", "-m", "pytest", *_tests("packaging/test_metadata.py", "packaging/test_ci.py"), env=ON_SOURCE)
    drops = [
        f"packages/{name}" for name, package in PACKAGES.items() if (ROOT / "packages" / name / "src" / package / "drop.toml").exists()
    ]
    if drops:
        session.run("python", "-m", "megamoe", "drop", "verify", *drops, env=ON_SOURCE)
        session.run("python", "-m", "megamoe", "drop", "audit", *drops, env=ON_SOURCE)


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on everything but kernel code, which the DSL types in its own way."""
    session.install(*CONSTRAINTS, MYPY, "torch", *LIGHT, *PYTEST)  # the conformance kit is made of pytest classes
    session.run("mypy", *(part for package in PACKAGES.values() for part in ("-p", package)), env=ON_SOURCE)


@nox.session
def build(session: nox.Session) -> None:
    """Each sdist from the checkout, and each wheel from its sdist, into dist/."""
    session.install("build>=1.2", "hatchling>=1.27")
    shutil.rmtree(DIST, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{name}", silent=True)
    for path in sorted(DIST.iterdir()):
        session.log(f"{path.name}  {path.stat().st_size:,} bytes")


@nox.session(requires=["build"])
def inspect(session: nox.Session) -> None:
    """What is inside dist/: metadata that an index accepts, tidy wheels, licence texts, and the same bytes when built again."""
    session.install("twine>=6", "check-wheel-contents>=0.6", "build>=1.2", "hatchling>=1.27", *PYTEST)
    wheels = [_dist(session, name) for name in PACKAGES]
    sdists = [_dist(session, name, ".tar.gz") for name in PACKAGES]
    session.run("twine", "check", "--strict", *wheels, *sdists)
    session.run("check-wheel-contents", *wheels)
    session.run("python", "-m", "pytest", *_tests("packaging/test_dist.py"), "--environment", "inspect")
    again = Path(session.create_tmp()) / "again"
    shutil.rmtree(again, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(again), f"packages/{name}", silent=True)
    for first in (*wheels, *sdists):
        second = again / Path(first).name
        digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (first, second)]
        if digests[0] != digests[1]:
            session.error(f"{second.name} is not reproducible: {digests[0]} and {digests[1]}")
        session.log(f"{second.name}  sha256 {digests[0]}, twice")


@nox.session(requires=["build"])
def minimal(session: nox.Session) -> None:
    """Core alone: it works, and says which wheel is missing and how to get it."""
    session.install(*CONSTRAINTS, *PYTEST, _dist(session, "megamoe-core"))
    _pytest(session, *_tests("packaging/test_minimal.py"), environment="minimal")


@nox.session(requires=["build"])
def upgrade(session: nox.Session) -> None:
    """Core went ahead, an arch wheel stayed behind: a record that says so, not a crash."""
    newer = Path(session.create_tmp()) / "newer"
    shutil.rmtree(newer, ignore_errors=True)
    shutil.copytree(ROOT / "packages" / "megamoe-core", newer)
    stamp = newer / "src" / "megamoe" / "__init__.py"
    stamp.write_text(stamp.read_text().replace(f'__version__ = "{VERSION}"', '__version__ = "99.0.0"'))
    session.install("build>=1.2", "hatchling>=1.27", *PYTEST)
    session.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(newer), str(newer), silent=True)
    session.install(*CONSTRAINTS, *map(str, newer.glob("*.whl")))
    session.install("--no-deps", _dist(session, "megamoe-sm90"))  # pip itself would refuse; --no-deps is how such mixtures come about
    _pytest(session, *_tests("packaging/test_upgrade.py"), environment="upgrade")


@nox.session(requires=["build"])
def coexist(session: nox.Session) -> None:
    """All four wheels in one environment, imported into one process."""
    session.install(*CONSTRAINTS, *PYTEST, f"{_dist(session, 'megamoe-core')}[all]", "--find-links", str(DIST))
    _pytest(session, *_tests("packaging/test_coexist.py"), environment="coexist")
    session.run("megamoe", "backends")
    session.run("megamoe", "demo")


@nox.session(requires=["build"])
@nox.parametrize("arch", ARCHS)
def wheel_tests(session: nox.Session, arch: str) -> None:
    """One arch wheel, brought by core's extra, in a fresh environment: its packaging and its tests that need no GPU."""
    _install_arch(session, arch)
    others = [f"--ignore-glob={ROOT}/tests/{arch}/test_{name}*" for name in ("compile", "machine")]  # they have sessions of their own
    _pytest(session, *_tests("packaging/test_installed.py", *_existing(arch)), *others, "--wheel", arch, environment="wheel")


@nox.session(requires=["build"])
def tests(session: nox.Session) -> None:
    """Core, the emulation's host side, and several ranks on the CPU, with all four wheels installed from dist/."""
    session.install(*CONSTRAINTS, *PYTEST, *NVCC, TRANSFORMERS, f"{_dist(session, 'megamoe-core')}[all]", "--find-links", str(DIST))
    here = _tests("core", "emulation", "ranks")
    _pytest(session, *here, "-m", "not alone", "-n", "2", "--dist", "loadfile")
    if not session.posargs:
        _pytest(session, *here, "-m", "alone")


@nox.session(requires=["build"])
@nox.parametrize("arch", ARCHS)
def compile(session: nox.Session, arch: str) -> None:
    """Every kernel variant of an arch wheel, compiled for its architecture; needs no GPU."""
    files = sorted(map(str, (ROOT / "tests" / arch).glob("test_compile*.py")))
    if not files:
        session.skip(f"megamoe-{arch} holds no kernel yet")
    _install_arch(session, arch, "nvidia-cuda-nvdisasm")  # the tests read the machine code
    _pytest(session, *files, "-n", "2")


@nox.session(requires=["build"])
def machine(session: nox.Session) -> None:
    """The sm90 wheel's kernels, run on the CPU by the tests' own machine for their PTX; needs g++ or clang++, no GPU."""
    _install_arch(session, "sm90")
    files = sorted(map(str, (ROOT / "tests" / "sm90").glob("test_machine*.py")))
    _pytest(session, *_tests("machine"), *files, "-n", "2")


def _gpus() -> list[dict[str, object]] | str:
    """GPUs of this machine as megamoe itself sees them (its query needs the standard library alone), or why there are none."""
    code = "import json; from dataclasses import asdict; from megamoe.nvml import gpus; print(json.dumps(asdict(gpus())))"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **ON_SOURCE}, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    return found["problem"] or found["devices"]


def _gpu_session(arch: str) -> None:
    @nox.session(name=f"gpu-{arch}")
    def on_gpu(session: nox.Session) -> None:
        found = _gpus()
        if isinstance(found, str):
            session.skip(f"needs an {arch} GPU: {found}")
        if not any(tuple(device["capability"]) in CAPABILITIES[arch] for device in found):
            session.skip(f"needs an {arch} GPU, found {', '.join(str(device['name']) for device in found)}")
        _install_arch(session, arch, TRANSFORMERS, extra="cu13")  # NVSHMEM: several ranks share the GPU under MPS, which the tests start
        # The emulation runs Blackwell code on Hopper, so it is tested there.
        if arch == "sm90":
            session.install(*CONSTRAINTS, *NVCC, SANITIZER)
        folders, marks = (("emulation",), " or emulated") if arch == "sm90" else ((), "")
        _pytest(session, *_tests("core", "ranks", *folders, *_existing(arch)), "-m", f"gpu or {arch}{marks}", environment="gpu")
        session.run("megamoe", "check", "--backend", arch)
        session.run("megamoe", "check", "--backend", arch, "--ranks", "2", success_codes=[0, 3])  # 3: a backend may refuse several ranks

    on_gpu.__doc__ = f"The {arch} wheel of dist/ on a GPU of that architecture; fails when no GPU test ran."


for _arch in ARCHS:
    _gpu_session(_arch)


@nox.session
def multigpu(session: nox.Session) -> None:
    """Several ranks over several GPUs, with the wheels that fit them."""
    found = _gpus()
    if isinstance(found, str):
        session.skip(f"needs two GPUs: {found}")
    if len(found) < 2:
        session.skip(f"needs two GPUs, found one {found[0]['name']}")
    session.install(*CONSTRAINTS, *PYTEST, f"{_dist(session, 'megamoe-core')}[all,cu13]", "--find-links", str(DIST))
    _pytest(session, *_tests("ranks", *_existing(*ARCHS)), "-m", "ranks", environment="gpu")
    session.run("megamoe", "check", "--ranks", str(len(found)))


@nox.session(requires=["build"])
def drop(session: nox.Session) -> None:
    """The drop workflow on real kernel trees: taken in, proved, audited, imported side by side."""
    session.install(*CONSTRAINTS, *PYTEST, CUTLASS, f"{_dist(session, 'megamoe-core')}[cu13]")  # the trees use NVSHMEM too
    _pytest(session, *_tests("packaging/test_drop_real.py"), environment="drop")


@nox.session(name="compile-python", requires=["build"])
def compile_python(session: nox.Session) -> None:
    """A kernel compiled by one Python version is found in the cache by another."""
    other = _other_python()
    if other is None:
        session.skip("needs a second Python of 3.11 or newer; found none of " + ", ".join(f"python{v}" for v in OTHER_PYTHONS))
    folder = Path(session.create_tmp()).resolve() / "other"
    session.run(other, "-m", "venv", "--clear", str(folder), external=True)
    wheel = _dist(session, "megamoe-core")
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "-qq")
    session.run(*pip, CUTLASS, TVM_FFI, *LIGHT, external=True)
    session.run(*pip, "--no-deps", wheel, external=True)  # compiling needs no torch
    session.install(*CONSTRAINTS, *PYTEST, CUTLASS, TVM_FFI, wheel)
    path = _tests("core/test_compile_cache.py")
    _pytest(session, *path, "-k", "other_python_version", env={"OTHER_PYTHON": str(folder / "bin" / "python")})


def _other_python() -> str | None:
    for version in OTHER_PYTHONS:
        name = shutil.which(f"python{version}")
        # A version manager's stand-in exists without a Python behind it, so ask.
        if name and subprocess.run([name, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0:
            return name
    return None


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Write one version into every wheel and every pin between them: ``nox -s bump -- 0.2.0``."""
    if len(session.posargs) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", session.posargs[0]):
        session.error("say which version: nox -s bump -- 0.2.0")
    new = session.posargs[0]
    for name in PACKAGES:
        package = ROOT / "packages" / name
        project = package / "pyproject.toml"
        project.write_text(re.sub(r"(megamoe-(?:core|sm\d+)(?:\[\w+\])?==)[^\"]+", rf"\g<1>{new}", project.read_text()))
        for stamp in package.glob("src/*/__init__.py"):
            stamp.write_text(re.sub(r'^__version__ = ".+"', f'__version__ = "{new}"', stamp.read_text(), flags=re.MULTILINE))
    session.log(f"{VERSION} -> {new}; add the release to CHANGELOG.md")


def _existing(*folders: str) -> list[str]:
    return [folder for folder in folders if (ROOT / "tests" / folder).is_dir()]
