"""Time every kernel that a backend's knobs allow, for each number of tokens, beside the one that its heuristic chooses. Results are checked
by the oracle first. Says which knobs are fastest; pass them as knobs where the heuristic is beaten.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megamoe.cli import codes
from megamoe.cli._problem import add_knob_argument, knobs_of
from megamoe.cli.bench import numbers, words
from megamoe.cli.output import Output
from megamoe.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megamoe.bench.workloads import Shape
    from megamoe.tune import Tunable
    from megamoe.tune.search import Tried

SUMMARY = "find the fastest kernels for this GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Workloads, backend and fixed knobs."""
    parser.add_argument("--backend", help="backend to tune (default: the one for this GPU)")
    parser.add_argument("--shapes", type=words, default=["dsv3"], help="comma-separated shapes of `megamoe bench` (default: dsv3)")
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128, 512, 2048, 8192], help="comma-separated (default: 1 to 8192)")
    parser.add_argument("--format", default="fp8_block128", help="number format (default: fp8_block128)")
    parser.add_argument("--routing", default="random", help="routing pattern of `megamoe bench` (default: random)")
    add_knob_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; prints the candidates of each workload, fastest first. 1 when a candidate failed."""
    from megamoe.bench import workloads
    from megamoe.select import choose, get_backend
    from megamoe.tune import Tunable

    out = Output.of(args)
    backend = get_backend(args.backend or choose().name)
    if not isinstance(backend, Tunable):
        raise BackendUnavailable(f"Backend {backend.spec.name!r} has no knobs to tune.", hint="name one that has: --backend sm90")
    rows, failed = [], 0
    for shape in [workloads.shape(name) for name in args.shapes]:
        for tokens, tried in _tried(backend, shape, args):
            chosen = tried[0]
            for place, one in enumerate(sorted(tried, key=lambda t: t.ms)):
                failed += bool(one.fault)
                rows.append(
                    {
                        **{"shape": shape.name, "tokens": tokens, "place": place + 1, "kernel": one.candidate.kernel},
                        **{"us": round(1000 * one.ms, 1), "to_heuristic": round(one.ms / chosen.ms, 3), "chosen": one is chosen},
                        **{"fault": one.fault, "knobs": dict(one.candidate.knobs)},
                    }
                )
    shown = ("shape", "tokens", "place", "kernel", "us", "to_heuristic", "chosen", "fault")
    out.table([name.replace("_", " ") for name in shown], [[row[name] for name in shown] for row in rows])
    out.document("tune", {"format": args.format, "routing": args.routing, "results": rows})
    return codes.FAILED if failed else codes.OK


def _tried(backend: Tunable, shape: Shape, args: argparse.Namespace) -> Iterator[tuple[int, list[Tried]]]:
    import torch

    from megamoe.bench import points, timing, workloads
    from megamoe.testing import oracle
    from megamoe.tune.search import Candidate, candidates, search

    weights = workloads.make_weights(shape, args.format, torch.Generator(device="cuda").manual_seed(0))
    for tokens in args.tokens:
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        sets = points.input_sets(shape, args.format, tokens, args.routing, weights, generator)
        experts = oracle.Experts(args.format, weights)

        def measure(candidate: Candidate, sets: list[workloads.Inputs] = sets, experts: oracle.Experts = experts) -> float:
            plan = candidate.plan
            with backend.open_session(plan, backend.prepare_weights(plan, weights)) as session:
                run = session.run
                calls = [lambda i=i: run(i.data, i.ids, i.weights, x_scale=i.scale, out=i.out) for i in sets]
                first = sets[0]
                points.check(candidate.kernel, calls[0], first, (first.data, first.scale), plan.problem, experts, 1)
                return timing.measure({candidate.kernel: calls})[candidate.kernel].ms

        yield tokens, list(search(candidates(backend, shape.problem(tokens, args.format), tokens, knobs_of(args)), measure))
