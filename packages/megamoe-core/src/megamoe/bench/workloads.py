"""Shapes, token counts, routing patterns and random operands. Shapes are those of one rank of a published deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamoe.errors import InvalidInput
from megamoe.formats import describe
from megamoe.presets import preset
from megamoe.problem import MoEProblem, SwiGLU
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    import torch

TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
"""Default sweep."""

ROUTINGS = ("random", "balanced", "zipf", "few", "one")
"""random: the best ``top_k`` of independent normal scores. balanced: every expert gets the same number of routes, but for one.
zipf: distinct experts, the n-th most popular drawn with a chance of 1 / n. few: all tokens go to the same ``top_k`` experts.
one: all routes go to one expert (repeated ids are separate routes)."""

_CLAMPED = SwiGLU(limit=10.0)
"""A clamp costs a little, so shapes are measured with one whether their model has it or not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer as one rank sees it.

    Attributes:
        name: short name, as in result files.
        experts: experts of this rank.
        top_k: routes per token.
        hidden, intermediate: widths; ``intermediate`` after the activation.
        activation: the gated activation.
        biases: whether its experts have biases.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: SwiGLU = _CLAMPED
    biases: bool = False

    def problem(self, max_tokens: int, format: str) -> MoEProblem:
        """The problem of one rank that holds exactly these experts."""
        return MoEProblem(self.experts, self.top_k, self.hidden, self.intermediate, max_tokens, format, self.activation)

    @property
    def expert_elements(self) -> int:
        """Weight elements of one expert, both matrices."""
        return 3 * self.hidden * self.intermediate


def _share(name: str, model: str, ranks: int, activation: SwiGLU | None = None) -> Shape:
    """What one of ``ranks`` ranks holds of a preset's layer."""
    whole = preset(model)
    form = activation or whole.activation
    return Shape(name, whole.experts // ranks, whole.top_k, whole.hidden, whole.intermediate, form, whole.biases)


SHAPES = {
    shape.name: shape
    for shape in (
        _share("dsv3", "dsv3", 8, _CLAMPED),
        _share("dsv4", "dsv4", 4, _CLAMPED),
        _share("qwen30b", "qwen3-30b", 1, _CLAMPED),
        _share("qwen235b", "qwen3-235b", 8, _CLAMPED),
        Shape("dsv4flash", 64, 6, 4096, 2048),
        _share("kimi-k2", "kimi-k2", 8, _CLAMPED),
        _share("mixtral", "mixtral", 1),
        _share("gpt-oss", "gpt-oss-120b", 1),
    )
}
DEFAULT_SHAPES = ("dsv3", "dsv4", "qwen30b", "qwen235b")


def shape(name: str) -> Shape:
    """One shape.

    Raises:
        InvalidInput: no such shape; names the ones there are.
    """
    if name not in SHAPES:
        raise InvalidInput(f"shape={name!r} is not a benchmark shape; allowed: {', '.join(SHAPES)}.", hint="pass one of these")
    return SHAPES[name]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One set of a call's arguments, on the device.

    Attributes:
        x: (tokens, hidden) bf16.
        data, scale: the same quantized, as ``Session.run`` takes it; ``scale`` is ``None`` where the format has none.
        ids: (tokens, top_k) int32.
        weights: (tokens, top_k) float32.
        out: (tokens, hidden) bf16, to be written.
        touched: experts that get at least one route.
    """

    x: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    touched: int


def make_inputs(shape: Shape, format: str, tokens: int, routing: str, x_scale: float | None, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device: activations unit normal, routing weights positive with sum 1."""
    import torch

    from megamoe.formats import load

    device = generator.device
    x = torch.randn(tokens, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
    data, scale = load(format).quantize(x, static_scale=x_scale)
    ids = make_ids(routing, shape.problem(max(tokens, 1), format), tokens, generator)
    weights = torch.randn(tokens, shape.top_k, device=device, generator=generator).softmax(dim=1)
    return Inputs(x, data, scale, ids, weights, torch.empty_like(x), int(torch.unique(ids).numel()))


def make_ids(pattern: str, problem: MoEProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """(tokens, top_k) int32 expert ids of a routing pattern, see :data:`ROUTINGS`, on the generator's device.

    Raises:
        InvalidInput: no such pattern.
    """
    import torch

    from megamoe.testing import routing

    def random(problem: MoEProblem, tokens: int, seeded: torch.Generator) -> torch.Tensor:
        return torch.randn(tokens, problem.experts, generator=seeded).topk(problem.top_k, dim=1).indices

    def few(problem: MoEProblem, tokens: int, seeded: torch.Generator) -> torch.Tensor:
        return torch.randperm(problem.experts, generator=seeded)[: problem.top_k].expand(tokens, -1)

    known = {"random": random, "balanced": routing.balanced, "zipf": routing.zipf, "few": few, "one": routing.one_expert}
    if pattern not in known:
        raise InvalidInput(f"routing={pattern!r}; allowed: {', '.join(ROUTINGS)}.", hint="pass one of these")
    # Patterns are drawn on the CPU, so that they do not depend on the device.
    seed = int(torch.randint(2**31 - 1, (1,), device=generator.device, generator=generator))
    ids = known[pattern](problem, tokens, torch.Generator().manual_seed(seed))
    return ids.to(device=generator.device, dtype=torch.int32).contiguous()


def make_weights(shape: Shape, format: str, generator: torch.Generator) -> ExpertWeights:
    """Random experts in the format's own type on the generator's device, with biases where the shape has them.

    They are scaled so that every layer keeps the variance of its input.

    Data are unit normal values rounded to the element type and scales vary by a factor of 3, so that a wrong scale shows.
    """
    import torch

    from megamoe.formats.elements import TORCH_TYPE

    info, device = describe(format), generator.device
    experts, hidden, inter = shape.experts, shape.hidden, shape.intermediate
    static = info.tensor_scale == "required"
    if info.element == "e2m1" or info.scale == "e8m0":
        raise InvalidInput(
            f"format={format!r} has no benchmark operands yet; allowed: bf16, fp8_tensor, fp8_tensor_e5m2, fp8_block128.", hint=""
        )

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        data = torch.empty(experts, rows, columns, dtype=TORCH_TYPE[info.element], device=device)
        gain = 1.0 if info.element != "bf16" else columns**-0.5
        for expert in range(experts):  # one at a time bounds the float32 temporary
            data[expert] = (torch.randn(rows, columns, device=device, generator=generator) * gain).to(data.dtype)
        if info.element == "bf16":
            return data, None
        grid = (experts, -(-rows // info.block_rows), -(-columns // info.block_k)) if info.block_k else (experts,)
        return data, (0.5 + torch.rand(grid, device=device, generator=generator)) * columns**-0.5

    def bias(rows: int) -> torch.Tensor:
        return (0.3 * torch.randn(experts, rows, device=device, generator=generator)).to(torch.bfloat16)

    w13, w13_scale = matrix(2 * inter, hidden)
    w2, w2_scale = matrix(hidden, inter)
    # Static activation scales that saturate nothing: unit normal inputs stay below 6, what lies between the two GEMMs below 32.
    x_scale, mid_scale = (6.0 / info.max_value, 32.0 / info.max_value) if static else (None, None)
    b13, b2 = (bias(2 * inter), bias(hidden)) if shape.biases else (None, None)
    return ExpertWeights(w13, w2, w13_scale=w13_scale, w2_scale=w2_scale, x_scale=x_scale, mid_scale=mid_scale, b13=b13, b2=b2)
