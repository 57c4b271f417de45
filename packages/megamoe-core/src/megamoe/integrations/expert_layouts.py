"""How the expert modules of ``transformers`` models hold their weights, and how to read them as :class:`megamoe.ExpertWeights`.

Every model family has its own class with its own order of gate and up rows, transposition, biases and activation. What is not in the
list below is refused: a class that looks alike may compute something else.

MixtralExperts, Qwen3MoeExperts, DeepseekV3Experts
    gate_up_proj (E, 2 I, H), gate rows first; down_proj (E, H, I); SiLU
GptOssExperts
    gate_up_proj (E, H, 2 I), gate and up columns alternating; down_proj (E, I, H); biases; clamped SiLU with alpha, times up + 1
FP8Experts (DeepSeek and Qwen3 FP8 checkpoints)
    as the first, in E4M3 with 128 x 128 float32 scales: ``fp8_block128`` takes them without a change
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megamoe.errors import InvalidInput
from megamoe.problem import SwiGLU
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN = ("MixtralExperts", "Qwen3MoeExperts", "DeepseekV3Experts")
GPT_OSS = "GptOssExperts"
FP8 = "FP8Experts"
KNOWN = (*PLAIN, GPT_OSS, FP8)
"""Class names whose weights can be read."""

_FP8_HINT = "load the checkpoint dequantized: quantization_config=FineGrainedFP8Config(dequantize=True)"


def sizes(experts: Any) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) of an expert module."""
    total = experts.gate_up_proj.shape[0]
    if _kind(experts) == GPT_OSS:
        return total, experts.down_proj.shape[2], experts.down_proj.shape[1]
    return total, experts.down_proj.shape[1], experts.down_proj.shape[2]


def activation(experts: Any) -> SwiGLU:
    """What an expert module applies between its two products.

    Raises:
        InvalidInput: something other than SiLU gating, or its clamped form.
    """
    if _kind(experts) == GPT_OSS:
        return SwiGLU(limit=experts.limit, alpha=experts.alpha, up_bias=1.0)
    if _kind(experts) == FP8:
        changed = [
            name for name in ("swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap") if getattr(experts, name, None) is not None
        ]
        if changed:
            raise InvalidInput(f"FP8Experts with {', '.join(changed)}; allowed: plain SiLU gating.", hint=_FP8_HINT)
    if type(experts.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise InvalidInput(
            f"{_kind(experts)} with activation {type(experts.act_fn).__name__}; allowed: SiLU.",
            hint="leave this model's experts as they are",
        )
    return SwiGLU()


def check(experts: Any, name: str, format: str) -> None:
    """Refuse a module whose weights cannot be read as they are.

    Raises:
        InvalidInput: names the module, what it holds, what is allowed and the fix.
    """
    gate_up = experts.gate_up_proj
    count = getattr(experts, "num_experts", gate_up.shape[0])
    if type(gate_up.data).__name__ != "Tensor" or getattr(experts, "_is_expert_parallel", False) or gate_up.shape[0] != count:
        raise InvalidInput(
            f"{name} holds {gate_up.shape[0]} of {count} experts, sharded by transformers; allowed: all experts on every rank.",
            hint="load without tp_plan or ep plan, and pass group to replace_experts instead",
        )
    if gate_up.is_meta:
        raise InvalidInput(f"{name} is on the meta device; allowed: loaded weights.", hint="load the model without offloading its experts")
    if _kind(experts) == FP8:
        got = (format, gate_up.dtype, tuple(experts.block_size or ()), experts.gate_up_proj_scale_inv.dtype, experts.activation_scheme)
        allowed = ("fp8_block128", torch.float8_e4m3fn, (128, 128), torch.float32, "dynamic")
        if got != allowed:
            raise InvalidInput(
                f"{name} is quantized and format, data, block, scales, activations are {got}; allowed: {allowed}.", hint=_FP8_HINT
            )
    elif not gate_up.dtype.is_floating_point or gate_up.element_size() < 2:
        raise InvalidInput(
            f"{name} is {gate_up.dtype}; allowed: bfloat16, float16 or float32.", hint="load the model with dtype=torch.bfloat16"
        )


def read(experts: Any, slots: Sequence[int]) -> ExpertWeights:
    """Some experts of a module, in the given order, as bf16 (or as they are, if block-quantized). Shares memory where it can.

    Args:
        experts: a module whose class is in :data:`KNOWN` and that :func:`check` accepts.
        slots: expert ids; all of them in order share the module's memory, any others are copied, so that the module can be freed.
    """
    kind = _kind(experts)
    everything = list(slots) == list(range(experts.gate_up_proj.shape[0]))

    def take(name: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(experts, name).detach()
        return tensor if everything else tensor[list(slots)]

    if kind == GPT_OSS:
        return ExpertWeights(
            w13=_halves(take("gate_up_proj").transpose(1, 2)).to(torch.bfloat16).contiguous(),
            w2=take("down_proj").transpose(1, 2).to(torch.bfloat16).contiguous(),
            b13=_bias(_halves(take("gate_up_proj_bias"))),
            b2=_bias(take("down_proj_bias")),
        )
    scales: dict[str, Any] = {}
    w13, w2 = take("gate_up_proj"), take("down_proj")
    if kind == FP8:
        scales = {"w13_scale": take("gate_up_proj_scale_inv").contiguous(), "w2_scale": take("down_proj_scale_inv").contiguous()}
    else:
        w13, w2 = w13.to(torch.bfloat16), w2.to(torch.bfloat16)
    return ExpertWeights(w13=w13.contiguous(), w2=w2.contiguous(), **scales)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Alternating gate and up along dimension 1 to all gate, then all up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def _bias(bias: torch.Tensor) -> torch.Tensor:
    return (bias if bias.dtype == torch.bfloat16 else bias.to(torch.float32)).contiguous()


def _kind(experts: Any) -> str:
    return type(experts).__name__
