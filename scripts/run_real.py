"""smollm2 on real prompts, as Markdown with its plots. Usage: python scripts/run_real.py RUNS RESULTS."""

import shutil
import sys
from pathlib import Path

from dflash_bench import environment, reading
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.models import presets
from dflash_bench.report import columns, document, plots
from dflash_bench.report.columns import Column
from dflash_bench.report.document import Document
from dflash_bench.report.tables import markdown, with_interval
from dflash_bench.train.cards import HISTORY

NAME = "real-smollm2-cpu"
DTYPES = ("float32", "bfloat16")
PICTURES = {
    "speedup": "speed-up by suite",
    "positions": "acceptance by place in the draft",
    "rounds": "time of a round",
}
HEADS = ("prompts", "tokens", "al.pooled", "break_even_al", "tps.decode", "speedup.decode [95 %]", "exact", "audit")
AL = Column("al.pooled [95 %]", lambda cell: with_interval(cell.figures.get("al.pooled")))
HEAD = """# smollm2 on real prompts

```
scripts/run_real FOLDER
```

{machine}.

SmolLM2-135M-Instruct, as `fetch smollm2` leaves it, with the drafts that are shipped for it; prompts of the public
suites, {source}; greedy, at most {tokens} new tokens, one thread. Each type had the same time, and spent it where
intervals were widest. `ngram` is prompt lookup, which needs no draft. In float32 every answer must be plain decoding's,
token for token; in bfloat16 rounding may decide between two tokens that are as good, and what is not exact must be
such a near tie by the judge.
"""
TRAINING = """## What such a draft costs

![acceptance over the training]({picture})

From the drafts' cards ([DFlash](../dflash_bench/smollm2/dflash/README.md),
[EAGLE-3](../dflash_bench/smollm2/eagle3/README.md)): acceptance on 32 prompts that neither draft was trained on, in
bfloat16, by the answers' tokens that it had read.
"""


def main(runs: Path, results: Path) -> None:
    documents = {dtype: document.read_document(runs / dtype) for dtype in DTYPES}
    info = documents[DTYPES[0]].results.info
    source = documents[DTYPES[0]].cells[0].source
    tokens = info["identity"]["max_new_tokens"]
    parts = [HEAD.format(machine=environment.one_line(info["environment"]), source=source, tokens=tokens)]
    for dtype, run in documents.items():
        parts.append(f"## {dtype}\n\n{table(run)}\n")
        for name, caption in PICTURES.items():
            picture = f"{NAME}-{dtype}-{name}.svg"
            shutil.copy(runs / f"plots-{dtype}" / f"{name}.svg", results / picture)
            parts.append(f"![{caption}, {dtype}]({picture})\n")
    parts.append(trained(results))
    parts.append("\n".join(f"- `{name}`: {FORMULAS[name]}" for name in ("al.pooled", "speedup.decode", "tps.decode")))
    parts.append(f"- `break_even_al`: {FORMULAS['break_even_al']}\n\n{columns.INTERVALS}")
    page = results / f"{NAME}.md"
    page.write_text("\n".join(parts) + "\n", encoding="utf-8")
    print(page)


def table(run: Document) -> str:
    known = {column.one_line: column for column in (*columns.ROUNDS, *columns.RESULTS)} | {"al.pooled": AL}
    shown = [known[head] for head in HEADS]
    rows = [
        [cell.label, cell.method, *(columns.marked(column, cell, run.findings) for column in shown)]
        for cell in run.cells
    ]
    legend = columns.legend(run.cells, run.findings)
    return "\n\n".join([markdown(["suite", "method", *(column.one_line for column in shown)], rows, left=2), *legend])


def trained(results: Path) -> str:
    """Acceptance by what each shipped draft had read."""
    drafts = presets.preset("smollm2").drafts
    histories = {name: reading.json_of(Path(folder) / HISTORY) for name, folder in drafts.items()}
    plots.write_training(histories, results / f"{NAME}-training.svg")
    return TRAINING.format(picture=f"{NAME}-training.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
