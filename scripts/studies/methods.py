"""All methods on nano, side by side: on all embedded suites and, with --data, on real prompts; greedy and drawn."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.core.methods import is_lossy
from dflash_bench.core.types import Settings
from dflash_bench.report import document
from dflash_bench.report.document import Document, MethodLine, over_all
from dflash_bench.report.tables import ABSENT, markdown, number, with_interval
from nano.data import segments, training_tasks
from studies._study import Made, Work, add_data, bench

TAKES = "forty minutes of one core"
PAGES = ("speed/methods-nano-cpu.md",)
DRAFTING = (
    *"""
        dflash dflash@2 dflash@dspark mtp ddtree ddtree@2 ddtree:nodes=auto dflash:block=auto eagle3
        eagle3-tree:nodes=15,top_k=4,depth=6 medusa draft-model ngram dflash+ngram suffix lookahead
        """.split(),
    "rest:datastore={store}",
)
OTHERS = ("block-diffusion", "oracle", "random")
REJECTING = tuple(f"{name}:rule=rejection" for name in ("dflash", "dflash@2", "dflash@dspark", "mtp", "draft-model"))
RUNS = {"embedded": "--suite paper", "real": "--suite gsm8k --suite math500 --suite humaneval --suite mt_bench"}

NUM_TEXTS = 4000
"""Texts of nano's training corpus, none of which ships as a prompt."""
HEADS = ["method", "speedup.decode [95 %]", "al.pooled", "exact or drawn as the model", "passed"]
HEAD = """# All methods on nano

```
{command}
```

{machine}.

float32, one thread, {limit} prompts a suite: `speedup.decode` is the geometric mean over suites, and its interval
covers the choice of prompts alone. **On so few prompts methods whose intervals overlap are not told apart**, and nano
decodes on a CPU, where every place of a wide draft costs time: on a GPU, where width is nearly free, trees are worth
more than here.
`oracle` and `random` measure the engine, not a draft: no draft of 15 tokens can be better or worse. The datastore of
`rest` holds {texts:,} texts of the generator that the embedded prompts come from, which flatters it there. What
`block-diffusion` says is not verified, so nothing of it is accepted or rejected.

- `al.pooled`: {al}
- exact: answers equal to plain decoding, and answers that the published model, read by transformers, confirms
- drawn as the model: the verdict of `verify-distribution` at temperature {tested.temperature:g} and top-p
  {tested.top_p:g} over {draws:,} answers to its prompts; p is adjusted by Holm over all tests of all methods
  (level {level})
- passed: answers that the suite's scorer calls right, of those that it scores

`dflash@2` is DFlash 2, `dflash@dspark` DSpark, each with a draft of nano of its own.
"""
SAMPLED = """## Matching and rejection, temperature 1

Drafts that bring their own probabilities can be verified by rejection instead: drafts are drawn from their own
distribution q, which may accept more than matching what the target draws. `al.pooled` over all prompts of each table:

{table}
"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "gsm8k/test.jsonl, math500/test.jsonl, humaneval/test.jsonl and mt_bench/train.jsonl")
    parser.set_defaults(data=None)
    parser.add_argument("--limit", type=int, default=8, help="number of prompts of each suite")


def make(work: Work, options: Namespace) -> Made:
    store = datastore(work)
    drafting = [name.format(store=store) for name in DRAFTING]
    asked = [*_each(*drafting, *OTHERS), "--temperature", "0,1", "--threads", 1, "--limit", options.limit]
    sources = {"embedded": ()} if options.data is None else {"embedded": (), "real": ("--data", options.data)}
    runs = [work.run(name, *RUNS[name].split(), *more, *asked) for name, more in sources.items()]
    drawn = [*_each(*REJECTING), "--temperature", "1", "--threads", 1, "--limit", options.limit]
    rejecting = [work.run(f"{name}-rejecting", *RUNS[name].split(), *more, *drawn) for name, more in sources.items()]
    # Exit status 1: a method does not draw as the model does; the table shows it.
    verdicts = ("verify-distribution", *_each(*drafting, *REJECTING), "--json")
    tested = work.once("distribution.json", lambda: bench(*verdicts, allowed=(0, 1)))
    documents, drawn_by_q = ([document.read_document(run) for run in some] for some in (runs, rejecting))
    verdict = json.loads(tested.read_text(encoding="utf-8"))
    return Made({PAGES[0]: page(work, documents, drawn_by_q, verdict, options.limit)})


def _each(*methods: str) -> list[str]:
    return [word for method in methods for word in ("--method", method)]


def datastore(work: Work) -> Path:
    """Return the file in which `rest` looks up texts."""
    store = work.folder / "corpus.store"
    if not store.exists():
        data = work.once("corpus.jsonl", corpus)
        bench("build-datastore", "--model", "nano", "--data", data, "--out", store, shown=True)
    return store


def corpus() -> str:
    texts = ("".join(text for text, _ in segments(task)) for task in islice(training_tasks(1), NUM_TEXTS))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def page(
    work: Work, documents: Sequence[Document], rejecting: Sequence[Document], tested: Mapping[str, Any], limit: int
) -> str:
    verdicts = {verdict["method"]: verdict["state"] for verdict in tested["verdicts"]}
    head = HEAD.format(
        command=work.command,
        machine=documents[0].results.info.environment.one_line(),
        limit=limit,
        al=FORMULAS["al.pooled"],
        tested=Settings(**tested["settings"]),
        draws=tested["draws"],
        level=tested["level"],
        texts=NUM_TEXTS,
    )
    sections = [
        _section(run, settings, verdicts)
        for run in documents
        for settings in dict.fromkeys(cell.settings for cell in run.cells)
    ]
    return "\n".join([head, *sections, SAMPLED.format(table=_matching_and_rejection(documents, rejecting, verdicts))])


def _matching_and_rejection(
    matching: Sequence[Document], rejecting: Sequence[Document], verdicts: Mapping[str, str]
) -> str:
    heads, columns = ["method"], []
    for run, other in zip(matching, rejecting, strict=True):
        heads += [f"{_source(run)}, {rule}" for rule in ("matching", "rejection")]
        columns += [_acceptance(run, [name.partition(":")[0] for name in REJECTING]), _acceptance(other, REJECTING)]
    drawn = [verdicts.get(name, ABSENT) for name in REJECTING]
    names = [name.partition(":")[0] for name in REJECTING]
    rows = [list(row) for row in zip(names, *columns, drawn, strict=True)]
    return markdown([*heads, "by rejection drawn"], rows)


def _acceptance(run: Document, names: Sequence[str]) -> list[str]:
    """Return `al.pooled` by method, over all rounds of all suites with sampling."""
    lines = {line.method: line for line in run.lines if not line.settings.greedy}
    return [number(over_all(lines[name].cells_of(run.cells), lines[name])[1]) for name in names]


def _source(run: Document) -> str:
    return "embedded prompts" if "embedded" in run.cells[0].label else "real prompts"


def _section(run: Document, settings: Settings, verdicts: Mapping[str, str]) -> str:
    cells = [cell for cell in run.cells if cell.settings == settings]
    lines = [line for line in run.lines if line.settings == settings]
    rows = [_row(line, line.cells_of(cells), verdicts) for line in lines]
    plain = [cell for cell in cells if cell.method == "ar"]
    rows.insert(0, ["plain", "1.00", "1.00", _exactness(plain, "ar", verdicts), _passed(plain)])
    suites = list(dict.fromkeys(cell.suite for cell in cells))
    by_suite = [
        [_name(line), *(_short(cell) for suite in suites for cell in line.cells_of(cells) if cell.suite == suite)]
        for line in lines
    ]
    return (
        f"## {_source(run).capitalize()}, temperature {settings.temperature:g}\n\n{markdown(HEADS, rows)}\n\n"
        f"Speed-up and, in brackets, `al.pooled` by suite:\n\n{markdown(['method', *suites], by_suite)}\n"
    )


def _row(line: MethodLine, cells: Sequence[Cell], verdicts: Mapping[str, str]) -> list[str]:
    speedup, al = over_all(cells, line)
    judged = _exactness(cells, line.method, verdicts)
    accepted = ABSENT if is_lossy(line.method) else number(al)
    return [_name(line), with_interval(speedup), accepted, judged, _passed(cells)]


def _name(line: MethodLine) -> str:
    """Return the method without the path of its datastore, which is meaningless elsewhere."""
    return line.method.partition(":datastore=")[0]


def _short(cell: Cell) -> str:
    accepted = ABSENT if is_lossy(cell.method) else number(cell.value("al.pooled"))
    return f"{number(cell.value('speedup.decode'))} ({accepted})"


def _exactness(cells: Sequence[Cell], method: str, verdicts: Mapping[str, str]) -> str:
    if is_lossy(method):
        return "lossy"
    if not cells[0].settings.greedy:
        return "the model itself" if method == "ar" else verdicts.get(method, ABSENT)
    return f"{_sum([cell.exact for cell in cells])}, judged {_sum([cell.audit for cell in cells])}"


def _passed(cells: Sequence[Cell]) -> str:
    return _sum([cell.passed for cell in cells])


def _sum(tallies: Sequence[tuple[int, int] | None]) -> str:
    counted = [tally for tally in tallies if tally is not None]
    return f"{sum(good for good, _ in counted)}/{sum(of for _, of in counted)}" if counted else ABSENT
