"""Resolve a request to a run: presets, methods, settings and sweeps; refuse contradictions."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import product
from typing import Any, cast

from dflash_bench.core import methods, shard
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.measurement import Instrument, opened
from dflash_bench.core.methods import Method
from dflash_bench.core.option import OptionSpec, check_options, options_of, refuse_without_effect
from dflash_bench.core.shard import WHOLE, Shard
from dflash_bench.core.types import CODE_SCORERS, Audit, Settings, is_greedy
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner.config import RunRequest, require_prompts
from dflash_bench.runner.rules import THINKING
from dflash_bench.tasks import sandbox, scorers, suites
from dflash_bench.tasks.padding import Contexts
from dflash_bench.tasks.scorers.base import is_evaluated
from dflash_bench.tasks.suites import Loaded

# `--over`: values of options and settings, as a grid or varied one at a time.


SETTINGS = tuple(item.name for item in fields(Settings))
OF_RUNS = ("dtype", "engine", "kernels", "quantize")
"""The options that decide how the target is loaded."""
OF_SETTINGS = "setting"
"""The prefix for a setting that shares its name with an option of a method."""
EXAMPLE = "--over block=4,8,16, --over eagle3-tree:top_k=4,8 or --over temperature=0,1"


@dataclass(frozen=True, slots=True)
class Axis:
    """The values of an option or setting, as text; `owner` is the method they are for, or `OF_SETTINGS`."""

    name: str
    values: tuple[str, ...]
    owner: str | None = None
    flag: str = "--over"

    def is_of(self, method: Method) -> bool:
        """Return whether the method has such an option, and the axis is meant for it."""
        return self.owner in (None, method.name) and any(self.name == option.name for option in method.kind.options)

    @property
    def is_of_settings(self) -> bool:
        return self.owner in (None, OF_SETTINGS) and self.name in SETTINGS


def parse(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Parse each `[OWNER:]NAME=VALUE,VALUE`. Raises UserError for other text, and for a name given twice."""
    axes = tuple(map(_axis, texts))
    for number, axis in enumerate(axes):
        if any((axis.owner, axis.name) == (other.owner, other.name) for other in axes[:number]):
            raise UserError(f"--over names {axis.name} twice; give all its values once")
    return axes


def _axis(text: str) -> Axis:
    match = re.fullmatch(r"(?:([^:=,]+):)?([^:=,]+)=(.*)", text)
    if match is None:
        raise UserError(f"--over takes NAME=VALUE,VALUE, not '{text}'; such as {EXAMPLE}")
    return Axis(match[2], split(match[3], f"--over {match[2]}"), match[1])


def split(text: str, where: str) -> tuple[str, ...]:
    """Split values at commas. Raises UserError for an empty or repeated value."""
    values = tuple(text.split(","))
    if not all(values):
        raise UserError(f"{where} has an empty value in '{text}'; write the values with a comma between them")
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise UserError(f"{where} has the value {twice[0]} twice; give it once")
    return values


def divided(axes: Sequence[Axis], chosen: Sequence[Method]) -> tuple[list[Axis], list[Axis]]:
    """Divide axes into options of methods and settings. Raises UserError for a name that is neither, or both."""
    of_methods = [axis for axis in axes if any(axis.is_of(method) for method in chosen)]
    of_settings = [axis for axis in axes if axis.is_of_settings]
    for axis in axes:
        if axis in of_methods and axis in of_settings:
            owner = next(method.name for method in chosen if axis.is_of(method))
            raise UserError(
                f"--over {axis.name}: this is an option of {owner} and a setting; write "
                f"{owner}:{axis.name}= or {OF_SETTINGS}:{axis.name}="
            )
        if axis not in of_methods and axis not in of_settings:
            raise _unknown(axis, chosen)
    return of_methods, of_settings


def _unknown(axis: Axis, chosen: Sequence[Method]) -> UserError:
    if axis.name in OF_RUNS:
        return UserError(
            f"--over {axis.name}: a sweep is one run, and a run loads one target; make a run for each --{axis.name} "
            "and set them side by side with 'dflash-bench compare'"
        )
    names = [method.name for method in chosen if method.kind.options]
    if axis.owner not in (None, OF_SETTINGS, *names):
        return UserError(f"--over {axis.owner}:{axis.name} has no effect without --method {axis.owner}")
    options = dict.fromkeys(option.name for method in chosen for option in method.kind.options)
    return unknown("option or setting to sweep over", axis.name, [*options, *SETTINGS])


def laid_out(chosen: Sequence[Method], axes: Sequence[Axis], one_at_a_time: bool) -> list[Method]:
    """Return each method with every combination of values, or unchanged and with one option changed at a time.

    In a grid, an option that a method sets itself is kept. Raises UserError if that leaves an axis unused.
    """
    if not axes:
        return list(chosen)
    for axis in axes:
        if not one_at_a_time and not any(axis.is_of(method) and method.leaves_open(axis.name) for method in chosen):
            raise UserError(f"{axis.flag} {axis.name} has no effect: every method that has it sets it already")
    made = [
        varied.label
        for method in chosen
        for varied in (_one_at_a_time(method, axes) if one_at_a_time else _grid(method, axes))
    ]
    return methods.chosen(made)


def _grid(method: Method, axes: Sequence[Axis]) -> list[Method]:
    open_axes = [axis for axis in axes if axis.is_of(method) and method.leaves_open(axis.name)]
    return [
        reduce(lambda varied, pair: _with(varied, *pair), zip(open_axes, values, strict=True), method)
        for values in product(*(axis.values for axis in open_axes))
    ]


def _one_at_a_time(method: Method, axes: Sequence[Axis]) -> list[Method]:
    varied = [(axis.name, _with(method, axis, value)) for axis in axes if axis.is_of(method) for value in axis.values]
    # A value that the method has already is not measured twice.
    return [method, *(variant for name, variant in varied if variant.option(name) != method.option(name))]


def _with(method: Method, axis: Axis, text: str) -> Method:
    option = method.kind.option(axis.name)
    if (value := option.read(text)) is None:
        raise UserError(f"{axis.flag}: {axis.name} of {method.name} must be {option.range}, not '{text}'")
    return method.with_option(axis.name, value)


# From a request to the plan of a run: methods, models, prompts and settings are looked up once.


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A validated run, before any weights are loaded; `request` has its sweep expanded.

    What follows `has_date` is known once the checkpoints are fetched and the prompts counted (`setup.check_fits`).
    """

    request: RunRequest
    methods: tuple[Method, ...]
    model: Preset
    """The target and its drafts; from the hub with their commits, once fetched."""
    suites: tuple[Loaded, ...]
    """The prompts, without those that exceed the target's context."""
    audit: Audit
    isolation: sandbox.Isolation | None
    """The sandbox for code written by the model; without one it is not run, and not scored."""
    instruments: Mapping[str, Instrument] = field(default_factory=dict)
    """Instruments, keyed by the name of their measurement."""
    has_date: bool = False
    """Whether the user gave the date of the request, or the run that is resumed has one."""
    contexts: Contexts = field(default_factory=lambda: Contexts(0, 0))
    memory: Mapping[str, int | None] | None = None
    """The memory as in `run.json`; None if nothing is loaded."""
    unpinned: tuple[str, ...] = ()
    """The parts of the model, "target" or drafts, whose ids named no commit."""
    limit: int = 0
    """The target's positions in tokens, less those of answers; 0 if nothing is loaded."""
    date: str | None = None
    """The date for the chat template, if it uses a date."""
    rendered: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The hash of all rendered first turns, by suite and thinking ("on", "off")."""
    has_template: bool = True

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV caches of target and drafts."""
        footprint = self.memory or {}
        return sum(footprint.get(name) or 0 for name in ("target_cache_bytes", "draft_cache_bytes"))

    @property
    def shard(self) -> Shard:
        return WHOLE if self.request.shard is None else shard.parse(self.request.shard)

    @property
    def drafts(self) -> list[str]:
        """The keys of the drafts to load: `dflash`, or `dflash@a`."""
        return drafts_of(self.methods)

    @property
    def judging(self) -> RunPlan:
        """The plan with plain decoding only, for a target that judges the answers of servers."""
        return replace(self, methods=(methods.parse("ar"),), request=replace(self.request, concurrency=(), rate=()))

    @property
    def max_new_tokens(self) -> int:
        return self.request.max_new_tokens or self.model.max_new_tokens

    @property
    def has_code(self) -> bool:
        return has_code(self.suites)


def methods_and_model(request: RunRequest) -> tuple[RunRequest, list[Method], Preset]:
    """Check a request without reading prompts; return it with its sweep expanded, methods and model."""
    require_prompts(request)
    refuse_without_effect(request, before_sweep=True)
    if request.asks_servers:
        from dflash_bench.runner import served

        served.check(request)
    request, chosen = swept(request, methods_of(request))
    check_options(request)
    return request, chosen, model_of(request, chosen)


def plan_run(request: RunRequest, chosen: Sequence[Method], model: Preset) -> RunPlan:
    """Load the prompts, and check all that can be checked without weights. Raises UserError."""
    instruments = opened(request, [method for method in chosen if method.name != BASELINE])
    loaded = prompts_of(request, model)
    for instrument in instruments.values():
        loaded = [*instrument.scored(loaded)]
    scorers.require({one.suite.scorer for one in loaded}, request.trust_remote_code)
    for one in loaded:
        scorers.check_references(one.suite.scorer, one.prompts)
    loaded = [_with_unscored(one) for one in loaded]
    refuse_too_few(loaded, request)
    _refuse_shared_memory(request, chosen)
    if request.budget is not None:
        loaded = [suites.as_drawn(one) for one in loaded]
    isolation = _isolation(request, loaded)
    return RunPlan(request, tuple(chosen), model, tuple(loaded), _audit(request), isolation, instruments=instruments)


def _with_unscored(loaded: Loaded) -> Loaded:
    """Name the prompts whose answers the scorer cannot score."""
    found = scorers.unscored(loaded.suite.scorer, loaded.prompts)
    told = [
        f"{number} prompts of {loaded.suite.name} are not scored: {why}"
        for why, number in Counter(found.values()).items()
    ]
    return replace(loaded, notes=(*loaded.notes, *told), unscored=tuple(found))


def refuse_too_few(loaded: Sequence[Loaded], request: RunRequest) -> None:
    """Refuse fewer prompts than shards, or than slots, which would be measured at a lower concurrency than reported."""
    if request.shard is not None:
        _refuse_empty_shards(shard.parse(request.shard), loaded)
    concurrency = max(request.concurrency, default=1)
    for one in loaded:
        if len(one.prompts) < concurrency:
            raise UserError(
                f"--concurrency {concurrency} is more than the {len(one.prompts)} prompts of {one.suite.name}; "
                "lower it, or raise --limit (four times as many prompts keep all places busy most of the time)"
            )


def _refuse_empty_shards(one: Shard, loaded: Sequence[Loaded]) -> None:
    least = 2 * one.of
    for few in (few for few in loaded if len(few.prompts) < least):
        raise UserError(
            f"--shard {one} needs {least} prompts of each suite, two for each shard, and {few.suite.name} has "
            f"{len(few.prompts)}; use fewer shards"
        )


def _refuse_shared_memory(request: RunRequest, chosen: Sequence[Method]) -> None:
    """Refuse methods whose drafts depend on which prompts a worker or shard has decoded."""
    divided = {"--workers": request.workers, "--shard": request.shard}
    for flag in (flag for flag, value in divided.items() if value is not None):
        for method in chosen:
            if method.name == "suffix" and method.option("earlier") == "yes":
                raise UserError(
                    f"--method {method.label} drafts from the run's earlier answers, of which {flag} has only a part; "
                    f"give suffix:earlier=no, or leave {flag} out"
                )


def methods_of(request: RunRequest) -> list[Method]:
    """Return the methods to measure, plain decoding first."""
    if request.servers:
        from dflash_bench.runner import served

        return served.methods_of(request)
    chosen = methods.chosen(request.methods or list(presets.parse_drafts(request.drafts)) or ["dflash"])
    for name, text, drafter in (
        ("block", request.block_size, "--method dflash, or another that leaves its block open"),
        ("steps", request.draft_steps, "--method dflash, or where it says its steps itself"),
    ):
        flag = {"block": "--block-size", "steps": "--draft-steps"}[name]
        if text is not None and not any(method.leaves_open(name) for method in chosen):
            raise UserError(f"{flag} has no effect without {drafter}")
        if text is not None:
            chosen = laid_out(chosen, [Axis(name, split(text, flag), flag=flag)], False)
    for method in chosen if request.launch is None else ():
        methods.refuse_imposed(method)
    return chosen


def swept(request: RunRequest, chosen: Sequence[Method]) -> tuple[RunRequest, list[Method]]:
    """Expand `--over`: return the request with the settings, and the methods with the options."""
    axes = parse(request.over)
    of_methods, of_settings = divided(axes, chosen)
    if of_methods and request.asks_servers:
        raise UserError(f"--over {of_methods[0].name}: a server drafts as it was started; start one for each value")
    if request.one_at_a_time and of_settings:
        raise UserError(
            "--one-at-a-time varies options of methods, and all methods run under all settings; "
            f"leave it out, or --over {of_settings[0].name}"
        )
    for axis in of_settings:
        spec = options_of(RunRequest)[axis.name]
        if spec.is_given(request):
            raise UserError(f"{spec.flag} and --over {axis.name} both set it; give one of them")
        request = replace(request, **{axis.name: _values(axis, spec)})
    return request, laid_out(chosen, of_methods, request.one_at_a_time)


def _values(axis: Axis, spec: OptionSpec) -> Any:
    """Return the values of an axis in a request's form: numbers, or the word for modes of thinking."""
    if spec.parse is not None:
        return spec.parse(",".join(axis.values), f"--over {axis.name}")
    if not {*axis.values} <= {"on", "off"}:
        raise UserError(f"--over thinking takes on and off, not '{','.join(axis.values)}'")
    return axis.values[0] if len(axis.values) == 1 else "both"


def model_of(request: RunRequest, chosen: Sequence[Method]) -> Preset:
    """Return the target and drafts to load. Raises UserError for an unused or missing draft."""
    if request.servers:  # whose drafts are their own: a target here only judges them
        if not request.has_target:
            return Preset("", {})
        return replace(presets.combine(request.model, request.target, {}), drafts={})
    drafts = presets.parse_drafts(request.drafts)
    for draft in drafts:
        if draft not in drafts_of(chosen):
            users = " or ".join(f"--method {label}" for label in methods.users_of(draft))
            raise UserError(f"--draft {draft}= has no effect without {users}")
    model = presets.combine(request.model, request.target, drafts)
    presets.require_drafts(model, drafts_of(chosen))
    return model


def drafts_of(chosen: Sequence[Method]) -> list[str]:
    """Return the keys of the drafts that these methods need, without repetition."""
    return list(dict.fromkeys(method.draft for method in chosen if method.draft is not None))


def prompts_of(request: RunRequest, model: Preset) -> list[Loaded]:
    """Load prompts from the suites, then from `--prompts`."""
    known = suites.in_style(suites.expand(request.suites), request.prompt_style)
    # `datasets` reads this when it is imported; its progress bars would break ours.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    data, limit, balance = request.data or model.data, request.limit, request.balance
    padded = bool(request.context)
    loaded = [suites.load_prompts(suite, data, limit, balance, padded=padded) for suite in known]
    if request.prompts is not None:
        from dflash_bench.tasks import prompts
        from dflash_bench.tasks.prompt_columns import Columns

        scorer = request.score or "none"
        columns = list(scorers.columns(scorer))
        chosen = Columns(request.prompt_column, request.answer_column)
        own = {"every_answer": request.every_answer, "padded": padded}
        loaded.append(prompts.load(request.prompts, limit, scorer, columns, balance, chosen=chosen, **own))
    if request.score is not None and is_evaluated(request.score):
        loaded = _scored_by(request.score, loaded)
    return suites.without_first(loaded, request.skip) if request.skip else loaded


def _scored_by(metric: str, several: Sequence[Loaded]) -> list[Loaded]:
    """Score answers that have references by a metric, unless their suite has a scorer. Raises UserError if all have."""
    scored = [
        suites.with_scorer(one, metric, {}) if one.suite.scorer == "none" and one.suite.reference else one
        for one in several
    ]
    if not any(one.suite.scorer == metric for one in scored):
        names = ", ".join(one.suite.name for one in several)
        raise UserError(f"--score {metric} has no effect on {names}, without references or with a scorer; leave it out")
    return scored


def settings_of(request: RunRequest, modes: Sequence[bool | None]) -> list[Settings]:
    """Return all combinations of settings; at temperature 0 without the settings that only affect sampling."""
    usual, several = Settings(), []
    values = [
        getattr(request, name) or (getattr(usual, name),)
        for name in ("top_k", "top_p", "min_p", "repetition_penalty", "concurrency")
    ]
    everything = product(modes, request.temperature, *values, request.context or (None,), request.rate or (None,))
    for mode, temperature, top_k, top_p, min_p, penalty, beside, context, rate in everything:
        if is_greedy(temperature):
            top_k, top_p, min_p = usual.top_k, usual.top_p, usual.min_p
        several.append(Settings(temperature, top_k, top_p, min_p, penalty, mode, beside, context, rate))
    return list(dict.fromkeys(several))


def modes_of(request: RunRequest, model: Preset, has_thinking: bool) -> tuple[bool | None, ...]:
    """Return the modes of thinking to run; None if the chat template has no such switch."""
    if has_thinking:
        return (model.thinking,) if request.thinking is None else THINKING[request.thinking]
    if request.thinking is not None:
        raise UserError(
            f"--thinking {request.thinking} has no effect: the chat template of {model.target} has no enable_thinking"
        )
    return (None,)


def has_code(loaded: Sequence[Loaded]) -> bool:
    """Return whether the answers of any suite are code."""
    return bool(CODE_SCORERS & {one.suite.scorer for one in loaded})


def _isolation(request: RunRequest, loaded: Sequence[Loaded]) -> sandbox.Isolation | None:
    """Choose the sandbox for code written by the model. Raises UserError if --unsafe-code would have no effect."""
    if not has_code(loaded):
        if request.unsafe_code:
            raise UserError(
                f"--unsafe-code has no effect without a suite of code ({' or '.join(sorted(CODE_SCORERS))})"
            )
        return None
    isolation = sandbox.strongest()
    if isolation and request.unsafe_code:
        raise UserError(
            f"--unsafe-code has no effect here: this system has a sandbox ({isolation}), and code runs in it"
        )
    return sandbox.UNSAFE if request.unsafe_code else isolation


def _audit(request: RunRequest) -> Audit:
    """Choose the audit: none without a target, or for sampled answers, where no single token is right."""
    if request.servers and not request.has_target:
        return "none"
    return cast(Audit, request.audit or "all") if any(map(is_greedy, request.temperature)) else "none"
