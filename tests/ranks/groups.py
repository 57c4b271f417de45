"""Groups of ranks that list their members in an order of their own."""

from __future__ import annotations

import inspect

import torch.distributed as dist

ANY_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether this torch makes such groups. Older ones put the members of every group in ascending order."""


def new_group(members):
    """A group of these world ranks, and its members in the order that torch gave them. Collective over the world."""
    if ANY_ORDER:
        return dist.new_group(members, sort_ranks=False), members
    return dist.new_group(members), sorted(members)
