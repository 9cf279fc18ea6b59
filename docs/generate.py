"""Writes the parts of docs/ that the code decides: the table of methods, and llms.txt. `python docs/generate.py`"""

from __future__ import annotations

import re
from pathlib import Path

from dflash_bench.report import terminal

DOCS = Path(__file__).parent
SUMMARY = (
    "Measures speculative decoding honestly: DFlash, EAGLE-3 and other methods against plain decoding; acceptance, "
    "speed, and exactness token for token, in process or on live servers."
)


def generated() -> dict[str, str]:
    """File name in docs/ -> the text that it should have."""
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    return {"methods.md": between(page, "methods", terminal.markdown()), "llms.txt": llms()}


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
            "# dflash-bench", "", f"> {SUMMARY}", "",
            "Paths are relative to the root of the repository, and of the site.", "", "## Documentation", "",
            *lines, "",
        ]
    )  # fmt: skip


def _line(name: str) -> str:
    title, summary = (DOCS / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[:2]
    return f"- [{title.removeprefix('# ')}](docs/{name}.md): {' '.join(summary.split())}"


def main() -> None:
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
