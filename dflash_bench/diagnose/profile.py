"""`profile`: measure the cost of a model's passes, drafts and rounds on this device.

With random weights nothing is downloaded, and the memory is predicted before it is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error
from dflash_bench.core.forwards import ProfileData, Size
from dflash_bench.core.labels import dtype_name
from dflash_bench.core.methods import Method, draft_of
from dflash_bench.core.option import MOST_TOKENS, check_options
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.perf import verdict as judging
from dflash_bench.report.perf import Profiled
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import drafts_of, model_of
from dflash_bench.runner.setup import configure_torch

MOST_LAYERS = 32
"""The most layers of a random draft."""
WIDEST = 64
"""The width in tokens of the pass that memory is predicted for; no block is wider."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """`of_run` holds the options shared with `run`: models, methods, device and dtype."""

    of_run: RunRequest
    random_weights: bool = False
    layers: int | None = None
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (512,)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    acceptance: float | None = None
    """Acceptance length; None: the published value, if any."""
    draft_layers: tuple[int, ...] = ()
    """Numbers of layers of random DFlash drafts to compare; empty: the published draft's alone."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The models to measure, still without weights: `target` and `drafts` are on the `meta` device."""

    config: Any
    target: Any
    drafts: dict[str, Any]
    num_layers: int
    full: Size
    """The size of the target at full depth."""


def profile(request: ProfileRequest, tell: Callable[[str], None]) -> Profiled:
    """Measure. Raises UserError for options without effect, unknown shapes, and too little memory."""
    _check(request)
    of_run = request.of_run
    drafting = [
        one
        for method in methods.chosen(of_run.methods or ["dflash"])
        if method.name != "ar"
        for one in _of_layers(method, request.draft_layers)
    ]
    preset = _preset(request, drafting)
    drafting = [
        method.with_count((preset.num_drafts or {}).get(method.name) if _is_own(request, method) else None)
        for method in drafting
    ]
    tell("reading shapes")
    device, dtype, threads = configure_torch(of_run)
    import torch

    from dflash_bench.engine.capturing import gpu_paths
    from dflash_bench.engine.selection import network_name, target_of
    from dflash_bench.models.architecture import context_length
    from dflash_bench.models.loading import free_bytes
    from dflash_bench.models.memory import size_of
    from dflash_bench.perf import round_parts

    round_parts.check(drafting)
    kind = None if dtype == "auto" else getattr(torch, dtype)
    subject = _subject(request, preset, drafting, kind)
    cut = size_of(subject.target)
    num_drafts = {
        method.label: round_parts.num_drafts(method, subject.drafts[method.draft])
        for method in drafting
        if method.draft is not None
    }
    acceptance = _acceptance(request, preset, num_drafts)
    _check_context(request, context_length(subject.config), max(*request.widths, *(n + 1 for n in num_drafts.values())))
    _check_memory(request, cut, subject.drafts, free_bytes(device), device)
    tell("making random weights" if request.random_weights else "loading the models")
    models = _models(request, preset, drafting, subject, device, kind)
    target = target_of(models.target, of_run.engine, of_run.kernels)
    is_cut = cut.num_layers < subject.num_layers
    workload = round_parts.Workload(request.batches, request.contexts, request.widths)
    measured, captured = round_parts.measure(models, target, drafting, workload, is_cut, tell, of_run.capture)
    about = {
        "model": of_run.name,
        "target": preset.target,
        "methods": [method.label for method in drafting],
        "layers": cut.num_layers,
        "all_layers": subject.num_layers,
        "random_weights": request.random_weights,
        "device": device,
        "dtype": dtype_name(target.model.dtype),
        "threads": threads,
        "engine": network_name(target),
        "capture": captured,
        "paths": gpu_paths(target, captured),
    }
    return judged(about, measured, subject.full, acceptance)


def check_out(folder: Path | None) -> None:
    """Raise UserError for a folder that cannot be written, before anything is measured."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error("write", folder, error) from error


def judged(
    about: dict[str, Any], measured: ProfileData, full: Size, acceptance: dict[str, tuple[float, str]]
) -> Profiled:
    """Judge the measurements, and extrapolate them to full depth if layers were cut."""
    notes = []
    if about["random_weights"]:
        notes.append("with random weights no answer means anything, and none is shown: times depend on shapes alone")
    if measured.size.num_experts:
        notes.append("experts read are an expectation: tokens are assumed to choose experts evenly and independently")
    if measured.drafts:
        notes.append(
            "'~' was not measured: a block is drafted whole and verified in part; a chain is interpolated linearly "
            "between one token and all of it"
        )
    estimated: list[judging.ProfiledBatch] = []
    if about["layers"] < about["all_layers"]:
        if judging.is_alike(measured.size, full):
            estimated = judging.places(judging.at_full_depth(measured, full), acceptance)
        else:
            notes.append(
                f"{about['layers']} layers do not have the mixture of kinds that all {about['all_layers']} have, so "
                "nothing is estimated for all of them; cut to a multiple of the pattern"
            )
    return Profiled(about, measured, judging.places(measured, acceptance), estimated, notes)


def _check(request: ProfileRequest) -> None:
    of_run = request.of_run
    if request.layers is not None and not request.random_weights:
        raise UserError("--layers has no effect without --random-weights: a model's own weights are measured whole")
    if request.draft_layers and not request.random_weights:
        raise UserError("--random-draft has no effect without --random-weights: drafts have their own layers")
    if wrong := [count for count in request.draft_layers if not 1 <= count <= MOST_LAYERS]:
        raise UserError(f"--random-draft: a draft has from 1 to {MOST_LAYERS} layers, not {wrong[0]}")
    if request.random_weights and of_run.drafts:
        raise UserError("--draft has no effect with --random-weights, whose drafts are random, too; leave it out")
    if request.random_weights and of_run.dtype == "auto":
        raise UserError("--dtype auto is the checkpoint's, and random weights have none; name a dtype")
    if request.acceptance is not None and not 1 <= request.acceptance < math.inf:
        raise UserError(
            f"--acceptance {request.acceptance:g}: a round always gives one token, so al.pooled is a number from 1 up"
        )
    for flag, values in (("--batch", request.batches), ("--context", request.contexts), ("--width", request.widths)):
        if wrong := [value for value in values if not 1 <= value <= MOST_TOKENS]:
            raise UserError(f"{flag} takes numbers from 1 to {MOST_TOKENS:,}, not {wrong[0]}")
    check_options(of_run)


LAYERS = "layers"
"""End of the tag of a draft that has a given number of layers."""


def _of_layers(method: Method, draft_layers: Sequence[int]) -> list[Method]:
    """Return the method, or a method for each number of layers if its draft is DFlash's."""
    if method.name != "dflash" or not draft_layers:
        return [method]
    _, colon, rest = method.label.partition(":")
    return [methods.parse(f"{method.name}@{count}{LAYERS}{colon}{rest}") for count in draft_layers]


def _layers_of(draft: str) -> int | None:
    """Return the number of layers that the tag of a random draft gives."""
    count = draft.partition("@")[2].removesuffix(LAYERS)
    return int(count) if count.isdecimal() else None


def _is_own(request: ProfileRequest, method: Method) -> bool:
    """Return whether the method drafts as many tokens as the model's own draft of this kind does."""
    return method.tag is None or bool(request.draft_layers)


def _preset(request: ProfileRequest, drafting: Sequence[Method]) -> Preset:
    """Return the model; with random weights it needs no drafts of its own."""
    of_run = request.of_run
    return presets.combine(of_run.model, of_run.target, {}) if request.random_weights else model_of(of_run, drafting)


def _subject(request: ProfileRequest, preset: Preset, drafting: Sequence[Method], dtype: Any) -> _Subject:
    from dflash_bench.models import loading, random_weights, targets
    from dflash_bench.models.formats import TargetShape
    from dflash_bench.models.memory import size_of

    kinds = drafts_of(drafting)
    if request.random_weights:
        whole = random_weights.config_of(preset.target)
        config = random_weights.config_of(preset.target, request.layers)
        drafts = {
            name: random_weights.empty_draft(
                name.partition("@")[0], preset.target, config, whole.num_hidden_layers, preset, _layers_of(name)
            )
            for name in kinds
        }
    else:
        folder = targets.find_target(preset.target)
        whole = config = targets.config_of(folder)
        shape = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers)
        folders = {name: loading.fetch(name, preset.reference(name)).folder for name in kinds}
        drafts = {name: loading.empty_network(name, folder, shape) for name, folder in folders.items()}
    kind = dtype or config.dtype
    target = random_weights.empty_target(config, kind, request.of_run.attention)
    full = target if config is whole or request.layers is None else random_weights.empty_target(whole, kind)
    for draft in drafts.values():
        draft.to(kind)
    return _Subject(config, target, drafts, whole.num_hidden_layers, size_of(full))


def _check_context(request: ProfileRequest, context_length: int, widest: int) -> None:
    if max(request.contexts) > context_length - widest:
        raise UserError(
            f"--context {max(request.contexts)} leaves no room for {widest} tokens: the target's context is "
            f"{context_length}; the longest here is {context_length - widest}"
        )


def _check_memory(request: ProfileRequest, size: Size, drafts: dict[str, Any], free: int | None, device: str) -> None:
    from dflash_bench.models import memory
    from dflash_bench.models.random_weights import stored_bytes

    weights = [weight for draft in drafts.values() for weight in draft.parameters()]
    draft_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    if request.random_weights:
        size = replace(size, stored_bytes=stored_bytes(size))
    else:
        draft_bytes *= 2  # a drafter joins weights, and holds both until the last is joined
    order = (size, draft_bytes, max(request.batches), max(request.contexts), max(WIDEST, *request.widths))
    needed = memory.needed_bytes(*order)
    if free is None or needed <= free:
        return
    fits = memory.what_fits(*order, free, may_cut=request.random_weights)
    raise UserError(
        f"{request.of_run.name} with {size.num_layers} layers, batch {order[2]} and context {order[3]} needs "
        f"{needed / 1e9:.1f} GB on {device}, and {free / 1e9:.1f} GB are free; "
        + (fits or "not even one sequence fits: use another device, or a smaller --dtype")
    )


def _models(
    request: ProfileRequest, preset: Preset, drafting: Sequence[Method], subject: _Subject, device: str, dtype: Any
) -> Any:
    from dflash_bench.models import loading, random_weights
    from dflash_bench.models.targets import Placement

    if not request.random_weights:
        placement = Placement(attention=request.of_run.attention)
        return loading.load(preset, drafts_of(drafting), device, "auto" if dtype is None else dtype, placement)
    target = random_weights.filled_target(subject.target, device)
    drafts = {name: random_weights.filled_draft(draft, device, dtype) for name, draft in subject.drafts.items()}
    return loading.Models(target, None, drafts, {})


def _acceptance(request: ProfileRequest, preset: Preset, num_drafts: dict[str, int]) -> dict[str, tuple[float, str]]:
    """Return the acceptance length by method: as given, else published for this target and number of drafts."""
    if request.acceptance is not None:
        for method, number in num_drafts.items():
            if request.acceptance > number + 1:
                raise UserError(
                    f"--acceptance {request.acceptance:g} is more than a round of {method} has: {number + 1}"
                )
        return dict.fromkeys(num_drafts, (request.acceptance, "as given"))
    if Path(preset.target).is_dir():
        return {}
    # What was published is of the published number of layers.
    of_own = {method: number for method, number in num_drafts.items() if _layers_of(draft_of(method) or "") is None}
    known = {method: judging.published_acceptance(preset.target, method, number) for method, number in of_own.items()}
    return {method: figure for method, figure in known.items() if figure is not None}
