"""The ring of rows under the task stream, model-checked: two groups and more never stand still; smaller rings and other rules fail."""

import random
from dataclasses import replace

import pytest

from .ring_model import Fault, Ring, Rules, explore, walk


def make(rng, blocks, size, group, span, ahead, rules=None, **more):
    """A launch of random rows whose tokens come several times, as of ascending experts."""
    valid = [rng.choice((size, rng.randint(1, size))) for _ in range(blocks)]
    rows = [b * size + i for b in range(blocks) for i in range(valid[b])]
    tokens = {row: rng.randrange(max(1, len(rows) // rng.choice((1, 2, 4)))) for row in rows}
    sizes = {"n1": rng.randint(1, 3), "n2": rng.randint(1, 3), "ctas": rng.randint(1, 4), "slots": rng.randint(1, 5), **more}
    return Ring(valid, tokens, size=size, group=group, span=span, ahead=ahead, rules=rules or Rules(), **sizes)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_rings_of_two_groups_and_more_never_stand_still_and_lose_nothing(group):
    rng = random.Random(group)
    for span in range(2 * group, 5 * group + 1):
        for _ in range(60):
            ring = make(rng, rng.randint(0, 5 * group + 2), rng.randint(1, 4), group, span, rng.randint(2 * group, span))
            walk(ring, rng)
            assert ring.fc2 == [ring.n2] * ring.blocks


@pytest.mark.parametrize(("tokens", "slots"), [((0, 1, 0, 1), 1), ((0, 0, 0), 2), ((0, 0, 1, 1), 2)])
def test_every_interleaving_of_a_small_launch(tokens, slots):
    """A row a block."""

    def small():
        rows = dict(enumerate(tokens))
        return Ring([1] * len(rows), rows, size=1, group=1, n1=1, n2=1, span=2, ahead=2, ctas=2, slots=slots, rules=Rules())

    assert explore(small, limit=200_000) > 1000


def found(rng, rules=None, attempts=300, **sizes):
    for _ in range(attempts):
        try:
            walk(make(rng, **sizes, rules=rules), rng)
        except Fault as fault:
            return str(fault)
    return ""


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_ring_that_is_too_small_stands_still(group):
    for span in range(1, 2 * group):
        assert found(random.Random(span), blocks=4 * group + 1, size=2, group=group, span=span, ahead=span) == "nothing can go on"


def test_rows_written_without_room_are_found():
    fault = found(random.Random(1), replace(Rules(), room=False), blocks=8, size=2, group=1, span=2, ahead=2)
    assert "another" in fault


def test_copies_that_are_not_checked_are_found():
    fault = found(random.Random(2), replace(Rules(), copies_checked=False), blocks=8, size=2, group=1, span=2, ahead=2)
    assert "copy of another token" in fault


def test_batches_whose_rows_wait_for_each_other_stand_still():
    """Why only the first row waits: a batch reaches from one group into the next."""
    rules = replace(Rules(), first_waits=False)
    assert found(random.Random(3), rules, blocks=8, size=2, group=1, span=2, ahead=2, slots=5) == "nothing can go on"


def expected_crossings(ring):
    """Times that tokens cross if a copy finds what is at most ``span - ahead`` blocks behind it, and what nothing will overwrite."""
    last, crossings = {}, 0
    for row in sorted(ring.tokens):
        block, before = row // ring.size, last.get(ring.tokens[row])
        lost = before is not None and block - before > ring.span - ring.ahead and before + ring.span < ring.blocks
        crossings += before is None or lost
        last[ring.tokens[row]] = block
    return crossings


def test_tokens_cross_once_while_the_ring_holds_them():
    """A warp that is late may find more of them gone, but on the whole fewer cross."""
    rng = random.Random(4)
    crossed, expected = 0, 0
    for span, ahead in [(6, 4), (4, 2), (8, 2), (8, 4), (20, 4)] * 20:
        blocks = rng.randint(span, 20)
        ring = walk(make(rng, blocks, 3, 1, span, ahead), rng)
        tokens, rows = len(set(ring.tokens.values())), len(ring.tokens)
        assert tokens <= ring.crossed <= rows
        if blocks == span:
            assert ring.crossed == tokens
        crossed, expected = crossed + ring.crossed, expected + expected_crossings(ring)
    assert crossed < expected
