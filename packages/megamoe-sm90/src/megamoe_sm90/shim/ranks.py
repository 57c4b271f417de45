"""The native-order kernel on several ranks: its configuration for a problem, its memory, and its launch arguments.

One kernel serves every number of tokens, because all ranks need not agree on theirs: what crosses between ranks does not depend on tiles.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megamoe.compile import KernelRequest
from megamoe.device import regions, wire
from megamoe.device.wire import COMBINES, WIRES
from megamoe.ep.physical import PhysicalExperts
from megamoe.problem import MoEProblem
from megamoe_sm90._drop.ranks_config import AHEAD, LEAST_RING, RanksConfig
from megamoe_sm90.shim.launch import Call, Launcher
from megamoe_sm90.shim.variants import ARCH, OPERANDS, PACKAGES, Operands, check_arch, layer_fields, ticks

if TYPE_CHECKING:
    from megamoe.ep.heap import Heap
    from megamoe_sm90.shim.weights import Sm90Weights

PROVED_RANKS = 8
"""Most ranks that these kernels have run on and been checked (on an H200 that they shared); a plan for more is refused."""

_STAGE_BYTES = 256 << 20
_MEMORY = ("table", "place", "row_route", "pool", "pool_scale", "mid", "mid_scale", "stage")
_FULL_TILE_ROWS = 64
_RING_BYTES = 256 << 20
RINGS = (0, LEAST_RING, AHEAD, 8, 16, 32, 64, 128)
"""Sizes of the ring that can be asked for, see ``ring`` of :class:`Choice`."""
STAGES = (0, 50, 100, 125, 150, 200, 300, 400, 800)
"""Sizes of the staging of FC2 rows that can be asked for, see ``stage`` of :class:`Choice`."""


class Choice(NamedTuple):
    """What a plan may fix of the kernel; ``None`` leaves it to the problem.

    Attributes:
        tile: token rows of a tile. Else 128, or 64 where experts get few rows on average.
        ring: groups of the task stream whose rows pool and mid hold at a time, 0 for all that may come. Else what 256 MiB hold, but 4 at
            least. A ring that is larger than all that may come is no ring.
        combine: what returns to the source of a token, one of ``COMBINES`` of megamoe.device.wire.
        wire: how it is written, one of ``WIRES`` there.
        pdl: launches may begin while the one before them on the stream ends.
        stage: with ``combine`` at ``"grouped"``, how many FC2 rows can wait for their groups, in percent of what ``max_tokens`` bring to a
            rank on average, and a block more for every expert. Launches that bring more return row by row. Else 125, or what 256 MiB hold
            where that is more.
    """

    tile: int | None = None
    ring: int | None = None
    combine: str = COMBINES[0]
    wire: str = WIRES[0]
    pdl: bool = False
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class RanksVariant:
    """The kernel of a session on several ranks, as :class:`megamoe_sm90.shim.launch.Launcher` takes it.

    Attributes:
        config: the kernel's own configuration.
        physical: where experts live.
        ctas: of a launch.
    """

    config: RanksConfig
    physical: PhysicalExperts
    ctas: int

    @classmethod
    def of(cls, problem: MoEProblem, ranks: int, choice: Choice, operands: Operands, *, delays: bool = False) -> RanksVariant:
        """The kernel for a problem.

        Args:
            problem: the layer.
            ranks: how many share it, 2 or more.
            choice: what the plan fixes.
            operands: what differs between calls or weights; its ``sms`` are the CTAs of a launch.
            delays: random waits at every step, for tests.
        """
        physical = PhysicalExperts.of(problem.resolved_placement(ranks), problem.experts)
        tile = choice.tile
        if tile is None:
            tile = 128 if ranks * problem.max_tokens * problem.top_k > _FULL_TILE_ROWS * problem.experts else 64
        config = RanksConfig(
            **{**layer_fields(problem, operands), "experts": physical.width},
            tile_m=tile,
            rows="pool",
            sms=operands.sms,
            ranks=ranks,
            max_tokens=problem.max_tokens,
            total=problem.experts,
            copies=physical.copies,
            combine=choice.combine,
            wire=choice.wire,
            pdl=choice.pdl,
            delays=delays,
        )
        config = replace(config, ring=ring_of(config) if choice.ring is None else choice.ring, stage=stage_of(config, choice.stage))
        return cls(config, physical, operands.sms)

    def request(self, arch: str | None = None) -> KernelRequest:
        """What to compile.

        Raises:
            InvalidInput: another architecture than the kernels are written for.
        """
        check_arch(arch)
        name = f"sm90-ranks-{self.config.tile_m}"
        return KernelRequest(name, PACKAGES, {"order": "ranks", **asdict(self.config)}, ARCH, self._build)

    def _build(self) -> tuple[Any, tuple[Any, ...]]:
        from megamoe_sm90._drop.host import kernel_and_args

        kernel, arguments = kernel_and_args(self.config)
        return kernel, arguments

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of the launch arguments that are addresses, in order."""
        return (*OPERANDS, "control", *_MEMORY, "out")

    def limits(self, seconds: float) -> tuple[int, ...]:
        """Launch arguments between the tokens and the stream: memory layout, grid and the deadline of waits in ticks of 2^20 ns."""
        return self.config.bank_bytes, self.config.pool_rows, self.ctas, ticks(seconds)


def ring_of(config: RanksConfig) -> int:
    """Groups of the ring where the plan does not say, see :class:`Choice`."""
    row = (config.hidden + config.intermediate) * config.element + (4 * (config.kb1 + config.kb2) if config.block_scales else 0)
    return int(max(AHEAD, _RING_BYTES // (config.group * config.tile_m * row)))


def stage_of(config: RanksConfig, percent: int | None) -> int:
    """Blocks of FC2 rows that can wait for their groups, see :class:`Choice`."""
    if percent == 0:
        return 0
    blocks = -(-config.most * (percent or 125) // (100 * config.tile_m)) + config.experts
    return int(blocks if percent else max(blocks, _STAGE_BYTES // (config.tile_m * config.hidden * 2)))


class RanksMemory:
    """A session's device memory on several ranks.

    Args:
        variant: its kernel.
        heap: its symmetric memory.
        device: where.
    """

    def __init__(self, variant: RanksVariant, heap: Heap, device: torch.device) -> None:
        config = variant.config
        self.control = torch.zeros(config.control_bytes, dtype=torch.uint8, device=device)
        self._place = torch.tensor(variant.physical.rows, dtype=torch.int32, device=device)
        self._scratch = torch.empty(config.local.nbytes, dtype=torch.uint8, device=device)
        self._fixed = {"table": heap.table.data_ptr(), "place": self._place.data_ptr(), "control": self.control.data_ptr()}
        base = self._scratch.data_ptr()
        self._fixed |= {name: base + offset for name, (offset, size) in config.local.offsets.items() if size}

    @property
    def addresses(self) -> dict[str, int]:
        """Address of every region that a kernel uses, by name."""
        return self._fixed

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`megamoe_sm90.shim.workspace.Workspace.used_on`."""
        for tensor in (self.control, self._scratch, self._place):
            tensor.record_stream(stream)


class RanksLauncher(Launcher):
    """The kernel of a session on several ranks with every argument that does not change from call to call.

    Args:
        variant: the kernel.
        weights: packed experts of this rank.
        memory: the session's.
        seconds: deadline of waits inside the kernel.
    """

    def __init__(self, variant: RanksVariant, weights: Sm90Weights, memory: RanksMemory, seconds: float) -> None:
        self._variant, self._memory, self._seconds = variant, memory, seconds
        # A rank without experts has weights without an address, which descriptors of loads do not take.
        anywhere = memory.control.data_ptr()
        self._weights = {name: address or anywhere for name, address in weights.addresses.items()}
        self._steps = [variant.config.max_tokens]
        self._calls = [Call(variant, self._weights, memory.addresses, seconds)]

    def load(self, rank: int, stream: torch.cuda.Stream) -> None:
        """Bring the machine code to the device, by a launch that meets nobody: its heaps are a scrap, and it gives up from the start."""
        config, device = self._variant.config, self._memory.control.device
        scrap = torch.zeros(config.offset("flags"), dtype=torch.uint8, device=device)
        table = torch.full((config.ranks,), scrap.data_ptr(), dtype=torch.int64, device=device)
        control = torch.zeros_like(self._memory.control)
        control[regions.ABORT : regions.ABORT + 4].view(torch.int32).fill_(1)
        control[wire.RANK : wire.RANK + 4].view(torch.int32).fill_(rank)
        fixed = {**self._memory.addresses, "table": table.data_ptr(), "control": control.data_ptr()}
        at = scrap.data_ptr()
        Call(self._variant, self._weights, fixed, self._seconds).run(0, at, at, at, at, at, stream.cuda_stream)
        stream.synchronize()
