"""The problem that a command is about: a published model's layer, or a shape given option by option."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from megamoe.errors import InvalidInput
from megamoe.formats import FORMATS
from megamoe.presets import PRESETS, Preset, preset
from megamoe.problem import MoEProblem, SwiGLU

_SHAPE = ("experts", "top_k", "hidden", "intermediate")


def add_problem_arguments(parser: argparse.ArgumentParser, *, model: str | None, max_tokens: int) -> None:
    """Options that :func:`problem_of` reads.

    Args:
        parser: of the command.
        model: preset when none is named; ``None`` makes the whole shape required then.
        max_tokens: default of ``--max-tokens``.
    """
    group = parser.add_argument_group("problem", "a model's layer, and what is different from it")
    names = ", ".join(PRESETS)
    group.add_argument("--model", default=model, metavar="NAME", help=f"one of {names}" + (f" (default: {model})" if model else ""))
    group.add_argument("--experts", type=int, metavar="N", help="logical experts of the whole layer")
    group.add_argument("--top-k", type=int, metavar="N", help="routes per token")
    group.add_argument("--hidden", type=int, metavar="N", help="width of a token")
    group.add_argument("--intermediate", type=int, metavar="N", help="width after the activation")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens a rank and call (default: {max_tokens})"
    )
    group.add_argument("--format", metavar="NAME", help=f"one of {', '.join(FORMATS)} (default: the model's)")
    group.add_argument("--limit", type=float, metavar="X", help="clamp bound of the activation")
    group.add_argument("--alpha", type=float, metavar="X", help="factor inside the activation's sigmoid")
    group.add_argument("--up-bias", type=float, metavar="X", help="added to the activation's linear half")
    group.add_argument("--routing-weight", default="late", metavar="WHEN", help="late or early (default: late)")


def problem_of(args: argparse.Namespace) -> MoEProblem:
    """The problem that the options describe.

    Raises:
        InvalidInput: an unknown model or format, a value outside its limits, or neither a model nor a whole shape.
    """
    problem = base_of(args).problem(args.max_tokens, format=args.format)
    given = {name: getattr(args, name) for name in ("limit", "alpha", "up_bias") if getattr(args, name) is not None}
    return replace(problem, activation=replace(problem.activation, **given), routing_weight=args.routing_weight)


def base_of(args: argparse.Namespace) -> Preset:
    """The preset with the shape options applied."""
    shape = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    if args.model is not None:
        return replace(preset(args.model), **shape)
    missing = [f"--{name.replace('_', '-')}" for name in _SHAPE if name not in shape]
    if missing:
        raise InvalidInput(
            f"{', '.join(missing)} missing; allowed: a model's layer or a whole shape.", hint=f"--model with one of {', '.join(PRESETS)}"
        )
    return Preset("this layer", format="bf16", **shape)


def add_knob_argument(parser: argparse.ArgumentParser) -> None:
    """The option that :func:`knobs_of` reads."""
    parser.add_argument("--knob", action="append", default=[], metavar="NAME=VALUE", help="set a knob of the backend")


def knobs_of(args: argparse.Namespace) -> dict[str, object] | None:
    """The knobs that the options set; ``None`` for none.

    Raises:
        InvalidInput: not NAME=VALUE.
    """
    knobs: dict[str, object] = {}
    for pair in args.knob:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidInput(f"--knob {pair!r}; allowed: NAME=VALUE.", hint="for example --knob stages=4")
        words = {"true": True, "false": False, "none": None}
        knobs[name] = words[text.lower()] if text.lower() in words else int(text) if re.fullmatch(r"[+-]?\d+", text) else text
    return knobs or None


def activation_text(activation: SwiGLU) -> str:
    """An activation in words, for tables."""
    extras = [f"limit {activation.limit:g}"] if activation.limit is not None else []
    extras += [f"alpha {activation.alpha:g}"] if activation.alpha != 1 else []
    extras += [f"up bias {activation.up_bias:g}"] if activation.up_bias else []
    return f"SwiGLU ({', '.join(extras)})" if extras else "SwiGLU"
