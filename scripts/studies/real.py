"""A real model for code, from a GGUF file: pass rate, acceptance, exactness and speed on HumanEval and MBPP.

A run a suite, prompt by prompt, in float32; each is continued where it stopped. Methods without weights are always
measured, drafts if they are given. The file is fetched by nobody: name one that is here.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from hashlib import file_digest
from pathlib import Path

from dflash_bench.core.methods import BASELINE
from dflash_bench.report import columns, document
from dflash_bench.report.document import Document
from dflash_bench.report.tables import ABSENT
from studies._reported import doubts
from studies._study import Made, Work, add_data
from studies.smollm2 import measured

TAKES = "two hours of two cores for half a billion parameters, without drafts"
PAGES = ("speed/code-*.md",)

LIMITS = {"humaneval": 164, "mbpp": 200}
METHODS = ("ngram", "suffix")
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

The target is the file of sha256 `{hash}`: its weights as stored, computed in float32, one prompt at a time on one
thread, greedy, at most {tokens} new tokens. `ngram` and `suffix` need no draft: they copy what was said before, in the
prompt and the answer so far, or in earlier answers.
{doubts}
{measured}

## Pass rate

| suite | tasks | passed % | published % | cut at the limit |
| --- | ---: | ---: | ---: | ---: |
{passed}

Model-written code ran in a cage without a network. The published rates are of the unquantised model, with prompts and
tests of EvalPlus; MBPP there is 378 tasks, here the first {mbpp} of its test set.

{notes}
"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "humaneval/test.jsonl and mbpp/test.jsonl")
    parser.add_argument("--target", type=Path, required=True, metavar="FILE.gguf", help="the model")
    parser.add_argument(
        "--draft", action="append", default=[], metavar="METHOD=FOLDER", help="a draft to measure, too; may be repeated"
    )
    parser.add_argument("--limit", type=int, help="number of prompts of each suite (164 and 200)")


def make(work: Work, options: Namespace) -> Made:
    target = options.target.resolve()
    methods = [*METHODS, *(word.partition("=")[0] for word in options.draft)]
    runs = [
        work.run(
            suite,
            "--target",
            target,
            *(word for draft in options.draft for word in ("--draft", draft)),
            "--suite",
            suite,
            "--data",
            options.data,
            "--limit",
            min(limit, options.limit or limit),
            *(word for method in methods for word in ("--method", method)),
            "--max-new-tokens",
            NUM_TOKENS,
            "--dtype",
            "float32",
            "--threads",
            1,
        )
        for suite, limit in LIMITS.items()
    ]
    return Made({f"speed/code-{target.stem}.md": page(work, target, [document.read_document(run) for run in runs])})


def page(work: Work, target: Path, runs: Sequence[Document]) -> str:
    first = runs[0].results.info
    return HEAD.format(
        model=target.stem,
        command=work.command,
        machine=first.environment.one_line(),
        hash=sha256(target),
        tokens=NUM_TOKENS,
        doubts=doubts(runs),
        measured="\n\n".join(measured(run) for run in runs),
        passed="\n".join(f"| {' | '.join(row)} |" for run in runs for row in passed(run, target.stem)),
        mbpp=LIMITS["mbpp"],
        notes="\n\n".join(dict.fromkeys(note for run in runs for note in columns.notes(run.cells))),
    )


def passed(run: Document, name: str) -> Iterator[list[str]]:
    """Return rows of plain decoding: suite, tasks, the share that passed here and as published, in percent, and cut."""
    known = next((rates for model, rates in PUBLISHED.items() if name.startswith(model)), {})
    for cell in run.cells:
        if cell.method == BASELINE:
            rate = ABSENT if cell.passed is None else f"{100 * cell.passed[0] / cell.passed[1]:.1f}"
            yield [
                cell.label,
                str(cell.num_prompts),
                rate,
                str(known.get(cell.suite, ABSENT)),
                "0" if cell.cut is None else str(cell.cut[0]),
            ]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
