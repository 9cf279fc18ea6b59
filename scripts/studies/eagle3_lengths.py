"""How many tokens EAGLE-3 should draft a round, in a chain and in a tree, with nano."""

from __future__ import annotations

from argparse import Namespace

from studies import _reported
from studies._study import Made, Work

TAKES = "ten minutes of one core"
PAGES = ("speed/eagle3-lengths-nano-cpu.md",)
METHODS = ("dflash", *(f"eagle3:{length}" for length in range(1, 8)), "eagle3-tree:nodes=15", "eagle3-tree:nodes=59")
REMARK = (
    "The embedded prompts come from the generator of texts that both drafts were trained on; 16 a suite are too few\n"
    "for the intervals to be trusted."
)


def make(work: Work, options: Namespace) -> Made:
    methods = [word for name in METHODS for word in ("--method", name)]
    run = work.run("run", "--suite", "gsm8k", "--suite", "mt_bench", "--limit", 16, *methods)
    return Made({PAGES[0]: _reported.page(work, run, REMARK)})
