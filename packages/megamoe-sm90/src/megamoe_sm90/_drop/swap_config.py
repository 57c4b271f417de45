"""What one compiled swap-order kernel is: sizes, format, knobs with their legal values, and the memory it needs. Plain Python."""

from dataclasses import dataclass

from megamoe.device.regions import BANKS, round_up

FORMATS = ("fp8_block128", "fp8_tensor", "fp8_tensor_e5m2", "bf16")
TOKEN_TILES = (8, 16, 32, 64, 128)
SMEM_LIMIT = 232448
THREADS = 384
STAGE_BYTES = 128 * 128
"""One ring stage: 128 weight rows of 128 bytes of K."""

# The control block begins as megamoe.device.regions says; banks and what follows are this kernel's own.
BANK_TILES = 128
"""Inside a bank: word 0 counts quantized pieces of activations, words from here on the FC2 tiles done of each block of 256 columns."""

# Wait sites in the error record.
SITE_ACTIVATIONS, SITE_MID, SITE_PARTIAL, SITE_ROWS = 11, 12, 13, 14


@dataclass(frozen=True)
class SwapConfig:
    """Weights on M, tokens on N. Every field is a compile-time constant; the token count is not.

    Attributes:
        fmt: one of FORMATS.
        experts, top_k, hidden, intermediate: of this rank; ``intermediate`` is the width after the activation.
        max_tokens: most tokens of one call. The whole routing is computed in the shared memory of every CTA: tokens * top_k <= 4096.
        token_tile: tokens of one block, one of TOKEN_TILES. An expert with more tokens reads its weights once for each block of them.
        stages: weight ring depth, at least 4 (None: what shared memory allows).
        token_stages: token ring depth, at least 2 (None: derived).
        window: ring stages requested and not yet landed, 2 to `stages` (None: 5 or 8 by tile). More than the memory needs to run at its
            full rate (64 to 128 KB a CTA) only queues in it, and every other access of the launch waits behind that queue.
        act_bf16: x is bf16 and is quantized in the launch; otherwise x comes in the format's type, with x_scale.
        limit, alpha, up_bias: the activation. bias13, bias2: expert biases present. early: routing weight applied before re-quantization.
        ids64: topk_ids are int64.
    """

    fmt: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    max_tokens: int
    token_tile: int = 8
    stages: int | None = None
    token_stages: int | None = None
    window: int | None = None
    act_bf16: bool = True
    limit: float | None = None
    alpha: float = 1.0
    up_bias: float = 0.0
    bias13: bool = False
    bias2: bool = False
    early: bool = False
    ids64: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.fmt not in FORMATS:
            faults.append(f"fmt={self.fmt!r}; allowed: {', '.join(FORMATS)}")
        if self.token_tile not in TOKEN_TILES:
            faults.append(f"token_tile={self.token_tile}; allowed: {TOKEN_TILES}")
        grain = 128 if self.fmt == "fp8_block128" else 64
        for name in ("hidden", "intermediate"):
            if getattr(self, name) <= 0 or getattr(self, name) % grain:
                faults.append(f"{name}={getattr(self, name)}; allowed: multiples of {grain} for {self.fmt}")
        if not 1 <= self.experts <= 512:
            faults.append(f"experts={self.experts}; allowed: 1 to 512")
        if not 1 <= self.top_k <= 32:
            faults.append(f"top_k={self.top_k}; allowed: 1 to 32")
        elif not 1 <= self.max_tokens * self.top_k <= 4096:
            faults.append(f"max_tokens={self.max_tokens}; allowed: 1 to {4096 // self.top_k} with top_k={self.top_k}")
        if self.bias2 and self.early:
            faults.append("bias2 with early; an output bias needs the late routing weight")
        if not faults:
            if self.token_stages is None:
                object.__setattr__(self, "token_stages", {8: 8, 16: 8, 32: 8, 64: 6, 128: 4}[self.token_tile])
            if self.token_stages < 2:
                faults.append(f"token_stages={self.token_stages}; allowed: 2 and more")
            room = (SMEM_LIMIT - self.fixed_bytes) // (STAGE_BYTES + 20)
            if self.stages is None:
                object.__setattr__(self, "stages", min(room, 16))
            if self.window is None:
                # One token gains from short queues (2% at 5 against 8), many tokens from a fuller memory pipeline (1 to 2% at 8).
                object.__setattr__(self, "window", min(5 if self.token_tile == 8 else 8, self.stages))
            if not 4 <= self.stages <= room:
                faults.append(f"stages={self.stages}; allowed: 4 to {room} beside {self.fixed_bytes} other bytes of shared memory")
            elif 2 * self.bitmap_words * 4 > self.stages * STAGE_BYTES:
                most = self.stages * STAGE_BYTES // (8 * self.experts) * 32 // self.top_k
                faults.append(f"max_tokens={self.max_tokens}; allowed: up to {most} with {self.experts} experts and {self.stages} stages")
            # Beyond the ring the producer would wait for a landing that its own next request has overwritten.
            if not 2 <= self.window <= self.stages:
                faults.append(f"window={self.window}; allowed: 2 to {self.stages}, the number of stages")
        if faults:
            raise ValueError("; ".join(faults))

    # ------------------------------------------------------------ derived sizes
    @property
    def scaled(self) -> bool:
        return self.fmt == "fp8_block128"

    @property
    def elem(self) -> int:
        """Bytes of one weight or activation element."""
        return 2 if self.fmt == "bf16" else 1

    @property
    def bk(self) -> int:
        """Elements of one K block (128 bytes)."""
        return 128 // self.elem

    @property
    def k1(self) -> int:
        """K blocks of FC1."""
        return -(-self.hidden // self.bk)

    @property
    def k2(self) -> int:
        """K blocks of FC2."""
        return -(-self.intermediate // self.bk)

    @property
    def tiles1(self) -> int:
        """FC1 tiles (128 mid channels: 128 gate and 128 up rows) of an expert."""
        return -(-self.intermediate // 128)

    @property
    def tiles2(self) -> int:
        """FC2 tiles (256 output columns) of an expert."""
        return -(-self.hidden // 256)

    @property
    def routes(self) -> int:
        return self.max_tokens * self.top_k

    @property
    def bitmap_words(self) -> int:
        """Words of the routing bitmap [routes / 32][experts]; it and as many words of ranks lie in the weight ring."""
        return -(-self.routes // 32) * self.experts

    @property
    def rows(self) -> int:
        """Pool rows: every expert starts at a multiple of 8."""
        return round_up(self.routes + 7 * min(self.experts, self.routes), 8)

    @property
    def blocks(self) -> int:
        """Most (expert, token tile) pairs of one call."""
        return min(self.experts, self.routes) + self.routes // self.token_tile

    @property
    def box_rows(self) -> int:
        """Token rows of one TMA box: a tile is loaded in at most 8 of them, only as many as hold tokens."""
        return max(8, self.token_tile // 8)

    @property
    def widths(self) -> tuple[int, ...]:
        """MMA widths compiled in: a block of few tokens runs the narrowest that holds it, which saves promotion and epilogue."""
        return {8: (8,), 16: (8, 16), 32: (8, 32), 64: (8, 32, 64), 128: (16, 64, 128)}[self.token_tile]

    @property
    def scale_pitch(self) -> int:
        """Floats between the token scales of two ring stages: a TMA box starts at a multiple of 128 bytes."""
        return max(32, self.token_tile)

    @property
    def out_cols(self) -> int:
        """Tokens of one pass of the bf16 epilogue through shared memory."""
        return min(self.token_tile, 64)

    @property
    def epilogue_bytes(self) -> int:
        return max(self.out_cols * (256 + 16), self.token_tile * (128 + 16) if self.elem == 1 else 0)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the weight ring."""
        token = self.token_stages * (self.token_tile * 128 + (self.scale_pitch * 4 if self.scaled else 0) + 16)
        routing = 4 * (self.routes + self.experts + 12 + 2 * self.blocks + (self.rows if self.early else 0) + 8)
        return 1024 + token + self.epilogue_bytes + self.token_tile * 32 + routing + 512

    # ------------------------------------------------------------ global memory
    @property
    def bank_bytes(self) -> int:
        return round_up(BANK_TILES + 4 * self.tiles2, 128)

    @property
    def tags(self) -> int:
        """Offset of the epoch tags: mid blocks [blocks][tiles1], then partial sums [CTA][2]. Independent of the token tile."""
        return BANKS + 2 * self.bank_bytes

    def control_bytes(self, ctas: int) -> int:
        """Zeroed once by the host, and again after an abort. Variants of one problem may share one block (the largest)."""
        return round_up(self.tags + 4 * self.blocks * self.tiles1 + 8 * ctas, 256)

    @property
    def partial_bytes(self) -> int:
        """Partial sums of one CTA: an FC1 and an FC2 tile of 256 weight rows each, fp32."""
        return 2 * 256 * self.token_tile * 4

    def scratch_regions(self, ctas: int) -> dict[str, tuple[int, int]]:
        """Name -> (offset, bytes), in the order of the kernel's arguments. Any content; variants may share one block (the largest)."""
        sizes = {
            "xq": self.rows * self.hidden * self.elem,
            "xs": self.rows * self.k1 * 4 if self.scaled else 0,
            "partial": ctas * self.partial_bytes,
            "mid": self.rows * self.intermediate * self.elem,
            "mid_scale": self.rows * self.k2 * 4 if self.scaled else 0,
            "stage": self.rows * self.hidden * 2,
        }
        regions, at = {}, 0
        for name, size in sizes.items():
            regions[name] = (at, size)
            at += round_up(size, 256)
        return regions

    def scratch_bytes(self, ctas: int) -> int:
        return sum(round_up(size, 256) for _, size in self.scratch_regions(ctas).values())

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, an upper bound."""
        return self.fixed_bytes + self.stages * (STAGE_BYTES + 20)
