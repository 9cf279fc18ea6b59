"""The nano models reach what they reached: acceptance, exactness and right answers, on any machine.

When their weights have changed: `scripts/study nano_baseline`, and read the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

BASELINE = Path(__file__).parents[2] / "results" / "baselines" / "nano.json"
ASKED = "--suite gsm8k --method dflash --method eagle3 --limit 4 --max-new-tokens 48".split()


def test_the_nano_models_reach_their_baseline(main: Callable[..., tuple[int, str, str]]) -> None:
    assert main("run", *ASKED, "--out", "now")[0] == 0
    code, shown, err = main("check", "now", "--baseline", BASELINE, "--json")
    found = json.loads(shown) if shown else err
    assert code == 0, found
    judged = {(each["method"], each["kind"]) for each in found["checks"]}
    assert judged >= {(method, kind) for method in ("dflash", "eagle3") for kind in ("al.pooled", "exact", "mismatch")}
