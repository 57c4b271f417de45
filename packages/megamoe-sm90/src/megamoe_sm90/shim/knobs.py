"""Knobs of the sm90 backend, and the heuristic: which kernel runs for how many live tokens.

Few tokens an expert: weights on M (swap order), so that a tile of 8 to 128 tokens wastes nothing and weights stream once. Many: tokens on M
(native order), whose larger tiles reuse what they load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megamoe.device.wire import COMBINES, WIRES
from megamoe.errors import InvalidInput
from megamoe.problem import MoEProblem
from megamoe.tune import Knob, Space
from megamoe.tune.space import Rule
from megamoe_sm90._drop.config import NativeConfig
from megamoe_sm90._drop.swap_config import SwapConfig
from megamoe_sm90.shim.ranks import RINGS, STAGES
from megamoe_sm90.shim.variants import NATIVE_CLAIMS, NATIVE_ROWS, NATIVE_TILES, SMS, SWAP_TILES, Operands, Variant

AUTO = "auto"


def _auto(*names: str) -> Rule:
    """All of these knobs are left at auto when the order is fixed to the other one."""
    order = "native" if names[0].startswith("swap") else "swap"
    return Rule(
        lambda values: values["order"] != order or all(values[name] == AUTO for name in names),
        f"order={order!r} leaves {', '.join(names)} at {AUTO!r}",
    )


SPACE = Space(
    (
        Knob("order", (AUTO, "native", "swap"), "operand order: by the tokens of each call, or always the same"),
        Knob("native_tile", (AUTO, *NATIVE_TILES), "token rows of a native tile"),
        Knob("native_rows", (AUTO, *NATIVE_ROWS), "how rows of x reach a native tile: gathered one by one, or through a pool by expert"),
        Knob("native_claims", (AUTO, *NATIVE_CLAIMS), "when a native CTA claims a task: one ahead of its turn (late), or two (early)"),
        Knob("swap_tile", (AUTO, *SWAP_TILES), "tokens of a swap-order tile"),
        Knob("swap_tokens", (AUTO, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "most tokens of a call that runs in swap order"),
        Knob("pdl", (False, True), "a launch begins while the one before it on the stream ends (programmatic dependent launch)"),
        Knob("ring", (AUTO, *RINGS), "several ranks: groups of row blocks that pool and mid hold at a time; 0: all that may come"),
        Knob("stage", (AUTO, *STAGES), "several ranks, grouped: FC2 rows that can wait for their groups, in percent of a rank's average"),
        Knob("combine", COMBINES, "several ranks: a row returns for all routes of a token to a rank, or for every route", wire=True),
        Knob("wire", WIRES, "several ranks: how rows return", wire=True),
    ),
    (
        _auto("swap_tile", "swap_tokens"),
        _auto("native_tile", "native_rows", "native_claims"),
        Rule(
            lambda values: values["wire"] == "bf16" or values["combine"] == "grouped",
            "combine='routes' takes wire='bf16': rows return as one rank rounds them, so that every number of ranks gives the same bits",
        ),
    ),
)

# Measured on an H200. Swap order starts and ends faster, native order streams weights faster: swap order wins up to about 64 tokens of a
# call, and while few weights are touched (dsv3, 1 token, 0.35 GB: 0.092 against 0.098 ms; 8 tokens, 1.25 GB: 0.309 against 0.291). Then, by
# rows an expert on average: with few, the small native tile leaves room for a deeper ring; up to 192, gathering rows beats the extra pass
# over x that a pool costs; above, the instructions that gathering costs the loaders no longer hide.
_SWAP_TOKENS = 64
_SWAP_BYTES = 8e8
_NATIVE_64_ROWS = 16
_GATHER_ROWS = 192
_POOL_STAGES = 3
"""Least stages of a pool kernel: the math loop keeps one in use while it waits for the next, and one has to be on its way."""


@dataclass(frozen=True, slots=True)
class Rung:
    """Up to ``tokens`` live tokens (and above the rung before), this kernel runs.

    Attributes:
        tokens: most live tokens.
        order: ``"native"`` or ``"swap"``.
        tile: tokens of a tile.
        rows: native order only: ``"gather"`` or ``"pool"``; else ``""``.
        claims: native order only: ``"late"`` or ``"early"``; else ``""``.
        pdl: launches may begin while the one before them on the stream ends.
    """

    tokens: int
    order: str
    tile: int
    rows: str = ""
    claims: str = ""
    pdl: bool = False


def ladder(problem: MoEProblem, knobs: Mapping[str, object]) -> tuple[Rung, ...]:
    """The kernels of a session by live tokens, ascending; the last one reaches ``max_tokens``.

    Args:
        problem: the layer, all experts on this rank.
        knobs: complete values of :data:`SPACE`.

    Raises:
        InvalidInput: the knobs ask for more tokens in swap order than one launch can take.
    """
    asked = knobs["order"] == "swap" or any(knobs[name] != AUTO for name in ("swap_tile", "swap_tokens"))
    kept: list[Rung] = []
    for found in (*_swap_rungs(problem, knobs), *_native_rungs(problem, knobs)):
        rung = replace(found, tokens=min(found.tokens, problem.max_tokens), pdl=bool(knobs["pdl"]))
        if rung.tokens <= (kept[-1].tokens if kept else 0):
            continue
        fault = _swap_fault(problem, rung)
        if not fault:
            kept.append(rung)
        elif asked:
            raise InvalidInput(
                f"swap order with tile {rung.tile} for {rung.tokens} tokens: {fault}.",
                hint="use order='auto', a smaller swap_tokens, or a smaller max_tokens",
            )
    return tuple(kept)


def variants_of(problem: MoEProblem, rungs: tuple[Rung, ...], operands: Operands) -> tuple[Variant, ...]:
    """The kernels of a ladder, rung by rung. Native kernels share a memory layout, which is for the session's ``max_tokens``."""
    return tuple(
        Variant.of(problem, r.order, r.tile, r.rows, r.tokens if r.order == "swap" else problem.max_tokens, operands, r.claims, pdl=r.pdl)
        for r in rungs
    )


def _swap_fault(problem: MoEProblem, rung: Rung) -> str:
    """Why one launch in swap order cannot take so many tokens (their routing has to fit shared memory, and the shares of K blocks 32 bits);
    "" when it can."""
    if rung.order != "swap":
        return ""
    try:
        config = Variant.of(problem, rung.order, rung.tile, rung.rows, rung.tokens, Operands()).config
    except ValueError as error:
        return str(error)
    assert isinstance(config, SwapConfig)
    # A CTA's share begins at units * cta // grid, in int32.
    units = config.blocks * max(config.n1 * config.kb1, config.n2 * config.kb2)
    most = (2**31 - 1) // SMS
    return f"{units} K blocks; allowed: {most}" if units > most else ""


def _swap_rungs(problem: MoEProblem, knobs: Mapping[str, object]) -> list[Rung]:
    if knobs["order"] == "native":
        return []
    asked, tile = knobs["swap_tokens"], knobs["swap_tile"]
    most = problem.max_tokens if knobs["order"] == "swap" else asked if isinstance(asked, int) else _swap_tokens(problem)
    if isinstance(tile, int):
        return [Rung(most, "swap", tile)]
    # One expert may get every token of a call, so a tile that holds all tokens reads each weight once whatever the routing.
    steps = [Rung(t, "swap", t) for t in SWAP_TILES if t < most]
    return [*steps, Rung(most, "swap", next((t for t in SWAP_TILES if t >= most), SWAP_TILES[-1]))]


def _swap_tokens(problem: MoEProblem) -> int:
    """Most tokens for which swap order is expected to win; at least one."""
    each = 3 * problem.hidden * problem.intermediate * (2 if problem.format == "bf16" else 1)
    missed = 1 - problem.top_k / problem.experts

    def touched(tokens: int) -> float:
        return float(problem.experts * (1 - max(missed, 0.0) ** tokens) * each)

    return max((t for t in range(1, _SWAP_TOKENS + 1) if touched(t) <= _SWAP_BYTES), default=1)


def _native_rungs(problem: MoEProblem, knobs: Mapping[str, object]) -> list[Rung]:
    if knobs["order"] == "swap":
        return []
    tile, rows, claims = knobs["native_tile"], knobs["native_rows"], knobs["native_claims"]
    steps = [(_NATIVE_64_ROWS, 64, "gather"), (_GATHER_ROWS, 128, "gather"), (None, 128, "pool")]
    found: dict[tuple[int, str], Rung] = {}
    for each, own, way in steps:
        size = tile if isinstance(tile, int) else own
        pooled = _pool_stages(problem, size) >= _POOL_STAGES
        if rows == "pool" and not pooled:
            raise InvalidInput(
                f"native_rows='pool' with hidden={problem.hidden}: a row leaves room for {_pool_stages(problem, size)} stages beside it; "
                f"allowed: {_POOL_STAGES} and more.",
                hint="leave native_rows at 'auto'",
            )
        key = size, str(rows) if rows != AUTO else way if size == 128 and pooled else "gather"
        tokens = problem.max_tokens if each is None else each * problem.experts // problem.top_k
        found[key] = Rung(tokens, "native", *key, NATIVE_CLAIMS[0] if claims == AUTO else str(claims))
    return sorted(found.values(), key=lambda rung: rung.tokens)


def _pool_stages(problem: MoEProblem, tile: int) -> int:
    """Stages that shared memory holds beside a whole row of x on its way to the pool."""
    config = Variant.of(problem, "native", tile, "pool", problem.max_tokens, Operands()).config
    assert isinstance(config, NativeConfig)
    return max(0, int(config.num_stages))
