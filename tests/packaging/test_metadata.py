"""What the four pyproject files say, before anything is built."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm90", "sm100", "sm120")
PACKAGES = {f"megamoe-{part}": "megamoe" if part == "core" else f"megamoe_{part}" for part in ("core", *ARCHS)}


def project(name):
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]


def version_in_source(name):
    tree = ast.parse((ROOT / "packages" / name / "src" / PACKAGES[name] / "__init__.py").read_text())
    found = [node.value.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__version__"]
    assert len(found) == 1
    return found[0]


def requirements(name):
    """Every requirement of a wheel with the extra it belongs to, "" for none."""
    data = project(name)
    yield from (("", Requirement(text)) for text in data["dependencies"])
    for extra, texts in data["optional-dependencies"].items():
        yield from ((extra, Requirement(text)) for text in texts)


def test_one_version_for_all_wheels_and_every_pin_between_them():
    version = version_in_source("megamoe-core")
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version)
    for name in PACKAGES:
        assert version_in_source(name) == version, name
        for extra, requirement in requirements(name):
            if requirement.name.startswith("megamoe-"):
                assert requirement.specifier == SpecifierSet(f"=={version}"), f"{name}[{extra}] asks for {requirement}"


def test_changelog_starts_with_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version_in_source("megamoe-core")


def test_extras_bring_the_arch_wheels():
    extras = {extra: {r.name for e, r in requirements("megamoe-core") if e == extra} for extra in (*ARCHS, "all")}
    assert extras == {**{arch: {f"megamoe-{arch}"} for arch in ARCHS}, "all": {f"megamoe-{arch}" for arch in ARCHS}}


def test_other_extras_bring_what_their_modules_import():
    extras = {extra: {r.name: r.specifier for e, r in requirements("megamoe-core") if e == extra} for extra in ("testing", "transformers")}
    assert extras == {"testing": {"pytest": SpecifierSet(">=9,<10")}, "transformers": {"transformers": SpecifierSet(">=5.24,<6")}}
    # What the tests run with is what the extras promise.
    noxfile = (ROOT / "noxfile.py").read_text()
    assert '"pytest>=9,<10"' in noxfile
    assert 'TRANSFORMERS = "transformers>=5.24,<6"' in noxfile


@pytest.mark.parametrize("name", PACKAGES)
def test_torch_is_required_from_2_9_on_and_never_pinned(name):
    asked = [requirement.specifier for extra, requirement in requirements(name) if requirement.name == "torch"]
    assert asked == [SpecifierSet(">=2.9")]
    assert project(name)["requires-python"] == ">=3.11"


def test_constraints_satisfy_every_wheel():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin = Requirement(line)
        assert len(pin.specifier) == 1, line
        pins[pin.name] = Version(next(iter(pin.specifier)).version)
    assert pins.keys() >= {"torch"}
    for name in PACKAGES:
        for extra, requirement in requirements(name):
            if requirement.name in pins:
                assert requirement.specifier.contains(pins[requirement.name]), f"{name}[{extra}]: {requirement}"


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_has_the_licence_and_says_so(name):
    assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not (ROOT / "packages" / name / "LICENSE").is_symlink()
    assert project(name)["license"] == "Apache-2.0"


@pytest.mark.parametrize("arch", ARCHS)
def test_each_arch_wheel_offers_one_backend_named_after_it(arch):
    assert project(f"megamoe-{arch}")["entry-points"] == {"megamoe.backends": {arch: f"megamoe_{arch}:SPEC"}}
