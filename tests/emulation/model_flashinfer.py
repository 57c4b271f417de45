"""The MoE layer that FlashInfer's megakernels compute, in numpy, from its definition: no code of theirs, and none of the emulation's.

Every expert e of a token: quantized(weight * silu(gate) * up) @ fc2[e], where gate and up are the halves of x @ fc1[e] in runs of
16 (NVFP4) or 8 (MXFP8) columns. Products and sums are in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import model_numbers

TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 64, 8, 2, 1024, 512
SEED = 20261201


@dataclass(frozen=True)
class Quantized:
    """Rows of K codes: bytes as they lie in memory, scales one for `block` elements, and the values."""

    bytes: np.ndarray
    scales: np.ndarray
    values: np.ndarray


def quantized(codes, scales, four_bit):
    """Codes (..., K) and scale codes (..., K / block)."""
    block = 16 if four_bit else 32
    table, factors = (
        model_numbers.table("e2m1" if four_bit else "e4m3"),
        model_numbers.table("e4m3") if four_bit else model_numbers.ue8m0_table(),
    )
    values = table[codes] * np.repeat(factors[scales], block, -1)
    data = codes[..., 0::2] | codes[..., 1::2] << 4 if four_bit else codes
    return Quantized(data.astype(np.uint8), scales.astype(np.uint8), values)


def quantize(x, four_bit):
    """What the kernels keep of the first product, as values: blocks scaled so that their largest magnitude fits."""
    block = 16 if four_bit else 32
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    most = np.abs(groups).max(-1, keepdims=True)
    if four_bit:
        codes = model_numbers.nearest((most / np.float32(6)).astype(np.float32), "e4m3")
        scale = model_numbers.table("e4m3")[codes]
    else:
        scale = 2.0 ** np.ceil(np.log2(np.maximum(most, 2.0**-120).astype(np.float64) / 448))
    name = "e2m1" if four_bit else "e4m3"
    parts = np.divide(groups, scale, out=np.zeros(groups.shape), where=scale > 0).astype(np.float32)
    return (model_numbers.table(name)[model_numbers.nearest(parts, name)] * scale).reshape(x.shape)


def blocked(scales):
    """Scales (rows, columns) as block-scaled products read them: blocks of 128 rows by 4, of which row r is word r // 32 of line r % 32."""
    rows, columns = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), np.uint8)
    padded[:rows, :columns] = scales
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


@dataclass(frozen=True)
class Layer:
    """One layer with its inputs; weights are (experts, rows, K)."""

    four_bit: bool
    x: Quantized
    fc1: Quantized
    fc2: Quantized
    experts_of: np.ndarray
    weights_of: np.ndarray
    tokens: int
    experts: int
    top_k: int
    hidden: int
    inter: int

    @classmethod
    def random(cls, four_bit, tokens=TOKENS, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, inter=INTER):
        """Codes of every magnitude that keep the sums in range."""
        rng = np.random.default_rng(SEED)
        block = 16 if four_bit else 32

        def draw(*shape):
            if four_bit:
                codes = rng.integers(0, 16, shape)
                scales = rng.integers(0x20, 0x30, (*shape[:-1], shape[-1] // block))  # E4M3: 1/8 to 1/2
            else:
                codes = rng.integers(0, 0x40, shape) | rng.integers(0, 2, shape) << 7  # magnitudes below 2
                scales = rng.integers(124, 128, (*shape[:-1], shape[-1] // block))
            return quantized(codes, scales, four_bit)

        experts_of = np.argsort(rng.random((tokens, experts)), -1)[:, :top_k].astype(np.int64)
        weights_of = rng.uniform(0.25, 1, (tokens, top_k)).astype(np.float32)
        x, fc1, fc2 = draw(tokens, hidden), draw(experts, 2 * inter, hidden), draw(experts, hidden, inter)
        return cls(four_bit, x, fc1, fc2, experts_of, weights_of, tokens, experts, top_k, hidden, inter)

    def terms(self):
        """What each chosen expert gives: (tokens, top_k, hidden), float64; and the same without rounding between the products."""
        run = 16 if self.four_bit else 8
        out, exact = (np.zeros((self.tokens, self.top_k, self.hidden)) for _ in range(2))
        for expert in range(self.experts):
            token, slot = np.nonzero(self.experts_of == expert)
            both = (self.x.values[token] @ self.fc1.values[expert].T).reshape(len(token), -1, 2, run)
            gate, up = both[:, :, 0].reshape(len(token), -1), both[:, :, 1].reshape(len(token), -1)
            middle = self.weights_of[token, slot, None] * gate / (1 + np.exp(-gate)) * up
            out[token, slot] = quantize(middle, self.four_bit) @ self.fc2.values[expert].T
            exact[token, slot] = middle @ self.fc2.values[expert].T
        return out, exact


def compare(layer, got, reduced):
    """How many outputs are wrong, of how many and which experts (unless their terms are summed); which share is within a rounding;
    where each expert's rows begin when they are padded to 64.

    `got` is (tokens, hidden), (tokens, 1, hidden) or (tokens, top_k, hidden). Wrong is what differs by more than one bfloat16 step of the
    summed terms' magnitudes and a hundredth of the row's own size: a code of the quantized middle may fall on the other side of a tie.
    """
    terms, _ = layer.terms()
    expected, size = (terms.sum(1), np.abs(terms).sum(1)) if reduced else (terms, np.abs(terms))
    got = got.reshape(expected.shape).astype(np.float64)
    bound = size * 2.0**-7 + 0.01 * np.sqrt((expected**2).mean(-1, keepdims=True))
    off = np.abs(got - expected)
    wrong = ~(off <= bound)  # NaN is wrong
    close = off <= size * 2.0**-8
    bad = [int(e) for e in range(layer.experts) if not reduced and wrong[layer.experts_of == e].any()]
    rows = np.bincount(layer.experts_of.ravel(), minlength=layer.experts)
    return {
        "outputs": int(got.size),
        "wrong_experts": bad,
        "first_rows": np.concatenate([[0], np.cumsum(-(-rows // 64) * 64)])[:-1].tolist(),
        "wrong": int(wrong.sum()),
        "close": float(close.mean()),
        "error": float(np.sqrt((off**2).sum() / (expected**2).sum())),
    }
