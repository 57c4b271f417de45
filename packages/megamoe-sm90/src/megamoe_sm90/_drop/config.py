"""Compile-time configuration of the native-order kernel and everything that follows from it. Plain Python."""

from dataclasses import dataclass

from megamoe.device import regions

from .layer_config import ROW_BYTES, SMEM_BYTES, TILE_N, LayerConfig

TILES_M = (64, 128)
CLAIMS = ("late", "early")  # a CTA's next task: claimed when the one before it begins, or while two are ahead of it
ROWS = ("gather", "pool")  # rows of x straight into shared memory by 16-byte copies, or through a pool grouped by expert and TMA
MAX_SLOTS = 8  # rows that the dispatch warp has in flight


@dataclass(frozen=True)
class NativeConfig(LayerConfig):
    """One compiled kernel.

    rows: how rows of x reach the tiles, see ROWS. claims: see CLAIMS. unroll, stages: None to derive them from the shape. sms: CTAs of a
    launch.
    """

    tile_m: int = 128
    rows: str = "gather"
    claims: str = CLAIMS[0]
    stages: int | None = None
    unroll: int | None = None
    sms: int = 132

    def faults(self) -> list[str]:
        own = (self.not_among(*field) for field in (("tile_m", TILES_M), ("rows", ROWS), ("claims", CLAIMS)))
        return [*super().faults(), *(fault for fault in own if fault)]

    @property
    def slots(self) -> int:
        """Experts of all ranks that a CTA keeps counts of; one rank counts in one place."""
        return 0

    @property
    def stream_weights(self) -> bool:
        """Weights leave L2 first: gathering kernels run where few row blocks read each weight, and rows should stay."""
        return self.rows == "gather"

    @property
    def k_unroll(self) -> int:
        """K blocks a loop iteration: divides both loops."""
        if self.unroll is not None:
            return self.unroll
        return max(u for u in (1, 2, 3, 4, 5) if self.kb1 % u == 0 and self.kb2 % u == 0)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a math and of a producer thread: two temporaries beside 128 accumulators leave the producers the least there is."""
        return (232, 40) if self.promotes and self.tile_m == 128 else (208, 80)

    @property
    def task_slots(self) -> int:
        """Tasks that a CTA holds: the one in work and those claimed ahead."""
        return 3 if self.claims == "early" else 2

    @property
    def scale_words(self) -> int:
        """fp32 words of scales a stage: one a row, then the two weight panels'."""
        return self.tile_m + 8

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + TILE_N) * ROW_BYTES + self.scale_words * 4

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the stages: counts, offsets, task ring, row indices, barriers."""
        return (
            4 * (2 * self.experts + 1) + 4 * (2 * self.slots + 2) + self.task_slots * 4 * (8 + self.tile_m) + 4 * self.tile_m + 512 + 1024
        )

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element

    @property
    def move_slots(self) -> int:
        """Rows in flight of the dispatch warp: what the stages leave of shared memory."""
        if self.rows != "pool":
            return 0
        return max(1, min(MAX_SLOTS, (SMEM_BYTES - self.fixed_bytes - self.num_stages * self.stage_bytes) // self.row_bytes))

    @property
    def num_stages(self) -> int:
        if self.stages is not None:
            return self.stages
        kept = self.row_bytes if self.rows == "pool" else 0
        return min(6, (SMEM_BYTES - self.fixed_bytes - kept) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, an upper bound."""
        return self.fixed_bytes + self.num_stages * self.stage_bytes + self.move_slots * self.row_bytes

    @property
    def group(self) -> int:
        # Two FC1 tasks for every CTA, one running and one fetched, lie between FC1 and FC2 of a group.
        return max(1, -(-2 * self.sms // self.n1))

    def max_blocks(self, tokens: int) -> int:
        return regions.max_blocks(tokens, self.top_k, self.experts, self.tile_m)
