"""Who runs in a benchmark: a backend of megamoe with bf16 or with quantized activations, the torch pipeline, peers that are importable."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megamoe.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from megamoe.bench.workloads import Inputs, Shape
    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights


@dataclass(frozen=True, slots=True)
class Case:
    """What a contestant is opened for.

    Attributes:
        shape, problem, weights: the layer.
        backend: name of megamoe's backend.
        knobs: for megamoe's backend; ``None`` leaves them to its heuristic.
    """

    shape: Shape
    problem: MoEProblem
    weights: ExpertWeights
    backend: str
    knobs: Mapping[str, object] | None = None


class Runner(Protocol):
    """An opened contestant."""

    def launches(self, sets: Sequence[Inputs]) -> list[Callable[[], object]]:
        """For every set a call without arguments that runs the layer on it into ``out``. Ends the use of earlier ones."""
        ...

    def operands(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The activations (and their scales) that the oracle may judge its result by; ``None`` when its arithmetic is not the format's."""
        ...

    def facts(self) -> dict[str, object]:
        """What it chose to run, for the result file."""
        ...

    def close(self) -> None: ...


class _Session:
    """A backend's session; the whole layer from bf16, or from activations that are quantized already."""

    def __init__(self, case: Case, *, quantized: bool) -> None:
        from megamoe.select import get_backend

        backend = get_backend(case.backend)
        plan = backend.plan(case.problem, knobs=case.knobs)
        self._session = backend.open_session(plan, backend.prepare_weights(plan, case.weights))
        self._quantized = quantized

    def launches(self, sets: Sequence[Inputs]) -> list[Callable[[], object]]:
        return [self._launch(inputs) for inputs in sets]

    def _launch(self, inputs: Inputs) -> Callable[[], object]:
        run, (x, scale) = self._session.run, self.operands(inputs)
        return lambda: run(x, inputs.ids, inputs.weights, x_scale=scale, out=inputs.out)

    def operands(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (inputs.data, inputs.scale) if self._quantized else (inputs.x, None)

    def facts(self) -> dict[str, object]:
        return {"knobs": dict(self._session.plan.knobs)}

    def close(self) -> None:
        self._session.close()


class _Unfused:
    def __init__(self, case: Case) -> None:
        from megamoe.bench.unfused import Unfused

        self._layer = Unfused(case.problem, case.weights)

    def launches(self, sets: Sequence[Inputs]) -> list[Callable[[], object]]:
        return [partial(self._layer, inputs.x, inputs.ids, inputs.weights, inputs.out) for inputs in sets]

    def operands(self, inputs: Inputs) -> None:
        return None  # row-wise instead of block scales

    def facts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


_FLASHINFER_MODES = {"fp8_block128": "blockwise", "fp8_tensor": "per_tensor"}


class _FlashInfer:
    """FlashInfer's SM90 pull-style kernel, its own heuristic configuration, from quantized activations staged before the timed region.

    It takes one routing from its own buffer, so every set of inputs has a buffer of its own. Its block scales lie on rows that it
    interleaves itself, so it gets scales of its own: its result is not comparable and is not judged.
    """

    def __init__(self, case: Case) -> None:
        import torch

        if case.shape.biases:
            raise InvalidInput("The peer 'flashinfer' adds no expert biases.", hint="leave it out of --against for this shape")
        self._package, self._shim = _flashinfer()
        self._case = case
        self._mode = _FLASHINFER_MODES[case.problem.format]
        shape = case.shape
        generator = torch.Generator(device="cuda").manual_seed(0)
        first, second = self._shim._create_dummy_weights(
            shape.experts, shape.hidden, shape.intermediate, generator, kind="fp8_e4m3", fp8_scale_mode=self._mode
        )
        self._first = (case.weights.w13.permute(0, 2, 1), *first[1:])
        self._second = (case.weights.w2.permute(0, 2, 1), *second[1:])
        self._buffers: list[Any] = []

    def launches(self, sets: Sequence[Inputs]) -> list[Callable[[], object]]:
        self.close()
        return [self._launch(inputs) for inputs in sets]

    def operands(self, inputs: Inputs) -> None:
        return None

    def _launch(self, inputs: Inputs) -> Callable[[], object]:
        import torch

        shape, tokens = self._case.shape, inputs.x.shape[0]
        limit = self._case.problem.activation.limit
        buffer = self._package.get_symm_buffer_for_hopper_fp8_mega_moe(
            shape.experts, tokens, shape.top_k, shape.hidden, shape.intermediate, 0, 1,
            fp8_scale_mode=self._mode, gate_up_clamp=math.inf if limit is None else limit,
        )  # fmt: skip
        self._buffers.append(buffer)
        buffer.x[:tokens].view(torch.uint8).copy_(inputs.data.view(torch.uint8))
        if inputs.scale is not None:
            buffer.x_sf[:tokens, : shape.hidden // 128].copy_(inputs.scale)
        else:
            buffer.x_sf[:tokens].view(torch.uint8).fill_(127)
        buffer.topk_idx[:tokens].copy_(inputs.ids.long())
        buffer.topk_weights[:tokens].copy_(inputs.weights)
        thunk: Callable[[], object] = self._package.hopper_fp8_mega_launch_thunk(self._first, self._second, buffer)
        return thunk

    def facts(self) -> dict[str, object]:
        config = self._buffers[0]._frontend.config
        return {"swap_ab": config.swap_ab, "tile": list(config.mma_tiler_mnk), "cluster": list(config.cluster_shape_mnk)}

    def close(self) -> None:
        while self._buffers:
            self._buffers.pop().destroy()


def _flashinfer() -> tuple[Any, Any]:
    """The peer's package and its shim.

    Raises:
        InvalidInput: not there.
    """
    name = _flashinfer_name()
    if name is None:
        raise InvalidInput("The peer 'flashinfer' is not importable.", hint="pip install flashinfer-python, or leave it out of --against")
    os.environ.setdefault("MEGA_NO_DIST", "1")  # it reads this when imported: one rank, no process group
    return import_module(name), import_module(f"{name}.shim.hopper_fp8")


def _flashinfer_name() -> str | None:
    """The peer's package: in a FlashInfer on the path, which need not hold it, or its kernel folder alone."""
    for name in ("flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel", "pull_style"):
        top, *below = name.split(".")
        spec = find_spec(top)
        if spec is not None and any(Path(place, *below).is_dir() for place in spec.submodule_search_locations or ()):
            return name
    return None


OURS = "megamoe"
FROM_BF16 = "megamoe-bf16"
_OPENERS: dict[str, Callable[[Case], Runner]] = {
    OURS: lambda case: _Session(case, quantized=True),
    FROM_BF16: lambda case: _Session(case, quantized=False),
    "unfused": _Unfused,
    "flashinfer": _FlashInfer,
}
NAMES = tuple(_OPENERS)
OTHERS = tuple(name for name in NAMES if name not in (OURS, FROM_BF16))


def importable_others() -> tuple[str, ...]:
    """Baselines and peers that can be run in this environment."""
    return tuple(name for name in OTHERS if name != "flashinfer" or _flashinfer_name() is not None)


def open_contestant(name: str, case: Case) -> Runner:
    """Open one.

    Raises:
        InvalidInput: no such contestant, or not importable.
        MegaMoEError: whatever the backend raises.
    """
    if name not in _OPENERS:
        raise InvalidInput(f"{name!r} is nobody to run against; allowed: {', '.join(NAMES)}.", hint="pass one of these")
    return _OPENERS[name](case)
