"""Settings whose values depend on where they are read."""

import os
from pathlib import Path

import pytest

from megamoe import env
from megamoe.cli import main
from megamoe.compile.store import Store


@pytest.mark.parametrize(
    ("value", "folder"), [(None, "/home/me/.cache/megamoe"), ("", "/home/me/.cache/megamoe"), ("~/x", "/home/me/x"), ("/y", "/y")]
)
def test_the_cache_folder(monkeypatch, value, folder):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MEGAMOE_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("MEGAMOE_CACHE_DIR", value)
    assert env.cache_dir() == Path(folder)


@pytest.mark.parametrize("value", [None, "~/x", "~nobody-of-this-name/x"])
def test_a_user_without_a_home_has_no_cache_and_no_error(monkeypatch, capsys, value):
    """As in a container that runs under a number that no account has."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.delenv("MEGAMOE_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("MEGAMOE_CACHE_DIR", value)
    assert env.cache_dir().is_relative_to("/nonexistent")
    assert Store().read("0" * 64) is None
    assert main(["cache"]) == 0
    assert "/nonexistent/" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("4,2", 4), ("0", 1), ("", None), ("many", None), (None, None)])
def test_threads_are_those_that_the_user_gives_or_one_a_core(monkeypatch, value, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 5, 7, 11})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert env.threads() == (threads or 5)


@pytest.mark.parametrize("given", [None, "7"])
def test_children_get_few_threads_unless_the_user_gave_some(monkeypatch, given):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with env.threads_of_children(2):
        assert os.environ["OMP_NUM_THREADS"] == (given or "2")
    assert os.environ.get("OMP_NUM_THREADS") == given
