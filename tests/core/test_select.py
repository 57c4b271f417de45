"""Which backend runs: argument, environment, GPU. Nothing that was asked for by name is replaced by something else."""

import logging
import sys

import pytest
import torch

from megamoe import nvml, select
from megamoe.errors import (
    BackendAmbiguous,
    BackendBroken,
    BackendIncompatible,
    BackendNotFound,
    BackendUnavailable,
    InvalidInput,
)

from .wheels import HOPPER, WORKSTATION, Site, see_gpus, see_only


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Selection that sees an empty site folder, no GPU and no settings."""
    planted = Site(tmp_path / "site")
    see_only(monkeypatch, planted.folder)
    select._say_reference.cache_clear()
    return planted


def test_without_gpu_the_reference_runs_and_says_so_once(site, caplog):
    with caplog.at_level(logging.WARNING, logger="megamoe"):
        names = [select.get_backend(wish).spec.name for wish in (None, "auto", None)]
    assert names == ["reference"] * 3
    (said,) = caplog.messages
    assert "no GPU is visible (no NVIDIA driver)" in said


def test_the_cpu_asked_for_is_no_news(site, caplog, monkeypatch):
    see_gpus(monkeypatch, HOPPER)
    site.backend("sm90")
    with caplog.at_level(logging.WARNING, logger="megamoe"):
        assert select.get_backend(device="cpu").spec.name == "reference"
        assert select.get_backend(device=torch.device("cpu")).spec.name == "reference"
    assert not caplog.messages


def test_the_gpu_decides(site, monkeypatch):
    for name, archs in (("sm90", ((9, 0),)), ("sm120", ((12, None),))):
        site.backend(name, archs)
    see_gpus(monkeypatch, HOPPER, WORKSTATION)
    assert select.get_backend().spec.name == "sm90"
    assert select.get_backend(device=0).spec.name == "sm90"
    assert select.get_backend(device="cuda:1").spec.name == "sm120"
    assert select.get_backend(device=torch.device("cuda", 1)).spec.name == "sm120"


def test_exact_capability_comes_before_family(site, monkeypatch):
    site.backend("aaa-family", ((12, None),))
    site.backend("zzz-exact", ((12, 0),))
    see_gpus(monkeypatch, WORKSTATION)
    assert select.choose().name == "zzz-exact"


@pytest.mark.parametrize("archs", [((12, 0),), ((12, None),)])
def test_two_that_fit_equally_well_are_an_error(site, monkeypatch, archs):
    site.backend("one", archs, version="1.5")
    site.backend("two", archs, version="2.5")
    see_gpus(monkeypatch, WORKSTATION)
    with pytest.raises(BackendAmbiguous, match=r"one 1\.5 \(ok\) and two 2\.5 \(ok\) fit RTX PRO 6000 .*MEGAMOE_BACKEND=one"):
        select.get_backend()


def test_a_disabled_rival_leaves_one(site, monkeypatch):
    site.backend("one", ((12, 0),))
    site.backend("two", ((12, 0),))
    see_gpus(monkeypatch, WORKSTATION)
    monkeypatch.setenv("MEGAMOE_DISABLE", "one")
    assert select.choose().name == "two"


def test_argument_before_environment_before_gpu(site, monkeypatch):
    for name in ("a", "b"):
        site.backend(name, ())
    site.backend("sm90")
    see_gpus(monkeypatch, HOPPER)
    assert select.get_backend().spec.name == "sm90"
    monkeypatch.setenv("MEGAMOE_BACKEND", " a ")
    assert select.get_backend().spec.name == "a"
    assert select.get_backend("auto").spec.name == "a"
    assert select.get_backend("b").spec.name == "b"
    monkeypatch.setenv("MEGAMOE_BACKEND", "auto")
    assert select.get_backend().spec.name == "sm90"


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_an_unknown_name_is_an_error_that_names_what_there_is(site, monkeypatch, by):
    site.backend("sm90", version="0.1.0")
    if by == "environment":
        monkeypatch.setenv("MEGAMOE_BACKEND", "sm100")
    with pytest.raises(BackendNotFound) as caught:
        select.get_backend("sm100" if by == "argument" else None)
    text = str(caught.value)
    assert text.startswith("No backend named 'sm100'")
    assert 'pip install "megamoe-core[sm100]"' in text
    assert "sm90 0.1.0 (unavailable: needs compute capability 9.0, found no GPU (no NVIDIA driver))" in text
    assert ("MEGAMOE_BACKEND asks for it" in text) == (by == "environment")


def test_an_unknown_name_without_a_wheel_gets_no_pip_command(site):
    with pytest.raises(BackendNotFound, match="use one of: reference"):
        select.get_backend("sm9000")


def test_named_states_raise_their_own_error_with_every_reason(site, monkeypatch):
    site.backend("unavailable", more="missing='no kernel yet'")
    site.backend("incompatible", (), protocol=(2, 0))
    site.backend("disabled", ())
    site.wheel("broken", "1 / 0")
    for dist in ("one", "two"):
        site.backend("ambiguous", (), dist=dist)
    monkeypatch.setenv("MEGAMOE_DISABLE", "disabled")
    cases = {
        "unavailable": (BackendUnavailable, ["no kernel yet", "needs compute capability 9.0"]),
        "incompatible": (BackendIncompatible, ["protocol 2.0"]),
        "disabled": (BackendUnavailable, ["MEGAMOE_DISABLE lists it"]),
        "broken": (BackendBroken, ["ZeroDivisionError: division by zero"]),
        "ambiguous": (BackendAmbiguous, ["pip uninstall one", "pip uninstall two"]),
    }
    for name, (error, parts) in cases.items():
        with pytest.raises(error) as caught:
            select.get_backend(name)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
        if name == "broken":
            assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_gpu_without_its_wheel_names_the_wheel_and_never_falls_back(site, monkeypatch):
    site.backend("sm90")
    see_gpus(monkeypatch, WORKSTATION)
    with pytest.raises(BackendUnavailable) as caught:
        select.get_backend()
    text = str(caught.value)
    assert 'pip install "megamoe-core[sm120]"' in text
    assert "sm90 0.1.0 (unavailable: needs compute capability 9.0, found RTX PRO 6000 (compute capability 12.0))" in text


def test_a_gpu_whose_wheel_cannot_run_gets_the_wheels_own_fix(site, monkeypatch):
    site.backend("sm90", requires=["nowhere>=2"])
    see_gpus(monkeypatch, HOPPER)
    with pytest.raises(BackendUnavailable, match=r'needs nowhere>=2, which is not installed.*pip install "nowhere>=2"'):
        select.get_backend()


def test_a_gpu_no_wheel_is_made_for_says_so(site, monkeypatch):
    see_gpus(monkeypatch, nvml.Device(0, "A100", "GPU-3", (8, 0), 80_000_000_000))
    with pytest.raises(BackendUnavailable, match=r"no wheel is made for compute capability 8\.0; backend='reference' runs everywhere"):
        select.get_backend()


def test_reference_disabled_leaves_nothing(site, monkeypatch):
    monkeypatch.setenv("MEGAMOE_DISABLE", "reference")
    with pytest.raises(BackendUnavailable, match="MEGAMOE_DISABLE lists it"):
        select.get_backend()


def test_probe_is_the_last_word_and_gets_the_device(site):
    module = site.backend("picky", (), reasons="(Reason('driver 1.0 is too old', 'update it'), Reason('no memory'))")
    with pytest.raises(BackendUnavailable, match=r"\(1\) driver 1\.0 is too old \(fix: update it\)\. \(2\) no memory\."):
        select.get_backend("picky", device="cuda:3")
    with pytest.raises(BackendUnavailable):
        select.get_backend("picky")
    with pytest.raises(BackendUnavailable):
        select.get_backend("picky", device=2)
    asked = sys.modules[f"{module}_kernels"].Backend.asked
    assert asked == [torch.device("cuda:3"), None, torch.device("cuda:2")]


FACTORIES = {
    "exits": ("raise SystemExit(1)", "SystemExit: 1"),
    "fails": ("def Backend(): raise OSError('libcudart.so.13 not found')", "OSError: libcudart.so.13 not found"),
    "absent": ("", "AttributeError"),
    "not callable": ("Backend = 42", "TypeError: 'int' object is not callable"),
    "no backend": (
        "class Backend:\n    spec = None\n    def probe(self, device=None): ...",
        "without supports, plan, prepare_weights, open_session",
    ),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_factory_that_gives_no_backend_is_broken(site, kind):
    source, text = FACTORIES[kind]
    site.backend("m", (), factory=f"{site.module(source)}:Backend")
    assert select.choose("m").state == "ok"
    with pytest.raises(BackendBroken) as caught:
        select.get_backend("m")
    assert text in str(caught.value)
    assert "pip install --force-reinstall planted-m" in str(caught.value)


def test_a_probe_that_raises_is_broken_with_its_cause(site):
    site.backend("m", (), reasons="(1 / 0,)")
    with pytest.raises(BackendBroken, match="ZeroDivisionError") as caught:
        select.get_backend("m")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_probe_that_gives_no_verdict_is_broken(site):
    module = site.backend("m", ())
    kernels = site.folder / f"{module}_kernels.py"
    kernels.write_text(kernels.read_text().replace("return Verdict()", "return True", 1))
    with pytest.raises(BackendBroken, match=r"gives a bool; allowed: a megamoe\.protocol\.Verdict"):
        select.get_backend("m")


def test_torchs_current_gpu_counts_once_cuda_runs(site, monkeypatch):
    for name, archs in (("sm90", ((9, 0),)), ("sm120", ((12, None),))):
        site.backend(name, archs)
    see_gpus(monkeypatch, HOPPER, WORKSTATION)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert select.choose().name == "sm90"  # asking torch now would start CUDA
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert select.choose().name == "sm120"


def test_planning_needs_no_gpu_but_a_kernel(site, monkeypatch):
    site.backend("sm90")
    site.backend("sm100", ((10, 0),), more="missing='no kernel yet'")
    site.backend("off", ())
    monkeypatch.setenv("MEGAMOE_DISABLE", "off")
    assert select.load_backend("sm90").spec.name == "sm90"
    with pytest.raises(BackendUnavailable, match="no kernel yet"):
        select.load_backend("sm100")
    with pytest.raises(BackendUnavailable, match="MEGAMOE_DISABLE"):
        select.load_backend("off")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", "meta", "cuda:0:1"])
def test_a_device_that_is_none_is_invalid(site, device):
    with pytest.raises(InvalidInput, match="allowed: 'cpu', 'cuda', 'cuda:0', 0"):
        select.get_backend("reference", device=device)


def test_a_gpu_beyond_the_visible_ones_is_invalid(site, monkeypatch):
    see_gpus(monkeypatch, HOPPER, WORKSTATION)
    with pytest.raises(InvalidInput, match="2 GPU\\(s\\) are visible; allowed: 'cuda:0' to 'cuda:1'"):
        select.get_backend(device="cuda:2")


def test_a_gpu_asked_for_where_there_is_none_is_not_replaced_by_the_cpu(site):
    for name in (None, "reference"):
        with pytest.raises(BackendUnavailable, match="no GPU is visible: no NVIDIA driver"):
            select.get_backend(name, device="cuda")
