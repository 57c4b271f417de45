"""What ranks share: regions of the symmetric heap, the words in them, and the workspace of a launch on several ranks. Plain Python.

Every word that a rank writes for another one is 8 bytes: the number of the launch in its upper half, a value in its lower half. Nothing is
ever zeroed, a wait looks for the word of its own launch. Launch numbers are epoch + 1, so that zeroed memory belongs to none.

A route travels as one int32: the route within its source rank (token * top_k + slot) in 24 bits, the source rank above it, and in the sign
bit whether the row is a further copy of a token that this rank pulls for another of its experts.
"""

from megamoe.device import regions
from megamoe.ep.layout import Layout

ROUTE_BITS = 24
MOST_RANKS = 72
MOST_ROUTES = 1 << ROUTE_BITS

# Words of the signal region.
TOLD = 0  # i64: 1 + rank of a peer that ended its launch, 0 while none did

# Wait sites, continuing those of regions.py. The record's index is the rank that was waited for.
SITE_COUNTS = 21
SITE_RESULTS = 22
SITE_CARRIER = 23
SITE_TOLD = 24
SITE_NAMES = {
    SITE_COUNTS: "route counts of a rank",
    SITE_RESULTS: "results of a rank",
    SITE_CARRIER: "pool row of a token that was pulled for another expert",
    SITE_TOLD: "abort of a peer",
}

# Control words of a launch on several ranks.
EXCHANGES = 16  # counts the exchanges of this rank's launches: one a launch
RANK = 20  # this rank; the host writes it


COMBINES = ("grouped", "routes")
"""What returns to the source: one row for all routes of a token to a rank, or a row for every route."""
WIRES = ("bf16", "mxfp8")
"""How a row that returns is written. Rows of routes return as bf16 alone: that is what makes them the same on any number of ranks."""

# Values of a flag: what lies at its place of the inbox.
SUMMED = 1  # for all routes of the token to a rank, at the place of the first: their sum, times their weights, on the wire's terms
ALONE = 2  # for one route: its row as FC2 made it, in bf16


def symmetric_layout(
    *,
    ranks: int,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    element: int,
    block_scales: bool,
    early: bool,
    grouped: bool,
    mxfp8: bool,
) -> Layout:
    """The heap of every rank. `tokens` and `experts` are the most that a rank brings and holds, `element` the bytes of an activation;
    `grouped` and `mxfp8`: how results return, see COMBINES and WIRES. The inbox has a bf16 row for every route, whatever returns."""
    results = tokens * top_k
    sizes = {
        "signal": regions.ALIGN,
        "counts": 2 * ranks * (experts + 1) * 8,
        "flags": results * 8,
        "lists": tokens * top_k * 4,
        "groups": tokens * top_k * 4 if grouped else 0,
        "weights": tokens * top_k * 4 if early or grouped else 0,
        "x": tokens * hidden * element,
        "xs": tokens * (hidden // 128) * 4 if block_scales else 0,
        "inbox": results * hidden * 2,
        "inbox_scale": results * -(-hidden // 128) * 4 if mxfp8 else 0,
    }
    return Layout.of(sizes)


def bank_bytes(blocks: int) -> int:
    """A bank of counters with fc2_done[blocks] behind fc1_done[blocks]; see `fc2_done_offset`."""
    return regions.bank_bytes(2 * blocks)


def fc2_done_offset(bank_bytes_: int) -> int:
    """Byte offset of fc2_done[] in a bank (works on Python and on device integers)."""
    return regions.FC1_DONE + (bank_bytes_ - regions.FC1_DONE) // 4


def carriers_offset(bank_bytes_: int, experts: int) -> int:
    """Byte offset of the carrier words i64[ranks][tokens] in the control region, behind list_ready."""
    return regions.BANKS + 2 * bank_bytes_ + regions.round_up(4 * experts, regions.ALIGN)


def groups_offset(bank_bytes_: int, experts: int, ranks: int, tokens: int) -> int:
    """Byte offset of the counters of groups i32[ranks][tokens] in the control region, behind the carrier words."""
    return carriers_offset(bank_bytes_, experts) + 8 * ranks * tokens


def control_bytes(blocks: int, experts: int, ranks: int, tokens: int, *, grouped: bool) -> int:
    """Size of the control region; zeroed once."""
    return groups_offset(bank_bytes(blocks), experts, ranks, tokens) + (4 * ranks * tokens if grouped else 0)


def local_layout(
    listed: int, rows: int, hidden: int, intermediate: int, element: int, block_scales: bool, routes: int, staged: int
) -> Layout:
    """A rank's own workspace, of any content: `listed` rows that may come in a launch, `rows` of which the pool holds at a time; where
    results return in groups, `routes` may come (else 0), and `staged` rows of FC2 wait for the other ones of their group."""
    sizes = {
        "row_route": listed * 4,
        "row_group": listed * 4 if routes else 0,
        "route_row": routes * 4,
        "pool": rows * hidden * element,
        "pool_scale": rows * (hidden // 128) * 4 if block_scales else 0,
        "mid": rows * intermediate * element,
        "mid_scale": rows * (intermediate // 128) * 4 if block_scales else 0,
        "stage": staged * hidden * 2,
    }
    return Layout.of(sizes)
