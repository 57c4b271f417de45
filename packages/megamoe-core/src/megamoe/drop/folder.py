"""Write a new folder whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megamoe.errors import DropError


def in_use(folder: Path) -> bool:
    """Whether there is something at this path that writing would disturb: a file, or a folder that is not empty."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder that does not exist yet or is empty.

    Args:
        folder: where to.
        files: contents by relative path.

    Raises:
        DropError: writing failed; nothing is left behind.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for name, data in files.items():
                path = stage / "new" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            (stage / "new").rename(folder)  # replaces an empty folder
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise DropError(f"writing to {folder} failed ({error}); nothing was written.", hint="check space and permissions") from error
