"""What would run for a problem, and why: the backend that is chosen here, what speaks against the others, and the plan with its knobs,
memory regions, budgets and bounds. Plans need no GPU: --backend shows the plan of a backend that cannot run on this machine, --arch asks
for another GPU's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megamoe import catalog, env, select
from megamoe.catalog import Record
from megamoe.cli import codes
from megamoe.cli._arguments import check_ranks, for_arch
from megamoe.cli._problem import activation_text, add_knob_argument, add_problem_arguments, knobs_of, problem_of
from megamoe.cli.output import Output
from megamoe.errors import MegaMoEError

if TYPE_CHECKING:
    from megamoe.problem import MoEProblem
    from megamoe.protocol import Plan

SUMMARY = "what would run for a problem, and why"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer.

    Attributes:
        name: of the backend.
        state: of its record.
        chosen: whether it is the one that would run.
        against: everything that speaks against running it.
        plan: what it would run; ``None`` when it cannot plan the problem.
    """

    name: str
    state: str
    chosen: bool
    against: tuple[str, ...]
    plan: Plan | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The problem, and who is asked about it."""
    add_problem_arguments(parser, model="dsv3", max_tokens=4096)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="size of the expert-parallel group (default: 1)")
    parser.add_argument("--backend", metavar="NAME", help="explain this backend instead of the one that is chosen here")
    parser.add_argument("--arch", metavar="ARCH", help=f"assume a GPU of this architecture, for example sm_90a (default: {env.ARCH.name})")
    add_knob_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the choice and the plan. 3 when no backend would run the problem."""
    out = Output.of(args)
    problem = problem_of(args)
    check_ranks(args.ranks)
    chosen, why = _choice(args.backend, args.arch or env.compile_arch())
    candidates = [_ask(record, problem, args.ranks, chosen, knobs_of(args)) for record in catalog.backends()]
    plan = next((c.plan for c in candidates if c.chosen), None)
    _print(out, problem, args.ranks, why, candidates)
    if plan is not None:
        _print_plan(out, plan)
    document = {"problem": problem, "ranks": args.ranks, "chosen": chosen, "why": why}
    out.document("explain", {**document, "backends": [_plain(candidate) for candidate in candidates]})
    return codes.OK if plan is not None else codes.NOTHING_SUITABLE


def _choice(name: str | None, arch: str | None) -> tuple[str | None, str]:
    """The backend that would run, and why it is this one."""
    if name is not None:
        if name not in {record.name for record in catalog.backends()}:
            select.choose(name)  # raises, with the command that installs it
        return name, "named by --backend"
    if arch is not None:
        made = for_arch(arch)
        return (made.name, f"made for {arch}") if made else (None, f"no installed backend is made for {arch}")
    wish = env.requested_backend()
    try:
        record = select.choose()
    except MegaMoEError as error:
        return wish, str(error)
    if wish == record.name:
        return record.name, f"named by {env.BACKEND.name}"
    assert record.spec is not None
    return record.name, "made for the visible GPU" if record.spec.archs else "no GPU is visible"


def _ask(record: Record, problem: MoEProblem, ranks: int, chosen: str | None, knobs: dict[str, object] | None) -> Candidate:
    is_chosen = record.name == chosen
    against = [str(reason) for reason in record.reasons]
    plan = None
    try:
        backend = select.load_backend(record.name)
    except MegaMoEError as error:
        if not against:  # the record did not know yet
            against.append(str(error))
    else:
        verdict = backend.supports(problem, ranks)
        against += [str(reason) for reason in verdict.reasons]
        if verdict.ok:
            plan = backend.plan(problem, ranks=ranks, knobs=knobs if is_chosen else None)
    if not is_chosen and not against:
        against.append(_passed_over(record))
    return Candidate(record.name, record.state, is_chosen, tuple(against), plan)


def _passed_over(record: Record) -> str:
    assert record.spec is not None
    if record.spec.archs:
        return "Another backend fits better."
    return "It needs no GPU, so it is taken when none is visible, or by name."


def _plain(candidate: Candidate) -> dict[str, object]:
    """For JSON: the plan without the problem, which stands above, and without what only the backend reads."""
    plan, hidden = candidate.plan, ("problem", "detail")
    shown = None if plan is None else {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in hidden}
    return {**{f.name: getattr(candidate, f.name) for f in fields(candidate)}, "plan": shown}


def _print(out: Output, problem: MoEProblem, ranks: int, why: str, candidates: list[Candidate]) -> None:
    out.facts(
        [
            ("experts", f"{problem.experts}, top-{problem.top_k}"),
            ("hidden", problem.hidden),
            ("intermediate", f"{problem.intermediate} after {activation_text(problem.activation)}"),
            ("format", problem.format),
            ("tokens", f"0 to {problem.max_tokens} a rank, {ranks} rank{'s' if ranks > 1 else ''}"),
            ("routing weight", problem.routing_weight),
        ],
        title="Problem",
    )
    out.text()
    rows = [(c.name, c.state, c.plan is not None, "yes: " + why if c.chosen else "no") for c in candidates]
    out.table(("backend", "state", "can plan it", "chosen"), rows)
    for candidate in candidates:
        if candidate.against:
            out.text()
            out.text(f"Against {candidate.name}", style="bold")
            for reason in candidate.against:
                out.text(f"  {reason}")
    if not any(candidate.chosen for candidate in candidates):
        out.text()
        out.text(f"Nothing is chosen: {why}", style="bold red")


def _print_plan(out: Output, plan: Plan) -> None:
    out.text()
    facts: list[tuple[str, object]] = [(f"knob {name}", value) for name, value in plan.knobs.items()]
    facts += [(f"budget {name}", f"{value:,}") for name, value in plan.budgets.items()]
    facts += [(f"at least, for {name}", f"{value:,.1f} us") for name, value in plan.bounds.items()]
    facts += [("property", line) for line in plan.properties]
    out.facts(facts, title=f"Plan of {plan.backend} {plan.version}")
    if plan.regions:
        rows = [(region.name, region.kind, f"{region.nbytes:,}", region.purpose) for region in plan.regions]
        out.text()
        for kind in (*dict.fromkeys(region.kind for region in plan.regions), ""):
            total = sum(region.nbytes for region in plan.regions if kind in (region.kind, ""))
            rows.append(("total", kind, f"{total:,}", f"{total / (1 << 20):,.1f} MiB"))
        out.table(("region", "kind", "bytes a rank", "purpose"), rows)
