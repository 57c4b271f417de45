"""How points are measured, with contestants that compute on the CPU: each is judged, and whoever touches the GPU has the turn for it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from megamoe.bench import points
from megamoe.bench.contestants import FROM_BF16, OURS
from megamoe.bench.roof import H200
from megamoe.bench.timing import Timing
from megamoe.bench.workloads import Shape
from megamoe.errors import MegaMoEError
from megamoe.testing import oracle

SHAPE = Shape("small", experts=8, top_k=2, hidden=256, intermediate=128)
COMPUTE = oracle.compute


class Watched:
    """Turns that say which one it is, and that nothing is left running at the end of it."""

    def __init__(self):
        self.now, self.pending, self.seen = "nobody's", False, []

    @contextmanager
    def _turn(self, name):
        assert self.now == "nobody's"
        self.now = name
        self.seen.append(name)
        try:
            yield
        finally:
            assert not self.pending
            self.now = "nobody's"

    def together(self):
        return self._turn("together")

    def alone(self):
        assert not self.pending
        return self._turn("alone")

    def work(self, *allowed):
        """Something is enqueued on the GPU."""
        assert self.now in allowed
        self.pending = True

    def synchronize(self):
        self.pending = False


class Contestant:
    """The oracle itself, times a factor; ``None`` for the operands of someone who is not judged."""

    def __init__(self, turns, name, case, factor):
        turns.work("together")
        self.turns, self.name, self.case, self.factor = turns, name, case, factor

    def launches(self, sets):
        self.turns.work("together")
        return [lambda inputs=inputs: self._launch(inputs) for inputs in sets]

    def _launch(self, inputs):
        self.turns.work("together", "alone")
        x, scale = (inputs.data, inputs.scale) if self.name == OURS else (inputs.x, None)
        right = COMPUTE(self.case.problem, self.case.weights, x, inputs.ids, inputs.weights, scale)
        inputs.out.copy_(self.factor * torch.from_numpy(right.value))

    def operands(self, inputs):
        return {OURS: (inputs.data, inputs.scale), FROM_BF16: (inputs.x, None)}.get(self.name)

    def facts(self):
        return {"name": self.name}

    def close(self):
        self.turns.work("together")


@pytest.fixture
def sweep_of(monkeypatch):
    """Measures a small sweep with these turns, some contestants off by a factor."""

    def measured(turns, **factors):
        generator = torch.Generator

        def compute(*given):
            assert turns.now == "nobody's", "the oracle needs no GPU"
            return COMPUTE(*given)

        def measure(contestants, **how):
            assert turns.now == "alone"
            for calls in contestants.values():
                for call in calls:
                    call()
            turns.synchronize()
            return {name: Timing.of([float(len(calls))]) for name, calls in contestants.items()}

        def open_contestant(name, case):
            if name == "absent":
                raise ImportError("no such package")
            return Contestant(turns, name, case, factors.get(name.replace("-", "_"), 1.0))

        monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
        monkeypatch.setattr(torch.cuda, "synchronize", turns.synchronize)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: turns.work("together"))
        monkeypatch.setattr(oracle, "compute", compute)
        monkeypatch.setattr(points, "measure", measure)
        monkeypatch.setattr(points, "open_contestant", open_contestant)
        sweep = points.Sweep([SHAPE], ["fp8_block128"], [1, 40], "random", "sm90", against=("unfused", "absent", "peer"), check_tokens=3)
        return list(points.run(sweep, H200, turns))

    return measured


def test_whoever_touches_the_gpu_has_the_turn_for_it(sweep_of):
    turns = Watched()
    found = sweep_of(turns)
    assert [(p.tokens, p.ms, p.bf16_ms, p.peer, p.peer_ms, p.others) for p in found] == [
        (tokens, 4.0, 4.0, "peer", 4.0, {"unfused": 4.0}) for tokens in (1, 40)
    ]
    assert all(0 < p.rel_l2 < 0.003 for p in found)
    # Opening; then for each point inputs, four contestants, two checks, the measurement; closing.
    assert turns.seen == ["together", *(["together"] * 7 + ["alone"]) * 2, "together"]


@pytest.mark.parametrize(("name", "factor"), [("megamoe", 1.03), ("megamoe_bf16", 1.03), ("megamoe_bf16", float("nan"))])
def test_nobody_is_timed_whose_result_is_wrong(sweep_of, name, factor):
    turns = Watched()
    with pytest.raises(MegaMoEError, match=f"^{name.replace('_', '-')}, fp8_block128, 8 experts of 256 x 128, 1 tokens: "):
        sweep_of(turns, **{name: factor})
    assert "alone" not in turns.seen
