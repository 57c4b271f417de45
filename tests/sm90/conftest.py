"""What several files of this folder share: reading machine code."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def _nvdisasm() -> str | None:
    """From the wheel nvidia-cuda-nvdisasm, or a CUDA toolkit."""
    found = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/nvdisasm"))
    return str(found[-1]) if found else shutil.which("nvdisasm")


@pytest.fixture(scope="session")
def disassemble(tmp_path_factory):
    """A function: CUDA ELF image -> its instructions as text."""
    tool = _nvdisasm()
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")

    def text_of(image: bytes) -> str:
        path = tmp_path_factory.mktemp("sass") / "kernel.cubin"
        path.write_bytes(image)
        return subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True, timeout=300).stdout

    return text_of


@pytest.fixture(scope="session")
def opcodes(disassemble):
    """A function: CUDA ELF image -> Counter of its instructions, by opcode with all modifiers."""
    return lambda image: collections.Counter(INSTRUCTION.findall(disassemble(image)))
