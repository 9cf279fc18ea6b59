"""The runs of an item: a request for each published target, or one for a model that stands in for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import PLAIN, parse
from dflash_bench.models import presets, targets
from dflash_bench.models.architecture import context_length
from dflash_bench.reproduction.items import AVERAGE, Arm, Item
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.requests import typed_options
from dflash_bench.tasks.suites import listings


@dataclass(frozen=True, slots=True)
class Part:
    """A run of an item."""

    target: str | None
    """The published name of its target; None for a model that stands in, whose figures are compared with none."""
    request: RunRequest
    methods: tuple[tuple[str, str], ...]
    """The label in the run of each arm's method."""
    left_out: tuple[str, ...] = ()
    """Suites of the item that the model that stands in has no prompts of."""

    @property
    def folder_name(self) -> str:
        return presets.name(self.request.name).rpartition("/")[2]

    def label_of(self, arm_method: str) -> str:
        return dict(self.methods)[arm_method]


def parts(item: Item, asked: RunRequest) -> list[Part]:
    """Return the runs of an item; options of `asked` replace the item's own.

    Without a model, a run of each published target; with a published target's preset, that run; with another model,
    one that stands in for all. Raises UserError if the model that stands in has prompts of none of the suites.
    """
    wanted = {target: preset for target, preset in item.models.items() if asked.model in (None, preset)}
    if wanted:
        return [_published(item, target, preset, asked) for target, preset in wanted.items()]
    return [_stand_in(item, asked)]


def _published(item: Item, target: str, preset: str, asked: RunRequest) -> Part:
    arms = item.arms_of(target)
    published = (one.dataset for one in item.figures if one.target_model == target)
    of_figures = dict.fromkeys(dataset for dataset in published if dataset != AVERAGE)
    suites = list(of_figures) or list(item.run["suite"])
    drafts = {name: reference for arm in arms for name, reference in arm.drafts.items()}
    launch = None if item.engine == "own" else item.engine
    given = {"model": preset, "suites": suites, "drafts": drafts, "launch": launch}
    return Part(target, _request(item, arms, given, asked), tuple((arm.method, _label(arm.method)) for arm in arms))


def _stand_in(item: Item, asked: RunRequest) -> Part:
    """Return the run of another model: its own drafts, and of nano the suites that are embedded."""
    wanted = list(item.run["suite"])
    known = {one.suite.name for one in listings() if one.num_embedded}
    suites = [suite for suite in wanted if suite in known or asked.model != presets.NANO.name]
    if not suites:
        raise UserError(f"{item.name} measures {', '.join(wanted)}, of which no prompts are embedded")
    own = [arm.model_copy(update={"method": _own_method(arm)}) for arm in item.arms]
    labels = tuple((arm.method, _label(_own_method(arm))) for arm in item.arms)
    left_out = tuple(suite for suite in wanted if suite not in suites)
    given = {"model": asked.model, "suites": suites}
    if contexts := item.run.get("context"):
        given["context"] = _fitting(contexts, str(asked.model), asked.max_new_tokens or item.run["max_new_tokens"])
    return Part(None, _request(item, own, given, asked), labels, left_out)


def _fitting(contexts: Sequence[int], model: str, max_new_tokens: int) -> list[int]:
    """Return the contexts that a model holds with its answers."""
    longest = context_length(targets.config_of(targets.find_target(presets.combine(model, None, {}).target)))
    return [context for context in contexts if context + max_new_tokens <= longest]


def _request(item: Item, arms: Sequence[Arm], given: dict[str, Any], asked: RunRequest) -> RunRequest:
    methods = list(dict.fromkeys(arm.method for arm in arms if arm.method != PLAIN))
    of_item = {name: value for name, value in item.run.items() if name != "suite"}
    typed = typed_options(RunRequest, of_item | given | {"methods": methods}, f"option of {item.name}")
    request = replace(RunRequest(**{"suites": (), "methods": ()} | typed), **dict(_given(asked)))
    return _within_limit(item, request)


def _within_limit(item: Item, request: RunRequest) -> RunRequest:
    """Leave out loads of more answers at a time than prompts are measured."""
    most = request.limit
    if most is None or not request.concurrency:
        return request
    loads = tuple(load for load in request.concurrency if load <= most)
    if not loads:
        raise UserError(f"{item.name} measures {min(request.concurrency)} answers at a time; raise --limit to that")
    return replace(request, concurrency=loads)


def _given(asked: RunRequest) -> Iterator[tuple[str, Any]]:
    """Yield the options that the user gave, but for the model."""
    usual = RunRequest()
    for option in fields(RunRequest):
        value = getattr(asked, option.name)
        if value != getattr(usual, option.name) and option.name != "model":
            yield option.name, value


def _own_method(arm: Arm) -> str:
    """Return the method with the model's own draft, eagle3:7 for eagle3@speculators:7, unless its draft is trained."""
    if arm.train:
        return arm.method
    name, _, options = arm.method.partition(":")
    return f"{name.partition('@')[0]}{':' if options else ''}{options}"


def _label(method: str) -> str:
    return parse(method).label
