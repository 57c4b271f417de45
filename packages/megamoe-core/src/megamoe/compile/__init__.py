"""Compiling kernels: for a named architecture, with or without its GPU, through a disk cache that does not care where or by which Python.

    request.py   what is compiled: sources, configuration, architecture; its key
    sources.py   fingerprint of source files
    toolchain.py architecture options, versions, platform
    store.py     the folder of compiled objects: locks, checks, listing
    obtain.py    from a request to a function that can be called
    cubin.py     the machine code inside a compiled object, and what it uses

Importing this package loads neither torch nor CuTe DSL.
"""

from __future__ import annotations

from megamoe.compile.request import KernelRequest, Precompiles

__all__ = ["KernelRequest", "Precompiles"]
