"""What passes, drafts and the loop itself cost on this device, with no prompt and no answer that means anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from dflash_bench import environment
from dflash_bench.engine.capturing import capture_passes
from dflash_bench.engine.clock import clock_for
from dflash_bench.engine.counting import draft_passes, size_of
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters import dflash, eagle3
from dflash_bench.engine.networks import pack_like
from dflash_bench.engine.passes import ladder, prepare, some_tokens
from dflash_bench.engine.rates import medians_s, rates_of
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target
from dflash_bench.errors import UserError, unknown
from dflash_bench.forwards import Drafting, Forward, Hosting, Measured
from dflash_bench.methods import Method
from dflash_bench.models.loading import Models

BUILDERS: Mapping[str, Callable[[Models, Target, Method], Any]] = {"dflash": dflash.build, "eagle3": eagle3.build}
"""The methods whose drafts can be measured without a text."""
KEPT = 4
"""Tokens of the round before that a draft takes in, or as many as it can keep."""
PROMPT = 8
ROUNDS, ROUNDS_S = 12, 0.5
"""The most rounds that are watched, and after how many seconds no more are begun."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured: every batch at every context, in passes of these widths and those of whole rounds."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]


def check(methods: Sequence[Method]) -> None:
    """Raises UserError for a method that needs a text to draft from, or that decides by itself how much it drafts."""
    for method in methods:
        if method.name not in BUILDERS:
            raise unknown("method to profile", method.name, list(BUILDERS))
        if method.name == "dflash" and method.option("block") == "auto":
            raise UserError(f"--method {method.label}: a profile needs one width; leave block=auto out")
        if method.name == "dflash" and method.option("rule") != "match":
            raise UserError(f"--method {method.label}: a profile draws no tokens; leave rule= out")


def num_drafts(method: Method, draft: Any) -> int:
    """Tokens that a round of it drafts; the draft may be on the `meta` device."""
    if method.name == "dflash":
        return int(draft.config.num_drafts(dflash.block_size(draft, method)))
    return method.number("n")


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device; None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return environment.free_bytes()


def measure(
    models: Models, target: Target, methods: Sequence[Method], workload: Workload, is_cut: bool,
    tell: Callable[[str], None], capture: str | None = None,
) -> tuple[Measured, str]:  # fmt: skip
    """With how passes are captured. `is_cut` says that the target has lost layers: its head is measured apart then."""
    tell("measuring the device")
    rates = rates_of(target.device, target.model.dtype)
    forwards: list[Forward] = []
    drafts: list[Drafting] = []
    hosts: list[Hosting] = []
    drafters = [(method, BUILDERS[method.name](models, target, method)) for method in methods]
    pack_like(target, [drafter for _, drafter in drafters], models.drafts.values())
    captured = capture_passes(target, [drafter for _, drafter in drafters], capture)
    widths = sorted({1, *workload.widths, *(drafter.num_drafts + 1 for _, drafter in drafters)})
    places = [(rows, context) for rows in workload.batches for context in workload.contexts]
    for rows, context in places:
        tell(f"measuring passes: batch {rows}, context {context}")
        forwards += ladder(target, rows, context, widths, with_head=is_cut)
    for method, drafter in drafters:
        for rows, context in places:
            tell(f"measuring drafts: {method.label}, batch {rows}, context {context}")
            drafts += [
                _drafting(models, target, method, one, rows, context)
                for one in (*_of_one(models, target, method, drafter), drafter)
            ]
    for rows in workload.batches:
        tell(f"measuring rounds: batch {rows}")
        hosts.append(Hosting("ar", rows, _outside_calls_s(target, NoDrafter(), rows)))
        hosts += [Hosting(method.label, rows, _outside_calls_s(target, drafter, rows)) for method, drafter in drafters]
    return Measured(rates, size_of(target.model), tuple(forwards), tuple(drafts), tuple(hosts)), captured


def _of_one(models: Models, target: Target, method: Method, drafter: Any) -> list[Any]:
    """The same method drafting a single token, where a shorter draft is a cheaper one.

    A block is drafted whole, and part of it verified, as `block=auto` does.
    """
    if method.name == "dflash" or drafter.num_drafts == 1:
        return []
    return [BUILDERS[method.name](models, target, replace(method, options={**method.options, "n": 1}))]


@torch.inference_mode()
def _drafting(models: Models, target: Target, method: Method, drafter: Any, rows: int, context: int) -> Drafting:
    kept = min(KEPT, drafter.num_drafts + 1)
    target.tap(drafter.taps)
    prepare(target, rows, context + kept)
    tokens = some_tokens(target, rows, kept)
    hidden = target.forward(tokens, [context] * rows).hidden
    target.tap(())
    committed = Committed(hidden, tokens, tokens[:, -1], [context] * rows, [kept] * rows)
    capacity = context + kept + drafter.num_drafts + 1
    drafter.begin(rows, capacity)
    drafter.begin(rows, capacity)

    def draft() -> None:
        drafter.observe(committed)
        drafter.propose()

    if drafter.replays is not None:
        draft()
        drafter.capture(context + 1, capacity)
    (seconds,) = medians_s([draft], target.device)
    passes = draft_passes(drafter.draft, target.model, drafter.num_drafts, kept)
    return Drafting(method.label, drafter.num_drafts, rows, context, seconds, passes)


class _Watched:
    """Passes on to a target or a drafter, and notes when some of its methods were called."""

    def __init__(self, inner: Any, names: Sequence[str], calls: list[tuple[Any, Any]], clock: Any) -> None:
        self.inner, self.names, self.calls, self.clock = inner, names, calls, clock

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if name not in self.names:
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            start = self.clock.mark()
            result = attribute(*args, **options)
            self.calls.append((start, self.clock.mark()))
            return result

        return call


def _outside_calls_s(target: Target, drafter: Any, rows: int) -> float:
    """Median seconds of a round of the loop that are spent neither in the target nor in the draft."""
    clock, calls = clock_for(target.device), list[tuple[Any, Any]]()
    watched: Any = _Watched(target, ("forward", "commit"), calls, clock)
    drafting: Any = _Watched(drafter, ("propose", "observe"), calls, clock)
    prompts = some_tokens(target, rows, PROMPT).tolist()
    limits = Limits((ROUNDS + 2) * (drafter.num_drafts + 1))
    rounds: list[float] = []
    outside: list[float] = []
    for number, step in enumerate(decode(watched, drafting, prompts, limits, Sampling(), clock)):
        if number:  # not prefill
            rounds.append(clock.seconds(step.marks[0], step.marks[4]))
            outside.append(max(0.0, rounds[-1] - sum(clock.seconds(*call) for call in calls)))
        calls.clear()
        if len(rounds) == ROUNDS or sum(rounds) > ROUNDS_S:
            break
    # The first one is to warm up, where there is time for others.
    return median(outside[1:] or outside or [0.0])
