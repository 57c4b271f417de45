"""A model of one rank's task stream over a ring of rows: pulling warps, CTAs that claim tasks, and what each of them waits for.

Counts are exchanged and peers' memory can be read; everything else of a launch on this rank is here, with the kernel's own order of tasks:

    pull    the warp of a CTA takes batches of rows, every ``ctas``-th one. The first row of a batch waits until FC2 of the blocks ``ahead``
            and ``span`` before its own is complete; the rows from the first one without room on are left for the next batch. Rows that
            cross come at once. Of the rest the first waits for its carrier, others go along when theirs is there. A copy is checked
            after it was read: where its carrier's place may have been overwritten the row crosses after all;
    task    a CTA holds three claimed tasks at most and runs them in order: FC1 when all rows of its block are there, FC2 when FC1 of it is.

Places of pool and mid hold names of what was written there, so that a read of anything else is a :class:`Fault`; so is a state in which
nothing can go on. :class:`Rules` turns single rules off.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from .lanes import Int32, device_modules

STREAM = device_modules("stream")["stream"]
HELD = 3  # tasks of a CTA


@dataclass(frozen=True)
class Rules:
    """The rules that make the ring safe. All true is the real one."""

    room: bool = True
    """A row waits for FC2 of the blocks before it. Otherwise it is written at once."""
    first_waits: bool = True
    """Only the first row of a batch waits. Otherwise the batch waits until all its rows can go on."""
    copies_checked: bool = True
    """A copy is checked after it was read."""


class Fault(Exception):
    """The ring did something wrong; the message says what."""


@dataclass
class Puller:
    """The pulling warp of a CTA."""

    row: int
    pending: list[int] = field(default_factory=list)
    read: dict[int, tuple[int, object]] = field(default_factory=dict)  # row -> the carrier it was copied from, what lay there
    taken: int = 0


class Ring:
    """One launch.

    Args:
        rows: valid rows of every block; every block has ``size`` places.
        tokens: row -> its token. Of the rows of one token the first crosses, the others are copied.
        size: rows of a block.
        group, n1, n2: of the stream.
        span: blocks of the ring.
        ahead: blocks that are pulled at most before FC2.
        ctas: how many share the work.
        slots: rows of a batch.
        rules: what holds.
    """

    def __init__(self, rows, tokens, *, size, group, n1, n2, span, ahead, ctas, slots, rules):
        self.valid, self.tokens, self.size, self.group, self.n1, self.n2 = rows, tokens, size, group, n1, n2
        self.span, self.ahead, self.ctas, self.slots, self.rules = span, ahead, ctas, slots, rules
        self.blocks, self.total = len(rows), len(rows) * size
        self.first = {}
        for row in sorted(tokens):
            self.first.setdefault(tokens[row], row)
        self.pool: dict[int, Any] = {}
        self.mid: dict[tuple[int, int], int] = {}
        self.ready, self.fc1, self.fc2 = [0] * self.blocks, [0] * self.blocks, [0] * self.blocks
        self.carrier: dict[int, int] = {}
        self.claims, self.crossed = 0, 0
        self.held = [[] for _ in range(ctas)]
        self.pullers = [Puller(cta) for cta in range(ctas)]

    def key(self):
        """What the future depends on."""
        pullers = tuple((p.row, tuple(p.pending), tuple(p.read.items()), p.taken) for p in self.pullers)
        held = tuple(map(tuple, self.held))
        counters = tuple(self.ready), tuple(self.fc1), tuple(self.fc2), self.claims
        places = (tuple(sorted(found.items())) for found in (self.pool, self.mid, self.carrier))
        return pullers, held, counters, *places

    def ended(self):
        return all(p.row >= self.total for p in self.pullers) and self.claims == self.blocks * (self.n1 + self.n2) and not any(self.held)

    def steps(self):
        """What can be done now: functions without arguments."""
        found = []
        for cta in range(self.ctas):
            if len(self.held[cta]) < HELD and self.claims < self.blocks * (self.n1 + self.n2):
                found.append((self._claim, cta))
            if self.held[cta] and self._can_run(self.held[cta][0]):
                found.append((self._run, cta))
            puller = self.pullers[cta]
            if puller.read:
                found.append((self._check, cta))
            elif puller.pending:
                if self._can_move(puller):
                    found.append((self._move, cta))
            elif puller.row < self.total and self._can_begin(puller):
                found.append((self._begin, cta))
        return found

    def _claim(self, cta):
        kind, block, tile = STREAM.decode(Int32(self.claims), Int32(self.blocks), self.group, self.n1, self.n2)
        self.held[cta].append((int(kind), int(block), int(tile)))
        self.claims += 1

    def _can_run(self, task):
        kind, block, _ = task
        return self.ready[block] == self.valid[block] if kind == STREAM.FC1 else self.fc1[block] == self.n1

    def _run(self, cta):
        kind, block, tile = self.held[cta].pop(0)
        place = block % self.span
        if kind == STREAM.FC1:
            for i in range(self.valid[block]):
                row = block * self.size + i
                if self.pool.get(place * self.size + i) != self.tokens[row]:
                    raise Fault(f"FC1 of block {block} found another row in the pool")
            self.mid[place, tile] = block
            self.fc1[block] += 1
        else:
            if any(self.mid[place, n] != block for n in range(self.n1)):
                raise Fault(f"FC2 of block {block} found another block in mid")
            self.fc2[block] += 1

    def _batch(self, puller):
        rows = [puller.row + s * self.ctas for s in range(self.slots)]
        return [(s, row) for s, row in enumerate(rows) if row in self.tokens]

    def _room(self, row):
        block = row // self.size
        before = (block - self.ahead, block - self.span)
        return not self.rules.room or all(b < 0 or self.fc2[b] == self.n2 for b in before)

    def _can_begin(self, puller):
        rooms = [self._room(row) for _, row in self._batch(puller)]
        return not rooms or (rooms[0] if self.rules.first_waits else all(rooms))

    def _begin(self, cta):
        puller = self.pullers[cta]
        batch = self._batch(puller)
        puller.taken = next((s for s, row in batch if not self._room(row)), self.slots)
        puller.pending = [row for s, row in batch if s < puller.taken]
        self._next(puller)

    def _next(self, puller):
        if not puller.pending:
            puller.row += puller.taken * self.ctas

    def _crossing(self, puller):
        return [row for row in puller.pending if self.first[self.tokens[row]] == row or row in puller.read]

    def _can_move(self, puller):
        there = [self.tokens[row] in self.carrier for row in puller.pending]
        return bool(self._crossing(puller)) or (there[0] if self.rules.first_waits else all(there))

    def _move(self, cta):
        """Rows that cross, or what the places of carriers hold now."""
        puller = self.pullers[cta]
        crossing = self._crossing(puller)
        for row in crossing:
            self._cross(row)
        if crossing:
            puller.pending = [row for row in puller.pending if row not in crossing]
            self._next(puller)
            return
        for row in puller.pending:
            carrier = self.carrier.get(self.tokens[row])
            if carrier is not None:
                puller.read[row] = carrier, self.pool.get(carrier % (self.span * self.size))

    def _cross(self, row):
        self.crossed += 1
        self._write(row, self.tokens[row])

    def _check(self, cta):
        """Write what was copied, unless its carrier may be gone."""
        puller = self.pullers[cta]
        for row, (carrier, found) in puller.read.items():
            block = carrier // self.size
            follower = block + self.span
            if self.rules.copies_checked and follower < self.blocks and self.fc2[follower - self.ahead] == self.n2:
                self._cross(row)
            elif found != self.tokens[row]:
                raise Fault(f"row {row} is a copy of another token")
            else:
                self._write(row, found)
        puller.pending = [row for row in puller.pending if row not in puller.read]
        puller.read = {}
        self._next(puller)

    def _write(self, row, token):
        self.pool[row % (self.span * self.size)] = token
        self.ready[row // self.size] += 1
        self.carrier[token] = row


def walk(ring, rng: random.Random):
    """One random interleaving to the end."""
    lazy = rng.choice((None, *range(ring.ctas)))  # a CTA that runs only when it must
    while not ring.ended():
        steps = ring.steps()
        if not steps:
            raise Fault("nothing can go on")
        busy = [step for step in steps if step[1] != lazy]
        step, cta = rng.choice(busy if busy and rng.random() < 0.98 else steps)
        step(cta)
    return ring


def explore(make, limit: int) -> int:
    """Every interleaving of the ring that ``make`` gives; the number of states.

    Raises:
        Fault: one of them goes wrong, or there are more than ``limit`` states.
    """
    import copy

    waiting, seen = [make()], set()
    while waiting:
        ring = waiting.pop()
        if ring.ended():
            continue
        steps = ring.steps()
        if not steps:
            raise Fault("nothing can go on")
        for number in range(len(steps)):
            after = copy.deepcopy(ring)
            step, cta = after.steps()[number]
            step(cta)
            if (key := after.key()) not in seen:
                seen.add(key)
                if len(seen) > limit:
                    raise Fault(f"more than {limit} states")
                waiting.append(after)
    return len(seen)
