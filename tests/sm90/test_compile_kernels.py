"""Every kernel that the heuristic can choose compiles for sm_90a without a GPU, into the machine code that it is meant to be."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from megamoe.bench.workloads import SHAPES, Shape
from megamoe.compile import cubin
from megamoe.compile.obtain import obtain
from megamoe.compile.store import Store
from megamoe.problem import SwiGLU
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.shim.knobs import variants_of
from megamoe_sm90.shim.variants import Operands

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
