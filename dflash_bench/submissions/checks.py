"""Comparison of a submitted run with what this machine recomputed, one finding per check.

A check is confirmed or refuted if both sides can be compared, otherwise unchecked. Times cannot be recomputed; only
their plausibility is assessed. The functions are pure: `accept` does the measuring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from dflash_bench.analysis import roofline
from dflash_bench.core import environment, methods
from dflash_bench.core.forwards import PEAK_BANDWIDTH
from dflash_bench.core.methods import is_lossy, shown
from dflash_bench.core.types import Answer, Divergence, Exactness, Generation
from dflash_bench.results import plan as plans
from dflash_bench.results import run_info
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.recheck import CheckedPart, State
from dflash_bench.results.run_info import ForwardTimes, RunIdentity, RunInfo
from dflash_bench.results.table import RunTable
from dflash_bench.tasks.scorers.base import Score

OF_PLAN = ("suites", "max_new_tokens", "settings", "seed", "repeats", "order")
"""Identity fields that decide prompts and decoding, in addition to the plan."""
OF_MODELS = (
    "model",
    "engine",
    "target",
    "revisions",
    "dtype",
    "quantize",
    "stop_ids",
    "context_length",
    "methods",
    "drafts",
)
"""Identity fields that decide the weights."""
OF_TARGET = ("model", "revisions")
"""The same for runs on servers, where only the judge's target is loaded."""
WHERE = ("source", "revision")
"""The location of the prompts, which may differ: their hash identifies them."""
OF_ROUNDING = ("device", "network", "attention", "threads", "tensor_parallel", "capture")
"""Identity fields that decide in which order sums are rounded, and how long a pass takes."""
PACKAGES = ("torch", "transformers")
MOST_NAMED = 3
OFF = 2.0
"""Tolerated factor between two machines of the same kind: load, cooling, versions."""
OFF_PLAIN = 1.5
"""The same for a method's time as a ratio to plain decoding's, which load and cooling change less. How much the two
vary between honest runs: results/exactness/forgeries.md."""
LEAST_TIMED = 3
"""The least answers of a method from which its time is compared."""
OFF_LENGTH = 0.05
"""How much rounding can change a method's tokens per round: more than from float32 to bfloat16, which round further
apart than two machines do (results/exactness/forgeries.md)."""
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
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Columns of measurements, made again from the stored answer."""

    @property
    def has_same_tokens(self) -> bool:
        return self.again is not None and self.again.token_ids == self.stored.generation.token_ids

    @property
    def has_same_prompt(self) -> bool:
        now = self.stored.generation.num_prompt_tokens if self.again is None else self.again.num_prompt_tokens
        return self.stored.generation.num_prompt_tokens == now

    @property
    def claim(self) -> Exactness:
        """The stored verdict on its tokens; without an audit, that of the comparison with the plain answer."""
        return self.stored.audit or ("mismatch" if self.stored.exactness == "mismatch" else "exact")

    @property
    def place(self) -> str:
        turn = f" turn {self.stored.turn}" if self.stored.turn else ""
        return f"{self.stored.suite} {self.stored.prompt_id}{turn} {shown(self.stored.method)}"


def same_plan(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    plan_then: Mapping[str, Any],
    plan_now: Mapping[str, Any],
    other_categories: Sequence[str] = (),
) -> CheckedPart:
    """Compare prompts, wording, settings and limits, from the identities and the plans stored in `run.json`.

    `other_categories` are ids of prompts whose answers are stored under another category.
    """
    found = [*plans.differences(plan_then, plan_now, is_ordered=True), *_differences(then, now, OF_PLAN)]
    if other_categories:
        found.append(f"{len(other_categories)} prompts have other categories, such as {min(other_categories)}")
    return _finding("plan", found, 1, "the same prompts, settings and limits here")


def same_models(
    then: Mapping[str, Any], now: Mapping[str, Any], is_served: bool, own_parts: Collection[str] = ()
) -> CheckedPart:
    """Compare the weights named by the identities.

    A part in `own_parts` is the user's copy, with another name. A hub id with its commit and the hash of a folder's
    weights cannot be compared.
    """
    if is_served and then.get("engine") != "server":
        return _finding("models", ["servers are named, but another engine"], 1, "")
    keys, then, now = OF_TARGET if is_served else OF_MODELS, _unnamed(then, own_parts), _unnamed(now, own_parts)
    weights, weights_now = (dict(one.get("revisions") or {}) for one in (then, now))
    other = [part for part in own_parts if _is_commit(weights.get(part)) != _is_commit(weights_now.get(part))]
    known, known_now = ({part: one[part] for part in one if part not in other} for one in (weights, weights_now))
    found = [*_differences({**then, "revisions": known}, {**now, "revisions": known_now}, keys)]
    if other and not found:
        said = [f"{part} was {weights.get(part)} and is {weights_now.get(part)} here" for part in sorted(other)]
        return CheckedPart(check="models", state="unchecked", what=f"{'; '.join(said)}, which cannot be compared")
    named = sorted({revision for revision in weights.values() if _is_commit(revision)})
    what = "the same target here" if is_served else "the same target and drafts here"
    return _finding("models", found, 1, f"{what}{': ' * bool(named)}{', '.join(named)}")


def _is_commit(revision: str | None) -> bool:
    return "@" in (revision or "")


def _unnamed(identity: Mapping[str, Any], own_parts: Collection[str]) -> dict[str, Any]:
    """Return the identity without the names of these parts."""
    drafts = {
        part: {**draft, "name": None} if part in own_parts else draft
        for part, draft in (identity.get("drafts") or {}).items()
    }
    return {**identity, "drafts": drafts, **({"target": None, "model": None} if "target" in own_parts else {})}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    compared_then, compared_now = ({key: _comparable(one.get(key)) for key in keys} for one in (then, now))
    return run_info.differences(compared_then, compared_now)


def _comparable(value: Any) -> Any:
    """Remove prompt locations and unset fields from a part of an identity."""
    if not isinstance(value, dict):
        return value
    kept = {key: _comparable(one) for key, one in value.items() if key not in WHERE}
    return {key: one for key, one in kept.items() if one is not None}


# Whether this machine computes as those of the run, so that rounding and times must be the same.


def kinds(info: RunInfo) -> list[str]:
    """Return the kinds of all machines that measured a run: of its processes, first its own, and of its workers."""
    own = [environment.kind(one.to_json()) for one in info.environments]
    return list(dict.fromkeys([*own, *(info.identity.workers.kinds if info.identity.workers else [])]))


def unlike(info: RunInfo, identity: RunIdentity, here: Mapping[str, Any]) -> list[str]:
    """Return how this machine, with the environment `here` and the run planned again, computes otherwise; [] if not."""
    return [*_other_machines(info, here), *_other_ways(info.identity, identity)]


def _other_machines(info: RunInfo, here: Mapping[str, Any]) -> Iterator[str]:
    own = environment.kind(dict(here))
    if other := [kind for kind in kinds(info) if kind != own]:
        yield f"this machine ({own}) is of another kind than {', '.join(other)}"
    for name in PACKAGES:
        versions = {one.packages.get(name) for one in info.environments}
        if versions != {here["packages"].get(name)}:
            yield f"{name} is {here['packages'].get(name)} here, not {', '.join(sorted(map(str, versions)))}"


def _other_ways(then: RunIdentity, now: RunIdentity) -> Iterator[str]:
    for name in OF_ROUNDING:
        was, is_now = getattr(then, name), getattr(now, name)
        if name == "device":
            was, is_now = ((one or "").partition(":")[0] for one in (was, is_now))
        if was != is_now:
            yield f"{name.replace('_', ' ')} is {is_now} here, not {was}"


# The answers.


def failures(num_failed: int, num_answers: int) -> CheckedPart:
    """Report failed answers, which nothing says anything about: a wrong answer could be passed off as one."""
    state: State = "doubtful" if num_failed else "confirmed"
    return CheckedPart(check="failures", state=state, what=f"{num_failed} of {num_answers} answers failed")


def tokens(redone: Sequence[Redone], is_alike: bool) -> CheckedPart:
    """Compare stored verdicts with the judge's; for sampled decoding, compare tokens with the regenerated answers.

    So are answers stored as mismatches, of which the judge only tells that they are wrong. `is_alike`: whether this
    machine rounds as the run's, so that the same tokens come out again.
    """
    judged = [one for one in redone if one.is_judged]
    wrong = [problem for one in judged if (problem := _misjudged(one))]
    mismatches = [one for one in judged if one.claim == "mismatch"]
    drawn = [one for one in redone if one.again is not None and (not one.is_judged or one.claim == "mismatch")]
    other = [one for one in drawn if not one.has_same_tokens]
    wrong += [f"{one.place}: another number of prompt tokens" for one in redone if not one.has_same_prompt]
    what = f"{len(judged)} of {len(redone)} sampled answers match their stored verdicts"
    if mismatches:
        what += f"; {len(mismatches)} are stored as mismatches"
    if drawn:
        what += f"; {len(drawn) - len(other)} of {len(drawn)} that the judge cannot tell came out the same here"
    if silent := len([one for one in redone if not one.is_judged and one.again is None]):
        what += f"; {silent} cannot be checked here"
    for own in _by_cell(one for one in drawn if is_alike and not one.stored.settings.is_shared).values():
        if 2 * sum(not one.has_same_tokens for one in own) > len(own):
            wrong += [f"{one.place}: other tokens than here" for one in own if not one.has_same_tokens]
    if (other or mismatches) and not wrong:
        return CheckedPart(check="tokens", state="doubtful", what=what)
    return _finding("tokens", wrong, 0 if silent else len(redone), what)


def _misjudged(one: Redone) -> str:
    """Return how the stored verdict contradicts the judge's; empty if it does not."""
    now = one.departure.verdict if one.departure is not None else "exact"
    if (one.claim == "mismatch") == (now == "mismatch"):
        return ""
    return f"{one.place}: stored as {one.claim}, and the judge finds {now} ({one.departure or 'no gap'})"


def counts(redone: Sequence[Redone], cells: Collection[MethodCell], is_alike: bool) -> CheckedPart:
    """Compare the rounds of sampled answers with those of the regenerated answers.

    On a machine that rounds alike, they must be equal. Elsewhere, and for answers decoded concurrently, rounding can
    change a draft token: if the tokens per round are the same within `OFF_LENGTH`, the result is doubtful. It is
    unchecked if one of the run's `cells` has no answer that could be compared.
    """
    drafting = [one for one in redone if one.stored.method != BASELINE]
    compared = [one for one in drafting if one.has_same_tokens and not is_by_chance(one.stored.method)]
    other = [one for one in compared if rounds_of(one.stored.generation) != rounds_of(one.again)]
    lacking = {method for method, settings in {*cells} - _by_cell(compared).keys() if method != BASELINE}
    what = f"{len(compared) - len(other)} of {len(compared)} sampled answers have the same rounds here"
    if len(drafting) > len(compared):
        what += f"; {len(drafting) - len(compared)} cannot be drafted again"
    if lacking:
        what += f"; not all settings of {_labels(lacking)} could be compared"
    if lacking & {method for method, _ in {*cells} - _by_cell(redone).keys()}:
        what += ", as some were not drawn: a larger --share draws more"
    certain = [one for one in other if is_alike and not one.stored.settings.is_shared]
    wrong = [f"{one.place}: {_lengths([one])}" for one in certain]
    for (label, _), own in _by_cell(compared).items():
        stored, here = per_round(one.stored.generation for one in own), per_round(one.again for one in own)
        if abs(stored / here - 1) > OFF_LENGTH:
            wrong.append(f"{shown(label)}: {_lengths(own)}")
    if other and not wrong:
        return CheckedPart(check="counts", state="doubtful", what=f"{what}; tokens per round {_lengths(compared)}")
    return _finding("counts", wrong, 0 if lacking else len(compared), what)


def measurements(redone: Sequence[Redone], columns: Collection[str], is_alike: bool) -> CheckedPart:
    """Compare what measurements derive from answers, and name the `columns` of rows that cannot be made again."""
    made = {name for one in redone for name in one.measured}
    wrong = [
        f"{one.place}: {name}"
        for one in redone
        for name in made & {*columns}
        if [*one.stored.measured.get(name, ())] != [*one.measured.get(name, ())]
    ]
    left_out = sorted({*columns} - made)
    what = f"{', '.join(sorted(made)) or 'none'} made again" + f"; not {', '.join(left_out)}" * bool(left_out)
    if wrong and not is_alike:
        return CheckedPart(check="measurements", state="doubtful", what=f"{what}; {_listed(wrong)}")
    return _finding("measurements", wrong, not left_out, what)


def _labels(several: Iterable[str]) -> str:
    return ", ".join(sorted(map(shown, several)))


MethodCell = tuple[str, str]
"""A method's label and the id of settings."""


def cell_of(answer: Answer) -> MethodCell:
    return answer.method, answer.settings.id


def _by_cell(redone: Iterable[Redone]) -> dict[MethodCell, list[Redone]]:
    found = defaultdict(list)
    for one in redone:
        found[cell_of(one.stored)].append(one)
    return found


def is_by_chance(label: str) -> bool:
    """Return whether a method's rounds depend on measured costs or on earlier answers."""
    method = methods.parse(label)
    values = [method.option(option.name) for option in method.kind.options]
    return "auto" in values or (method.name == "suffix" and method.option("earlier") == "yes")


def rounds_of(generation: Generation | None) -> tuple[Any, ...]:
    """Return the drafted, verified, accepted and emitted tokens of each round."""
    if generation is None:
        return ()
    own = generation
    return own.drafted, own.drafted_ids, own.drafted_parents, own.verified, own.accepted, own.emitted


def _lengths(several: Sequence[Redone]) -> str:
    stored = per_round([one.stored.generation for one in several])
    return f"{stored:.2f} stored, {per_round([one.again for one in several]):.2f} here"


def per_round(generations: Iterable[Generation | None]) -> float:
    """Return the mean tokens of all rounds."""
    accepted = [count for one in generations if one is not None for count in one.accepted or ()]
    return 1 + sum(accepted) / max(len(accepted), 1)


def scores(pairs: Sequence[tuple[Answer, Score | None]], of_code: Collection[str] = ()) -> CheckedPart:
    """Compare all stored scores with recomputed ones; None marks an answer that cannot be scored here.

    In suites `of_code`, what the answer is taken for names errors and time limits, which may differ.
    """
    told = [(answer, score) for answer, score in pairs if score is not None]
    wrong = [
        f"{answer.suite} {answer.prompt_id} {shown(answer.method)}: {_score(answer)} stored, {_score(score)} here"
        for answer, score in told
        if (answer.passed, answer.score) != (score.passed, score.value)
        or (answer.answer != score.answer and answer.suite not in of_code)
    ]
    what = f"{len(told)} answers scored again"
    if len(pairs) > len(told):
        what += f"; {len(pairs) - len(told)} cannot be scored here"
    return _finding("scores", wrong, len(pairs) == len(told) > 0, what)


def _score(one: Answer | Score) -> str:
    value = one.score if isinstance(one, Answer) else one.value
    return f"{one.passed if one.passed is not None else value} ({one.answer!r:.40})"


def texts(num_wrong: int, num_decoded: int, num_hidden: int, num_split: int = 0) -> CheckedPart:
    """Report texts that differ from their decoded tokens, and texts whose tokens are hidden.

    `num_split` answers have another part of thinking than their tokens.
    """
    wrong = [f"{num_wrong} of {num_decoded} texts differ from their decoded tokens"] if num_wrong else []
    wrong += [f"the thinking of {num_split} answers is not that of their tokens"] if num_split else []
    what = f"{num_decoded} texts match their tokens" + f"; the tokens of {num_hidden} are hidden" * (num_hidden > 0)
    return _finding("texts", wrong, 0 if num_hidden else num_decoded, what)


def times(
    table: RunTable,
    here: ForwardTimes | None,
    unlike: Sequence[str],
    redone: Sequence[Redone] = (),
    cells: Collection[MethodCell] = (),
) -> CheckedPart:
    """Assess the plausibility of a run's times.

    They are doubtful if forward passes exceed the memory bandwidth, or if plain decoding is slower than its own forward
    passes. On a machine that is not `unlike` the run's, also if passes differ by more than `OFF` from those here, or
    times of a method from those of the regenerated answers, both as ratios to plain decoding.
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
    if unlike:
        said.append(f"{'; '.join(unlike)}, so they cannot be compared")
    elif here is not None and here.least_s is not None:
        ratio = here.least_s / measured.least_s
        beside = f"{ratio:.2f} times as fast as here, on the same kind of machine"
        (doubts if ratio > OFF or ratio < 1 / OFF else said).append(beside)
        doubts += _other_than_plain(redone)
        left_out = {*cells} - beside_plain(redone).keys()
        if labels := {method for method, _ in left_out if method != BASELINE}:
            said.append(f"too few answers of {_labels(labels)} to compare, decoded alone and in the same rounds")
    return CheckedPart(check="times", state="doubtful" if doubts else "unchecked", what="; ".join([*said, *doubts]))


def _other_than_plain(redone: Sequence[Redone]) -> Iterator[str]:
    """Yield methods whose stored times, beside plain decoding's, are not those of the regenerated answers."""
    for what, (seconds, most) in BESIDE_PLAIN.items():
        for (label, _), ratio in beside_plain(redone, seconds).items():
            if not 1 / most <= ratio <= most:
                yield f"{shown(label)}'s {what} took {ratio:.2f} times as long as here, compared with plain decoding's"


Seconds = Callable[[Generation], float]


def _decode_s(answer: Generation) -> float:
    return answer.decode_s


def _prefill_s(answer: Generation) -> float:
    return answer.prefill_s


BESIDE_PLAIN: Mapping[str, tuple[Seconds, float]] = {"decoding": (_decode_s, OFF_PLAIN), "prefill": (_prefill_s, OFF)}
"""The times compared as ratios to plain decoding's, with the most that the ratios may differ."""


def beside_plain(redone: Sequence[Redone], seconds: Seconds = _decode_s) -> dict[MethodCell, float]:
    """Return the stored time of each method under each settings as a ratio to the time here, both as ratios to plain
    decoding's; without those of fewer than `LEAST_TIMED` answers."""
    timed = _by_cell(filter(_is_timed, redone)).items()
    ratios = {cell: _ratio(own, seconds) for cell, own in timed if len(own) >= LEAST_TIMED}
    plain = {settings: ratio for (method, settings), ratio in ratios.items() if method == BASELINE}
    return {
        (method, settings): ratio / plain[settings]
        for (method, settings), ratio in ratios.items()
        if method != BASELINE and settings in plain
    }


def _ratio(redone: Sequence[Redone], seconds: Seconds) -> float:
    stored = fsum(seconds(one.stored.generation) for one in redone)
    return stored / fsum(seconds(one.again) for one in redone if one.again is not None)


def _is_timed(one: Redone) -> bool:
    """Return whether an answer's time can be compared: decoded alone, and in the same rounds here."""
    return (
        not one.stored.settings.is_shared
        and one.has_same_tokens
        and one.stored.generation.num_decoded > 0
        and rounds_of(one.stored.generation) == rounds_of(one.again)
    )


def _beyond(measured: ForwardTimes, rate: float, info: RunInfo) -> list[str]:
    """Return the bandwidth limits that the forward passes exceed: measured by the run, or published for the GPU."""
    if measured.size.weight_bytes < CACHED_BYTES:
        return []
    found = []
    own = max(measured.bandwidth, measured.read_bandwidth or 0.0)
    if rate > OFF * own:
        found.append(f"more than the {own / 1e9:,.1f} GB/s that the run itself measured")
    names = [gpu.name for gpu in info.environment.gpus][: _num_gpus(info)]
    peaks = [peak for name, peak in PEAK_BANDWIDTH.items() if any(name in one for one in names)]
    if peaks and rate > sum(peaks) * max(1, len(names)):
        found.append(f"more than the {max(peaks) / 1e9:,.0f} GB/s of {names[0]}")
    return found


def _num_gpus(info: RunInfo) -> int | None:
    """Return how many of the machine's GPUs compute the target; None: all that it is spread over."""
    identity = info.identity
    if not (identity.device or "").startswith("cuda"):
        return 0
    return None if info.options.entry("device_map") is not None else identity.tensor_parallel or 1


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
