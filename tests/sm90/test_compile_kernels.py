"""Every kernel that the heuristic can choose compiles for sm_90a without a GPU, into the machine code that it is meant to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from megamoe.bench.workloads import SHAPES, Shape
from megamoe.compile import cubin, toolchain
from megamoe.compile.obtain import obtain
from megamoe.compile.store import Store
from megamoe.problem import SwiGLU
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.shim.knobs import variants_of
from megamoe_sm90.shim.ranks import Choice, RanksVariant
from megamoe_sm90.shim.variants import Operands, Variant

MAX_TOKENS = 8192
LAUNCH_REGISTERS = 168  # 65536 registers over 384 threads; the kernels hand them out anew between their roles

# Shapes whose K loops unroll differently, and whose last tiles are partial (2880 = 11.25 x 256).
FORMATS = {"fp8_block128": ("dsv3", "qwen30b"), "fp8_tensor": ("dsv4",), "fp8_tensor_e5m2": ("qwen235b",), "bf16": ("gpt-oss",)}


def cases():
    """(name, variant): all rungs of every format from bf16, then what else changes the code, once in each order."""
    backend = Sm90Backend()
    for format, names in FORMATS.items():
        for name in names:
            problem = SHAPES[name].problem(MAX_TOKENS, format)
            for variant in variants_of(problem, backend.plan(problem).detail, Operands()):
                yield f"{format} {name}", variant
    plain = Shape("small", 8, 2, 512, 256, SwiGLU())
    extras = {
        "quantized x": ("fp8_block128", Operands(quantized=True), {}),
        "quantized x, one scale": ("fp8_tensor", Operands(quantized=True), {}),
        "biases": ("bf16", Operands(b13=True, b2=True), {"activation": SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)}),
        "early weights": ("fp8_block128", Operands(), {"routing_weight": "early"}),
        "other GPU": ("fp8_block128", Operands(sms=78), {}),
    }
    for what, (format, operands, changes) in extras.items():
        base = plain.problem(MAX_TOKENS, format)
        problem = type(base)(**{**{f: getattr(base, f) for f in base.__dataclass_fields__}, **changes})
        rungs = backend.plan(problem).detail
        for variant in variants_of(problem, (rungs[0], rungs[-1]), operands):
            yield what, variant


@pytest.mark.parametrize(("what", "variant"), [pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in cases()])
def test_machine_code(what, variant, opcodes, tmp_path):
    got = obtain(variant.request(), Store(tmp_path))
    (image,) = cubin.images(got.object)
    (used,) = cubin.resources(image)
    code = opcodes(image)
    products = sum(n for op, n in code.items() if op.startswith("HGMMA" if variant.config.fmt == "bf16" else "QGMMA"))
    waits = sum(n for op, n in code.items() if op.startswith("WARPGROUP.DEPBAR"))
    local = {op: n for op, n in code.items() if op.startswith(("LDL", "STL"))}
    assert products >= 8, code
    # ptxas waits after every product when it cannot prove that accumulators are safe (its warning C7514): then nothing overlaps.
    assert waits < products, f"{waits} waits for {products} products: serialized"
    assert any(op.startswith("UTMALDG") for op in code), "no bulk tensor loads"
    assert not local, "registers spill"
    assert used.stack_bytes == 0
    assert used.registers <= LAUNCH_REGISTERS
    assert variant.shared_bytes <= 232448


def test_every_choice_of_the_heuristic_is_compiled_here():
    """Otherwise a new rung would go untested: what plans choose for the benchmark shapes is in the list above, up to its sizes."""

    def kinds(shape, format):
        problem = shape.problem(MAX_TOKENS, format)
        return {(r.order, r.tile, r.rows) for r in Sm90Backend().plan(problem).detail}

    compiled = {(v.order, v.tile, getattr(v.config, "rows", "") if v.order == "native" else "") for _, v in cases()}
    for shape in SHAPES.values():
        for format in FORMATS:
            if Sm90Backend().supports(shape.problem(MAX_TOKENS, format)):
                assert kinds(shape, format) <= compiled


def of_one_rank(order, tile, rows, pdl):
    problem = Shape("small", 8, 2, 512, 256, SwiGLU()).problem(64, "fp8_block128")
    return Variant.of(problem, order, tile, rows, 64, Operands(), pdl=pdl)


def of_several(combine, pdl):
    problem = Shape("small", 8, 2, 512, 256, SwiGLU()).problem(64, "fp8_block128")
    return RanksVariant.of(problem, 2, Choice(tile=128, combine=combine, pdl=pdl), Operands())


PDL = {
    "pool": (of_one_rank, "native", 128, "pool"),
    "gather": (of_one_rank, "native", 64, "gather"),
    "swap": (of_one_rank, "swap", 16, ""),
    "ranks": (of_several, "routes"),
    "grouped ranks": (of_several, "grouped"),
}
# Whatever may touch global memory; the maps of tensors are parameters of the launch itself.
ACCESS = re.compile(
    r"(ld|st|red|atom|cp|prefetch|prefetchu|multimem|applypriority|discard)\.(?!shared|param|local|tensormap|async\.m?barrier)"
)


def ptx_of(variant, folder):
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, KeepPTX

    kernel, arguments = variant.request().build()
    options = (*toolchain.options(variant.request().arch), KeepPTX(), DumpDir(str(folder)))
    ptx = cute.compile[options](kernel, *arguments).__ptx__
    return ptx if ".target" in ptx else Path(ptx.strip("\0 \n")).read_text()


def steps_of(ptx):
    """Instructions and labels of the kernel, in order."""
    lines = (re.sub(r"^[{\s]*(@!?%?p\d*\s+)?", "", line) for line in re.split("[;\\n]", ptx[ptx.index(".entry") :]))
    return [line for line in lines if line and not line.startswith((".", "//", "}", "("))]


@pytest.mark.parametrize("case", PDL)
def test_launches_that_may_overlap_wait_before_they_touch_memory(case, tmp_path):
    make, *given = PDL[case]
    steps = steps_of(ptx_of(make(*given, pdl=True), tmp_path))
    (wait,) = (i for i, step in enumerate(steps) if step.startswith("griddepcontrol.wait"))
    assert sum(step.startswith("griddepcontrol.launch_dependents") for step in steps) == 1
    touched = [i for i, step in enumerate(steps) if ACCESS.match(step)]
    assert len(touched) > 50
    assert touched[0] > wait, steps[touched[0]]
    # Nothing before the wait jumps past it, so every thread waits.
    labels = {step.rstrip(":"): i for i, step in enumerate(steps) if step.endswith(":")}
    jumps = [step.split()[-1] for step in steps[:wait] if step.startswith("bra")]
    assert jumps
    assert all(labels[target] < wait for target in jumps)
    assert not any(step.startswith(("ret", "exit", "brx")) for step in steps[:wait])


def test_other_launches_do_not(tmp_path):
    make, *given = PDL["pool"]
    assert "griddepcontrol" not in ptx_of(make(*given, pdl=False), tmp_path)
