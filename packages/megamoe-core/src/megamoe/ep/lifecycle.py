"""What a session of several ranks may still do after something went wrong, and what each call raises then.

    open  --wait expired, peer told of an abort, own input rejected-->  stopped  --reset on every rank-->  open
    stopped  --a rank did not come to the reset-->  lost: only ``close`` is left, and it meets nobody

The device side is behind :class:`Fabric`, so that every path runs without a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megamoe.errors import MegaMoEError, PeerAborted, PeerTimeout, SessionClosed
from megamoe.log import logger

if TYPE_CHECKING:
    from megamoe.ep.group import Group
    from megamoe.ep.rendezvous import Rendezvous

EPOCHS_APART = 2
"""How far a reset moves past every launch number in use: a word of the launch that failed can then belong to no later one."""


@dataclass(frozen=True, slots=True)
class FailedWait:
    """What a kernel left behind when it gave up.

    Attributes:
        rank: whom it waited for; or, where ``told``, who told it to stop.
        site: name of the wait.
        expected, seen: what it waited for and the last it saw.
        told: a peer's abort ended the launch, no deadline of this rank.
        detail: where exactly, for the message.
    """

    rank: int
    site: str
    expected: int
    seen: int
    told: bool = False
    detail: str = ""


class Fabric(Protocol):
    """The device side of a session."""

    def tell_abort(self) -> None:
        """Let every peer's running and coming launches end. Does not wait for the peers."""
        ...

    def failed_wait(self) -> FailedWait | None:
        """What made a launch give up since the last restart; ``None`` when none did. Does not wait for the device unless one did."""
        ...

    def quiesce(self) -> int:
        """Wait until this rank's launches have ended; the number of the latest one."""
        ...

    def restart(self, epoch: int) -> None:
        """Clear what a failed launch left, so that the next launch has a number above ``epoch``."""
        ...


class Lifecycle:
    """A session's standing among its peers.

    Args:
        group: the ranks.
        rendezvous: of the session.
        fabric: its device side.
        seconds: deadline of waits, for messages.
    """

    def __init__(self, group: Group, rendezvous: Rendezvous, fabric: Fabric, seconds: float) -> None:
        self._group, self._rendezvous, self._fabric, self._seconds = group, rendezvous, fabric, seconds
        self._stopped: FailedWait | None = None
        self._lost: PeerAborted | None = None
        self._closed = False

    @property
    def alone(self) -> bool:
        """Whether a peer was lost, so that nothing collective works any more."""
        return self._lost is not None

    def check(self) -> None:
        """Before every use of the session.

        Raises:
            SessionClosed: it was closed.
            PeerTimeout, PeerAborted: a launch gave up, or a peer is gone.
        """
        self._open()
        if self._stopped is None:
            self._stopped = self._fabric.failed_wait()
        if self._stopped is not None:
            raise self._error(self._stopped)

    def reject(self) -> None:
        """This rank raises instead of launching: its peers must not wait for it. The session then needs a reset on all ranks."""
        if self._group.size > 1 and self._stopped is None and self._lost is None and not self._closed:
            rank = self._group.rank
            self._stopped = FailedWait(rank, "input of an earlier call", 0, 0, told=True, detail="this rank rejected its input")
            self._fabric.tell_abort()

    def reset(self) -> None:
        """Make the session usable again. Collective.

        Raises:
            SessionClosed: it was closed.
            PeerAborted: a rank is gone; its ``rank`` says which.
        """
        self._open()
        self._stopped = self._stopped or self._fabric.failed_wait()
        if self._stopped is not None and not self._stopped.told:
            # A peer that has not noticed yet waits for this rank in vain. Who told this rank has told all, and is the one to be named.
            self._fabric.tell_abort()
        latest = self._fabric.quiesce()
        epochs = self._meet("reset", str(latest))
        self._fabric.restart(max(map(int, epochs)) + EPOCHS_APART)
        self._meet("reset done")
        self._stopped = None

    def close(self) -> bool:
        """End the session; whether all ranks came. Collective unless a rank is lost; raises nothing and may be called twice."""
        if not self._closed:
            self._closed = True
            if self._lost is None:
                self._fabric.quiesce()
                try:
                    self._meet("close")
                except PeerAborted as error:
                    logger().log(logging.WARNING, "%s", error)
        return self._lost is None

    def _meet(self, subject: str, word: str = "") -> list[str]:
        try:
            return self._rendezvous.meet(subject, word)
        except PeerAborted as error:
            self._lost = error
            raise

    def _open(self) -> None:
        if self._closed:
            raise SessionClosed("The session was closed.", hint="open another one with backend.open_session(plan, packed, group)")
        if self._lost is not None:
            raise PeerAborted(f"A rank of the session is gone: {self._lost.message}", rank=self._lost.rank, hint="close the session")

    def _error(self, failed: FailedWait) -> MegaMoEError:
        where = f" ({failed.detail})" if failed.detail else ""
        if failed.told:
            world = self._group.members[failed.rank]
            return PeerAborted(
                f"World rank {world} stopped the session{where}; the results of the calls since then are not valid",
                rank=failed.rank,
                hint="look at what that rank raised, then session.reset() on every rank",
            )
        return PeerTimeout(
            f"A wait inside the kernel passed its deadline of {self._seconds:g} s{where}; the results of that call are not valid",
            rank=failed.rank,
            site=failed.site,
            expected=failed.expected,
            seen=failed.seen,
            hint="session.reset() on every rank; a larger MEGAMOE_TIMEOUT where a rank may start late",
        )
