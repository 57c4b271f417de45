"""The device side of a session of several ranks: its control words, its abort word at every peer, and what launches report to the host."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from megamoe.device import regions, wire
from megamoe.ep.lifecycle import FailedWait

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megamoe.ep.group import Group
    from megamoe.ep.heap import Heap

_SITES: Mapping[int, str] = {**regions.SITE_NAMES, **wire.SITE_NAMES}
_PEER_SITES = (wire.SITE_COUNTS, wire.SITE_RESULTS)


class DeviceFabric:
    """See :class:`megamoe.ep.lifecycle.Fabric`.

    A launch that gives up, or meets a bad id, also sets a word in pinned host memory: looking for it costs the host a memory read, no
    synchronization, and works for graph replays too.

    Args:
        heap: of the session; its region ``signal`` holds the abort word.
        group: the ranks.
        control: (bytes,) uint8 on the device, the control region of the session's launches.
    """

    def __init__(self, heap: Heap, group: Group, control: torch.Tensor) -> None:
        self._heap, self._group, self._control = heap, group, control
        self._device = control.device
        self._report = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
        self._words = self._report.numpy()
        self._failed: FailedWait | None = None
        self._clear(0)

    def tell_abort(self) -> None:
        for rank in range(self._group.size):
            if rank != self._group.rank:
                self._write(self._heap.address("signal", rank) + wire.TOLD, 1 + self._group.rank)

    def failed_wait(self) -> FailedWait | None:
        if self._failed is None and self._words[regions.REPORT_ABORT // 4]:
            self._failed = self._read_record()
        return self._failed

    def quiesce(self) -> int:
        self._synchronize()
        return int(self._control[regions.EPOCH : regions.EPOCH + 4].cpu().view(torch.int32))

    def restart(self, epoch: int) -> None:
        self._clear(epoch)
        self._write(self._heap.address("signal") + wire.TOLD, 0)
        self._failed = None

    def take_bad_ids(self) -> bool:
        """Whether a launch met ids out of range since this was last asked. Does not synchronize."""
        met = bool(self._words[regions.REPORT_STICKY // 4])
        self._words[regions.REPORT_STICKY // 4] = 0
        return met

    @property
    def exchanges(self) -> int:
        """Exchanges of this rank's launches since the last restart. Synchronizes."""
        self._synchronize()
        return int(self._control[wire.EXCHANGES : wire.EXCHANGES + 4].cpu().view(torch.int32))

    def _clear(self, epoch: int) -> None:
        control = self._control
        control.zero_()
        control[regions.EPOCH : regions.EPOCH + 4].view(torch.int32).fill_(epoch)
        control[wire.RANK : wire.RANK + 4].view(torch.int32).fill_(self._group.rank)
        # Pinned memory has the same address on the device (unified addressing).
        control[regions.REPORT : regions.REPORT + 8].view(torch.int64).fill_(self._report.data_ptr())
        self._synchronize()
        self._words[:] = 0

    def _read_record(self) -> FailedWait:
        end = regions.RECORD + 8 * len(regions.RECORD_FIELDS)
        values = self._control[regions.RECORD : end].cpu().view(torch.int64).tolist()
        record = dict(zip(regions.RECORD_FIELDS, values, strict=True))
        site, index = record["site"], record["index"]
        name = _SITES.get(site, f"site {site}")
        detail = f"{name}, block {record['cta']}, launch {record['epoch'] + 1}"
        if site == wire.SITE_TOLD:
            return FailedWait(index, name, 0, 0, told=True, detail=detail)
        # Waits inside a rank fail because some wait for a peer did not end; the record holds the first that expired.
        rank = index if site in _PEER_SITES else self._group.rank
        return FailedWait(rank, name, record["expected"], record["seen"], detail=detail if rank == index else f"{detail}, counter {index}")

    def _write(self, address: int, value: int) -> None:
        """Write an int64 into this rank's or a peer's memory, beside whatever runs on the device."""
        if self._device.type != "cuda":
            ctypes.c_int64.from_address(address).value = value
            return
        from cuda.bindings import runtime as cuda

        word = torch.tensor([value], dtype=torch.int64, device="cpu").pin_memory()
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
            (status,) = cuda.cudaMemcpyAsync(address, word.data_ptr(), 8, kind, stream.cuda_stream)
            assert status == cuda.cudaError_t.cudaSuccess, status
            stream.synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
