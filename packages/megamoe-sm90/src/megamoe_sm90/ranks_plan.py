"""What the backend would run on several ranks: what speaks against it, and its memory."""

from __future__ import annotations

from collections.abc import Mapping

from megamoe import env
from megamoe.device import wire
from megamoe.ep.physical import PhysicalExperts
from megamoe.errors import InvalidInput
from megamoe.packing import expert_bytes
from megamoe.problem import MoEProblem
from megamoe.protocol import Reason, Region
from megamoe_sm90.shim import ranks as several
from megamoe_sm90.shim.knobs import AUTO
from megamoe_sm90.shim.variants import Operands

_REPEATABLE = "bitwise repeatable"
_SAME = "bitwise the same for every number of ranks: every route's row returns in bf16 and is summed in slot order (combine: routes)"
_GROUPED = (
    "bitwise the same at a fixed number of ranks, and within the oracle's tolerance of any other: a rank sums what it made of a token in "
    "slot order and returns it as {wire} (combine: grouped)"
)
_PURPOSES = {
    "signal": "abort word of the peers",
    "counts": "routes of every rank to this rank's experts, two banks",
    "flags": "a word a result: it has arrived",
    "lists": "routes by destination",
    "groups": "which other routes of its token go the same way, by destination",
    "weights": "routing weights",
    "x": "activations that peers pull",
    "xs": "their scales",
    "inbox": "results that return, by route",
    "inbox_scale": "their scales",
    "row_route": "route of every pool row",
    "row_group": "the group of every pool row",
    "route_row": "the pool row of every route",
    "pool": "received rows by expert",
    "pool_scale": "their scales",
    "mid": "intermediate rows",
    "mid_scale": "their scales",
    "stage": "FC2 rows until their group is complete",
}


def reasons(problem: MoEProblem, ranks: int, most_experts: int) -> list[Reason]:
    """What speaks against several ranks. The placement has been checked."""
    found = []
    if ranks > several.PROVED_RANKS and not env.allows_unproved_ranks():
        found.append(
            Reason(
                f"{ranks} ranks: on GPUs the kernel has been run on up to {several.PROVED_RANKS}, on more only on a CPU that executes it",
                f"at most {several.PROVED_RANKS} ranks, or backend='reference', slowly; {env.TEST_RANKS.name}=1 runs it all the same",
            )
        )
    if ranks > wire.MOST_RANKS:
        found.append(Reason(f"{ranks} ranks; at most {wire.MOST_RANKS}, one NVLink domain", "use a smaller expert-parallel group"))
    if problem.max_tokens * problem.top_k >= wire.MOST_ROUTES:
        limit = (wire.MOST_ROUTES - 1) // problem.top_k
        found.append(Reason(f"max_tokens={problem.max_tokens}; at most {limit} with top_k={problem.top_k}", "split the call"))
    width = PhysicalExperts.of(problem.resolved_placement(ranks), problem.experts).width
    if width > most_experts:
        found.append(Reason(f"{width} experts on a rank; at most {most_experts}", "spread them over more ranks"))
    return found


_ONLY = {"order": "native", "native_rows": "pool", "native_claims": "early"}
"""Knobs that several ranks leave no choice for."""


def choice_of(knobs: Mapping[str, object]) -> several.Choice:
    """What the knobs ask for.

    Raises:
        InvalidInput: they ask for what there is on one rank only.
    """
    asked = {name: knobs[name] for name in ("swap_tile", "swap_tokens") if knobs[name] != AUTO}
    asked |= {name: knobs[name] for name, only in _ONLY.items() if knobs[name] not in (AUTO, only)}
    if asked:
        raise InvalidInput(
            f"knobs {asked} on several ranks; allowed: native order with rows through a pool and early claims.",
            hint="leave these knobs at 'auto'",
        )
    tile, ring, stage = (value if isinstance(value, int) else None for value in (knobs["native_tile"], knobs["ring"], knobs["stage"]))
    return several.Choice(tile, ring, str(knobs["combine"]), str(knobs["wire"]), bool(knobs["pdl"]), stage)


def properties(choice: several.Choice) -> tuple[str, ...]:
    """What holds for the bits of results."""
    return _REPEATABLE, _SAME if choice.combine == "routes" else _GROUPED.format(wire=choice.wire)


def variant(problem: MoEProblem, ranks: int, choice: several.Choice, operands: Operands | None = None) -> several.RanksVariant:
    """The kernel of a plan."""
    return several.RanksVariant.of(problem, ranks, choice, operands or Operands())


def regions(problem: MoEProblem, planned: several.RanksVariant) -> tuple[Region, ...]:
    """Memory of a session on every rank, symmetric first."""
    config = planned.config
    symmetric = [Region(name, size, "symmetric", _PURPOSES[name]) for name, (_, size) in config.layout.offsets.items() if size]
    held = f", of {config.span} row blocks at a time" if config.span else ", of every row that may come"
    most = f", in launches of up to {config.staged} row blocks" if config.staged < config.blocks else held
    limits = {"pool": held, "mid": held, "stage": most}
    local = [
        Region(name, size, "local", _PURPOSES[name] + limits.get(name, "")) for name, (_, size) in config.local.offsets.items() if size
    ]
    return (
        *symmetric,
        Region("weights of experts", config.experts * expert_bytes(problem), "local", "of the rank that holds most, without biases"),
        Region("control", config.control_bytes, "local", "counters"),
        *local,
    )
