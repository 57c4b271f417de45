"""Prove the installed backends: the kernel drop is what was recorded and still has what its adapter relies on, the backend can be created,
its kernels compile, and in every format it declares its results agree with a float64 oracle.

A step that this machine cannot do is skipped with its reason. With --ranks N the layer runs over N processes, with different numbers of
tokens, one rank without any. With --emulate ARCH, kernels for a Blackwell GPU are compiled, rewritten for Hopper and assembled instead;
that needs no GPU and launches nothing. Where such a GPU is present, the usual steps run on it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megamoe import catalog, select
from megamoe.catalog import Record
from megamoe.cli import _emulated, codes
from megamoe.cli._arguments import check_ranks, check_seed
from megamoe.cli.output import Output
from megamoe.errors import MegaMoEError
from megamoe.formats import describe
from megamoe.problem import MoEProblem, Placement, SwiGLU
from megamoe.protocol import Backend

SUMMARY = "prove the installed backends: drop, import, compile, results against the oracle"

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

_MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one step.

    Attributes:
        backend: whose.
        step: ``installed``, ``drop``, ``import``, ``compile``, ``emulate`` or ``run``.
        what: the format, for steps that go through all of them.
        result: ``passed``, ``failed`` or ``skipped``.
        seconds: how long it took.
        detail: what was found; the reason when failed or skipped.
    """

    backend: str
    step: str
    what: str
    result: str
    seconds: float
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Who is checked, on how many ranks."""
    parser.add_argument(
        "--backend", metavar="NAME", action="append", default=[], help="check this one only; may be repeated (default: all)"
    )
    parser.add_argument(
        "--format", metavar="NAME", action="append", default=[], help="check this format only; may be repeated (default: all)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="run over so many ranks, a process each (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random data (default: 0)")
    parser.add_argument("--emulate", choices=sorted(_emulated.CAPABILITIES), help="rewrite the kernels for this architecture for Hopper")


def run(args: argparse.Namespace) -> int:
    """Check and print. 1 when anything failed, 3 when no backend that was asked for could run."""
    out = Output.of(args)
    check_ranks(args.ranks)
    check_seed(args.seed)
    for name in args.format:
        describe(name)  # raises, with the names there are
    emulate = args.emulate if args.emulate and not _emulated.is_native(args.emulate) else None
    records = _records(args.backend)
    findings: list[Finding] = []
    with out.progress("checking") as step:
        for record in records:
            for finding in _check(record, args.format, args.ranks, args.seed, emulate):
                findings.append(finding)
                step()
    columns = ("backend", "step", "format", "result", "seconds", "detail")
    out.table(columns, [(f.backend, f.step, f.what, f.result, f"{f.seconds:.1f}", f.detail) for f in findings])
    ran = {f.backend for f in findings if f.step == ("emulate" if emulate else "run") and f.result == PASSED}
    failed = [f for f in findings if f.result == FAILED]
    idle = [name for name in args.backend if name not in ran]
    out.text()
    out.text(_summary(findings, ran), style="bold red" if failed else "bold green" if ran and not idle else "yellow")
    out.document("check", {"ok": not failed, "ranks": args.ranks, "ran": sorted(ran), "findings": findings})
    if failed:
        return codes.FAILED
    return codes.NOTHING_SUITABLE if idle or not ran else codes.OK


def _records(names: list[str]) -> list[Record]:
    found = {record.name: record for record in catalog.backends()}
    for name in names:
        if name not in found:
            select.load_backend(name)  # raises, with the command that installs it
    return [found[name] for name in dict.fromkeys(names)] if names else list(found.values())


def _check(record: Record, formats: list[str], ranks: int, seed: int, emulate: str | None) -> Iterator[Finding]:
    if record.state not in ("ok", "unavailable"):
        result = SKIPPED if record.state == "disabled" else FAILED
        yield Finding(record.name, "installed", "", result, 0.0, "; ".join(map(str, record.reasons)))
        return
    spec = record.spec
    assert spec is not None
    if spec.missing:
        yield Finding(record.name, "run", "", SKIPPED, 0.0, spec.missing)
        return
    if emulate and not _emulated.serves(spec, emulate):
        yield Finding(record.name, "emulate", "", SKIPPED, 0.0, f"it has no kernels for {emulate}")
        return
    yield from _check_drop(record)
    created: list[Backend] = []

    def create() -> str:
        created.append(select.load_backend(record.name))
        return spec.factory

    yield _step(record.name, "import", "", create)
    if not created:
        return
    backend = created[0]
    for name in formats or spec.formats:
        if name not in spec.formats:
            yield Finding(record.name, "run", name, SKIPPED, 0.0, f"it has no {name}; its formats: {', '.join(spec.formats)}")
            continue
        problem = _problem(name, ranks)
        # One rank is what every backend has to do in the formats it declares; more it may refuse.
        refused = backend.supports(problem, ranks).reasons if ranks > 1 else ()
        if refused:
            yield Finding(record.name, "run", name, SKIPPED, 0.0, "; ".join(reason.text for reason in refused))
            continue
        if emulate:
            yield _step(record.name, "emulate", name, partial(_emulated.rewrite_kernels, backend, problem, ranks, emulate))
            continue
        if spec.archs:
            yield _step(record.name, "compile", name, partial(_compile, backend, problem, ranks))
        if record.state == "ok":
            yield _step(record.name, "run", name, partial(_rehearse, record.name, problem, ranks, seed))
    if record.state != "ok" and not emulate:
        yield Finding(record.name, "run", "", SKIPPED, 0.0, "; ".join(reason.text for reason in record.reasons))


def _check_drop(record: Record) -> Iterator[Finding]:
    from megamoe.drop.locate import installed_drops

    assert record.spec is not None
    package = record.spec.factory.partition(".")[0]
    for folder in installed_drops():
        if folder.name != package:
            continue
        yield _step(record.name, "drop", "", partial(_prove, folder))


def _prove(package: Path) -> str:
    from megamoe.drop.audit import audit
    from megamoe.drop.verify import verify

    proof, relied = verify(package), audit(package)
    problems = [*proof.problems, *relied.problems]
    if problems:
        raise _Wrong("; ".join(map(str, problems)))
    origin = "first-party" if proof.manifest.first_party else "verbatim"
    return f"{proof.files} kernel files, {origin}; {relied.checks} things that the adapter relies on are there"


class _Wrong(MegaMoEError):
    """A step found something wrong."""


def _step(backend: str, step: str, what: str, work: Callable[[], str | None]) -> Finding:
    """Do the work; whatever it raises is a failed step, so that the other steps still run."""
    start = time.perf_counter()
    try:
        detail = work()
    except Exception as error:  # noqa: BLE001  kernels and compilers raise anything
        return Finding(backend, step, what, FAILED, time.perf_counter() - start, catalog.root_cause(error))
    if detail is None:
        return Finding(backend, step, what, SKIPPED, 0.0, "its kernels cannot be compiled ahead")
    return Finding(backend, step, what, PASSED, time.perf_counter() - start, detail)


def _compile(backend: Backend, problem: MoEProblem, ranks: int) -> str | None:
    from megamoe.compile import Precompiles
    from megamoe.compile.obtain import obtain

    if not isinstance(backend, Precompiles):
        return None
    obtained = [obtain(request) for request in backend.kernels(backend.plan(problem, ranks=ranks))]
    return f"{len(obtained)} kernels, {sum(found.hit for found in obtained)} of them from the cache"


def _rehearse(name: str, problem: MoEProblem, ranks: int, seed: int) -> str:
    from megamoe.testing.rehearsal import rehearse

    # One rank brings nothing, none bring equally much: a backend that waits for the wrong number of rows shows.
    tokens = [problem.max_tokens - 7 * (rank % 8) for rank in range(ranks)]
    if ranks > 1:
        tokens[1] = 0
    done = rehearse(name, problem, ranks=ranks, tokens=tokens, seed=seed, pattern="masked")
    if not done.ok:
        raise _Wrong(done.text)
    told = f"{sum(tokens)} tokens on {done.device}, relative L2 error {done.rel_l2:.2e}"
    if ranks == 1:
        return told
    moved = f"{done.wire_bytes / 1024:.1f} KiB on the wire of the rank with most, imbalance {done.imbalance:.2f}"
    return f"{told}, {1000 * done.seconds:.1f} ms on the slowest of {ranks} ranks, {moved}"


def _problem(format: str, ranks: int) -> MoEProblem:
    """Small enough for the oracle, uneven enough to find mistakes: a clamp that acts and experts that no rank's share divides evenly."""
    experts = max(8, 2 * ranks)
    return MoEProblem(
        experts=experts,
        top_k=3,
        hidden=512,
        intermediate=256,
        max_tokens=_MOST_TOKENS,
        format=format,
        activation=SwiGLU(limit=2.0),
        placement=Placement.even(experts, ranks) if experts % ranks else None,
    )


def _summary(findings: list[Finding], ran: set[str]) -> str:
    count = {result: sum(f.result == result for f in findings) for result in (PASSED, FAILED, SKIPPED)}
    told = f"{count[PASSED]} passed, {count[FAILED]} failed, {count[SKIPPED]} skipped"
    return f"{told}; ran: {', '.join(sorted(ran)) or 'none'}"
