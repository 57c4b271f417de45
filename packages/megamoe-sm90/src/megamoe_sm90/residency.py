"""CTAs of a launch on several ranks: all of them, and those of the ranks that share the GPU, have to run at the same time.

CTAs wait for each other within a launch, and for those of the peers. One that starts only when another has ended would be waited for in
vain, so the grid is settled before the first launch, and a session that cannot have it is refused on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from megamoe.compile.obtain import obtain
from megamoe.compile.occupancy import blocks_per_multiprocessor
from megamoe.ep.together import attempt, together
from megamoe.errors import BackendUnavailable
from megamoe_sm90.shim.variants import NATIVE_THREADS

if TYPE_CHECKING:
    from megamoe.ep.group import Group
    from megamoe_sm90.shim.ranks import RanksVariant


def ctas_of(group: Group, device: torch.device) -> int:
    """CTAs of this rank's launches, one on a multiprocessor. Collective.

    Raises:
        BackendUnavailable: there are more ranks on a GPU than multiprocessors that each of them sees; the same on every rank.
    """
    facts = torch.cuda.get_device_properties(device)
    everyone = together(group, device, "", {"gpu": str(facts.uuid), "seen": facts.multi_processor_count})
    parts = shares(everyone)
    without = [group.members[rank] for rank, part in enumerate(parts) if not part]
    if without:
        seen = [int(str(one["seen"])) for one, part in zip(everyone, parts, strict=True) if not part]
        raise BackendUnavailable(
            f"World ranks {without} see {seen} multiprocessors of GPUs that they share; allowed: at least one for every rank on a GPU.",
            hint="fewer ranks on a GPU, or no CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        )
    return parts[group.rank]


def shares(everyone: list[dict[str, object]]) -> list[int]:
    """Every rank's part of the multiprocessors, from every rank's ``gpu`` and ``seen`` multiprocessors.

    Ranks on one GPU (MPS) may be given the same multiprocessors, also where a thread percentage lets each see fewer than there are: it
    limits how many a process gets and reserves none. So the ranks of a GPU share what the one that sees least sees.
    """
    sharing = Counter(one["gpu"] for one in everyone)
    least = {gpu: min(int(str(one["seen"])) for one in everyone if one["gpu"] == gpu) for gpu in sharing}
    return [least[one["gpu"]] // sharing[one["gpu"]] for one in everyone]


def check(group: Group, device: torch.device, variants: Iterable[RanksVariant]) -> None:
    """Have every kernel compiled and measure that a multiprocessor takes a CTA of it. Collective, on the current device.

    Raises:
        BackendUnavailable: it takes none, or a kernel does not compile; the same on every rank.
    """
    attempt(group, device, lambda: _check(variants))


def _check(variants: Iterable[RanksVariant]) -> None:
    for variant in variants:
        config, request = variant.config, variant.request()
        if not blocks_per_multiprocessor(obtain(request).object, NATIVE_THREADS, config.shared_bytes):
            raise BackendUnavailable(
                f"no CTA of {request.name} fits on a multiprocessor: it takes {NATIVE_THREADS} threads and "
                f"{config.shared_bytes:,} bytes of shared memory; allowed: what the GPU has.",
                hint="a smaller native_tile",
            )
