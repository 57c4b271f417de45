"""From a request to a function that can be called: this process's memory, then the disk, then the compiler."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.compile import sources, toolchain
from megamoe.compile.request import KernelRequest
from megamoe.compile.store import Entry, Store
from megamoe.log import logger

_GUARD = threading.Lock()
_LOADED: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Obtained:
    """A kernel brought to disk.

    Attributes:
        request: what was asked for.
        digest: digest of its key.
        object: the object's bytes.
        hit: whether it was there before.
        seconds: compile time, now or when it was compiled.
    """

    request: KernelRequest
    digest: str
    object: bytes
    hit: bool
    seconds: float


def function(request: KernelRequest, store: Store | None = None) -> Callable[..., Any]:
    """The compiled host function of a request; its arguments are plain integers (also addresses and the stream) and floats.

    Compiles at most once per process, and once per cache folder when the folder can be written.
    """
    digest = request.digest()
    with _GUARD:
        if digest not in _LOADED:
            _LOADED[digest] = _load(obtain(request, store))
        return _LOADED[digest]


def obtain(request: KernelRequest, store: Store | None = None) -> Obtained:
    """Find the compiled object, or compile and keep it. A cache folder that cannot be written is a warning, not an error."""
    store = store or Store()
    digest = request.digest()
    found = store.read(digest)
    if found:
        return _hit(request, *found)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(store.lock(digest))
        except OSError as error:
            logger().warning("the compile cache cannot be written, so every process compiles for itself: %s", error)
        found = store.read(digest)  # another process may have compiled it while this one waited
        if found:
            return _hit(request, *found)
        start = time.perf_counter()
        data = _compile(request, _entry_point(digest))
        seconds = time.perf_counter() - start
        logger().info("compiled %s for %s in %.1f s", request.name, request.arch, seconds)
        _keep(request, store, digest, data, seconds)
        return Obtained(request, digest, data, hit=False, seconds=seconds)


def _hit(request: KernelRequest, entry: Entry, data: bytes) -> Obtained:
    return Obtained(request, entry.digest, data, hit=True, seconds=entry.seconds)


def _keep(request: KernelRequest, store: Store, digest: str, data: bytes, seconds: float) -> None:
    if sources.fingerprint(request.packages) != sources.loaded(request.packages):
        # The compiler may have read a mixture of old and new files; under either fingerprint it would be wrong.
        logger().warning("%s changed on disk while this process ran; the compiled kernel is not cached", ", ".join(request.packages))
        return
    try:
        store.save(digest, request.key(), data, seconds)
    except OSError as error:
        logger().warning("the compiled kernel %s is not cached: %s", request.name, error)


def _entry_point(digest: str) -> str:
    return f"megamoe_{digest[:24]}"


def _compile(request: KernelRequest, entry_point: str) -> bytes:
    import cutlass.cute as cute

    kernel, arguments = request.build()
    compiled = cute.compile[toolchain.options(request.arch)](kernel, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=entry_point, export_only_tvm_ffi_symbols=True)
        return path.read_bytes()


def _load(obtained: Obtained) -> Callable[..., Any]:
    import cutlass.cute as cute

    # From a file of its own: an entry may be replaced or removed between its check and its loading.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(obtained.object)
        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
        loaded: Callable[..., Any] = module[_entry_point(obtained.digest)]
        return loaded
