"""What the README shows works as shown."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

import megamoe
from megamoe import catalog, cli
from megamoe.testing import oracle

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_example_is_short_and_its_result_is_right():
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 12
    torch.manual_seed(3)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    weights = megamoe.ExpertWeights(w13=names["w13"], w2=names["w2"])
    result = oracle.compute(names["problem"], weights, names["x"], names["topk_ids"], names["topk_weights"])
    verdict = oracle.judge(names["y"], result, format=names["problem"].format)
    assert verdict.ok, verdict.text
    names["layer"].close()


def test_the_first_command_installs_every_package_under_the_constraints_and_ends_with_the_demo():
    first = next(block for block in blocks("bash"))
    assert re.findall(r"packages/[\w-]+", first) == [f"packages/megamoe-{part}" for part in ("core", "sm90", "sm100", "sm120")]
    assert "-c constraints.txt" in first
    assert first.strip().endswith("megamoe demo")
    assert len(first.strip().splitlines()) == 1


def test_extras_it_names_exist():
    core = tomllib.loads((ROOT / "packages/megamoe-core/pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for found in re.findall(r"\[((?:sm\d+|all)(?:,cu1[23])?)\]\"", README) for extra in found.split(",")}
    assert named >= {"sm90"}
    assert named <= core.keys()


def test_the_line_with_the_extras_says_once_released():
    place = README.index('pip install "megamoe-core[sm90]"')
    assert "Once released" in README[place - 60 : place]


def test_every_command_it_lists_exists_and_the_other_way_round():
    rows = re.findall(r"^\| (`megamoe .+?) \|", README, re.MULTILINE)
    listed = {command for row in rows for command in re.findall(r"`megamoe ([\w-]+)`", row)}
    assert listed == set(cli.commands())


def test_the_table_of_backends_is_what_the_wheels_say():
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (\w+):.*\|$", README, re.MULTILINE)}
    specs = {record.name: record.spec for record in catalog.backends() if record.name in ("reference", "sm90", "sm100", "sm120")}
    if len(specs) < 4:
        pytest.skip(f"needs all four wheels, found {sorted(specs)}")
    assert rows.keys() == specs.keys()
    for name, (_, formats, state) in rows.items():
        assert tuple(re.findall(r"`(\w+)`", formats)) == specs[name].formats, name
        assert state == specs[name].status, name


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_leads_somewhere(target):
    assert (ROOT / target).exists()
