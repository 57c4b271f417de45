"""One compiled kernel: its configuration, how it is compiled, the memory it needs, and its launch arguments in order.

The configurations are plain Python, so that plans need neither torch nor CuTe DSL; the kernels themselves are imported to compile only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megamoe.compile import KernelRequest
from megamoe.device import regions
from megamoe.errors import InvalidInput
from megamoe.problem import MoEProblem
from megamoe_sm90._drop.config import CLAIMS, ROWS, TILES_M, NativeConfig
from megamoe_sm90._drop.layer_config import THREADS
from megamoe_sm90._drop.swap_config import TOKEN_TILES, SwapConfig

ARCH = "sm_90a"
PACKAGES = ("megamoe.device", "megamoe_sm90._drop")
"""What the machine code is made of."""

NATIVE_THREADS: int = THREADS
"""Of a CTA in native order."""

SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200, for plans made without a GPU."""

OPERANDS = ("w13", "w2", "w13_scale", "w2_scale", "x", "x_scale", "ids", "topk_w", "b13", "b2", "mid_static")
_NATIVE_MEMORY = ("xq", "xs", "row_route", "pool", "pool_scale", "mid", "mid_scale", "stage")
_SWAP_MEMORY = ("xq", "xs", "partial", "mid", "mid_scale", "stage")

NATIVE_TILES = TILES_M
NATIVE_ROWS = ROWS
NATIVE_CLAIMS = CLAIMS
SWAP_TILES = TOKEN_TILES
TICK = 20
"""Binary logarithm of the nanoseconds in a tick of megamoe.device.deadline, which planning cannot import: it needs the compiler."""

_BLOCK_TILE = min(NATIVE_TILES)
"""Native kernels share one control block whatever their tile, so its counters are laid out for the smallest."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What differs between calls or weights of one problem and is compiled in.

    Attributes:
        quantized: x comes in the format's type instead of bf16.
        b13, b2: expert biases are there.
        sms: CTAs of a launch, one on each multiprocessor.
    """

    quantized: bool = False
    b13: bool = False
    b2: bool = False
    sms: int = SMS


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel in one configuration.

    Attributes:
        order: ``"native"`` (tokens on M) or ``"swap"`` (weights on M).
        tile: tokens of a tile.
        config: the kernel's own configuration.
        tokens: most tokens of a call.
        sms: CTAs of a launch.
    """

    order: str
    tile: int
    config: NativeConfig | SwapConfig
    tokens: int
    sms: int

    @classmethod
    def of(
        cls,
        problem: MoEProblem,
        order: str,
        tile: int,
        rows: str,
        tokens: int,
        operands: Operands,
        claims: str = CLAIMS[0],
        *,
        pdl: bool = False,
    ) -> Variant:
        """The kernel for a problem.

        Args:
            problem: the layer, all experts on this rank.
            order, tile, rows: which kernel; see :class:`megamoe_sm90.shim.knobs.Rung`.
            tokens: most tokens it is launched with; the native kernel shares its memory layout over all of a session's, so for it this is
                the session's ``max_tokens``.
            operands: see :class:`Operands`.
            claims: native order only: when a CTA claims its next task.
            pdl: launches may begin while the one before them on the stream ends.
        """
        common = {**layer_fields(problem, operands), "pdl": pdl}
        config = (
            NativeConfig(**common, tile_m=tile, rows=rows, claims=claims, sms=operands.sms)
            if order == "native"
            else SwapConfig(**common, token_tile=tile, max_tokens=tokens)
        )
        return cls(order, tile, config, tokens, operands.sms)

    @property
    def name(self) -> str:
        """For listings and profiles."""
        return f"sm90-{self.order}-{self.tile}"

    def request(self, arch: str | None = None) -> KernelRequest:
        """What to compile.

        Raises:
            InvalidInput: another architecture than the kernels are written for.
        """
        check_arch(arch)
        return KernelRequest(self.name, PACKAGES, {"order": self.order, **asdict(self.config)}, ARCH, self._build)

    def _build(self) -> tuple[Any, tuple[Any, ...]]:
        from megamoe_sm90._drop.host import kernel_and_args

        kernel, arguments = kernel_and_args(self.config)
        return kernel, arguments

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return int(self.config.shared_bytes)

    @property
    def control_bytes(self) -> int:
        """Device memory that is zeroed once and kept between launches."""
        if isinstance(self.config, SwapConfig):
            return int(self.config.control_bytes(self.sms))
        return int(regions.control_bytes(self.tokens, self.config.top_k, self.config.experts, _BLOCK_TILE))

    @property
    def scratch(self) -> dict[str, tuple[int, int]]:
        """Device memory of any content: region name -> (offset, bytes)."""
        c = self.config
        if isinstance(c, SwapConfig):
            found: dict[str, tuple[int, int]] = c.scratch_regions(self.sms)
            return found
        found = regions.scratch_regions(
            tokens=self.tokens,
            top_k=c.top_k,
            experts=c.experts,
            hidden=c.hidden,
            intermediate=c.intermediate,
            tile=self.tile,
            element=c.element,
            quantize=c.quantize,
            block_scales=c.block_scales,
            pool=c.rows == "pool",
        )
        return found

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of the launch arguments that are addresses, in order: operands of :class:`Sm90Weights`, of the call, and regions."""
        memory = _SWAP_MEMORY if isinstance(self.config, SwapConfig) else _NATIVE_MEMORY
        return (*OPERANDS, "control", *memory, "out")

    def limits(self, seconds: float) -> tuple[int, ...]:
        """Launch arguments between the tokens and the stream: memory layout, grid and the deadline of waits."""
        if isinstance(self.config, SwapConfig):
            return self.sms, ticks(seconds) << TICK  # in nanoseconds; the kernel counts in ticks too
        bank = regions.bank_bytes(regions.max_blocks(self.tokens, self.config.top_k, self.config.experts, _BLOCK_TILE))
        rows = regions.pool_rows(self.tokens, self.config.top_k, self.config.experts, self.tile)
        return bank, rows, self.sms, ticks(seconds)


def layer_fields(problem: MoEProblem, operands: Operands) -> dict[str, Any]:
    """What a problem and its operands say of the configuration of any kernel, with all experts on this rank."""
    form = problem.activation
    return {
        "fmt": problem.format,
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "act_bf16": not operands.quantized,
        "limit": form.limit,
        "alpha": form.alpha,
        "up_bias": form.up_bias,
        "bias13": operands.b13,
        "bias2": operands.b2,
        "early": problem.routing_weight == "early",
    }


def ticks(seconds: float) -> int:
    """A deadline as kernels count it: in ticks of 2^20 ns that fit 32 bits, so 1 ms to 26 days."""
    return max(1, int(min(seconds * 1e9 / 2**TICK, 2**31 - 1)))


def check_arch(arch: str | None) -> None:
    """Check a target that somebody asked for.

    Raises:
        InvalidInput: another architecture than the kernels are written for.
    """
    if arch not in (None, ARCH):
        raise InvalidInput(f"arch={arch!r}; allowed: {ARCH}, the only target of the sm90 kernels.", hint=f"pass --arch {ARCH}")


def sizes(variants: Iterable[Variant]) -> dict[str, int]:
    """Bytes of every block that a session with these kernels holds."""
    found: dict[str, int] = {}
    for variant in variants:
        control, scratch = f"{variant.order} control", max(offset + size for offset, size in variant.scratch.values())
        found[control] = max(found.get(control, 0), variant.control_bytes)
        found["scratch"] = max(found.get("scratch", 0), scratch)
    return found
