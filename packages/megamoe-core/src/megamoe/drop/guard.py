"""Import drop modules without letting them leave anything behind in the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_LOCK = RLock()


@contextmanager
def drop_imports() -> Iterator[None]:
    """Restore ``sys.path`` after the block. A shim imports its kernels inside of it::

        with drop_imports():
            from megamoe_sm90._drop.moe_x.kernel import Kernel

    Runner modules of kernel drops put their own folder on ``sys.path`` when imported, after which any program would find the drop's
    ``common`` and ``src`` as top-level modules.
    """
    with _LOCK:
        before = list(sys.path)
        try:
            yield
        finally:
            sys.path[:] = before
