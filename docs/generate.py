"""Writes what the code decides: tables of methods, columns and options, llms.txt, types. `python docs/generate.py`"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import formatannotation
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from dflash_bench import cli
from dflash_bench.core.draft_kinds import name_of_kind
from dflash_bench.core.option import options_of
from dflash_bench.core.secrets import Arguments
from dflash_bench.models import engines, presets
from dflash_bench.report import terminal
from dflash_bench.report.tables import markdown
from dflash_bench.results import columns
from dflash_bench.runner.config import RunRequest
from dflash_bench.tasks import suites

DOCS = Path(__file__).parent
STUB = "../dflash_bench/api/options.pyi"
NAMED = ("suites", "methods", "model", "limit")
"""Parameters of `db.run` of their own."""
FORMS = {
    "drafts": "Mapping[str, str | Path]",
    "servers": "Mapping[str, str]",
    "over": "Mapping[str, Iterable[object]]",
    "block_size": "int | str",
    "draft_steps": "int | str",
    "data": "str | Path",
    "target": "str | Path",
}
"""Options that a call gives in another form than a command line."""
COMMANDS = (
    "# Options\n\nEvery command with all of its options, as `--help` (of `run`, `--help-all`) shows them. A TOML file "
    "of options is given with `--config`."
)
LOADING = (
    "# Which draft loads where\n\nBased on the servers' code; the table says which were tested. An empty cell means "
    "not known to load. This project's engine computes all kinds, as published.\n"
    "`dflash-bench models --engines` prints the kinds, `dflash-bench models NAME --engines` the drafts of one model."
)
SUMMARY = (
    "Measures speculative decoding honestly: DFlash, EAGLE-3 and other methods against plain decoding; acceptance, "
    "speed, and exactness token for token, in process or on live servers."
)


def generated() -> dict[str, str]:
    """File name from docs/ -> the text that it should have."""
    methods, of_methods = terminal.markdown().split("\n\n## Options of each method\n\n")
    tables = [
        ("methods.md", "methods", methods),
        ("methods.md", "options", of_methods),
        ("format.md", "columns", columns.markdown()),
        ("suites.md", "suites", suite_table()),
    ]
    pages = {file: (DOCS / file).read_text(encoding="utf-8") for file, _, _ in tables}
    for file, name, text in tables:
        pages[file] = between(pages[file], name, text)
    return pages | {"loading.md": loading(), "options.md": commands(), "llms.txt": llms(), STUB: options()}


def suite_table() -> str:
    """Return a table of all suites: what they ask, where their rows come from, and how answers are scored."""
    rows = ["| suite | prompts | rows from | scored by |", "|---|---|---|---|"]
    for one in suites.listings():
        source = f"embedded, {one.suite.source}" if one.num_embedded else f"`suites prepare`: {one.suite.source}"
        rows.append(f"| `{one.suite.name}` | {one.suite.title} | {source} | {one.suite.scorer or 'none'} |")
    return "\n".join(rows)


def loading() -> str:
    """Return the page of kinds of drafts, and of the drafts of all models, by engine."""
    found = [support for _, support in engines.supports()]
    heads = [f"{dialect.name} {support.version}" for dialect, support in engines.supports()]
    ways = dict.fromkeys(one.kinds[kind] for one in found for kind in engines.SERVED if kind in one.kinds)
    notes = [way for way in ways if way != "as published"]
    marks = {"as published": "yes"} | {way: f"yes[^{number}]" for number, way in enumerate(notes, start=1)}

    def cells(kind: str) -> list[str]:
        return [marks[one.kinds[kind]] if kind in one.kinds else "" for one in found]

    checked = [[head, one.date, one.tested] for head, one in zip(heads, found, strict=True)]
    kinds = [[name_of_kind(kind), *cells(kind)] for kind in engines.SERVED]
    drafts = [
        [name, preset.drafts[draft], name_of_kind(kind), *cells(kind)]
        for name, preset in presets.table().items()
        for draft, kind in engines.served(preset)
        if not Path(preset.drafts[draft]).is_absolute()
    ]
    parts = [
        LOADING,
        markdown(["engine", "checked", "tested here"], checked, 3),
        "## Kinds of drafts",
        markdown(["kind", *heads], kinds, len(heads) + 1),
        "## Published drafts",
        markdown(["model", "draft", "kind", *heads], drafts, len(heads) + 3),
        "\n".join(f"[^{number}]: {way}." for number, way in enumerate(notes, start=1)),
    ]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """Return the page of all commands and their options, by what they are for."""
    known: Any = typer.main.get_command(cli.program())
    parts = [COMMANDS]
    shared = {_flags(option): option.help for option in _options(known.commands["run"])}
    for job, names in cli.JOBS.items():
        parts.append(f"## {job}")
        parts += [_command(name, known.commands[name], {} if name == "run" else shared) for name in names.split()]
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any, shared: dict[str, str]) -> str:
    arguments = " ".join(str(one.metavar) for one in command.params if one.param_type_name == "argument")
    text = [f"### {name}", f"`dflash-bench {name} {arguments}`".replace(" `", "`"), _reflowed(command.help)]
    own = [one for one in _options(command) if shared.get(_flags(one)) != one.help]
    as_for_run = [f"`{max(one.opts, key=len)}`" for one in _options(command) if shared.get(_flags(one)) == one.help]
    if own:
        text.append("\n".join(["| option | |", "|---|---|", *_rows(own)]))
    if as_for_run:
        text.append(f"As for [`run`](#run): {', '.join(as_for_run)}.")
    return "\n\n".join(text)


def _rows(options: list[Any]) -> Iterator[str]:
    """Yield a row per option, under the headings of help if there are several."""
    headings = list(dict.fromkeys(option.rich_help_panel for option in options))
    for heading in headings:
        if heading and len(headings) > 1:
            yield f"| **{heading}** | |"
        for option in options:
            if option.rich_help_panel == heading:
                yield f"| `{_flags(option)}` | {_cell(option.help)} |"


def _options(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "option" and not one.hidden]


def _flags(option: Any) -> str:
    flags = ", ".join([*option.opts, *option.secondary_opts])
    return f"{flags} {option.metavar}".replace("|", "\\|") if option.metavar else flags


def _reflowed(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


NAMES = "|".join(name for names in cli.JOBS.values() for name in names.split())
COMMAND = re.compile(rf"'((?:dflash-bench|run) [^']*|{NAMES}|--[^']*)'|(?<![\w-])(--[a-z][a-z-]*(?: \d+)?)")


def _cell(text: str) -> str:
    """Return help as a cell, with commands and flags as code."""
    return COMMAND.sub(lambda found: f"`{found[1] or found[2]}`", " ".join(text.split())).replace("|", "\\|")


def options() -> str:
    """Return the stub of the options that `db.run` takes by name, for type checkers."""
    types = get_type_hints(RunRequest)
    given = {name: FORMS.get(name) or _form(types[name]) for name in options_of(RunRequest) if name not in NAMED}
    return "\n".join(
        [
            "# For type checkers, written by docs/generate.py: the options of `dflash-bench run` by their names.",
            "from collections.abc import Iterable, Mapping, Sequence",
            "from pathlib import Path",
            "from typing import TypedDict",
            "",
            "class Options(TypedDict, total=False):",
            *(f"    {name}: {form}" for name, form in given.items()),
            "",
        ]
    )


def _form(kind: Any) -> str:
    """Return the type of an option in a call: of several values one or a sequence, of a path or a text either."""
    own = next(one for one in (*get_args(kind), kind) if one is not type(None))
    if get_origin(kind) is tuple:
        word = formatannotation(next(iter(get_args(kind))))
        none = " | None" * word.endswith(" | None")
        return f"{word.removesuffix(none)} | Sequence[{word}]{none}"
    return "str | Path" if own is Path else "str" if own is Arguments else own.__name__


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between its comments `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""
    pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    found = pattern.search(page)
    assert found is not None, f"the comments around {name} are gone"
    return f"{page[: found.end(1)]}{text}\n{page[found.start(2) :]}"


def llms() -> str:
    """All pages in the order of the index, each with its title and its first paragraph."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    names = re.findall(r"^(\w+)$", "\n".join(re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL)), re.MULTILINE)
    lines = [_line(name) for name in names]
    return "\n".join(
        [
            "# dflash-bench",
            "",
            f"> {SUMMARY}",
            "",
            "Paths are relative to the root of the repository, and of the site.",
            "",
            "## Documentation",
            "",
            *lines,
            "",
        ]
    )


def _line(name: str) -> str:
    title, summary = (DOCS / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[:2]
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(summary.split()))
    return f"- [{title.removeprefix('# ')}](docs/{name}.md): {plain}"


def main() -> None:
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
