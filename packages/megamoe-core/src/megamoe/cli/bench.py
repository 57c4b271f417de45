"""Measure the layer on this GPU, against a torch pipeline and any peer that is importable, under the roof of the machine.

  megamoe bench                                     the default sweep: four shapes, 1 to 8192 tokens
  megamoe bench --shapes dsv3 --tokens 8,512 --against unfused --output result.json
  megamoe bench plot result.json figure.svg         latency against tokens
  megamoe bench compare old.json new.json           exit code 1 when a point got slower

Every point is checked by the oracle before it is timed. Times are medians of 5 repeats of 20 back-to-back launches between device events;
contestants take turns, and inputs rotate where they would stay in L2. With ``--jobs``, processes open sessions, compile peers and check
side by side, and the GPU is one's alone while it measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megamoe.cli import codes
from megamoe.cli._arguments import require_gpu
from megamoe.cli._problem import add_knob_argument, knobs_of
from megamoe.cli.output import Output, add_json_flag
from megamoe.errors import InvalidInput

if TYPE_CHECKING:
    from megamoe.bench.results import Point

SUMMARY = "measure speed against baselines and the machine's limits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the measurement and of ``plot`` and ``compare``."""
    parser.add_argument("--backend", help="backend to measure (default: the one for this GPU)")
    add_knob_argument(parser)
    parser.add_argument("--shapes", type=words, help="comma-separated shapes, or 'list' (default: dsv3,dsv4,qwen30b,qwen235b)")
    parser.add_argument("--tokens", type=numbers, help="comma-separated token counts (default: 1,8,32,128,512,2048,8192)")
    parser.add_argument("--formats", type=words, default=["fp8_block128"], help="comma-separated formats (default: fp8_block128)")
    parser.add_argument("--routing", default="random", help="random, balanced, zipf, few or one (default: random)")
    parser.add_argument("--against", type=words, help="comma-separated: unfused, flashinfer (default: all that are importable; 'none')")
    parser.add_argument("--launches", type=int, default=20, help="back-to-back launches between two events (default: 20)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the median counts (default: 5)")
    parser.add_argument("--graph", action="store_true", help="replay the launches as a CUDA graph")
    parser.add_argument("--check-tokens", type=int, default=1, help="tokens of every point that the oracle recomputes (default: 1)")
    parser.add_argument("--max-tokens", type=int, help="size of the session (default: the largest token count)")
    parser.add_argument("--measure-roof", action="store_true", help="measure this GPU's limits instead of taking an H200's")
    parser.add_argument("--output", type=Path, help="result file to write (JSON)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that prepare side by side and measure in turn (default: 1)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks, a process each; shapes are those of one (default: 1)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    plot = actions.add_parser("plot", help="draw a result file as SVG")
    plot.add_argument("results", type=Path)
    plot.add_argument("figure", type=Path)
    plot.set_defaults(run=_plot)
    compare = actions.add_parser("compare", help="compare two result files")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument("--tolerance", type=float, default=0.03, help="slower by this share is worse (default: 0.03)")
    compare.set_defaults(run=_compare)
    for action in (plot, compare):
        add_json_flag(action)


def run(args: argparse.Namespace) -> int:
    """Measure; prints each point as it comes."""
    from megamoe.bench import contestants, results, workloads

    out = Output.of(args)
    if args.jobs < 1:
        raise InvalidInput(f"--jobs {args.jobs}; allowed: 1 or more.", hint="--jobs 8")
    if args.shapes == ["list"]:
        out.table(("shape", "experts", "top-k", "hidden", "intermediate"), [_shape_row(s) for s in workloads.SHAPES.values()])
        out.document("bench", {"shapes": list(workloads.SHAPES.values())})
        return codes.OK
    if args.ranks == 1 or (args.ranks > 1 and args.backend is None):  # ranks on the CPU are measured when they are asked for by name
        require_gpu("bench")
    if args.ranks != 1:
        return _several(out, args)
    from megamoe.bench import points, roof, side_by_side
    from megamoe.select import choose

    limits = roof.measure_roof() if args.measure_roof else roof.H200
    shapes = [workloads.shape(name) for name in args.shapes or workloads.DEFAULT_SHAPES]
    against = contestants.importable_others() if args.against is None else tuple(n for n in args.against if n != "none")
    sweep = points.Sweep(
        shapes=shapes,
        formats=args.formats,
        tokens=args.tokens or workloads.TOKENS,
        routing=args.routing,
        backend=args.backend or choose().name,
        against=against,
        launches=args.launches,
        repeats=args.repeats,
        graph=args.graph,
        check_tokens=args.check_tokens,
        max_tokens=args.max_tokens,
        knobs=knobs_of(args),
    )
    environment = results.environment(limits.as_dict())
    measured: list[Point] = []
    with out.progress("measuring", total=len(shapes) * len(sweep.formats) * len(sweep.tokens)) as step:
        for point in points.run(sweep, limits) if args.jobs == 1 else side_by_side.measure(sweep, limits, args.jobs):
            measured.append(point)
            measured.sort(key=sweep.place)
            step()
            if args.output:  # after every point: a run that is cut short keeps what it has
                results.save(args.output, environment, measured)
    _report(out, measured)
    out.document("bench", {"environment": environment, "points": measured, "summary": _summary(measured)})
    return codes.OK


def _several(out: Output, args: argparse.Namespace) -> int:
    """Time the layer over several ranks: the slowest one counts."""
    from megamoe.bench import ranks, workloads

    given = {name: getattr(args, name) for name in ("against", "graph", "max_tokens", "measure_roof", "output")}
    given["jobs"] = args.jobs != 1
    if unused := [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, False)]:
        raise InvalidInput(
            f"--ranks {args.ranks} with {', '.join(unused)}; allowed with several ranks: --backend, --knob, --shapes, --tokens, --formats, "
            "--routing, --launches and --repeats.",
            hint=f"leave out {', '.join(unused)}; --json prints every figure",
        )
    shapes = [workloads.shape(name) for name in args.shapes or workloads.DEFAULT_SHAPES]
    cases = [(shape, format, tokens) for format in args.formats for shape in shapes for tokens in args.tokens or workloads.TOKENS]
    measured = []
    with out.progress("measuring", total=len(cases)) as step:
        for shape, format, tokens in cases:
            point = ranks.measure(
                *(shape, format, tokens, args.routing),
                backend=args.backend,
                ranks=args.ranks,
                launches=args.launches,
                repeats=args.repeats,
                knobs=knobs_of(args),
            )
            measured.append(point)
            step()
    columns = ("shape", "format", "tokens a rank", "us", "spread %", "fastest us", "wire MiB", "imbalance", "rel-L2")
    rows = [
        (
            *(p.shape, p.format, p.tokens, round(1000 * p.ms, 1), round(100 * p.spread, 1), round(1000 * p.fastest_ms, 1)),
            *(round(p.wire_bytes / 2**20, 2), round(p.imbalance, 2), p.rel_l2),
        )
        for p in measured
    ]
    out.table(columns, rows, title=f"microseconds per launch of the slowest of {args.ranks} ranks")
    out.document("bench", {"ranks": args.ranks, "points": measured})
    return codes.OK


def _report(out: Output, measured: Sequence[Point]) -> None:
    names = sorted({name for point in measured for name in point.others})
    columns = ("shape", "format", "tokens", "us", "spread %", "x floor", "TFLOP/s", "TB/s", "from bf16", "peer us", "peer/ours", *names)
    rows = [
        (
            *(point.shape, point.format, point.tokens, round(1000 * point.ms, 1), round(100 * point.spread, 1)),
            *(round(point.over_floor, 2), round(point.tflops, 1), round(point.tb_s, 2), _us(point.bf16_ms), _us(point.peer_ms)),
            None if point.peer_ms is None else round(point.peer_ms / point.ms, 2),
            *(_us(point.others.get(name)) for name in names),
        )
        for point in measured
    ]
    out.table(columns, rows, title="microseconds per launch")
    out.facts([(name.replace("_", " "), value) for name, value in _summary(measured).items()])


def _summary(measured: Sequence[Point]) -> dict[str, float]:
    from megamoe.bench.compare import geometric_mean

    found = {"geometric_mean_over_floor": geometric_mean(point.over_floor for point in measured)}
    beside = [point for point in measured if point.peer_ms is not None]
    if beside:
        found["geometric_mean_faster_than_peer"] = geometric_mean((p.peer_ms or 0) / p.ms for p in beside)
    return found


def _plot(args: argparse.Namespace) -> int:
    from megamoe.bench import plot, results

    environment, measured = results.load(args.results)
    args.figure.write_text(plot.svg(environment, measured))
    out = Output.of(args)
    out.text(f"{len(measured)} points drawn in {args.figure}")
    out.document("bench", {"figure": args.figure, "points": len(measured)})
    return codes.OK


def _compare(args: argparse.Namespace) -> int:
    from megamoe.bench import compare, results

    (_, old), (_, new) = results.load(args.old), results.load(args.new)
    found = compare.ratios(old, new)
    out = Output.of(args)
    rows = [
        (
            *r.new.key,
            round(1000 * r.old.ms, 1),
            round(1000 * r.new.ms, 1),
            round(r.ratio, 3),
            "failed" if r.slower(args.tolerance) else "ok",
        )
        for r in found
    ]
    out.table(("shape", "format", "routing", "tokens", "old us", "new us", "new/old", "verdict"), rows)
    mean, worse = compare.geometric_mean(r.ratio for r in found), sum(r.slower(args.tolerance) for r in found)
    out.facts([("points in both", len(found)), ("geometric mean new/old", mean), ("slower", worse)])
    ratios = [
        {"workload": r.new.key, "old_ms": r.old.ms, "new_ms": r.new.ms, "ratio": r.ratio, "slower": r.slower(args.tolerance)} for r in found
    ]
    out.document("bench", {"points": ratios, "geometric_mean": mean, "slower": worse})
    return codes.FAILED if worse or not found else codes.OK


def _us(ms: float | None) -> float | None:
    return None if ms is None else round(1000 * ms, 1)


def _shape_row(shape: object) -> tuple[object, ...]:
    return tuple(getattr(shape, name) for name in ("name", "experts", "top_k", "hidden", "intermediate"))


def words(text: str) -> list[str]:
    """Comma-separated words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(word) for word in words(text)]
