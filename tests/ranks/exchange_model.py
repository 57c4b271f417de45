"""A model of the one-exchange protocol between ranks, small enough to walk every interleaving.

Each rank runs launches 1, 2, 3 ... of the layer. In a launch it

    front    writes its activations ``x`` and one route list per peer, then publishes one count word per peer;
    serve    for every peer: waits for that peer's count, reads its list and its ``x``, writes the result into the peer's inbox and raises
             a flag; where the peer sent several routes of a token, each member of this group is computed by itself, stages its row and
             arrives, and the last one to arrive reads all rows and returns their sum;
    collect  for every peer that owes it a result: waits for the flag, reads the inbox;

and starts the next launch when all three are through. There is no barrier and nothing is ever zeroed: every word carries the number of
its launch, and a wait looks for exactly this launch's number. Count words lie in two banks, by the parity of the launch.

Memory is weak: a write becomes visible at some later moment and writes overtake each other, except that a release write becomes visible
only after everything its rank wrote before. Values are the launch numbers they belong to, so that a read of anything else is a fault.
:class:`Rules` turns single rules of the protocol off; each such variant is wrong and :func:`explore` or :func:`walk` must find the fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Rules:
    """The rules that make the protocol safe. All true is the real one."""

    banked_counts: bool = True
    """Count words of neighbouring launches lie in different banks."""
    unconditional_counts: bool = True
    """A count word goes to every peer, also when it is zero. Otherwise zeros are left out."""
    release_counts: bool = True
    """The count word is published after the lists and ``x`` it announces."""
    release_flags: bool = True
    """The flag is raised after the inbox row it announces."""
    exact_tags: bool = True
    """A wait looks for this launch's number. Otherwise for any number at all, as a flag that somebody has to zero would."""
    acquire_counts: bool = True
    """Lists and ``x`` are read after the count word was seen. Otherwise they may be read early."""
    release_arrivals: bool = True
    """A member of a group arrives after the row that it staged."""
    last_member_sums: bool = True
    """The last member of a group sums it. Otherwise the first one to arrive."""
    exact_groups: bool = True
    """A group is as large as the source says: its routes to this rank, repeated experts too. Otherwise a slot without an expert counts."""
    counters_restart: bool = True
    """The last member of a group takes the counter of arrivals back to zero."""
    launch_waits_for_previous: bool = True
    """A launch writes and publishes after the previous one ended. Otherwise its front may run while the previous one still works."""
    collect_before_end: bool = True
    """A launch ends after every expected result arrived."""


class Fault(Exception):
    """The protocol did something wrong; the message says what."""


class Write(NamedTuple):
    """A write on its way to memory. Only writes of one rank, or of one member of a group, are ordered, and only by ``release``."""

    rank: int
    number: int
    place: tuple
    value: int
    release: bool


class State(NamedTuple):
    """Everything there is: immutable, so that visited states can be remembered."""

    memory: tuple  # ((place, value), ...), sorted
    flying: tuple  # Writes not yet visible
    written: tuple  # per rank: writes made so far
    launch: tuple  # per rank: launch that serve and collect work on
    front: tuple  # per rank: (launch, step) of the front
    serve: tuple  # per rank, per source: step
    collect: tuple  # per rank, per peer: step


PUBLISHED, LISTED, FETCHED, SUMMED, RETURNED, FLAGGED = 1, 2, 3, 4, 5, 6
COLLECTED = 1
STAGED, ARRIVED = 1, 2  # of a member of a group; the step of a group in work is the tuple of its members'


class Exchange:
    """The protocol for one traffic pattern.

    ``traffic[n][r][p]`` is how many routes of its token rank ``r`` sends to rank ``p`` in launch ``n + 1``.
    """

    def __init__(self, traffic: list[list[list[int]]], rules: Rules) -> None:
        self.traffic, self.rules = traffic, rules
        self.launches, self.ranks = len(traffic), len(traffic[0])

    def start(self) -> State:
        zeros = tuple(0 for _ in range(self.ranks))
        grid = tuple(zeros for _ in range(self.ranks))
        return State((), (), zeros, tuple(1 for _ in zeros), tuple((1, 0) for _ in zeros), grid, grid)

    def peers(self, rank: int) -> list[int]:
        return [p for p in range(self.ranks) if p != rank]

    def sends(self, launch: int, source: int, target: int) -> bool:
        return bool(self.traffic[launch - 1][source][target])

    def members(self, launch: int, source: int, target: int) -> int:
        return int(self.traffic[launch - 1][source][target])

    def announces(self, launch: int, source: int, target: int) -> bool:
        return self.rules.unconditional_counts or self.sends(launch, source, target)

    def count_place(self, owner: int, source: int, launch: int) -> tuple:
        return ("count", owner, launch % 2 if self.rules.banked_counts else 0, source)

    # ------------------------------------------------------------------ moves
    def moves(self, state: State) -> list[tuple[str, State]]:
        """Every state that can come next, with what happened."""
        found = [*self._arrivals(state)]
        for rank in range(self.ranks):
            found += self._front_moves(state, rank)
            if state.launch[rank] > self.launches:
                continue
            for peer in self.peers(rank):
                found += self._serve_moves(state, rank, peer)
                found += self._collect_moves(state, rank, peer)
            found += self._end_moves(state, rank)
        return found

    def done(self, state: State) -> bool:
        return not state.flying and all(n > self.launches for n in state.launch)

    def _arrivals(self, state: State) -> list[tuple[str, State]]:
        found = []
        for write in state.flying:
            earlier = [w for w in state.flying if w.rank == write.rank and w.number < write.number]
            if (write.release and earlier) or any(w.place == write.place for w in earlier):
                continue
            memory = dict(state.memory)
            memory[write.place] = write.value
            rest = tuple(w for w in state.flying if w is not write)
            found.append((f"{write.place} = {write.value} arrives", state._replace(memory=tuple(sorted(memory.items())), flying=rest)))
        return found

    def _front_moves(self, state: State, rank: int) -> list[tuple[str, State]]:
        launch, step = state.front[rank]
        if launch > self.launches or (self.rules.launch_waits_for_previous and launch > state.launch[rank]):
            return []
        if launch > state.launch[rank] + 1:
            return []
        writes: list[tuple[tuple, bool]] = [(("x", rank), False)]
        writes += [(("list", p, rank), False) for p in self.peers(rank) if self.sends(launch, rank, p)]
        writes += [
            (self.count_place(p, rank, launch), self.rules.release_counts) for p in self.peers(rank) if self.announces(launch, rank, p)
        ]
        place, release = writes[step]
        after = (launch, step + 1) if step + 1 < len(writes) else (launch + 1, 0)
        return [
            (f"rank {rank} writes {place}", self._write(state._replace(front=_set(state.front, rank, after)), rank, place, launch, release))
        ]

    def _serve_moves(self, state: State, rank: int, source: int) -> list[tuple[str, State]]:
        launch, step = state.launch[rank], state.serve[rank][source]
        if step == FLAGGED:
            return []

        def at(after: object, base: State = state) -> State:
            return base._replace(serve=_set(base.serve, rank, _set(base.serve[rank], source, after)))

        if step == 0:
            if not self._tagged(state, self.count_place(rank, source, launch), launch):
                if not self.rules.acquire_counts and self.sends(launch, source, rank):
                    self._expect(state, ("list", rank, source), launch, f"rank {rank} reads the list of rank {source} early")
                return []
            return [(f"rank {rank} sees the count of rank {source}", at(PUBLISHED if self.sends(launch, source, rank) else FLAGGED))]
        if step == PUBLISHED:
            self._expect(state, ("list", rank, source), launch, f"rank {rank} reads the list of rank {source}")
            return [(f"rank {rank} reads the list of rank {source}", at(LISTED))]
        if step == LISTED:
            self._expect(state, ("x", source), launch, f"rank {rank} reads x of rank {source}")
            return [(f"rank {rank} reads x of rank {source}", at(FETCHED))]
        if step == FETCHED and self.members(launch, source, rank) > 1:
            return [(f"rank {rank} begins a group of {source}", at((0,) * self.members(launch, source, rank)))]
        if isinstance(step, tuple):
            return self._member_moves(state, rank, source, launch, at)
        if step in (FETCHED, SUMMED):
            return [(f"rank {rank} returns to {source}", self._write(at(RETURNED), rank, ("inbox", source, rank), launch, release=False))]
        release = self.rules.release_flags
        return [(f"rank {rank} flags {source}", self._write(at(FLAGGED), rank, ("flag", source, rank), launch, release=release))]

    def _member_moves(self, state: State, rank: int, source: int, launch: int, at: Callable[..., State]) -> list[tuple[str, State]]:
        steps, found = state.serve[rank][source], []
        places = [("stage", rank, source, m) for m in range(len(steps))]
        counter = ("arrived", rank, source)
        for m, step in enumerate(steps):
            if step == 0:
                # Members run beside each other: what one has written is not ordered with the others' writes.
                agent = self.ranks + (rank * self.ranks + source) * 32 + m
                written = self._write(at(_set(steps, m, STAGED)), rank, places[m], launch, release=False, agent=agent)
                found.append((f"rank {rank} stages member {m} of {source}", written))
            on_its_way = any(write.place == places[m] for write in state.flying)
            if step == STAGED and not (self.rules.release_arrivals and on_its_way):
                memory = dict(state.memory)
                arrived = memory.get(counter, 0) + 1
                after: object = _set(steps, m, ARRIVED)
                size = len(steps) + (0 if self.rules.exact_groups else 1)
                last = arrived == (size if self.rules.last_member_sums else 1)
                if last:
                    for place in places:
                        self._expect(state, place, launch, f"rank {rank} sums {place}")
                    after = SUMMED
                memory[counter] = 0 if last and self.rules.counters_restart else arrived
                found.append((f"rank {rank} arrives with member {m} of {source}", at(after)._replace(memory=tuple(sorted(memory.items())))))
        return found

    def _collect_moves(self, state: State, rank: int, peer: int) -> list[tuple[str, State]]:
        launch = state.launch[rank]
        if state.collect[rank][peer] == COLLECTED or not self.sends(launch, rank, peer):
            return []
        if not self._tagged(state, ("flag", rank, peer), launch):
            return []
        self._expect(state, ("inbox", rank, peer), launch, f"rank {rank} reads what rank {peer} returned")
        collected = _set(state.collect, rank, _set(state.collect[rank], peer, COLLECTED))
        return [(f"rank {rank} collects from {peer}", state._replace(collect=collected))]

    def _end_moves(self, state: State, rank: int) -> list[tuple[str, State]]:
        launch = state.launch[rank]
        if state.front[rank] < (launch + 1, 0):
            return []
        for peer in self.peers(rank):
            if state.serve[rank][peer] != FLAGGED:
                return []
            if self.rules.collect_before_end and self.sends(launch, rank, peer) and state.collect[rank][peer] != COLLECTED:
                return []
        zeros = tuple(0 for _ in range(self.ranks))
        return [
            (
                f"rank {rank} ends launch {launch}",
                state._replace(
                    launch=_set(state.launch, rank, launch + 1),
                    serve=_set(state.serve, rank, zeros),
                    collect=_set(state.collect, rank, zeros),
                ),
            )
        ]

    # ------------------------------------------------------------------ memory
    def _write(self, state: State, rank: int, place: tuple, value: int, release: bool, agent: int | None = None) -> State:
        number = state.written[rank] + 1
        write = Write(rank if agent is None else agent, number, place, value, release)
        return state._replace(flying=(*state.flying, write), written=_set(state.written, rank, number))

    def _tagged(self, state: State, place: tuple, launch: int) -> bool:
        tag = dict(state.memory).get(place, 0)
        return tag == launch if self.rules.exact_tags else tag != 0

    def _expect(self, state: State, place: tuple, launch: int, what: str) -> None:
        seen = dict(state.memory).get(place, 0)
        if seen != launch:
            raise Fault(f"in launch {launch} {what}: finds launch {seen}'s")


def _set(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def explore(exchange: Exchange, limit: int) -> int:
    """Walk every reachable state; the number of states.

    Raises:
        Fault: a wrong value was read, or some rank waits for ever.
        OverflowError: more than ``limit`` states.
    """
    start = exchange.start()
    seen, stack = {_key(start)}, [start]
    while stack:
        state = stack.pop()
        moves = exchange.moves(state)
        if not moves and not exchange.done(state):
            raise Fault(f"nothing can move: launches {state.launch}, fronts {state.front}, serving {state.serve}")
        for _, after in moves:
            key = _key(after)
            if key not in seen:
                seen.add(key)
                stack.append(after)
        if len(seen) > limit:
            raise OverflowError(f"more than {limit} states")
    return len(seen)


def walk(exchange: Exchange, rng: random.Random) -> int:
    """One random interleaving to the end; the number of moves. Some walks hold one rank's writes back for long.

    Raises:
        Fault: as :func:`explore`, with the last moves.
    """
    state, history = exchange.start(), []
    slow = rng.randrange(exchange.ranks)
    patience = rng.choice((0.0, 0.5, 0.95))
    while not exchange.done(state):
        try:
            moves = exchange.moves(state)
        except Fault as fault:
            raise Fault(f"{fault} after: {'; '.join(history[-12:])}") from None
        if not moves:
            raise Fault(f"nothing can move after: {'; '.join(history[-12:])}")
        hurried = [m for m in moves if f"rank {slow} " not in m[0]]
        text, state = rng.choice(hurried if hurried and rng.random() < patience else moves)
        history.append(text)
    return len(history)


def _key(state: State) -> State:
    """The state up to the numbering of writes: only their order within a rank matters."""
    order = {w: i for i, w in enumerate(sorted(state.flying, key=lambda w: (w.rank, w.number)))}
    flying = tuple(sorted((w.rank, order[w], w.place, w.value, w.release) for w in state.flying))
    return state._replace(flying=flying, written=())
