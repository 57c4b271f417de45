"""Rewriting without a GPU: what is refused, how elected regions are cut, and that everything assembles for sm_90a."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from megamoe.emulation import Options, assemble, rewrite
from megamoe.emulation.assemble import _registers, kept, tool
from megamoe.emulation.ptx import Kind, parse
from megamoe.emulation.regions import find_regions
from megamoe.emulation.table import FORMS, find
from megamoe.errors import EmulationError, InvalidInput, UnsupportedInstruction

from . import kernels


@pytest.fixture
def cache(monkeypatch, tmp_path_factory):
    """One cache for all tests of this file, away from the user's."""
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulation-cache"))


@pytest.mark.parametrize("name", kernels.ALL)
def test_the_test_kernels_are_legal_on_their_own_architecture(toolkit, tmp_path, name):
    source, target = tmp_path / "kernel.ptx", kernels.ALL[name].split(".target ")[1].split()[0]
    source.write_text(kernels.ALL[name])
    subprocess.run([str(tool("ptxas")), f"-arch={target}", str(source), "-o", str(tmp_path / "kernel.cubin")], check=True)


# Nothing in a conversion can be delayed.
@pytest.mark.parametrize(("name", "seed"), [(n, s) for n in kernels.ALL for s in (None, 1) if not (s and n.startswith("convert"))])
def test_every_kernel_is_rewritten_and_assembled(toolkit, cache, name, seed):
    rewritten = rewrite(kernels.ALL[name], Options(seed=seed))
    assert rewritten.forms or name == "bulk store"  # which is delayed, not replaced
    assert assemble(rewritten).startswith(b"\x7fELF")


def test_every_form_of_the_table_is_in_a_kernel_and_has_its_test():
    used = {form for text in kernels.ALL.values() for form in rewrite(text).forms}
    used |= set(rewrite(kernel("setmaxnreg.dec.sync.aligned.u32 40;\n\tgriddepcontrol.launch_dependents;")).forms)
    assert used == {form.name for form in FORMS}
    for form in FORMS:
        assert (Path(__file__).parent / form.test).exists(), form.name


def test_every_form_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "emulation.md").read_text()
    for form in FORMS:
        assert f"| {form.name} |" in page, form.name


def kernel(body: str) -> str:
    return kernels.kernel("sm_100a", "u64 d", f"\t{body}\n")


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.shift.cta_group::1.down [%r1];",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r1, %r2}, %r3, [%r4];",
        "tcgen05.cp.cta_group::1.4x256b [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r1], %rd1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 3;",
        "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32 {%f1, %f2}, {%r1, %r2}, {%r5, %r6}, {%f1, %f2};",
        "cvt.rn.satfinite.e2m1x4.f32 %rs1, {%f1, %f2, %f3, %f4};",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col::w.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r3}], [%r4];",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd1, {%r2, %r3, %r3, %r3, %r3}], [%r4];",
        "tensormap.replace.tile.elemtype.global.b1024.b32 [%rd1], 13;",
    ],
)
def test_what_has_no_replacement_is_refused_with_its_line(instruction):
    text = kernel(instruction)
    with pytest.raises(UnsupportedInstruction) as raised:
        rewrite(text)
    assert raised.value.line == next(i for i, line in enumerate(text.splitlines(), 1) if instruction in line)
    assert instruction.split(" ")[0] in str(raised.value)


def test_what_ptxas_refuses_is_refused_with_its_line(toolkit, cache):
    text = kernel("mov.b32 %r1, 0;\n\tfence.proxy.async::generic.acquire.sync_restrict::nothing %r1;")
    with pytest.raises(UnsupportedInstruction) as raised:
        assemble(rewrite(text))
    assert "sync_restrict::nothing" in text.splitlines()[raised.value.line - 1]


def dynamic_shared(code: bytes) -> tuple[int, int]:
    """Size and alignment of a kernel's static shared memory, behind which the dynamic one lies, out of its ELF image."""
    at, size, count, names = int.from_bytes(code[40:48], "little"), *(int.from_bytes(code[i : i + 2], "little") for i in (58, 60, 62))
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, at + size * i) for i in range(count)]
    strings = headers[names][4]
    found = [h for h in headers if code[strings + h[0] :].startswith(b".nv.shared.kernel\0")]
    return found[0][5], found[0][8]


def test_dynamic_shared_memory_is_aligned_behind_static_one(toolkit, cache):
    """The linker would put it right behind."""
    static = kernel("mov.u32 %r1, own;").replace(".extern .shared", ".shared .align 8 .b8 own[40];\n.extern .shared")
    for text in (static, static.replace("\tret;", "\ttcgen05.fence::before_thread_sync;\n\tret;")):
        size, alignment = dynamic_shared(assemble(rewrite(text)))
        assert alignment == 1024
        assert size % 1024 == 0


@pytest.mark.parametrize(
    ("directives", "registers"),
    [
        (".reqntid 384, 1, 1", 128),
        (".maxntid 512", 128),
        (".maxntid 32, 32", 64),
        (".reqntid 256, 1, 1\n.minnctapersm 3", 64),
        ("", 64),
    ],
)
def test_device_functions_leave_every_kernel_its_threads(directives, registers):
    assert _registers(kernels.kernel("sm_100a", "u64 d", "", directives)) == registers


def test_a_damaged_file_in_the_cache_is_built_again(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    built = []

    def build(folder):
        built.append(folder)
        return b"code"

    for damage in (lambda path: None, lambda path: path.write_bytes(b"cod"), lambda path: path.unlink()):
        assert kept("f" * 64, {"name": "test"}, build) == b"code"
        damage(tmp_path / "emulation" / f"{'f' * 64}.o")
    assert kept("f" * 64, {"name": "test"}, build) == b"code"
    assert len(built) == 3
    assert not any(folder.exists() for folder in built)


def test_instructions_of_sm_90a_stay():
    text = kernel("add.f32 %f1, %f2, %f3;\n\tcp.async.bulk.commit_group;\n\tmax.f32 %f1, %f2, %f3;")
    rewritten = rewrite(text)
    assert not rewritten.forms
    for line in text.splitlines():
        if line.startswith("\t") and "ret;" not in line:
            assert line in rewritten.text


@pytest.mark.parametrize("target", ["sm_90a", "sm_89"])
def test_other_architectures_are_refused(target):
    with pytest.raises(EmulationError, match=target):
        rewrite(kernel("ret;").replace("sm_100a", target))


def test_options_are_checked():
    for wrong in ({"seed": 0}, {"limit_ms": 0}, {"seed": 2**32}):
        with pytest.raises(InvalidInput):
            Options(**wrong)


# ---- regions of one elected thread ----

ELECTED = """elect.sync %r1|%p1, -1;
	not.pred %p2, %p1;
	@%p2 bra $end;
	{before}
	tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd1, %rd2, %r3, %p3;
	{between}
	tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd1, %rd2, %r3, %p3;
	{after}
$end:"""


def regions(before="", between="", after="", rest=""):
    module = parse(kernel(ELECTED.format(before=before, between=between, after=after) + rest))
    function = next(iter(module.functions()))
    return find_regions(
        module.statements,
        function.start,
        function.end,
        lambda s: find(s.instruction)[0].name == "tcgen05.mma" if find(s.instruction) else False,
    )


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"before": "@%p4 bra $x; mov.b32 %r5, 1; $x: mov.b32 %r6, 1;"},  # a branch that stays before the first cut
        {"between": "$again: add.u32 %r5, %r5, 1; @%p4 bra $again;"},  # a loop between two cuts
        {"after": "{ .reg .pred P; L: mbarrier.try_wait.parity.shared.b64 P, [%r1], 0; @!P bra L; }"},
        {"rest": "\n\tbra $end;"},
    ],
)
def test_regions_that_are_cut(parts):
    (region,) = regions(**parts)
    assert len(region.cuts) == 2


@pytest.mark.parametrize(
    "parts",
    [
        {"before": "@%p4 bra $x;", "between": "$x:"},  # an operation that is not always reached
        {"before": "$again:", "after": "@%p4 bra $again;"},  # a loop around the operations
        {"between": "@%p4 bra $end;"},
        {"before": "$x:", "rest": "\n\tbra $x;"},  # a way in from outside
        {"between": "bar.sync 0;"},
        {"between": "setp.eq.u32 %p2, %r5, 0;"},  # the guard changes
        {"before": "{", "between": "}"},  # inside a block of its own
    ],
)
def test_regions_that_are_not_cut(parts):
    assert regions(**parts) == []


def test_an_operation_in_a_region_that_cannot_be_cut_is_done_by_its_thread():
    rewritten = rewrite(kernel(ELECTED.format(before="$again:", between="", after="@%p4 bra $again;")))
    assert len(rewritten.notes) == 2
    assert "one thread" in rewritten.notes[0]


def test_lines_of_the_source_are_kept():
    text = kernels.ALL["mma f16"]
    rewritten = rewrite(text)
    lines = rewritten.text.split("\n")
    assert len(rewritten.lines) == len(lines)
    source = text.splitlines()
    calls = [i for i, line in enumerate(lines) if "megamoe_mma," in line]
    assert len(calls) == 2
    for call in calls:
        assert "tcgen05.mma" in source[rewritten.lines[call] - 1]
    kept = parse(rewritten.text)
    assert sum(s.kind is Kind.INSTRUCTION for s in kept.statements) > len(source)


def test_inline_assembly_around_an_operation_for_the_warp_is_opened():
    """CuTe DSL writes block-scaled products in blocks with a predicate of their own; one thread alone would take seconds for each."""
    plain = kernels.mma("mxf4nvf4", 128, 2, block=".block16")
    wrapped = re.sub(
        r"\t(tcgen05\.mma.*), %p7;\n",
        "\tselp.b32 %r60, 1, 0, %p7;\n\t{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %r60, 0;\n\t\\1, p;\n\t}\n",
        plain,
    )
    assert wrapped.count(".reg .pred p;") == 2
    rewritten = rewrite(wrapped)
    assert rewritten.notes == ()
    assert rewritten.text.count("call megamoe_mma") == 2
    assert "setp.ne.b32 p," not in rewritten.text  # both blocks' registers have names of their own


def test_inline_assembly_with_labels_stays():
    body = kernels.mma("f16", 64).replace("\ttcgen05.mma", "\t{\n\tbra here;\nhere:\n\ttcgen05.mma").replace(", %p7;\n", ", %p7;\n\t}\n")
    assert any("one thread" in note for note in rewrite(body).notes)
