"""One record per claimed name: the six states, decided from metadata before anything is imported, and no wheel able to hurt another."""

import itertools
import sys

import pytest

from megamoe import catalog

from .wheels import HOPPER, WORKSTATION, Site, see_gpus, see_only


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Discovery that sees an empty site folder, no GPU and no settings."""
    planted = Site(tmp_path / "site")
    see_only(monkeypatch, planted.folder)
    return planted


def record(name="sm90"):
    return {r.name: r for r in catalog.backends(refresh=True)}[name]


def words(r):
    return " ".join(str(reason) for reason in r.reasons)


def test_core_alone_offers_its_reference_backend(site):
    (only,) = catalog.backends(refresh=True)
    assert (only.name, only.state, only.reasons) == ("reference", "ok", ())
    assert only.distributions[0].name == "megamoe-core"


def test_ok_on_its_gpu(site, monkeypatch):
    site.backend("sm90", ((9, 0),))
    see_gpus(monkeypatch, HOPPER)
    r = record()
    assert (r.state, r.reasons, r.version, r.location) == ("ok", (), "0.1.0", str(site.folder))
    assert r.spec.name == "sm90"


@pytest.mark.parametrize(
    ("archs", "devices", "state"),
    [
        (((12, None),), [WORKSTATION], "ok"),  # the whole family
        (((12, 1),), [WORKSTATION], "unavailable"),  # another member of the family
        (((9, 0), (10, 0)), [WORKSTATION, HOPPER], "ok"),  # the second GPU fits
        ((), [], "ok"),  # needs no GPU
    ],
)
def test_gpus_are_matched_by_capability(site, monkeypatch, archs, devices, state):
    site.backend("b", archs)
    see_gpus(monkeypatch, *devices)
    assert record("b").state == state


def test_unavailable_names_needed_and_found(site, monkeypatch):
    site.backend("b", ((12, None), (10, 3)))
    see_gpus(monkeypatch, HOPPER)
    assert "needs compute capability 12.x or 10.3, found NVIDIA H200 (compute capability 9.0)" in words(record("b"))


def test_unavailable_without_a_driver_says_so(site):
    site.backend("sm90")
    assert "found no GPU (no NVIDIA driver)" in words(record())


def test_a_wheel_without_a_kernel_is_unavailable_on_its_own_gpu(site, monkeypatch):
    site.backend("sm90", more="missing='no kernel in this release'")
    see_gpus(monkeypatch, HOPPER)
    r = record()
    assert (r.state, [x.text for x in r.reasons]) == ("unavailable", ["no kernel in this release"])


BROKEN = {
    "broken import": ("import no_such_module_anywhere", "ModuleNotFoundError"),
    "syntax error": ("def f(:\n", "SyntaxError"),
    "raises": ("raise RuntimeError('undefined symbol: foo')", "RuntimeError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "no such object": ("OTHER = 1", "AttributeError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wheel_that_cannot_be_loaded_is_broken_and_alone(site, kind):
    source, error = BROKEN[kind]
    for name in ("a", "z"):
        site.backend(name, ())
    module = site.wheel("m", source)
    records = {r.name: r for r in catalog.backends(refresh=True)}
    assert {name: r.state for name, r in records.items()} == {"a": "ok", "m": "broken", "reference": "ok", "z": "ok"}
    r = records["m"]
    assert type(r.exception).__name__ == error
    assert r.exception.__traceback__ is not None
    assert error in words(r)
    assert error in r.traceback
    assert "pip install --force-reinstall planted-m" in words(r)
    assert module in r.traceback


def test_the_bottom_of_an_exception_chain_is_named(site):
    site.wheel("m", "try:\n    1 / 0\nexcept Exception as e:\n    raise ImportError('could not start') from e\n")
    assert "ImportError: could not start (at the bottom: ZeroDivisionError: division by zero)" in words(record("m"))


def test_ctrl_c_during_an_import_is_the_users(site):
    site.backend("a", ())
    module = site.wheel("m", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        catalog.backends(refresh=True)
    (site.folder / f"{module}.py").write_text("raise RuntimeError('now an error')\n")
    assert record("m").state == "broken"


NOT_DESCRIPTIONS = {
    "SPEC = 42": "is a int; allowed: a megamoe.protocol.BackendSpec",
    "def SPEC(): raise AssertionError('called')": "is a function; allowed",
    "from megamoe.protocol import BackendSpec as SPEC": "is a type; allowed",
}


@pytest.mark.parametrize("source", NOT_DESCRIPTIONS)
def test_only_a_description_is_taken(site, source):
    site.wheel("m", source)
    r = record("m")
    assert (r.state, r.exception) == ("broken", None)
    assert NOT_DESCRIPTIONS[source] in words(r)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"protocol": (1,)}, "its protocol is (1,)"),
        ({"protocol": "1.0"}, "its protocol is '1.0'"),
        ({"archs": [(9, 0)]}, "its archs are [(9, 0)]"),
        ({"archs": ((9, "0"),)}, "its archs are ((9, '0'),)"),
        ({"archs": (9, 0)}, "its archs are (9, 0)"),
        ({"factory": "module.Class"}, "its factory is 'module.Class'"),
    ],
)
def test_a_description_with_wrong_fields_is_broken(site, fields, word):
    site.backend("m", **fields)
    r = record("m")
    assert r.state == "broken"
    assert word in words(r)


def test_a_description_under_another_name_is_broken(site):
    module = site.backend("inner", ())
    site.info("other", entries=f"[megamoe.backends]\nouter = {module}:SPEC\n")
    assert record("inner").state == "ok"
    assert "named 'inner'; allowed: its entry-point name 'outer'" in words(record("outer"))


@pytest.mark.parametrize(("protocol", "upgrade"), [((1, 1), "megamoe-core"), ((2, 0), "megamoe-core"), ((0, 9), "planted-m")])
def test_another_protocol_is_incompatible_and_names_what_to_upgrade(site, protocol, upgrade):
    site.backend("m", (), protocol=protocol)
    r = record("m")
    assert r.state == "incompatible"
    assert f"protocol {protocol[0]}.{protocol[1]}; this megamoe-core speaks 1.0 to 1.0" in words(r)
    assert f"pip install --upgrade {upgrade})" in words(r)


REQUIREMENTS = {
    "absent": (["nowhere>=2"], ["needs nowhere>=2, which is not installed"]),
    "too old": (["torch>=2.13"], ["needs torch>=2.13, found 2.9.1+cu130"]),
    "too new": (["nvidia-cutlass-dsl>=4.7,<4.8"], ["needs nvidia-cutlass-dsl<4.8,>=4.7, found 4.8.0rc1"]),
    "all of them": (["nowhere", "torch==1"], ["needs nowhere, which is not installed", "needs torch==1, found 2.9.1+cu130"]),
    "unreadable": (["torch=>2"], ["planted-m has a requirement that cannot be read: 'torch=>2'"]),
    "other core": (["megamoe-core==0.0.7"], ["needs megamoe-core==0.0.7, found 0.1.0"]),
}


@pytest.mark.parametrize("kind", REQUIREMENTS)
def test_unmet_requirements_are_found_before_the_import(site, kind):
    requires, expected = REQUIREMENTS[kind]
    site.info("torch", "2.9.1+cu130")
    site.info("nvidia-cutlass-dsl", "4.8.0rc1")
    module = site.backend("m", (), requires=requires)
    r = record("m")
    assert r.state == "incompatible"
    assert [reason.text for reason in r.reasons] == expected
    assert all(reason.hint for reason in r.reasons)
    assert module not in sys.modules


def test_met_requirements_extras_and_other_platforms_do_not_matter(site):
    site.info("torch", "2.13.0+cpu")
    site.info("nvidia-cutlass-dsl", "4.8.0rc1")
    needs = ["torch>=2.9", "NVIDIA_cutlass.dsl<4.9", 'nowhere; extra == "cu13"', 'nowhere; sys_platform == "plan9"', "megamoe-core==0.1.0"]
    site.backend("m", (), requires=needs)
    assert record("m").state == "ok"


def test_two_distributions_with_one_name_are_ambiguous_and_neither_is_loaded(site, tmp_path):
    second = Site(tmp_path / "elsewhere")
    sys.path.append(str(second.folder))
    loaded = [site.backend("sm90", (), dist="kernels-a", version="1.2"), second.backend("sm90", (), dist="kernels-b", version="3.4")]
    r = record()
    assert r.state == "ambiguous"
    text = words(r)
    for part in (
        "kernels-a 1.2",
        "kernels-b 3.4",
        str(site.folder),
        str(second.folder),
        "pip uninstall kernels-a",
        "pip uninstall kernels-b",
    ):
        assert part in text
    assert {d.name for d in r.distributions} == {"kernels-a", "kernels-b"}
    assert not set(loaded) & set(sys.modules)


def test_nobody_else_can_be_reference_unnoticed(site):
    site.backend("reference", (), dist="impostor")
    assert record("reference").state == "ambiguous"


def test_disabled_is_decided_before_anything_else(site, monkeypatch):
    monkeypatch.setenv("MEGAMOE_DISABLE", " m , unknown")
    module = site.wheel("m", "raise AssertionError('imported')", requires=["nowhere"])
    r = record("m")
    assert (r.state, r.reasons[0].hint) == ("disabled", "take m out of MEGAMOE_DISABLE")
    assert module not in sys.modules


@pytest.mark.parametrize("order", list(itertools.permutations(["sm120", "sm90", "sm100"])))
def test_order_is_by_name_whatever_the_file_system_says(site, order):
    for i, name in enumerate(order):
        site.backend(name, (), dist=f"{'cab'[i]}-kernels")
    assert [r.name for r in catalog.backends(refresh=True)] == ["reference", "sm90", "sm100", "sm120"]


def test_remembered_until_refreshed(site):
    before = catalog.backends(refresh=True)
    site.backend("late", ())
    assert catalog.backends() is before
    assert [r.name for r in catalog.refresh()] == ["late", "reference"]
    assert [r.name for r in catalog.backends()] == ["late", "reference"]


def test_a_wheel_that_asks_for_the_list_while_it_is_made_is_broken(site):
    site.wheel("m", "import megamoe.catalog\nmegamoe.catalog.backends()\n")
    site.backend("n", ())
    assert "while that list was being made" in words(record("m"))
    assert record("n").state == "ok"


def test_entry_points_that_cannot_be_decoded_hurt_nobody(site):
    (site.info("alien") / "entry_points.txt").write_bytes(b"[megamoe.backends]\n\xff\xfe = x:y\n")
    site.backend("n", ())
    assert {r.name: r.state for r in catalog.backends(refresh=True)} == {"n": "ok", "reference": "ok"}
