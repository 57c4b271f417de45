"""One point after another: operands once per shape and format, a check by the oracle, then all contestants in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megamoe.bench.contestants import FROM_BF16, OURS, Case, Runner, open_contestant
from megamoe.bench.results import Point, commit
from megamoe.bench.timing import measure
from megamoe.bench.turns import ALL_THE_TIME, Turns
from megamoe.bench.workloads import Inputs, Shape, make_inputs, make_weights
from megamoe.errors import MegaMoEError
from megamoe.log import logger
from megamoe.testing import oracle

if TYPE_CHECKING:
    import torch

    from megamoe.bench.roof import Roof
    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights

_L2_BYTES = 50 << 20
_MOST_SETS = 4


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure.

    Attributes:
        shapes, formats, tokens, routing: the workloads.
        backend: megamoe's backend.
        against: other contestants; the first peer that is one of them becomes the point's ``peer``.
        launches, repeats, graph: see :func:`megamoe.bench.timing.measure`.
        check_tokens: tokens of every point that the oracle recomputes; 0 measures without a check.
        max_tokens: of the session; ``None`` is the largest of ``tokens``, so that a decode batch meets a prefill-sized session.
        knobs: for the backend.
    """

    shapes: Sequence[Shape]
    formats: Sequence[str]
    tokens: Sequence[int]
    routing: str
    backend: str
    against: Sequence[str] = ()
    launches: int = 20
    repeats: int = 5
    graph: bool = False
    check_tokens: int = 1
    max_tokens: int | None = None
    knobs: Mapping[str, object] | None = None
    contestants: Sequence[str] = field(default=(OURS, FROM_BF16))

    def place(self, point: Point) -> tuple[int, int, int]:
        """For sorting: where a point comes in the sweep."""
        names = [shape.name for shape in self.shapes]
        return self.formats.index(point.format), names.index(point.shape), self.tokens.index(point.tokens)


def run(sweep: Sweep, roof: Roof, turns: Turns = ALL_THE_TIME) -> Iterator[Point]:
    """Measure all points, shape by shape.

    Args:
        sweep: what to measure.
        roof: the machine's limits.
        turns: with other processes that measure on the same GPU.

    Raises:
        MegaMoEError: the oracle rejects an output, or the backend cannot run the problem. A peer that fails is a warning.
    """
    import torch

    version = commit()
    for format in sweep.formats:
        for shape in sweep.shapes:
            with _together(turns):
                generator = torch.Generator(device="cuda").manual_seed(0)
                weights = make_weights(shape, format, generator)
                problem = shape.problem(sweep.max_tokens or max(sweep.tokens), format)
                case = Case(shape, problem, weights, sweep.backend, sweep.knobs)
                names = tuple(n for n in sweep.contestants if n != FROM_BF16 or format != "bf16")
                runners = {name: open_contestant(name, case) for name in names}
                runners |= {name: runner for name in sweep.against if (runner := _open_other(name, case)) is not None}
                torch.cuda.empty_cache()  # what opening took for a while, others may need
            try:
                for tokens in sweep.tokens:
                    yield _point(sweep, case, tokens, runners, roof, turns, version)
            finally:
                with _together(turns):
                    for runner in runners.values():
                        runner.close()
                    del runners, weights, case
                    torch.cuda.empty_cache()


def _point(sweep: Sweep, case: Case, tokens: int, runners: Mapping[str, Runner], roof: Roof, turns: Turns, version: str) -> Point:
    import torch

    shape, problem, weights, format = case.shape, case.problem, case.weights, case.problem.format
    with _together(turns):
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        sets = input_sets(shape, format, tokens, sweep.routing, weights, generator)
    launches = _launches(runners, sets, turns)
    experts = oracle.Experts(format, weights)  # of this point alone: of all tokens they would fill the memory
    errors = [
        check(name, launches[name][0], sets[0], operands, problem, experts, sweep.check_tokens, turns)
        for name in launches
        if (operands := runners[name].operands(sets[0])) is not None
    ]
    with turns.alone():
        times = measure(launches, launches=sweep.launches, repeats=sweep.repeats, graph=sweep.graph)
    ours = times[next(name for name in (OURS, FROM_BF16) if name in times)]
    others = {name: times[name].ms for name in times if name not in (OURS, FROM_BF16)}
    peer = next((name for name in others if name != "unfused"), None)
    touched = sum(s.touched for s in sets) / len(sets)
    operations = 2 * tokens * shape.top_k * shape.expert_elements
    return Point(
        shape=shape.name,
        tokens=tokens,
        format=format,
        routing=sweep.routing,
        ms=ours.ms,
        spread=ours.spread,
        floor_ms=roof.floor_ms(shape, format, tokens, touched),
        touched=touched,
        tflops=operations / ours.ms * 1e-9,
        tb_s=touched * shape.expert_elements * weights.w13.element_size() / ours.ms * 1e-9,
        rel_l2=max((error for error in errors if error is not None), default=None),
        bf16_ms=times[FROM_BF16].ms if OURS in times and FROM_BF16 in times else None,
        peer=peer,
        peer_ms=others.get(peer) if peer else None,
        others={name: ms for name, ms in others.items() if name != peer},
        commit=version,
        detail={name: facts for name in times if (facts := runners[name].facts())},
    )


def input_sets(shape: Shape, format: str, tokens: int, routing: str, weights: ExpertWeights, generator: torch.Generator) -> list[Inputs]:
    """One set of inputs, or several where launches over one would find in L2 what the last one read: other routes touch other weights."""
    first = make_inputs(shape, format, tokens, routing, weights.x_scale, generator)
    bytes_read = first.touched * 1.5 * weights.w13[0].nbytes + first.x.nbytes
    more = 0 if bytes_read > 2 * _L2_BYTES else _MOST_SETS - 1
    return [first, *(make_inputs(shape, format, tokens, routing, weights.x_scale, generator) for _ in range(more))]


@contextmanager
def _together(turns: Turns) -> Iterator[None]:
    """A turn on the GPU beside others that leaves nothing running there."""
    import torch

    with turns.together():
        try:
            yield
        finally:
            torch.cuda.synchronize()


def _open_other(name: str, case: Case) -> Runner | None:
    try:
        return open_contestant(name, case)
    except Exception as error:  # noqa: BLE001  a baseline or peer that cannot run here must not stop the measurement
        logger().warning("%s cannot run %s %s: %s: %s", name, case.shape.name, case.problem.format, type(error).__name__, error)
        return None


def _launches(runners: Mapping[str, Runner], sets: Sequence[Inputs], turns: Turns) -> dict[str, list[Callable[[], object]]]:
    """The calls of everyone who can run these inputs; only megamoe itself has to. A turn for each: who compiles takes seconds."""
    found = {}
    for name, runner in runners.items():
        try:
            with _together(turns):
                found[name] = runner.launches(sets)
                found[name][0]()
        except Exception as error:
            if name in (OURS, FROM_BF16):
                raise
            found.pop(name, None)
            logger().warning("%s fails on %d tokens: %s: %s", name, sets[0].x.shape[0], type(error).__name__, error)
    return found


def check(
    name: str,
    launch: Callable[[], object],
    inputs: Inputs,
    operands: tuple[torch.Tensor, torch.Tensor | None],
    problem: MoEProblem,
    experts: oracle.Experts,
    most: int,
    turns: Turns = ALL_THE_TIME,
) -> float | None:
    """Run once into a poisoned output and let the oracle recompute ``most`` tokens, spread evenly. It does so without the GPU.

    Returns:
        the relative L2 error, ``None`` when nothing was recomputed.

    Raises:
        MegaMoEError: elements are unwritten or not finite, or the oracle rejects them.
    """
    import torch

    tokens = inputs.x.shape[0]
    where = f"{name}, {problem.format}, {problem.experts} experts of {problem.hidden} x {problem.intermediate}, {tokens} tokens"
    count = min(most, tokens)
    with _together(turns):
        inputs.out.fill_(float("nan"))
        launch()
        if not torch.isfinite(inputs.out).all():
            raise MegaMoEError(f"{where}: elements of the output are unwritten or not finite.", hint="megamoe check")
        if not count:
            return None
        index = torch.linspace(0, tokens - 1, count, device=inputs.x.device).round().long()
        out, ids, weights = (tensor[index].cpu() for tensor in (inputs.out, inputs.ids, inputs.weights))
        x, scale = (None if tensor is None else tensor[index].cpu() for tensor in operands)
        experts.keep(set(ids.flatten().tolist()))
    verdict = oracle.judge(out, oracle.compute(problem, experts, x, ids, weights, scale), format=problem.format)
    if not verdict.ok:
        raise MegaMoEError(f"{where}: {verdict.text}.", hint="megamoe check")
    return verdict.rel_l2
