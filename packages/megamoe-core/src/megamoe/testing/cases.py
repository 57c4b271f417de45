"""What a backend has to get right on several ranks: every routing with every kind of token counts, and placements of experts.

One list for every backend, on CPU and GPU. A session goes through all cases of a problem, so that nothing of a call may be left for the
next one. Every rank makes the inputs of all ranks by itself: equal seeds, equal data.

    trial = make_trial(problem, ranks=ranks, seed=7)
    wrong = go_through(session, trial, rank)      # {"zipf, even ranks": "", ...}: what is wrong, by case
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megamoe.problem import MoEProblem, Placement
from megamoe.testing import oracle, routing
from megamoe.testing.trial import Inputs, Trial

if TYPE_CHECKING:
    import torch

    from megamoe.protocol import Session

UNEVEN = (17, 16, 7, 1, 0)
"""Tokens around a multiple of 16, and few, and none."""

Also = Callable[[str, Inputs, "torch.Tensor"], str]
"""(case, this rank's inputs, output) -> what is wrong beside what the oracle finds; "" when nothing is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call on all ranks.

    Attributes:
        name: of routing and token counts.
        pattern: how tokens are routed.
        tokens: of each rank.
    """

    name: str
    pattern: routing.Pattern
    tokens: tuple[int, ...]


def token_counts(ranks: int, most: int) -> dict[str, tuple[int, ...]]:
    """Numbers of tokens of each rank, by name: full, uneven, and none on one, on several (in turn) and on all ranks."""
    turned = {f"uneven from {UNEVEN[turn]}": [UNEVEN[(turn + rank) % len(UNEVEN)] for rank in range(ranks)] for turn in range(len(UNEVEN))}
    counts: dict[str, list[int]] = {
        "full": [most] * ranks,
        **turned,
        "none on the first": [0] + [most] * (ranks - 1),
        "only the last": [0] * (ranks - 1) + [most],
        "even ranks": [most * (rank % 2 == 0) for rank in range(ranks)],
        "odd ranks": [most * (rank % 2) for rank in range(ranks)],
        "none": [0] * ranks,
        "one": [1] * ranks,
    }
    return {name: tuple(min(count, most) for count in each) for name, each in counts.items()}


def patterns(problem: MoEProblem, ranks: int) -> dict[str, routing.Pattern]:
    """Every routing pattern, by name, also all routes to each rank."""
    held = problem.resolved_placement(ranks).local
    to_one = {f"all to rank {rank}": partial(routing.one_rank, ranks=ranks, rank=rank) for rank in range(ranks) if held[rank]}
    return {**routing.PATTERNS, **to_one}


def cases(problem: MoEProblem, ranks: int, only: Sequence[str] = ()) -> Iterator[Case]:
    """Every pattern with all token counts; ``only`` names the patterns to take, none takes all."""
    for name, pattern in patterns(problem, ranks).items():
        for counts, tokens in token_counts(ranks, problem.max_tokens).items():
            if not only or name in only:
                yield Case(f"{name}, {counts}", pattern, tokens)


def placements(experts: int, ranks: int) -> dict[str, Placement]:
    """Ways to place ``experts`` logical experts (the first: one less), by name: uneven, shuffled, on one rank, redundant."""
    import torch

    order = torch.randperm(experts, generator=torch.Generator().manual_seed(72)).tolist()
    hot = (0, experts // 2 + 1)
    return {
        "experts that do not divide": Placement.even(experts - 1, ranks),
        "shuffled": Placement(tuple(tuple(order[rank::ranks]) for rank in range(ranks))),
        "all on the last rank": Placement((*[()] * (ranks - 1), tuple(range(experts)))),
        "everything everywhere": Placement((tuple(range(experts)),) * ranks),
        "two hot experts on every rank": Placement(
            tuple((*hot, *(expert for expert in range(rank, experts, ranks) if expert not in hot)) for rank in range(ranks))
        ),
        "one expert three times": Placement(
            tuple((*range(rank, experts, ranks), *((1,) if rank < 3 and rank != 1 % ranks else ())) for rank in range(ranks))
        ),
    }


def placed(problem: MoEProblem, placement: Placement) -> MoEProblem:
    """The problem with these experts."""
    return replace(problem, experts=len({expert for held in placement.local for expert in held}), placement=placement)


def received(problem: MoEProblem, ranks: int, rank: int, ids: Sequence[torch.Tensor]) -> list[int]:
    """Rows that each expert of a rank receives from the ids of all ranks, counted one by one.

    Of several copies of an expert, the token's number within its rank says which one it goes to.
    """
    placement = problem.resolved_placement(ranks)
    places = placement.replicas(problem.experts)
    counts = [0] * len(placement.local[rank])
    for each in ids:
        for token, row in enumerate(each.tolist()):
            for expert in row:
                if expert >= 0:
                    owner, slot = places[expert][token % len(places[expert])]
                    if owner == rank:
                        counts[slot] += 1
    return counts


def go_through(
    session: Session,
    trial: Trial,
    rank: int,
    device: torch.device | str = "cpu",
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    wire: str = "bf16",
    also: Also = lambda case, inputs, out: "",
) -> dict[str, str]:
    """Every case through a session. Collective.

    Args:
        session: open on the trial's ranks, with the trial's weights.
        trial: with all tokens (``max_tokens``) on every rank.
        rank: this one.
        device: where the session computes.
        only: names of the patterns to take; none takes all.
        seed: of the routes.
        wire: how results cross between ranks, see :func:`megamoe.testing.oracle.judge`.
        also: what else to check; called on every rank, also with no tokens.

    Returns:
        for every case what is wrong on this rank, "" where nothing is.
    """
    import torch

    generator, wrong = torch.Generator().manual_seed(seed), {}
    experts = oracle.Experts(trial.problem.format, trial.weights)
    for number, case in enumerate(cases(trial.problem, trial.ranks, only)):
        everyone = [case.pattern(trial.problem, tokens, generator) for tokens in case.tokens]
        mine, ids = trial.inputs[rank].rows(torch.arange(case.tokens[rank])), everyone[rank]
        # Nothing of a slot without a route may be read; ids come in both types.
        unread = mine.topk_weights.masked_fill(ids < 0, float("nan"))
        given = Inputs(mine.x, ids if number % 2 else ids.to(torch.int32), unread).to(device)
        out = torch.full_like(given.x, float("nan"))
        session.run(*given, out=out)
        right = oracle.compute(trial.problem, experts, mine.x, ids, mine.topk_weights)
        verdict = oracle.judge(out, right, format=trial.problem.format, wire=wire)
        found = [] if verdict else [verdict.text]
        if out[(given.topk_ids < 0).all(dim=1)].any():
            found.append("a row without routes is not zero")
        got, want = session.counts().tolist(), received(trial.problem, trial.ranks, rank, everyone)
        if got != want:
            found.append(f"counts are {got}, should be {want}")
        if more := also(case.name, given, out):
            found.append(more)
        wrong[case.name] = "; ".join(found)
    return wrong
