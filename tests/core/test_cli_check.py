"""`megamoe check`: passes what is right, finds what is wrong, and says what it could not try."""

import json
import re
from dataclasses import replace

import pytest

from megamoe import MoEProblem, catalog, select
from megamoe.catalog import Record
from megamoe.cli import check, codes, main
from megamoe.formats import FORMATS, fp8_block128
from megamoe.protocol import BackendSpec, Reason, Verdict
from megamoe.reference import SPEC, arithmetic
from megamoe.reference.backend import ReferenceBackend

from .drop_trees import PACKAGES, PLAIN, edit, make_wheel, write_tree


def findings(capsys, *arguments):
    code = main(["check", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    return code, {(f["backend"], f["step"], f["what"]): f for f in found["findings"]}, found


def test_reference_is_right_in_every_format(capsys):
    code, found, document = findings(capsys, "--backend", "reference")
    assert code == codes.OK
    assert {what for _, step, what in found if step == "run"} == set(FORMATS)
    assert {f["result"] for f in found.values()} == {"passed"}
    assert document["ran"] == ["reference"]


def test_several_ranks_with_one_that_brings_nothing(capsys):
    code, found, _ = findings(capsys, "--backend", "reference", "--ranks", "3", "--format", "fp8_block128")
    assert code == codes.OK
    detail = found["reference", "run", "fp8_block128"]["detail"]
    assert detail.startswith(f"{64 + 0 + 50} tokens on ")
    assert re.search(r" [1-9][\d.]* ms on the slowest of 3 ranks, [1-9][\d.]* KiB on the wire .*, imbalance 1\.\d\d$", detail)


def test_an_error_in_the_layer_is_found(capsys, monkeypatch):
    right = arithmetic.swiglu
    monkeypatch.setattr(arithmetic, "swiglu", lambda *values: right(*values) * 1.03)
    code, found, document = findings(capsys, "--backend", "reference", "--format", "bf16")
    assert code == codes.FAILED
    assert document["ok"] is False
    assert "relative L2 error" in found["reference", "run", "bf16"]["detail"]


def test_an_error_in_a_format_is_found(capsys, monkeypatch):
    made = fp8_block128.make(FORMATS["fp8_block128"])
    right = type(made).quantize
    # Data quantized with one scale, values read back with another: the layer stays consistent, its numbers do not.
    monkeypatch.setattr(type(made), "quantize", lambda self, values, **more: right(self, values * 1.03, **more))
    code, found, _ = findings(capsys, "--backend", "reference", "--format", "fp8_block128")
    assert code == codes.FAILED
    assert found["reference", "run", "fp8_block128"]["result"] == "failed"


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these records are what is installed."""

    def pretend(*records):
        monkeypatch.setattr(catalog, "backends", lambda refresh=False: records)

    return pretend


GPU = BackendSpec(
    name="gpu", protocol=(1, 0), archs=((9, 0),), formats=("bf16",), summary="", factory="megamoe.reference.backend:ReferenceBackend"
)


def test_what_this_machine_lacks_is_skipped_with_its_reason_and_exit_code(capsys, installed):
    installed(Record("gpu", "unavailable", (Reason("needs compute capability 9.0, found no GPU"),), GPU))
    code, found, _ = findings(capsys, "--backend", "gpu")
    assert code == codes.NOTHING_SUITABLE
    assert found["gpu", "import", ""]["result"] == "passed"
    assert found["gpu", "compile", "bf16"]["result"] == "skipped"
    assert found["gpu", "run", ""]["detail"] == "needs compute capability 9.0, found no GPU"


@pytest.mark.parametrize("state", ["broken", "incompatible", "ambiguous"])
def test_a_damaged_installation_fails_and_the_others_are_still_checked(capsys, installed, state):
    installed(Record("bad", state, (Reason("something is wrong", "repair it"),)), Record("reference", "ok", (), SPEC))
    code, found, document = findings(capsys, "--format", "bf16")
    assert code == codes.FAILED
    assert found["bad", "installed", ""]["detail"] == "something is wrong (fix: repair it)."
    assert document["ran"] == ["reference"]


def test_a_backend_that_cannot_be_created_fails_in_its_import(capsys, installed, monkeypatch):
    installed(Record("reference", "ok", (), SPEC))

    def refuse(name):
        raise OSError("libcuda is not what it seems")

    monkeypatch.setattr(select, "load_backend", refuse)
    code, found, _ = findings(capsys)
    assert code == codes.FAILED
    assert "libcuda is not what it seems" in found["reference", "import", ""]["detail"]
    assert ("reference", "run", "bf16") not in found


def test_compile_goes_through_the_requests_of_the_plan(monkeypatch):
    from megamoe.compile import obtain as obtaining

    class Precompiling(ReferenceBackend):
        def kernels(self, plan, arch=None):
            return (("kernel", plan.problem.format), ("other", plan.problem.format))

    asked = []

    def obtain(request):
        asked.append(request)
        return obtaining.Obtained(request, "", b"", hit=request[0] == "other", seconds=1.0)

    monkeypatch.setattr(obtaining, "obtain", obtain)
    problem = MoEProblem(experts=4, top_k=2, hidden=64, intermediate=64, max_tokens=5, format="bf16")
    assert check._compile(Precompiling(), problem, 1) == "2 kernels, 1 of them from the cache"
    assert asked == [("kernel", "bf16"), ("other", "bf16")]


def test_a_format_that_a_backend_lacks_is_said(capsys, installed):
    installed(Record("gpu", "ok", (), GPU))
    code, found, _ = findings(capsys, "--backend", "gpu", "--format", "mxfp8")
    assert code == codes.NOTHING_SUITABLE
    assert found["gpu", "run", "mxfp8"]["result"] == "skipped"
    assert found["gpu", "run", "mxfp8"]["detail"] == "it has no mxfp8; its formats: bf16"


class OneRank(ReferenceBackend):
    """Refuses more, as a backend may."""

    def supports(self, problem, ranks=1):
        return Verdict((Reason(f"{ranks} ranks; it runs on one"),)) if ranks > 1 else super().supports(problem, ranks)


def test_ranks_that_a_backend_refuses_are_skipped_with_its_reason(capsys, installed, monkeypatch):
    installed(Record("gpu", "ok", (), GPU))
    monkeypatch.setattr(select, "load_backend", lambda name: OneRank())
    code, found, _ = findings(capsys, "--backend", "gpu", "--ranks", "2")
    assert code == codes.NOTHING_SUITABLE
    assert found["gpu", "run", "bf16"]["result"] == "skipped"
    assert found["gpu", "run", "bf16"]["detail"] == "2 ranks; it runs on one"


def test_unknown_names_are_usage_errors(capsys):
    assert main(["check", "--format", "fp9"]) == codes.USAGE
    assert main(["check", "--ranks", "0"]) == codes.USAGE
    assert main(["check", "--seed", str(2**64)]) == codes.USAGE
    assert main(["check", "--backend", "sm35"]) == codes.NOTHING_SUITABLE
    error = capsys.readouterr().err
    assert "fp8_block128" in error
    assert "No backend named 'sm35'" in error


def test_a_kernel_file_edited_by_hand_is_found(capsys, installed, monkeypatch, tmp_path):
    from megamoe.drop import locate
    from megamoe.drop.update import update

    spec = replace(GPU, factory="acme_kernels.backend:Backend")
    installed(Record("gpu", "unavailable", (Reason("no such GPU"),), spec))
    monkeypatch.setattr(select, "load_backend", lambda name: ReferenceBackend())
    wheel = make_wheel(tmp_path)
    update(wheel, write_tree(tmp_path / "source", PLAIN), PACKAGES)
    (wheel / "shim").mkdir()
    (wheel / "shim" / "__init__.py").touch()
    (wheel / "shim" / "contract.toml").write_text("schema = 1\n")
    monkeypatch.setattr(locate, "installed_drops", lambda: [wheel])
    assert findings(capsys)[1]["gpu", "drop", ""]["detail"].startswith("7 kernel files, verbatim; ")
    edit(wheel / "_drop" / "common" / "constants.py", b"BLOCK = 32", b"BLOCK = 64")
    code, found, _ = findings(capsys)
    assert code == codes.FAILED
    assert found["gpu", "drop", ""]["result"] == "failed"
    assert "constants.py" in found["gpu", "drop", ""]["detail"]
