"""``MoELayer`` under torch.compile: no graph break, the same bytes, errors of the session as they are."""

from __future__ import annotations

import gc

import pytest
import torch

from megamoe import InvalidInput, MegaMoEError, MoELayer, MoEProblem, SessionClosed
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing.trial import make_trial

TRIAL = make_trial(MoEProblem(8, 2, 128, 64, 16, "bf16"), tokens=9)


@pytest.fixture
def layer():
    torch._dynamo.reset()
    with MoELayer(TRIAL.problem, TRIAL.local_weights(0), backend="reference") as made:
        yield made


class Block(torch.nn.Module):
    """A model around the layer, so that there is something to compile on both sides."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, ids, weights):
        return self.layer(x * 2, ids, weights) + x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph_gives_the_same_bytes(layer, backend):
    block = Block(layer).eval()
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        assert torch.equal(compiled(*TRIAL.inputs[0]), block(*TRIAL.inputs[0]))
        fewer = TRIAL.inputs[0].rows(torch.arange(4))
        assert torch.equal(compiled(*fewer), block(*fewer))


def test_out_is_written(layer):
    def into(x, ids, weights, out):
        layer(x, ids, weights, out=out)
        return out + 1

    x, ids, weights = TRIAL.inputs[0]
    out = torch.full_like(x, float("nan"))
    result = torch.compile(into, fullgraph=True, backend="aot_eager")(x, ids, weights, out)
    assert torch.equal(out, layer(x, ids, weights))
    assert torch.equal(result, out + 1)


def test_operators_keep_their_word(layer):
    """torch's own checks: schema, fake results against real ones, behaviour under tracing."""
    x, ids, weights = TRIAL.inputs[0]
    torch.library.opcheck(torch.ops.megamoe.layer.default, (layer._handle, 128, x, ids, weights, None))
    torch.library.opcheck(torch.ops.megamoe.layer_out.default, (layer._handle, x, ids, weights, None, torch.empty_like(x)))


def test_errors_come_through(layer):
    compiled = torch.compile(Block(layer), fullgraph=True, backend="eager")
    x, ids, weights = TRIAL.inputs[0]
    with pytest.raises(InvalidInput, match="out of range"):
        compiled(x, ids + 100, weights)
    handle = layer._handle
    layer.close()
    with pytest.raises(SessionClosed, match="This MoELayer was closed"):
        torch.ops.megamoe.layer(handle, 128, x, ids, weights, None)


def test_a_handle_keeps_no_layer_alive():
    layer = MoELayer(TRIAL.problem, TRIAL.local_weights(0), backend="reference")
    handle = layer._handle
    del layer
    gc.collect()
    with pytest.raises(SessionClosed, match="is gone"):
        torch.ops.megamoe.layer(handle, 128, *TRIAL.inputs[0], None)


class Slotted:
    """A session as a wheel from elsewhere may have it: nothing can refer to it weakly."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def run(self, *inputs, **more):
        return self.inner.run(*inputs, **more)

    def close(self):
        self.inner.close()


def test_a_session_of_any_class_serves(monkeypatch):
    whole = ReferenceBackend.open_session
    monkeypatch.setattr(ReferenceBackend, "open_session", lambda *arguments: Slotted(whole(*arguments)))
    with MoELayer(TRIAL.problem, TRIAL.local_weights(0), backend="reference") as layer:
        compiled = torch.compile(Block(layer), fullgraph=True, backend="eager")
        assert torch.equal(compiled(*TRIAL.inputs[0]), Block(layer)(*TRIAL.inputs[0]))


@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled after"])
def test_a_closed_layer_says_so_in_a_compiled_model(layer, before):
    compiled = torch.compile(Block(layer), fullgraph=True, backend="eager")
    if before:
        compiled(*TRIAL.inputs[0])
    layer.close()
    with pytest.raises(SessionClosed, match="This MoELayer was closed"):
        compiled(*TRIAL.inputs[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wanted", ["x", "weights"])
@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
def test_a_gradient_that_arrives_raises_and_the_forward_pass_runs(layer, backend, wanted, into):
    """As without the compiler, where a model computes its forward pass without torch.no_grad()."""
    x, ids, weights = TRIAL.inputs[0]
    x, weights = (x.clone().requires_grad_(), weights) if wanted == "x" else (x, weights.clone().requires_grad_())
    more = {"out": torch.empty_like(x)} if into else {}
    compiled = torch.compile(lambda x, weights: layer(x, ids, weights, **more) + x, fullgraph=True, backend=backend)
    y = compiled(x, weights)
    assert torch.equal(y, layer(x, ids, weights) + x)
    with pytest.raises(MegaMoEError, match=r"MoELayer is for inference and has no backward\. Fix: call it under torch\.no_grad"):
        y.float().sum().backward()
    with torch.no_grad():
        assert not compiled(x, weights).requires_grad
