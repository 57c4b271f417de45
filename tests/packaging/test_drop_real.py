"""The drop workflow on kernel trees that nobody here wrote: those inside the flashinfer-python wheel, fetched for the test and thrown away.

nox -s drop
"""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megamoe.drop import manifest as manifests
from megamoe.drop.audit import audit
from megamoe.drop.export import export
from megamoe.drop.update import update
from megamoe.drop.verify import verify

pytestmark = [pytest.mark.environment("drop"), pytest.mark.timeout(900)]

WHEEL = "flashinfer-python==0.7.2.post1"
ROOT = "flashinfer/moe_ep/kernel_src/"
TREES = {
    "real_sm90": ("sm90/pull_style_cutedsl_megakernel", ("common", "src", "moe_nvfp4_swapab", "moe_hopper_fp8")),
    "real_sm100": (
        "sm100/cutedsl_megamoe", ("common", "src", "moe_bf16_glu", "moe_mxfp8_glu", "moe_mxfp8_bf16_glu", "moe_nvfp4_swapab"),
    ),
    "real_sm120_swapab": (
        "sm120/swapab_cutedsl_megakernel", ("common", "src", "moe_sm120_mxfp8_swapab", "moe_mxfp8_glu", "moe_nvfp4_swapab"),
    ),
    "real_sm120_split": ("sm120/split_cutedsl_megakernel", ("common", "src", "moe_sm120_mxfp4mxfp8_split")),
}  # fmt: skip
FILES = 221  # counted in the wheel
INTERNAL_IMPORTS = 506


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    """Per tree, the bytes of its files as they lie in the wheel, by path relative to the source root."""
    folder = tmp_path_factory.mktemp("fetched")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        pytest.skip(f"{WHEEL} cannot be fetched here: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        trees = {tree: f"{ROOT}{place}/src/" for tree, (place, _) in TREES.items()}
        found = {
            tree: {name.removeprefix(prefix): archive.read(name) for name in names if name.startswith(prefix)}
            for tree, prefix in trees.items()
        }
    shutil.rmtree(folder)
    return found


@pytest.fixture(scope="session")
def taken(originals, tmp_path_factory):
    """A folder with one package per tree, each with its drop taken in; and what the updates reported."""
    folder, reports = tmp_path_factory.mktemp("wheels"), {}
    for tree, files in originals.items():
        source = tmp_path_factory.mktemp("source") / "src"
        for name, data in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
        (folder / tree).mkdir()
        (folder / tree / "__init__.py").write_text('"""A wheel around a drop."""\n')
        reports[tree] = update(folder / tree, source, TREES[tree][1], upstream=WHEEL, commit="0.7.2.post1", date="2026-10-01")
        shutil.rmtree(source)
    return folder, reports


@pytest.fixture(scope="session")
def process(taken, tmp_path_factory):
    """What one process with all four trees in it found."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
    script = Path(__file__).with_name("drop_real_process.py")
    where = tmp_path_factory.mktemp("process")  # the compiler leaves its cubins here
    ran = subprocess.run([sys.executable, str(script), str(taken[0])], cwd=where, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.rpartition("=== found ===")[2])


def test_every_file_comes_back_byte_for_byte(originals, taken, tmp_path):
    for tree, files in originals.items():
        verified = verify(taken[0] / tree)
        assert (verified.ok, verified.files, verified.problems) == (True, len(files), ())
        export(taken[0] / tree, tmp_path / tree)
        back = {path.relative_to(tmp_path / tree).as_posix(): path.read_bytes() for path in (tmp_path / tree).rglob("*") if path.is_file()}
        assert back == files
    assert sum(map(len, originals.values())) == FILES


def test_every_internal_import_is_private_and_nothing_else_changed(originals, taken):
    edits = 0
    for tree, files in originals.items():
        tops = "|".join(TREES[tree][1])
        for name, data in files.items():
            statement = re.compile(rb"^([ \t]*from )((?:%s)(?:\.\w+)* import )" % tops.encode(), re.MULTILINE)
            expected, count = statement.subn(rb"\1%s._drop.\2" % tree.encode(), data)
            assert (taken[0] / tree / "_drop" / name).read_bytes() == expected, (tree, name)
            edits += count
    assert edits == INTERNAL_IMPORTS


def test_trees_import_side_by_side(process, taken):
    assert process["path_kept"]
    assert process["strays"] == []
    assert len(process["imported"]) + len(process["lacking"]) == FILES + len(TREES)  # and each _drop/__init__.py
    for name, missing in process["lacking"].items():
        tree = name.partition(".")[0]
        # A runner may want what was not taken or is not installed; a kernel module may not.
        assert missing in taken[1][tree].external, (name, missing)
        assert "runner" in name, (name, missing)


def test_a_kernel_of_each_tree_compiles_in_that_process(process):
    found = {one["tree"]: one for one in process["compiled"]}
    assert list(found) == list(TREES)
    assert [found[tree]["arch"] for tree in TREES] == ["sm_90a", "sm_100a", "sm_120a", "sm_120a"]
    assert [found[tree]["elf_sm"] for tree in TREES] == [90, 100, 120, 120]
    for tree, one in found.items():
        print(f"{tree}: {one['class']} for {one['arch']}, {one['bytes']} bytes of machine code in {one['seconds']} s")
        assert one["names_of"] == [tree], "kernel names carry their own namespace and no other's"


def write_contract(wheel, described):
    lines = ["schema = 1"]
    for module, name, signature in described["signatures"]:
        lines += ["[[signatures]]", f'module = "{module}"', f'name = "{name}"', f'signature = "{signature}"']
    for module, name, value in described["constants"]:
        lines += ["[[constants]]", f'module = "{module}"', f'name = "{name}"', f"value = {value}"]
    (wheel / "shim").mkdir(exist_ok=True)
    (wheel / "shim/contract.toml").write_text("\n".join(lines) + "\n")


def test_audit_reads_what_running_shows(process, taken):
    """Signatures and constants found by importing the kernels are the contract; reading them must agree."""
    for tree, described in process["described"].items():
        assert len(described["signatures"]) >= 2
        assert len(described["constants"]) >= 2
        write_contract(taken[0] / tree, described)
        found = audit(taken[0] / tree)
        assert found.problems == ()
        assert found.checks == len(described["signatures"]) + len(described["constants"])


PLANTED = {
    "renamed argument": (r"(\n        )world_size: int", r"\1ranks: int", "was renamed"),
    "reordered arguments": (r"(mma_tiler_mnk: [^\n]*\n)(\s+cluster_shape_mnk: [^\n]*\n)", r"\2\1", "reordered"),
    "new required argument": (r"(\n        )world_size: int,", r"\1world_size: int,\1wire: str,", "new required parameter 'wire'"),
    "removed symbol": (r"\nclass (\w+Kernel)\(", r"\nclass Old\1(", "is not in"),
    "changed constant": (r"\nSfPaddingBlock\b[^\n]*= [^\n]*", "\nSfPaddingBlock = 99", "constant SfPaddingBlock has another value"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_change_in_a_real_tree(process, taken, tmp_path, kind):
    pattern, replacement, text = PLANTED[kind]
    for tree, described in process["described"].items():
        wheel = taken[0] / tree
        write_contract(wheel, described)
        source = export(wheel, tmp_path / tree).target
        module = described["constants" if "constant" in kind else "signatures"][0][0]
        path = source / (module.replace(".", "/") + ".py")
        before = path.read_text()
        path.write_text(re.sub(pattern, replacement, before, count=1))
        assert path.read_text() != before, (tree, kind)
        problems = audit(wheel, source).problems
        assert any(problem.file == str(path) and text in problem.text for problem in problems), (tree, problems)


def test_edited_byte_in_a_real_tree(taken, tmp_path):
    for tree in TREES:
        wheel = shutil.copytree(taken[0] / tree, tmp_path / tree)
        path = wheel / "_drop/src/sym_buffer.py"
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        assert {problem.file for problem in verify(wheel).problems} == {str(path)}


def test_digests_tell_the_trees_apart(taken):
    assert len({manifests.tree_digest(taken[0] / tree) for tree in TREES}) == len(TREES)
