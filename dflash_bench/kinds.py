"""One entry of the table of methods, and how its options are written: KEY=VALUE,... or the number of tokens alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dflash_bench.errors import UserError, unknown

Value = int | float | str
Shape = Literal["none", "chain", "tree"]


@dataclass(frozen=True, slots=True)
class Option:
    """`low` to `high`, both included, or one of `words`. Where the default is None, preset, draft or engine decide."""

    name: str
    summary: str
    default: Value | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    words: tuple[str, ...] = ()
    kind: type[int] | type[float] | type[str] = int
    is_file: bool = False
    """Is its value the path of a file? Then what the file holds is part of a run's identity."""

    @property
    def range(self) -> str:
        """For people: `2 to 64 tokens, or auto`."""
        numbers = "" if self.kind is str else f"{self.low:g} to {self.high:g} {self.unit}".rstrip()
        return ", or ".join(part for part in (numbers, " or ".join(self.words)) if part) or "text"

    def read(self, text: str) -> Value | None:
        """None for what is not a value of this option."""
        if text in self.words:
            return text
        if self.kind is str:
            return None if self.words or not text else text
        if not re.fullmatch("[0-9]+" if self.kind is int else r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", text):
            return None
        # With 0 added, -0 is 0.
        value = int(text) if self.kind is int else float(text) + 0.0
        assert self.low is not None and self.high is not None
        return value if self.low <= value <= self.high else None


@dataclass(frozen=True, slots=True)
class Kind:
    """What every method of one name has in common."""

    name: str
    summary: str
    weights: str | None
    """The draft that it needs: the METHOD of `--draft METHOD=PATH`."""
    shape: Shape
    """Of what it drafts in a round."""
    lossless: bool
    """Is its output the target's own: the same tokens at temperature 0, and the same distribution above?"""
    options: tuple[Option, ...] = ()
    count: str | None = None
    """The option that NAME:N sets: tokens drafted a round, the anchor not counted."""
    alternatives: tuple[frozenset[str], ...] = ()
    """Options that say one thing in several ways, so that only one of them may be given."""
    is_probe: bool = False
    """Does it measure the engine apart from any draft's quality? Then nothing is wrong with what it has accepted."""
    module: str | None = None
    """Where its `build(models, target, method)` stands; None: in the file of its name in `engine/drafters/`."""

    def option(self, name: str) -> Option:
        """Raises UserError for an unknown one."""
        for option in self.options:
            if option.name == name:
                return option
        raise unknown(f"option of method {self.name}", name, [option.name for option in self.options])

    def read(self, text: str, where: str) -> dict[str, Value]:
        """The options in what follows the colon. Raises UserError, which begins with `where`, for all that is wrong."""
        if not self.options:
            raise UserError(f"{where}: {self.name} has no options; write it without ':'")
        if not text:
            raise UserError(f"{where}: nothing follows the colon; leave it out, or write {self._example}")
        if "=" not in text:
            name = self._counted(text, where)
            return {name: self._value(name, text, where)}
        options: dict[str, Value] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals:
                raise UserError(f"{where}: '{part}' is not KEY=VALUE; write {self._example}")
            if name in options:
                raise UserError(f"{where}: {name} is given twice; give it once")
            options[name] = self._value(name, value, where)
        self._refuse_alternatives(options, where)
        return {option.name: options[option.name] for option in self.options if option.name in options}

    def write(self, options: Mapping[str, Value]) -> str:
        """What `read` reads, in one spelling: options in the table's order, and the count alone without its name."""
        if options.keys() == {self.count} and all(isinstance(value, int) for value in options.values()):
            return str(*options.values())
        given = [option.name for option in self.options if option.name in options]
        return ",".join(f"{name}={_text(options[name])}" for name in given)

    def _refuse_alternatives(self, options: Mapping[str, Value], where: str) -> None:
        for group in self.alternatives:
            given = [option.name for option in self.options if option.name in group & options.keys()]
            if len(given) > 1:
                raise UserError(f"{where}: {' and '.join(given)} say the same in two ways; give one of them")

    def _counted(self, text: str, where: str) -> str:
        """The option that a value without a name is of."""
        if self.count is not None:
            return self.count
        raise UserError(f"{where}: '{text}' is not KEY=VALUE; write {self._example}")

    def _value(self, name: str, text: str, where: str) -> Value:
        option = self.option(name)
        if (value := option.read(text)) is None:
            raise UserError(f"{where}: {name} must be {option.range}, not '{text}'")
        return value

    @property
    def _example(self) -> str:
        names = ", ".join(option.name for option in self.options)
        return (f"{self.name}:N or " if self.count else "") + f"{self.name}:KEY=VALUE,... with {names}"


def _text(value: Value) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
