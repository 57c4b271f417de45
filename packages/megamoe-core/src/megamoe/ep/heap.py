"""Symmetric memory of a session: named regions at equal offsets on every rank, and where each rank finds its peers'.

With one rank the heap is ordinary device memory. With several it comes from NVSHMEM, and a kernel reaches a peer's region at
``table[rank] + offset`` by loads and stores; the table lies in device memory, so its size has no limit in the kernel.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from megamoe.ep import nvshmem
from megamoe.ep.layout import Layout
from megamoe.ep.together import attempt, given_back, together
from megamoe.errors import InvalidInput

if TYPE_CHECKING:
    from megamoe.ep.group import Group

MOST_RANKS = 72
"""GPUs of the largest NVLink domain."""


class Heap:
    """Symmetric memory, zeroed when it is opened. Made by :func:`open_heap`.

    Attributes:
        layout: the regions.
        bases: address of every rank's heap in this process, by rank.
        table: the same as a (ranks,) int64 tensor on the device.
    """

    def __init__(self, layout: Layout, bases: tuple[int, ...], rank: int, device: torch.device, runtime: nvshmem.Runtime | None) -> None:
        self.layout, self.bases = layout, bases
        self.table = torch.tensor(bases, dtype=torch.int64, device=device)
        self._rank, self._runtime = rank, runtime
        self._memory: torch.Tensor | None = None

    @property
    def base(self) -> int:
        """Address of this rank's heap."""
        return self.bases[self._rank]

    def address(self, region: str, rank: int | None = None) -> int:
        """Address of a rank's region (this rank's when ``None``) in this process."""
        return self.bases[self._rank if rank is None else rank] + self.layout.offsets[region][0]

    def read(self, region: str) -> torch.Tensor:
        """This rank's region as it is now, (bytes,) uint8 on the CPU. Does not wait for launches that may write it."""
        size = self.layout.offsets[region][1]
        found = torch.empty(size, dtype=torch.uint8, device="cpu")
        if self.table.device.type == "cuda":
            from cuda.bindings import runtime as cuda

            (status,) = cuda.cudaMemcpy(found.data_ptr(), self.address(region), size, cuda.cudaMemcpyKind.cudaMemcpyDefault)
            assert status == cuda.cudaError_t.cudaSuccess, status
        else:
            ctypes.memmove(found.data_ptr(), self.address(region), size)
        return found

    def close(self, *, alone: bool = False) -> None:
        """Give the memory back. Collective, unless ``alone``: that leaves it allocated, freeing takes all ranks. Safe to call twice."""
        runtime, self._runtime, self._memory = self._runtime, None, None
        if runtime is not None:
            if not alone:
                runtime.library.free(self.base)
            nvshmem.leave(runtime, alone=alone)


def open_heap(layout: Layout, group: Group, device: torch.device, library: nvshmem.Library | None = None) -> Heap:
    """Allocate the regions on every rank. Collective.

    Args:
        layout: equal on all ranks.
        group: the ranks, in any order.
        device: this rank's device.
        library: stands in for NVSHMEM in tests.

    Raises:
        BackendUnavailable: NVSHMEM does not work, memory is short, or a rank cannot reach another one by loads and stores (it sits in
            another NVLink domain); names the ranks, the same on all of them.
        InvalidInput: more ranks than an NVLink domain has.
    """
    if group.size > MOST_RANKS:
        raise InvalidInput(
            f"{group.size} ranks; allowed: 1 to {MOST_RANKS}, one NVLink domain.", hint="use a smaller expert-parallel group"
        )
    if group.size == 1:
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        heap = Heap(layout, (memory.data_ptr(),), 0, device, None)
        heap._memory = memory
        return heap
    runtime, pes = nvshmem.join(group, device, library)
    address = runtime.library.allocate(layout.nbytes)
    # A rank that got no memory has none to free, and freeing waits for every rank: what the others got stays until NVSHMEM ends.
    with given_back(lambda alone: nvshmem.leave(runtime, alone=alone)):
        short = "" if address else f"no {layout.nbytes} bytes of symmetric memory (NVSHMEM_SYMMETRIC_SIZE, free device memory)"
        together(group, device, short, {})
    bases = tuple(runtime.library.peer(address, pe) for pe in pes)
    far = [group.members[rank] for rank, base in enumerate(bases) if not base]
    heap = Heap(layout, bases, group.rank, device, runtime)
    with given_back(lambda alone: heap.close(alone=alone)):
        together(group, device, f"no loads and stores to world ranks {far}, which are in another NVLink domain" if far else "", {})
        # All together: nobody may write into a peer's region before that peer has zeroed it.
        attempt(group, device, lambda: _zero(address, layout.nbytes, device))
    return heap


def _zero(address: int, nbytes: int, device: torch.device) -> None:
    if device.type == "cuda":
        from cuda.bindings import runtime as cuda

        (status,) = cuda.cudaMemset(address, 0, nbytes)
        assert status == cuda.cudaError_t.cudaSuccess, status
        torch.cuda.synchronize(device)
