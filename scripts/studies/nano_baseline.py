"""The figures of the nano models, without timings: the baseline that tests hold them against.

Run it after their weights have changed, and read the difference before committing it.
"""

from __future__ import annotations

from argparse import Namespace

from studies._study import Made, Work, bench

TAKES = "half a minute of one core"
PAGES = ("baselines/nano.json",)
RUN = "--suite gsm8k --method dflash --method eagle3 --limit 4 --max-new-tokens 48"


def make(work: Work, options: Namespace) -> Made:
    run, made = work.run("nano", *RUN.split()), work.folder / "nano.json"
    bench("baseline", run, "--time-free", "-o", made, shown=True)
    return Made({PAGES[0]: made})
