"""Blackwell kernels on a Hopper GPU: their PTX is rewritten, what sm_90a lacks is done by software.

    ptx.py       PTX text as statements, and back
    table.py     the instruction table: form, replacement, test
    replacements.py  the code that takes an instruction's place
    emit.py      writing replacement code
    regions.py   regions of one elected thread as work of its warp
    delayed.py   delayed mode for registers and bulk stores
    rewrite.py   a whole module
    fences.py    paths from an acquire to a bulk load without a proxy fence
    assemble.py  nvcc and ptxas, and the cache of what they built
    faults.py    what the device reports
    load.py      rewritten code under compiled CuTe DSL functions
    device/      the device functions, CUDA C++

It shows that a kernel computes what it should; it says nothing about speed, and not everything about asynchrony: see docs/emulation.md.
Importing this package loads neither torch nor CuTe DSL.
"""

from __future__ import annotations

from megamoe.emulation.assemble import assemble
from megamoe.emulation.fences import unfenced_loads
from megamoe.emulation.load import ARCHS, Emulation, current, emulate
from megamoe.emulation.rewrite import Options, Rewritten, rewrite
from megamoe.errors import EmulationError, EmulationFault, UnsupportedInstruction

__all__ = [
    "ARCHS",
    "Emulation",
    "EmulationError",
    "EmulationFault",
    "Options",
    "Rewritten",
    "UnsupportedInstruction",
    "assemble",
    "current",
    "emulate",
    "rewrite",
    "unfenced_loads",
]
