"""A real model for code, from a GGUF file: pass rate, acceptance, exactness and speed on HumanEval and MBPP.

Two runs a suite, prompt by prompt: all methods with the target's weights as stored, and some with its weights in int8.
Each is continued where it stopped. The file is fetched by nobody: name one that is here.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import BASELINE, COLUMN
from dflash_bench.core.files import sha256_of
from dflash_bench.measurements import energy
from dflash_bench.report import columns, document
from dflash_bench.report.document import Document
from dflash_bench.report.tables import ABSENT, markdown, number
from dflash_bench.report.words import memory
from studies._reported import doubts
from studies._study import Made, Work, add_data
from studies.smollm2 import measured

TAKES = "four hours of a core for half a billion parameters, and half an hour more for each draft and suite"
PAGES = ("speed/code-*.md", "speed/code-*-positions.svg")

LIMITS = {"humaneval": 164, "mbpp": 200}
METHODS = ("ngram", "suffix")
COPIES, COPIES_NO_PROMPT = "ngram", "ngram:prompt=no"
TREES = {"dflash": "ddtree"}
"""Trees that are measured with a chain's draft."""
NUM_TOKENS = 512
"""The most tokens per answer."""
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "qwen2.5-coder-0.5b-instruct": {"humaneval": 61.6, "mbpp": 52.4},
    "qwen2.5-coder-1.5b-instruct": {"humaneval": 70.7, "mbpp": 69.2},
}
"""The publisher's pass rates in percent (arXiv 2409.12186v3): greedy, by EvalPlus, whose MBPP is 378 tasks."""
HEAD = """# {model} on code

```
{command}
```

{machine}.

The target is the file of sha256 `{hash}`:
its weights as stored, k-quants' rounding and all, computed in {dtype}, one prompt at a time on one thread, greedy, at
most {tokens} new tokens. `ngram` and `suffix` need no draft: they copy what was said before, in the prompt and the
answer so far, or in earlier answers.
{doubts}
{sections}

## Pass rate

{passed}

Model-written code ran in a cage without a network. Intervals are over tasks alone (Wilson's). The published rates are
of the unquantised model, with prompts and tests of EvalPlus; MBPP there is 378 tasks, here the first tasks of its test
set. Where the published rate lies in the interval, so many tasks do not show a difference.

{copied}
## Where methods lose

{lost}

The speed of each prompt's answer by itself, decoding only: one measurement each, so that single prompts are noisy.

## Memory, as predicted

{memory}

{energy}

{notes}
"""
COPIED = """## What copying the prompt is worth

{table}

`{no_prompt}` copies from the answer only. Both were measured on the answers of the target in int8.
"""
NO_COUNTERS = "Energy was not measured: this machine gives no counters."
COUNTED = "`joules_per_token` counts the whole machine's energy, idle power included."


@dataclass(frozen=True, slots=True)
class Group:
    """A run of each suite: its name, methods, further options, and the heading of its table."""

    name: str
    title: str
    methods: Sequence[str]
    words: Sequence[object] = ()

    def run_name(self, suite: str) -> str:
        return suite if not self.name else f"{suite}-{self.name}"


def options(parser: ArgumentParser) -> None:
    add_data(parser, "humaneval/test.jsonl and mbpp/test.jsonl")
    parser.add_argument("--target", type=Path, required=True, metavar="FILE.gguf", help="the model")
    parser.add_argument(
        "--draft", action="append", default=[], metavar="METHOD=FOLDER", help="a draft to measure, too; may be repeated"
    )
    parser.add_argument("--suite", choices=sorted(LIMITS), help="only this suite, on a page of its own")
    parser.add_argument("--no-int8", action="store_true", help="leave out the runs in int8, and what they say")
    parser.add_argument(
        "--int8-method",
        action="append",
        default=[],
        metavar="METHOD",
        help=f"of the runs in int8; may be repeated ({COPIES}, {COPIES_NO_PROMPT}, and the first draft)",
    )
    parser.add_argument("--limit", type=int, help="number of prompts of each suite (164 and 200)")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="type of unquantised weights"
    )


def groups(drafts: Sequence[str], has_int8: bool = True, int8_methods: Sequence[str] = ()) -> list[Group]:
    """Return the runs; `drafts` are METHOD=FOLDER."""
    given = [word for draft in drafts for word in ("--draft", draft)]
    names = [draft.partition("=")[0] for draft in drafts]
    named = [*names, *(tree for chain, tree in TREES.items() if chain in names)]
    as_stored = Group("", "Weights as stored", [*METHODS, *named], given)
    in_int8 = int8_methods or [COPIES, COPIES_NO_PROMPT, *names[:1]]
    used = [word for draft in drafts if draft.partition("=")[0] in in_int8 for word in ("--draft", draft)]
    of_int8 = Group("int8", "Weights in int8", in_int8, ["--quantize", "int8", *used])
    return [as_stored, of_int8] if has_int8 else [as_stored]


def make(work: Work, options: Namespace) -> Made:
    target = options.target.resolve()
    has_counters = any(energy.POWERCAP.glob(energy.ZONES))
    made: dict[str, list[Document]] = {}
    wanted = groups(options.draft, not options.no_int8, options.int8_method)
    limits = {suite: limit for suite, limit in LIMITS.items() if options.suite in (None, suite)}
    for group in wanted:
        for suite, limit in limits.items():
            run = work.run(
                group.run_name(suite),
                "--target",
                target,
                "--suite",
                suite,
                "--data",
                options.data,
                "--limit",
                min(limit, options.limit or limit),
                *(word for method in group.methods for word in ("--method", method)),
                *group.words,
                "--max-new-tokens",
                NUM_TOKENS,
                "--dtype",
                options.dtype,
                "--threads",
                1,
                *(["--energy"] if has_counters else []),
                "--allow",
                "failed",  # the page says so
            )
            made.setdefault(group.title, []).append(document.read_document(run))
    first = next(iter(limits))
    name = f"code-{target.stem}" + (f"-{first}" if options.suite else "")
    widest = work.plots(work.folder / wanted[0].run_name(first)) / "positions.svg"
    picture = f"![acceptance by place in the draft, {first}]({name}-positions.svg)"
    text = page(work, target, made, picture, has_counters)
    return Made({f"speed/{name}.md": text, f"speed/{name}-positions.svg": widest})


def page(work: Work, target: Path, made: Mapping[str, Sequence[Document]], picture: str, has_counters: bool) -> str:
    runs = [run for group in made.values() for run in group]
    first = runs[0].results.info
    sections = [
        f"## {title}\n\n" + "\n\n".join(measured(run) for run in documents) for title, documents in made.items()
    ]
    return HEAD.format(
        model=target.stem,
        command=work.command,
        machine=first.environment.one_line(),
        hash=sha256_of(target),
        dtype=first.identity.dtype,
        tokens=NUM_TOKENS,
        doubts=doubts(runs),
        sections="\n\n".join([*sections, picture]),
        passed=passed(made, target.stem),
        copied=copied(runs),
        lost=lost(runs),
        memory="\n".join(f"- {title}: {memory(runs[0].results.info)}." for title, runs in made.items()),
        energy=COUNTED if has_counters else NO_COUNTERS,
        notes="\n\n".join(dict.fromkeys(note for run in runs for note in columns.notes(run.cells))),
    )


def passed(made: Mapping[str, Sequence[Document]], name: str) -> str:
    """Return the table of plain decoding: tasks, the share that passed here and as published, and answers cut."""
    known = next((rates for model, rates in PUBLISHED.items() if name.startswith(model)), {})
    rows = [
        [
            cell.label,
            title,
            str(cell.num_prompts),
            ABSENT if cell.passed is None else share(*cell.passed),
            str(known.get(cell.suite, ABSENT)),
            "0" if cell.cut is None else str(cell.cut[0]),
        ]
        for title, runs in made.items()
        for run in runs
        for cell in run.cells
        if cell.method == BASELINE
    ]
    return markdown(["suite", "run", "tasks", "passed % [95 %]", "published %", "cut at the limit"], rows, left=2)


def share(num: int, total: int) -> str:
    """Return a share in percent, with its 95 % interval (Wilson's)."""
    from scipy.stats import binomtest

    interval = binomtest(num, total).proportion_ci(method="wilson")
    return f"{100 * num / total:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def copied(runs: Sequence[Document]) -> str:
    """Return the section on the tokens per round that prompt lookup gains, and on what is left without the prompt."""
    rows = []
    for run in runs:
        lengths = {cell.method: cell.value("al.pooled") for cell in run.cells}
        whole, own = lengths.get(COPIES), lengths.get(COPIES_NO_PROMPT)
        if whole and own and whole > 1:
            left = f"{100 * (own - 1) / (whole - 1):.0f}"
            rows.append([run.cells[0].label, number(whole, 2), number(own, 2), left])
    table = markdown(["suite", COPIES, COPIES_NO_PROMPT, "left of the gain, %"], rows, left=1)
    return COPIED.format(table=table, no_prompt=COPIES_NO_PROMPT) if rows else ""


def lost(runs: Sequence[Document]) -> str:
    """Return the table of the prompts on which each method is slower than plain decoding."""
    heads = ["suite", "method", "weights", "prompts", "slower", "slowest", "median", "fastest"]
    rows = [
        [
            cell.label,
            cell.method,
            run.results.info.identity.quantize or run.results.info.identity.dtype,
            *map(str, speeds),
        ]
        for run in runs
        for cell in run.cells
        if cell.method != BASELINE and (speeds := speed_ups(cell))
    ]
    return markdown(heads, rows, left=3)


def speed_ups(cell: Cell) -> list[str]:
    """Return the number of prompts, how many of them are slower than plain decoding, and their speed-ups' range."""
    known = cell.sums[:, COLUMN["log_ratios"]] > 0
    ratios = np.exp(cell.sums[known, COLUMN["log_ratio"]])
    if not len(ratios):
        return []
    low, middle, high = np.quantile(ratios, [0, 0.5, 1])
    return [str(len(ratios)), str(int((ratios < 1).sum())), *(f"{value:.2f}" for value in (low, middle, high))]
