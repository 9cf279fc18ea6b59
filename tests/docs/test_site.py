"""The site builds without a warning, its generated parts are current, and its figures are those of results/."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from helpers import shown
from helpers.each import each

DOCS = shown.ROOT / "docs"
README = (shown.ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FROM_ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", folder],
        cwd=shown.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.mark.in_full
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.glob("*.md")))
    found = {link for page in pages for link in FROM_ELSEWHERE.findall(page.read_text(encoding="utf-8"))}
    assert not found


@pytest.mark.in_full
def test_llms_txt_at_the_root_lists_every_page_and_each_is_there_as_markdown(site: Path) -> None:
    listed = LINK.findall((site / "llms.txt").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(f"docs/{page.name}" for page in DOCS.glob("*.md") if page.name != "index.md")
    assert all((site / page).exists() for page in listed)
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["methods.md", "options.md", "suites.md", "llms.txt"])
def test_a_generated_part_is_current(name: str) -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == generate.generated()[name], "run: python docs/generate.py"


def test_the_readme_is_short_and_its_links_are_there() -> None:
    assert len(README.splitlines()) <= 110
    links = [link for link in LINK.findall(README) if "://" not in link]
    assert [link for link in links if not (shown.ROOT / link).exists()] == []
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} - {"docs/index.md"} <= set(links)


def test_the_readmes_commands_are_those_of_ci() -> None:
    assert re.findall(r"^(scripts/\w+)", README, re.MULTILINE) == ["scripts/run", "scripts/test"]
    assert "scripts/test" in (shown.ROOT / ".ci" / "run").read_text(encoding="utf-8")


HEADLINE = ["results/speed/math-nano-cpu.md"]
REAL = ["results/speed/real-smollm2-cpu.md"]
CODE = [f"results/speed/code-qwen2.5-coder-{size}-instruct-q4_k_m.md" for size in ("0.5b", "1.5b")]
FAMILIAR = ["results/drafts/real-text-nano-cpu.md"]


@pytest.mark.parametrize(
    ("page", "sources", "least"), [("README.md", CODE, 4), ("docs/start.md", [*HEADLINE, *REAL, *FAMILIAR], 24)]
)
def test_figures_in_a_table_are_those_of_results(page: str, sources: list[str], least: int) -> None:
    """Each cell stands in a row of results/ with the same suite and, where the row names one, the same method."""
    known = [row for name in sources for row in _rows((shown.ROOT / name).read_text(encoding="utf-8"))]
    methods = {row[1] for row in known}
    rows = [row for row in _rows((shown.ROOT / page).read_text(encoding="utf-8")) if re.search(r"\d\.\d\d", str(row))]
    assert len(rows) >= least
    for suite, *cells in rows:
        like = [
            row for row in known if _suite(row[0]) == _suite(suite) and (cells[0] not in methods or cells[0] in row)
        ]
        figures = {form for row in like for cell in row for form in (cell, _calm(cell), cell.partition(" [")[0])}
        assert set(cells) <= figures, f"{suite} {cells}: {set(cells) - figures} is not in {sources}"


FIGURE = re.compile(r"(?<![\w/.,-])\d+(?:\.\d+(?![.\d])| of \d+|/\d+(?!\w)|(?= ms\b))")
NO_PROSE = re.compile(r"^```.*?^```|\]\([^)]*\)|`[^`]*`|arXiv [\d.]+", re.MULTILINE | re.DOTALL)
NO_RESULTS = {
    "README.md": ["3.11", "6.5", "2.0"],  # of Python; the paper's, in a question; of the licence
    "start.md": ["3.11", "2.0"],
    "ci.md": ["0.5"],  # the gate's own limit
    # Qwen3.5; a version of torch; noted by hand on an H200, as the page says
    "engine.md": ["3.5", "2.11", "10.7", "3.65", "21.4", "5 of 12"],
    "exactness.md": ["1"],  # ms that clocks may differ by
    "format.md": ["1.0", "0.3"],  # of this program; a limit of checks
    "peers.md": ["0.15", "3.25"],  # an example of arithmetic
    "recipes.md": ["0.22"],  # of vLLM
    "servers.md": ["0.32", "7.36", "7.22"],  # of vLLM; how two ways of counting part
    "table.md": ["1.3", "7.36", "7.22"],  # a limit of findings; how two ways of counting part
    "training.md": ["1.05"],  # below which a draft is not worth using
    "suites.md": ["5.13", "3.2"],  # of Linux, and Llama 3.2
}
"""Numbers that are no measurement, by page."""


@each("page", [page for page in shown.PAGES if page.name != "options.md"])
def test_figures_in_a_page_are_in_the_pages_of_results_that_it_links_to(page: Path) -> None:
    _require_figures(page)


def _require_figures(page: Path) -> None:
    """Require figures exactly, or rounded. Tables of README and start are compared with their rows above."""
    text = page.read_text(encoding="utf-8")
    sources = [shown.ROOT / "results" / name for name in set(re.findall(r"results/([\w./-]+\.md)", text))]
    known = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    if page.name in ("README.md", "start.md", "methods.md"):
        text = re.sub(r"^\|[^\n]*", "", text, flags=re.MULTILINE)
    figures = set(FIGURE.findall(NO_PROSE.sub(" ", text))) - set(NO_RESULTS.get(page.name, []))
    numbers = [float(number) for number in re.findall(r"(?<![\d.])\d+\.\d+", known)]
    unknown = [figure for figure in figures if figure not in known and not _is_rounded(figure, numbers)]
    assert unknown == [], f"{page.name}: {unknown} are in none of {[source.name for source in sources]}"


def _is_rounded(figure: str, numbers: list[float]) -> bool:
    digits = len(figure.partition(".")[2])
    return digits > 0 and any(f"{number:.{digits}f}" == figure for number in numbers)


def test_a_figure_that_no_page_has_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It is 2.391 times as fast, in 41 of 43 answers ([page](results/speed/loop-nano-cpu.md)).", encoding="utf-8"
    )
    with pytest.raises(AssertionError, match=r"'(2\.391|41 of 43)', '(2\.391|41 of 43)'"):
        _require_figures(page)


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def _suite(cell: str) -> str:
    return cell.split(" (")[0]


def _calm(cell: str) -> str:
    """Without letters of warning: 1.13 (n = 4) n -> 1.13 (n = 4)."""
    return re.sub(r"(?<=[\])]) [a-z?]+$", "", cell)


def test_python_in_pages_can_be_read_and_what_it_imports_is_there() -> None:
    blocks = [
        block
        for page in shown.PAGES
        for language, block in shown.FENCED.findall(page.read_text(encoding="utf-8"))
        if language == "python"
    ]
    assert len(blocks) >= 3
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")


def test_every_page_of_results_names_the_command_that_makes_it() -> None:
    rows = _rows((DOCS / "studies.md").read_text(encoding="utf-8"))
    commands = {page: row[2] for row in rows for page in re.findall(r"\(\.\./results/([^)]+\.md)\)", row[0])}
    results = shown.ROOT / "results"
    pages = {page.relative_to(results).as_posix() for page in results.glob("*/**/*.md")}
    assert set(commands) == pages - {"example/report.md"}
    studies = shown.ROOT / "scripts" / "studies"
    for page, command in commands.items() if studies.exists() else ():
        for name in re.findall(r"scripts/study (\w+)", command):
            text = (studies / f"{name}.py").read_text(encoding="utf-8")
            made = re.search(r"^PAGES = (\(.*?\))$", text, re.MULTILINE | re.DOTALL)
            assert made and any(fnmatch(page, each) for each in ast.literal_eval(made.group(1))), (
                f"{command} does not make {page}"
            )
