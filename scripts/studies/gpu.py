"""Costs of rounds on this GPU, with captured passes and without: the shapes of Qwen3-4B, 8B and 30B-A3B.

Random weights in bfloat16, 1 to 32 rows, behind 1k and 4k tokens. Downloads no models. A shape that does not fit or
takes too long is a line that says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_bench.core import environment
from dflash_bench.report.tables import ABSENT, markdown, number
from studies._study import Made, StudyError, Work, write

TAKES = "less than nine minutes on a GPU of 80 GB"
PAGES = ("speed/gpu-*.md",)

BUDGET_S = 540.0
"""Time limit of the study."""
HEAD = """# Rounds on a GPU

```
{command}
```

{machine}.

Random weights of published shapes, {dtype}: times depend on shapes alone. `graph`: passes of target and draft are
captured as CUDA graphs. `bandwidth`: of what copying reaches here ({bandwidth}), the share that a plain step reads its
weights and caches with. `verify`, `draft`, `host`: of a DFlash round, in plain steps; `round` is all of it. `at` is the
speed-up that follows from an acceptance length that was published, and not measured here (`source` below the table).
Fixed before it was run: a plain step of Qwen3-8B at one row takes at most 1.35 times as long as reading its bytes, a
DFlash round 1.15 times as long as reading its own, which are those of 1.23 plain steps; 8 rows make 5 times the tokens
of 1.

{table}

{sources}
"""


@dataclass(frozen=True)
class Size:
    models: tuple[str, ...]
    rows: str
    contexts: str
    options: tuple[str, ...]
    modes: Mapping[str, tuple[str, ...]]


FULL = Size(
    ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b"),
    "1,8,32",
    "1024,4096",
    ("--dtype", "bfloat16"),
    {"graph": ("--graph", "on"), "eager": ("--graph", "off")},
)
TOY = Size(("qwen3-4b",), "1,2", "128", ("--layers", "1", "--device", "cpu"), {"eager": ("--graph", "off")})


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--toy", action="store_true", help="the same on a CPU, cut to one layer, to see that it works")


def make(work: Work, options: Namespace) -> Made:
    toy = options.toy
    size = TOY if toy else FULL
    end = time.monotonic() + BUDGET_S
    rows: list[list[str]] = []
    sources: dict[str, str] = {}
    about: dict[str, Any] = {}
    for model in size.models:
        for mode, flags in size.modes.items():
            profiled = measured(model, size, flags, end - time.monotonic())
            if isinstance(profiled, str):
                rows.append([model, mode, profiled, *[""] * 9])
                continue
            about = about or profiled
            rows += lines(model, mode, profiled)
            sources[model] = profiled["places"][0]["verdicts"][0]["al_source"]
            # A study that is killed keeps what it has measured.
            write(work.folder / "page.md", page(work, rows, sources, about))
    if not about:
        raise StudyError("nothing could be measured:\n" + "\n".join(" ".join(row) for row in rows))
    gpus = [gpu["name"] for gpu in environment.describe().get("gpus", [])]
    name = "toy" if toy or not gpus else gpus[0].lower().replace(" ", "-")
    return Made({f"speed/gpu-{name}.md": page(work, rows, sources, about)})


def measured(model: str, size: Size, flags: Sequence[str], left_s: float) -> Any:
    """Return the output of `profile`, or why there is none."""
    command = [
        sys.executable,
        "-m",
        "dflash_bench.cli",
        "profile",
        "--json",
        "--model",
        model,
        "--random-weights",
        "--method",
        "dflash",
        "--batch",
        size.rows,
        "--context",
        size.contexts,
        "--width",
        "1,8,16",
        *size.options,
        *flags,
    ]
    print(f"{' '.join(command[2:])}", file=sys.stderr)
    if left_s < 1:
        return "there was no time left"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s)
    except subprocess.TimeoutExpired:
        return "there was no time left"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
    return json.loads(done.stdout)


def lines(model: str, mode: str, profiled: Mapping[str, Any]) -> Iterator[list[str]]:
    bandwidth = profiled["measured"]["rates"]["bandwidth"]
    for place in profiled["places"]:
        plain = next(one for one in place["passes"] if one["width"] == 1)
        whole = max(place["rounds"], key=lambda one: one["width"])
        step_s = whole["plain_s"]
        share = plain["num_bytes"] / step_s / bandwidth
        verdict = next(iter(place["verdicts"]), None)
        yield [
            model,
            mode,
            "" if profiled["capture"] in ("off", "graph") else profiled["capture"],
            str(place["rows"]),
            str(place["context"]),
            number(1000 * step_s, 2),
            f"{share:.0%}",
            *(number(whole[part] / step_s, 2) for part in ("verify_s", "draft_s", "host_s")),
            number(whole["cost"], 2),
            # Nobody has published an acceptance length for some of the shapes.
            ABSENT if verdict is None or verdict["al"] is None else f"{verdict['speedup']:.2f} at {verdict['al']:.2f}",
        ]


def page(work: Work, rows: Sequence[Sequence[str]], sources: Mapping[str, str], about: Mapping[str, Any]) -> str:
    heads = [
        "shape",
        "passes",
        "note",
        "rows",
        "context",
        "plain step [ms]",
        "bandwidth",
        "verify",
        "draft",
        "host",
        "round",
        "speed-up, predicted",
    ]
    return HEAD.format(
        command=work.command,
        machine=environment.one_line(environment.describe()),
        dtype=about["dtype"],
        bandwidth=f"{about['measured']['rates']['bandwidth'] / 1e9:,.0f} GB/s",
        table=markdown(heads, rows, left=3),
        sources="\n".join(f"- {model}: {source}" for model, source in sources.items()),
    )
