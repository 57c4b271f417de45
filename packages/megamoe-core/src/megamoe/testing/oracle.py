"""The judge: the expert layer in float64 numpy, with formulas of its own.

Imports neither the reference backend nor ``megamoe.formats`` nor any wheel, and loads no torch by itself. It takes the operands actually
used (bf16, or quantized data with their scales) and recomputes

    FC1 -> + b13 -> clamp, gated activation -> * routing weight (early) -> re-quantize -> FC2 -> + b2 -> * routing weight (late) -> sum

in float64 except for quantization, which rounds to float32 first, as kernels hold the value. Where an operand comes as bf16 and the format
is quantized, the oracle quantizes it itself, so that an error in a backend's own quantization shows.

    result = oracle.compute(problem, weights, x, topk_ids, topk_weights)
    assert oracle.judge(out, result, format=problem.format).ok

Many calls with the same weights take ``oracle.Experts(problem.format, weights)`` in their place, which makes and keeps every expert once.

Of a matrix only some rows at a time are in float64: an expert of a large layer would have half a gigabyte, and on machines that hand out
memory slowly, touching that much takes longer than all arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megamoe import env
from megamoe.testing.oracle_numbers import (
    FACTS,
    Array,
    Codes,
    Floats,
    decode,
    dequantize,
    distance_to_edge,
    quantize_activations,
    quantize_weight,
    some_rows,
    step,
    unpack_nibbles,
)

if TYPE_CHECKING:
    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights

_BF16_OVERFLOW = (2 - 2.0**-8) * 2.0**127
"""The smallest magnitude that bf16 rounds to infinity."""

_MXFP8_STEP = 2.0**-4
"""Largest relative error of a normal E4M3 value: half of the step 2^-3 at a power of two. Below 2^-6 of the block's scale, which is at most
2/448 of its largest value, the step stays what it is there: an error of at most 2^-10 * 2/448 < 2^-17 of the largest value."""

_MXFP8_RMS = 2.0**-3 / 12**0.5
"""Root mean square of that error where a value is uniform between two codes, at a power of two, where it is largest."""

_TINY = 2.0**-126
"""Absolute part of the bound: the smallest normal float32."""


@dataclass(frozen=True, slots=True, eq=False)
class OracleResult:
    """What the layer should give.

    Attributes:
        value: (tokens, hidden) float64.
        bound: (tokens, hidden) float64, how far a correct kernel's element may be off: 2^-7 times the sum of the magnitudes of all products
            that FC2 and the final sum add up, plus 2^-126, plus for every route the widest step between neighbouring codes among its values
            between FC1 and FC2, times the largest weight. It covers bf16 rounding, float32 summation in any order, and a value between FC1
            and FC2 that rounds to the neighbouring code because the kernel's sums differ in their last bits (tensor cores add FP8 products
            to about 14 bits, so this happens to some values in a hundred); where few products are summed, one such value shows.
        crossing: (tokens, hidden) float64, how much the element may gain in error when a token's routes are summed in groups and each sum
            crosses as MXFP8. A group's sum is at most the sum of its routes' magnitudes, and groups only add up: so 2^-4 times the sum of
            the magnitudes of all its routes' rows, plus 2^-17 times the largest such sum in its block of 32 elements.
        edge: how far a token's result moves, as L2 norm, when its values between FC1 and FC2 that are so close to the edge between two
            codes that a correct kernel may hold either round to the other one: the root of the sum of the squares of their moves, of the
            token with the largest. Where there are few tokens it can be most of the error; among many it is little.
    """

    value: Floats
    bound: Floats
    crossing: Floats
    edge: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """The comparison of an output with the oracle's.

    Attributes:
        ok: within both tolerances.
        rel_l2: norm of the difference over the norm of the oracle's result, where that is finite; infinite when only the result is 0.
        worst: largest difference as a multiple of the element's bound; at most 1 when fine.
        text: one sentence for a person, with the place of the worst element.
    """

    ok: bool
    rel_l2: float
    worst: float
    text: str

    def __bool__(self) -> bool:
        return self.ok


class _Expert(NamedTuple):
    """One expert on the CPU: the codes of its matrices, (N, K), and its biases, (N,) or one zero."""

    w13: Codes
    w2: Codes
    b13: Floats
    b2: Floats


class Experts:
    """Experts as the layer uses them, quantized here where they came as bf16.

    Args:
        format: of the problem.
        weights: all experts in logical order. Who changes them makes another one of this.
    """

    def __init__(self, format: str, weights: ExpertWeights) -> None:
        self.weights = weights
        self._format = format
        self._kept: dict[int, _Expert] = {}

    def keep(self, experts: Iterable[int]) -> None:
        """Make these experts, side by side, and keep them: calls that need no others touch no device."""
        missing = [expert for expert in experts if expert not in self._kept]
        with ThreadPoolExecutor(env.threads()) as pool:  # numpy lets go of the interpreter
            self._kept.update(zip(missing, pool.map(self._make, missing), strict=True))

    def __getitem__(self, expert: int) -> _Expert:
        return self._kept.get(expert) or self._make(expert)

    def _make(self, expert: int) -> _Expert:
        w13, w2 = (expert_codes(self._format, self.weights, name, expert) for name in ("w13", "w2"))
        return _Expert(w13, w2, _bias(self.weights.b13, expert), _bias(self.weights.b2, expert))


class _Given(NamedTuple):
    """What one expert gives to its routes.

    Attributes:
        token: (routes,) the token of each; several may be the same.
        row, terms, steps: (routes, hidden), what goes into the token's result and into its bound.
        edge: (routes,) see :class:`OracleResult`, squared; all of a token's is at one of its routes.
    """

    token: Array
    row: Floats
    terms: Floats
    steps: Floats
    edge: Floats


def compute(
    problem: MoEProblem, weights: ExpertWeights | Experts, x: Any, topk_ids: Any, topk_weights: Any, x_scale: Any = None
) -> OracleResult:
    """Recompute the layer for one rank's tokens. How experts are spread over ranks does not matter to the result.

    Tensors are torch tensors on any device, or numpy arrays: floating ones hold values, uint8 ones hold codes, uint16 ones bf16 bits.

    Args:
        problem: the layer.
        weights: all ``problem.experts`` experts in logical order (not only a rank's own), bf16 or quantized with their scales;
            or what was made of them for many calls.
        x: (tokens, hidden) bf16, or codes of the format (``nvfp4``: (tokens, hidden / 2), low nibble first).
        topk_ids: (tokens, top_k) integers; ids outside 0..experts-1 are no route.
        topk_weights: (tokens, top_k) float32, bf16 or float16.
        x_scale: block scales of a quantized ``x``, (tokens, hidden / block).
    """
    experts = weights if isinstance(weights, Experts) else Experts(problem.format, weights)
    ids = _array(topk_ids).astype(np.int64)
    route_weight = values_of(topk_weights)
    xs = _activation_values(problem.format, x, x_scale, experts.weights.x_scale)
    total = np.zeros((xs.shape[0], problem.hidden))
    terms, steps, rows = np.zeros_like(total), np.zeros_like(total), np.zeros_like(total)
    edge = np.zeros(len(xs))  # squared
    routed = np.where((ids >= 0) & (ids < problem.experts), ids, -1)
    named = [int(expert) for expert in np.unique(routed[routed >= 0])]
    if experts is weights:
        experts.keep(named)

    def given(expert: int) -> _Given:
        token, slot = np.nonzero(routed == expert)
        return _given(problem, experts[expert], experts.weights.mid_scale, token, xs[token], route_weight[token, slot][:, None])

    together = env.threads()
    with ThreadPoolExecutor(together) as pool:  # numpy lets go of the interpreter
        for first in range(0, len(named), together):  # of so many experts at a time, what they give is in memory
            for one in pool.map(given, named[first : first + together]):
                # add.at: one token may take several routes to the same expert.
                np.add.at(total, one.token, one.row)
                np.add.at(rows, one.token, np.abs(one.row))
                np.add.at(terms, one.token, one.terms)
                np.add.at(steps, one.token, one.steps)
                np.add.at(edge, one.token, one.edge)
    padded = np.pad(rows, ((0, 0), (0, -problem.hidden % 32)))
    blocks = np.repeat(padded.reshape(len(rows), padded.shape[1] // 32, 32).max(axis=2, initial=0), 32, axis=1)[:, : problem.hidden]
    return OracleResult(total, 2.0**-7 * terms + steps + _TINY, _MXFP8_STEP * rows + 2.0**-17 * blocks, float(edge.max(initial=0)) ** 0.5)


@np.errstate(invalid="ignore", over="ignore")
def _given(problem: MoEProblem, expert: _Expert, mid_scale: float | None, token: Array, x: Floats, weight: Floats) -> _Given:
    """What an expert gives to routes of ``token`` (routes,) with activations ``x`` (routes, hidden) and weights (routes, 1)."""
    format, hidden, inter, routes = problem.format, problem.hidden, problem.intermediate, len(token)
    soon, late = (weight, np.ones(1)) if problem.routing_weight == "early" else (np.ones(1), weight)
    fc1, length13 = np.empty((routes, 2 * inter)), np.empty(2 * inter)
    for part, w13 in some_rows(format, expert.w13):
        fc1[:, part] = x @ w13.T
        length13[part] = np.sqrt(np.einsum("nk,nk->n", w13, w13))
    fc1 += expert.b13
    exact = _activate(problem, fc1)
    codes = quantize_activations(format, exact * soon, mid_scale)
    mid, widest = dequantize(format, codes), step(format, codes).max(axis=1, initial=0)
    fc2, terms, largest, square2 = np.empty((routes, hidden)), np.empty((routes, hidden)), np.empty(hidden), np.zeros(inter)
    for part, w2 in some_rows(format, expert.w2):
        fc2[:, part] = mid @ w2.T
        square2 += np.einsum("nk,nk->k", w2, w2)
        size = np.abs(w2, out=w2)
        terms[:, part] = np.abs(mid) @ size.T
        largest[part] = size.max(axis=1, initial=0)
    reach = _reach(problem, fc1, exact, x, length13) * np.abs(soon)
    to_edge, move = distance_to_edge(format, codes, exact * soon)
    moves = np.where(to_edge < reach, move, 0) * np.sqrt(square2) * np.abs(late)
    # What happens to a value happens on every route of its token to this expert: moves add up before they are squared.
    _, first, same = np.unique(token, return_index=True, return_inverse=True)
    added = np.zeros((len(first), inter))
    np.add.at(added, same, moves)
    edge = np.zeros(routes)
    edge[first] = np.square(np.nan_to_num(added)).sum(axis=1)
    magnitude = np.abs(late)
    return _Given(token, (fc2 + expert.b2) * late, (terms + np.abs(expert.b2)) * magnitude, widest[:, None] * largest * magnitude, edge)


def judge(out: Any, result: OracleResult, *, format: str, wire: str = "bf16") -> Judgement:
    """Compare a backend's (tokens, hidden) output with the oracle's.

    Where the oracle's element is not finite, or overflows bf16, the output must not be finite either; elsewhere it must be.

    Args:
        out: torch tensor or numpy array.
        result: from :func:`compute`.
        format: decides the tolerance on the relative L2 error: 0.004 for ``bf16``, 0.01 for all others.
        wire: how results cross between ranks; ``"mxfp8"`` adds ``result.crossing`` to every bound, and 0.0361 to the relative L2 error,
            which holds where the sums of groups do not cancel each other. ``result.edge`` comes on top, as independent errors add up.
    """
    got, want = values_of(out), result.value
    crosses = wire == "mxfp8"
    limit = FACTS[format].rel_l2 + (_MXFP8_RMS if crosses else 0)
    bound = result.bound + result.crossing if crosses else result.bound
    if got.shape != want.shape:
        return Judgement(False, np.inf, np.inf, f"output has shape {got.shape}, the oracle's has {want.shape}")
    finite = np.abs(want) < _BF16_OVERFLOW
    wrong = finite != np.isfinite(got)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        return Judgement(
            False, np.inf, np.inf, f"{int(wrong.sum())} elements are not finite on one side only, first {place}: {_pair(got, want, place)}"
        )
    error = np.where(finite, np.abs(got - np.where(finite, want, 0)), 0)
    norm = float(np.linalg.norm(want[finite]))
    distance = float(np.linalg.norm(error))
    rel_l2 = distance / norm if norm else (np.inf if distance else 0.0)
    limit = float(np.hypot(limit, result.edge / norm)) if norm else limit
    ratio = np.divide(error, bound, out=np.zeros_like(error), where=finite)
    worst = float(ratio.max(initial=0))
    ok = rel_l2 < limit and worst <= 1
    text = f"relative L2 error {rel_l2:.2e} (allowed {limit:.3g}), worst element at {worst:.2f} of its bound"
    if worst > 0:
        place = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
        text += f", {int((ratio > 1).sum())} outside, worst {place}: {_pair(got, want, place)}"
    return Judgement(ok, rel_l2, worst, text)


def expert_codes(format: str, weights: ExpertWeights, name: str, expert: int) -> Codes:
    """One expert's ``w13`` or ``w2`` (N, K) as the layer uses it: its own codes, or quantized here first when it came as bf16."""
    facts = FACTS[format]
    matrix = getattr(weights, name)[expert]
    scale = getattr(weights, f"{name}_scale")
    codes = _codes(facts.element, matrix)
    if codes is None:
        return quantize_weight(format, values_of(matrix))
    total = getattr(weights, f"{name}_global")
    tensor = scale if facts.element != "bf16" and not facts.scale else total
    tensor = np.float32(1) if tensor is None else np.float32(values_of(tensor)[expert])
    return Codes(codes, None if not facts.scale else _scale_codes(facts.scale, scale[expert]), tensor)


def _activation_values(format: str, x: Any, x_scale: Any, static_scale: float | None) -> Floats:
    facts = FACTS[format]
    codes = _codes(facts.element, x)
    if codes is None:
        return _rounded(format, values_of(x), static_scale)
    tensor = np.float32(1 if static_scale is None else static_scale)
    return dequantize(format, Codes(codes, _scale_codes(facts.scale, x_scale) if facts.scale else None, tensor))


def _rounded(format: str, values: Floats, static_scale: float | None) -> Floats:
    return dequantize(format, quantize_activations(format, values, static_scale))


def _activate(problem: MoEProblem, fc1: Floats) -> Floats:
    """(rows, 2 I), gate columns first, to (rows, I)."""
    form = problem.activation
    gate, up = fc1[:, : problem.intermediate], fc1[:, problem.intermediate :]
    if form.limit is not None:
        gate, up = np.minimum(gate, form.limit), np.clip(up, -form.limit, form.limit)
    activated: Floats = (up + form.up_bias) * gate / (1 + np.exp(-form.alpha * gate))
    return activated


def _reach(problem: MoEProblem, fc1: Floats, exact: Floats, x: Floats, length13: Floats) -> Floats:
    """How far a correct kernel's value behind the activation may be from ``exact``, since its sums of FC1 differ in their last bits.

    ``length13`` has the L2 norms of the rows of ``w13``.
    """
    off = FACTS[problem.format].sums * np.outer(np.linalg.norm(x, axis=1), length13) / x.shape[1] ** 0.5
    gates = np.arange(fc1.shape[1]) < problem.intermediate
    by_gate, by_up = (np.abs(_activate(problem, fc1 + np.where(half, off, 0)) - exact) for half in (gates, ~gates))
    return by_gate + by_up


def _bias(bias: Any, expert: int) -> Floats:
    return np.zeros(1) if bias is None else values_of(bias[expert])


# ---------------------------------------------------------------------------------------------------- operands


def _array(tensor: Any) -> Array:
    """A numpy array of the same bits. Types that numpy lacks come as unsigned integers of their width."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch

    plain = tensor.detach().cpu().contiguous()
    if _dtype(plain) in _CODED:
        integer = torch.int16 if plain.element_size() == 2 else torch.uint8
        plain = plain.view(integer)
    array: Array = plain.numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array


_CODED = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e8m0fnu": "e8m0"}


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def values_of(tensor: Any) -> Floats:
    """Values of a torch tensor or numpy array (uint16: bf16 bits), float64."""
    array = _array(tensor)
    kind = _CODED.get(_dtype(tensor), "bf16" if array.dtype == np.uint16 else "")
    return decode(kind, array) if kind else array.astype(np.float64)


def _codes(element: str, tensor: Any) -> Array | None:
    """The element codes of a tensor that already is in the element type, else ``None``."""
    array = _array(tensor)
    if element == "bf16":
        return array if array.dtype == np.uint16 else None
    if array.dtype != np.uint8:
        return None
    return unpack_nibbles(array) if element == "e2m1" else array


def _scale_codes(kind: str, scale: Any) -> Array:
    return values_of(scale).astype(np.float32) if kind == "f32" else _array(scale)


def _pair(got: Floats, want: Floats, place: tuple[int, ...]) -> str:
    return f"got {got[place]:.6g}, should be {want[place]:.6g}"
