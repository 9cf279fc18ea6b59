"""Metrics of cells: each is a ratio of sums per prompt, declared once with its formula, unit and place in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Floats, Interval
from dflash_bench.core.measurement import measurements
from dflash_bench.core.metric import Metric, Shown
from dflash_bench.core.types import CellKey
from dflash_bench.results.plan import BASELINE as BASELINE
from dflash_bench.results.row_arrays import numbered

# Sums: per answer from the columns of the frame, then added up over the turns and repeats of a prompt.


QUESTION = ("suite", "slice", "settings_id", "prompt_id", "turn", "repeat")
"""The columns that identify a question, which every method answers once."""
DECODE, E2E = ("decode_s", "decode_tokens"), ("e2e_s", "num_tokens")
"""The columns, seconds and tokens, that time per token is computed from."""


def is_pace_unknown(rows: Any) -> Any:
    """Return the mask of answers whose decode_s covers an unknown number of tokens, [answers]."""
    return ((rows["decode_tokens"] <= 0) & (rows["num_tokens"] > 1)).to_numpy()


class AnswerColumns:
    """Columns of the answers that did not fail, as float arrays [answers]; NaN where the backend does not report it."""

    def __init__(self, good: Any) -> None:
        self.frame = good
        self._columns: dict[str, Floats] = {}
        self._paired: dict[tuple[str, str], Any] = {}
        question = numbered(good, QUESTION)
        is_plain = (good["method"] == BASELINE).to_numpy()
        rows_of_plain = np.full(question.max(initial=-1) + 1, -1)
        rows_of_plain[question[is_plain]] = np.flatnonzero(is_plain)
        self._plain_rows = rows_of_plain[question]

    def __getitem__(self, name: str) -> Floats:
        if name not in self._columns:
            self._columns[name] = self._column(name)
        return self._columns[name]

    def _column(self, name: str) -> Floats:
        if name == "e2e_s":
            return self["prefill_s"] + self._stored("decode_s")
        values = self._stored(name)
        return np.where(is_pace_unknown(self.frame), np.nan, values) if name in DECODE else values

    def _stored(self, name: str) -> Floats:
        values: Floats = self.frame[name].to_numpy(dtype=np.float64)
        return values

    def has(self, name: str) -> Any:
        """Return the mask of answers that have this column, [answers]."""
        return ~np.isnan(self[name])

    def where_known(self, name: str, counted: str) -> Floats:
        """Return the column `counted` of answers that have the column `name`, and 0 for others, [answers]."""
        return np.where(self.has(name), self[counted], 0)

    def plain(self, name: str) -> Floats:
        """Return the column of the baseline's answer to the same question, [answers]; NaN where there is none."""
        return np.where(self._plain_rows >= 0, self[name][self._plain_rows], np.nan)

    def paired(self, cost: tuple[str, str]) -> Any:
        """Return the mask of answers that have these seconds and tokens on both sides, [answers]."""
        if cost not in self._paired:
            known = sum(side(name) for side in (self.plain, self.__getitem__) for name in cost)
            self._paired[cost] = ~np.isnan(known)
        return self._paired[cost]


def _plain(name: str, cost: tuple[str, str]) -> Callable[[AnswerColumns], Any]:
    return lambda rows: np.where(rows.paired(cost), rows.plain(name), 0)


def _own(name: str, cost: tuple[str, str]) -> Callable[[AnswerColumns], Any]:
    return lambda rows: np.where(rows.paired(cost), rows[name], 0)


def _mean_length(rows: AnswerColumns) -> Floats:
    """Return the mean of accepted + 1 over the rounds of each answer, [answers]; 0 without a round."""
    rounds = rows["num_rounds"]
    return np.divide(rows["num_accepted"] + rounds, rounds, out=np.zeros(len(rounds)), where=rounds > 0)


OF_ANSWERS: Mapping[str, Callable[[AnswerColumns], Any]] = {
    "answers": lambda rows: np.ones(len(rows.frame)),
    "decode_tokens": lambda rows: rows["decode_tokens"],
    "decode_s": lambda rows: rows["decode_s"],
    "e2e_tokens": lambda rows: np.where(rows.has("prefill_s"), rows["num_tokens"], 0),
    "e2e_s": lambda rows: rows["e2e_s"],
    "rounds": lambda rows: rows["num_rounds"],
    "emittable": lambda rows: rows["num_accepted"] + rows["num_rounds"],
    "accepted": lambda rows: rows["num_accepted"],
    "drafted": lambda rows: rows["num_drafted"],
    "verified_drafts": lambda rows: rows["num_verified"],
    "cut_rounds": lambda rows: np.where(rows.has("num_verified"), rows["num_rounds"], 0),
    "emitted": lambda rows: rows["num_emitted"],
    "tokens_of_shown": lambda rows: np.where(rows.has("num_rounds"), rows["num_emitted"], 0),
    "shown": lambda rows: rows["num_rounds"] > 0,
    "al_sum": _mean_length,
    "draft_s": lambda rows: rows["draft_s"],
    "draft_rounds": lambda rows: np.where(rows.has("draft_s"), rows["num_rounds"], 0),
    "verify_s": lambda rows: rows["verify_s"],
    "verify_rounds": lambda rows: np.where(rows.has("verify_s"), rows["num_rounds"], 0),
    "other_s": lambda rows: rows["round_s"] - rows["draft_s"] - rows["verify_s"],
    "model_s": lambda rows: rows["draft_s"] + rows["verify_s"],
    "timed_rounds": lambda rows: np.where(
        rows.has("draft_s") & rows.has("verify_s") & rows.has("round_s"), rows["num_rounds"], 0
    ),
    "exact": lambda rows: rows.frame["exactness"] == "exact",
    "compared": lambda rows: rows.frame["exactness"].notna(),
    "as_text": lambda rows: (
        rows.frame["exactness"].notna() & (rows.has("num_hidden_tokens") | ~np.isnan(rows.plain("num_hidden_tokens")))
    ),
    "passed": lambda rows: rows["passed"],
    "scored": lambda rows: rows.has("passed"),
    "cut": lambda rows: rows.has("passed") & (rows.frame["finish_reason"] == "length").to_numpy(),
    "score": lambda rows: rows["score"],
    "valued": lambda rows: rows.has("score"),
    "paired": lambda rows: rows.paired(DECODE),
    "plain_s": _plain("decode_s", DECODE),
    "plain_tokens": _plain("decode_tokens", DECODE),
    "own_s": _own("decode_s", DECODE),
    "own_tokens": _own("decode_tokens", DECODE),
    "plain_e2e_s": _plain("e2e_s", E2E),
    "plain_e2e_tokens": _plain("num_tokens", E2E),
    "own_e2e_s": _own("e2e_s", E2E),
    "own_e2e_tokens": _own("num_tokens", E2E),
    "weights_s": lambda rows: rows["weights_s"],
    "reading_s": lambda rows: np.where(rows.has("weights_s"), rows["decode_s"], 0),
    "prompt_tokens": lambda rows: rows["num_prompt_tokens"],
    "draft_prefill_s": lambda rows: rows["draft_prefill_s"],
    "draft_prefills": lambda rows: rows.has("draft_prefill_s"),
    **{name: sum_of for one in measurements() for name, sum_of in one.sums.items()},
}
"""The contribution of each answer to the sums of its prompt; NaN adds 0.

`plain_` and `own_` are the two sides of the `paired` answers, which both the baseline and the method gave.
"""
SUMS = (*OF_ANSWERS, "log_ratio", "log_ratios")
"""The sums of a prompt. The last two come from its other sums: the logarithm of its speed-up, and 1 if it has one."""
COLUMN = {name: number for number, name in enumerate(SUMS)}
"""The index of each sum in `Cell.sums`."""
BESIDE_PLAIN = tuple(name for name in SUMS if name == "paired" or name.startswith(("plain_", "own_", "log_")))
"""The sums that compare a method with plain decoding: without them there is no speed-up."""


def prompt_sums(good: Any) -> Any:
    """Return `SUMS` by cell, unit (a session or, in runs without, the prompt) and prompt, as a frame; `good` are the
    rows that did not fail."""
    import pandas as pd

    rows = AnswerColumns(good)
    terms = {name: np.nan_to_num(np.asarray(of(rows), dtype=np.float64)) for name, of in OF_ANSWERS.items()}
    keys = [*CellKey._fields, "unit" if "unit" in good else "prompt_id", "prompt_id"]
    places = numbered(good, keys)
    sums = pd.DataFrame(terms, index=places).groupby(level=0).sum()
    first, columns = np.unique(places, return_index=True)[1], [good[name].cat for name in keys]
    sums.index = pd.MultiIndex(
        [pd.CategoricalIndex(column.categories, column.categories) for column in columns],
        [column.codes.to_numpy()[first] for column in columns],
        names=[*CellKey._fields, "unit", "prompt_id"],
    )
    costs = sums[["plain_s", "plain_tokens", "own_s", "own_tokens"]].to_numpy(dtype=np.float64)
    known = (costs > 0).all(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(costs[:, 0] / costs[:, 1] * costs[:, 3] / costs[:, 2])
    return sums.assign(log_ratio=np.where(known, logs, 0.0), log_ratios=known.astype(float))


# Metrics: a product of sums over another product of sums. Values, intervals, comparisons and gates are all made from
# these sums. Failed answers are in no sum. A metric that needs what the backend does not report is left out, never 0.


def columns_of(metric: Metric) -> tuple[list[int], list[int]]:
    """Return the indices of a metric's `top` and of its `bottom` in `SUMS`."""
    return [COLUMN[name] for name in metric.top], [COLUMN[name] for name in metric.bottom]


def statistic_of(metric: Metric) -> stats.Statistic:
    top, bottom = map(tuple, columns_of(metric))
    return stats.Statistic(top, bottom, metric.scale, of_logs=metric.of_logs, at_most=metric.at_most)


def is_beside_plain(metric: Metric) -> bool:
    """Return whether plain decoding's times enter the metric."""
    return not {*metric.top, *metric.bottom}.isdisjoint(BESIDE_PLAIN)


def possible(metric: Metric, interval: Interval, widest: float) -> Interval:
    """Clip the interval to the metric's possible values, with rounds of up to `widest` tokens."""
    return interval.within(metric.at_least, min(metric.at_most, widest) if metric.is_length else metric.at_most)


_LENGTH: dict[str, Any] = {"unit": "tokens/round", "at_least": 1.0, "is_length": True}
_TIME: dict[str, Any] = {"unit": "ms", "higher_is_better": False, "is_timing": True, "scale": 1000}
_DECLARED = (
    Metric(
        id="al.pooled", formula="sum(a_i + 1) / sum(S), over all rounds of all prompts",
        top=("emittable",), bottom=("rounds",), **_LENGTH,
        shown=(Shown("results", 1, "al.\npooled", in_paper=True), Shown("rounds", 4, "al.\npooled")),
        in_comparison=True, is_compared=True,
        may_fall=0.005,  # another processor's rounding can change what a draft proposes
    ),
    Metric(
        id="al.request_mean", formula="mean over answers of the mean over rounds of (a_i + 1)",
        top=("al_sum",), bottom=("shown",), **_LENGTH,
        shown=(Shown("results", 2, "al.\nrequest_mean", is_spare=True),), in_comparison=True,
    ),
    Metric(
        id="al.emitted", formula="sum(e_i) / sum(S), after truncation", top=("emitted",), bottom=("rounds",), **_LENGTH
    ),
    Metric(
        id="accept_rate",
        formula="sum(a_i) / sum(d_i), for chains only: the nodes of a tree are alternatives, and most must fail",
        unit="share", top=("accepted",), bottom=("drafted",), at_most=1.0, needs_draft=True, is_of_chains=True,
        in_comparison=True,
    ),
    Metric(
        id="verified", formula="sum(v_i) / sum(S): draft tokens that the target read, where drafts are cut before",
        unit="tokens/round", top=("verified_drafts",), bottom=("cut_rounds",), needs_draft=True,
        shown=(Shown("rounds", 7, "verified", is_optional=True),), in_comparison=True,
    ),
    Metric(
        id="forwards_per_token", formula="sum(S) / sum(T - 1): target forwards for each token after the first",
        unit="forwards/token", top=("rounds",), bottom=("tokens_of_shown",), higher_is_better=False,
        in_comparison=True, is_compared=True,
    ),
    Metric(
        id="exact", formula="answers that are the plain output, token for token (as text where a server reports no "
        "token ids) / answers that were compared",
        unit="share", top=("exact",), bottom=("compared",), at_most=1.0, may_fall=0.0,
    ),
    Metric(
        id="passed", formula="answers that are right / answers that were scored",
        unit="share", top=("passed",), bottom=("scored",), at_most=1.0, may_fall=0.0,
    ),
    Metric(
        id="score", formula="mean over answers of the score by a metric of evaluate, each answer scored alone",
        unit="points", top=("score",), bottom=("valued",), at_least=float("-inf"),
        shown=(Shown("results", 7, "score [95 %]", has_interval=True, is_optional=True),),
        in_comparison=True, is_compared=True,
    ),
    Metric(
        id="tps.decode", formula="sum(T - 1) / sum(decode_s)",
        unit="tokens/s", top=("decode_tokens",), bottom=("decode_s",), is_timing=True,
        shown=(Shown("results", 3, "tps.\ndecode", digits=1, is_spare=True, in_paper=True),),
        in_comparison=True, is_compared=True, may_fall=0.05,
    ),
    Metric(
        id="tps.e2e", formula="sum(T) / sum(prefill_s + decode_s)",
        unit="tokens/s", top=("e2e_tokens",), bottom=("e2e_s",), is_timing=True, in_comparison=True, is_compared=True,
    ),
    Metric(
        id="speedup.decode", formula="plain decode_s per token / the method's, over the same answers",
        unit="x", top=("plain_s", "own_tokens"), bottom=("plain_tokens", "own_s"), is_timing=True,
        shown=(Shown("results", 4, "speedup.\ndecode [95 %]", has_interval=True, in_paper=True),),
        in_comparison=True, is_compared=True, may_fall=0.05,
    ),
    Metric(
        id="speedup.decode.geometric", formula="geometric mean of the prompts' own speedup.decode",
        unit="x", top=("log_ratio",), bottom=("log_ratios",), is_timing=True, of_logs=True,
        shown=(Shown("rounds", 6, "speedup.decode\ngeo. mean [95 %]", has_interval=True),), in_comparison=True,
    ),
    Metric(
        id="speedup.e2e", formula="plain (prefill_s + decode_s) per token / the method's, over the same answers",
        unit="x", top=("plain_e2e_s", "own_e2e_tokens"), bottom=("plain_e2e_tokens", "own_e2e_s"), is_timing=True,
        shown=(Shown("results", 5, "speedup.\ne2e", is_spare=True),),
        in_comparison=True, is_compared=True, may_fall=0.05,
    ),
    Metric(
        id="bandwidth_share",
        formula="weight bytes per step * sum(S) / the device's bytes per second / sum(decode_s), of plain answers "
        "decoded one at a time; above 1 if a cache holds the weights, or if steps read faster than a plain sum",
        unit="share", top=("weights_s",), bottom=("reading_s",), is_timing=True,
        shown=(Shown("results", 6, "bandwidth\nshare", is_spare=True, is_optional=True),),
    ),
    Metric(
        id="draft_ms", formula="mean milliseconds per round that the draft takes",
        top=("draft_s",), bottom=("draft_rounds",), **_TIME, shown=(Shown("rounds", 1, "draft\nms"),),
    ),
    Metric(
        id="verify_ms", formula="mean milliseconds per round that the target takes to verify",
        top=("verify_s",), bottom=("verify_rounds",), **_TIME, shown=(Shown("rounds", 2, "verify\nms"),),
    ),
    Metric(
        id="other_ms", formula="mean milliseconds per round that neither draft nor target takes",
        top=("other_s",), bottom=("timed_rounds",), **_TIME,
        shown=(Shown("rounds", 3, "overhead\nms", is_spare=True),),
    ),
    Metric(
        id="break_even_al", formula="(t_draft + t_verify) / t_ar per round; below this al.pooled speculation loses",
        unit="tokens/round", top=("model_s", "plain_tokens"), bottom=("timed_rounds", "plain_s"),
        higher_is_better=False, is_timing=True, needs_draft=True, shown=(Shown("rounds", 5, "break_even_al"),),
    ),
    Metric(
        id="draft_prefill_ms", formula="mean milliseconds per answer in which the draft reads the prompt",
        top=("draft_prefill_s",), bottom=("draft_prefills",), **_TIME, needs_draft=True,
    ),
    Metric(
        id="plain_ms", formula="milliseconds per token of plain decoding, over the same answers",
        top=("plain_s",), bottom=("plain_tokens",), **_TIME,
    ),
    Metric(
        id="prompt_tokens", formula="mean tokens of a prompt, the chat template included",
        unit="tokens", top=("prompt_tokens",), bottom=("answers",),
    ),
    *(metric for one in measurements() for metric in one.metrics),
)  # fmt: skip
METRICS = {metric.id: metric for metric in _DECLARED}
FORMULAS = {name: metric.formula for name, metric in METRICS.items()}
FORMULAS["accept_at[k]"] = "P(a >= k), and P(a >= k given a >= k-1), over rounds"
"""For an answer of T tokens, the first from prefill, in S rounds, of which round i drafts d_i tokens, verifies v_i of
them, accepts a_i and emits e_i.

For a tree d_i counts all its nodes, and a_i the nodes on the accepted path.
"""
