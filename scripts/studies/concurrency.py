"""Answers decoded together on one thread, with nano: throughput, and up to which concurrency drafting pays.

Keep the machine quiet meanwhile.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from studies import _reported
from studies._study import Made, Work

TAKES = "three minutes of one core"
PAGES = ("speed/concurrency-nano-cpu.md", "speed/concurrency-nano-cpu.svg")
RUN = "--suite gsm8k --method dflash --method eagle3 --method ngram --max-new-tokens 96 --audit divergent"


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--levels", default="1,2,4,8,16,32", help="concurrency")
    parser.add_argument("--limit", type=int, default=32, help="number of prompts")


def make(work: Work, options: Namespace) -> Made:
    run = work.run("run", *RUN.split(), "--limit", options.limit, "--concurrency", options.levels)
    return Made({PAGES[0]: _reported.page(work, run), PAGES[1]: work.plots(run) / "load.svg"})
