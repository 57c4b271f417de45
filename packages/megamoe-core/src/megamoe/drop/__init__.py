"""Kernel drops: take a kernel team's source tree into a wheel, prove that it is verbatim, audit it, compare it, give it back.

A wheel that carries a drop has, in its import package::

    drop.toml            where the kernels come from, and the sha256 of every original file (manifest.py)
    drop_patches/        pending local diffs, if any, each with its reason in drop.toml (patches.py)
    shim/contract.toml   what the adapter code relies on (contract.py)
    _drop/               the drop, its absolute imports moved to the private namespace <package>._drop (rewrite.py)

The commands are ``update``, ``verify``, ``diff``, ``export`` and ``audit``, one module each; none of them imports kernel code.
"""
