"""A run as Markdown to commit, and as a LaTeX table for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from dflash_bench.analysis.findings import Finding
from dflash_bench.analysis.metrics import Cell
from dflash_bench.core import labels
from dflash_bench.core.labels import visible
from dflash_bench.report import perf, sections, tables
from dflash_bench.report.columns import RESULTS, ROUNDS, Column, counted, formulas, legend, marked
from dflash_bench.report.columns import notes as notes_on
from dflash_bench.results.run_info import RunInfo

LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "#": r"\#", "$": r"\$", "%": r"\%", "&": r"\&", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def markdown(
    info: RunInfo, cells: Sequence[Cell], findings: Sequence[Finding], notes: Sequence[str] = (),
    swept: Sequence[str] = (),
) -> str:  # fmt: skip
    """`info` as in `run.json`, with its `command` and `environment`; `swept` are paragraphs on sweeps and load."""
    suites = labels.listed(dict.fromkeys((cell.suite, cell.source) for cell in cells))
    marks = legend(cells, findings)
    parts = [
        f"# {tables.in_markdown(suites)}",
        *(f"**{note}**" for note in notes),
        f"```\n{visible(info.command)}\n```",
        f"{info.environment.one_line()}.",
        _markdown_table(cells, RESULTS, findings),
        *(["; ".join(marks) + "."] if marks else []),
        *map(tables.in_markdown, notes_on(cells)),
        "Per round:",
        _markdown_table(cells, ROUNDS, findings),
        *map(tables.in_markdown, [*counted(cells), *perf.sentences(info)]),
        *sections.context_paragraphs(cells),
        *swept,
        "## Findings",
        "\n".join(f"- {tables.in_markdown(finding.text)}. Remedy: {finding.remedy}." for finding in findings)
        or "None.",
        "## Formulas",
        "\n".join(f"- `{name}`: {formula}" for name, formula in formulas(*RESULTS, *ROUNDS).items()),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown_table(cells: Sequence[Cell], columns: Sequence[Column], findings: Sequence[Finding]) -> str:
    heads = ["suite", "method", *(column.one_line for column in columns)]
    rows = [[cell.heading, cell.method, *(marked(column, cell, findings) for column in columns)] for cell in cells]
    return tables.markdown(heads, rows, left=2)


def latex(info: RunInfo, cells: Sequence[Cell], findings: Sequence[Finding], notes: Sequence[str] = ()) -> str:
    r"""A `table` for \usepackage{booktabs}: a suite's name once, and the formulas in the caption."""
    columns = [column for column in RESULTS if column.in_paper]
    heads = ["suite", "method", *(rf"\texttt{{{latex_escaped(column.one_line)}}}" for column in columns)]
    caption = [*notes, f"{info.environment.one_line()}.", *notes_on(cells)]
    caption += [f"{line}." for line in legend(cells, findings)]
    caption += [f"A forward of n tokens: {perf.line_of(info)}."] if info.forwards else []
    caption = [*map(latex_escaped, caption), *_latex_formulas(columns)]
    lines = [
        f"% {visible(' '.join(info.command.splitlines()))}",
        r"\begin{table}",
        r"\centering\small",
        rf"\begin{{tabular}}{{ll{'r' * len(columns)}}}",
        r"\toprule",
        f"{' & '.join(heads)} \\\\",
        *_latex_rows(cells, columns, findings),
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{' '.join(caption)}}}",
        r"\label{tab:dflash-bench}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_rows(cells: Sequence[Cell], columns: Sequence[Column], findings: Sequence[Finding]) -> list[str]:
    lines = []
    for _, members in groupby(cells, key=lambda cell: cell.key[:3]):
        lines.append(r"\midrule")
        for number, cell in enumerate(members):
            row = ["" if number else cell.heading, cell.method, *(marked(column, cell, findings) for column in columns)]
            lines.append(f"{' & '.join(map(latex_escaped, row))} \\\\")
    return lines


def _latex_formulas(columns: Sequence[Column]) -> list[str]:
    formula_of = formulas(*columns)
    return [rf"\texttt{{{latex_escaped(name)}}}: {latex_escaped(formula)}." for name, formula in formula_of.items()]


def latex_escaped(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(letter, letter) for letter in visible(text))
