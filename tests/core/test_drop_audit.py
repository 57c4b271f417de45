"""Each kind of change that breaks a shim is found by audit, with file, line, expected and found, and no module is imported."""

import pytest

from megamoe import DropError
from megamoe.drop.audit import audit
from megamoe.drop.update import update

from .drop_trees import edit, make_wheel, write_tree

TREE = {
    "common/__init__.py": b"from .constants import BLOCK\n",
    "common/constants.py": (
        b"BLOCK = 32\n"
        b"TILE: int = BLOCK * (1 << 2)\n"
        b"MODES = ('a', 'b')\n"
        b"ON = True\n"
        b"A, B = 1, -2.5\n"
        b"COUNT = len(MODES)\n"
        b"\n\nclass Kind:\n    FIRST = 1\n    SECOND = FIRST + BLOCK\n"
    ),
    "moe_x/__init__.py": b"raise RuntimeError('importing kernels is what audit must not do')\n",
    "moe_x/base.py": b"class Base:\n    def __call__(self, x, weights, out, stream=None):\n        pass\n",
    "moe_x/kernel.py": (
        b"from common.constants import BLOCK\n"
        b"from dataclasses import dataclass, field\n"
        b"from .base import Base\n"
        b"\n"
        b"\n"
        b"class Kernel(Base):\n"
        b"    def __init__(self, tile, cluster, *, stages=3, clamp=None):\n"
        b"        pass\n"
        b"\n"
        b"\n"
        b"@dataclass(frozen=True)\n"
        b"class Config:\n"
        b"    tile: int\n"
        b"    names: list = field(default_factory=list)\n"
        b"    hidden: int = field(init=False, default=0)\n"
        b"    late: bool = field(default=True, kw_only=True)\n"
        b"\n"
        b"\n"
        b"try:\n"
        b"    import fast\n"
        b"except ImportError:\n"
        b"    def helper(a, /, b, *rest, **options):\n"
        b"        pass\n"
    ),
}
CONTRACT = b"""schema = 1
[[symbols]]
module = "moe_x.kernel"
names = ["Kernel", "helper", "Config.tile", "BLOCK"]
[[signatures]]
module = "moe_x.kernel"
name = "Kernel"
signature = "(self, tile, cluster, *, stages=3, clamp=...)"
[[signatures]]
module = "moe_x.kernel"
name = "Kernel.__call__"
signature = "(self, x, weights, out, stream=None)"
[[signatures]]
module = "moe_x.kernel"
name = "Config"
signature = "(self, tile, names=..., *, late=True)"
[[signatures]]
module = "moe_x.kernel"
name = "helper"
signature = "(a, /, b, *rest, **options)"
[[constants]]
module = "common"
name = "BLOCK"
value = 32
mirror = "shim/plan.py:_BLOCK"
[[constants]]
module = "common.constants"
name = "TILE"
value = 128
[[constants]]
module = "common.constants"
name = "MODES"
value = ["a", "b"]
[[constants]]
module = "common.constants"
name = "ON"
value = true
[[constants]]
module = "common.constants"
name = "B"
value = -2.5
[[constants]]
module = "common.constants"
name = "Kind.SECOND"
value = 33
"""
SHIM = {
    "shim/__init__.py": b"",
    "shim/contract.toml": CONTRACT,
    "shim/plan.py": b"_BLOCK = 16 * 2\n",
    "shim/launch.py": (
        b"def load():\n    from acme_kernels._drop.moe_x.kernel import Kernel, helper as h\n    from .._drop.common import BLOCK\n"
        b"    from .._drop import common as shared\n    from ..elsewhere import x\n    return shared.BLOCK + x.BLOCK\n"
    ),
}
PACKAGES = ("common", "moe_x")


def make(tmp_path, tree=TREE, shim=SHIM):
    wheel = write_tree(make_wheel(tmp_path), shim)
    update(wheel, write_tree(tmp_path / "upstream", tree), PACKAGES)
    return wheel


def test_drop_that_keeps_the_contract(tmp_path):
    found = audit(make(tmp_path))
    assert found.problems == ()
    assert found.ok
    assert found.checks == 4 + 4 + 6 + 4  # symbols, signatures, constants, imports by the shim


K, C = "moe_x/kernel.py", "common/constants.py"
NONE, ONLY_CODE = "no such parameter", "an expression that only running it can tell"
ORDER = "self, tile, cluster, stages, clamp", "self, cluster, tile, stages, clamp"
PLANTED = {
    "renamed argument": (K, b"tile, cluster,", b"tile, clusters,", 7, "'cluster' was renamed", "cluster", "clusters"),
    "reordered arguments": (K, b"tile, cluster,", b"cluster, tile,", 7, "reordered", *ORDER),
    "new required argument": (K, b"cluster, *", b"cluster, depth, *", 7, "new required parameter 'depth'", NONE, "depth"),
    "new optional argument": (K, b"stages=3,", b"stages=3, d=1,", 7, "new optional parameter 'd'", NONE, "keyword-only d=1"),
    "removed argument": (K, b", clamp=None", b"", 7, "'clamp' was removed", "keyword-only clamp=...", NONE),
    "changed default": (K, b"stages=3", b"stages=4", 7, "'stages' is passed", "keyword-only stages=3", "keyword-only stages=4"),
    "default gone": (K, b"clamp=None", b"clamp", 7, "'clamp' is passed", "keyword-only clamp=...", "keyword-only clamp"),
    "keyword-only argument": (K, b"cluster, *,", b"*, cluster,", 7, "'cluster' is passed", "cluster", "keyword-only cluster"),
    "inherited call": ("moe_x/base.py", b"x, weights", b"x, w", 2, "'weights' was renamed", "weights", "w"),
    "field of a dataclass": (K, b"tile: int\n", b"tile: int\n    d: int\n", 14, "new required parameter 'd'", NONE, "d"),
    "starred argument": (K, b"**options", b"**kwargs", 22, "'**options' was renamed", "**options", "**kwargs"),
    "removed symbol": (K, b"def helper(", b"def assist(", 1, "helper is not in moe_x.kernel", "helper", "no such symbol"),
    "class made a function": (
        K,
        b"class Kernel(Base):\n    def __init__",
        b"def Kernel",
        6,
        "is not in",
        "Kernel.__call__",
        "no such symbol",
    ),
    "changed constant": (C, b"BLOCK = 32", b"BLOCK = 64", 1, "constant BLOCK", "32", "64"),
    "constant of arithmetic": (C, b"1 << 2", b"1 << 3", 2, "constant TILE", "128", "256"),
    "constant of text": (C, b"'b')", b"'c')", 3, "constant MODES", "['a', 'b']", "['a', 'c']"),
    "truth that became a number": (C, b"ON = True", b"ON = 1", 4, "constant ON", "True", "1"),
    "one of two constants": (C, b"1, -2.5", b"1, 2.5", 5, "constant B", "-2.5", "2.5"),
    "constant in a class": (C, b"FIRST = 1", b"FIRST = 2", 11, "constant Kind.SECOND", "33", "34"),
    "constant that code computes": (C, b"TILE: int = BLOCK * (1 << 2)", b"TILE = len(MODES)", 2, "constant TILE", "128", ONLY_CODE),
}


@pytest.mark.parametrize(("file", "old", "new", "line", "text", "expected", "found"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_change(tmp_path, file, old, new, line, text, expected, found):
    assert TREE[file].count(old) == 1
    wheel = make(tmp_path, {**TREE, file: TREE[file].replace(old, new)})
    problems = audit(wheel).problems
    first = [p for p in problems if (p.file, p.line) == (str(wheel / "_drop" / file), line) and text in p.text]
    assert first, problems
    assert (expected, found) in [(p.expected, p.found) for p in first]


OPEN = CONTRACT.replace(
    b'signature = "(self, tile, cluster, *, stages=3, clamp=...)"', b'signature = "(self, tile, cluster, *, clamp=...)"\nopen = true'
)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b"stages=3,", b"stages=4, depth=1,", ""),
        (b"cluster, *", b"cluster, depth, *", "new required parameter 'depth'"),
        (b"tile, cluster,", b"cluster, tile,", "parameters were reordered"),
        (b", clamp=None", b"", "'clamp' was removed"),
        (b"clamp=None", b"limit=None", "'clamp' was removed"),
    ],
)
def test_signature_that_may_grow(tmp_path, old, new, text):
    tree = {**TREE, K: TREE[K].replace(old, new)}
    texts = [problem.text for problem in audit(make(tmp_path, tree, {**SHIM, "shim/contract.toml": OPEN})).problems]
    assert len(texts) == bool(text)
    assert all(text in found for found in texts)


def test_module_that_is_gone(tmp_path):
    tree = {name: data for name, data in TREE.items() if name != K}
    problems = audit(make(tmp_path, tree)).problems
    shim, contract = "shim/launch.py", "shim/contract.toml"
    places = {(p.file.rpartition("acme_kernels/")[2], p.line) for p in problems}
    stated = CONTRACT.decode().splitlines()
    names = [number for number, line in enumerate(stated, 1) if "moe_x.kernel" in line]
    assert {place for place in places if place[0] == shim} == {(shim, 2)}
    # The line after `module = ...` names the symbol, or is the list that does.
    assert {line for file, line in places if file == contract} == {number + 1 for number in names}
    assert {p.found for p in problems} == {"no such module"}


def test_shim_that_relies_on_more_than_it_states(tmp_path):
    more = b"\nfrom .._drop.moe_x.base import Base\nfrom .._drop.moe_x.base import Missing\nfrom .._drop.moe_x import nothing\n"
    more += b"from .._drop.common import constants\nx = constants.COUNT + constants.GONE + constants.TILE\n"
    more += b"import acme_kernels._drop.moe_x.gone\nimport acme_kernels._drop.moe_x.kernel as k\nx = k.Kernel, k.Gone\n"
    wheel = make(tmp_path, shim={**SHIM, "shim/more.py": more})
    found = [(p.file, p.line, p.found) for p in audit(wheel).problems if p.file.endswith("more.py")]
    here = str(wheel / "shim/more.py")
    absent = "no such symbol"
    expected = [(here, 2, "none"), (here, 3, absent), (here, 4, absent), (here, 6, absent), (here, 6, "none")]
    assert found == [*expected, (here, 7, "no such module"), (here, 9, absent)]


@pytest.mark.parametrize(
    ("file", "new", "line", "found"),
    [
        ("shim/plan.py", b"\n_BLOCK = 33\n", 2, "33"),
        ("shim/plan.py", b"OTHER = 32\n", 1, "no such constant"),
        ("shim/other.py", b"", CONTRACT.decode().splitlines().index('mirror = "shim/plan.py:_BLOCK"') + 1, "nothing"),
    ],
)
def test_mirror_that_disagrees(tmp_path, file, new, line, found):
    shim = {name: data for name, data in SHIM.items() if name != "shim/plan.py"}
    (problem,) = audit(make(tmp_path, shim={**shim, file: new})).problems
    assert (problem.line, problem.found) == (line, found)
    assert "_BLOCK" in problem.text


def test_package_without_an_init_is_a_module(tmp_path):
    tree = {name: data for name, data in TREE.items() if name != "moe_x/__init__.py"}
    shim = {**SHIM, "shim/more.py": b"from .._drop import moe_x\nfrom .._drop.moe_x import kernel\nkernel.Kernel\n"}
    assert audit(make(tmp_path, tree, shim)).problems == ()


def test_against_a_source_before_it_is_taken_in(tmp_path):
    wheel = make(tmp_path)
    newer = write_tree(tmp_path / "newer", TREE)
    assert audit(wheel, newer).ok
    edit(newer / K, b"cluster, *", b"cluster, depth, *")
    (problem,) = audit(wheel, newer).problems
    assert (problem.file, problem.line) == (str(newer / K), 7)
    assert audit(wheel).ok


def test_wheel_with_kernels_and_no_contract(tmp_path):
    wheel = make(tmp_path, shim={})
    (problem,) = audit(wheel).problems
    assert problem.file == str(wheel / "shim/contract.toml")


def test_wheel_without_kernels_yet(tmp_path):
    wheel = write_tree(make_wheel(tmp_path), {"drop.toml": b'schema = 1\norigin = "first-party"\npackages = []\n'})
    assert audit(wheel).ok


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (b"schema = 1\n[[symbols]\n", 2, ""),
        (b"schema = 3\n", 1, "schema is 3"),
        (b"schema = 1\n[[symbol]]\n", 1, "unknown key 'symbol'"),
        (b"schema = 1\nsymbols = 1\n", 1, "list of tables"),
        (b"schema = 1\nsymbols = [1]\n", 1, "number 1 is not a table"),
        (b'schema = 1\n[[symbols]]\nmodule = "a"\n', 1, "lacks names"),
        (b'schema = 1\n[[symbols]]\nmodule = "a"\nnames = "b"\n', 1, "list of strings"),
        (b'schema = 1\n[[signatures]]\nmodule = "a"\nname = "b"\nsignature = "(a, a"\n', 1, "a parameter list"),
        (b'schema = 1\n[[signatures]]\nmodule = "a"\nname = "b"\nsignature = "(a): return 1\\ndef g()"\n', 1, "a parameter list"),
        (b'schema = 1\n[[signatures]]\nmodule = "a"\nname = "b"\nsignature = "(a)"\nopen = 1\n', 1, "allowed: true, false"),
        (b'schema = 1\n[[constants]]\nmodule = "a"\nname = 3\nvalue = 1\n', 1, "allowed: a string"),
        (b'schema = 1\n[[constants]]\nmodule = "a"\nname = "b"\nvalue = 1\ncolour = 1\n', 1, "unknown keys colour"),
        (b'schema = 1\n[[constants]]\nmodule = "a"\nname = "b"\nvalue = 1\nmirror = "plan"\n', 1, "shim/file.py:NAME"),
    ],
)
def test_damaged_contract(tmp_path, text, line, what):
    wheel = make(tmp_path, shim={"shim/contract.toml": text})
    with pytest.raises(DropError) as caught:
        audit(wheel)
    assert f"{wheel / 'shim/contract.toml'}:{line}: " in str(caught.value)
    assert what in str(caught.value)
