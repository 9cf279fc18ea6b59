"""The paper's ablations on nano: `reproduce` trains each table's drafts and judges its claims, once for each seed.

Two claims have no table of their own: that features are needed, and that the decay of the loss helps. Drafts of both
kinds are decoded beside table 6's draft of five layers.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from dflash_bench.core.methods import shown
from dflash_bench.report import document
from dflash_bench.report.document import Document
from dflash_bench.report.tables import markdown, with_interval
from dflash_bench.reproduction import items
from dflash_bench.reproduction.items import Claim, Item
from dflash_bench.reproduction.parts import Part, parts
from dflash_bench.reproduction.verdict import judge
from dflash_bench.runner.config import RunRequest
from dflash_bench.training import contamination
from nano.corpus import tasks
from nano.data import turns_of
from studies._study import Made, Work, bench

TAKES = "two hours of a shared core for each seed"
PAGES = ("drafts/ablations-nano-cpu.md",)
ITEMS = ("table6", "table7", "table8", "table9", "table10", "table13")
NANO = "nano"
CORPUS_SEED = 4242
"""Of the generator of nano's training text: other tasks than nano and the embedded suites have."""
FIVE, NO_FEATURES, NO_DECAY = "dflash@five_layers", "dflash@no_features", "dflash@no_decay"
METRIC = "al.request_mean"
BESIDE = Item(
    name="beside",
    title="Drafts beside table 6's of five layers",
    source="DFlash paper, arXiv 2602.06036v2",
    engine="own",
    gpu="not stated",
    models={},
    arms=[],
    claims=[
        Claim(
            says="a draft that reads the target's features accepts more", metric=METRIC, above=FIVE, below=NO_FEATURES
        ),
        Claim(says="a loss that decays along the block accepts more", metric=METRIC, above=FIVE, below=NO_DECAY),
    ],
)
"""Claims without a table."""
HEAD = """# The paper's ablations, on nano

```
{command}
```

{machine}.

`dflash-bench reproduce` trains each table's drafts on nano's own answers to {prompts:,} prompts, from the generator
of nano's training text, with {epochs:g} passes over them, and decodes {limit} embedded prompts of each suite, once per
seed of the training. nano is small, its language easy, and these answers are few: what holds here need not hold for
large models, nor the reverse.

## Claims

The ratio of a claim's two figures over the same prompts, in each suite, with its 95 % interval over prompts. A claim
holds if all of these are above 1, and fails if one is below 1.

{claims}

## Acceptance

`{metric}`, with 95 % intervals over prompts.

{figures}
"""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each draft")
    parser.add_argument("--prompts", type=int, default=2000, help="most prompts to train on")
    parser.add_argument("--epochs", type=float, default=3, help="passes over the answers")
    parser.add_argument("--limit", type=int, default=32, help="prompts of each suite that are decoded")


def make(work: Work, options: Namespace) -> Made:
    prompts = work.once("prompts.jsonl", lambda: _prompts(options.prompts))
    judged = [_measured(work, options, prompts, seed) for seed in range(options.seeds)]
    head = HEAD.format(
        command=work.command,
        machine=next(iter(judged[0].values()))[1].results.info.environment.one_line(),
        prompts=len(prompts.read_text().splitlines()),
        epochs=options.epochs,
        limit=options.limit,
        claims=_table(["table", "claim"], [dict(_claims(one)) for one in judged]),
        metric=METRIC,
        figures=_table(["table", "suite", "draft"], [dict(_figures(one)) for one in judged]),
    )
    return Made({PAGES[0]: head})


Runs = Mapping[str, tuple[Part, Document]]
"""The run of each item, by its name, and of `BESIDE`."""


def _measured(work: Work, options: Namespace, prompts: Path, seed: int) -> Runs:
    """Train and decode with one seed, unless that is done."""
    given = ("--epochs", options.epochs, "--threads", 1)
    made: dict[str, tuple[Part, Document]] = {}
    for name in ITEMS:
        out = work.folder / f"{name}-{seed}"
        bench(
            *("reproduce", name, "--model", NANO, *given, "--train-prompts", prompts, "--train-seed", seed),
            *("--limit", options.limit, "--out", out),
            shown=True,
        )
        part = parts(items.item(name), RunRequest(model=NANO))[0]
        made[name] = part, document.read_document(out / NANO)
    drafts = {
        FIVE: work.folder / f"table6-{seed}" / "drafts" / NANO / "dflash-five_layers" / "dflash",
        NO_FEATURES: work.folder / f"table10-{seed}" / "drafts" / NANO / "dflash-no_features" / "dflash",
        NO_DECAY: _without_decay(work.folder / f"no_decay-{seed}", (*given, "--prompts", prompts), seed),
    }
    suites = items.item("table6").run["suite"]
    run = work.run(
        f"beside-{seed}",
        *("--model", NANO, "--limit", options.limit, "--threads", 1),
        *(word for suite in suites for word in ("--suite", suite)),
        *(word for method, path in drafts.items() for word in ("--method", method, "--draft", f"{method}={path}")),
    )
    labels = tuple((method, method) for method in drafts)
    made[BESIDE.name] = Part(None, RunRequest(model=NANO), labels), document.read_document(run)
    return made


def _prompts(count: int) -> str:
    """Return at most `count` different prompts of one turn that are in no suite, a line of JSON each."""
    turns = dict.fromkeys(turns_of(task)[0] for task in islice(tasks(CORPUS_SEED), count))
    tested = {turn for overlap in contamination.found(turns, None) for turn in overlap.shared}
    return "".join(json.dumps({"prompt": turn}) + "\n" for turn in turns if turn not in tested)


def _without_decay(out: Path, given: Sequence[object], seed: int) -> Path:
    draft = out / "dflash"
    if not (draft / "README.md").exists():
        own = ("--layers", 5, "--features", 5, "--block-size", 16, "--decay", "off")
        bench("train", "--target", NANO, *own, *given, "--seed", seed, "--out", out, shown=True)
    return draft


def _claims(runs: Runs) -> Iterator[tuple[tuple[str, str], str]]:
    for name, (part, run) in runs.items():
        item = BESIDE if name == BESIDE.name else items.item(name)
        for one in judge(item, part, run).claims:
            ratios = ", ".join(with_interval(ratio) for ratio, _ in one.ratios)
            yield (_label(name), one.claim.says), f"{one.judgement}: {ratios}"


def _figures(runs: Runs) -> Iterator[tuple[tuple[str, str, str], str]]:
    for name, (_, run) in runs.items():
        for cell in run.cells:
            if not cell.slice and METRIC in cell.figures and cell.method != "ar":
                suite = f"{cell.suite} {cell.setting}".strip()
                yield (_label(name), suite, shown(cell.method)), with_interval(cell.figures[METRIC])


def _label(name: str) -> str:
    return "none" if name == BESIDE.name else name.removeprefix("table")


def _table(heads: Sequence[str], seeds: Sequence[Mapping[tuple[str, ...], str]]) -> str:
    rows = [[*key, *(one[key] for one in seeds)] for key in seeds[0]]
    return markdown([*heads, *(f"seed {number}" for number in range(len(seeds)))], rows, left=len(heads))
