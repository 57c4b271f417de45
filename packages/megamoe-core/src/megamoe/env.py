"""Every environment variable megamoe reads. Nothing else in the project touches ``os.environ`` for its own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megamoe.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, what it does and what holds when it is not set."""

    name: str
    meaning: str
    default: str

    def read(self) -> str | None:
        """The value as set by the user, stripped; ``None`` when unset or blank."""
        return os.environ.get(self.name, "").strip() or None

    def shown(self) -> str | None:
        """The value as it stands, for tables: quoted when blank; ``None`` when unset."""
        value = os.environ.get(self.name)
        return repr(value) if value is not None and not value.strip() else value


BACKEND = Variable("MEGAMOE_BACKEND", "name of the backend to use; an explicit argument wins", "chosen from the device")
DISABLE = Variable("MEGAMOE_DISABLE", "comma-separated backend names that discovery marks as disabled", "none")
ARCH = Variable(
    "MEGAMOE_ARCH", "architecture that `compile` and `explain` assume, for example sm_90a", "the visible device, else the backend's own"
)
CACHE_DIR = Variable("MEGAMOE_CACHE_DIR", "folder of the compile and knob caches", "~/.cache/megamoe")
TIMEOUT = Variable("MEGAMOE_TIMEOUT", "seconds that a wait inside a kernel may last", "30")
LOG = Variable("MEGAMOE_LOG", "log level on stderr: debug, info, warning, error", "warning")
TEST_RANKS = Variable(
    "MEGAMOE_TEST_RANKS", "1: also run kernels for several ranks that were not yet seen to run on GPUs; for the tests that prove them", "no"
)

VARIABLES = (BACKEND, DISABLE, ARCH, CACHE_DIR, TIMEOUT, LOG, TEST_RANKS)

VISIBLE_DEVICES = Variable("CUDA_VISIBLE_DEVICES", "GPUs that this process may use, by index or UUID", "all")
DEVICE_ORDER = Variable("CUDA_DEVICE_ORDER", "what a GPU's index counts: FASTEST_FIRST or PCI_BUS_ID", "FASTEST_FIRST")

MPS_PIPE = Variable("CUDA_MPS_PIPE_DIRECTORY", "where a running CUDA MPS listens", "/tmp/nvidia-mps")

THREADS = Variable("OMP_NUM_THREADS", "threads of a process's computations on the CPU", "one for each core")

CUDA_VARIABLES = (VISIBLE_DEVICES, DEVICE_ORDER, MPS_PIPE)
"""Variables of the CUDA driver that megamoe has to follow."""


def requested_backend() -> str | None:
    """Backend named by ``MEGAMOE_BACKEND``, or ``None``."""
    return BACKEND.read()


def disabled_backends() -> frozenset[str]:
    """Names listed in ``MEGAMOE_DISABLE``."""
    return frozenset(name.strip() for name in (DISABLE.read() or "").split(",") if name.strip())


def compile_arch() -> str | None:
    """Architecture named by ``MEGAMOE_ARCH``, or ``None``."""
    return ARCH.read()


def cache_dir() -> Path:
    """Folder for caches (created by whoever writes into it).

    Below ``/nonexistent``, and so a folder that cannot be written, where the user has no home: containers run under any number.
    """
    path = os.path.expanduser(CACHE_DIR.read() or CACHE_DIR.default)
    return Path("/nonexistent", path) if path.startswith("~") else Path(path)


def cache_writable() -> bool:
    """Whether the cache folder is there and can be written, or can be made."""
    folder = cache_dir()
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def visible_devices() -> str | None:
    """``CUDA_VISIBLE_DEVICES`` as it stands, ``None`` when unset. Blank is not unset: it hides every GPU."""
    return os.environ.get(VISIBLE_DEVICES.name)


def device_order() -> str:
    """What a GPU's index in ``CUDA_VISIBLE_DEVICES`` counts."""
    return DEVICE_ORDER.read() or DEVICE_ORDER.default


def mps_pipe() -> Path:
    """Folder in which a running CUDA MPS listens; there is a file ``control`` while one does."""
    return Path(MPS_PIPE.read() or MPS_PIPE.default)


def with_variables(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with some variables added, for a child process."""
    return {**os.environ, **more}


def threads() -> int:
    """Threads that numpy's own products use in this process, and what else computes on the CPU here: ``OMP_NUM_THREADS``, or one a core."""
    given = (THREADS.read() or "").partition(",")[0]
    return max(1, int(given)) if given.isdecimal() else len(os.sched_getaffinity(0))


@contextmanager
def threads_of_children(count: int) -> Iterator[None]:
    """Processes started in this block compute with so many threads each, unless the user said how many."""
    given = THREADS.name in os.environ
    os.environ.setdefault(THREADS.name, str(count))
    try:
        yield
    finally:
        if not given:
            del os.environ[THREADS.name]


def timeout_seconds() -> float:
    """Deadline of waits inside kernels, in seconds.

    Raises:
        InvalidInput: the value is not a number above 0.
    """
    text = TIMEOUT.read() or TIMEOUT.default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidInput(
            f"{TIMEOUT.name}={text!r} is not a deadline; allowed: a number of seconds above 0.", hint=f"unset {TIMEOUT.name}"
        )
    return seconds


def allows_unproved_ranks() -> bool:
    """Whether backends plan for more ranks than their kernels have been proved on."""
    return TEST_RANKS.read() == "1"


def log_level() -> str:
    """Log level name in upper case.

    Raises:
        InvalidInput: the value is none of debug, info, warning, error.
    """
    level = (LOG.read() or LOG.default).lower()
    if level not in ("debug", "info", "warning", "error"):
        raise InvalidInput(f"{LOG.name}={level!r} is not a log level; allowed: debug, info, warning, error.", hint=f"unset {LOG.name}")
    return level.upper()
