"""Installations as they go wrong: copies, leftovers and stale versions. Which copy counts never depends on the disk's order."""

import shutil
import sys

import pytest

from megamoe import catalog

from .wheels import Site, claim, see_only


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two site folders, the first before the second on ``sys.path``."""
    folders = [Site(tmp_path / "first"), Site(tmp_path / "second")]
    see_only(monkeypatch, *(site.folder for site in folders))
    return folders


def records():
    return {r.name: r for r in catalog.backends(refresh=True)}


def test_the_same_folder_twice_on_the_path_is_one(places):
    first, _ = places
    first.backend("m", ())
    sys.path.append(str(first.folder))
    assert records()["m"].state == "ok"


def test_a_stray_egg_info_beside_the_wheel_is_one(places):
    first, _ = places
    module = first.backend("m", (), dist="kernels", version="0.1.0")
    first.info("kernels", "0.0.3", entries=claim("m", f"{module}:SPEC"), kind="egg-info")
    m = records()["m"]
    assert (m.state, m.version) == ("ok", "0.1.0")


def test_one_entry_written_twice_is_one(places):
    first, _ = places
    module = first.backend("m", (), dist="kernels")
    entries = first.folder / "kernels-0.1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + f"m = {module}:SPEC\n")
    assert records()["m"].state == "ok"


def test_the_first_version_on_the_path_counts_as_it_is_the_one_imported(places):
    first, second = places
    first.backend("m", (), dist="kernels", version="0.0.9")  # a stale copy in the user's site folder
    second.backend("m", (), dist="kernels", version="0.2.0")
    m = records()["m"]
    assert (m.state, m.version, m.location) == ("ok", "0.0.9", str(first.folder))


def test_a_shadowed_versions_entry_points_are_not_returned(places):
    first, second = places
    first.info("kernels", "2.0")  # this version offers no backend any more
    second.backend("m", (), dist="kernels", version="1.0")
    assert "m" not in records()


@pytest.mark.parametrize("where", [0, 1])
def test_an_empty_leftover_hides_nothing(places, where):
    _, second = places
    (places[where].folder / "kernels-0.0.1.dist-info").mkdir()
    second.backend("m", (), dist="kernels", version="0.2.0")
    m = records()["m"]
    assert (m.state, m.version) == ("ok", "0.2.0")


@pytest.mark.parametrize("versions", [("0.9", "0.10"), ("0.10", "0.9")])
def test_two_records_in_one_folder_count_as_the_higher_version(places, versions):
    first, _ = places
    for version in versions:
        first.backend("m", (), dist="kernels", version=version)
    assert records()["m"].version == "0.10"


def test_an_arch_wheel_that_is_an_empty_leftover_is_broken_not_absent(places):
    first, _ = places
    (first.folder / "megamoe_sm90-0.1.0.dist-info").mkdir()
    r = records()["sm90"]
    assert r.state == "broken"
    assert f"megamoe-sm90 is installed in {first.folder}, but its metadata names no entry points" in str(r.reasons[0])
    assert "pip install --force-reinstall --no-deps megamoe-sm90" in r.reasons[0].hint


def test_an_arch_wheel_without_entry_points_is_broken_not_absent(places):
    first, _ = places
    first.info("megamoe-sm100", "0.1.0")
    assert records()["sm100"].state == "broken"


def test_removed_wheels_are_gone_after_a_refresh(places):
    first, _ = places
    first.backend("m", (), dist="kernels")
    assert "m" in records()
    shutil.rmtree(first.folder / "kernels-0.1.0.dist-info")
    assert "m" not in records()


def test_an_editable_installation_is_located_at_its_project(places, tmp_path):
    first, _ = places
    first.backend("m", (), dist="kernels")
    project = tmp_path / "my project"
    url = project.as_uri()
    (first.folder / "kernels-0.1.0.dist-info" / "direct_url.json").write_text(f'{{"url": "{url}", "dir_info": {{"editable": true}}}}')
    m = records()["m"]
    assert (m.location, m.distributions[0].editable) == (str(project), True)
