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
    rows pool and mid hold at a time, LEAST_RING or more, or 0 for all that may come. combine, wire: how results return, see
    wire.COMBINES and wire.WIRES. stage: blocks whose FC2 rows can wait for their groups. delays: random waits at every step, for tests.
    """

    claims: str = "early"
    ranks: int = 2
    max_tokens: int = 1
    total: int = 1
    copies: int = 0
    ring: int = 0
    combine: str = "routes"
    wire: str = "bf16"
    stage: int = 0
    delays: bool = False

    def faults(self) -> list[str]:
        found = [*super().faults(), self.not_among("combine", wire.COMBINES), self.not_among("wire", wire.WIRES)]
        if not 2 <= self.ranks <= wire.MOST_RANKS:
            found.append(f"ranks={self.ranks}; allowed: 2 to {wire.MOST_RANKS}")
        if self.rows != "pool":
            found.append(f"rows={self.rows!r}; allowed: 'pool' on several ranks")
        if self.claims != "early":
            found.append(f"claims={self.claims!r}; allowed: 'early' on several ranks")
        if self.wire != "bf16" and not self.grouped:
            found.append(f"wire={self.wire!r}; allowed: 'bf16' with combine 'routes'")
        if self.ring < LEAST_RING and self.ring != 0:
            found.append(f"ring={self.ring}; allowed: 0, or {LEAST_RING} or more")
        if self.stage < 0:
            found.append(f"stage={self.stage}; allowed: 0 or more")
        if not 1 <= self.most < wire.MOST_ROUTES:
            found.append(f"max_tokens * top_k is {self.most}; allowed: 1 to {wire.MOST_ROUTES - 1}")
        return [fault for fault in found if fault]

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
            grouped=self.grouped,
            mxfp8=self.mxfp8,
        )

    @property
    def grouped(self) -> bool:
        return self.combine == "grouped"

    @property
    def mxfp8(self) -> bool:
        return self.wire == "mxfp8"

    @property
    def groups(self) -> int:
        """Where the words of groups lie behind the lists of a rank; 0 for none."""
        return self.offset("groups") - self.offset("lists") if self.grouped else 0

    @property
    def row_groups(self) -> int:
        """Where the words of groups lie behind row_route; 0 for none."""
        return self._behind_routes("row_group")

    @property
    def route_rows(self) -> int:
        """Where the rows of routes lie behind row_route; 0 for none."""
        return self._behind_routes("route_row")

    def _behind_routes(self, region: str) -> int:
        offsets = self.local.offsets
        return offsets[region][0] - offsets["row_route"][0] if self.grouped else 0

    @property
    def staged(self) -> int:
        """Blocks of a launch whose FC2 rows can wait for their groups; where more come, each row returns alone."""
        return min(self.stage, self.blocks) if self.grouped else 0

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
        return wire.control_bytes(self.blocks, self.experts, self.ranks, self.max_tokens, grouped=self.grouped)

    @property
    def local(self):
        """A rank's own workspace."""
        routes, staged = self.ranks * self.most if self.grouped else 0, self.staged * self.tile_m
        return wire.local_layout(
            self.listed, self.pool_rows, self.hidden, self.intermediate, self.element, self.block_scales, routes, staged
        )
