"""`megamoe backends`: the list as people and programs read it."""

import json

import pytest

from megamoe import cli

from .wheels import HOPPER, Site, see_gpus, see_only


@pytest.fixture
def site(tmp_path, monkeypatch):
    planted = Site(tmp_path / "site")
    see_only(monkeypatch, planted.folder)
    return planted


def test_text_names_states_reasons_fixes_and_the_choice(site, capsys):
    site.backend("sm90", version="1.2.3")
    site.wheel("bad", "1 / 0")
    assert cli.main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["bad", "0.1.0", "broken"],
        ["reference", "0.1.0", "ok"],
        ["sm90", "1.2.3", "unavailable"],
    ]
    text = "\n".join(lines)
    assert "bad: loading planted_" in text
    assert "fix: pip install --force-reinstall planted-bad" in text
    assert "sm90: needs compute capability 9.0, found no GPU (no NVIDIA driver)" in text
    assert lines[-1].split() == ["chosen", "here", "reference"]
    assert "Traceback" not in text


def test_verbose_adds_places_and_tracebacks(site, capsys):
    site.backend(
        "sm90", more="docs_url='https://example.org', drop=__import__('megamoe.protocol').protocol.DropInfo('up', 'abc', '2026-01-02')"
    )
    site.wheel("bad", "1 / 0")
    assert cli.main(["backends", "-v"]) == 0
    text = capsys.readouterr().out
    for part in (
        str(site.folder),
        "Traceback",
        "ZeroDivisionError",
        "protocol",
        "1.0",
        "up abc, taken in 2026-01-02",
        "https://example.org",
    ):
        assert part in text


def test_json_is_complete(site, capsys, monkeypatch):
    see_gpus(monkeypatch, HOPPER)
    site.backend("sm90", version="1.2.3")
    site.wheel("bad", "1 / 0")
    assert cli.main(["backends", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["command"], document["chosen"], document["refusal"]) == (1, "backends", "sm90", None)
    assert document["gpus"]["devices"][0]["capability"] == [9, 0]
    bad, _, sm90 = document["backends"]
    assert (bad["state"], bad["spec"]) == ("broken", None)
    assert "ZeroDivisionError" in bad["traceback"]
    assert (sm90["state"], sm90["reasons"], sm90["spec"]["archs"]) == ("ok", [], [[9, 0]])
    assert sm90["distributions"] == [{"name": "planted-sm90", "version": "1.2.3", "location": str(site.folder), "editable": False}]


def test_nothing_to_choose_is_three(site, capsys, monkeypatch):
    see_gpus(monkeypatch, HOPPER)
    assert cli.main(["backends"]) == 3
    assert "none: No backend can run on NVIDIA H200" in capsys.readouterr().out
    monkeypatch.setenv("MEGAMOE_BACKEND", "nobody")
    assert cli.main(["backends", "--json"]) == 3
    assert "No backend named 'nobody'" in json.loads(capsys.readouterr().out)["refusal"]
