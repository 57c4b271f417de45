"""``MoELayer`` under torch.compile: no graph break, the same bytes, errors of the session as they are."""

from __future__ import annotations

import pytest
import torch

from megamoe import InvalidInput, MoELayer, MoEProblem, SessionClosed
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
    with pytest.raises(SessionClosed, match="is gone"):
        torch.ops.megamoe.layer(handle, 128, x, ids, weights, None)
