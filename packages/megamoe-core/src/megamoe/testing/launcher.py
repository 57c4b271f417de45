"""Runs a function on several ranks of this machine by the engine of torchrun: a process each, a torch.distributed group among them, every
rank's error in one place.

def work(rank, tokens):                     # module level: processes find it by name
    ...                                     # torch.distributed is initialized
    return result                           # anything that pickles

results = launch(work, 4, [5, 0, 9, 1])     # [result of rank 0, ...]
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megamoe.env import THREADS, threads_of_children
from megamoe.errors import MegaMoEError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_ON_ONE_MACHINE = {
    "GLOO_SOCKET_IFNAME": "{loopback}",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "{loopback}",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY": "AF_INET",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Ranks of one machine meet on its loopback interface, whatever networks there are, and reach each other by loads and stores alone. Set
where the user has not set another value."""

_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed: long enough to report errors that follow from it."""


class RanksFailed(MegaMoEError):
    """At least one rank failed.

    Attributes:
        errors: for every rank that did not finish its traceback, or what became of it.
        first: the rank that failed first; ``None`` when ranks were ended because time was up.
    """

    def __init__(self, errors: Mapping[int, str], ranks: int, first: int | None = None) -> None:
        self.errors = dict(sorted(errors.items()))
        self.first = first
        texts = [f"---- rank {rank}\n{self.errors[rank].rstrip()}" for rank in sorted(self.errors, key=lambda rank: (rank != first, rank))]
        order = "" if first is None else f", rank {first} first"
        super().__init__("\n".join([f"{len(errors)} of {ranks} ranks failed{order}:", *texts]))


@dataclass(frozen=True, slots=True)
class _Job:
    """What the ranks' processes have to do; pickles without importing the function's module."""

    module: str
    file: str
    function: str
    arguments: bytes
    ranks: int
    backend: str
    timeout: float
    end: float
    threads: int
    env: Mapping[str, str]
    folder: str

    def result(self, rank: int) -> Path:
        """Written when the rank has finished."""
        return Path(self.folder, f"{rank}.result")

    def stack(self, rank: int) -> Path:
        """Where the rank was when it was told to end, or when time was up; empty until then."""
        return Path(self.folder, f"{rank}.stack")


def launch(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank and return the results by rank.

    When a rank fails, torchrun tells the others to end; they have five seconds to finish or to report what follows from it, so that what
    survivors of a lost peer saw is known.

    Args:
        function: a module-level function; its module may be a test file that is on no import path.
        ranks: number of processes.
        args: the same for every rank; anything that pickles.
        timeout: seconds for the whole, and for each collective.
        backend: torch.distributed backend, for example ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        env: environment variables to set in every process before ``function``'s module is loaded.

    Raises:
        RanksFailed: a rank raised, died or did not finish in time; the others were ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _start_server()
    with tempfile.TemporaryDirectory(prefix="megamoe-ranks-") as folder, _quiet(), _signals_given_back():
        job = _Job(
            module=function.__module__,
            file=inspect.getfile(function),
            function=function.__qualname__,
            arguments=pickle.dumps(args),
            ranks=ranks,
            backend=backend,
            timeout=timeout,
            end=time.time() + timeout,
            threads=0 if THREADS.name in os.environ else max(1, (os.cpu_count() or 1) // ranks),
            env=dict(env or {}),
            folder=folder,
        )
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id="megamoe",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver",
        )
        try:
            elastic_launch(config, _main)(job)
        except ChildFailedError as error:
            raise _failure(job, error) from None
        return [pickle.loads(job.result(rank).read_bytes()) for rank in range(ranks)]


def _start_server() -> None:
    """The process that all ranks are forked from, with what takes long to load loaded once.

    As torchrun has it, libraries start no threads of their own in the ranks unless the user says how many: numpy would take every core in
    every rank, and they would be in each other's way.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["numpy", "torch.distributed.launcher.api"])
    with threads_of_children(1):
        forkserver.ensure_running()


@contextmanager
def _quiet() -> Iterator[None]:
    """What torchrun logs of failures is in the error that is raised."""
    logs = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")]
    kept, nowhere = [log.propagate for log in logs], logging.NullHandler()
    for log in logs:
        log.propagate = False
        log.addHandler(nowhere)
    try:
        yield
    finally:
        for log, propagate in zip(logs, kept, strict=True):
            log.propagate = propagate
            log.removeHandler(nowhere)


@contextmanager
def _signals_given_back() -> Iterator[None]:
    """torchrun takes the signals that end a process and keeps them: here they end the ranks and then unwind this process."""
    from torch.distributed.elastic.multiprocessing import SignalException

    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:  # another thread than the main one keeps them, and may not set them
                signal.signal(number, handler)


def _failure(job: _Job, failed: ChildFailedError) -> RanksFailed:
    """What every rank left behind that did not finish."""
    first, death = failed.get_first_failure()
    reports = {int(file.parent.name): file for file in Path(job.folder).glob("*/*/*/error.json")}
    errors: dict[int, str] = {}
    for rank in range(job.ranks):
        if rank in reports:
            errors[rank] = json.loads(reports[rank].read_text())["message"]["extraInfo"]["py_callstack"]
        elif job.result(rank).exists():
            continue
        elif job.stack(rank).exists() and (stack := job.stack(rank).read_text()):
            threads = [thread for thread in stack.split("\n\n") if end_with_parent.__name__ not in thread]
            errors[rank] = "\n\n".join(["had not finished when the ranks were ended; it was at", *threads])
        else:
            errors[rank] = "the process ended without a report" + f", exit code {death.exitcode}" * (rank == first)
    if first in reports:  # torchrun's clock counts whole seconds
        return RanksFailed(errors, job.ranks, min(reports, key=lambda rank: reports[rank].stat().st_mtime_ns))
    return RanksFailed(errors, job.ranks, None if time.time() >= job.end else first)


def _main(job: _Job) -> None:
    """A rank's process."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    rank = int(os.environ["RANK"])
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it wherever it is, also outside Python
    os.dup2(2, 1)  # stdout is for the caller's results: what libraries print there would be among them
    with job.stack(rank).open("w") as stack:
        signal.signal(signal.SIGTERM, lambda *_: faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=stack))
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        faulthandler.dump_traceback_later(max(job.end - time.time(), 0.001), exit=True, file=stack)
        try:
            job.result(rank).write_bytes(pickle.dumps(_run(job, rank)))
        except BaseException as error:  # noqa: BLE001  the parent raises it
            get_error_handler().record_exception(error)
            sys.exit(1)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # torchrun keeps the process until all have finished; who was told to end before is not told again.
        if os.fstat(stack.fileno()).st_size:
            sys.exit(1)


def end_with_parent() -> None:
    """For a thread of a process that nobody else ends when its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(job: _Job, rank: int) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.update(job.env)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for name, value in _ON_ONE_MACHINE.items():
            os.environ.setdefault(name, value.format(loopback=loopback))
    # A rank with little to do would leave while the others still connect to it.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    if job.threads:
        torch.set_num_threads(job.threads)
    dist.init_process_group(job.backend, timeout=timedelta(seconds=job.timeout))
    function = _load(job)
    for name in job.function.split("."):
        function = getattr(function, name)
    return function(rank, *pickle.loads(job.arguments))


def _load(job: _Job) -> Any:
    """The function's module: by name where it is importable, else from its file, as pytest loads test files."""
    try:
        return importlib.import_module(job.module)
    except ModuleNotFoundError as error:
        if not job.module.startswith(error.name or "\0"):
            raise
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    return module
