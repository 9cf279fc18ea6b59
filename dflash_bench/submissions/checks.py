"""Comparison of a submitted run with what this machine recomputed, one finding per check.

A check is confirmed or refuted if both sides can be compared, otherwise unchecked. Times cannot be recomputed; only
their plausibility is assessed. The functions are pure: `accept` does the measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_bench.analysis import roofline
from dflash_bench.core import methods
from dflash_bench.core.forwards import PEAK_BANDWIDTH
from dflash_bench.core.methods import is_lossy, shown
from dflash_bench.core.types import Answer, Divergence, Generation
from dflash_bench.results import plan as plans
from dflash_bench.results import run_info
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.recheck import CheckedPart
from dflash_bench.results.run_info import ForwardTimes, RunInfo
from dflash_bench.results.table import RunTable
from dflash_bench.tasks.scorers.base import Score

OF_PLAN = ("suites", "max_new_tokens", "settings", "seed", "repeats")
"""Identity fields that decide prompts and decoding, in addition to the plan."""
OF_MODELS = ("target", "revisions", "dtype", "quantize", "stop_ids", "context_length", "methods", "drafts")
"""Identity fields that decide the weights."""
OF_TARGET = ("revisions",)
"""The same for runs on servers, where only the judge's target is loaded."""
WHERE = ("source", "revision")
"""The location of the prompts, which may differ: their hash identifies them."""
MOST_NAMED = 3
OFF = 2.0
"""Tolerated factor between two machines of the same kind: load, cooling, versions."""
CACHED_BYTES = 64 << 20
"""Smaller weights may be read from a processor's cache, which is faster than memory."""


@dataclass(frozen=True, slots=True)
class Redone:
    """A sampled answer and its recomputation."""

    stored: Answer
    again: Generation | None
    """The regenerated answer; None for runs on servers."""
    is_judged: bool
    """Whether the judge read the stored tokens."""
    departure: Divergence | None = None
    """Where the stored tokens depart furthest from the target's own choice."""

    @property
    def has_same_tokens(self) -> bool:
        return self.again is not None and self.again.token_ids == self.stored.generation.token_ids

    @property
    def place(self) -> str:
        turn = f" turn {self.stored.turn}" if self.stored.turn else ""
        return f"{self.stored.suite} {self.stored.prompt_id}{turn} {shown(self.stored.method)}"


def same_plan(
    then: Mapping[str, Any], now: Mapping[str, Any], plan_then: Mapping[str, Any], plan_now: Mapping[str, Any]
) -> CheckedPart:
    """Compare prompts, wording, settings and limits, from the identities and the plans stored in `run.json`."""
    found = [*plans.differences(plan_then, plan_now), *_differences(then, now, OF_PLAN)]
    return _finding("plan", found, 1, "the same prompts, settings and limits here")


def same_models(then: Mapping[str, Any], now: Mapping[str, Any], is_served: bool) -> CheckedPart:
    """Compare the weights named by the identities."""
    found = [*_differences(then, now, OF_TARGET if is_served else OF_MODELS)]
    return _finding("models", found, 1, "the same target here" if is_served else "the same target and drafts here")


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    compared_then, compared_now = ({key: _comparable(one.get(key)) for key in keys} for one in (then, now))
    return run_info.differences(compared_then, compared_now)


def _comparable(value: Any) -> Any:
    """Remove prompt locations and unset fields from a part of an identity."""
    if not isinstance(value, dict):
        return value
    kept = {key: _comparable(one) for key, one in value.items() if key not in WHERE}
    return {key: one for key, one in kept.items() if one is not None}


def tokens(redone: Sequence[Redone]) -> CheckedPart:
    """Compare stored verdicts with the judge's; for sampled decoding, compare tokens with the regenerated answers."""
    wrong, told, silent = [], 0, 0
    for one in redone:
        stored = one.stored
        if one.is_judged:
            claims = stored.audit or ("mismatch" if stored.exactness == "mismatch" else "exact")
            now = one.departure.verdict if one.departure is not None else "exact"
            told += 1
            if (claims == "mismatch") != (now == "mismatch"):
                wrong.append(
                    f"{one.place}: stored as {claims}, and the judge finds {now} ({one.departure or 'no gap'})"
                )
        elif one.has_same_tokens:
            told += 1
        else:
            silent += 1
    what = f"{told} of {len(redone)} sampled answers match their stored verdicts"
    if silent:
        what += f"; {silent} that the judge cannot check came out differently here"
    return _finding("tokens", wrong, told, what)


def counts(redone: Sequence[Redone], is_same_kind: bool) -> CheckedPart:
    """Compare the rounds of sampled answers with those of the regenerated answers.

    On the same kind of machine, rounds must be equal. On another kind, rounding can change a draft token: if at most
    half of the answers differ, the result is doubtful rather than refuted.
    """
    here = [one for one in redone if one.has_same_tokens and one.stored.generation.accepted is not None]
    compared = [one for one in here if not is_by_chance(one.stored.method)]
    other = [one for one in compared if rounds_of(one.stored.generation) != rounds_of(one.again)]
    what = f"{len(compared) - len(other)} of {len(compared)} sampled answers have the same rounds here"
    if len(redone) > len(compared):
        what += f"; {len(redone) - len(compared)} cannot be drafted again"
    if other and not is_same_kind and 2 * len(other) <= len(compared):
        return CheckedPart(check="counts", state="doubtful", what=f"{what}; tokens per round {_lengths(compared)}")
    wrong = [f"{one.place}: {_lengths([one])}" for one in other]
    return _finding("counts", wrong, len(compared), what)


def is_by_chance(label: str) -> bool:
    """Return whether a method's rounds depend on measured costs or on earlier answers."""
    method = methods.parse(label)
    values = [method.option(option.name) for option in method.kind.options]
    return "auto" in values or (method.name == "suffix" and method.option("earlier") == "yes")


def rounds_of(generation: Generation | None) -> tuple[Any, ...]:
    """Return the drafted, accepted and emitted tokens of each round."""
    if generation is None:
        return ()
    return generation.drafted, generation.drafted_ids, generation.accepted, generation.emitted


def _lengths(several: Sequence[Redone]) -> str:
    stored = _per_round([one.stored.generation for one in several])
    return f"{stored:.2f} stored, {_per_round([one.again for one in several if one.again is not None]):.2f} here"


def _per_round(generations: Sequence[Generation]) -> float:
    accepted = [count for one in generations for count in one.accepted or ()]
    return 1 + sum(accepted) / max(len(accepted), 1)


def scores(pairs: Sequence[tuple[Answer, Score | None]]) -> CheckedPart:
    """Compare all stored scores with recomputed ones; None marks an answer that cannot be scored here."""
    told = [(answer, score) for answer, score in pairs if score is not None]
    wrong = [
        f"{answer.suite} {answer.prompt_id} {shown(answer.method)}: {_score(answer)} stored, {_score(score)} here"
        for answer, score in told
        if (answer.passed, answer.score) != (score.passed, score.value)
    ]
    what = f"{len(told)} answers scored again"
    if len(pairs) > len(told):
        what += f"; {len(pairs) - len(told)} cannot be scored here"
    return _finding("scores", wrong, len(told), what)


def _score(one: Answer | Score) -> str:
    value = one.score if isinstance(one, Answer) else one.value
    return str(one.passed if one.passed is not None else value)


def texts(num_wrong: int, num_answers: int) -> CheckedPart:
    """Report texts that differ from their decoded tokens."""
    wrong = [f"{num_wrong} of {num_answers} texts differ from their decoded tokens"] if num_wrong else []
    return _finding("texts", wrong, num_answers, f"{num_answers} texts match their tokens")


def times(table: RunTable, kind: str, here: ForwardTimes | None, here_kind: str) -> CheckedPart:
    """Assess the plausibility of a run's times.

    They are doubtful if forward passes exceed the memory bandwidth, if they differ from this machine's by more than
    `OFF` although it is of the same kind, or if plain decoding is slower than its own forward passes.
    """
    info = table.info
    measured = info.forwards
    if measured is None or measured.least_s is None:
        return CheckedPart(
            check="times", state="unchecked", what="the run measured no forward passes, so its times cannot be assessed"
        )
    rate = measured.size.weight_bytes / measured.least_s
    said = [f"not recomputed; its passes read {rate / 1e9:,.1f} GB/s of weights"]
    doubts = [*_beyond(measured, rate, info), *_slow_plain(table)]
    if here is not None and here.least_s is not None and kind == here_kind:
        ratio = here.least_s / measured.least_s
        beside = f"{ratio:.2f} times as fast as here, on the same kind of machine"
        (doubts if ratio > OFF or ratio < 1 / OFF else said).append(beside)
    else:
        said.append(f"this machine ({here_kind}) is of another kind, so they cannot be compared")
    return CheckedPart(check="times", state="doubtful" if doubts else "unchecked", what="; ".join([*said, *doubts]))


def _beyond(measured: ForwardTimes, rate: float, info: RunInfo) -> list[str]:
    """Return the bandwidth limits that the forward passes exceed: measured by the run, or published for the GPU."""
    if measured.size.weight_bytes < CACHED_BYTES:
        return []
    found = []
    own = max(measured.bandwidth, measured.read_bandwidth or 0.0)
    if rate > OFF * own:
        found.append(f"more than the {own / 1e9:,.1f} GB/s that the run itself measured")
    names = [gpu.name for gpu in info.environment.gpus] if (info.identity.device or "").startswith("cuda") else []
    peaks = [peak for name, peak in PEAK_BANDWIDTH.items() if any(name in one for one in names)]
    if peaks and rate > sum(peaks) * max(1, len(names)):
        found.append(f"more than the {max(peaks) / 1e9:,.0f} GB/s of {names[0]}")
    return found


def _slow_plain(table: RunTable) -> list[str]:
    """Report plain decoding that is slower than its forward passes, which inflates every speed-up."""
    rows = table.rows
    plain = rows[(rows["method"] == BASELINE) & rows["error"].isna()]
    pace = roofline.pace_of(table.info, plain) if len(plain) else None
    if pace is None or not pace.exceeds(roofline.SLOW_PLAIN):
        return []
    return [f"a round of plain decoding takes {pace.ratio:.1f} times its forward pass, which flatters speed-ups"]


def has_judge(answer: Answer) -> bool:
    """Return whether the judge can check this answer: greedy, lossless, and with visible tokens."""
    return answer.settings.greedy and not is_lossy(answer.method) and not answer.generation.hides_tokens


def _finding(check: str, wrong: Sequence[str], num_told: int, what: str) -> CheckedPart:
    if wrong:
        return CheckedPart(check=check, state="refuted", what=_listed(wrong))
    return CheckedPart(check=check, state="confirmed" if num_told else "unchecked", what=what)


def _listed(found: Sequence[str]) -> str:
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more
