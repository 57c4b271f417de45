"""The folder of compiled objects. Safe for many processes at once; whatever is damaged in it counts as not there.

<digest>.o      the object
<digest>.json   its key and the SHA-256 of the object, written last: an object without it is not an entry
<digest>.lock   held (flock) while one process compiles and the others wait for the result
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megamoe import env
from megamoe.log import logger

LOCK_SECONDS = 600.0
"""How long a process waits for another one's compilation before it compiles for itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel on disk.

    Attributes:
        digest: hexadecimal digest of the key.
        path: the object file.
        key: what it was compiled from.
        seconds: what compiling took.
        nbytes: size of the object.
    """

    digest: str
    path: Path
    key: Mapping[str, object]
    seconds: float
    nbytes: int


class Store:
    """Compiled objects below one folder.

    Args:
        root: the folder; ``None`` for ``kernels`` in the cache folder (``MEGAMOE_CACHE_DIR``). Created on the first write.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = env.cache_dir() / "kernels" if root is None else root

    def load(self, digest: str) -> Entry | None:
        """The entry, checked byte by byte; ``None`` when it is missing or damaged."""
        found = self.read(digest)
        return found[0] if found else None

    def read(self, digest: str) -> tuple[Entry, bytes] | None:
        """As :meth:`load`, with the object's bytes that were checked: its file may be replaced or removed at any moment."""
        try:
            note = json.loads(self._path(digest, "json").read_bytes())
            path = self._path(digest, "o")
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != note["sha256"]:
                raise ValueError("the object's SHA-256 differs")
            return Entry(digest, path, dict(note["key"]), float(note["seconds"]), len(data)), data
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger().warning("damaged cache entry %s is compiled again: %s", digest, error)
            return None

    def save(self, digest: str, key: Mapping[str, object], data: bytes, seconds: float) -> Entry:
        """Write an entry so that no reader ever sees half of it.

        Raises:
            OSError: the folder cannot be written.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        note = {"key": key, "sha256": hashlib.sha256(data).hexdigest(), "seconds": round(seconds, 3)}
        self._write(self._path(digest, "o"), data)
        self._write(self._path(digest, "json"), json.dumps(note, sort_keys=True, indent=1).encode())
        return Entry(digest, self._path(digest, "o"), key, seconds, len(data))

    @contextlib.contextmanager
    def lock(self, digest: str) -> Iterator[None]:
        """Hold this key alone among all processes; goes on without the lock after :data:`LOCK_SECONDS`.

        Raises:
            OSError: the folder cannot be written.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self._path(digest, "lock").open("ab") as handle:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        logger().warning("another process has held %s for %.0f s; compiling without it", handle.name, LOCK_SECONDS)
                        break
                    time.sleep(0.02)
            yield  # closing the file gives the lock back

    def entries(self) -> tuple[Entry, ...]:
        """All sound entries, by name and digest."""
        found = (self.load(path.stem) for path in self.root.glob("*.json"))
        return tuple(sorted((e for e in found if e), key=lambda e: (str(e.key.get("name")), e.digest)))

    def clear(self) -> int:
        """Remove every file of the store; returns how many objects there were. Processes that have loaded one are not disturbed."""
        objects = 0
        for path in self.root.glob("*"):
            if path.suffix in (".json", ".o", ".lock", ".part"):
                objects += path.suffix == ".o"
                path.unlink(missing_ok=True)
        return objects

    def _path(self, digest: str, suffix: str) -> Path:
        return self.root / f"{digest}.{suffix}"

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
