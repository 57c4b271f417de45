"""Small kernel source trees as teams ship them, and wheels to take them in to."""

import hashlib
from pathlib import Path

BOM = b"\xef\xbb\xbf"

PLAIN = {
    "common/__init__.py": b"",
    "common/constants.py": b"BLOCK = 32\nTILE = BLOCK * 4\nNAMES = ('a', 'b')\n",
    "src/__init__.py": b"from .runtime import Runtime\n",
    "src/runtime.py": b"from common.constants import BLOCK\n\n\nclass Runtime:\n    size = BLOCK\n",
    "moe_x/__init__.py": b"",
    "moe_x/kernel.py": (
        b'"""Says `from common.constants import BLOCK` in prose, which must stay."""\n'
        b"from common.constants import BLOCK, TILE  # the tile\n"
        b"import src.runtime as runtime; from src import Runtime\n"
        b"\n"
        b"\n"
        b"class Kernel:\n"
        b"    def __init__(self, tile, cluster, *, stages=3, clamp=None):\n"
        b"        self.tile, self.cluster, self.stages, self.clamp = tile, cluster, stages, clamp\n"
        b"\n"
        b"    def __call__(self, x, weights, out, stream=None):\n"
        b"        from common import constants\n"
        b"        return constants.TILE + BLOCK + TILE + runtime.Runtime.size + Runtime.size\n"
    ),
    "moe_x/notes.txt": b"read me: from common.constants import BLOCK\n",
}
PACKAGES = ("common", "src", "moe_x")


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder and return it."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def make_wheel(root: Path, name: str = "acme_kernels") -> Path:
    """An import package that has no drop yet."""
    return write_tree(root / name, {"__init__.py": b'"""A wheel written elsewhere."""\n'})


def snapshot(root: Path) -> dict[str, str]:
    """Every file and folder below ``root`` with what it holds."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(root.rglob("*"))
        if "__pycache__" not in path.parts
    }


def edit(path: Path, old: bytes, new: bytes) -> None:
    """Replace the one place where ``old`` stands."""
    data = path.read_bytes()
    assert data.count(old) == 1, (path, data.count(old))
    path.write_bytes(data.replace(old, new))
