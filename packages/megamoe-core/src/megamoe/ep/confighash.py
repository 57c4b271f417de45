"""What all ranks of a session must agree on, and the exchange that finds out: a disagreement is an error everywhere and a hang nowhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from megamoe.errors import PeerAborted, RankMismatch

if TYPE_CHECKING:
    import torch

    from megamoe.ep.group import Group
    from megamoe.protocol import Plan

Configuration = Mapping[str, str]
"""Field name to its value as canonical text."""


def configuration(plan: Plan, *, drop: str = "", x_scale: float | None = None, mid_scale: float | None = None) -> dict[str, str]:
    """The fields that must be equal on all ranks.

    Args:
        plan: what this rank would run.
        drop: digest of the wheel's kernel drop; empty for backends without one.
        x_scale, mid_scale: the static activation scales of the weights.
    """
    named: dict[str, object] = {
        "backend": plan.backend,
        "version": plan.version,
        "drop": drop,
        "ranks": plan.ranks,
        "x_scale": None if x_scale is None else float(x_scale),
        "mid_scale": None if mid_scale is None else float(mid_scale),
    }
    named |= {f"problem.{f.name}": getattr(plan.problem, f.name) for f in fields(plan.problem)}
    named |= {f"wire.{name}": value for name, value in plan.wire.items()}
    return {name: canonical(value) for name, value in sorted(named.items())}


def canonical(value: object) -> str:
    """Text that is equal exactly when the values are: floats by their exact digits, mappings in key order, tuples and lists alike."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def digest(config: Configuration) -> str:
    """SHA-256 of a configuration, as hexadecimal text."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()


def agree(group: Group, config: Configuration, device: torch.device) -> str:
    """Compare this rank's configuration with everyone's. Collective, and the first collective of every backend's ``open_session``.

    A rank that cannot take part because of an error of its own calls :func:`reject` instead.

    Args:
        group: the ranks.
        config: from :func:`configuration`.
        device: the device this rank computes on.

    Returns:
        the digest that all ranks share.

    Raises:
        RankMismatch: two ranks differ; the same message on every rank, naming each field that differs and its value on every rank.
        PeerAborted: a rank called :func:`reject`, or was lost.
    """
    answers = _exchange(group, {"digest": digest(config)}, device)
    if len({answer["digest"] for answer in answers}) == 1:
        return answers[0]["digest"]
    everyone = _exchange(group, config, device)
    raise RankMismatch(_differences(everyone), hint="start every rank with the same backend, versions, problem and static scales")


def reject(group: Group, error: BaseException, device: torch.device) -> None:
    """Take part in a pending :func:`agree` only to tell the others why this rank cannot go on. The caller then raises ``error``.

    Raises nothing when the others cannot be reached: ``error`` is what the user has to see.
    """
    with suppress(PeerAborted):
        group.gather_bytes(_encode({"error": f"{type(error).__name__}: {error}"}), device)


def _exchange(group: Group, fields: Mapping[str, str], device: torch.device) -> list[dict[str, str]]:
    answers: list[dict[str, str]] = [json.loads(text) for text in group.gather_bytes(_encode(fields), device)]
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise PeerAborted(
                f"A rank could not open the session: {answer['error']}",
                rank=rank,
                hint=f"fix what world rank {group.members[rank]} reports",
            )
    return answers


def _encode(fields: Mapping[str, str]) -> bytes:
    return json.dumps(dict(fields)).encode()


def _differences(everyone: Sequence[Configuration]) -> str:
    """Every field on which ranks differ, its values, and the ranks that hold each."""
    lines = []
    for name in sorted({name for config in everyone for name in config}):
        holders: dict[str, list[int]] = {}
        for rank, config in enumerate(everyone):
            holders.setdefault(config.get(name, "(absent)"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
            lines.append(f"{name} is {values}")
    return f"The ranks disagree: {'; '.join(lines)}; allowed: equal on all {len(everyone)} ranks."


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return repr(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"{value!r} has no canonical text; wire values are numbers, strings, None, and sequences or mappings of them")
