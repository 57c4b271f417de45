"""Workspace of a launch: which regions there are, how large they are, and where the words of the control region sit.

Plain Python: planners and tests use it without torch or cutlass. All offsets and sizes are in bytes.
"""

ALIGN = 256

# Control region. The host zeroes it once; every launch leaves it ready for the next one.
EPOCH = 0
EXITS = 4
ABORT = 8
STICKY = 12
REPORT = 32  # i64: address of two i32 words in host memory, or 0; see deadline.tell_host
RECORD = 64
BANKS = 256

# Inside a bank: each hot counter has a line of its own.
CLAIMS = 0
QUANTIZED = 128
FINISHED = 256
FC1_DONE = 512

STICKY_BAD_ID = 1

# Words in host memory behind REPORT.
REPORT_ABORT = 0
REPORT_STICKY = 4

# Wait sites, as written to the error record.
SITE_LISTS = 1
SITE_QUANTIZED = 2
SITE_MID = 3
SITE_END = 4
SITE_ROWS = 5
SITE_RING = 6
SITE_NAMES = {
    SITE_LISTS: "row list of an expert",
    SITE_QUANTIZED: "quantized activations",
    SITE_MID: "intermediate rows of a block",
    SITE_END: "end of all tiles",
    SITE_ROWS: "pool rows of a block",
    SITE_RING: "FC2 of the block whose pool rows come next",
}

RECORD_FIELDS = ("claimed", "site", "cta", "expected", "seen", "epoch", "index", "reserved")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def max_blocks(tokens: int, top_k: int, experts: int, tile: int) -> int:
    """Most row blocks of `tile` rows that `tokens * top_k` routes over `experts` experts can need."""
    routes = tokens * top_k
    return routes // tile + min(experts, routes)


def pool_rows(tokens: int, top_k: int, experts: int, tile: int) -> int:
    """Rows of the pool and of mid, padded to whole blocks; also the stride of the transposed scale regions."""
    return max(max_blocks(tokens, top_k, experts, tile), 1) * tile


def bank_bytes(blocks: int) -> int:
    """A bank: the hot counters, then fc1_done[blocks] and, in the second half of the rest, ready[blocks]."""
    return FC1_DONE + 2 * round_up(4 * blocks, ALIGN)


def ready_offset(bank_bytes_: int) -> int:
    """Byte offset of ready[] in a bank (works on Python and on device integers)."""
    return FC1_DONE + (bank_bytes_ - FC1_DONE) // 2


def lists_offset(blocks: int) -> int:
    """Byte offset of list_ready in the control region, behind both banks."""
    return BANKS + 2 * bank_bytes(blocks)


def control_bytes(tokens: int, top_k: int, experts: int, tile: int) -> int:
    return round_up(lists_offset(max_blocks(tokens, top_k, experts, tile)) + 4 * experts, ALIGN)


def scratch_regions(
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    tile: int,
    element: int,
    quantize: bool,
    block_scales: bool,
    pool: bool,
) -> dict[str, tuple[int, int]]:
    """Name -> (offset, bytes).

    `element` is the size of an activation element; `quantize`: x arrives in bf16 and is quantized by the launch; `pool`: rows are copied
    into a pool grouped by expert. A session that runs kernels of several tiles gives each the regions of `pool_rows` of the tile that
    needs most.
    """
    rows = pool_rows(tokens, top_k, experts, tile)
    sizes = {
        "xq": tokens * hidden * element if quantize else 0,
        "xs": tokens * (hidden // 128) * 4 if quantize and block_scales else 0,
        "row_route": rows * 4,
        "pool": rows * hidden * element if pool else 0,
        "pool_scale": rows * (hidden // 128) * 4 if pool and block_scales else 0,
        "mid": rows * intermediate * element,
        "mid_scale": rows * (intermediate // 128) * 4 if block_scales else 0,
        "stage": tokens * top_k * hidden * 2,
    }
    regions = {}
    offset = 0
    for name, size in sizes.items():
        regions[name] = (offset, size)
        offset += round_up(size, ALIGN)
    return regions


def scratch_bytes(regions: dict[str, tuple[int, int]]) -> int:
    return max(round_up(offset + size, ALIGN) for offset, size in regions.values())
