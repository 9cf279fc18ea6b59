"""Quantised targets (int8 and nf4) beside plain ones: nano and SmolLM2, on embedded prompts and on GSM8K's."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from dflash_bench.analysis import compare
from dflash_bench.analysis.cells import Cell, mismatched
from dflash_bench.analysis.comparable import agreements
from dflash_bench.analysis.metrics import BASELINE, FORMULAS
from dflash_bench.report import columns, document
from dflash_bench.report.document import Document
from dflash_bench.report.tables import ABSENT, markdown, number, p_value, with_interval
from dflash_bench.results.table import RunTable
from studies._study import Made, Work, add_data, bench

TAKES = "twenty-five minutes of one core, of which SmolLM2 is nearly all"
PAGES = ("speed/quantised-cpu.md",)
EXTRA = "quantize"
RUN = "--suite gsm8k --threads 1 --method dflash --method eagle3"
DTYPES, KINDS = ("float32", "bfloat16"), ("int8", "nf4")
HEAD = """# A quantised target under drafts that were trained for the plain one

```
{command}
```

{machine}; {packages}.

The weights of the target's linear layers in int8 (a scale for each row; the output head, too) or nf4 (bitsandbytes, a
scale for every 64 weights): `--quantize`. Embedding and drafts are as they were. One thread, greedy decoding, one
answer at a time; all but the lines `native` are computed by transformers' code, so that only the weights differ.

**How little this is:** {sizes}. Two small models, one machine, one run each. Intervals are over prompts, and so few
cannot tell a small loss of accuracy or of acceptance from none. SmolLM2's plain weights come from a 4-bit file
(`fetch smollm2`), so its figures are of rounding once more. On this processor quantised weights are unpacked in every
pass: that saves memory and costs time. Our own forward pass reads int8 as it is, which saves both ([page](speed.md)).
Nothing follows for a GPU.

## Weights of the target

{weights}

Measured on the loaded models, with scales, and with the embedding, which is not quantised.

## How to read the tables

- `exact`, `judged`: answers that are plain decoding's token for token, and the judge's own choice at every token, by
  the target with these weights. `mismatch`: those that differ by more than rounding explains; others are near ties.
- `al / plain`, `tps / plain`: over the same prompts of the run with plain weights and the same type, by transformers'
  code too.
- `equal`: plain decoding's answers that are the same, token for token, with plain and with quantised weights;
  `in common`: tokens before the first difference, mean over the other answers.
- `lost, gained`: prompts answered right only with plain, only with quantised weights; p is McNemar's.
{formulas}
"""
SECTION = """## {title}

Answers are cut at {tokens} tokens; one that had not ended by then counts as wrong.

{figures}

{against}
"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "gsm8k/test.jsonl")
    parser.add_argument("--nano", type=int, default=16, help="embedded prompts for nano; of GSM8K's there are eight")
    parser.add_argument("--smollm2", type=int, default=4, help="embedded prompts for SmolLM2")


def make(work: Work, options: Namespace) -> Made:
    bench("fetch", "smollm2", shown=True)
    known = {
        **measured(work, "nano", "embedded", options.nano, 128),
        **measured(work, "nano", options.data, 8, 96),
        **measured(work, "smollm2", options.data, 8, 48),
        **measured(work, "smollm2", "embedded", options.smollm2, 48),
    }
    return Made({PAGES[0]: page(work, known)})


def measured(work: Work, model: str, source: str, limit: int, tokens: int) -> dict[Any, Document]:
    """Run each dtype and quantisation, and plain weights by our forward pass for comparison.

    A run with inexact answers exits with 1, which the page reports.
    """
    name, found = f"{model}-{'embedded' if source == 'embedded' else 'real'}", {}
    for dtype, kind in product(DTYPES, ("native", "none", *KINDS)):
        if kind == "native" and source == "embedded":
            continue
        how = {"none": ("--engine", "transformers"), "native": ("--engine", "native")}.get(
            kind, ("--quantize", kind, "--engine", "transformers")
        )
        run = work.run(
            f"{name}-{dtype}-{kind}",
            *RUN.split(),
            "--model",
            model,
            "--data",
            source,
            "--limit",
            limit,
            "--max-new-tokens",
            tokens,
            "--dtype",
            dtype,
            *how,
            allowed=(0, 1),
        )
        found[name, dtype, kind] = document.read_document(run)
    return found


def page(work: Work, known: dict[Any, Document]) -> str:
    sections = sorted(
        {name for name, _, _ in known}, key=lambda name: (name.startswith("smollm2"), "embedded" not in name)
    )
    first = next(iter(known.values())).results.info
    packages = known[sections[0], DTYPES[0], "nf4"].results.info.environment.packages
    versions = ", ".join(f"{name} {packages[name]}" for name in ("transformers", "bitsandbytes"))
    head = HEAD.format(
        command=work.command,
        machine=first.environment.one_line(),
        packages=versions,
        sizes="; ".join(_size(name, known[name, DTYPES[0], "none"]) for name in sections),
        weights=weights_table(known, sections),
        formulas="\n".join(f"- `{name}`: {FORMULAS[name]}" for name in ("al.pooled", "tps.decode", "speedup.decode")),
    )
    parts = [head, *(section(name, known) for name in sections)]
    notes = "\n\n".join(columns.notes([cell for run in known.values() for cell in run.cells]))
    return "\n".join([*parts, f"{notes}\n"])


def _size(name: str, run: Document) -> str:
    return f"{name.partition('-')[0]}: {run.cells[0].num_prompts} prompts of {run.cells[0].label}"


def weights_table(known: dict[Any, Document], sections: Sequence[str]) -> str:
    rows = []
    for model in dict.fromkeys(name.partition("-")[0] for name in sections):
        section = next(name for name in sections if name.startswith(model))
        for dtype in DTYPES:
            sizes = [_stored(known[section, dtype, kind]) for kind in ("none", *KINDS)]
            shares = [f"{size / 1e6:.1f} MB ({size / sizes[0]:.2f})" for size in sizes]
            rows.append([model, dtype, f"{sizes[0] / 1e6:.1f} MB", *shares[1:]])
    return markdown(["target", "dtype", "plain", *KINDS], rows, left=2)


def _stored(run: Document) -> int:
    forwards = run.results.info.forwards
    assert forwards is not None
    return forwards.size.stored_bytes


def section(name: str, known: dict[Any, Document]) -> str:
    runs = {(dtype, kind): run for (of, dtype, kind), run in known.items() if of == name}
    one = next(iter(runs.values()))
    tokens = one.results.info.identity.max_new_tokens
    title = f"{name.partition('-')[0]} on {one.cells[0].label}"
    figures = [row for dtype in DTYPES for kind in ("native", "none", *KINDS) for row in _figures(runs, dtype, kind)]
    heads = [
        "dtype",
        "weights",
        "method",
        "al.pooled [95 %]",
        "exact",
        "judged",
        "mismatch",
        "passed",
        "tps.decode",
        "speedup.decode [95 %]",
    ]
    against = [row for dtype in DTYPES for kind in KINDS for row in _against(runs, dtype, kind)]
    beside = [
        "dtype",
        "weights",
        "method",
        "al / plain [95 %]",
        "tps / plain [95 %]",
        "equal",
        "in common",
        "lost, gained",
        "p",
    ]
    return SECTION.format(
        title=title, tokens=tokens, figures=markdown(heads, figures, left=3), against=markdown(beside, against, left=3)
    )


def _figures(runs: dict[Any, Document], dtype: str, kind: str) -> Iterator[list[str]]:
    run = runs.get((dtype, kind))
    if run is None:
        return
    weights = {"native": "plain, native", "none": "plain"}.get(kind, kind)
    for cell in run.cells:
        rows = run.results.rows
        wrong = int((mismatched(rows) & (rows["method"] == cell.method)).sum())
        yield [
            dtype,
            weights,
            cell.method,
            _figure(cell, "al.pooled"),
            _share(cell.exact),
            _share(cell.audit),
            str(wrong),
            _share(cell.passed),
            number(cell.value("tps.decode"), 1),
            _figure(cell, "speedup.decode"),
        ]


def _figure(cell: Cell, name: str) -> str:
    return ABSENT if cell.method == BASELINE else with_interval(cell.figures.get(name))


def _share(share: tuple[int, int] | None) -> str:
    return ABSENT if share is None else f"{share[0]}/{share[1]}"


def _against(runs: dict[Any, Document], dtype: str, kind: str) -> Iterator[list[str]]:
    before, after = (runs[dtype, name].results for name in ("none", kind))
    (alike,) = agreements(before, after)
    for versus in _versus(before, after):
        method, ratios = versus.key.method, versus.changes
        is_plain = method == BASELINE
        equal = [f"{alike.num_equal}/{alike.num_answers}", number(alike.in_common, 1)] if is_plain else ["", ""]
        lost = f"{versus.lost}, {versus.gained}" if is_plain else ""
        al = ABSENT if is_plain else with_interval(ratios["al.pooled"].ratio)
        p = p_value(versus.p_passed) if is_plain else ""
        yield [dtype, kind, method, al, with_interval(ratios["tps.decode"].ratio), *equal, lost, p]


def _versus(before: RunTable, after: RunTable) -> Sequence[compare.Comparison]:
    cells = compare.comparable_cells(before), compare.comparable_cells(after)
    return compare.compare_runs(*cells, (before.name, after.name))
