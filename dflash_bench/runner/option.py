"""The declaration of an option: its flag and help, how its text is parsed, which values it takes, what it needs.

A group of options is a frozen dataclass whose fields carry an `OptionSpec`. From them follow the command line, a
configuration file, what is refused, and what `run.json` keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import shortened
from dflash_bench.core.secrets import Arguments

NUMBER, WHOLE = r"-?([0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12})(e-?[0-9]{1,2})?", "[0-9]{1,9}"
CONTEXT = "none|([0-9]{1,7})(k?)"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on all options, and the error of an option that has no effect without it."""

    holds: Callable[[Any], bool]
    error: str
    """The error, with {flag} and {value} of the option, and {options} for all of them."""
    is_of_sweep: bool = False
    """Whether it depends on settings that --over may give; it is then checked after these are expanded."""


def condition(holds: Callable[[Any], bool], where: str, is_of_sweep: bool = False) -> Condition:
    """Of which an option has no effect: `where` says so ("without --server")."""
    return Condition(holds, f"{{flag}} has no effect {where}", is_of_sweep)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an option takes."""

    holds: Callable[[float], bool]
    error: str
    """The error after the flag, with {values} for those outside the range."""


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option. `flag` and `name` are set by `options_of`."""

    heading: str
    help: str
    metavar: str | None = None
    flag: str = ""
    name: str = ""
    minimum: int | None = None
    most: int | None = None
    """Far more than any run needs: a typing mistake must not run forever."""
    choices: Callable[[], Sequence[str]] | None = None
    kind: str = ""
    """The name of a choice in errors; by default that of the flag."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of choices."""
    parse: Callable[[str, str], Any] | None = None
    """Parses the text after the flag; None: typer parses the field's own type."""
    range: Range | None = None
    check: Callable[[Any], object] | None = None
    """Raises UserError for an invalid value."""
    needs: tuple[Condition, ...] = ()
    conflicts: tuple[Condition, ...] = ()
    default: Any = None

    def is_given(self, options: Any) -> bool:
        return bool(getattr(options, self.name) != self.default)

    def read(self, typed: Any) -> Any:
        """Return the field's value for what typer parsed. Raises UserError for invalid text."""
        if typed is None:
            return self.default
        if self.parse is not None:
            return self.parse(typed, self.flag)
        return tuple(typed) if isinstance(typed, list) else typed


def under(heading: str) -> Callable[..., Any]:
    """Return a function that declares fields of a group, which help shows under this heading."""

    def declared(help: str, *, default: Any = None, **rest: Any) -> Any:  # noqa: A002
        return field(default=default, metadata={"option": OptionSpec(heading, help, **rest)})

    return declared


@cache
def options_of(group: type) -> dict[str, OptionSpec]:
    """Return the options of a dataclass by field name, in the order of help."""
    found = {}
    for item in fields(group):
        if declared := item.metadata.get("option"):
            flag = declared.flag or f"--{item.name.replace('_', '-')}"
            default = None if item.default is MISSING else item.default
            found[item.name] = replace(declared, flag=flag, name=item.name, default=default)
    return found


def _specs(options: Any) -> Iterable[OptionSpec]:
    group: Any = type(options)
    return options_of(group).values()


def unified(options: Any) -> None:
    """Replace other spellings of choices by the canonical one; for `__post_init__`."""
    for spec in _specs(options):
        value = getattr(options, spec.name)
        if spec.aliases and isinstance(value, str):
            object.__setattr__(options, spec.name, spec.aliases.get(value, value))


def to_json(options: Any) -> dict[str, Any]:
    """Return options as `run.json` keeps them: without secrets, and with paths as text."""
    values = {spec.name: getattr(options, spec.name) for spec in _specs(options)}
    return {name: str(value) if isinstance(value, Path | Arguments) else value for name, value in values.items()}


def check_options(options: Any) -> None:
    """Raise UserError for options without effect, and for invalid values."""
    refuse_without_effect(options)
    refuse_values(options)


def refuse_without_effect(options: Any, *, before_sweep: bool = False) -> None:
    """Raise UserError for the first option that has no effect without another, or beside it.

    Before a sweep is laid out only that is looked at on which it has no bearing.
    """
    for spec in _specs(options):
        if not spec.is_given(options):
            continue
        against = [one for one in spec.conflicts if one.holds(options)]
        against += [one for one in spec.needs if not one.holds(options)]
        for one in against:
            if not (before_sweep and one.is_of_sweep):
                value = getattr(options, spec.name)
                raise UserError(one.error.format(flag=spec.flag, value=value, options=options))


def refuse_values(options: Any) -> None:
    """Raise UserError for the first value that its option does not take."""
    for spec in _specs(options):
        if spec.is_given(options):
            refuse_value(spec, getattr(options, spec.name))


def refuse_value(spec: OptionSpec, value: Any) -> None:
    if spec.most is not None and value > spec.most:
        raise UserError(f"{spec.flag} takes at most {spec.most:,}, not {shortened(str(value), 40)}")
    if spec.range is not None:
        _refuse_out_of_range(spec, spec.range, value if isinstance(value, tuple) else (value,))
    if spec.check is not None:
        spec.check(value)
    if spec.choices is not None:
        for one in value if isinstance(value, tuple) else (value,):
            if one not in (known := list(spec.choices())):
                raise unknown(spec.kind or spec.flag.removeprefix("--"), one, known)


def _refuse_out_of_range(spec: OptionSpec, allowed: Range, values: Sequence[float]) -> None:
    if wrong := [value for value in values if not allowed.holds(value)]:
        raise UserError(f"{spec.flag} {allowed.error.format(values=_listed(wrong))}")
    if len(set(values)) < len(values):
        raise UserError(f"{spec.flag} names one twice: {_listed(values)}")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


# How text is read


def numbers(text: str, where: str, *, whole: bool = False) -> tuple[Any, ...]:
    """Parse numbers separated by commas. Raises UserError for other text, and for a repeated number."""
    parts = text.split(",")
    if not all(re.fullmatch(WHOLE if whole else NUMBER, part) for part in parts):
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{where} takes {kind}, or several with commas between them, not {shortened(text, 40)}")
    values: tuple[Any, ...] = tuple(map(int if whole else float, parts))
    if len({*values}) < len(values):
        raise UserError(f"{where} names one twice: {text}")
    return values


def whole_numbers(text: str, where: str) -> tuple[int, ...]:
    return numbers(text, where, whole=True)


def context_lengths(text: str, where: str) -> tuple[int | None, ...]:
    """Parse 4k, 1000 or none, or several separated by commas. Raises UserError for others, and for a repeated one."""
    matches = [re.fullmatch(CONTEXT, part) for part in text.split(",")]
    values = tuple(match and match[1] and int(match[1]) * (1024 if match[2] else 1) for match in matches)
    if not all(matches) or 0 in values:
        raise UserError(
            f"{where} takes a number of tokens such as 4k (4096) or 1000, or none, or several with commas between "
            f"them, not {shortened(text, 40)}"
        )
    if len({*values}) < len(values):
        raise UserError(f"{where} names one twice: {text}")
    return tuple(int(value) if value else None for value in values)
