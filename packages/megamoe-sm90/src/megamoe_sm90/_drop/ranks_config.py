"""Configuration of the native-order kernel on several ranks. Plain Python."""

from dataclasses import dataclass

from megamoe.device import regions, wire

from .config import NativeConfig

LEAST_RING = 2  # groups: FC2 of a group comes before FC1 of the second group behind it, and not before FC1 of the next one
AHEAD = 4  # groups, at most: FC2 of a group ends about when FC1 of the third one behind it begins, whose rows should have come by then


@dataclass(frozen=True)
class RanksConfig(NativeConfig):
    """One compiled kernel, the same on all ranks.

    experts: most that a rank holds. ranks: how many there are. max_tokens: most that a rank brings. total: logical experts of the layer.
    copies: most copies of a logical expert, 0 where physical experts are the logical ones in order. ring: groups of the task stream whose
    rows pool and mid hold at a time, LEAST_RING or more, or 0 for all that may come. delays: random waits at every step, for tests.
    """

    ranks: int = 2
    max_tokens: int = 1
    total: int = 1
    copies: int = 0
    ring: int = 0
    delays: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.ranks <= wire.MOST_RANKS:
            raise ValueError(f"ranks is {self.ranks}; it must be 2 to {wire.MOST_RANKS}")
        if self.rows != "pool":
            raise ValueError(f"rows is {self.rows!r}; it must be 'pool' on several ranks")
        if self.ids64:
            raise ValueError("ids64 is set; several ranks take int32 ids")
        if self.ring < LEAST_RING and self.ring != 0:
            raise ValueError(f"ring is {self.ring}; it must be 0, or {LEAST_RING} or more")
        if not 1 <= self.most < wire.MOST_ROUTES:
            raise ValueError(f"max_tokens * top_k is {self.most}; it must be below {wire.MOST_ROUTES}")

    @property
    def layout(self):
        """The heap of every rank."""
        return wire.symmetric_layout(
            ranks=self.ranks,
            tokens=self.max_tokens,
            top_k=self.top_k,
            experts=self.experts,
            hidden=self.hidden,
            element=self.element,
            block_scales=self.block_scales,
            early=self.early,
        )

    def offset(self, region: str) -> int:
        return self.layout.offsets[region][0]

    @property
    def slots(self) -> int:
        return self.ranks * self.experts

    @property
    def most(self) -> int:
        """Most routes that a rank sends."""
        return self.max_tokens * self.top_k

    @property
    def registers(self) -> tuple[int, int]:
        # Addresses of peers take registers: the producers cannot do with less.
        return (232, 40) if self.tile_m == 128 else (208, 80)

    @property
    def blocks(self) -> int:
        """Most row blocks: every route of every rank may come here."""
        return self.max_blocks(self.ranks * self.max_tokens)

    @property
    def span(self) -> int:
        """Blocks of the ring of pool and mid rows; 0 where there is a place for every block."""
        return self.ring * self.group if self.ring * self.group < self.blocks else 0

    @property
    def ahead(self) -> int:
        """Blocks that rows are pulled at most before FC2 is complete."""
        return min(self.ring, AHEAD) * self.group

    @property
    def bank_bytes(self) -> int:
        return wire.bank_bytes(self.blocks)

    @property
    def pool_rows(self) -> int:
        """Rows of the pool and of mid."""
        return self.span * self.tile_m or self.listed

    @property
    def listed(self) -> int:
        """Rows of the list of routes: all that may come, in whole blocks."""
        return regions.pool_rows(self.ranks * self.max_tokens, self.top_k, self.experts, self.tile_m)

    @property
    def control_bytes(self) -> int:
        return wire.control_bytes(self.blocks, self.experts, self.ranks, self.max_tokens)

    @property
    def local(self):
        """A rank's own workspace."""
        return wire.local_layout(self.listed, self.pool_rows, self.hidden, self.intermediate, self.element, self.block_scales)
