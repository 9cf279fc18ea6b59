"""Options, each declared once: flag, help, how its text is parsed, its range, and the options it needs.

A group of options is a frozen dataclass whose fields carry an `OptionSpec`. The command line, configuration files, the
Python API, error messages, and the options in `run.json` are all derived from these fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import shortened
from dflash_bench.core.secrets import Arguments

NUMBER, WHOLE = r"-?([0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12})(e-?[0-9]{1,2})?", "[0-9]{1,9}"
CONTEXT = "none|([0-9]{1,7})(k?)"
MOST_AT_A_TIME, MOST_TOKENS = 10**5, 10**7
"""Upper bounds of options: concurrent answers; tokens of a text."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a set of options, and the error for an option that it rules out."""

    holds: Callable[[Any], bool]
    error: str
    """A format string of {flag} and {value} of the option, and of all {options}."""
    is_of_sweep: bool = False
    """Whether it depends on settings that --over may give; it is then checked after the sweep is laid out."""


def condition(holds: Callable[[Any], bool], where: str, is_of_sweep: bool = False) -> Condition:
    """Return the condition under which an option has an effect; `where` names when it has none ("without --server")."""
    return Condition(holds, f"{{flag}} has no effect {where}", is_of_sweep)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an option accepts."""

    holds: Callable[[float], bool]
    error: str
    """The error after the flag, with {values} for the wrong numbers."""


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option. `flag` and `name` are set by `options_of`."""

    heading: str
    help: str
    brief: str = ""
    """A line for the short help of commands with many options; without one, the option is in the whole help alone."""
    metavar: str | None = None
    flag: str = ""
    letter: str = ""
    """A short form of the flag, such as -o."""
    name: str = ""
    required: bool = False
    minimum: float | None = None
    most: int | None = None
    """Upper bound far above any run's needs, so that a typing error does not run for ever."""
    choices: Callable[[], Sequence[str]] | None = None
    kind: str = ""
    """Name of a choice in errors; by default the flag's name."""
    parse: Callable[[str, str], Any] | None = None
    """Parses the text, given the flag as second argument; None: typer parses the field's own type."""
    has_commas: bool = False
    """Whether one text may hold several comma-separated values."""
    range: Range | None = None
    check: Callable[[Any], object] | None = None
    """Raises UserError for an invalid value."""
    needs: tuple[Condition, ...] = ()
    conflicts: tuple[Condition, ...] = ()
    in_race: bool = True
    """Whether `recommend` takes it, too."""
    default: Any = None

    def is_given(self, options: Any) -> bool:
        return bool(getattr(options, self.name) != self.default)

    def read(self, typed: Any) -> Any:
        """Return the field's value for a value from typer. Raises UserError for text that cannot be parsed."""
        if typed is None:
            return self.default
        if self.parse is not None:
            return self.parse(typed, self.flag)
        return tuple(typed) if isinstance(typed, list) else typed


def under(heading: str) -> Callable[..., Any]:
    """Return a function that declares fields under a help heading, from their help and the rest of `OptionSpec`."""

    def declared(help: str, *, default: Any = None, **rest: Any) -> Any:  # noqa: A002
        option = OptionSpec(heading, help, **rest)
        return field(default=MISSING if option.required else default, metadata={"option": option})

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


def split_at_commas(text: str) -> list[str]:
    """Split `dflash:n=8,rule=match,eagle3` into `dflash:n=8,rule=match` and `eagle3`: KEY=VALUE continues a value."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part.partition("=")[0]:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def unified(options: Any) -> None:
    """Split comma-separated texts into their parts (called in `__post_init__`)."""
    for spec in _specs(options):
        value = getattr(options, spec.name)
        if spec.has_commas and any("," in text for text in value):
            object.__setattr__(options, spec.name, tuple(part for text in value for part in split_at_commas(text)))


def to_json(options: Any) -> dict[str, Any]:
    """Return the options as stored in `run.json`: without secrets, and with paths as text."""
    values = {spec.name: getattr(options, spec.name) for spec in _specs(options)}
    return {name: str(value) if isinstance(value, Path | Arguments) else value for name, value in values.items()}


def check_options(options: Any) -> None:
    """Raise UserError for options without effect, and for values out of range."""
    refuse_without_effect(options)
    refuse_values(options)


def refuse_without_effect(options: Any, *, before_sweep: bool = False) -> None:
    """Raise UserError for the first option that lacks an option it needs, or that another option makes ineffective.

    `before_sweep` skips conditions on settings that a sweep may set.
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
    """Raise UserError for the first value that its option does not accept."""
    for spec in _specs(options):
        if spec.is_given(options):
            refuse_value(spec, getattr(options, spec.name))


def refuse_value(spec: OptionSpec, value: Any) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if spec.minimum is not None and not one >= spec.minimum:
            raise UserError(f"{spec.flag} takes at least {spec.minimum:,}, not {shortened(str(one), 40)}")
        if spec.most is not None and one is not None and not one <= spec.most:  # also refuses nan
            raise UserError(f"{spec.flag} takes at most {spec.most:,}, not {shortened(str(one), 40)}")
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
        raise UserError(f"{spec.flag} lists a value twice: {_listed(values)}")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def check_threads(number: int) -> None:
    """Raise UserError for more threads than the machine has processors."""
    if number > (os.cpu_count() or 1):
        raise UserError(
            f"--threads {shortened(str(number), 40)} is more than the processors of this machine, {os.cpu_count()}"
        )


# Parsers of text


def numbers(text: str, where: str, *, whole: bool = False) -> tuple[Any, ...]:
    """Parse comma-separated numbers. Raises UserError for anything else, and for a number given twice."""
    parts = text.split(",")
    if not all(re.fullmatch(WHOLE if whole else NUMBER, part) for part in parts):
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{where} takes {kind}, or several with commas between them, not {shortened(text, 40)}")
    values: tuple[Any, ...] = tuple(map(int if whole else float, parts))
    if len({*values}) < len(values):
        raise UserError(f"{where} lists a value twice: {text}")
    return values


def whole_numbers(text: str, where: str) -> tuple[int, ...]:
    return numbers(text, where, whole=True)


def context_lengths(text: str, where: str) -> tuple[int | None, ...]:
    """Parse 4k, 1000, none, or several with commas. Raises UserError for anything else, and for a repeated length."""
    matches = [re.fullmatch(CONTEXT, part) for part in text.split(",")]
    values = tuple(match and match[1] and int(match[1]) * (1024 if match[2] else 1) for match in matches)
    if not all(matches) or 0 in values:
        raise UserError(
            f"{where} takes a number of tokens such as 4k (4096) or 1000, or none, or several with commas between "
            f"them, not {shortened(text, 40)}"
        )
    if len({*values}) < len(values):
        raise UserError(f"{where} lists a value twice: {text}")
    return tuple(int(value) if value else None for value in values)
