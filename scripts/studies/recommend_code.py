"""Does `recommend` choose for a real model of code what measuring every method on every prompt shows to be fastest?

For the target and the drafts of the study `real`, whose page has the measurements. Each suite's race is continued where
it stopped.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from dflash_bench.analysis.stats import Interval
from dflash_bench.core.files import sha256_of
from dflash_bench.racing.recommendation import OUTCOMES
from dflash_bench.report.tables import ABSENT, markdown, number, with_interval
from studies._study import Made, Work, add_data, bench
from studies.real import LIMITS, METHODS, NUM_TOKENS

TAKES = "half an hour of a core for half a billion parameters"
PAGES = ("speed/recommend-code-*.md",)
LIMIT = 32
HEAD = """# {model}: what `recommend` chooses

```
{command}
```

{machine}.

The target is the file of sha256 `{hash}`.
`dflash-bench recommend` raced the methods below on the first {limit} prompts of each suite: float32, one prompt at a
time on one thread, greedy, at most {tokens} new tokens. [All prompts](code-{model}.md) were measured by a run of their
own.

{sections}

Speed-ups are `speedup.decode` with 95 % intervals over prompts, on the prompts that a method answered before it left
the race.
"""
SECTION = """## {suite}

`recommend` chose **{choice}** after {minutes:.0f} minutes.

{table}"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "humaneval/test.jsonl and mbpp/test.jsonl")
    parser.add_argument("--target", type=Path, required=True, metavar="FILE.gguf", help="the model")
    parser.add_argument("--draft", action="append", default=[], metavar="METHOD=FOLDER", help="may be repeated")
    parser.add_argument(
        "--method", action="append", default=[], metavar="METHOD[:N]", help="one to race; may be repeated. Default: all"
    )
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"prompts of each suite ({LIMIT})")


def make(work: Work, options: Namespace) -> Made:
    target = options.target.resolve()
    names = options.method or [*METHODS, *(draft.partition("=")[0] for draft in options.draft)]
    found = {}
    for suite in LIMITS:
        out = work.folder / suite
        bench(
            "recommend",
            *("--target", target, "--suite", suite, "--data", options.data, "--limit", options.limit),
            *(word for name in names for word in ("--method", name)),
            *(word for draft in options.draft for word in ("--draft", draft)),
            *("--max-new-tokens", NUM_TOKENS, "--dtype", "float32", "--threads", 1, "--out", out),
            shown=True,
        )
        found[suite] = json.loads((out / "recommendation.json").read_text(encoding="utf-8"))
    page = HEAD.format(
        model=target.stem,
        command=work.command,
        machine=next(iter(found.values()))["machine"],
        hash=sha256_of(target),
        limit=options.limit,
        tokens=NUM_TOKENS,
        sections="\n\n".join(_section(suite, one) for suite, one in found.items()),
    )
    return Made({f"speed/recommend-code-{target.stem}.md": page})


def _section(suite: str, found: dict[str, Any]) -> str:
    [decision] = found["decisions"]
    rows = [
        [
            "plain" if one["verdict"] == "baseline" else one["method"],
            str(one["num_prompts"]),
            number(one["length"][0], 2) if one["length"] else ABSENT,
            with_interval(Interval(*one["speedup"])) if one["speedup"] else "1.00",
            OUTCOMES[one["verdict"]],
        ]
        for one in decision["tried"]
    ]
    return SECTION.format(
        suite=suite,
        choice=decision["choice"],
        minutes=found["spent_s"] / 60,
        table=markdown(["method", "prompts", "tokens per round", "speed-up [95 %]", "outcome"], rows, left=1),
    )
