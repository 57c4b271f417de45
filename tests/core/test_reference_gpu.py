"""The reference backend on a GPU: the same layer, judged by the same oracle, and ids that are not read before the work."""

import pytest
import torch

from megamoe import InvalidInput, MoELayer, MoEProblem
from megamoe.formats import FORMATS, load
from megamoe.testing.trial import make_trial

pytestmark = pytest.mark.gpu


def trial(format, **changes):
    sizes = {"experts": 8, "top_k": 3, "hidden": 256, "intermediate": 128, "max_tokens": 40}
    return make_trial(MoEProblem(**sizes | {"format": format} | changes), seed=90, pattern="masked")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("routing_weight", ["late", "early"])
def test_every_format(format, routing_weight):
    made = trial(format, routing_weight=routing_weight)
    x, ids, weights = made.inputs[0].to("cuda")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with MoELayer(made.problem, made.local_weights(0, "cuda"), backend="reference") as layer:
            out = layer(x, ids, weights)
            assert torch.equal(layer(x, ids, weights), out)
            data, scale = load(format).quantize(x, static_scale=made.weights.x_scale)
            assert torch.equal(layer(data, ids, weights, x_scale=scale), out)
            judgement = made.judge(0, out)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert judgement.ok, judgement.text


def test_arguments_on_the_cpu_are_told_where_to_go():
    made = trial("bf16")
    with (
        MoELayer(made.problem, made.local_weights(0, "cuda"), backend="reference") as layer,
        pytest.raises(InvalidInput, match=r"x is on cpu; allowed: cuda:0, where the weights are. Fix: pass x\.to\('cuda:0'\)"),
    ):
        layer(*made.inputs[0])


def test_bad_ids_are_told_by_the_next_call_or_at_once_when_checked():
    made = trial("bf16")
    x, ids, weights = made.inputs[0].to("cuda")
    bad, unrouted = ids.clone(), ids.clone()
    bad[5, 2], unrouted[5, 2] = 8, -1
    with MoELayer(made.problem, made.local_weights(0, "cuda"), backend="reference") as layer:
        want = layer(x, unrouted, weights)
        assert torch.equal(layer(x, bad, weights), want)
        with pytest.raises(InvalidInput, match="topk_ids of the previous call has 1 ids out of range, the first is 8 at token 5, slot 2"):
            layer.counts()
        assert torch.equal(layer(x, bad, weights), want)
        with pytest.raises(InvalidInput, match="the previous call"):
            layer(x, ids, weights)
        layer(x, ids, weights)
    checked = trial("bf16", checked=True)
    with MoELayer(checked.problem, checked.local_weights(0, "cuda"), backend="reference") as layer:
        with pytest.raises(InvalidInput, match="topk_ids of this call has 1 ids out of range, the first is 8 at token 5, slot 2"):
            layer(x, bad, weights)
        layer(x, ids, weights)
