"""Limits of time that hold on any machine: they are stated for one of known speed, and stretch while this one is slower or busy.

A machine that other work shares takes several times as long, for seconds or for minutes, so no absolute limit is both tight enough to
see a fault and wide enough to hold there. A fixed piece of work, timed right before and right after, says how slow the machine is now.
What this process keeps for other tests costs nothing: with thousands of them, each of Python's full garbage collections takes long.
"""

import ast
import gc
import time

TEXT = "\n".join(f"def f{i}(a, b={i}):\n    return [g(a + {i} * b, b) for _ in range({i})]" for i in range(500))
SECONDS = 0.015  # what parsing TEXT takes where the limits are stated


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _slowness():
    """How many times longer than stated this machine takes just now; at least 1."""
    return max(1.0, min(_seconds(lambda: ast.parse(TEXT)) for _ in range(3)) / SECONDS)


def assert_within(limit, work, rounds=7):
    """``work()`` takes less than ``limit`` seconds, in one of several rounds, since other work only ever adds time."""
    found = []
    gc.freeze()
    try:
        for _ in range(rounds):
            before = _slowness()
            took = _seconds(work)
            found.append((took, (before + _slowness()) / 2))
            if took < limit * found[-1][1]:
                return
    finally:
        gc.unfreeze()
    raise AssertionError(f"allowed: {limit} s; (seconds, slowness of the machine) of each round: {found}")
