"""The exchange protocol, model-checked: the real rules hold in every interleaving, and each rule is needed."""

import itertools
import random
from dataclasses import fields, replace

import pytest

from .exchange_model import Exchange, Fault, Rules, explore, walk

ALL = [[False, True], [True, False]]
ONE_WAY = [[False, True], [False, False]]
OTHER_WAY = [[False, False], [True, False]]
NONE = [[False, False], [False, False]]
PAIR = [[0, 2], [0, 0]]
TRIPLE = [[0, 3], [0, 0]]
PAIRS = [[0, 2], [2, 0]]


def random_traffic(rng: random.Random, ranks: int, launches: int) -> list[list[list[int]]]:
    density = rng.choice((0.0, 0.3, 0.7, 1.0))

    def routes(source: int, target: int) -> int:
        return rng.choice((1, 1, 2, 3)) if source != target and rng.random() < density else 0

    return [[[routes(r, p) for p in range(ranks)] for r in range(ranks)] for _ in range(launches)]


@pytest.mark.parametrize("pattern", list(itertools.product([ALL, ONE_WAY, OTHER_WAY, NONE], repeat=2)))
def test_two_ranks_two_launches_every_interleaving(pattern):
    assert explore(Exchange(list(pattern), Rules()), limit=100_000) > 50


@pytest.mark.parametrize("pattern", [[ONE_WAY] * 3, [NONE, ONE_WAY, NONE], [ONE_WAY, OTHER_WAY, ONE_WAY], [NONE] * 4])
def test_two_ranks_more_launches_every_interleaving(pattern):
    assert explore(Exchange(pattern, Rules()), limit=200_000) > 100


@pytest.mark.parametrize("pattern", [[PAIR], [TRIPLE], [PAIR] * 2, [PAIR, NONE, PAIR], [PAIR, TRIPLE], [PAIRS]])
def test_groups_every_interleaving(pattern):
    assert explore(Exchange(pattern, Rules()), limit=200_000) > 50


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_interleavings_of_the_real_protocol(ranks):
    rng = random.Random(ranks)
    for _ in range(150):
        walk(Exchange(random_traffic(rng, ranks, 4), Rules()), rng)


@pytest.mark.parametrize("rule", [f.name for f in fields(Rules)])
def test_every_rule_is_needed(rule):
    broken = replace(Rules(), **{rule: False})
    rng = random.Random(7)
    patterns = [[NONE, NONE, ONE_WAY], [ONE_WAY] * 3, [ALL] * 2, [PAIR] * 2]
    for attempt in range(400):
        traffic = patterns[attempt] if attempt < len(patterns) else random_traffic(rng, rng.choice((2, 3)), 4)
        try:
            walk(Exchange(traffic, broken), rng)
        except Fault:
            return
    pytest.fail(f"without {rule} no fault was found in 400 interleavings")
