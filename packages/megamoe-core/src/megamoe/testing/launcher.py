"""Runs a function on several ranks of this machine: a process each, a torch.distributed group among them, every rank's error in one place.

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
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

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


class RanksFailed(RuntimeError):
    """At least one rank failed.

    Attributes:
        errors: for every failed rank its traceback, or what became of it.
    """

    def __init__(self, errors: Mapping[int, str]) -> None:
        self.errors = dict(sorted(errors.items()))
        super().__init__("\n".join(f"---- rank {rank}\n{text.rstrip()}" for rank, text in self.errors.items()))


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank's process has to do; pickles without importing the function's module."""

    module: str
    file: str
    function: str
    rank: int
    ranks: int
    port: int
    backend: str
    timeout: float
    env: Mapping[str, str]
    stacks: str
    arguments: bytes


def launch(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank and return the results by rank.

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
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    context = multiprocessing.get_context("forkserver")
    # Loaded once in the server that all ranks are forked from, instead of once a rank.
    context.set_forkserver_preload(["torch.distributed"])
    # Port 0 and a store kept here: no other process can take the port between choosing and using it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as stacks:
        jobs = [
            _Job(
                module=function.__module__,
                file=inspect.getfile(function),
                function=function.__qualname__,
                rank=rank,
                ranks=ranks,
                port=store.port,
                backend=backend,
                timeout=timeout,
                env=dict(env or {}),
                stacks=f"{stacks}/{rank}",
                arguments=pickle.dumps(args),
            )
            for rank in range(ranks)
        ]
        running: dict[Connection, tuple[_Job, BaseProcess]] = {}
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = job, process
        return _collect(running, timeout)


def _collect(running: dict[Connection, tuple[_Job, BaseProcess]], timeout: float) -> list[Any]:
    """Receive one report per rank; end what is left when time is up."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    try:
        while running and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(running), left):
                assert isinstance(ready, Connection)
                job, process = running.pop(ready)
                try:
                    fine, report = ready.recv()
                except EOFError:
                    process.join(_GRACE_S)
                    fine, report = False, f"the process ended without a report, exit code {process.exitcode}"
                if fine:
                    results[job.rank] = pickle.loads(report)
                else:
                    errors[job.rank] = report
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for job, process in running.values():
            errors[job.rank] = f"had not finished when the ranks were ended; it was at\n{_stack(job, process)}"
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    if errors:
        raise RanksFailed(errors)
    return [results[rank] for rank in sorted(results)]


def _stack(job: _Job, process: BaseProcess) -> str:
    """Where a process is, as it writes it down on a signal."""
    path = Path(job.stacks)
    if process.pid is None or not path.exists():
        return "its start"
    os.kill(process.pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        if text := path.read_text():
            return text
    return "an unknown place"


def _main(job: _Job, report: Connection) -> None:
    """A rank's process."""
    import torch.distributed as dist

    with Path(job.stacks).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            result = _run(job)
        except BaseException:  # noqa: BLE001  the parent raises it
            report.send((False, traceback.format_exc()))
        else:
            report.send((True, pickle.dumps(result)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            faulthandler.unregister(signal.SIGUSR1)


def _run(job: _Job) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.update(job.env)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for name, value in _ON_ONE_MACHINE.items():
            os.environ.setdefault(name, value.format(loopback=loopback))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
    limit = timedelta(seconds=job.timeout)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.ranks, timeout=limit)
    function = _load(job)
    for name in job.function.split("."):
        function = getattr(function, name)
    return function(job.rank, *pickle.loads(job.arguments))


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
