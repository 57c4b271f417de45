"""Settings whose values depend on where they are read."""

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
