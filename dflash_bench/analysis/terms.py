"""The sums that all figures are made of: one line of `TERMS` per cell and prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.records import CellKey
from dflash_bench.results.plan import BASELINE

TERMS = (
    "answers", "decode_tokens", "decode_s", "e2e_tokens", "e2e_s", "rounds", "verified", "accepted",
    "drafted", "emitted", "rounds_of_shown", "shown", "al_sum", "draft_s", "draft_rounds", "verify_s", "verify_rounds",
    "other_s", "model_s", "timed_rounds", "exact", "compared", "passed", "scored",
    "paired", "plain_s", "plain_tokens", "own_s", "own_tokens", "plain_e2e_s", "plain_e2e_tokens", "own_e2e_s",
    "own_e2e_tokens", "log_ratio", "log_ratios", "prompt_tokens", "draft_prefill_s", "draft_prefills",
)  # fmt: skip
"""Sums over the turns and repeats of a prompt.

`plain_` and `own_` are the two sides of the `paired` answers, which both plain decoding and the method gave.
"""
COLUMN = {name: number for number, name in enumerate(TERMS)}
"""The index of each term in `Cell.sums`."""


ANSWER = ("suite", "slice", "settings_id", "prompt_id", "turn", "repeat")
"""What identifies the answers to one question by all methods."""
MEASURED = (
    "num_tokens", "decode_tokens", "decode_s", "prefill_s", "num_rounds", "num_accepted", "num_drafted",
    "num_emitted", "draft_s", "verify_s", "round_s", "num_prompt_tokens", "draft_prefill_s",
)  # fmt: skip
"""The columns of the frame that the terms of a method alone are made of."""


def prompt_sums(good: Any) -> Any:
    """`TERMS` by cell and prompt; `good` are the rows that did not fail."""
    import pandas as pd

    terms = pd.DataFrame(_own_terms(good) | _paired_terms(good), index=good.index)
    keys = [good[name] for name in (*CellKey._fields, "prompt_id")]
    sums = terms.groupby(keys, observed=True).sum()
    costs = sums[["plain_s", "plain_tokens", "own_s", "own_tokens"]].to_numpy(dtype=np.float64)
    known = (costs > 0).all(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(costs[:, 0] / costs[:, 1] * costs[:, 3] / costs[:, 2])
    return sums.assign(log_ratio=np.where(known, logs, 0.0), log_ratios=known.astype(float))[list(TERMS)]


def _own_terms(good: Any) -> dict[str, Any]:
    column = {name: good[name].to_numpy(dtype=np.float64) for name in MEASURED}
    rounds, accepted = column["num_rounds"], column["num_accepted"]
    has_rounds = rounds > 0
    known = {name: ~np.isnan(column[name]) for name in ("draft_s", "verify_s", "round_s", "prefill_s")}
    timed = known["draft_s"] & known["verify_s"]
    other = column["round_s"] - column["draft_s"] - column["verify_s"]
    passed = good["passed"].to_numpy(dtype=np.float64)
    terms = {
        "answers": np.ones(len(good)),
        "decode_tokens": column["decode_tokens"],
        "decode_s": column["decode_s"],
        "e2e_tokens": np.where(known["prefill_s"], column["num_tokens"], 0),
        "e2e_s": column["prefill_s"] + column["decode_s"],
        "rounds": rounds,
        "verified": accepted + rounds,
        "accepted": accepted,
        "drafted": column["num_drafted"],
        "emitted": column["num_emitted"],
        "rounds_of_shown": np.where(np.isnan(rounds), 0, column["decode_tokens"]),
        "shown": has_rounds,
        "al_sum": np.divide(accepted + rounds, rounds, out=np.zeros(len(good)), where=has_rounds),
        "draft_s": column["draft_s"],
        "draft_rounds": np.where(known["draft_s"], rounds, 0),
        "verify_s": column["verify_s"],
        "verify_rounds": np.where(known["verify_s"], rounds, 0),
        "other_s": other,
        "model_s": column["draft_s"] + column["verify_s"],
        "timed_rounds": np.where(timed & known["round_s"], rounds, 0),
        "exact": (good["exactness"] == "exact").to_numpy(),
        "compared": good["exactness"].notna().to_numpy(),
        "prompt_tokens": column["num_prompt_tokens"],
        "draft_prefill_s": column["draft_prefill_s"],
        "draft_prefills": ~np.isnan(column["draft_prefill_s"]),
        "passed": passed,
        "scored": ~np.isnan(passed),
    }
    return {name: np.nan_to_num(np.asarray(values, dtype=np.float64)) for name, values in terms.items()}


def _paired_terms(good: Any) -> dict[str, Any]:
    """Seconds and tokens of both sides, for answers whose plain counterpart did not fail either."""
    answer = good.groupby(list(ANSWER), observed=True, sort=False).ngroup().to_numpy()
    is_plain = (good["method"] == BASELINE).to_numpy()
    method = {
        "s": good["decode_s"].to_numpy(dtype=np.float64),
        "tokens": good["decode_tokens"].to_numpy(dtype=np.float64),
        "e2e_s": (good["prefill_s"] + good["decode_s"]).to_numpy(dtype=np.float64),
        "e2e_tokens": good["num_tokens"].to_numpy(dtype=np.float64),
    }
    plain = {name: np.full(answer.max(initial=-1) + 1, np.nan) for name in method}
    for name, values in method.items():
        plain[name][answer[is_plain]] = values[is_plain]
    plain = {name: values[answer] for name, values in plain.items()}
    costs = ("s", "tokens"), ("e2e_s", "e2e_tokens")
    terms: dict[str, Any] = {}
    for pair in costs:
        both = ~np.isnan(sum(side[name] for side in (plain, method) for name in pair))
        terms.setdefault("paired", both)
        terms |= {f"plain_{name}": np.where(both, plain[name], 0) for name in pair}
        terms |= {f"own_{name}": np.where(both, method[name], 0) for name in pair}
    return {name: np.asarray(values, dtype=np.float64) for name, values in terms.items()}
