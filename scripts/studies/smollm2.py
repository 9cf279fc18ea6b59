"""A real small model, SmolLM2-135M-Instruct, on real prompts: acceptance, exactness and speed of its drafts.

One run in float32, prompt by prompt, so that a single table has everything. It is continued where it stopped. The model
is fetched if it is not there (93 MB).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import files
from dflash_bench.models import presets
from dflash_bench.report import columns, document, plots
from dflash_bench.report.document import Document
from dflash_bench.report.tables import markdown, with_interval
from dflash_bench.training.cards import HISTORY
from studies._study import Made, Work, add_data, bench

TAKES = "three quarters of an hour of one core"
PAGES = ("speed/real-smollm2-cpu.md", "speed/real-smollm2-cpu-*.svg")

NAME = "real-smollm2-cpu"
SUITES, METHODS = ("gsm8k", "humaneval", "mt_bench"), ("dflash", "eagle3", "ngram")
NUM_TOKENS = 128
"""The most tokens per answer."""
PICTURES = {
    "speedup": "speed-up by suite",
    "positions": "acceptance by place in the draft",
    "rounds": "time of a round",
}
SHOWN = ("prompts", "tokens", "al.pooled [95 %]", "break_even_al", "tps.decode", "speedup.decode [95 %]", "exact")
HEAD = """# smollm2 on real prompts

```
{command}
```

{machine}.

SmolLM2-135M-Instruct, as `fetch smollm2` leaves it, with the drafts that are shipped for it, on the first {num} prompts
of each public suite ({source}), greedy, in {dtype}, one prompt at a time on one thread, at most {tokens} new tokens.
`ngram` is prompt lookup, which needs no draft; a small model repeats itself, and prompt lookup is good at that.

{measured}

The 95 % interval of a speed-up of DFlash or EAGLE-3 ends at most {widest} % from the speed-up.
"""
TRAINING = """## What such a draft costs

![acceptance over the training]({picture})

From the drafts' cards ([DFlash](../../dflash_bench/smollm2/dflash/README.md),
[EAGLE-3](../../dflash_bench/smollm2/eagle3/README.md)): acceptance on 32 prompts that neither draft was trained on, in
bfloat16, by the tokens of answers that it had read (the first two points of DFlash are from 8 prompts).
"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "gsm8k/test.jsonl, humaneval/test.jsonl and mt_bench/train.jsonl")
    parser.add_argument("--limit", type=int, default=64, help="number of prompts of each suite")


def make(work: Work, options: Namespace) -> Made:
    bench("fetch", "smollm2", shown=True)
    run = work.run(
        "run",
        "--model",
        "smollm2",
        "--suite",
        ",".join(SUITES),
        "--method",
        ",".join(METHODS),
        "--data",
        options.data,
        "--limit",
        options.limit,
        "--max-new-tokens",
        NUM_TOKENS,
        "--dtype",
        "float32",
        "--threads",
        1,
    )
    plotted = work.plots(run)
    pictures = {f"speed/{NAME}-{name}.svg": plotted / f"{name}.svg" for name in PICTURES}
    training = work.folder / "training.svg"
    trained(training)
    text = page(work, document.read_document(run), options.limit)
    return Made({PAGES[0]: text, **pictures, f"speed/{NAME}-training.svg": training})


def page(work: Work, run: Document, num: int) -> str:
    info = run.results.info
    head = HEAD.format(
        command=work.command,
        machine=info.environment.one_line(),
        source=run.cells[0].source.partition(" ")[0],
        tokens=NUM_TOKENS,
        num=num,
        dtype=info.identity.dtype,
        measured=measured(run),
        widest=f"{widest(run.cells):.0f}",
    )
    parts = [head]
    for name, caption in PICTURES.items():
        parts.append(f"![{caption}]({NAME}-{name}.svg)\n")
    parts.append(TRAINING.format(picture=f"{NAME}-training.svg"))
    names = ("al.pooled", "break_even_al", "tps.decode", "speedup.decode")
    parts.append("\n".join(f"- `{name}`: {FORMULAS[name]}" for name in names))
    parts.append("\n" + "\n\n".join(columns.notes(run.cells)))
    return "\n".join(parts) + "\n"


def measured(run: Document) -> str:
    """Return the table, with the cells' acceptance and its interval."""
    known = {column.one_line: column for column in (*columns.ROUNDS, *columns.RESULTS)}
    known["al.pooled [95 %]"] = known.pop("al.pooled")
    shown = [known[head] for head in SHOWN]
    _, rows, _ = columns.main_table(run.cells, shown, run.findings).flat()
    legend = columns.legend(run.cells, run.findings)
    at = 2 + SHOWN.index("al.pooled [95 %]")
    lengths = [columns.value_of("al.pooled", cell) for cell in run.cells]
    for row, length in zip(rows, lengths, strict=True):
        row[at] = with_interval(length) if isinstance(length, Interval) else row[at]
    return "\n\n".join([markdown(["suite", "method", *SHOWN], rows, left=2), *legend])


def widest(cells: Sequence[Cell]) -> float:
    """Return the largest distance of an interval's end from a trained draft's speed-up, in percent."""
    known = [cell.figures.get("speedup.decode") for cell in cells if cell.method in ("dflash", "eagle3")]
    return max(
        100 * max(one.value - one.low, one.high - one.value) / one.value
        for one in known
        if one is not None and one.low is not None and one.high is not None
    )


def trained(picture: Path) -> None:
    """Plot acceptance by amount of training text, for each shipped draft."""
    drafts = presets.preset("smollm2").drafts
    histories = {name: files.json_of(Path(folder) / HISTORY) for name, folder in drafts.items()}
    plots.write_training(histories, picture)
