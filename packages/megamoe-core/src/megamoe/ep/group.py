"""Who takes part: rank, size and members of an expert-parallel group, which may be smaller than the world and in any rank order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megamoe.errors import InvalidInput, PeerAborted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

UNKNOWN_RANK = -1
"""``PeerAborted.rank`` when the collective library does not say which peer was lost."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The ranks that share the experts. All ranks below are positions in the group, not in the world.

    Attributes:
        rank: this process's position, 0 to ``size - 1``. It decides which experts of the placement this process holds.
        size: number of processes.
        members: world rank of every position.
        handle: the torch process group; ``None`` for a group of one without torch.distributed.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    handle: ProcessGroup | None = None

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Group:
        """Facts about a torch process group; ``None`` is a group of one.

        Raises:
            InvalidInput: not a process group, torch.distributed is not initialized, or this process is not a member.
        """
        if group is None:
            return cls(0, 1, (0,))
        hint = "pass the group that torch.distributed.new_group returned on its member ranks, or None for one rank"
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidInput(
                f"group={group!r}; allowed: None or a torch.distributed.ProcessGroup that this process belongs to.", hint=hint
            )
        try:
            members = tuple(dist.get_process_group_ranks(group))
            rank = dist.get_rank(group)
        except (ValueError, RuntimeError, KeyError) as error:
            raise InvalidInput(f"group={group!r} is not usable: {error}.", hint=hint) from error
        if rank < 0:
            raise InvalidInput(f"this process is not in the group of world ranks {list(members)}.", hint=hint)
        return cls(rank, len(members), members, group)

    def wire_device(self, device: torch.device) -> torch.device:
        """Where tensors of a collective must lie, for data that live on ``device``: there when NCCL serves it, else on the CPU.

        Raises:
            InvalidInput: the group's library serves neither.
        """
        if self.handle is None:
            return device
        served = dist.get_backend_config(self.handle)
        if device.type == "cuda" and "cuda:nccl" in served:
            return device
        if "cpu:" in served:
            return torch.device("cpu")
        raise InvalidInput(
            f"the group communicates through {served!r}, and this rank's weights lie on {device}; allowed: NCCL for cuda, gloo for cpu.",
            hint="move the weights to this rank's GPU, or make the group with backend='gloo'",
        )

    def gather_bytes(self, payload: bytes, device: torch.device) -> list[bytes]:
        """Everyone's payload, by rank. Collective; the lengths may differ.

        Args:
            payload: this rank's bytes.
            device: the device this rank computes on (NCCL sends from there).

        Raises:
            PeerAborted: the collective failed.
        """
        if self.handle is None:
            return [payload]
        wire = self.wire_device(device)
        with collective():
            lengths = [torch.zeros(1, dtype=torch.int64, device=wire) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64, device=wire), group=self.handle)
            longest = max(int(length) for length in lengths)
            mine = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8).to(wire)
            texts = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(texts, mine, group=self.handle)
        return [text.cpu().numpy().tobytes()[: int(length)] for text, length in zip(texts, lengths, strict=True)]


@contextmanager
def collective() -> Iterator[None]:
    """Turns a failed collective into :class:`PeerAborted`: a peer died, hung past the group's timeout, or destroyed the group."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise PeerAborted(
            f"A collective among the ranks failed: {error}",
            rank=UNKNOWN_RANK,
            hint="look at the other ranks' output, then start the ranks again",
        ) from error
