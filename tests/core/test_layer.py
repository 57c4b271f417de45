"""``MoELayer``: the module around a session."""

from dataclasses import replace

import pytest
import torch

import megamoe
from megamoe import InvalidInput, MoEProblem, SessionClosed, UnsupportedProblem
from megamoe.testing.trial import make_trial

TRIAL = make_trial(MoEProblem(experts=8, top_k=3, hidden=256, intermediate=128, max_tokens=40, format="fp8_block128"), seed=50)


@pytest.fixture
def layer():
    with megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend="reference") as opened:
        yield opened


def test_the_layer_is_right(layer):
    judgement = TRIAL.judge(0, layer(*TRIAL.inputs[0]))
    assert judgement.ok, judgement.text
    assert layer.counts().tolist() == torch.bincount(TRIAL.inputs[0].topk_ids.flatten(), minlength=8).tolist()


@pytest.mark.parametrize("backend", [None, "auto", "reference"])
def test_weights_on_the_cpu_get_the_reference(backend, monkeypatch):
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)
    with megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend=backend) as layer:
        assert layer.plan.backend == "reference"
        assert TRIAL.judge(0, layer(*TRIAL.inputs[0])).ok


def test_out_and_quantized_input_reach_the_session(layer):
    want = layer(*TRIAL.inputs[0])
    out = torch.empty_like(want)
    assert layer(*TRIAL.inputs[0], out=out) is out
    assert torch.equal(out, want)
    x, scale = megamoe.formats.load("fp8_block128").quantize(TRIAL.inputs[0].x)
    assert torch.equal(layer(x, *TRIAL.inputs[0][1:], x_scale=scale), want)


def test_a_batch_with_a_sequence_dimension_is_told_to_flatten(layer):
    with pytest.raises(InvalidInput, match="flatten batch and sequence into tokens"):
        layer(TRIAL.inputs[0].x.view(2, 20, 256), *TRIAL.inputs[0][1:])


def test_refit(layer):
    new = make_trial(TRIAL.problem, seed=51)
    layer.update(new.weights)
    assert new.judge(0, layer(*new.inputs[0])).ok


def test_a_closed_layer_says_so(layer):
    layer.close()
    layer.close()
    for use in (lambda: layer(*TRIAL.inputs[0]), layer.counts, lambda: layer.session, lambda: layer.update(TRIAL.weights), layer.__enter__):
        with pytest.raises(SessionClosed, match=r"This MoELayer was closed\. Fix: "):
            use()
    assert "closed" in repr(layer)


def test_leaving_the_block_closes_also_on_an_exception():
    layer = megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend="reference")
    assert "open" in repr(layer)
    with pytest.raises(ZeroDivisionError), layer:
        raise ZeroDivisionError
    with pytest.raises(SessionClosed):
        layer.counts()


def test_a_gradient_that_arrives_raises_instead_of_being_lost(layer):
    x, ids, weights = TRIAL.inputs[0]
    plain = layer(x, ids, weights)
    assert not plain.requires_grad
    for inputs in ((x.clone().requires_grad_(), ids, weights), (x, ids, weights.clone().requires_grad_())):
        y = layer(*inputs)
        assert torch.equal(y, plain)
        with pytest.raises(NotImplementedError, match="MoELayer is for inference and has no backward"):
            y.float().sum().backward()
        with torch.no_grad():
            assert not layer(*inputs).requires_grad


def test_it_sits_in_a_model_without_parameters_of_its_own(layer):
    model = torch.nn.Sequential(layer)
    assert list(model.parameters()) == []
    assert model.state_dict() == {}
    assert model.eval()[0] is layer
    assert "backend='reference', ranks=1, open" in repr(model)


def test_errors_of_construction_keep_their_kind():
    with pytest.raises(UnsupportedProblem, match="hidden=250 is not a multiple of 128"):
        megamoe.MoELayer(replace(TRIAL.problem, hidden=250), TRIAL.weights, backend="reference")
    with pytest.raises(InvalidInput, match="w13 is for 0 experts"):
        megamoe.MoELayer(TRIAL.problem, replace(TRIAL.weights, w13=None), backend="reference")
    with pytest.raises(megamoe.BackendNotFound):
        megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend="no such backend")
    with pytest.raises(InvalidInput, match="group=7; allowed: None or a"):
        megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend="reference", group=7)
