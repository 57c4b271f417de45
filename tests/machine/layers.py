"""The sm90 kernels as sessions launch them, on the machine: real configurations, workspaces and argument lists, memory of this process.

The package's docstring shows how to use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe import MoEProblem
from megamoe.device import regions, wire
from megamoe.formats import load
from megamoe.testing import oracle, routing
from megamoe.testing.trial import Inputs, Trial, make_trial
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.shim import launch as shim_launch
from megamoe_sm90.shim import ranks as several
from megamoe_sm90.shim.variants import Operands, Variant, sizes
from megamoe_sm90.shim.weights import Sm90Weights
from megamoe_sm90.shim.workspace import Workspace

from .launch import Kernel, Launch, Order, run

HOST = torch.device("cpu")
_KERNELS: dict[str, Kernel] = {}


def kernel_of(variant: Any) -> Kernel:
    """The kernel of a variant for the machine, compiled once a process."""
    request = variant.request()
    digest = request.digest()
    if digest not in _KERNELS:
        _KERNELS[digest] = Kernel(request.build)
    return _KERNELS[digest]


class Caught:
    """Stands for a compiled host function: keeps the launch that it makes."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.latest: Launch | None = None

    def __call__(self, *arguments: int) -> None:
        self.latest = self.kernel.launch(*arguments)

    def take(self) -> Launch:
        assert self.latest is not None
        return self.latest


def caught(variant: Any, make: Callable[[], Any]) -> tuple[Caught, Any]:
    """What ``make`` builds with launchers of the shim, and where their launches go."""
    function = Caught(kernel_of(variant))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shim_launch, "function", lambda request: function)
        return function, make()


class HostWorkspace(Workspace):
    """A session's memory in this process; scratch is poisoned."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        blocks = sizes(variants)
        self.scratch = aligned(blocks.pop("scratch"))
        self.controls = {name.split()[0]: aligned(size).zero_() for name, size in blocks.items()}
        self.report = torch.zeros(2, dtype=torch.int32)
        self._words = self.report.numpy()
        self._listen()

    def buffers(self, variant: Variant) -> list[Any]:
        """What a kernel may touch: its regions, without the gaps between them."""
        return list(self.named(variant).values())

    def named(self, variant: Variant) -> dict[str, Any]:
        """The same, by name."""
        base = self.scratch.data_ptr()
        scratch = {name: (base + offset, size) for name, (offset, size) in variant.scratch.items()}
        return {**scratch, "control": self.controls[variant.order], "report": self.report}


def aligned(size: int, alignment: int = 512) -> torch.Tensor:
    """Bytes of 255 at a multiple of an alignment, as an allocator of device memory gives them."""
    block = torch.full((size + alignment,), 255, dtype=torch.uint8)
    first = -block.data_ptr() % alignment
    return block[first : first + size]


def unwritten(tokens: int, hidden: int) -> torch.Tensor:
    """An output that has no numbers yet."""
    return torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16)


def with_biases(trial: Trial, names: Sequence[str], seed: int = 0) -> Trial:
    """The trial with expert biases."""
    generator, p = torch.Generator().manual_seed(seed), trial.problem
    shapes = {"b13": (p.experts, 2 * p.intermediate), "b2": (p.experts, p.hidden)}
    biases = {name: (torch.randn(shapes[name], generator=generator) * 0.3).to(torch.bfloat16) for name in names}
    return replace(trial, weights=replace(trial.weights, **biases))


class OneRank:
    """A layer on one rank with one kernel and one workspace, over which launches follow each other.

    Args:
        problem: the layer.
        order, tile, rows, claims: which kernel.
        grid: CTAs of a launch.
        biases: names of expert biases.
        quantized: x comes in the format's type.
        seed, tokens, pattern: of the trial.
        deadline: seconds of virtual time.
        races: whether runs look for data races, from launch to launch.
    """

    def __init__(
        self,
        problem: MoEProblem,
        order: str,
        tile: int,
        rows: str = "",
        claims: str = "late",
        *,
        grid: int = 4,
        biases: Sequence[str] = (),
        quantized: bool = False,
        seed: int = 0,
        tokens: int | None = None,
        pattern: str = "zipf",
        deadline: float = 4.0,
        races: bool = False,
    ) -> None:
        self.problem = problem
        self.trial = with_biases(make_trial(problem, tokens=tokens, seed=seed, pattern=pattern), biases)
        self.experts = oracle.Experts(problem.format, self.trial.weights)
        plan = Sm90Backend().plan(problem)
        self.weights = Sm90Weights(plan, self.trial.local_weights(0))
        operands = Operands(quantized=quantized, sms=grid, **{name: True for name in biases})
        self.variant = Variant.of(problem, order, tile, rows, problem.max_tokens, operands, claims)
        self.workspace = HostWorkspace([self.variant])
        self.function, self.call = caught(
            self.variant,
            lambda: shim_launch.Call(self.variant, self.weights.addresses, self.workspace.addresses(self.variant), deadline),
        )
        named = self.workspace.named(self.variant)
        loose = [named["mid_scale"]] if order == "swap" and "mid_scale" in named else []  # boxes reach over the rows of other blocks
        self.races = Order(named, loose) if races else None

    def run(self, inputs: Inputs, *, x_scale: torch.Tensor | None = None, tokens: int | None = None, seed: int = 0) -> torch.Tensor:
        """One launch into an output without numbers; ``tokens`` other than there are must be a fault."""
        out = unwritten(inputs.topk_ids.shape[0], self.problem.hidden)
        given = (inputs.x, x_scale, inputs.topk_ids, inputs.topk_weights, out)
        x, scale, ids, weights, target = (0 if t is None else t.data_ptr() for t in given)
        self.call.run(out.shape[0] if tokens is None else tokens, x, scale, ids, weights, target, 0)
        buffers = [*given, *self.weights.tensors.values(), *self.workspace.buffers(self.variant)]
        self.ran = run([self.function.take()], buffers, seed=seed, order=self.races)
        return out

    def judge(self, inputs: Inputs, out: torch.Tensor) -> str:
        """What the oracle has against an output; empty when it is right."""
        verdict = oracle.judge(out, oracle.compute(self.problem, self.experts, *inputs), format=self.problem.format)
        return "" if verdict.ok else verdict.text

    def status(self) -> dict[str, int]:
        """See :meth:`Ranks.status`."""
        return record_of(self.workspace.controls[self.variant.order])


class Ranks:
    """A layer on several ranks, each with its own memory in this process.

    Args:
        problem: the layer.
        ranks: how many.
        tile, ring, combine, wire_format: see :class:`megamoe_sm90.shim.ranks.Choice`.
        grid: CTAs of each rank's launch.
        quantized: x comes in the format's type.
        delays: kernels with random waits.
        seed, tokens, pattern: of the trial.
        deadline: seconds of virtual time.
        races: whether runs look for data races, from launch to launch.
    """

    def __init__(
        self,
        problem: MoEProblem,
        ranks: int,
        *,
        tile: int | None = 128,
        ring: int | None = None,
        combine: str = "routes",
        wire_format: str = "bf16",
        grid: int = 3,
        biases: Sequence[str] = (),
        quantized: bool = False,
        delays: bool = False,
        seed: int = 0,
        tokens: Sequence[int] | None = None,
        pattern: str = "zipf",
        deadline: float = 4.0,
        races: bool = False,
    ) -> None:
        self.problem, self.ranks = problem, ranks
        self.trial = with_biases(make_trial(problem, ranks=ranks, tokens=tokens, seed=seed, pattern=pattern), biases)
        self.experts = oracle.Experts(problem.format, self.trial.weights)
        operands = Operands(quantized=quantized, sms=grid, **{name: True for name in biases})
        self.variant = several.RanksVariant.of(problem, ranks, several.Choice(tile, ring, combine, wire_format), operands, delays=delays)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(several, "PROVED_RANKS", ranks)
            plan = Sm90Backend().plan(problem, ranks=ranks)
        layout = self.variant.config.layout
        self.heaps = [aligned(layout.nbytes) for _ in range(ranks)]
        for heap in self.heaps:
            for name in ("signal", "counts", "flags"):
                self.region(heap, name).zero_()
        self.table = torch.tensor([heap.data_ptr() for heap in self.heaps], dtype=torch.int64)
        self.weights = [Sm90Weights(plan, self.trial.local_weights(rank)) for rank in range(ranks)]
        self.memory, self.launchers = [], []
        for rank in range(ranks):
            memory = several.RanksMemory(self.variant, SimpleNamespace(table=self.table), HOST)  # type: ignore[arg-type]
            memory._scratch.fill_(255)
            memory.control[wire.RANK : wire.RANK + 4].view(torch.int32).fill_(rank)
            self.memory.append(memory)
            self.launchers.append(
                caught(self.variant, lambda r=rank, m=memory: several.RanksLauncher(self.variant, self.weights[r], m, deadline))
            )
        loose = []
        if combine == "routes":  # sums of fewer columns or slots read the first words of the inbox, whatever they are
            loose = [(self.region(heap, "inbox").data_ptr(), 16) for heap in self.heaps]
        named = self.named
        if self.variant.config.span:  # a copy of a row looks afterwards whether the row was still there
            loose += [place for name, place in named.items() if name.startswith("pool")]
        self.races = Order(named, loose) if races else None

    def region(self, heap: torch.Tensor, name: str) -> torch.Tensor:
        """A region of a rank's symmetric memory."""
        offset, size = self.variant.config.layout.offsets[name]
        return heap[offset : offset + size]

    def judge(self, inputs: Sequence[Inputs], outs: Sequence[torch.Tensor]) -> list[str]:
        """What the oracle has against every rank's output; empty when all are right."""
        wanted = [oracle.compute(self.problem, self.experts, *each) for each in inputs]
        how = {"format": self.problem.format, "wire": self.variant.config.wire}
        verdicts = [oracle.judge(out, want, **how) for out, want in zip(outs, wanted, strict=True)]
        return [f"rank {rank}: {verdict.text}" for rank, verdict in enumerate(verdicts) if not verdict.ok]

    @property
    def named(self) -> dict[str, Any]:
        """Memory of all ranks that launches leave to the next ones, by name, without the gaps between regions."""
        config, found = self.variant.config, {}
        for rank, (heap, memory) in enumerate(zip(self.heaps, self.memory, strict=True)):
            for block, regions_ in ((heap, config.layout), (memory._scratch, config.local)):
                places = {name: (block.data_ptr() + offset, size) for name, (offset, size) in regions_.offsets.items() if size}
                found |= {f"{name} of rank {rank}": place for name, place in places.items()}
            found[f"control of rank {rank}"] = memory.control
        return found

    @property
    def buffers(self) -> list[Any]:
        """All memory of all ranks that kernels may touch."""
        given = [each for m, w in zip(self.memory, self.weights, strict=True) for each in (m._place, *w.tensors.values())]
        return [self.table, *self.named.values(), *given]

    def run(
        self,
        inputs: Sequence[Inputs],
        *,
        x_scales: Sequence[torch.Tensor | None] | None = None,
        seed: int = 0,
        change: Callable[[int, Launch], Launch | None] = lambda rank, launch: launch,
    ) -> list[torch.Tensor]:
        """One launch of every rank, into outputs without numbers.

        Args:
            inputs, x_scales: of every rank.
            seed: of the machine.
            change: what becomes of a rank's launch: later, killed, or ``None``: it never comes.
        """
        outs, buffers, launches = [], list(self.buffers), []
        for rank, each in enumerate(inputs):
            out = unwritten(each.x.shape[0], self.problem.hidden)
            given = (each.x, x_scales[rank] if x_scales else None, each.topk_ids, each.topk_weights, out)
            buffers += given
            x, scale, ids, weights, target = (0 if t is None else t.data_ptr() for t in given)
            function, launcher = self.launchers[rank]
            launcher.run(each.x.shape[0], x, scale, ids, weights, target, 0)
            launch = change(rank, replace(function.take(), gpu=rank))
            if launch is not None:
                launches.append(launch)
            outs.append(out)
        self.ran = run(launches, buffers, seed=seed, order=self.races)
        return outs

    def status(self, rank: int) -> dict[str, int]:
        """The record of the wait of a rank's launch that failed first; its ``abort`` is 0 where none did."""
        return record_of(self.memory[rank].control)


def record_of(control: torch.Tensor) -> dict[str, int]:
    """What a control block says of the wait that failed first."""
    words = control[regions.RECORD : regions.RECORD + 8 * len(regions.RECORD_FIELDS)].view(torch.int64).tolist()
    abort = int(control[regions.ABORT : regions.ABORT + 4].view(torch.int32))
    return {"abort": abort, **dict(zip(regions.RECORD_FIELDS, words, strict=True))}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two outputs are bit for bit the same; NaN is never right."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16)) and not bool(one.isnan().any())


def inputs_of(problem: MoEProblem, tokens: int, pattern: str, seed: int) -> Inputs:
    """Random inputs of one rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = routing.PATTERNS[pattern](problem, tokens, generator).to(torch.int32)
    x = torch.randn(tokens, problem.hidden, generator=generator).to(torch.bfloat16)
    return Inputs(x, ids, routing.weights(tokens, problem.top_k, generator))


def check_calls(layer: OneRank, calls: Sequence[tuple[str, int]]) -> None:
    """Launches one after the other on one workspace, by routing pattern and tokens: right, and the same bytes in another thread order."""
    for number, (pattern, tokens) in enumerate(calls):
        inputs = inputs_of(layer.problem, tokens, pattern, seed=number)
        out = layer.run(inputs, seed=2 * number)
        assert not layer.judge(inputs, out), (pattern, tokens, layer.judge(inputs, out))
        if number % 3 == 0:
            assert same_bytes(out, layer.run(inputs, seed=2 * number + 1)), (pattern, tokens)
    assert layer.status()["abort"] == 0


def check_quantized(problem: MoEProblem, kernel: Sequence[Any], calls: Sequence[tuple[str, int]]) -> None:
    """Activations that come quantized end in the bytes of those that the kernel quantizes."""
    plain, quantized = (OneRank(problem, *kernel, quantized=q) for q in (False, True))
    for number, (pattern, tokens) in enumerate(calls):
        inputs = inputs_of(problem, tokens, pattern, seed=number)
        x, scale = load(problem.format).quantize(inputs.x, static_scale=plain.trial.weights.x_scale)
        assert same_bytes(plain.run(inputs, seed=number), quantized.run(inputs._replace(x=x), x_scale=scale, seed=number + 50))
