"""MoE layers of published models, by name: their shapes and activations, for ``explain``, ``demo`` and benchmarks. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from megamoe.errors import InvalidInput
from megamoe.problem import MoEProblem, SwiGLU


@dataclass(frozen=True, slots=True)
class Preset:
    """One model's routed experts; shared experts are not part of the layer.

    Attributes:
        model: the model's name as published.
        experts: logical experts of one layer.
        top_k: routes per token.
        hidden: width of a token.
        intermediate: width after the activation.
        format: the format nearest to the published checkpoint's.
        activation: the gated activation.
        biases: whether the checkpoint has expert biases.
    """

    model: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    format: str
    activation: SwiGLU = field(default_factory=SwiGLU)
    biases: bool = False

    def problem(self, max_tokens: int, *, format: str | None = None) -> MoEProblem:
        """The layer as a problem, in the checkpoint's format or another."""
        return MoEProblem(
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            max_tokens=max_tokens,
            format=format or self.format,
            activation=self.activation,
        )


PRESETS = {
    "dsv3": Preset("DeepSeek-V3", 256, 8, 7168, 2048, "fp8_block128"),
    "dsv4": Preset("DeepSeek-V4-Pro", 384, 6, 7168, 3072, "fp8_block128", SwiGLU(limit=10.0)),
    "kimi-k2": Preset("Kimi K2", 384, 8, 7168, 2048, "fp8_block128"),
    "qwen3-30b": Preset("Qwen3-30B-A3B", 128, 8, 2048, 768, "fp8_block128"),
    "qwen3-235b": Preset("Qwen3-235B-A22B", 128, 8, 4096, 1536, "fp8_block128"),
    "mixtral": Preset("Mixtral-8x7B", 8, 2, 4096, 14336, "bf16"),
    "gpt-oss-120b": Preset("gpt-oss-120b", 128, 4, 2880, 2880, "bf16", SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0), biases=True),
}
"""Every preset by the name users choose it by."""


def preset(name: str) -> Preset:
    """One preset.

    Raises:
        InvalidInput: no such preset; names the ones there are.
    """
    found = PRESETS.get(name)
    if found is None:
        raise InvalidInput(
            f"model={name!r} is not a preset; allowed: {', '.join(PRESETS)}.", hint="or give the shape itself: --experts ..."
        )
    return found
