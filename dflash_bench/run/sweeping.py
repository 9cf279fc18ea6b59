"""What `--over` asks for: values of options and settings, as a grid or one at a time from what was typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import product

from dflash_bench import methods
from dflash_bench.errors import UserError, unknown
from dflash_bench.methods import Method
from dflash_bench.records import Settings

SETTINGS = tuple(item.name for item in fields(Settings))
OF_RUNS = ("dtype", "engine", "quantize")
"""What decides how the target is loaded."""
OF_SETTINGS = "setting"
"""What is written before the colon for a setting that has its name in common with an option of a method."""
EXAMPLE = "--over block=4,8,16, --over eagle3-tree:top_k=4,8 or --over temperature=0,1"


@dataclass(frozen=True, slots=True)
class Axis:
    """Several values of one name, as text; `owner` is the method that it is for, or `OF_SETTINGS`."""

    name: str
    values: tuple[str, ...]
    owner: str | None = None
    flag: str = "--over"

    def is_of(self, method: Method) -> bool:
        """Has the method such an option, and is it meant?"""
        return self.owner in (None, method.name) and any(self.name == option.name for option in method.kind.options)

    @property
    def is_of_settings(self) -> bool:
        return self.owner in (None, OF_SETTINGS) and self.name in SETTINGS


def parse(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Of each `[OWNER:]NAME=VALUE,VALUE`. Raises UserError for what is not, and for what is given twice."""
    axes = tuple(map(_axis, texts))
    for number, axis in enumerate(axes):
        if any((axis.owner, axis.name) == (other.owner, other.name) for other in axes[:number]):
            raise UserError(f"--over names {axis.name} twice; give all its values once")
    return axes


def _axis(text: str) -> Axis:
    match = re.fullmatch(r"(?:([^:=,]+):)?([^:=,]+)=(.*)", text)
    if match is None:
        raise UserError(f"--over takes NAME=VALUE,VALUE, not '{text}'; such as {EXAMPLE}")
    return Axis(match[2], split(match[3], f"--over {match[2]}"), match[1])


def split(text: str, where: str) -> tuple[str, ...]:
    """The values between commas. Raises UserError for an empty one, or one that is there twice."""
    values = tuple(text.split(","))
    if not all(values):
        raise UserError(f"{where} has an empty value in '{text}'; write the values with a comma between them")
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise UserError(f"{where} has the value {twice[0]} twice; give it once")
    return values


def divided(axes: Sequence[Axis], chosen: Sequence[Method]) -> tuple[list[Axis], list[Axis]]:
    """Those of methods, and those of settings. Raises UserError for one of neither or of both."""
    of_methods = [axis for axis in axes if any(axis.is_of(method) for method in chosen)]
    of_settings = [axis for axis in axes if axis.is_of_settings]
    for axis in axes:
        if axis in of_methods and axis in of_settings:
            owner = next(method.name for method in chosen if axis.is_of(method))
            raise UserError(
                f"--over {axis.name}: this is an option of {owner} and a setting; write "
                f"{owner}:{axis.name}= or {OF_SETTINGS}:{axis.name}="
            )
        if axis not in of_methods and axis not in of_settings:
            raise _unknown(axis, chosen)
    return of_methods, of_settings


def _unknown(axis: Axis, chosen: Sequence[Method]) -> UserError:
    if axis.name in OF_RUNS:
        return UserError(
            f"--over {axis.name}: a sweep is one run, and a run loads one target; make a run for each --{axis.name} "
            "and set them side by side with 'dflash-bench compare'"
        )
    names = [method.name for method in chosen if method.kind.options]
    if axis.owner not in (None, OF_SETTINGS, *names):
        return UserError(f"--over {axis.owner}:{axis.name} has no effect without --method {axis.owner}")
    options = dict.fromkeys(option.name for method in chosen for option in method.kind.options)
    return unknown("option or setting to sweep over", axis.name, [*options, *SETTINGS])


def laid_out(chosen: Sequence[Method], axes: Sequence[Axis], one_at_a_time: bool) -> list[Method]:
    """Each method with every combination of values; or as it is, and with each value of one option at a time.

    In a grid a method that says an option itself keeps its own. Raises UserError where that leaves an axis unused.
    """
    if not axes:
        return list(chosen)
    for axis in axes:
        if not one_at_a_time and not any(axis.is_of(method) and method.leaves_open(axis.name) for method in chosen):
            raise UserError(f"{axis.flag} {axis.name} has no effect: each method that has it already says its own")
    made = [
        varied.label
        for method in chosen
        for varied in (_one_at_a_time(method, axes) if one_at_a_time else _grid(method, axes))
    ]
    return methods.chosen(made)


def _grid(method: Method, axes: Sequence[Axis]) -> list[Method]:
    open_axes = [axis for axis in axes if axis.is_of(method) and method.leaves_open(axis.name)]
    return [
        reduce(lambda varied, pair: _with(varied, *pair), zip(open_axes, values, strict=True), method)
        for values in product(*(axis.values for axis in open_axes))
    ]


def _one_at_a_time(method: Method, axes: Sequence[Axis]) -> list[Method]:
    varied = [(axis.name, _with(method, axis, value)) for axis in axes if axis.is_of(method) for value in axis.values]
    # What the method has anyway is not measured twice.
    return [method, *(variant for name, variant in varied if variant.option(name) != method.option(name))]


def _with(method: Method, axis: Axis, text: str) -> Method:
    option = method.kind.option(axis.name)
    if (value := option.read(text)) is None:
        raise UserError(f"{axis.flag}: {axis.name} of {method.name} must be {option.range}, not '{text}'")
    return method.with_option(axis.name, value)
