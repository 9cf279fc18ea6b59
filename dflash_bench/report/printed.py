"""Names and tables as papers print them: GSM8K instead of gsm8k, methods by suites, the best in bold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.methods import PLAIN
from dflash_bench.report.document import Document, MethodLine, over_all, require_answers
from dflash_bench.report.render import latex_escaped, latex_table
from dflash_bench.report.words import compared, facts, tally

SUITES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "aime24": "AIME 2024",
    "aime25": "AIME 2025",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mt_bench": "MT-Bench",
}
METHODS = {
    PLAIN: "plain decoding",
    "dflash": "DFlash",
    "eagle3": "EAGLE-3",
    "eagle3-tree": "EAGLE-3 (tree)",
    "ddtree": "DDTree",
    "dflash+ngram": "DFlash + n-gram",
    "medusa": "Medusa",
    "block-diffusion": "block diffusion",
    "draft-model": "draft model",
    "ngram": "n-gram",
    "suffix": "suffix decoding",
    "lookahead": "lookahead",
    "rest": "REST",
    "mtp": "MTP",
    "p-eagle": "P-EAGLE",
}
AXES = {
    "speedup.decode": "speed-up over plain decoding",
    "al.pooled": "acceptance length (tokens per round)",
    "tps.decode": "tokens per second",
    "tps.total": "tokens per second, all answers",
}


def printed(text: str) -> str:
    """Return a name or a label of an axis as a paper prints it; other text as it is."""
    if text in AXES:
        return AXES[text]
    name, _, rest = re.sub(r"\s*\n\s*", "\n", text).partition(":")
    if name in METHODS and rest:
        return f"{METHODS[name]}, {rest}"
    head = re.match(r"[\w+-]+", text)
    known = SUITES | METHODS
    return f"{known[head[0]]}{text[head.end() :]}" if head and head[0] in known else text


# A table for a paper: a row for each method, and for each suite its speed-up and acceptance length.


def latex(document: Document) -> str:
    r"""Return a `table*` for \usepackage{booktabs}, with the command that measured it as a comment.

    The best value of each column is bold, separately for each of the run's settings.
    """
    info = require_answers(document).results.info
    suites = dict.fromkeys((cell.suite, cell.source) for cell in document.cells if cell.num_prompts)
    names = [latex_escaped(printed(labels.suite_label(*suite))) for suite in suites]
    has_mean = len(names) > 1
    heads = [*names, *(["Mean"] if has_mean else [])]
    rows = [
        " & ".join(["", *(rf"\multicolumn{{2}}{{c}}{{{head}}}" for head in heads)]) + r" \\",
        "".join(rf"\cmidrule(lr){{{2 * at + 2}-{2 * at + 3}}}" for at in range(len(heads))),
        " & ".join(["Method", *[r"Speed-up & $\tau$"] * len(heads)]) + r" \\",
        r"\midrule",
        *_rows(document, [suite for suite, _ in suites], has_mean),
    ]
    return latex_table("table*", f"l{'rr' * len(heads)}", info.command, rows, [latex_escaped(_caption(document))])


Pair = tuple[Interval | None, float | None]


def _rows(document: Document, suites: Sequence[str], has_mean: bool) -> Iterable[str]:
    by_setting: dict[str, list[MethodLine]] = {}
    for line in document.lines:
        by_setting.setdefault(line.setting, []).append(line)
    for at, members in enumerate(by_setting.values()):
        if at:
            yield r"\midrule"
        rows = [_pairs(document, line, suites, has_mean) for line in members]
        best = [tuple(_best([row[column][side] for row in rows]) for side in (0, 1)) for column in range(len(rows[0]))]
        for line, row in zip(members, rows, strict=True):
            cells = [
                _cell(pair[side], best[column][side], "$\\times$" if side == 0 else "")
                for column, pair in enumerate(row)
                for side in (0, 1)
            ]
            name = latex_escaped(labels.with_settings(printed(line.method), line.setting))
            yield f"{' & '.join([name, *cells])} \\\\"


def _pairs(document: Document, line: MethodLine, suites: Sequence[str], has_mean: bool) -> list[Pair]:
    of_suite = {cell.suite: cell for cell in line.cells_of(document.cells)}
    pairs = [_pair(of_suite.get(suite)) for suite in suites]
    return [*pairs, over_all(document.cells, line)] if has_mean else pairs


def _pair(cell: Cell | None) -> Pair:
    if cell is None:
        return None, None
    length = cell.figures.get("al.pooled")
    return cell.figures.get("speedup.decode"), None if length is None else length.value


def _value(value: Interval | float | None) -> float | None:
    return value.value if isinstance(value, Interval) else value


def _best(several: Sequence[Interval | float | None]) -> float | None:
    """Return the greatest value, which is set in bold; None if there is nothing to compare it with."""
    values = [value for one in several if (value := _value(one))]
    return max(values) if len(values) > 1 else None


def _cell(value: Interval | float | None, best: float | None, unit: str) -> str:
    number = _value(value)
    if number is None:
        return "--"
    text = f"{number:.2f}{unit}"
    return rf"\textbf{{{text}}}" if number == best else text


def _caption(document: Document) -> str:
    about = facts(document.results.info)
    exact = tally(document, "exact")
    halves = [
        value.half_width / value.value
        for cell in document.cells
        if (value := cell.figures.get("speedup.decode")) and value.half_width and cell.method != BASELINE
    ]
    parts = [
        "Speed-up over plain decoding and acceptance length (tau, tokens per round)",
        f"{about['model']}, {about['machine']}",
        *([f"95 % intervals of speed-ups are within {100 * max(halves):.0f} % of the values"] if halves else []),
        *([f"{exact[0]:,} of {exact[1]:,} answers equal plain decoding's, {compared(document)}"] if exact else []),
    ]
    notes = labels.notes(cell.source for cell in document.cells)
    return ". ".join([*parts, *notes, *document.notes]) + "."
