"""Hugging Face ``transformers`` models whose routed experts run on megamoe.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype=torch.bfloat16, device_map="cuda")
    replace_experts(model, max_tokens=4096)
    model.generate(...)
    close_experts(model)

The model's own router decides, shared experts and everything else stay as they are: only each block's ``experts`` module is replaced.
Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss models are supported; ``pip install "megamoe-core[transformers]"`` brings the releases tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from megamoe.ep.confighash import reject
from megamoe.ep.group import Group
from megamoe.errors import InvalidInput
from megamoe.formats import describe
from megamoe.integrations import expert_layouts
from megamoe.layer import MoELayer
from megamoe.problem import MoEProblem, Placement
from megamoe.select import get_backend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = TypeVar("Model", bound=nn.Module)


class MegaMoEExperts(nn.Module):
    """Stands where a block had its ``experts``; the block calls it with its router's choice.

    Attributes:
        layer: the :class:`megamoe.MoELayer` that computes; its ``plan`` says what runs.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The routed experts' output.

        Args:
            hidden_states: (..., hidden), computed in bf16 whatever its dtype.
            top_k_index: (tokens, top_k) expert ids.
            top_k_weights: (tokens, top_k).

        Returns:
            like ``hidden_states``.

        Raises:
            InvalidInput: more tokens than ``max_tokens``.
            SessionClosed: after :func:`close_experts`.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).to(torch.bfloat16)
        y: torch.Tensor = self.layer(rows, top_k_index, top_k_weights)
        return y.to(hidden_states.dtype).reshape(hidden_states.shape)


def replace_experts(
    model: Model,
    *,
    max_tokens: int,
    format: str = "bf16",
    backend: str | None = None,
    group: ProcessGroup | None = None,
    placement: Placement | None = None,
) -> Model:
    """Let megamoe compute the routed experts of a model, in place. For inference; expert weights leave ``model.parameters()``.

    With a group, every rank passes the same model (all experts loaded), keeps its own share of the experts, and from then on calls the
    model in step with the others: every forward is collective, each rank with its own batch (``generate`` with ``synced_gpus=True``).

    Everything is checked before the first block is changed. Blocks are taken over one at a time, so that a model and its packed weights
    need not fit into memory together.

    Args:
        model: Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss; experts in bf16 (float16 and float32 are converted), or, of the FP8 checkpoints,
            in E4M3 with 128 x 128 scales and ``format="fp8_block128"``.
        max_tokens: most tokens (batch times sequence) that one rank brings to one forward.
        format: number format; weights are quantized when taken over. Formats with calibrated activation scales are not offered.
        backend: name of a backend; ``None`` for the one that fits.
        group: expert-parallel process group; ``None`` is one rank.
        placement: which rank holds which experts; needed when they do not divide evenly.

    Returns:
        the same model.

    Raises:
        InvalidInput: no supported experts in the model, or weights that cannot be read; nothing was changed.
        UnsupportedProblem: the backend cannot compute these layers; carries every reason.
        BackendNotFound, BackendUnavailable, BackendIncompatible, BackendBroken, BackendAmbiguous: no backend can be used.
        RankMismatch, PeerAborted: ranks disagree, or one of them raised.
    """
    ranks = Group.of(group)
    device = next(model.parameters()).device
    try:
        blocks = _find(model)
        _check_model(model, format)
        problems = {name: _problem(name, block, max_tokens, format, placement) for name, block in blocks.items()}
        chosen = get_backend(backend, device=device)
        for problem in dict.fromkeys(problems.values()):
            chosen.plan(problem, ranks=ranks.size)
    except BaseException as error:
        # The others are on their way into the first layer, where they would wait for this rank.
        reject(ranks, error, device)
        raise
    for name, block in blocks.items():
        local = problems[name].resolved_placement(ranks.size).local[ranks.rank]
        layer = MoELayer(problems[name], expert_layouts.read(block.experts, local), backend=backend, group=group)
        block.experts = MegaMoEExperts(layer).train(block.training)
    return model


def close_experts(model: nn.Module) -> None:
    """Release what :func:`replace_experts` opened. Collective; the model cannot be called any more. Safe to call twice."""
    for module in model.modules():
        if isinstance(module, MegaMoEExperts):
            module.layer.close()


def _check_model(model: nn.Module, format: str) -> None:
    if describe(format).tensor_scale == "required":
        raise InvalidInput(
            f"format={format!r} needs calibrated activation scales for every layer; allowed here: formats that scale by themselves.",
            hint="use format='fp8_block128', or make MoELayers with ExpertWeights(x_scale=..., mid_scale=...)",
        )
    if getattr(model, "use_kernels", False):
        raise InvalidInput(
            "the model was loaded with use_kernels=True, whose blocks bypass their experts module; allowed: use_kernels=False.",
            hint="load it without use_kernels",
        )


def _problem(name: str, block: Any, max_tokens: int, format: str, placement: Placement | None) -> MoEProblem:
    expert_layouts.check(block.experts, f"{name}.experts", format)
    experts, hidden, intermediate = expert_layouts.sizes(block.experts)
    return MoEProblem(
        experts=experts,
        top_k=_top_k(name, block),
        hidden=hidden,
        intermediate=intermediate,
        max_tokens=max_tokens,
        format=format,
        activation=expert_layouts.activation(block.experts),
        placement=placement,
    )


def _find(model: nn.Module) -> dict[str, Any]:
    """The blocks whose ``experts`` can be replaced, by name."""
    modules: dict[str, Any] = dict(model.named_modules())
    blocks = {name: block for name, block in modules.items() if type(getattr(block, "experts", None)).__name__ in expert_layouts.KNOWN}
    unknown = {
        type(block.experts).__name__
        for name, block in modules.items()
        if isinstance(getattr(block, "experts", None), nn.Module) and name not in blocks
    }
    if unknown or not blocks:
        found = f"experts of class {', '.join(sorted(unknown))}" if unknown else "no experts that megamoe knows"
        raise InvalidInput(
            f"{type(model).__name__} has {found}; allowed: {', '.join(expert_layouts.KNOWN)} (Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss).",
            hint="call megamoe.MoELayer from the model's own block; or load a quantized checkpoint dequantized, with dtype=torch.bfloat16",
        )
    return blocks


def _top_k(name: str, block: Any) -> int:
    """Routes per token, which the block's router knows."""
    for attribute in ("gate", "router"):
        top_k = getattr(getattr(block, attribute, None), "top_k", None)
        if isinstance(top_k, int):
            return top_k
    raise InvalidInput(
        f"{name} ({type(block).__name__}) has no router with a top_k; allowed: a module 'gate' or 'router' as in transformers 5.",
        hint='pip install -U "megamoe-core[transformers]"',
    )
