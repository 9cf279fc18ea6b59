"""The table of methods for people: all of them, one with its options, and the table of the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from dflash_bench.errors import unknown
from dflash_bench.kinds import Kind, Option
from dflash_bench.methods import METHODS
from dflash_bench.report import tables

WIDTH = 100
DRAFTED = {"none": "nothing", "chain": "a chain", "tree": "a tree"}
FOOT = """To run one: --method NAME[@LABEL][:KEY=VALUE,...], or NAME:N for N drafted tokens a round.
Options of one method: dflash-bench methods NAME
Your own draft: --draft WEIGHTS=PATH; two of one kind: --draft WEIGHTS@a=PATH --draft WEIGHTS@b=PATH"""


def text() -> str:
    """All methods, each with its summary below, in 100 columns."""
    heads = ("method", "weights", "drafts", "output")
    lines = tables.aligned(heads, [_row(kind) for kind in METHODS.values()], left=len(heads)).splitlines()
    summaries = (_indented(kind.summary) for kind in METHODS.values())
    blocks = [lines[0], *(f"{line}\n{summary}" for line, summary in zip(lines[1:], summaries, strict=True))]
    return "\n".join([*blocks, "", FOOT])


def text_of(name: str) -> str:
    """One method and all its options. Raises UserError for an unknown name."""
    if name not in METHODS:
        raise unknown("method", name, list(METHODS))
    kind = METHODS[name]
    return "\n".join([f"{name}: {kind.summary}", "", *_facts(kind), *_options(kind)])


def markdown() -> str:
    """The tables in docs/methods.md: all methods, then the options of each."""
    heads = ("method", "what it is", "weights", "drafts", "lossless")
    rows = [
        (
            f"`{_spelling(kind)}`", tables.in_markdown(kind.summary), f"`{kind.weights}`" if kind.weights else "none",
            DRAFTED[kind.shape], "yes" if kind.lossless else "**no**",
        )
        for kind in METHODS.values()
    ]  # fmt: skip
    sections = (f"### {kind.name}\n\n{_options_in_markdown(kind)}" for kind in METHODS.values() if kind.options)
    return "\n\n".join([_table(heads, rows), "## Options of each method", *sections])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(kind: Kind) -> list[str]:
    return [kind.name, kind.weights or "none", DRAFTED[kind.shape], "lossless" if kind.lossless else "lossy"]


def _indented(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _spelling(kind: Kind) -> str:
    return kind.name + ("[:N]" if kind.count else "")


def _facts(kind: Kind) -> Iterator[str]:
    yield f"syntax   {_written(kind)}"
    yield f"weights  {_weights(kind)}"
    yield f"drafts   {DRAFTED[kind.shape]}"
    yield f"output   {'lossless: just' if kind.lossless else 'lossy: not'} what the target alone would give"


def _written(kind: Kind) -> str:
    head = f"{kind.name}[@LABEL]" if kind.weights else kind.name
    count = f", or {head}:N, the same as {kind.count}=N" if kind.count else ""
    return f"{head}[:KEY=VALUE,...]{count}" if kind.options else head


def _weights(kind: Kind) -> str:
    if kind.weights is None:
        return "none"
    return f"the model's, or --draft {kind.weights}=PATH, or --draft {kind.weights}@LABEL=PATH"


def _options(kind: Kind) -> Iterator[str]:
    if not kind.options:
        return
    yield ""
    rows = [[option.name, _default(option), option.range] for option in kind.options]
    lines = tables.aligned(("option", "default", "range"), rows, left=3).splitlines()
    yield lines[0]
    for line, option in zip(lines[1:], kind.options, strict=True):
        yield line
        yield _indented(option.summary)
    yield from (f"\n{alternative}" for alternative in _alternatives(kind))


def _alternatives(kind: Kind) -> Iterator[str]:
    for group in kind.alternatives:
        yield f"Only one of {', '.join(option.name for option in kind.options if option.name in group)} may be given."


def _default(option: Option) -> str:
    return "-" if option.default is None else str(option.default)


def _options_in_markdown(kind: Kind) -> str:
    rows = [
        (f"`{option.name}`", _default(option), option.range, tables.in_markdown(option.summary))
        for option in kind.options
    ]
    return "\n\n".join([_table(("option", "default", "range", "what it does"), rows), *_alternatives(kind)])
