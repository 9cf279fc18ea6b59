"""Tables and plots for papers: methods by suites with the best in bold, words in place of ids, no title, small type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Answer
from dflash_bench.report import plots, printed, read_document
from dflash_bench.report.document import Document
from dflash_bench.report.plots import style
from dflash_bench.report.printed import printed as in_print
from helpers import runs
from helpers.each import each

Main = Callable[..., tuple[int, str, str]]


def faster(rows: list[Answer], method: str, times: float) -> list[Answer]:
    return [
        replace(row, method=method, generation=runs.in_time(row.generation, row.generation.decode_s / times))
        for row in rows
        if row.method == "dflash"
    ]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Two suites: on one EAGLE-3 is faster, on the other DFlash."""
    rows: list[Answer] = []
    for suite, times in (("gsm8k", 0.5), ("mt_bench", 2.0)):
        own = [replace(row, suite=suite, passed=None) for row in runs.answers(12)]
        rows += [*own, *faster(own, "eagle3", times)]
    both = {name: runs.SUITES["gsm8k"] | {"scorer": "none"} for name in ("gsm8k", "mt_bench")}
    kinds = {"eagle3": {"name": "eagle3", "num_drafts": 4}}
    ordered = [replace(row, order=at) for at, row in enumerate(rows)]
    folder = runs.stored(
        tmp_path_factory.mktemp("printed") / "run", ordered, suites=both, methods=runs.IDENTITY["methods"] | kinds
    )
    return read_document(folder)


def test_methods_stand_beside_suites_with_the_best_in_bold(document: Document) -> None:
    text = printed.latex(document)
    assert text.startswith("% dflash-bench\n\\begin{table*}")
    assert re.findall(r"\\multicolumn\{2\}\{c\}\{(\S+) \(embedded\)\}", text) == ["GSM8K", "MT-Bench"]
    assert text.count(r"Speed-up & $\tau$") == 3
    (dflash,) = re.findall(r"^DFlash & .*", text, re.MULTILINE)
    (eagle3,) = re.findall(r"^EAGLE-3 & .*", text, re.MULTILINE)
    is_bold = {
        name: [r"\textbf" in cell for cell in row.split(" & ")[1:]]
        for name, row in (("dflash", dflash), ("eagle3", eagle3))
    }
    assert is_bold["dflash"][0] and not is_bold["dflash"][2]
    assert is_bold["eagle3"][2] and not is_bold["eagle3"][0]
    assert len(dflash.split(" & ")) == len(eagle3.split(" & ")) == 7
    cell = next(c for c in document.cells if (c.suite, c.method) == ("gsm8k", "dflash"))
    assert dflash.split(" & ")[1] == rf"\textbf{{{cell.figures['speedup.decode'].value:.2f}$\times$}}"
    balanced = re.sub(r"\\[{}]", "", text)
    assert balanced.count("{") == balanced.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{") == 2


def test_a_run_of_one_suite_has_no_mean(tmp_path: Path) -> None:
    text = printed.latex(read_document(runs.stored(tmp_path / "run", runs.answers(8))))
    assert "Mean" not in text and text.count("multicolumn") == 1


@each(
    "text, words",
    [
        ("gsm8k", "GSM8K"),
        ("mt_bench\n(hub)", "MT-Bench\n(hub)"),
        ("dflash:n=8", "DFlash, n=8"),
        ("plain", "plain decoding"),
        ("eagle3 (temperature 1)", "EAGLE-3 (temperature 1)"),
        ("own.jsonl", "own.jsonl"),
        ("speedup.decode", "speed-up over plain decoding"),
        ("", ""),
        ("12", "12"),
        ("gsm8k_mine", "gsm8k_mine"),
    ],
)
def test_names_are_those_that_papers_print(text: str, words: str) -> None:
    assert in_print(text) == words


@pytest.fixture(params=["column", "page"])
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    with style.for_paper(request.param):
        yield request.param


@each("name", ["speedup", "acceptance", "positions", "rounds"])
def test_a_plot_fits_the_paper_and_names_what_it_shows(name: str, layout: str, document: Document) -> None:
    figure = plots.drawn(plots.Material(document), name)
    assert figure.get_figwidth() == style.PAPER_WIDTHS[layout]
    assert not figure.get_suptitle()
    FigureCanvasAgg(figure).draw()
    texts = [text for text in _texts(figure) if text.get_text().strip() and text.get_visible()]
    assert max(text.get_fontsize() for text in texts) <= 8
    assert not {"speedup.decode", "al.pooled", "gsm8k", "dflash", "ar"} & {text.get_text() for text in texts}
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        boxes = [
            tick.get_window_extent(renderer)
            for tick in axes.get_xticklabels()
            if tick.get_text() and tick.get_visible()
        ]
        assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[at + 1 :]), name


def _texts(figure: Any) -> Iterator[Any]:
    from matplotlib.text import Text

    yield from figure.findobj(Text)


def test_pdf_is_the_same_twice(document: Document, tmp_path: Path) -> None:
    material = plots.Material(document)
    one = plots.write_plot(material, "speedup", tmp_path / "one", "pdf", "column").read_bytes()
    assert one.startswith(b"%PDF-") and b"CreationDate" not in one
    assert plots.write_plot(material, "speedup", tmp_path / "two", "pdf", "column").read_bytes() == one


def test_pgf_without_latex_says_what_to_do(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "which", lambda _: None)
    with pytest.raises(UserError, match="xelatex"):
        plots.write_plot(plots.Material(document), "speedup", tmp_path, "pgf")


def test_the_command_prints_the_table(main: Main, document: Document) -> None:
    code, out, _ = main("report", document.folder, "--format", "latex", "--layout", "paper")
    assert (code, out) == (0, printed.latex(document))
    assert main("report", document.folder, "--format", "latex", "--layout", "rows")[1] != out
