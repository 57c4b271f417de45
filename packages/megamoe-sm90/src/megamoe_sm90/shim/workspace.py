"""A session's device memory, and the words through which its kernels report to the host.

Each operand order has a control block (zeroed once; the kernels keep it consistent from launch to launch) and shares the scratch block
(of any content). A kernel that aborts or meets a bad id also sets a word in pinned host memory, so that looking for errors costs the host
a memory read: no synchronization, and graph replays report too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megamoe.device import regions
from megamoe_sm90._drop import swap_config
from megamoe_sm90.shim.variants import Variant, sizes

SITE_NAMES = {
    **regions.SITE_NAMES,
    swap_config.SITE_ACTIVATIONS: "quantized activations",
    swap_config.SITE_MID: "intermediate rows of a tile",
    swap_config.SITE_PARTIAL: "partial sums of a CTA",
    swap_config.SITE_ROWS: "end of all tiles",
}
_RECORD_WORDS = len(regions.RECORD_FIELDS)


@dataclass(frozen=True, slots=True)
class FailedWait:
    """The first wait of a launch that passed its deadline.

    Attributes:
        site: its name.
        cta: block that waited.
        expected, seen: values of the counter.
        index: which counter of the site.
    """

    site: str
    cta: int
    expected: int
    seen: int
    index: int


class Workspace:
    """Memory for launches that follow each other on a stream.

    Args:
        variants: every kernel that may use it.
        device: where.
    """

    def __init__(self, variants: Iterable[Variant], device: torch.device) -> None:
        blocks = sizes(variants)
        self.scratch = torch.empty(blocks.pop("scratch"), dtype=torch.uint8, device=device)
        self.controls = {name.split()[0]: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in blocks.items()}
        self.report = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=True)
        self._words = self.report.numpy()
        self._listen()

    def addresses(self, variant: Variant) -> dict[str, int]:
        """Addresses of a kernel's control block and scratch regions by name; regions that it does not use are left out."""
        base = self.scratch.data_ptr()
        used = {name: base + offset for name, (offset, size) in variant.scratch.items() if size}
        return {"control": self.controls[variant.order].data_ptr(), **used}

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep torch from handing the memory on, once it is given back, before what was launched on this stream has finished."""
        for tensor in (self.scratch, *self.controls.values()):
            tensor.record_stream(stream)

    @property
    def aborted(self) -> bool:
        """Whether a launch passed a deadline. Does not synchronize: a launch under way may still report."""
        return bool(self._words[regions.REPORT_ABORT // 4])

    def take_bad_ids(self) -> bool:
        """Whether a launch met ids out of range since this was last asked. Does not synchronize."""
        met = bool(self._words[regions.REPORT_STICKY // 4])
        if met:
            self._words[regions.REPORT_STICKY // 4] = 0
        return met

    def failed_wait(self) -> FailedWait | None:
        """The wait that failed, read from the device. Synchronizes."""
        for control in self.controls.values():
            head = control[: regions.RECORD + 8 * _RECORD_WORDS].cpu()
            if head[regions.ABORT : regions.ABORT + 4].view(torch.int32).item():
                record: Mapping[str, int] = dict(zip(regions.RECORD_FIELDS, head[regions.RECORD :].view(torch.int64).tolist(), strict=True))
                site = SITE_NAMES.get(record["site"], f"site {record['site']}")
                return FailedWait(site, record["cta"], record["expected"], record["seen"], record["index"])
        return None

    def reset(self) -> None:
        """Make it fit for launches again after an abort. Synchronizes."""
        torch.cuda.synchronize(self.scratch.device)
        for control in self.controls.values():
            control.zero_()
        self.report.zero_()
        self._listen()
        torch.cuda.synchronize(self.scratch.device)

    def _listen(self) -> None:
        """Tell the kernels where the host reads. Pinned memory has the same address on the device (unified addressing)."""
        for control in self.controls.values():
            control[regions.REPORT : regions.REPORT + 8].view(torch.int64).fill_(self.report.data_ptr())
