"""The main job on this machine, whatever it has: the expert layer of a published model, cut to what the machine can do in a few seconds,
over expert-parallel ranks, by the backend that a user would get, judged by a float64 oracle.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace

from megamoe import catalog, env, nvml, select
from megamoe.catalog import Record
from megamoe.cli import codes
from megamoe.cli._arguments import check_ranks, check_seed
from megamoe.cli._problem import activation_text, add_problem_arguments, base_of, problem_of
from megamoe.cli.output import Output
from megamoe.errors import BackendUnavailable, MegaMoEError
from megamoe.presets import Preset
from megamoe.problem import MoEProblem, Placement

SUMMARY = "run the expert layer of a real model on this machine, cut to its size"

_REPEATS = 5
_PATIENCE_S = 600.0
"""A slow machine may take: it is shown what it can do, not judged."""
_JUDGED = 8
"""Tokens a rank that the oracle recomputes: float64 on the CPU takes a tenth of a second for each expert that they touch."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a machine does in a few seconds.

    Attributes:
        parameters: of all experts together.
        tokens: a rank and call.
        ranks: where the user does not say.
        why: for people.
    """

    parameters: int
    tokens: int
    ranks: int
    why: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which layer, on what."""
    add_problem_arguments(parser, model="qwen3-30b", max_tokens=4096)
    parser.add_argument("--backend", metavar="NAME", help="use this backend (default: the one that fits this machine)")
    parser.add_argument("--ranks", type=int, metavar="N", help="expert-parallel ranks, a process each (default: 2 on the CPU, 1 on a GPU)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, tokens and routes (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Run, judge and print. 1 when the oracle disagrees."""
    from megamoe.testing.rehearsal import STEPS, rehearse

    out = Output.of(args)
    record, note = _backend(args.backend)
    budget = _budget(record)
    ranks = budget.ranks if args.ranks is None else check_ranks(args.ranks)
    seed = check_seed(args.seed)
    whole = problem_of(args)
    problem = _cut(whole, budget, ranks)
    select.load_backend(record.name).plan(problem, ranks=ranks)  # what it refuses is said here, not by every rank
    _print_problem(out, base_of(args), whole, problem, budget)
    if note:
        out.text(note, style="yellow")
    with out.progress(f"running {record.name}", total=STEPS + _REPEATS if ranks == 1 else None) as step:
        done = rehearse(record.name, problem, ranks=ranks, seed=seed, repeats=_REPEATS, most=_JUDGED, timeout=_PATIENCE_S, step=step)
    out.text()
    columns = ("backend", "device", "ranks", "tokens", "time (ms)", "tokens/s", "error", "verdict")
    verdict = "pass" if done.ok else "fail"
    tokens = sum(done.tokens)
    speed = round(done.tokens_per_second)
    out.table(columns, [(done.backend, done.device, ranks, tokens, done.seconds * 1e3, speed, done.rel_l2, verdict)])
    out.text(f"The oracle recomputed {min(_JUDGED, problem.max_tokens)} tokens a rank in float64: {done.text}.")
    on_gpu = _on_gpus(whole)
    out.text()
    out.table(("on a GPU", "state", "what would run"), on_gpu, title="The whole layer on a GPU")
    out.document(
        "demo",
        {
            "problem": problem,
            "whole": whole,
            "why_cut": budget.why,
            "note": note,
            "ranks": ranks,
            "result": done,
            "ok": done.ok,
            "error": done.rel_l2,
            "tokens_per_second": done.tokens_per_second,
            "on_gpus": [dict(zip(("backend", "state", "what"), row, strict=True)) for row in on_gpu],
        },
    )
    return codes.OK if done.ok else codes.FAILED


def _backend(name: str | None) -> tuple[Record, str]:
    """The backend that a user would get, and what there is to say about the choice."""
    try:
        return select.choose(name), ""
    except BackendUnavailable as error:
        if name is not None or env.requested_backend() is not None:
            raise
        # A demonstration goes on where a job must not: the caller sees what is missing and a result all the same.
        return select.choose(select.REFERENCE), f"On the CPU instead, because: {error}"


def _budget(record: Record) -> Budget:
    gpus = nvml.gpus()
    if record.spec is not None and record.spec.archs and gpus.devices:
        gpu = gpus.devices[0]
        return Budget(700_000_000, 4096, 1, f"random weights are made on the CPU; {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB")
    where = gpus.problem or f"{record.name} runs on the CPU"
    return Budget(80_000_000, 64, 2, f"{where}; {os.cpu_count()} cores")


def _cut(whole: MoEProblem, budget: Budget, ranks: int) -> MoEProblem:
    """Fewer experts and tokens of the same widths: what one token's route costs stays what it is in the whole layer."""
    fit = budget.parameters // (3 * whole.hidden * whole.intermediate)
    experts = min(whole.experts, max(fit, whole.top_k))
    placement = Placement.even(experts, ranks) if experts % ranks else None
    return replace(whole, experts=experts, max_tokens=min(whole.max_tokens, budget.tokens), placement=placement)


def _print_problem(out: Output, model: Preset, whole: MoEProblem, problem: MoEProblem, budget: Budget) -> None:
    kept = f"hidden {problem.hidden}, intermediate {problem.intermediate}, top-{problem.top_k}, {activation_text(problem.activation)}"
    pairs = [("layer", f"routed experts of {model.model}"), ("kept", f"{kept}, {problem.format}")]
    changed = [
        f"{what} {before} -> {after}"
        for what, before, after in (
            ("experts", whole.experts, problem.experts),
            ("tokens a rank", whole.max_tokens, problem.max_tokens),
        )
        if before != after
    ]
    pairs.append(("cut", f"{', '.join(changed)} ({budget.why})" if changed else "nothing"))
    out.facts(pairs)


def _on_gpus(problem: MoEProblem) -> list[tuple[str, str, str]]:
    """For every backend that is made for GPUs: its state here, and its plan or what stands against one."""
    return [(r.name, r.state, _would_run(r, problem)) for r in catalog.backends() if r.spec is None or r.spec.archs]


def _would_run(record: Record, problem: MoEProblem) -> str:
    try:
        plan = select.load_backend(record.name).plan(problem)
    except MegaMoEError:
        missing = record.spec.missing if record.spec is not None else ""
        return missing or "; ".join(reason.text for reason in record.reasons) or f"nothing: see megamoe explain --backend {record.name}"
    size = sum(region.nbytes for region in plan.regions) / 2**20
    limit = max(plan.bounds.values(), default=0.0)
    bound = f", at least {limit:,.{0 if limit >= 10 else 1}f} us a call" if limit else ""
    return f"{problem.format}, {size:,.0f} MiB{bound}: megamoe explain --backend {record.name}"
