"""``MoELayer``: the module around a session."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import megamoe
from megamoe import InvalidInput, MegaMoEError, MoEProblem, SessionClosed, UnsupportedProblem
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
        with pytest.raises(MegaMoEError, match=r"MoELayer is for inference and has no backward\. Fix: call it under torch\.no_grad"):
            y.float().sum().backward()
        with torch.no_grad():
            assert not layer(*inputs).requires_grad


def test_it_sits_in_a_model_without_parameters_of_its_own(layer):
    model = torch.nn.Sequential(layer)
    assert list(model.parameters()) == []
    assert model.state_dict() == {}
    assert model.eval()[0] is layer
    assert "backend='reference', ranks=1, open" in repr(model)


@pytest.mark.parametrize(
    ("problem", "weights", "said"),
    [
        ({"experts": 8}, TRIAL.weights, r"problem is a dict; allowed: a megamoe\.MoEProblem"),
        (TRIAL.problem, None, r"weights is a NoneType; allowed: a megamoe\.ExpertWeights"),
        (TRIAL.problem, TRIAL.weights.w13, r"weights is a Tensor; allowed: a megamoe\.ExpertWeights"),
    ],
)
def test_arguments_of_another_kind(problem, weights, said):
    with pytest.raises(InvalidInput, match=said):
        megamoe.MoELayer(problem, weights, backend="reference")


def test_weights_of_another_kind_for_an_engine(layer):
    backend = megamoe.get_backend("reference")
    for use in (lambda: backend.prepare_weights(layer.plan, None), lambda: layer.update(None)):
        with pytest.raises(InvalidInput, match=r"weights are a NoneType; allowed: megamoe\.ExpertWeights"):
            use()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_open_session_cannot_be_copied(layer, copied):
    with pytest.raises(MegaMoEError, match="cannot be copied or pickled"):
        copied(torch.nn.Sequential(layer) if copied is not copy.copy else layer)


def test_errors_of_construction_keep_their_kind():
    with pytest.raises(UnsupportedProblem, match="hidden=250 is not a multiple of 128"):
        megamoe.MoELayer(replace(TRIAL.problem, hidden=250), TRIAL.weights, backend="reference")
    with pytest.raises(InvalidInput, match="w13 is NoneType"):
        megamoe.MoELayer(TRIAL.problem, replace(TRIAL.weights, w13=None), backend="reference")
    with pytest.raises(InvalidInput, match="w13 is on the meta device"):
        megamoe.MoELayer(TRIAL.problem, replace(TRIAL.weights, w13=TRIAL.weights.w13.to("meta")))
    with pytest.raises(megamoe.BackendNotFound):
        megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend="no such backend")
    with pytest.raises(InvalidInput, match="group=7; allowed: None or a"):
        megamoe.MoELayer(TRIAL.problem, TRIAL.weights, backend="reference", group=7)
