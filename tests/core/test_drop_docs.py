"""The pages about drops and backends: their commands are commands, their TOML is what the tools read."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from megamoe.cli import drop, new_backend
from megamoe.drop import contract, manifest

from .drop_trees import write_tree

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("kernel_drops.md", "writing_a_backend.md")
MODULES = {"drop": drop, "new-backend": new_backend}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    lines = [shlex.split(line, comments=True) for block in blocks(page, "bash") for line in block.splitlines()]
    known = [words[1:] for words in lines if words[0] == "megamoe" and words[1] in MODULES]
    assert len(known) >= 3
    for command, *rest in known:
        parser = argparse.ArgumentParser(exit_on_error=False)
        MODULES[command].add_arguments(parser)
        parser.parse_args(rest)


def test_toml_is_read(tmp_path):
    found = blocks("kernel_drops.md", "toml")
    (example,) = [text for text in found if "[[symbols]]" in text]
    write_tree(tmp_path, {"shim/contract.toml": example.encode()})
    assert len(contract.read(tmp_path)) == 2 + 2 + 1
    (first_party,) = [text for text in found if "first-party" in text]
    write_tree(tmp_path, {"drop.toml": first_party.encode()})
    assert manifest.read(tmp_path).first_party
