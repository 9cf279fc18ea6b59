"""Acceptance and speed-up of nano's DFlash draft by the size of its block."""

from __future__ import annotations

from argparse import Namespace

from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.report import document, render, sections
from studies._study import Made, Work

TAKES = "under ten minutes of one core"
PAGES = ("speed/block-sizes-nano-cpu.md", "speed/block-sizes-nano-cpu.svg")
SWEEP = (
    "--suite gsm8k --suite humaneval --suite mt_bench --limit 16 --threads 1 --method dflash "
    "--over block=2,4,6,8,10,12,14,16"
)
PAGE = """# Block size: acceptance and speed-up

```
{command}
```

{machine}.

The paper trains drafts at several block sizes and runs each at several. nano has one DFlash draft, trained
at 16, so that here the size varies at inference only. A size counts the anchor. 16 prompts a suite,
from the generator of texts that nano and its draft were trained on; greedy, float32, one thread.

![acceptance and speed-up by block size](block-sizes-nano-cpu.svg)

{swept}

{formulas}

Intervals are 95 %, by bootstrap over prompts; of 16 prompts a suite they are likely too narrow.
"""


def make(work: Work, options: Namespace) -> Made:
    folder = work.run("sweep", *SWEEP.split(), kind="sweep")
    run = document.read_document(folder)
    info, swept = run.results.info, [sweep for sweep in run.sweeps if sweep.option == "block"]
    page = PAGE.format(
        command=work.command,
        machine=info.environment.one_line(),
        swept="\n\n".join(map(render.markdown, sections.sweeps(swept, info))),
        formulas="\n".join(f"- `{name}`: {FORMULAS[name]}" for name in ("al.pooled", "speedup.decode")),
    )
    return Made({PAGES[0]: page, PAGES[1]: work.plots(folder) / "sweep.svg"})
