"""A random instance of a problem, and the oracle's judgement of what a backend makes of it.

    trial = make_trial(problem, ranks=2, tokens=(17, 0), seed=7)
    weights = trial.local_weights(rank)                           # what this rank passes to prepare_weights
    out = session.run(*trial.inputs[rank])
    assert trial.judge(rank, out).ok

Weights and activations are bf16, so that a backend's own quantization is judged too. Every rank can make the whole trial by itself: equal
arguments give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megamoe.errors import InvalidInput
from megamoe.formats import describe
from megamoe.testing import oracle
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    import torch

    from megamoe.problem import MoEProblem

_LARGEST_INPUT = 6.0
_LARGEST_MIDDLE = 32.0
"""What static activation scales are calibrated for: of unit normal data and layers that keep the variance, larger values are rarer than
one in 10^8, and saturate."""


class Inputs(NamedTuple):
    """Arguments of ``Session.run`` for one rank.

    Attributes:
        x: (tokens, hidden) bf16, unit normal.
        topk_ids: (tokens, top_k) int32.
        topk_weights: (tokens, top_k) float32, positive, each row sums to 1.
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device | str) -> Inputs:
        """The same on a device."""
        return Inputs(*(tensor.to(device) for tensor in self))

    def rows(self, index: torch.Tensor) -> Inputs:
        """Some of the tokens."""
        return Inputs(*(tensor[index] for tensor in self))


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A problem with data for every rank, on the CPU.

    Attributes:
        problem: what is to be computed.
        ranks: size of the expert-parallel group.
        weights: all experts in logical order, bf16.
        inputs: one entry per rank.
    """

    problem: MoEProblem
    ranks: int
    weights: ExpertWeights
    inputs: tuple[Inputs, ...]

    def local_weights(self, rank: int, device: torch.device | str = "cpu") -> ExpertWeights:
        """The experts that a rank holds, in the order of its slots."""
        import torch

        slots = torch.tensor(self.problem.resolved_placement(self.ranks).local[rank], dtype=torch.int64)
        taken: dict[str, Any] = {name: tensor[slots].to(device) for name, tensor in self.weights.tensors().items()}
        return replace(self.weights, **taken)

    def judge(self, rank: int, out: torch.Tensor, *, most: int | None = None) -> oracle.Judgement:
        """Compare a rank's output with the oracle's.

        Args:
            rank: whose output it is.
            out: (tokens, hidden).
            most: judge at most so many tokens, spread evenly over the rank's; ``None`` judges all.
        """
        import torch

        inputs = self.inputs[rank]
        tokens = inputs.x.shape[0]
        if most is not None and most < tokens:
            index = torch.linspace(0, tokens - 1, most).round().to(torch.int64)
            inputs, out = inputs.rows(index), out[index.to(out.device)]
        return oracle.judge(out, oracle.compute(self.problem, self.weights, *inputs), format=self.problem.format)


def make_trial(
    problem: MoEProblem,
    *,
    ranks: int = 1,
    tokens: int | Sequence[int] | None = None,
    seed: int = 0,
    pattern: str = "zipf",
) -> Trial:
    """Random data for a problem.

    Args:
        problem: what is to be computed.
        ranks: size of the expert-parallel group.
        tokens: of each rank, or one number for all; ``None`` is ``max_tokens`` on every rank.
        seed: equal seeds give equal data.
        pattern: how tokens are routed, a name of ``megamoe.testing.routing.PATTERNS``.

    Raises:
        InvalidInput: tokens do not fit the problem or the ranks.
        UnsupportedProblem: the problem cannot be spread over so many ranks.
    """
    import torch

    from megamoe.testing import routing

    problem.resolved_placement(ranks)
    each = [problem.max_tokens if tokens is None else tokens] * ranks if tokens is None or isinstance(tokens, int) else list(tokens)
    if len(each) != ranks or not all(0 <= n <= problem.max_tokens for n in each):
        raise InvalidInput(
            f"tokens={each} for {ranks} ranks; allowed: one number from 0 to max_tokens={problem.max_tokens} per rank.",
            hint="pass a number, or one per rank",
        )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(torch.bfloat16)

    experts, hidden, inter = problem.experts, problem.hidden, problem.intermediate
    largest = describe(problem.format).max_value
    static = describe(problem.format).tensor_scale == "required"
    weights = ExpertWeights(
        w13=normal(experts, 2 * inter, hidden, scale=hidden**-0.5),
        w2=normal(experts, hidden, inter, scale=inter**-0.5),
        x_scale=_LARGEST_INPUT / largest if static else None,
        mid_scale=_LARGEST_MIDDLE / largest if static else None,
    )
    inputs = []
    for count in each:
        ids = routing.PATTERNS[pattern](problem, count, generator).to(torch.int32)
        inputs.append(Inputs(normal(count, hidden), ids, routing.weights(count, problem.top_k, generator)))
    return Trial(problem, ranks, weights, tuple(inputs))
