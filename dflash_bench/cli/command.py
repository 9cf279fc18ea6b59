"""What every command refuses before it begins: options that say nothing, or two things; and how `run` shows its own."""

from __future__ import annotations

from typing import Any

from typer import Context
from typer.core import TyperCommand, TyperOption

from dflash_bench.cli.net import require_addresses
from dflash_bench.errors import UserError
from dflash_bench.text import shortened

LONGEST_NAME = 255
"""Bytes that file systems allow for one name; a whole path has sixteen times as many."""


class Command(TyperCommand):
    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        typed, _, typed_params = self.make_parser(ctx).parse_args(args=list(args))
        if any(param.name == "help" for param in typed_params):
            return super().parse_args(ctx, args)
        require_addresses()
        for param in typed_params:
            _refuse_repeated(param, typed_params.count(param))
            value = typed[str(param.name)]
            for text in value if isinstance(value, list | tuple) else [value]:
                _refuse_empty_or_long(param, text)
        return super().parse_args(ctx, args)


def _name(param: Any) -> str:
    """As the help has it: --limit, RUN."""
    return str(param.opts[0] if isinstance(param, TyperOption) else param.metavar or param.name)


def _refuse_repeated(param: Any, times: int) -> None:
    if isinstance(param, TyperOption) and times > 1 and not param.multiple:
        raise UserError(f"{_name(param)} is given {times} times and takes one value; give it once")


def _refuse_empty_or_long(param: Any, text: object) -> None:
    if text == "":
        raise UserError(f"{_name(param)} is empty; leave it out, or give it a value")
    if isinstance(text, str) and max(len(text) / 16, *(len(part.encode()) for part in text.split("/"))) > LONGEST_NAME:
        raise UserError(f"{_name(param)} {shortened(text, 40)} is longer than any name can be")


class GroupedHelp(Command):
    """Options under the heading that `rich_help_panel` gives; typer itself does that only with rich, which is slow."""

    def format_options(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                groups.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
