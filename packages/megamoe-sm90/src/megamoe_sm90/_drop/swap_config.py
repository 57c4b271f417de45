"""What one compiled swap-order kernel is: sizes, format, knobs with their legal values, and the memory it needs. Plain Python."""

from dataclasses import dataclass, field

from megamoe.device.regions import BANKS, round_up

from .layer_config import ROW_BYTES, SMEM_BYTES, LayerConfig

TOKEN_TILES = (8, 16, 32, 64, 128)
STAGE_BYTES = 128 * ROW_BYTES
"""One ring stage: 128 weight rows of 128 bytes of K."""

# The control block begins as megamoe.device.regions says; banks and what follows are this kernel's own.
BANK_TILES = 128
"""Inside a bank: word 0 counts quantized pieces of activations, words from here on the FC2 tiles done of each block of 256 columns."""

# Wait sites in the error record.
SITE_ACTIVATIONS, SITE_MID, SITE_PARTIAL, SITE_ROWS = 11, 12, 13, 14


@dataclass(frozen=True)
class SwapConfig(LayerConfig):
    """Weights on M, tokens on N. The token count of a call is no constant.

    Attributes:
        max_tokens: most tokens of one call. The whole routing is computed in the shared memory of every CTA: tokens * top_k <= 4096.
        token_tile: tokens of one block, one of TOKEN_TILES. An expert with more tokens reads its weights once for each block of them.
        stages: weight ring depth, at least 4 (None: what shared memory allows).
        token_stages: token ring depth, at least 2 (None: derived).
        window: ring stages requested and not yet landed, 2 to `stages` (None: 5 or 8 by tile). More than the memory needs to run at its
            full rate (64 to 128 KB a CTA) only queues in it, and every other access of the launch waits behind that queue.
    """

    max_tokens: int = field(kw_only=True)
    token_tile: int = 8
    stages: int | None = None
    token_stages: int | None = None
    window: int | None = None

    def faults(self) -> list[str]:
        """Also settles the depths that were left open, once nothing else is wrong."""
        tile = self.not_among("token_tile", TOKEN_TILES)
        found = [*super().faults(), *([tile] if tile else [])]
        if 1 <= self.top_k <= 32 and not 1 <= self.max_tokens * self.top_k <= 4096:
            found.append(f"max_tokens={self.max_tokens}; allowed: 1 to {4096 // self.top_k} with top_k={self.top_k}")
        return found or self._settle()

    def _settle(self) -> list[str]:
        found = []
        if self.token_stages is None:
            object.__setattr__(self, "token_stages", {8: 8, 16: 8, 32: 8, 64: 6, 128: 4}[self.token_tile])
        if self.token_stages < 2:
            found.append(f"token_stages={self.token_stages}; allowed: 2 and more")
        room = (SMEM_BYTES - self.fixed_bytes) // (STAGE_BYTES + 20)
        if self.stages is None:
            object.__setattr__(self, "stages", min(room, 16))
        if self.window is None:
            # One token gains from short queues (2% at 5 against 8), many tokens from a fuller memory pipeline (1 to 2% at 8).
            object.__setattr__(self, "window", min(5 if self.token_tile == 8 else 8, self.stages))
        if not 4 <= self.stages <= room:
            found.append(f"stages={self.stages}; allowed: 4 to {room} beside {self.fixed_bytes} other bytes of shared memory")
        elif 2 * self.bitmap_words * 4 > self.stages * STAGE_BYTES:
            most = self.stages * STAGE_BYTES // (8 * self.experts) * 32 // self.top_k
            found.append(f"max_tokens={self.max_tokens}; allowed: up to {most} with {self.experts} experts and {self.stages} stages")
        # Beyond the ring the producer would wait for a landing that its own next request has overwritten.
        if not 2 <= self.window <= self.stages:
            found.append(f"window={self.window}; allowed: 2 to {self.stages}, the number of stages")
        return found

    # ------------------------------------------------------------ derived sizes
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
        return max(self.out_cols * (256 + 16), self.token_tile * (128 + 16) if self.element == 1 else 0)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the weight ring."""
        token = self.token_stages * (self.token_tile * 128 + (self.scale_pitch * 4 if self.block_scales else 0) + 16)
        routing = 4 * (self.routes + self.experts + 12 + 2 * self.blocks + (self.rows if self.early else 0) + 8)
        return 1024 + token + self.epilogue_bytes + self.token_tile * 32 + routing + 512

    # ------------------------------------------------------------ global memory
    @property
    def bank_bytes(self) -> int:
        return round_up(BANK_TILES + 4 * self.n2, 128)

    @property
    def tags(self) -> int:
        """Offset of the epoch tags: mid blocks [blocks][n1], then partial sums [CTA][2]. Independent of the token tile."""
        return BANKS + 2 * self.bank_bytes

    def control_bytes(self, ctas: int) -> int:
        """Zeroed once by the host, and again after an abort. Variants of one problem may share one block (the largest)."""
        return round_up(self.tags + 4 * self.blocks * self.n1 + 8 * ctas, 256)

    @property
    def partial_bytes(self) -> int:
        """Partial sums of one CTA: an FC1 and an FC2 tile of 256 weight rows each, fp32."""
        return 2 * 256 * self.token_tile * 4

    def scratch_regions(self, ctas: int) -> dict[str, tuple[int, int]]:
        """Name -> (offset, bytes), in the order of the kernel's arguments. Any content; variants may share one block (the largest)."""
        sizes = {
            "xq": self.rows * self.hidden * self.element,
            "xs": self.rows * self.kb1 * 4 if self.block_scales else 0,
            "partial": ctas * self.partial_bytes,
            "mid": self.rows * self.intermediate * self.element,
            "mid_scale": self.rows * self.kb2 * 4 if self.block_scales else 0,
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
