"""Drafts in longer contexts: GSM8K's prompts after others with their answers, for SmolLM2 and nano."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.report import columns, document, sections, words
from dflash_bench.report.document import Document
from dflash_bench.report.tables import markdown
from studies._study import Made, Work, add_data, bench

TAKES = "a quarter of an hour of one core"
PAGES = ("speed/context-smollm2-cpu.md", "speed/context-smollm2-cpu-smollm2.svg", "speed/context-smollm2-cpu-nano.svg")
NAME = "context-smollm2-cpu"
METHODS = "--method dflash --method eagle3 --method ngram --threads 1"
RUNS = {
    "smollm2": "--model smollm2 --engine native --suite gsm8k --context none,1k,2k --max-new-tokens 96",
    "nano": "--suite gsm8k --limit 8 --context none,256,1k,2k --max-new-tokens 128",
}
"""nano uses embedded prompts."""
HEAD = """# What a longer context does to drafts

```
{command}
```

{machine}.
{remark}

Each prompt stands behind as many other prompts of its source, with their answers, as fill the context: a longer one
only adds to a shorter one, at its beginning. The same prompts are asked at every context, greedily, in float32 on one
thread, and each answer is held against plain decoding token for token.
"""
RUN = """## {model}: {num} prompts of {suite}

```
{command}
```

{exact} of {compared} answers equal plain decoding's, token for token, and of all {audited} answers {audit} are the
published model's own choice at every token.
{about}

{table}

Memory, as predicted before loading: {memory}.

![by context]({picture})
"""
ABOUT = {
    "smollm2": "With so few prompts the intervals are wide: what they show is the direction, and what a step costs.",
    "nano": "`nano` and its drafts were trained on prompts alone: a prompt behind others is new to all of them.",
}


def options(parser: ArgumentParser) -> None:
    add_data(parser, "gsm8k/test.jsonl")
    parser.add_argument("--prompts", type=int, default=4, help="how many SmolLM2 is asked")
    parser.add_argument("--remark", default="", help="a sentence on the machine, such as what else it was doing")


def make(work: Work, options: Namespace) -> Made:
    bench("fetch", "smollm2", shown=True)
    more = {"smollm2": ("--data", options.data, "--limit", options.prompts), "nano": ()}
    folders = {name: work.run(name, *words.split(), *more[name], *METHODS.split()) for name, words in RUNS.items()}
    read = {name: document.read_document(folder) for name, folder in folders.items()}
    pictures = {f"speed/{NAME}-{name}.svg": work.plots(folder) / "context.svg" for name, folder in folders.items()}
    return Made({PAGES[0]: page(work, read, options.remark), **pictures})


def page(work: Work, read: dict[str, Document], remark: str) -> str:
    parts = [section(name, run, f"{NAME}-{name}.svg") for name, run in read.items()]
    machine = read["smollm2"].results.info.environment.one_line()
    figures = ("al.pooled", "break_even_al", "speedup.decode")
    formulas = "\n".join(f"- `{figure}`: {FORMULAS[figure]}" for figure in figures)
    text = "\n".join([HEAD.format(command=work.command, machine=machine, remark=remark), *parts])
    notes = "\n\n".join(columns.notes([cell for run in read.values() for cell in run.cells]))
    foot = f"{sections.CONTEXT_LEGEND}\n\n{formulas}\n\n{notes}\n"
    return f"{text}\n{foot}"


def context_table(run: Document) -> str:
    (contexts,) = sections.contexts(run.cells)
    assert contexts.table is not None
    return markdown(*contexts.table.flat())


def section(name: str, run: Document, picture: str) -> str:
    drafting = [cell.exact for cell in run.cells if cell.exact and cell.method != "ar"]
    audits = [cell.audit for cell in run.cells if cell.audit]
    info = run.results.info
    folder = Path(info.options.to_json()["data"] or "").parent
    command = re.sub(r" --out \S+", "", info.command).replace(f"{folder}/", "")
    return RUN.format(
        model=name,
        num=run.cells[0].num_prompts,
        suite=run.cells[0].label,
        command=command,
        exact=sum(right for right, _ in drafting),
        compared=sum(of for _, of in drafting),
        audit=sum(right for right, _ in audits),
        audited=sum(of for _, of in audits),
        about=ABOUT[name],
        table=context_table(run),
        memory=words.memory(info),
        picture=picture,
    )
