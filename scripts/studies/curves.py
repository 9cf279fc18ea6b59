"""Is the acceptance length of every draft length, read from one recording, what is measured with that length?

A run records the drafts of every position; `card --curve` writes the acceptance length for one to eight drafted tokens,
as servers take it to be imposed. Each length is measured beside it, with thinking off and on.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dflash_bench.replay import curve
from dflash_bench.report import document
from dflash_bench.report.tables import markdown, with_interval
from studies._study import Made, Work, bench

TAKES = "ten minutes of one core"
PAGES = ("drafts/curves-nano-cpu.md",)
METHODS = ("eagle3", "draft-model")
SUITES = ("gsm8k", "math500", "aime24")
"""Suites whose answers think."""
NUM_TOKENS, MOST_OFF = 128, 0.02
HEAD = """# Acceptance length by drafted tokens

```
{command}
```

{machine}.

nano with `{methods}`, {limit} embedded prompts each of {suites}, thinking off and on. `curve`: from the
drafts of {longest} tokens, recorded at every position, by `card --curve`. `measured`: decoded with that many. Both are
tokens per round, over all prompts, with 95 % intervals.

{tables}

The largest difference is {most:.4f}.

## The file

As `card --curve` writes it for {first}; `import` reads it back.

```yaml
{text}
```
"""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=12, help="prompts of each suite")


def make(work: Work, options: Namespace) -> Made:
    labels = [f"{method}:{num}" for method in METHODS for num in range(1, curve.LONGEST + 1)]
    words = ["--model", "nano", "--limit", options.limit, "--max-new-tokens", NUM_TOKENS, "--thinking", "both"]
    words += ["--threads", 1, "--record", "every-position"]
    words += [word for suite in SUITES for word in ("--suite", suite)]
    run = work.run("run", *words, *(word for label in labels for word in ("--method", label)))
    results = document.read_document(run).results
    found = {label: {one.mode: one.lengths for one in curve.curves_of(results, label)} for label in labels}
    sections, most = [], 0.0
    for method in METHODS:
        known, rows = found[f"{method}:{curve.LONGEST}"], []
        for num in range(1, curve.LONGEST + 1):
            pairs = [(known[mode][num], found[f"{method}:{num}"][mode][num]) for mode in (curve.OFF, curve.ON)]
            most = max(most, *(abs(here.value - there.value) for here, there in pairs))
            rows.append([str(num), *(with_interval(one) for pair in pairs for one in pair)])
        heads = ["drafted", "curve, off", "measured, off", "curve, on", "measured, on"]
        sections.append(f"## {method}\n\n{markdown(heads, rows, left=0)}")
    page = HEAD.format(
        command=work.command,
        machine=results.info.environment.one_line(),
        methods="` and `".join(METHODS),
        limit=options.limit,
        suites=", ".join(SUITES),
        longest=curve.LONGEST,
        tables="\n\n".join(sections),
        most=most,
        first=METHODS[0],
        text=written(run, f"{METHODS[0]}:{curve.LONGEST}", work.folder / "curve.yaml"),
    )
    wrong = [f"a length is off by {most:.4f}, more than {MOST_OFF}"] if most > MOST_OFF else []
    return Made({PAGES[0]: page}, wrong)


def written(run: Path, method: str, file: Path) -> str:
    """Return the file that `card --curve` writes, without the command, which a page has already."""
    file.unlink(missing_ok=True)
    bench("card", run, "--curve", file, "--method", method)
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("# Measured by"))
