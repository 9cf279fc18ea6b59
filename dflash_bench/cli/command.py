"""The base of all commands: refuses empty, repeated and overlong options, reads --config, and groups help."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from typer import Context
from typer.core import TyperCommand, TyperOption

from dflash_bench.cli.net import require_addresses
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import shortened

# Examples below the help of each command; a test parses them all.


EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "dflash-bench run --suite math --method dflash,eagle3",
        "dflash-bench run --prompts mine.jsonl --target ./target --draft dflash=./draft",
        "dflash-bench run --suite gsm8k --server plain=http://localhost:8000 --server dflash=http://localhost:8001",
    ),
    "sweep": (
        "dflash-bench sweep --suite gsm8k --over block=4,8,16",
        "dflash-bench sweep --suite gsm8k --over temperature=0,0.6,1",
    ),
    "recommend": (
        "dflash-bench recommend --prompts mine.jsonl --concurrency 1,8,32 --for 30m",
        "dflash-bench recommend --model qwen3-8b --suite chat --method dflash,eagle3 --launch vllm -o race",
    ),
    "reproduce": (
        "dflash-bench reproduce table1 --model qwen3-4b --data hub",
        "dflash-bench reproduce table12 --model nano --limit 8",
    ),
    "submit": ("dflash-bench submit results/runs/RUN -o mine.zip",),
    "accept": ("dflash-bench accept mine.zip --by 'Our lab' -o accepted/mine",),
    "demo": (
        "dflash-bench demo",
        "dflash-bench demo 'What is 17 times 23?' --model smollm2 --method eagle3",
    ),
    "suites": ("dflash-bench suites", "dflash-bench suites prepare speed_bench --from SPEED-Bench -o data"),
    "methods": ("dflash-bench methods", "dflash-bench methods dflash"),
    "try": ("dflash-bench try http://localhost:8000",),
    "soak": ("dflash-bench soak http://localhost:8000 --for 1h",),
    "doctor": ("dflash-bench doctor --draft dflash=./draft --suite gsm8k --limit 8",),
    "crosscheck": ("dflash-bench crosscheck --model qwen3-8b --server dflash=http://localhost:8000 --suite gsm8k",),
    "conform": (
        "dflash-bench conform",
        "dflash-bench conform --model qwen3-8b --server dflash=http://localhost:8000 --suite gsm8k",
        "dflash-bench conform zlab-dflash2 --server http://localhost:8000",
    ),
    "profile": (
        "dflash-bench profile --method dflash,eagle3",
        "dflash-bench profile --model qwen3-8b --random-weights --layers 2",
    ),
    "verify-distribution": ("dflash-bench verify-distribution --method dflash:rule=rejection",),
    "models": ("dflash-bench models", "dflash-bench models --kind dflash2", "dflash-bench models qwen3-8b"),
    "fetch": ("dflash-bench fetch smollm2",),
    "inspect": ("dflash-bench inspect ./draft --target nano",),
    "convert": (
        "dflash-bench convert ./draft ./converted --to zlab",
        "dflash-bench convert ./target target.gguf --to gguf",
    ),
    "build-datastore": ("dflash-bench build-datastore --model nano --out texts.store --data texts",),
    "train": ("dflash-bench train --target nano --out mine --invented 400",),
    "runs": ("dflash-bench runs",),
    "merge": ("dflash-bench merge shards/* -o whole",),
    "index": ("dflash-bench index results/runs -o site",),
    "open": ("dflash-bench open", "dflash-bench open @2"),
    "compare": (
        "dflash-bench compare                    # the methods of the newest run",
        "dflash-bench compare @2 @1              # the run before, and the newest",
        "dflash-bench compare results/example --by category",
        "dflash-bench compare @2 @1 -o changes.html",
    ),
    "import": ("dflash-bench import profile_export_aiperf.json",),
    "baseline": ("dflash-bench baseline @1 @2 @3 -o base.json",),
    "check": (
        "dflash-bench check out --baseline base.json",
        "dflash-bench check out --baseline base.json --summary $GITHUB_STEP_SUMMARY --junit check.xml",
    ),
    "report": (
        "dflash-bench report --full",
        "dflash-bench report @2 -o page.html",
        "dflash-bench report --format latex --layout paper",
    ),
    "replay": (
        "dflash-bench replay @1 --n 3,5,7",
        "dflash-bench replay @1 --method dflash --cut 0.5,0.8 --controller mine.py",
    ),
    "card": ("dflash-bench card", "dflash-bench card -o my-draft", "dflash-bench card --profile profile.json"),
    "movie": ("dflash-bench movie -o movie.svg", "dflash-bench movie @2 --method eagle3 --answer gsm8k/0"),
    "plot": (
        "dflash-bench plot --format svg -o plots",
        "dflash-bench plot --format pdf --paper column",
    ),
}


LONGEST_NAME = 255
"""Bytes that file systems allow for a name; a whole path may have sixteen times as many."""


class Command(TyperCommand):
    widest = 30
    """Characters of a name beside which its help still stands."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:  # type: ignore[override]
        return [self.options_metavar or "", *(_name(param) for param in self.get_params(ctx) if is_argument(param))]

    def format_options(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        groups: dict[str, list[tuple[str, str]]] = {}
        for heading, record in self.records(ctx):
            groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=self.widest)

    def records(self, ctx: Context) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield the heading of each parameter to show, and its name and help, arguments first."""
        for param in sorted(self.get_params(ctx), key=lambda param: not is_argument(param)):
            if (record := param.get_help_record(ctx)) is None:
                continue
            names = _name(param) if is_argument(param) else record[0]
            yield self.heading(param), (names, _without_ranges(record[1]))

    def heading(self, param: Any) -> str:
        return "Arguments" if is_argument(param) else "Options"

    def format_epilog(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        if examples := self.examples(ctx):
            with formatter.section("Examples"):
                for line in examples:
                    for part in in_shell(line, formatter.width - formatter.current_indent):
                        formatter.write(f"{'':>{formatter.current_indent}}{part}\n")

    def examples(self, ctx: Context) -> Sequence[str]:
        """Return the examples to show."""
        return EXAMPLES.get(str(self.name), ())

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        typed, typed_params = self._typed(ctx, args)
        if any(param.name == "help" for param in typed_params):
            return super().parse_args(ctx, args)
        require_addresses()
        _refuse_odd(typed, typed_params)
        if (path := typed.get("config")) is not None:
            args = [*config_words(Path(str(path)), self.get_params(ctx), typed_params), *args]
            _refuse_odd(*self._typed(ctx, args))
        return super().parse_args(ctx, args)

    def _typed(self, ctx: Context, args: list[str]) -> tuple[dict[str, Any], list[Any]]:
        """Return values by parameter, and the parameters in the order given."""
        typed, _, typed_params = self.make_parser(ctx).parse_args(args=list(args))
        return dict(typed), list(typed_params)


def in_shell(line: str, width: int) -> list[str]:
    """Return a command as lines for a shell; continuation lines begin with an option."""
    first, *options = line.split(" --")
    parts = [first]
    for option in options:
        if len(f"{parts[-1]} --{option} \\") <= width:
            parts[-1] += f" --{option}"
        else:
            parts.append(f"  --{option}")
    return [*(f"{part} \\" for part in parts[:-1]), parts[-1]]


def config_words(path: Path, params: Sequence[Any], typed: Sequence[Any]) -> list[str]:
    """Return the options of a TOML file as command-line words, except those given on the command line.

    Raises UserError for a key that is not an option of the command, and for an invalid value.
    """
    from dflash_bench.core.files import toml_of

    options = {
        _name(param).removeprefix("--"): param
        for param in params
        if isinstance(param, TyperOption) and not param.hidden and param.name not in ("config", "help")
    }
    words = []
    for key, value in toml_of(path).items():
        if key not in options:
            raise unknown(f"option in {path}", shortened(key, 40), list(options))
        if options[key] not in typed:
            words += _words(f"{path}: {key}", f"--{key}", options[key], value)
    return words


NOT_SAVED = ("config", "save_config", "out", "resume", "as_json")
"""Parameters on where a run is stored, which do not define it."""


def config_text(ctx: Context) -> str:
    """Return the given options of a command as TOML that `config_words` reads."""
    lines = []
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        is_typed = str(getattr(ctx.get_parameter_source(str(param.name)), "name", "")) == "COMMANDLINE"
        if is_typed and param.name not in NOT_SAVED:
            lines.append(f"{_name(param).removeprefix('--')} = {_in_toml(value)}\n")
    return "".join(lines)


def _in_toml(value: object) -> str:
    """Return a value as TOML; a JSON string is a TOML string."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_toml, value))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=True)


def _words(where: str, flag: str, param: TyperOption, value: object) -> list[str]:
    if param.is_flag:
        if not isinstance(value, bool):
            raise UserError(f"{where} is true or false")
        return [flag] if value else []
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values):
        raise UserError(f"{where} takes text or a number, or a list of them where it may be given several")
    texts = [one if isinstance(one, str) else repr(one) for one in values]
    if param.multiple:
        return [f"{flag}={text}" for text in texts]
    # The form that help shows: N[,N...].
    if len(texts) > 1 and "[," not in (param.metavar or ""):
        raise UserError(f"{where} takes one value, not {len(texts)}")
    return [f"{flag}={','.join(texts)}"]


def _refuse_odd(typed: Mapping[str, Any], typed_params: Sequence[Any]) -> None:
    for param in typed_params:
        _refuse_repeated(param, typed_params.count(param))
        value = typed[str(param.name)]
        for text in value if isinstance(value, list | tuple) else [value]:
            _refuse_empty_or_long(param, text)


def _without_ranges(text: str) -> str:
    """Return an option's help without what typer adds: ranges of numbers, which errors tell, and "required"."""
    head, opens, rest = text.rpartition("  [")
    if not opens:
        return text
    kept = [part for part in rest.removesuffix("]").split("; ") if part != "required" and not {"<", ">"} & {*part}]
    return f"{head}  [{'; '.join(kept)}]" if kept else head


def is_argument(param: Any) -> bool:
    return not isinstance(param, TyperOption)


def _name(param: Any) -> str:
    """Return the name of a parameter as in help: --limit, RUN."""
    return str(max(param.opts, key=len) if isinstance(param, TyperOption) else param.metavar or param.name)


def _refuse_repeated(param: Any, times: int) -> None:
    if isinstance(param, TyperOption) and times > 1 and not param.multiple:
        raise UserError(f"{_name(param)} is given {times} times, but takes one value; give it once")


def _refuse_empty_or_long(param: Any, text: object) -> None:
    if text == "":
        raise UserError(f"{_name(param)} is empty; omit it, or give it a value")
    if isinstance(text, str) and max(len(text) / 16, *(len(part.encode()) for part in text.split("/"))) > LONGEST_NAME:
        raise UserError(f"{_name(param)} {shortened(text, 40)} is longer than any name can be")


class GroupedHelp(Command):
    """A command whose help groups options by heading, which typer does only with rich, which is slow to load."""

    def heading(self, param: Any) -> str:
        return getattr(param, "rich_help_panel", None) or super().heading(param)


WHOLE = "--help-all"


class BriefHelp(GroupedHelp):
    """A command whose --help shows the options that have a brief help, and --help-all all of them.

    Words before its first option are suites: `run gsm8k` is `run --suite gsm8k`.
    """

    widest = 40

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if WHOLE in args:
            ctx.meta[WHOLE] = True
            args = ["--help"]
        suites = list(takewhile(lambda word: not word.startswith("-"), args))
        return super().parse_args(ctx, [*(f"--suite={name}" for name in suites), *args[len(suites) :]])

    def records(self, ctx: Context) -> Iterator[tuple[str, tuple[str, str]]]:
        every = list(super().records(ctx))
        if ctx.meta.get(WHOLE):
            yield from every
            return
        briefs: Mapping[str, str] = self.callback.briefs  # type: ignore[union-attr]
        heading = ""
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and (brief := briefs.get(_name(param))):
                heading = str(getattr(param, "rich_help_panel", ""))
                yield heading, (record[0], brief)
        yield heading, (WHOLE, f"Show all {len(every)} options.")

    def format_help_text(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        whole = self.help
        try:
            if not ctx.meta.get(WHOLE):
                self.help = (whole or "").partition("\n\n")[0]
            super().format_help_text(ctx, formatter)
        finally:
            self.help = whole

    def examples(self, ctx: Context) -> Sequence[str]:
        return super().examples(ctx)[: None if ctx.meta.get(WHOLE) else 1]
