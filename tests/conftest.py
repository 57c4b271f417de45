"""Which tests can run here, and that their outcome hangs on nothing but the code.

A test that cannot run is skipped with its reason, taken from megamoe's own query of the GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys

import pytest

ARCHS = {"sm90": ((9, 0),), "sm100": ((10, 0), (10, 3)), "sm120": ((12, 0), (12, 1))}
GPU_MARKS = ("gpu", *ARCHS, "emulated")


# Settings of whoever starts the tests must not decide which backend answers in them, nor what is logged.
for _name in ("BACKEND", "DISABLE", "ARCH", "LOG"):
    os.environ.pop(f"MEGAMOE_{_name}", None)

if importlib.util.find_spec("hypothesis"):  # single files also run without it
    from hypothesis import HealthCheck, settings

    # The same examples on every run, and on machines however busy: how long one takes is for tests/core/stopwatch.py to judge.
    settings.register_profile("megamoe", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("megamoe")


@pytest.fixture(autouse=True)
def _seeded():
    """Random data that a test draws without a generator of its own do not hang on the tests before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_addoption(parser):
    group = parser.getgroup("megamoe")
    group.addoption("--environment", default="", help="the environment that a nox session has made, for tests about it")
    group.addoption("--launches", type=int, default=100_000, help="launches of a stress test on several ranks")
    group.addoption("--seconds", type=float, default=45.0, help="after which a stress test ends with the launches it has made")
    group.addoption("--wheel", default="", help="the arch wheel that the environment holds, for example sm90")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)
    for item in items:
        reason = why_not(item, config.getoption("--environment"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not(item, environment):
    """Why a test cannot run here; "" when it can."""
    wanted = item.get_closest_marker("environment")
    if wanted and wanted.args[0] != environment:
        return f"needs the environment that `nox -s {wanted.args[1] if len(wanted.args) > 1 else wanted.args[0]}` makes"
    if not needs_gpu(item):
        return ""
    # Here: tests of the built files run where megamoe is not installed.
    from megamoe import nvml
    from megamoe.testing import mps

    visible = nvml.gpus()
    if visible.problem:
        return f"needs a GPU: {visible.problem}"
    have = [device.capability for device in visible.devices]
    for arch in (mark for mark in ("sm90", "sm100", "sm120") if item.get_closest_marker(mark)):
        if not set(have) & set(ARCHS[arch]):
            return f"needs an {arch} GPU, found {names(visible)}"
    if item.get_closest_marker("emulated") and (9, 0) not in have:
        return f"emulates Blackwell code on a Hopper GPU, found {names(visible)}"
    ranks = item.get_closest_marker("ranks")
    if ranks and ranks.args[0] > len(have) and not mps.available():
        return f"needs {ranks.args[0]} GPUs, or one shared through MPS (nvidia-cuda-mps-control), found {names(visible)}"
    return ""


def needs_gpu(item):
    return any(item.get_closest_marker(mark) for mark in GPU_MARKS)


def names(visible):
    return ", ".join(f"{device.name} ({device.capability[0]}.{device.capability[1]})" for device in visible.devices)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A GPU runner that ran no GPU test has proved nothing."""
    config = session.config
    if config.getoption("--environment") != "gpu" or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return
    if not config.stash.get(GPU_TESTS, 0):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        config.get_terminal_writer().line("\nno GPU test ran, although this is a GPU runner", red=True)


GPU_TESTS = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    if needs_gpu(item):
        item.config.stash[GPU_TESTS] = item.config.stash.get(GPU_TESTS, 0) + 1
    return result
