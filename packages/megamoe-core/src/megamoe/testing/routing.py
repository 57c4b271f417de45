"""Routing patterns for tests and benchmarks, from balanced to the ones that break kernels. Equal generators give equal ids.

Every function returns ``topk_ids`` (tokens, top_k) int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.problem import MoEProblem

Pattern = Callable[[MoEProblem, int, torch.Generator], torch.Tensor]
"""(problem, tokens, generator) -> (tokens, top_k) int64."""


def balanced(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Every expert gets the same number of routes, give or take one: consecutive experts, in an order drawn once."""
    order = torch.randperm(problem.experts, generator=generator)
    return order[torch.arange(tokens * problem.top_k) % problem.experts].reshape(tokens, problem.top_k)


def zipf(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts per token, the n-th most popular drawn with a chance of 1 / n."""
    chance = 1.0 / torch.arange(1, problem.experts + 1, dtype=torch.float64)
    chance = chance[torch.randperm(problem.experts, generator=generator)]
    # The largest of chance / exponential noise are a draw without replacement.
    noise = torch.empty(tokens, problem.experts, dtype=torch.float64).exponential_(generator=generator)
    return (chance / noise).topk(problem.top_k, dim=1).indices


def one_expert(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """All routes of all tokens to one expert, so that every row is duplicates."""
    return torch.randint(problem.experts, (1, 1), generator=generator).expand(tokens, problem.top_k).contiguous()


def one_rank(problem: MoEProblem, tokens: int, generator: torch.Generator, *, ranks: int, rank: int = 0) -> torch.Tensor:
    """All routes to experts that one rank holds; duplicates only where it holds fewer than ``top_k``."""
    return _among(torch.tensor(problem.resolved_placement(ranks).local[rank]), problem, tokens, generator)


def first_quarter(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """All routes to the first quarter of the experts: one rank of four, if they are placed evenly; duplicates as in :func:`one_rank`."""
    return _among(torch.arange(-(-problem.experts // 4)), problem, tokens, generator)


def duplicates(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Every token names its experts independently, so that some come twice and more in one row; the first two slots always agree."""
    ids = torch.randint(problem.experts, (tokens, problem.top_k), generator=generator)
    ids[:, 1:2] = ids[:, :1]
    return ids


def masked(ids: torch.Tensor, generator: torch.Generator, *, share: float = 0.3) -> torch.Tensor:
    """Some routes, and every fourth row whole, replaced by -1."""
    hidden = torch.rand(ids.shape, generator=generator) < share
    hidden[::4] = True
    return ids.masked_fill(hidden, -1)


def unrouted(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """No route at all."""
    return torch.full((tokens, problem.top_k), -1)


def partly_masked(problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Zipf routes with -1 in some slots and in whole rows."""
    return masked(zipf(problem, tokens, generator), generator)


PATTERNS: dict[str, Pattern] = {
    "balanced": balanced,
    "zipf": zipf,
    "one expert": one_expert,
    "first quarter": first_quarter,
    "duplicates": duplicates,
    "masked": partly_masked,
    "unrouted": unrouted,
}
"""Every pattern that needs no further argument, by name."""


def weights(tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Routing weights (tokens, top_k) float32, positive, each row summing to 1."""
    return torch.randn(tokens, top_k, generator=generator).softmax(dim=1)


def uneven_tokens(ranks: int, most: int, generator: torch.Generator) -> list[int]:
    """A number of tokens for every rank, 0 to ``most``: one rank has none and one has ``most`` (from two ranks on)."""
    counts: list[int] = torch.randint(most + 1, (ranks,), generator=generator).tolist()
    if ranks > 1:
        empty, full = torch.randperm(ranks, generator=generator)[:2].tolist()
        counts[empty], counts[full] = 0, most
    return counts


def _among(experts: torch.Tensor, problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Routes to some experts only, in an order drawn per token."""
    order = torch.rand(tokens, len(experts), generator=generator).argsort(dim=1)
    return experts[order[:, torch.arange(problem.top_k) % len(experts)]]
