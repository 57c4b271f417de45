"""Knob spaces: names, legal values, and which combinations make sense."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megamoe.errors import InvalidInput

Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Knob:
    """One tunable.

    Attributes:
        name: as users set it.
        values: every legal value, the default first.
        meaning: one line for tables.
        wire: whether all ranks must agree on it.
    """

    name: str
    values: tuple[object, ...]
    meaning: str
    wire: bool = False

    @property
    def default(self) -> object:
        """What holds when the knob is not set."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on several knobs at once.

    Attributes:
        holds: whether complete values keep it.
        text: what must hold, for the error message.
    """

    holds: Callable[[Values], bool]
    text: str


@dataclass(frozen=True, slots=True)
class Space:
    """All knobs of a backend and the rules between them."""

    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...] = ()

    def complete(self, given: Values | None = None) -> dict[str, object]:
        """Legal values for all knobs: those given, defaults for the rest.

        Raises:
            InvalidInput: an unknown knob, an illegal value, or a rule broken; names what is legal.
        """
        if not isinstance(given, Mapping | None):
            raise InvalidInput(
                f"knobs are a {type(given).__name__}; allowed: a mapping of names to values.", hint="for example knobs={'order': 'swap'}"
            )
        given = dict(given or {})
        known = {knob.name: knob for knob in self.knobs}
        for name, value in given.items():
            if name not in known:
                raise InvalidInput(f"knob {name!r} does not exist; allowed: {', '.join(known)}.", hint=f"drop {name}")
            # 1 == True in Python, but a switch is not a number.
            if not any(value == legal and isinstance(value, bool) == isinstance(legal, bool) for legal in known[name].values):
                legal = ", ".join(map(str, known[name].values))
                raise InvalidInput(f"knob {name}={value!r}; allowed: {legal}.", hint=f"drop {name} for {known[name].default!r}")
        values = {knob.name: given.get(knob.name, knob.default) for knob in self.knobs}
        for rule in self.rules:
            if not rule.holds(values):
                raise InvalidInput(f"knobs {values} break a rule: {rule.text}.", hint="change one of these knobs")
        return values

    def wire(self, values: Values) -> dict[str, object]:
        """The part of complete values that all ranks must agree on."""
        return {knob.name: values[knob.name] for knob in self.knobs if knob.wire}

    def candidates(self, fixed: Values | None = None) -> Iterator[dict[str, object]]:
        """Every legal combination that keeps what is fixed, defaults first."""
        fixed = dict(fixed or {})
        self.complete(fixed)
        choices = [(fixed[knob.name],) if knob.name in fixed else knob.values for knob in self.knobs]
        for combination in itertools.product(*choices):
            values = dict(zip((knob.name for knob in self.knobs), combination, strict=True))
            if all(rule.holds(values) for rule in self.rules):
                yield values
