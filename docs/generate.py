"""Writes what the code decides: tables of methods and columns, llms.txt, types of db.run. `python docs/generate.py`"""

from __future__ import annotations

import re
from inspect import formatannotation
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dflash_bench.core.option import options_of
from dflash_bench.core.secrets import Arguments
from dflash_bench.report import terminal
from dflash_bench.results import columns
from dflash_bench.runner.config import RunRequest

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
SUMMARY = (
    "Measures speculative decoding honestly: DFlash, EAGLE-3 and other methods against plain decoding; acceptance, "
    "speed, and exactness token for token, in process or on live servers."
)


def generated() -> dict[str, str]:
    """File name from docs/ -> the text that it should have."""
    tables = {"methods": ("methods.md", terminal.markdown()), "columns": ("format.md", columns.markdown())}
    pages = {
        file: between((DOCS / file).read_text(encoding="utf-8"), name, text) for name, (file, text) in tables.items()
    }
    return pages | {"llms.txt": llms(), STUB: options()}


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
    return f"- [{title.removeprefix('# ')}](docs/{name}.md): {' '.join(summary.split())}"


def main() -> None:
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
