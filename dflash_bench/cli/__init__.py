"""The command line: options become dataclasses, the library works, text comes out.

The only package that prints and exits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Context, Option
from typer.core import TyperGroup

from dflash_bench import __version__
from dflash_bench.cli import net
from dflash_bench.core.errors import UserError
from dflash_bench.core.terminal import note, prepare, say, starting

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Base class of typer's usage errors, which typer does not export."""
PARTS = {
    "run": "run sweep recommend suites methods",
    "demo": "demo",
    "diagnose": "try soak verify-distribution profile doctor conform crosscheck",
    "models": "models fetch inspect convert build-datastore",
    "train": "train",
    "reproduce": "reproduce",
    "results": "runs merge index open compare import baseline check",
    "submissions": "submit accept",
    "show": "report replay card movie plot",
}
"""The files of commands in the order of --help, and their commands."""


JOBS = {
    "Measure": "run sweep merge try demo reproduce",
    "Decide": "recommend replay profile doctor",
    "Read": "report compare runs open card movie plot index import",
    "Gate": "baseline check",
    "Share": "submit accept",
    "Drafts and models": "models fetch inspect convert train build-datastore",
    "Prompts and methods": "suites methods",
    "Check the engine": "soak conform verify-distribution",
}
"""Commands by what they are for, as --help shows them."""


class Root(TyperGroup):
    def format_commands(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        for heading, names in JOBS.items():
            with formatter.section(heading):
                told = [(name, str(self.commands[name].help).partition("\n")[0].rstrip(".")) for name in names.split()]
                formatter.write_dl(told)

    def get_params(self, ctx: Context) -> Any:  # type: ignore[override]
        params = super().get_params(ctx)
        for param in params:
            if param.name in ("install_completion", "show_completion") and param.default is None:
                param.default = False  # for the same reason as below
        return params

    def get_help_option(self, ctx: Context) -> Any:  # type: ignore[override]
        option = super().get_help_option(ctx)
        if option is not None:
            # With typer's default, None, it loads pydantic to see that --help was not given: a third of `run --help`.
            option.default = False
        return option

    def invoke(self, ctx: Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note("stopped")
            raise typer.Exit(net.stopped_status()) from None
        except BrokenPipeError as error:  # typer would silently exit with status 1
            raise UserError(f"a process or server that was written to has ended ({error})") from error


@cache
def program(*parts: str) -> typer.Typer:
    """Return the command line with the commands of these files, by default of all."""
    app = typer.Typer(
        cls=Root,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Rich loads as long as all the rest of --help
        help="Measure speculative decoding honestly: acceptance, speed and token-for-token exactness.\n\n"
        "To begin, with the small model that is included: dflash-bench run --suite gsm8k --limit 4",
    )
    app.callback()(_root)
    for part in parts or PARTS:
        app.add_typer(import_module(f"{__name__}.{part}").app)
    return app


def _as_typed(words: list[str]) -> list[str]:
    """Return the words of a command; `help run` is `run --help`, and help of everything is shown for no words."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    return words or ["--help"]


def _parts(words: Sequence[str]) -> list[str]:
    """Return the file of the command that is typed; none for help, completion and errors, which name all commands."""
    return [part for part, commands in PARTS.items() if words and words[0] in commands.split()]


NUMBERS = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "numbers from {ge} up",
    "greater_than": "numbers above {gt}",
    "less_than_equal": "numbers up to {le}",
    "less_than": "numbers below {lt}",
}
"""The values that an option takes, by pydantic's error type."""


def _misuse(error: Any) -> str:
    """Return a usage error in our words, with the way to help unless it holds a guess."""
    message = error.format_message().rstrip(".")
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if found and (takes := NUMBERS.get(found[0]["type"])):
        given, bounds = found[0]["input"], found[0].get("ctx", {})
        message = f"{max(error.param.opts, key=len)} takes {takes.format(**bounds)}, not {given}"
    return message if "Did you mean" in message else f"{message}; see 'dflash-bench COMMAND --help'"


def main() -> None:
    """Run the command line: a UserError, or an error that `net` can explain, is one line on stderr and exit status 2.

    Anything else is a bug and keeps its traceback.
    """
    prepare()
    try:
        _refuse_undecodable(sys.argv)
        with net.stopping_on_signals():
            words = _as_typed(sys.argv[1:])
            starting.begin(sys.stderr)
            status = program(*_parts(words))(args=words, standalone_mode=False)
        starting.end()
        sys.stdout.flush()  # a full disk is an error of this command
        sys.exit(status)
    except UserError as error:
        note(f"dflash-bench: {error}")
    except USAGE_ERROR as error:
        note(f"dflash-bench: {_misuse(error)}")
    except net.FROM_OUTSIDE as error:
        if (text := net.explain(error)) is None:
            raise
        note(f"dflash-bench: {text}")
    sys.exit(2)


def _refuse_undecodable(words: list[str]) -> None:
    """Raise UserError for an argument that is not UTF-8: run.json, which stores the command, could not hold it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"'{word}' is not UTF-8; rename the file or folder") from error


def _version(wanted: bool) -> None:
    if wanted:
        say(f"dflash-bench {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, Option("-V", "--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
