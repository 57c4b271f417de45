"""Taking a drop in and giving it back: bytes, private names, and that the rewritten tree runs beside another one."""

import hashlib
import itertools
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import DropInfo
from megamoe.drop import manifest as manifests
from megamoe.drop.export import export
from megamoe.drop.module import parse
from megamoe.drop.rewrite import remove_prefix, rewrite
from megamoe.drop.update import update
from megamoe.drop.verify import verify

from .drop_trees import BOM, PACKAGES, PLAIN, make_wheel, snapshot, write_tree
from .stopwatch import assert_within


def test_bytes_come_back(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    done = update(wheel, source, PACKAGES, commit="1275b8b", date="2026-07-31", upstream="acme")
    assert done.added == tuple(sorted(PLAIN))
    assert done.removed == done.changed == ()
    assert verify(wheel).ok
    export(wheel, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_manifest_records_where_it_comes_from_and_every_original_hash(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    update(wheel, source, PACKAGES, commit="1275b8b", date="2026-07-31", upstream="acme")
    table = tomllib.loads((wheel / "drop.toml").read_text())
    assert table["files"] == {name: hashlib.sha256(data).hexdigest() for name, data in PLAIN.items()}
    found = {key: table[key] for key in ("origin", "upstream", "commit", "date", "namespace", "packages")}
    assert found == {
        "origin": "upstream", "upstream": "acme", "commit": "1275b8b", "date": "2026-07-31",
        "namespace": "acme_kernels._drop", "packages": list(PACKAGES),
    }  # fmt: skip


def test_description_follows_the_manifest(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    for commit in ("1275b8b", "beef"):
        update(wheel, source, PACKAGES, commit=commit, date="2026-07-31", upstream="acme")
        assert manifests.drop_info(str(wheel / "__init__.py")) == DropInfo(origin="acme", commit=commit, date="2026-07-31")


def test_only_the_module_name_at_an_import_is_edited(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    update(wheel, source, PACKAGES)
    kernel = (wheel / "_drop/moe_x/kernel.py").read_bytes().split(b"\n")
    assert kernel[:3] == [
        b'"""Says `from common.constants import BLOCK` in prose, which must stay."""',
        b"from acme_kernels._drop.common.constants import BLOCK, TILE  # the tile",
        b"import acme_kernels._drop.src.runtime as runtime; from acme_kernels._drop.src import Runtime",
    ]
    assert b"        from acme_kernels._drop.common import constants" in kernel
    assert (wheel / "_drop/src/__init__.py").read_bytes() == PLAIN["src/__init__.py"]
    assert (wheel / "_drop/moe_x/notes.txt").read_bytes() == PLAIN["moe_x/notes.txt"]


SHAPES = {
    "CRLF": b"import os\r\nfrom common.a import x\r\nif x:\r\n    from common import a\r\n",
    "BOM": BOM + b"from common.a import x\nfrom common.a import x as y\n",
    "BOM and CRLF": BOM + b"from common.a import (\r\n    x,\r\n)\r\n",
    "old Mac line ends": b"import os\rfrom common.a import x\r",
    "mixed line ends": b"import os\r\nimport sys\nfrom common.a import x\rfrom common import a\n",
    "no end of line at the end": b"from common.a import x",
    "tab": b"if True:\n\tfrom\tcommon.a\timport x\n",
    "form feed": b"import os\n\x0cfrom common.a import x\n",
    "continued line": b"from \\\n    common.a \\\n    import x\n",
    "blanks in the name": b"from common . a import x\n",
    "several in one line": b"import os; from common.a import x; import common.a as c, os as o; from common import a\n",
    "after wide characters": "s = 'Grüße \U0001f680'; from common.a import x\n".encode(),
    "future": b"from __future__ import annotations\nfrom common.a import x\n",
    "lookalikes": b"from common_a import x\nfrom commons.a import y\nfrom .a import z\nimport commonly\n",
    "coding line": "# -*- coding: utf-8 -*-\nfrom common.a import x  # é\n".encode(),
    "empty": b"",
}


@pytest.mark.parametrize("data", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_file_comes_back(tmp_path, data):
    files = {"common/__init__.py": b"", "common/a.py": b"x = 1\n", "common/b.py": data}
    source, wheel = write_tree(tmp_path / "upstream", files), make_wheel(tmp_path)
    update(wheel, source, ["common"])
    installed = (wheel / "_drop/common/b.py").read_bytes()
    absolute = data.count(b"from common.") + data.count(b"from common ") + data.count(b"import common.") + data.count(b"from\tcommon.")
    absolute += data.count(b"from \\\n    common.")
    assert installed.count(b"acme_kernels._drop.") == absolute
    assert verify(wheel).ok
    export(wheel, tmp_path / "back")
    assert (tmp_path / "back/common/b.py").read_bytes() == data


LINES = st.sampled_from(
    [
        "from common.a import x",
        "from common import a",
        "from src.b.c import (y,\n   z)",
        "import common.a as q",
        "from .a import x",
        "import os",
        "x = 'from common import a'",
        "def f():\n    from src import b",
        "# é from common",
        "s = '''\nfrom common import a\n'''",
        "",
    ]
)


@settings(max_examples=150)
@given(st.lists(LINES, max_size=12), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_removing_the_prefix_gives_the_original(lines, end, bom):
    data = BOM * bom + "\n".join(lines).replace("\n", end).encode()
    private = rewrite(parse(data, "moe_x/k.py", "k.py"), "acme._drop", ("common", "src"))
    assert remove_prefix(parse(private, "moe_x/k.py", "k.py"), "acme._drop", ("common", "src")) == data
    real = sum(line.strip().startswith(("from common", "from src", "import common", "def f")) for line in lines)
    assert private.count(b"acme._drop.") == real


RUN_TWO = """
import sys
before = list(sys.path)
from one._drop.moe_x.kernel import Kernel as A
from two._drop.moe_x.kernel import Kernel as B
assert sys.path == before, sys.path
assert not [m for m in sys.modules if m.split(".")[0] in ("common", "src", "moe_x")]
assert A(1, 1).__call__.__func__.__module__ == "one._drop.moe_x.kernel"
print(A(1, 1)(0, 0, 0), B(1, 1)(0, 0, 0))
"""


def test_two_colliding_drops_run_in_one_process(tmp_path):
    for name, block in (("one", 32), ("two", 48)):
        files = {**PLAIN, "common/constants.py": PLAIN["common/constants.py"].replace(b"32", str(block).encode())}
        update(make_wheel(tmp_path, name), write_tree(tmp_path / f"upstream-{name}", files), PACKAGES)
    ran = subprocess.run([sys.executable, "-c", RUN_TWO], cwd=tmp_path, capture_output=True, text=True, check=False)
    # TILE + BLOCK + TILE + BLOCK + BLOCK with TILE = 4 * BLOCK
    assert (ran.stdout.split(), ran.stderr) == ([str(11 * 32), str(11 * 48)], "")


@pytest.mark.alone
def test_update_of_60_files_takes_under_2_seconds(tmp_path):
    function = b"\n\ndef f%d(a, b=%d):\n    from common.m2 import f2\n    return [f2(a + i * b, b) for i in range(%d)]\n"
    body = b"from common.m0 import f0\nfrom src.m1 import f1\n" + b"".join(function % (i, i, i) for i in range(120))
    names = [*(f"m{i}.py" for i in range(19)), "__init__.py"]
    files = {f"{package}/{name}": body for package in PACKAGES for name in names}
    assert len(files) == 60
    source, attempts = write_tree(tmp_path / "upstream", files), itertools.count()
    assert_within(2.0, lambda: update(make_wheel(tmp_path / str(next(attempts))), source, PACKAGES))
    assert len(body.splitlines()) > 480  # as long as the kernels that teams ship


def test_digest_follows_kernel_bytes_and_not_the_place(tmp_path):
    source = write_tree(tmp_path / "upstream", PLAIN)
    first, second = make_wheel(tmp_path / "a"), make_wheel(tmp_path / "b")
    for wheel in (first, second):
        update(wheel, source, PACKAGES)
    assert manifests.tree_digest(first) == manifests.tree_digest(second)
    kernel = second / "_drop/moe_x/kernel.py"
    kernel.write_bytes(kernel.read_bytes() + b"#")
    assert manifests.tree_digest(first) != manifests.tree_digest(second)


@given(
    st.text(),
    st.text(),
    st.lists(st.text()),
    st.dictionaries(st.text(min_size=1).filter(lambda p: ".." not in p and p[0] != "/"), st.text()),
)
@settings(max_examples=100)
def test_manifest_text_reads_back_equal(tmp_path_factory, upstream, reason, packages, files):
    folder = tmp_path_factory.mktemp("manifest")
    patches = (manifests.Patch("drop_patches/a.patch", "0" * 64, reason),)
    written = manifests.Manifest(upstream=upstream, packages=tuple(packages), files=files, patches=patches)
    (folder / "drop.toml").write_text(written.to_toml(), encoding="utf-8", newline="\n")
    assert manifests.read(folder) == written
