"""The one place that checks what ``run`` gets."""

import pytest
import torch

from megamoe import InvalidInput, MoEProblem
from megamoe.formats import FORMATS, load
from megamoe.inputs import check_inputs, checked_at_once, find_bad_ids, raise_bad_ids

H, K, T = 256, 2, 5
CPU = torch.device("cpu")


def problem(format="bf16", **changes):
    return MoEProblem(experts=8, top_k=K, hidden=H, intermediate=128, max_tokens=8, format=format, **changes)


def arguments(tokens=T, **changes):
    return {
        "x": torch.zeros(tokens, H, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(tokens, K, dtype=torch.int32),
        "topk_weights": torch.ones(tokens, K),
    } | changes


def accepts(format="bf16", alignment=1, **changes):
    check_inputs(problem(format), CPU, **arguments(**changes), alignment=alignment)


def rejects(said, format="bf16", alignment=1, **changes):
    with pytest.raises(InvalidInput, match=said) as caught:
        accepts(format, alignment, **changes)
    assert " Fix: " in str(caught.value)


@pytest.mark.parametrize("tokens", [0, 1, 8])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_token_counts_and_dtypes_that_are_fine(tokens, ids, weights):
    accepts(tokens=tokens, topk_ids=torch.zeros(tokens, K, dtype=ids), topk_weights=torch.zeros(tokens, K, dtype=weights))


def test_more_tokens_than_agreed():
    rejects("9 tokens; allowed: 0 to max_tokens=8", **arguments(9))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x", torch.zeros(T, H), r"x is torch.float32; allowed: torch.bfloat16"),
        ("x", torch.zeros(T, H - 1, dtype=torch.bfloat16), r"x has shape \(5, 255\); allowed: \(5, 256\)"),
        ("x", torch.zeros(1, T, H, dtype=torch.bfloat16), r"x has shape \(1, 5, 256\)"),
        ("x", torch.zeros((), dtype=torch.bfloat16), r"x has shape \(\)"),
        ("x", [[0.0]], "x is list; allowed: a torch.Tensor"),
        ("x", torch.zeros(T, H, dtype=torch.bfloat16, device="meta"), "x is on meta; allowed: cpu"),
        ("x", torch.zeros(H, T, dtype=torch.bfloat16).T, "x has strides .*last dimension contiguous"),
        ("topk_ids", torch.zeros(T, K, dtype=torch.int16), "topk_ids is torch.int16; allowed: torch.int32 or torch.int64"),
        ("topk_ids", torch.zeros(T, K), "topk_ids is torch.float32"),
        ("topk_ids", torch.zeros(T, K + 1, dtype=torch.int32), r"topk_ids has shape \(5, 3\); allowed: \(5, 2\)"),
        ("topk_ids", torch.zeros(T - 1, K, dtype=torch.int32), r"topk_ids has shape \(4, 2\)"),
        ("topk_ids", torch.zeros(K, T, dtype=torch.int32).T, "topk_ids has strides"),
        ("topk_ids", None, "topk_ids is NoneType"),
        ("topk_weights", torch.zeros(T, K, dtype=torch.float64), "topk_weights is torch.float64"),
        ("topk_weights", torch.zeros(T), r"topk_weights has shape \(5,\)"),
        ("topk_weights", torch.zeros(K, T).T, "topk_weights has strides"),
        ("topk_weights", torch.zeros(T, K, device="meta"), "topk_weights is on meta"),
        ("x_scale", torch.ones(T, 2), "x_scale is given with x of torch.bfloat16"),
        ("out", torch.zeros(T, H), "out is torch.float32; allowed: torch.bfloat16"),
        ("out", torch.zeros(T + 1, H, dtype=torch.bfloat16), r"out has shape \(6, 256\); allowed: \(5, 256\)"),
        ("out", torch.zeros(1, H, dtype=torch.bfloat16).expand(T, H), "its rows overlap"),
        ("out", torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, ::2], "out has strides"),
        ("out", torch.zeros(T, H, dtype=torch.bfloat16, device="meta"), "out is on meta"),
    ],
)
def test_arguments_that_do_not_fit(name, value, said):
    rejects(said, **{name: value})


def test_rows_may_be_slices_of_wider_tensors():
    wide = torch.zeros(T, 2 * H + 1, dtype=torch.bfloat16)
    ids, weights = torch.zeros(T, 5, dtype=torch.int64), torch.zeros(1, K).expand(T, K)
    accepts(x=wide[:, 1 : H + 1], out=wide[:, H + 1 :], topk_ids=ids[:, 2:4], topk_weights=weights)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_quantized_activations(format):
    info = FORMATS[format]
    x, scale = load(format).quantize(
        torch.randn(T, H, generator=torch.Generator().manual_seed(1)), static_scale=0.1 if info.tensor_scale else None
    )
    accepts(format, x=x, x_scale=scale)
    if scale is None:
        rejects("its activation scale is static", format, x=x, x_scale=torch.ones(T, 1))
        return
    rejects("x_scale is missing", format, x=x)
    rejects("x_scale is torch.float64", format, x=x, x_scale=scale.to(torch.float64))
    rejects("x_scale has shape", format, x=x, x_scale=scale[:, :-1])
    rejects("x_scale has strides", format, x=x, x_scale=scale.T.contiguous().T)
    rejects("x_scale is given with x of torch.bfloat16", format, x_scale=scale)
    if info.scale == "e8m0":
        accepts(format, x=x, x_scale=scale.view(torch.uint8))


def test_what_is_said_of_scales_in_a_format_without_any():
    rejects(r"allowed for format bf16: no x_scale\. ", x_scale=torch.ones(T, 2))
    rejects("allowed for format fp8_tensor: no x_scale, its activation scale is static", "fp8_tensor", x_scale=torch.ones(T, 2))


def test_quantized_activations_of_another_format():
    rejects("x is torch.float8_e5m2; allowed: torch.bfloat16 or torch.float8_e4m3fn", "mxfp8", x=torch.zeros(T, H).to(torch.float8_e5m2))
    rejects(r"x has shape \(5, 256\); allowed: \(5, 128\)", "nvfp4", x=torch.zeros(T, H, dtype=torch.uint8), x_scale=torch.zeros(T, 16))


def test_alignment_that_a_backend_needs():
    odd = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
    rejects("x starts at an address that is not a multiple of 16 bytes", alignment=16, x=odd)
    rejects("out starts at an address", alignment=16, out=odd)
    rejects("x has rows 514 bytes apart; allowed: multiples of 16", alignment=16, x=torch.zeros(T, H + 1, dtype=torch.bfloat16)[:, :H])
    accepts(alignment=16, x=torch.zeros(T, H + 8, dtype=torch.bfloat16)[:, 8:])
    accepts(alignment=16, **arguments(0))


def test_out_has_memory_of_its_own():
    both = torch.zeros(2 * T, H, dtype=torch.bfloat16)
    rejects("out shares memory with x", x=both[:T], out=both[:T])
    rejects("out shares memory with x", x=both[:T], out=both[1 : T + 1])
    rejects("out shares memory with x", x=both[T - 1 : 2 * T - 1], out=both[:T])
    accepts(x=both[:T], out=both[T:])
    wide = torch.zeros(T, 2 * H, dtype=torch.bfloat16)
    rejects("out shares memory with x", x=wide[:, :H], out=wide[:, H - 1 : -1])
    rejects("out shares memory with x", x=wide[:, H - 1 : -1], out=wide[:, :H])
    accepts(x=wide[:, H:], out=wide[:, :H])
    memory = torch.zeros(T * H, dtype=torch.bfloat16)
    rejects("out shares memory with topk_weights", out=memory.view(T, H), topk_weights=memory[: T * K].view(T, K))


# ---------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("ids", "report"),
    [
        ([[0, 7], [-1, 3]], [0, 0, 0]),
        ([[0, 8], [-1, 3]], [1, 1, 8]),
        ([[0, 1], [-2, 99]], [2, 2, -2]),
        ([[2**40, 1]], [1, 0, 2**40]),
        ([[-(2**62), 2**62]], [2, 0, -(2**62)]),
    ],
)
def test_ids_out_of_range_are_counted_and_placed(ids, report):
    found = find_bad_ids(torch.tensor(ids), experts=8).tolist()
    assert found[0] == report[0]
    if report[0]:
        assert found == report


def test_no_ids_are_no_bad_ids():
    assert find_bad_ids(torch.zeros(0, 2, dtype=torch.int32), experts=8).tolist()[0] == 0


def test_bad_ids_say_where():
    raise_bad_ids(torch.tensor([0, 0, 0]), problem())
    with pytest.raises(
        InvalidInput, match="topk_ids of this call has 3 ids out of range, the first is 9 at token 2, slot 1; allowed: 0 to 7, and -1"
    ):
        raise_bad_ids(torch.tensor([3, 5, 9]), problem())


def test_ids_are_checked_at_once_on_the_cpu_and_on_request():
    ids = torch.zeros(1, 2, dtype=torch.int32)
    assert checked_at_once(problem(), ids)
    assert not checked_at_once(problem(), ids.to("meta"))
    assert checked_at_once(problem(checked=True), ids.to("meta"))
