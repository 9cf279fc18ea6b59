"""Options of commands: signatures made from declared options, and options that commands on finished runs share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from typer import Argument, Option

from dflash_bench.core.option import OptionSpec, options_of


def under(heading: str) -> Callable[..., Any]:
    return lambda *names, **settings: Option(*names, rich_help_panel=heading, **settings)


PROMPTS = "suites prompts data limit thinking"
MODELS = "methods model target drafts"
Config = Annotated[
    Path | None,
    Option(
        "-c",
        "--config",
        metavar="FILE",
        help="TOML file of options by name, such as limit = 4 or method = ['dflash', 'eagle3']. Options on the "
        "command line take precedence.",
    ),
]
"""`Command` reads the file and treats its options as if given on the command line."""


def with_options(order: str = "", helps: Mapping[str, str] | None = None) -> Callable[[Callable[..., None]], Any]:
    """Replace a command's parameters that are groups of options by the groups' options.

    `order`, names between spaces, selects options and places the command's own parameters among them; by default all
    are taken where their group stands. `helps` overrides help texts for this command.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        groups = {name: own.pop(name).annotation for name in list(own) if is_dataclass(own[name].annotation)}
        specs = {name: (group, spec) for group in groups.values() for name, spec in options_of(group).items()}
        names = dict.fromkeys([*(order.split() or specs), *own])
        placed = [own[name] if name in own else _parameter(*specs[name], (helps or {}).get(name)) for name in names]
        config = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=Config)

        @wraps(command)
        def from_options(**typed: Any) -> None:
            mine = {name: typed.pop(name) for name in own}
            command(**mine, **{name: _read(group, typed) for name, group in groups.items()})

        from_options.__signature__ = Signature(  # type: ignore[attr-defined]
            [*(one.replace(kind=Parameter.KEYWORD_ONLY) for one in placed), config]
        )
        from_options.__annotations__ = {}
        from_options.briefs = {spec.flag: spec.brief for _, spec in specs.values() if spec.brief}  # type: ignore[attr-defined]
        return from_options

    return decorated


_types = cache(get_type_hints)


def _parameter(group: type, spec: OptionSpec, help: str | None) -> Parameter:  # noqa: A002
    """Return typer's parameter: text if the option parses itself, a list of texts, or the field's own type."""
    default, kind = spec.default, _types(group)[spec.name]
    if spec.required:
        default = Parameter.empty
    elif spec.parse is not None:
        default = ",".join(f"{value:g}" for value in default) if default else None
        kind = str if default else str | None
    elif get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    option = Option(
        *filter(None, (spec.letter, spec.flag)),
        metavar=spec.metavar,
        help=help or spec.help,
        min=spec.minimum,
        rich_help_panel=spec.heading,
    )
    return Parameter(spec.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _read(group: type, typed: Mapping[str, Any]) -> Any:
    return group(**{name: spec.read(typed[name]) for name, spec in options_of(group).items() if name in typed})


AsJson = Annotated[bool, under("Results")("--json", help="Print one JSON object and nothing else.")]
NEWEST = "Default: the newest run in results/runs; @2 is the one before, as 'dflash-bench runs' lists them."
Run = Annotated[Path | None, Argument(metavar="[RUN]", help=f"Folder of a finished run. {NEWEST}")]
Runs = Annotated[list[Path], Argument(metavar="RUN...", help="Folders of finished runs of the same command.")]
Allow = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Continue despite a difference that an error message refused under this name, and print it; may be "
        "repeated.",
    ),
]
AllowParts = Annotated[
    list[str] | None,
    Option(
        metavar="WHAT",
        help="Read the run even if some parts are unfinished, damaged, doubled, foreign or invalid; may be repeated.",
    ),
]
Limits = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help='TOML file with a table per metric, such as ["al.pooled"], of the limits fall (0.05 for 5 %), at_least '
        "and run_noise.",
    ),
]
