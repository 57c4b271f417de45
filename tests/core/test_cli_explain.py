"""`megamoe explain`: the choice and its reasons, plans of backends that cannot run here, presets and options."""

import json

import pytest

from megamoe import SwiGLU, catalog, nvml, select
from megamoe.catalog import Record
from megamoe.cli import codes, main
from megamoe.presets import PRESETS
from megamoe.protocol import BackendSpec, Plan, Reason, Region
from megamoe.reference import SPEC
from megamoe.reference.backend import ReferenceBackend

HOPPER = BackendSpec(
    name="sm90", protocol=(1, 0), archs=((9, 0),), formats=("bf16",), summary="", factory="megamoe_sm90.backend:Sm90Backend"
)
FAMILY = BackendSpec(
    name="sm120", protocol=(1, 0), archs=((12, None),), formats=("bf16",), summary="", factory="megamoe_sm120.backend:Sm120Backend"
)
NO_GPU = Reason("needs compute capability 9.0, found no GPU", "use a machine that has one")


class Planning(ReferenceBackend):
    """A backend with a plan worth printing."""

    def plan(self, problem, *, ranks=1, knobs=None):
        regions = (Region("pool", 3 << 20, "symmetric", "received rows"), Region("stage", 1 << 20))
        told = {"stages": 4, **(knobs or {})}
        return Plan(
            "sm90", "0.1.0", problem, ranks, knobs=told, regions=regions, budgets={"shared_memory_bytes": 231424},
            bounds={"weights": 79.25}, properties=("bitwise repeatable",), detail=object(),
        )  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Two GPU wheels beside the reference, on a machine without a GPU."""
    records = (
        Record("reference", "ok", (), SPEC),
        Record("sm90", "unavailable", (NO_GPU,), HOPPER),
        Record("sm120", "unavailable", (NO_GPU,), FAMILY),
    )
    monkeypatch.setattr(catalog, "backends", lambda refresh=False: records)
    monkeypatch.setattr(nvml, "gpus", lambda refresh=False: nvml.Gpus(problem="no NVIDIA driver"))
    monkeypatch.setattr(select, "load_backend", lambda name: ReferenceBackend() if name == "reference" else Planning())
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)
    monkeypatch.delenv("MEGAMOE_ARCH", raising=False)


def explained(capsys, *arguments):
    code = main(["explain", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    return code, found, {entry["name"]: entry for entry in found["backends"]}


@pytest.mark.usefixtures("machine")
class TestChoice:
    def test_the_machine_decides(self, capsys):
        code, found, entries = explained(capsys)
        assert code == codes.OK
        assert (found["chosen"], found["why"]) == ("reference", "no GPU is visible")
        assert entries["sm90"]["against"] == [str(NO_GPU)]
        assert [name for name, entry in entries.items() if entry["chosen"]] == ["reference"]

    def test_an_argument_decides_and_the_plan_needs_no_gpu(self, capsys):
        code, found, entries = explained(capsys, "--backend", "sm90", "--knob", "stages=6", "--knob", "fold=true", "--knob", "mode=wide")
        assert code == codes.OK
        assert (found["chosen"], found["why"]) == ("sm90", "named by --backend")
        plan = entries["sm90"]["plan"]
        assert plan["knobs"] == {"stages": 6, "fold": True, "mode": "wide"}
        assert plan["regions"][0] == {"name": "pool", "nbytes": 3 << 20, "kind": "symmetric", "purpose": "received rows"}
        assert plan["bounds"] == {"weights": 79.25}
        assert "detail" not in plan
        assert entries["reference"]["against"]

    @pytest.mark.parametrize(("arch", "backend"), [("sm_90a", "sm90"), ("sm_120a", "sm120"), ("sm_121", "sm120")])
    def test_an_architecture_decides(self, capsys, arch, backend):
        _, found, _ = explained(capsys, "--arch", arch)
        assert (found["chosen"], found["why"]) == (backend, f"made for {arch}")

    def test_the_environment_decides(self, capsys, monkeypatch):
        monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
        assert explained(capsys)[1]["why"] == "named by MEGAMOE_BACKEND"
        monkeypatch.delenv("MEGAMOE_BACKEND")
        monkeypatch.setenv("MEGAMOE_ARCH", "sm_90a")
        assert explained(capsys)[1]["chosen"] == "sm90"

    def test_what_cannot_run_is_named_with_what_is_against_it(self, capsys, monkeypatch):
        monkeypatch.setenv("MEGAMOE_BACKEND", "sm90")
        code, found, _ = explained(capsys)
        assert code == codes.OK  # its plan is there, although this machine cannot run it
        assert found["chosen"] == "sm90"
        assert str(NO_GPU) in found["why"]

    def test_nothing_is_made_for_an_old_gpu(self, capsys):
        code, found, _ = explained(capsys, "--arch", "sm_70")
        assert code == codes.NOTHING_SUITABLE
        assert (found["chosen"], found["why"]) == (None, "no installed backend is made for sm_70")

    def test_the_text_has_every_part_of_the_plan(self, capsys):
        assert main(["explain", "--backend", "sm90"]) == codes.OK
        text = " ".join(capsys.readouterr().out.split())
        for part in (
            *("knob stages 4", "budget shared_memory_bytes 231,424", "at least, for weights 79.2 us", "property bitwise repeatable"),
            *("Against reference", "total symmetric 3,145,728 3.0 MiB", "total local 1,048,576 1.0 MiB", "total 4,194,304 4.0 MiB"),
        ):
            assert part in text


def test_a_problem_that_the_chosen_backend_refuses_ends_with_3_and_every_reason(capsys):
    code, _, entries = explained(capsys, "--backend", "reference", "--model", "gpt-oss-120b", "--format", "fp8_block128", "--ranks", "3")
    assert code == codes.NOTHING_SUITABLE
    assert entries["reference"]["plan"] is None
    against = " ".join(entries["reference"]["against"])
    assert all(part in against for part in ("hidden=2880", "intermediate=2880", "128 experts do not divide by 3 ranks"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_problem_that_the_reference_can_plan(capsys, name):
    code, found, _ = explained(capsys, "--backend", "reference", "--model", name)
    assert code == codes.OK
    assert found["problem"]["experts"] == PRESETS[name].experts


def test_presets_have_the_published_shapes():
    shapes = {name: (p.experts, p.top_k, p.hidden, p.intermediate) for name, p in PRESETS.items()}
    assert shapes == {
        "dsv3": (256, 8, 7168, 2048),
        "dsv4": (384, 6, 7168, 3072),
        "kimi-k2": (384, 8, 7168, 2048),
        "qwen3-30b": (128, 8, 2048, 768),
        "qwen3-235b": (128, 8, 4096, 1536),
        "mixtral": (8, 2, 4096, 14336),
        "gpt-oss-120b": (128, 4, 2880, 2880),
    }
    assert PRESETS["gpt-oss-120b"].activation == SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)


def test_options_change_the_model(capsys):
    _, found, _ = explained(
        capsys, "--backend", "reference", "--model", "mixtral", "--experts", "16", "--limit", "3", "--routing-weight", "early"
    )
    problem = found["problem"]
    assert (problem["experts"], problem["hidden"], problem["routing_weight"]) == (16, 4096, "early")
    assert problem["activation"] == {"limit": 3.0, "alpha": 1.0, "up_bias": 0.0}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--arch", "hopper"], "sm_90a"),
        (["--knob", "stages"], "NAME=VALUE"),
        (["--model", "gpt-2"], "dsv3"),
        (["--backend", "reference", "--knob", "stages=3"], "stages"),
        (["--limit", "-1"], "limit=-1"),
        (["--ranks", "0"], "--ranks 0; allowed: 1 or more"),
    ],
)
def test_bad_arguments_are_usage_errors_that_name_what_is_allowed(capsys, arguments, part):
    assert main(["explain", *arguments]) == codes.USAGE
    assert part in capsys.readouterr().err
