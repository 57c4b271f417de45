"""NVSHMEM through nvshmem4py: initialized once in a process, by us or by the host program, and finalized by whoever initialized it."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from megamoe.ep.together import together
from megamoe.errors import BackendUnavailable, InvalidInput

if TYPE_CHECKING:
    import torch

    from megamoe.ep.group import Group


class Library(Protocol):
    """What is used of NVSHMEM; tests put their own in its place. Addresses are integers, ranks of NVSHMEM are called PEs."""

    def initialized(self) -> bool:
        """Whether somebody initialized it in this process."""
        ...

    def unique_id(self) -> bytes:
        """What rank 0 gives to all others before they initialize."""
        ...

    def initialize(self, device: int, pe: int, pes: int, unique_id: bytes) -> None:
        """Collective over all PEs."""
        ...

    def finalize(self) -> None:
        """Collective over all PEs."""
        ...

    def my_pe(self) -> int: ...

    def pes(self) -> int: ...

    def allocate(self, nbytes: int) -> int:
        """Symmetric device memory, 256-byte aligned, of any content; 0 when there is none. Collective over all PEs, equal sizes."""
        ...

    def free(self, address: int) -> None:
        """Collective over all PEs."""
        ...

    def peer(self, address: int, pe: int) -> int:
        """Where this process finds a PE's copy of a symmetric address by loads and stores; 0 when it cannot."""
        ...


class Nvshmem4py:
    """The real one.

    Raises:
        BackendUnavailable: nvshmem4py or the NVSHMEM library is not installed.
    """

    def __init__(self) -> None:
        try:
            import nvshmem.bindings as bindings
            import nvshmem.core as core
            from cuda.pathfinder import load_nvidia_dynamic_lib

            load_nvidia_dynamic_lib("nvshmem_host")
        except (ImportError, RuntimeError) as error:
            raise BackendUnavailable(
                f"Several ranks need NVSHMEM, which does not load: {error}.",
                hint='pip install "megamoe-core[cu13]" (or [cu12], the CUDA of torch)',
            ) from error
        self._bindings: Any = bindings
        self._core: Any = core

    def initialized(self) -> bool:
        status = self._bindings.Init_status
        ready = (status.STATUS_IS_INITIALIZED, status.STATUS_LIMITED_MPG, status.STATUS_FULL_MPG)
        return self._bindings.init_status() in ready

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id()._data.tobytes())

    def initialize(self, device: int, pe: int, pes: int, unique_id: bytes) -> None:
        import numpy as np
        import torch
        from cuda.core import Device

        torch.zeros(1, device=torch.device("cuda", device))  # NVSHMEM needs the context that torch makes on first use
        gpu = Device(device)
        gpu.set_current()
        identity = self._core.get_unique_id(empty=True)
        identity._data.view(np.uint8)[:] = np.frombuffer(unique_id, dtype=np.uint8)
        self._core.init(device=gpu, uid=identity, rank=pe, nranks=pes, initializer_method="uid")

    def finalize(self) -> None:
        self._core.finalize()

    def my_pe(self) -> int:
        return int(self._bindings.my_pe())

    def pes(self) -> int:
        return int(self._bindings.n_pes())

    def allocate(self, nbytes: int) -> int:
        return int(self._bindings.align(256, nbytes))

    def free(self, address: int) -> None:
        self._bindings.free(address)

    def peer(self, address: int, pe: int) -> int:
        return int(self._bindings.ptr(address, pe))


@dataclass(slots=True)
class Runtime:
    """NVSHMEM as this process has it.

    Attributes:
        library: how to call it.
        owned: megamoe initialized it, over the ranks of one group; otherwise the host program did, over ranks of its own choice.
        members: world ranks that it spans, where ``owned``.
        users: open heaps.
    """

    library: Library
    owned: bool
    members: tuple[int, ...]
    users: int = 0


_lock = Lock()
_runtime: Runtime | None = None


def join(group: Group, device: torch.device, library: Library | None = None) -> tuple[Runtime, tuple[int, ...]]:
    """NVSHMEM among the ranks of a group, initialized where nobody has. Collective; give it back with :func:`leave`.

    Where the host program initialized it over more ranks than the group has, symmetric allocations need all of them: then every rank of
    the program opens its session at the same point, each in its own group, with equal problems.

    Args:
        group: the ranks, in any order.
        device: this rank's GPU.
        library: stands in for NVSHMEM in tests.

    Returns:
        the runtime, and the PE of every rank of the group.

    Raises:
        BackendUnavailable: NVSHMEM is missing, is initialized on some ranks only, or spans another group; the same on every rank.
    """
    global _runtime
    with _lock:
        problem, facts = "", {"ready": False, "pe": -1, "pes": 0}
        lib, owned = library, False
        try:
            if _runtime is not None and library is None:
                lib = _runtime.library
            lib = lib or Nvshmem4py()
            owned = _runtime is not None and _runtime.owned and _runtime.library is lib
            if lib.initialized():
                facts = {"ready": True, "pe": lib.my_pe(), "pes": lib.pes()}
                if owned and _runtime is not None and _runtime.members != group.members:
                    problem = f"this process runs NVSHMEM over world ranks {list(_runtime.members)}"
        except BackendUnavailable as error:
            problem = error.message
        everyone = together(group, device, problem, facts)
        assert lib is not None
        ready = [bool(fact["ready"]) for fact in everyone]
        if any(ready) and not all(ready):
            without = [group.members[rank] for rank, there in enumerate(ready) if not there]
            raise BackendUnavailable(
                f"NVSHMEM is initialized on some ranks of the group and not on world ranks {without}.",
                hint="initialize it on all of them, or leave it to megamoe",
            )
        if not any(ready):
            pes = _initialize(lib, group, device)
            _runtime = Runtime(lib, owned=True, members=group.members)
        else:
            pes = tuple(int(fact["pe"]) for fact in everyone)
            if len(set(pes)) != group.size:
                raise BackendUnavailable(
                    f"NVSHMEM gives the ranks of the group the PEs {list(pes)}; allowed: a PE for each.",
                    hint="initialize NVSHMEM with one PE a process, over all of them",
                )
            if _runtime is None or _runtime.library is not lib:
                _runtime = Runtime(lib, owned=False, members=())
        _runtime.users += 1
        return _runtime, pes


def leave(runtime: Runtime, *, alone: bool = False) -> None:
    """Give a runtime back; the last one finalizes what megamoe initialized. Collective, unless ``alone``.

    Args:
        runtime: from :func:`join`.
        alone: a rank was lost, so nothing collective may be called any more and NVSHMEM stays as it is until the process ends.
    """
    global _runtime
    with _lock:
        runtime.users -= 1
        if runtime.users == 0 and runtime.owned and not alone:
            runtime.library.finalize()
            if _runtime is runtime:
                _runtime = None


def _initialize(library: Library, group: Group, device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda" or device.index is None:
        raise InvalidInput(f"device is {device}; allowed: a CUDA device with its index.", hint="put the weights on this rank's GPU")
    words = group.gather_bytes(library.unique_id() if group.rank == 0 else b"", device)
    problem = ""
    try:
        library.initialize(device.index, group.rank, group.size, words[0])
    except Exception as error:  # noqa: BLE001  whatever NVSHMEM raises is told to all ranks
        problem = f"NVSHMEM could not be initialized: {type(error).__name__}: {error}"
    together(group, device, problem, {})
    return tuple(range(group.size))
