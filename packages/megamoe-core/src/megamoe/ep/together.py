"""All ranks go on, or none does: what one of them cannot do becomes the same error on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from megamoe.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch

    from megamoe.ep.group import Group

Made = TypeVar("Made")


def together(group: Group, device: torch.device, problem: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Everyone's facts, by rank, unless some rank has a problem: then all raise. Collective.

    Args:
        group: the ranks.
        device: the device this rank computes on.
        problem: what speaks against going on; empty when nothing does.
        facts: what this rank has to say.

    Raises:
        BackendUnavailable: what every rank's problem is, with its world rank; the same text on all ranks.
        PeerAborted: a rank was lost.
    """
    words = group.gather_bytes(json.dumps({"problem": problem, "facts": facts}).encode(), device)
    everyone = [json.loads(word) for word in words]
    problems = [f"world rank {group.members[rank]}: {one['problem']}" for rank, one in enumerate(everyone) if one["problem"]]
    if problems:
        raise BackendUnavailable(
            f"The ranks cannot run together: {'; '.join(problems)}.",
            hint="megamoe doctor on the ranks named; backend='reference' needs no GPU",
        )
    return [dict(one["facts"]) for one in everyone]


def attempt(group: Group, device: torch.device, build: Callable[[], Made]) -> Made:
    """Do this rank's part of something that all ranks need. Collective.

    Args:
        group: the ranks.
        device: the device this rank computes on.
        build: not collective; an exception of one rank's ends the attempt of all.

    Returns:
        what ``build`` returned.

    Raises:
        BackendUnavailable: the same on every rank, with what was raised where; on those ranks from the exception itself.
        PeerAborted: a rank was lost.
    """
    try:
        made = build()
    except Exception as own:
        together(group, device, f"{type(own).__name__}: {own}", {})  # raises
        raise
    together(group, device, "", {})
    return made


@contextmanager
def given_back(undo: Callable[[bool], None]) -> Iterator[None]:
    """Call ``undo(alone)`` when the block raises.

    What :func:`together` refuses, it refuses on every rank, so all of them are there to undo it: ``alone`` is False. After any other error
    a rank may be missing, and a collective would wait for it: ``alone`` is True.
    """
    try:
        yield
    except BackendUnavailable:
        undo(False)
        raise
    except BaseException:
        undo(True)
        raise
