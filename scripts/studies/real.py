"""A real small model, SmolLM2-135M-Instruct, on real prompts: acceptance, exactness and speed of its drafts.

Acceptance and exactness come from many prompts decoded together in float32, speed from a few alone in --dtype. The
model is fetched if it is not there (93 MB).
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.core import files, methods
from dflash_bench.core.terminal import with_bar
from dflash_bench.core.types import Generation, Message
from dflash_bench.models import presets
from dflash_bench.report import columns, document, plots
from dflash_bench.report.document import Document
from dflash_bench.report.tables import markdown, with_interval
from dflash_bench.results import table
from dflash_bench.tasks import suites
from dflash_bench.training.cards import HISTORY
from studies._study import Made, Work, add_data, bench, tell

TAKES = "under fifteen minutes of one core"
PAGES = ("real-smollm2-cpu.md", "real-smollm2-cpu-*.svg")

NAME = "real-smollm2-cpu"
SUITES, METHODS = ("gsm8k", "humaneval", "mt_bench"), ("dflash", "eagle3", "ngram")
NUM_PROMPTS, NUM_TOKENS = 10, 128
"""Of each suite, decoded together; of each answer at most."""
PICTURES = {
    "speedup": "speed-up by suite",
    "positions": "acceptance by place in the draft",
    "rounds": "time of a round",
}
TIMED = ("prompts", "tokens", "al.pooled", "break_even_al", "tps.decode", "speedup.decode [95 %]", "exact", "near ties")
OF_DTYPE = ("al.pooled", "speedup.decode [95 %]", "exact")
"""The columns that the other table has, too, or whose meaning hangs on the type: it stands in their heads."""
HEAD = """# smollm2 on real prompts

```
{command}
```

{machine}.

SmolLM2-135M-Instruct, as `fetch smollm2` leaves it, with the drafts that are shipped for it, on prompts of the public
suites ({source}), greedy, at most {tokens} new tokens. `ngram` is prompt lookup, which needs no draft.

## Acceptance, and is it exact?

The first turns of {num} prompts a suite, decoded together in float32. `exact`: answers that are plain decoding's, token
for token. A small model repeats itself, and prompt lookup is good at that: `in loops` counts plain answers that end in
a loop.

{accepted}

## Speed

One prompt at a time on one thread in {dtype}. The run stops after {time}, so that there are few prompts, and the
intervals are wide; of fewer than five there is none. In bfloat16 rounding may decide between two tokens that are as
good: what is not exact must be such a near tie by the judge.

{timed}
"""
TRAINING = """## What such a draft costs

![acceptance over the training]({picture})

From the drafts' cards ([DFlash](../dflash_bench/smollm2/dflash/README.md),
[EAGLE-3](../dflash_bench/smollm2/eagle3/README.md)): acceptance on 32 prompts that neither draft was trained on, in
bfloat16, by the tokens of answers that it had read (the first two points of DFlash are from 8 prompts).
"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "gsm8k/test.jsonl, humaneval/test.jsonl and mt_bench/train.jsonl")
    parser.add_argument("--time", default="4m", help="for measuring speed")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float32"],
        help="of what is timed; float32 on a processor that computes in bfloat16 slowly",
    )  # fmt: skip


def make(work: Work, options: Namespace) -> Made:
    bench("fetch", "smollm2", shown=True)
    suites_asked = [word for name in SUITES for word in ("--suite", name)]
    by = [word for name in METHODS for word in ("--method", name)]
    timed = work.run(
        "timed", "--model", "smollm2", *suites_asked, "--data", options.data, "--limit", 40,
        "--max-new-tokens", NUM_TOKENS, *by, "--dtype", options.dtype, "--threads", 1, "--for", options.time,
    )  # fmt: skip
    accepted = work.once("accepted.json", lambda: accept(options.data))
    plotted = work.plots(timed)
    pictures = {f"{NAME}-{name}.svg": plotted / f"{name}.svg" for name in PICTURES}
    training = work.folder / "training.svg"
    trained(training)
    text = page(work, document.read_document(timed), files.json_of(accepted), options.time)
    return Made({PAGES[0]: text, **pictures, f"{NAME}-training.svg": training})


def accept(data: str) -> str:
    """Many prompts decoded together in float32, for acceptance and exactness alone, as JSON."""
    import torch

    from dflash_bench.engine.backend import open_backend
    from dflash_bench.models import loading

    # Nothing is timed here.
    torch.set_num_threads(os.cpu_count() or 1)
    preset, chosen = presets.preset("smollm2"), methods.chosen(METHODS)
    models = loading.load(preset, ["dflash", "eagle3"], "cpu", torch.float32)
    backend = open_backend(models, preset, chosen, NUM_TOKENS)
    found: list[dict[str, Any]] = []
    asked = [(suite, method.label) for suite in SUITES for method in chosen]
    plain: Sequence[Generation] = ()
    for suite, method in with_bar(asked, "decoding"):
        loaded = suites.load_prompts(suites.known_suites()[suite], data, NUM_PROMPTS)
        prompts = [backend.encode([*one.opening, Message("user", one.turns[0])]) for one in loaded.prompts]
        answers = backend.generate_ids(method, prompts)
        if method == "ar":
            plain = answers
            continue
        found.append({
            "suite": suite, "method": method, "source": loaded.source.partition(" ")[0],
            "rounds": [[sum(one.accepted or ()) + len(one.accepted or ()), len(one.accepted or ())] for one in answers],
            "exact": sum(one.token_ids == other.token_ids for one, other in zip(answers, plain, strict=True)),
            "loops": sum(table.in_tokens(one.token_ids) > 0 for one in plain),
        })  # fmt: skip
        tell(f"{suite} {method}: exact {found[-1]['exact']} of {len(plain)}")
    return json.dumps(found)


def page(work: Work, timed: Document, known: Sequence[dict[str, Any]], time: str) -> str:
    info = timed.results.info
    head = HEAD.format(
        command=work.command, machine=info.environment.one_line(), source=known[0]["source"],
        tokens=NUM_TOKENS, time=time,
        num=NUM_PROMPTS, accepted=accepted_table(known), dtype=info.identity.dtype, timed=timed_table(timed),
    )  # fmt: skip
    parts = [head]
    for name, caption in PICTURES.items():
        parts.append(f"![{caption}]({NAME}-{name}.svg)\n")
    parts.append(TRAINING.format(picture=f"{NAME}-training.svg"))
    names = ("al.pooled", "break_even_al", "tps.decode", "speedup.decode")
    parts.append("\n".join(f"- `{name}`: {FORMULAS[name]}" for name in names))
    parts.append("\n" + "\n\n".join(columns.notes(timed.cells)))
    return "\n".join(parts) + "\n"


def accepted_table(known: Sequence[dict[str, Any]]) -> str:
    rows = []
    for one in known:
        rounds = np.array(one["rounds"], dtype=np.float64)
        al = stats.intervals(rounds, [stats.ratio((0,), (1,))])[0]
        num = len(rounds)
        exact, loops = (f"{one[name]}/{num}" for name in ("exact", "loops"))
        rows.append([f"{one['suite']} ({one['source']})", one["method"], with_interval(al), exact, loops])
    heads = ["suite", "method", "al.pooled [95 %], float32", "exact, float32", "in loops"]
    return markdown(heads, rows, left=2)


def timed_table(run: Document) -> str:
    known = {column.one_line: column for column in (*columns.ROUNDS, *columns.RESULTS)}
    shown = [known[head] for head in TIMED]
    _, rows, _ = columns.main_table(run.cells, shown, run.findings).flat()
    legend, dtype = columns.legend(run.cells, run.findings), run.results.info.identity.dtype
    heads = [f"{head}, {dtype}" if head in OF_DTYPE else head for head in TIMED]
    return "\n\n".join([markdown(["suite", "method", *heads], rows, left=2), *legend])


def trained(picture: Path) -> None:
    """Acceptance by what each shipped draft had read."""
    drafts = presets.preset("smollm2").drafts
    histories = {name: files.json_of(Path(folder) / HISTORY) for name, folder in drafts.items()}
    plots.write_training(histories, picture)
