"""Times the parts of a round for `profile`: passes, drafts and the loop itself, on tokens without meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.forwards import (
    AttentionCost,
    DraftPass,
    DraftTiming,
    ForwardTiming,
    HostOverhead,
    ProfileData,
    Size,
)
from dflash_bench.core.methods import Method
from dflash_bench.engine.capturing import capture_passes
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters import ddtree, dflash, eagle3, mtp, p_eagle
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import Limits, clock_for
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.selection import compile_like
from dflash_bench.engine.target import Target
from dflash_bench.models import memory
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.mtp import MTPDraft
from dflash_bench.models.nets.p_eagle import PEagleDraft
from dflash_bench.perf.measure import measure_rates, medians_s, prepare, some_tokens, time_forwards

BUILDERS: Mapping[str, Callable[[Models, Target, Method], Any]] = {
    "dflash": dflash.build,
    "ddtree": ddtree.build,
    "eagle3": eagle3.build,
    "p-eagle": p_eagle.build,
    "mtp": mtp.build,
}
"""The methods whose drafts can be timed without a text."""
KEPT = 4
"""Tokens that a draft reads of the previous round, unless it can keep fewer."""
PROMPT = 8
ROUNDS, ROUNDS_S = 12, 0.5
"""Maximum number of timed rounds, and the seconds after which no further round begins."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload to measure: every batch size at every context, in passes of these widths and in whole rounds."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]


def check(methods: Sequence[Method]) -> None:
    """Raise UserError for a method that needs a text to draft from, or that chooses its draft length by itself."""
    for method in methods:
        if method.name not in BUILDERS:
            raise unknown("method to profile", method.name, list(BUILDERS))
        if paced := [name for name, value in method.options.items() if value == "auto"]:
            raise UserError(f"--method {method.label}: a profile needs one width; leave out {paced[0]}=auto")
        if method.options.get("rule", "match") != "match":
            raise UserError(f"--method {method.label}: a profile draws no tokens; leave out rule=")


def num_drafts(method: Method, draft: Any) -> int:
    """Return how many tokens a round drafts; the draft may be on the `meta` device."""
    if method.name == "dflash":
        return int(draft.config.num_drafts(dflash.block_size(draft, method)))
    if method.name == "ddtree":
        return method.number("nodes")
    if method.name == "p-eagle":
        return int(draft.config.num_drafts(method.option("n")))
    return method.number("n")


def measure(
    models: Models,
    target: Target,
    methods: Sequence[Method],
    workload: Workload,
    is_cut: bool,
    tell: Callable[[str], None],
    capture: str | None = None,
) -> tuple[ProfileData, str]:
    """Return timings, and the mode of capture. If the target `is_cut` to fewer layers, its head is timed, too."""
    tell("measuring the device")
    rates = measure_rates(target.device, target.model.dtype)
    forwards: list[ForwardTiming] = []
    drafts: list[DraftTiming] = []
    hosts: list[HostOverhead] = []
    drafters = [(method, BUILDERS[method.name](models, target, method)) for method in methods]
    compile_like(target, [drafter for _, drafter in drafters])
    captured = capture_passes(target, [drafter for _, drafter in drafters], capture)
    widths = sorted({1, *workload.widths, *(drafter.num_drafts + 1 for _, drafter in drafters)})
    places = [(rows, context) for rows in workload.batches for context in workload.contexts]
    for rows, context in places:
        tell(f"measuring passes: batch {rows}, context {context}")
        forwards += time_forwards(target, rows, context, widths, with_head=is_cut)
    for method, drafter in drafters:
        for rows, context in places:
            tell(f"measuring drafts: {method.label}, batch {rows}, context {context}")
            drafts += [
                _time_draft(models, target, method, timed, rows, context)
                for timed in (*_single_token_drafters(models, target, method, drafter), drafter)
            ]
    for rows in workload.batches:
        tell(f"measuring rounds: batch {rows}")
        hosts.append(HostOverhead("ar", rows, _outside_calls_s(target, NoDrafter(), rows)))
        hosts += [
            HostOverhead(method.label, rows, _outside_calls_s(target, drafter, rows)) for method, drafter in drafters
        ]
    return ProfileData(rates, memory.size_of(target.model), tuple(forwards), tuple(drafts), tuple(hosts)), captured


def _single_token_drafters(models: Models, target: Target, method: Method, drafter: Any) -> list[Any]:
    """Return the method's drafter for a single token, if shorter drafts are cheaper.

    For DFlash and its trees they are not: a block is drafted whole, even if only part of it is verified, as with
    `block=auto`.
    """
    if method.draft is None or method.draft.startswith("dflash") or drafter.num_drafts == 1:
        return []
    return [BUILDERS[method.name](models, target, replace(method, options={**method.options, "n": 1}))]


@torch.inference_mode()
def _time_draft(models: Models, target: Target, method: Method, drafter: Any, rows: int, context: int) -> DraftTiming:
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

    if drafter.graph_cache is not None:
        draft()
        drafter.capture(context + 1, capacity)
    (seconds,) = medians_s([draft], target.device)
    # For a tree, the slots of the block that it is made of.
    predicted = getattr(drafter, "num_predicted", drafter.num_drafts)
    passes = draft_passes(drafter.draft, target.model, predicted, kept)
    return DraftTiming(method.label, drafter.num_drafts, rows, context, seconds, passes)


class _Watched:
    """Wraps a target or a drafter, and records the times of calls of the methods `names`."""

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
    """Return the loop's median seconds per round spent neither in the target nor in the draft."""
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
    # The first round is a warm-up, if there are others.
    return median(outside[1:] or outside or [0.0])


# The bytes and operations of each pass of a draft.


def draft_passes(draft: Any, target: Any, num_drafts: int, kept: int) -> tuple[DraftPass, ...]:
    """Return the passes of drafting `num_drafts` tokens, and of reading `kept` tokens of the previous round.

    `draft` is a DFlash draft in one step, a P-EAGLE draft, MTP heads, or an EAGLE-3 draft that drafts a chain.
    """
    if isinstance(draft, DFlashDraft):
        return _dflash_passes(draft, target, num_drafts, kept)
    if isinstance(draft, MTPDraft):
        return _mtp_passes(draft, target, num_drafts, kept)
    assert isinstance(draft, Eagle3Draft)
    if isinstance(draft, PEagleDraft):
        return _p_eagle_passes(draft, num_drafts, kept)
    layer = _part_size([draft.midlayer, draft.norm], draft, 1)
    head, fusing = _part_size([draft.lm_head], draft), _part_size([draft.fc], draft)
    passes = [DraftPass(layer, kept), DraftPass(fusing, kept), DraftPass(head, 1, num_drafts)]
    return (*passes, *([DraftPass(layer, 1, num_drafts - 1)] if num_drafts > 1 else []))


def _dflash_passes(draft: DFlashDraft, target: Any, num_drafts: int, kept: int) -> tuple[DraftPass, ...]:
    head = draft.lm_head if draft.config.own_head else target.get_output_embeddings()
    layers: Any = draft.layers
    own = "_target" if draft.config.body.own_context_weights else ""
    projections = [getattr(layer.self_attn, f"{name}_proj{own}") for layer in layers for name in "kv"]
    taking_in = [*([draft.fc] if hasattr(draft, "fc") else []), *projections]
    return (
        DraftPass(
            _part_size([*layers, draft.norm], draft, draft.config.num_layers), draft.config.block_for(num_drafts)
        ),
        DraftPass(_part_size([head], draft), num_drafts),
        DraftPass(_part_size(taking_in, draft), kept),
        *_correcting_passes(draft, num_drafts),
    )


def _correcting_passes(draft: DFlashDraft, num_drafts: int) -> tuple[DraftPass, ...]:
    """Return the passes of the head that corrects a block, if it has one."""
    correction = draft.config.correction
    if correction is None:
        return ()
    with torch.device("meta"):
        names = list(correction.modules(draft.config.head_sizes))
    weights = [
        weight
        for name in names
        for own, weight in draft.get_submodule(name).named_parameters()
        if own not in correction.lookups
    ]
    width, times = correction.passes(num_drafts)
    itemsize = draft.norm.weight.element_size()
    size = Size(memory.bytes_of(weights), memory.matrix_elements(weights), itemsize=itemsize)
    return (DraftPass(size, width, times),)


def _p_eagle_passes(draft: PEagleDraft, num_drafts: int, kept: int) -> tuple[DraftPass, ...]:
    layers = [draft.midlayer, *draft.further_layers, draft.norm]
    return (
        DraftPass(_part_size(layers, draft, draft.config.num_layers), kept + num_drafts - 1),
        DraftPass(_part_size([draft.fc], draft), kept),
        DraftPass(_part_size([draft.lm_head], draft), num_drafts),
    )


def _mtp_passes(draft: MTPDraft, target: Any, num_drafts: int, kept: int) -> tuple[DraftPass, ...]:
    step = _part_size([draft.fc, draft.layers, draft.norm], draft, 1)
    if draft.has_experts:
        experts = [weight for name, weight in draft.layer.named_parameters() if "experts" in name.split(".")]
        num_experts, per_token = memory.experts_of(draft.config.text)
        stored = memory.bytes_of(experts)
        step = replace(
            step,
            weight_bytes=step.weight_bytes - stored,
            num_experts=num_experts,
            experts_per_token=per_token,
            expert_bytes=stored // num_experts,
            expert_elements=sum(weight.numel() for weight in experts) // num_experts,
        )
    head = _part_size([target.get_output_embeddings()], draft)
    if draft.further:
        return DraftPass(step, kept + num_drafts - 1, num_drafts), DraftPass(head, 1, num_drafts)
    passes = (DraftPass(step, kept), DraftPass(head, 1, num_drafts))
    return (*passes, DraftPass(step, 1, num_drafts - 1)) if num_drafts > 1 else passes


def _part_size(modules: Iterable[nn.Module], draft: Any, num_layers: int = 0) -> Size:
    """Return the size of these modules of a draft, with `num_layers` layers of attention."""
    itemsize = draft.norm.weight.element_size()
    weights = [weight for module in modules for weight in module.parameters()]
    attention: tuple[AttentionCost, ...] = ()
    if isinstance(draft, MTPDraft):
        attention = memory.target_attention(draft.config.text, itemsize) if num_layers else ()
    elif num_layers:
        attention = (memory.draft_attention(draft.config, num_layers, itemsize),)
    return Size(memory.bytes_of(weights), memory.matrix_elements(weights), attention=attention, itemsize=itemsize)
