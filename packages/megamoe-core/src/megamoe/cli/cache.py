"""What the compile cache holds, and clearing it."""

from __future__ import annotations

import argparse

from megamoe.cli import codes
from megamoe.cli.output import Output

SUMMARY = "show or clear the compile cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to clear it."""
    parser.add_argument(
        "action", nargs="?", choices=("list", "clear"), default="list", help="list the entries (default), or remove them all"
    )


def run(args: argparse.Namespace) -> int:
    """List or clear."""
    from megamoe.compile.store import Store

    out, store = Output.of(args), Store()
    if args.action == "clear":
        removed = store.clear()
        out.text(f"{removed} compiled kernels removed from {store.root}")
        out.document("cache", {"folder": store.root, "removed": removed})
        return codes.OK
    entries = store.entries()
    rows = [(str(e.key.get("name")), str(e.key.get("arch")), round(e.seconds, 1), e.nbytes, e.digest[:12]) for e in entries]
    out.facts([("folder", store.root), ("kernels", len(entries)), ("bytes", sum(e.nbytes for e in entries))])
    if rows:
        out.text()
        out.table(("kernel", "arch", "seconds", "bytes", "digest"), rows)
    out.document("cache", {"folder": store.root, "entries": entries})
    return codes.OK
