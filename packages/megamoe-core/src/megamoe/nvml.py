"""Which GPUs this process can see, from the driver's management library (NVML) through ctypes.

NVML answers without creating a CUDA context, so asking is fast, takes no GPU memory and leaves a later ``fork`` safe, which
``cuInit``, torch and CuTe DSL do not. ``CUDA_VISIBLE_DEVICES`` is NVML's blind spot, so its rules are applied here.

NVML numbers GPUs by PCI bus; CUDA does so with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and otherwise puts the fastest first. The two agree where
all GPUs are alike; where they are not, a backend's own ``probe`` has the last word and ``megamoe doctor`` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megamoe import env

LIBRARY = "libnvidia-ml.so.1"

_NAME_BYTES = 96
_UUID_BYTES = 96
_VERSION_BYTES = 81


@dataclass(frozen=True, slots=True)
class Device:
    """One visible GPU.

    Attributes:
        index: its number in this process, the ``1`` of ``cuda:1``.
        name: product name, for example ``"NVIDIA H200"``.
        uuid: ``"GPU-..."``; a slice of a GPU has ``"MIG-..."``.
        capability: compute capability, for example ``(9, 0)``.
        memory_bytes: total device memory.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True, slots=True)
class Gpus:
    """What NVML says about this machine, as this process sees it.

    Attributes:
        devices: visible GPUs in this process's order.
        hidden: number of GPUs that ``CUDA_VISIBLE_DEVICES`` hides.
        driver: driver version, for example ``"580.65.06"``; ``None`` without a driver.
        cuda: newest CUDA version the driver supports, for example ``(13, 0)``; ``None`` when unknown.
        problem: why no GPU is visible; empty when one is.
    """

    devices: tuple[Device, ...] = ()
    hidden: int = 0
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    problem: str = ""


class _NvmlError(Exception):
    """A call into NVML failed; the message is NVML's own."""


_known: Gpus | None = None


def gpus(refresh: bool = False) -> Gpus:
    """GPUs this process can see; asked once and remembered. Never raises: without a driver there are none, and ``problem`` says why.

    Args:
        refresh: ask again, after ``CUDA_VISIBLE_DEVICES`` or the driver changed.
    """
    # No lock: asking twice at once is harmless, while a lock held by another thread would hang a forked child.
    global _known
    answer = _known
    if answer is None or refresh:
        _known = answer = query()
    return answer


def query(load: Callable[[str], Any] = ctypes.CDLL) -> Gpus:
    """Ask NVML now.

    Args:
        load: opens the library by its name; raises ``OSError`` when there is none.
    """
    try:
        library = load(LIBRARY)
    except OSError:
        return Gpus(problem=f"no NVIDIA driver, {LIBRARY} not found")
    nvml = _Nvml(library)
    try:
        nvml.call("nvmlInit_v2")
    except _NvmlError as error:
        return Gpus(problem=f"the NVIDIA driver does not answer: {error}")
    try:
        return _survey(nvml)
    except _NvmlError as error:
        return Gpus(problem=f"the NVIDIA driver does not answer: {error}")
    finally:
        with contextlib.suppress(_NvmlError):  # the answer stands, whatever closing says
            nvml.call("nvmlShutdown")


def _survey(nvml: _Nvml) -> Gpus:
    driver = nvml.text("nvmlSystemGetDriverVersion", _VERSION_BYTES)
    number = nvml.integer("nvmlSystemGetCudaDriverVersion_v2")
    cuda = (number // 1000, number % 1000 // 10)
    handles = [nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(i)) for i in range(nvml.integer("nvmlDeviceGetCount_v2"))]
    if not handles:
        return Gpus(driver=driver, cuda=cuda, problem="the NVIDIA driver finds no GPU")
    uuids = [nvml.text("nvmlDeviceGetUUID", _UUID_BYTES, handle) for handle in handles]
    chosen = visible(env.visible_devices(), uuids, is_slice=nvml.knows)
    by_uuid = dict(zip(uuids, handles, strict=True))
    devices = tuple(nvml.device(index, uuid, by_uuid.get(uuid)) for index, uuid in enumerate(chosen))
    hidden = len(set(uuids) - set(chosen))
    problem = "" if devices else f"{env.VISIBLE_DEVICES.name}={env.visible_devices()!r} hides all {len(handles)} GPUs"
    return Gpus(devices=devices, hidden=hidden, driver=driver, cuda=cuda, problem=problem)


def visible(wish: str | None, uuids: list[str], *, is_slice: Callable[[str], bool] = lambda uuid: False) -> list[str]:
    """UUIDs of the GPUs that CUDA shows for a value of ``CUDA_VISIBLE_DEVICES``, in its order.

    The driver's rules: an index counts GPUs, ``GPU-`` with a unique beginning of a UUID names one, the list ends before the first entry
    that is neither, and a GPU named twice leaves none.

    Args:
        wish: the variable's value; ``None`` when it is not set.
        uuids: UUIDs of the machine's GPUs in index order.
        is_slice: whether a ``MIG-`` UUID exists.
    """
    if wish is None:
        return list(uuids)
    chosen: list[str] = []
    for entry in (part.strip() for part in wish.split(",")):
        uuid = _named(entry, uuids, is_slice)
        if uuid is None:
            break
        if uuid in chosen:
            return []
        chosen.append(uuid)
    return chosen


def _named(entry: str, uuids: list[str], is_slice: Callable[[str], bool]) -> str | None:
    if entry.startswith("MIG-"):
        return entry if is_slice(entry) else None
    if entry.startswith("GPU-"):
        fits = [uuid for uuid in uuids if uuid.startswith(entry)]
        return fits[0] if len(fits) == 1 else None
    # The driver reads leading digits, as C's strtol does, and takes a negative number for the end of the list.
    digits = re.match(r"\+?\d+", entry)
    index = int(digits[0]) if digits else len(uuids)
    return uuids[index] if index < len(uuids) else None


class _Nvml:
    """NVML with its return codes turned into exceptions."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, function: str, *arguments: Any) -> None:
        try:
            entry = getattr(self._library, function)
        except AttributeError:
            raise _NvmlError(f"this driver's library has no {function}") from None
        code = entry(*arguments)
        if code != 0:
            raise _NvmlError(f"{function}: {self._explain(code)}")

    def integer(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(value))
        return value.value

    def text(self, function: str, size: int, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(size)
        self.call(function, *arguments, buffer, ctypes.c_uint(size))
        return buffer.value.decode("utf-8", "replace")

    def handle(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(function, *arguments, ctypes.byref(handle))
        return handle

    def knows(self, uuid: str) -> bool:
        try:
            self.handle("nvmlDeviceGetHandleByUUID", uuid.encode())
        except _NvmlError:
            return False
        return True

    def device(self, index: int, uuid: str, handle: ctypes.c_void_p | None) -> Device:
        own = handle or self.handle("nvmlDeviceGetHandleByUUID", uuid.encode())
        # Only whole GPUs have a compute capability; a slice takes its parent's.
        whole = handle or self.handle("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", own)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetCudaComputeCapability", whole, ctypes.byref(major), ctypes.byref(minor))
        memory = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", own, ctypes.byref(memory))
        name = self.text("nvmlDeviceGetName", _NAME_BYTES, own)
        return Device(index, name, uuid, (major.value, minor.value), memory.total)

    def _explain(self, code: int) -> str:
        try:
            explain = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        explain.restype = ctypes.c_char_p
        text = explain(code)
        return text.decode("utf-8", "replace") if text else f"error {code}"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))
