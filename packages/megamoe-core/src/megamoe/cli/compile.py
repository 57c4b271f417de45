"""Compile every kernel that a session may launch into the compile cache, so that opening one compiles nothing. Needs no GPU:
a machine without one can fill a cache for those that have it. Kernels that are there already are left alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING

from megamoe import env, select
from megamoe.cli import codes
from megamoe.cli._arguments import for_arch
from megamoe.cli._problem import add_knob_argument, add_problem_arguments, base_of, knobs_of, problem_of
from megamoe.cli.output import Output
from megamoe.errors import BackendUnavailable, InvalidInput, MegaMoEError

if TYPE_CHECKING:
    from megamoe.compile import KernelRequest
    from megamoe.problem import MoEProblem

SUMMARY = "fill the compile cache, also without a GPU"


@dataclass(frozen=True, slots=True)
class Job:
    """What decides about the kernels of a session; another process makes the same list from it."""

    backend: str
    problem: MoEProblem
    knobs: dict[str, object] | None
    arch: str | None
    biases: bool
    sms: int | None = None

    def requests(self) -> tuple[KernelRequest, ...]:
        """The kernels.

        Raises:
            BackendUnavailable: the backend compiles nothing.
        """
        from megamoe.compile import Precompiles

        backend = select.load_backend(self.backend)
        if not isinstance(backend, Precompiles):
            raise BackendUnavailable(
                f"Backend {self.backend!r} has no kernels to compile.", hint="name one that has, or its target: --arch sm_90a"
            )
        return backend.kernels(backend.plan(self.problem, knobs=self.knobs), self.arch, biases=self.biases, sms=self.sms)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel in the cache.

    Attributes:
        kernel: its readable name.
        arch: its target.
        digest: of its key; also the name of its file.
        hit: whether it was there before.
        seconds: what compiling took, now or then.
        registers, stack_bytes: of its most demanding function.
        nbytes: size of the object.
    """

    kernel: str
    arch: str
    digest: str
    hit: bool
    seconds: float
    registers: int
    stack_bytes: int
    nbytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The problem, the backend and how many processes compile."""
    add_problem_arguments(parser, model="dsv3", max_tokens=4096)
    parser.add_argument("--backend", metavar="NAME", help="whose kernels (default: those for --arch, else for this machine's GPU)")
    parser.add_argument("--arch", metavar="ARCH", help=f"target, for example sm_90a (default: {env.ARCH.name}, else the backend's own)")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes (default: one a core, 8 at most)"
    )
    parser.add_argument(
        "--biases",
        action=argparse.BooleanOptionalAction,
        help="for weights with expert biases, or without (default: as the model has them)",
    )
    parser.add_argument(
        "--sms",
        type=int,
        metavar="N",
        help="multiprocessors of the GPU: 114 in an H100 PCIe, 78 in an H20, fewer in a MIG slice (default for sm90: 132)",
    )
    add_knob_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compile; prints one line a kernel."""
    out = Output.of(args)
    if args.jobs < 1:
        raise InvalidInput(f"--jobs {args.jobs}; allowed: 1 or more.", hint="--jobs 2")
    arch = args.arch or env.compile_arch()
    biases = base_of(args).biases if args.biases is None else args.biases
    job = Job(args.backend or _backend(arch), problem_of(args), knobs_of(args), arch, biases, args.sms)
    if not env.cache_writable():
        raise MegaMoEError(
            f"The cache folder {env.cache_dir()} cannot be written.", hint=f"export {env.CACHE_DIR.name}=<a folder you can write>"
        )
    total = len(job.requests())
    done: list[Compiled] = []
    with out.progress("compiling", total=total) as step:
        for compiled in _compile(job, total, args.jobs):
            done.append(compiled)
            step()
    done.sort(key=lambda c: (c.kernel, c.digest))
    rows = [
        (c.kernel, "there" if c.hit else "compiled", round(c.seconds, 1), c.registers, c.stack_bytes, c.nbytes, c.digest[:12]) for c in done
    ]
    out.table(("kernel", "state", "seconds", "registers", "stack bytes", "bytes", "digest"), rows)
    out.document("compile", {"cache": env.cache_dir(), "kernels": done})
    return codes.OK


def _backend(arch: str | None) -> str:
    """The backend for the target that is named, else for this machine's GPU."""
    if arch is None:
        return select.choose().name
    record = for_arch(arch)
    if record is None:
        raise BackendUnavailable(f"No installed backend is made for {arch}.", hint="megamoe backends lists what each is made for")
    return record.name


def _compile(job: Job, total: int, jobs: int) -> Iterator[Compiled]:
    if jobs <= 1 or total <= 1:
        for index in range(total):
            yield _one(job, index)
        return
    # Spawned, since a forked child would share the compiler's threads.
    with ProcessPoolExecutor(min(jobs, total), mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_one, job, index) for index in range(total)]):
            yield future.result()


def _one(job: Job, index: int) -> Compiled:
    from megamoe.compile import cubin
    from megamoe.compile.obtain import obtain
    from megamoe.compile.store import Store

    request = job.requests()[index]
    got = obtain(request)
    if Store().load(got.digest) is None:
        raise MegaMoEError(
            f"{request.name} was compiled, but the cache folder {env.cache_dir()} did not keep it: a warning above says why.",
            hint=f"free some space, or export {env.CACHE_DIR.name}=<a folder you can write>",
        )
    used = [resources for image in cubin.images(got.object) for resources in cubin.resources(image)]
    return Compiled(
        kernel=request.name,
        arch=request.arch,
        digest=got.digest,
        hit=got.hit,
        seconds=got.seconds,
        registers=max(u.registers for u in used),
        stack_bytes=max(u.stack_bytes for u in used),
        nbytes=len(got.object),
    )
