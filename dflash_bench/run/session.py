"""One `run` command from its options to its records: check everything first, then load, open and run."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from dflash_bench import environment, methods
from dflash_bench.errors import UserError, unknown
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.records import CODE_SCORERS, SCHEMA_VERSION, Audit, Settings, is_greedy
from dflash_bench.results import store
from dflash_bench.results.identity import settings_of, settings_to_json
from dflash_bench.results.run_json import read_info
from dflash_bench.run import budget, runner, sweeping
from dflash_bench.run.progress import Progress
from dflash_bench.tasks import prompts, sandbox, scoring, suites

if TYPE_CHECKING:
    from dflash_bench.models.loading import Models

DTYPES = ("float32", "bfloat16", "float16", "auto")
ATTENTION = ("sdpa", "eager")
"""What takes the mask of this engine, which tells ragged rows and the branches of a tree apart."""
THINKING: dict[str, tuple[bool, ...]] = {"on": (True,), "off": (False,), "both": (False, True)}


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `run` as the user gave them; None is "not given"."""

    suites: tuple[str, ...]
    methods: tuple[str, ...]
    model: str | None = None
    target: str | None = None
    drafts: tuple[str, ...] = ()
    """METHOD=REFERENCE"""
    data: str | None = None
    prompts: Path | None = None
    score: str | None = None
    """The scorer of `prompts`."""
    limit: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    temperatures: tuple[float, ...] = (0.0,)
    top_k: tuple[int, ...] = ()
    top_p: tuple[float, ...] = ()
    min_p: tuple[float, ...] = ()
    repetition_penalty: tuple[float, ...] = ()
    block_size: str | None = None
    """One, or several with commas between them; and so `draft_steps`."""
    draft_steps: str | None = None
    budget: str | None = None
    """How long to measure, such as 5m; all prompts if absent."""
    over: tuple[str, ...] = ()
    """NAME=VALUE,VALUE, of an option or a setting."""
    one_at_a_time: bool = False
    repeats: int = 1
    threads: int | None = None
    device: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    attention: str | None = None
    thinking: str | None = None
    """A key of `THINKING`."""
    trust_remote_code: bool = False
    unsafe_code: bool = False
    audit: str | None = None

    @property
    def name(self) -> str:
        """Of the model, for people."""
        return self.model or (self.target or "nano").partition("@")[0]


def perform(request: Request, folder: Path, resume: bool, tell: Callable[[str], object]) -> None:
    """Run or continue, into `folder`; `tell` gets notes for the user. Raises UserError before anything is written."""
    request, chosen = _swept(request, _methods(request))
    _refuse_what_has_no_effect(request)
    _refuse_unknown_values(request)
    model = _model(request, chosen)
    # Before what is slow: a download, and the models.
    (store.check_resumable if resume else store.check_new)(folder)
    loaded = _prompts(request, model)
    scoring.require({each.suite.scorer for each in loaded})
    for each in loaded:
        scoring.check_references(each.suite.scorer, each.prompts)
    if request.budget is not None:
        loaded = [suites.as_drawn(each) for each in loaded]
    cage = _cage(request, loaded)
    identity, backend = _open(request, model, chosen, loaded)
    plan = runner.Plan(
        tuple(loaded),
        tuple(method.label for method in chosen),
        request.repeats,
        settings_of(identity),
        _audit(request),
        cage,
    )
    has_code = _has_code(loaded)
    identity["code"] = sandbox.how_run(cage) if has_code else None
    held_by = sandbox.describe(cage) if has_code else None
    info = _info(request, identity) | {"plan": runner.to_store(plan), "sandbox": held_by}
    for each in loaded:
        for note in each.notes:
            tell(f"note: {note}")
    if resume and request.budget is not None:
        _refuse_other_order(read_info(folder), info["plan"], folder)
    with (store.resume if resume else store.create)(folder, info) as run:
        run.keep_prompts(runner.asked_of(plan))
        if request.budget is None:
            with Progress(plan.num_generations, len(run.stored)) as progress:
                runner.execute(plan, backend, run, progress)
            run.mark_finished({})
        else:
            _execute_within(budget.seconds(request.budget), plan, backend, run, tell)


def _refuse_other_order(stored: Mapping[str, Any], plan: Mapping[str, Any], folder: Path) -> None:
    """What was measured without --for is in the order of the rows, of which the first ones are no fair draw."""
    then, now = stored.get("plan", {}).get("prompts", {}), plan["prompts"]
    if any(
        then[suite] != now[suite] and sorted(then[suite]) == sorted(now[suite]) for suite in then.keys() & now.keys()
    ):
        raise UserError(f"{folder} was started without --for; leave it out to finish it, or choose another --out")


def _execute_within(
    budget_s: float, plan: runner.Plan, backend: runner.Backend, run: store.Run, tell: Callable[[str], object]
) -> None:
    """What there is time for; the run then holds just that."""
    end_s = run.seconds() + budget_s - run.spent_s
    with Progress(plan.num_generations, len(run.stored), left_s=lambda: end_s - run.seconds()) as progress:
        runner.execute(plan, backend, run, progress, budget.items(plan, run, budget_s))
    counts = budget.measured(plan, run)
    for suite in [suite for suite, number in counts.items() if not number]:
        tell(f"note: there was no time for {suite}; raise --for")
    run.mark_finished({"measured": counts})


def _methods(request: Request) -> list[methods.Method]:
    chosen = methods.chosen(request.methods or list(presets.parse_drafts(request.drafts)) or ["dflash"])
    for name, text, drafter in (
        ("block", request.block_size, "--method dflash, or another that leaves its block open"),
        ("steps", request.draft_steps, "--method dflash, or where it says its steps itself"),
    ):
        flag = {"block": "--block-size", "steps": "--draft-steps"}[name]
        if text is not None and not any(method.leaves_open(name) for method in chosen):
            raise UserError(f"{flag} has no effect without {drafter}")
        if text is not None:
            chosen = sweeping.laid_out(chosen, [sweeping.Axis(name, sweeping.split(text, flag), flag=flag)], False)
    return chosen


def _swept(request: Request, chosen: Sequence[methods.Method]) -> tuple[Request, Sequence[methods.Method]]:
    """The request with the settings that `--over` names, and the methods with the options."""
    axes = sweeping.parse(request.over)
    of_methods, of_settings = sweeping.divided(axes, chosen)
    if request.one_at_a_time and not axes:
        raise UserError("--one-at-a-time has no effect without --over")
    if request.one_at_a_time and of_settings:
        raise UserError(
            "--one-at-a-time varies options of methods, and all methods run under all settings; "
            f"leave it out, or --over {of_settings[0].name}"
        )
    for axis in of_settings:
        field = "temperatures" if axis.name == "temperature" else axis.name
        if getattr(request, field) not in ((), None, (0.0,)):
            flag = f"--{axis.name.replace('_', '-')}"
            raise UserError(f"{flag} and --over {axis.name} both say what it is; give one of them")
        request = replace(request, **{field: sweeping.setting_values(axis)})
    return request, sweeping.laid_out(chosen, of_methods, request.one_at_a_time)


def _refuse_what_has_no_effect(request: Request) -> None:
    if not request.suites and request.prompts is None:
        known = [*suites.known_suites(), *suites.known_groups()]
        raise UserError(f"nothing to run: give --suite ({', '.join(known)}) or --prompts FILE.jsonl")
    if request.data is not None and not request.suites:
        raise UserError("--data has no effect without --suite")
    if request.score is not None and request.prompts is None:
        raise UserError("--score has no effect without --prompts: a suite says itself how it is scored")
    if request.score is not None and request.score not in scoring.SCORERS:
        raise unknown("scorer", request.score, list(scoring.SCORERS))
    if request.seed is not None and not _samples(request):
        raise UserError(
            "--seed has no effect at temperature 0; it seeds sampling (prompts are drawn by the suite's own seed)"
        )
    for flag in ("top_k", "top_p", "min_p"):
        if getattr(request, flag) and not _samples(request):
            raise UserError(f"--{flag.replace('_', '-')} has no effect at temperature 0, where the best token is taken")


def _model(request: Request, chosen: Sequence[methods.Method]) -> Preset:
    """The target and drafts to load. Raises UserError for a draft that no method uses, and a method without one."""
    drafts = presets.parse_drafts(request.drafts)
    for draft in drafts:
        if draft not in _drafts(chosen):
            users = " or ".join(f"--method {label}" for label in methods.users_of(draft))
            raise UserError(f"--draft {draft}= has no effect without {users}")
    model = presets.combine(request.model, request.target, drafts)
    presets.require_drafts(model, _drafts(chosen))
    return model


def _drafts(chosen: Sequence[methods.Method]) -> list[str]:
    return list(dict.fromkeys(method.draft for method in chosen if method.draft is not None))


def _prompts(request: Request, model: Preset) -> list[suites.Loaded]:
    known = suites.expand(request.suites)
    # `datasets` reads this when it is imported; its bars would tear ours.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    loaded = [suites.load(suite, request.data or model.data, request.limit) for suite in known]
    if request.prompts is not None:
        scorer = request.score or "none"
        loaded.append(prompts.load(request.prompts, request.limit, scorer, list(scoring.COLUMNS.get(scorer, ()))))
    return loaded


def _open(
    request: Request, model: Preset, chosen: Sequence[methods.Method], loaded: Sequence[suites.Loaded]
) -> tuple[dict[str, Any], runner.Backend]:
    """The backend, and what decides its answers: a run is continued only under the same."""
    # Read when torch is imported: waiting threads that spin take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from dflash_bench.engine.local import open_backend
    from dflash_bench.models import chat
    from dflash_bench.models.language import Placement
    from dflash_bench.models.loading import load

    device, dtype = _device_and_dtype(request, torch.cuda.device_count())
    # Small models are faster on one thread, and two busy threads spin against each other.
    threads = (request.threads or 1) if device == "cpu" else None
    if threads is not None:
        torch.set_num_threads(threads)
    _silence_transformers()
    placement = Placement(
        spread=request.device_map is not None,
        attention=request.attention,
        trust_remote_code=request.trust_remote_code,
    )
    models = load(model, _drafts(chosen), device, "auto" if dtype == "auto" else getattr(torch, dtype), placement)
    modes = _thinking(request, model, models.tokenizer)
    for mode in modes:
        chat.check(models.tokenizer, [each for one in loaded for each in suites.chats(one)], bool(mode))
    max_new_tokens, seed = request.max_new_tokens or model.max_new_tokens, request.seed or 0
    backend = open_backend(models, model, chosen, max_new_tokens, seed)
    identity = {
        "schema_version": SCHEMA_VERSION,
        "methods": {m.label: _identity_of_method(m, backend.drafters[m.label].num_drafts) for m in chosen},
        **_identity_of_models(request, model, models),
        "suites": {each.suite.name: _identity(each) for each in loaded},
        "max_new_tokens": max_new_tokens,
        "settings": settings_to_json(_settings(request, modes)),
        "seed": seed,
        "repeats": request.repeats,
        "audit": _audit(request),
        "engine": "local",
        "concurrency": 1,
        "device": device,
        "device_map": request.device_map,
        "threads": threads,
    }
    return identity, backend


def _identity_of_method(method: methods.Method, num_drafts: int) -> dict[str, Any]:
    return {"name": method.name, "draft": method.draft, "options": dict(method.options), "num_drafts": num_drafts}


def _identity_of_models(request: Request, model: Preset, models: Models) -> dict[str, Any]:
    """Which weights these are, what their publishers say of them, and how they are computed."""
    trained, named = model.trained_thinking, models.verifiers
    return {
        "model": request.name,
        "target": presets.name(model.target),
        "drafts": {
            draft: {
                "name": presets.name(model.drafts[draft]),
                "trained_thinking": trained.get(draft),
                "verifier": named.get(draft),
            }
            for draft in models.drafts
        },
        "revisions": models.revisions,
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "attention": models.target.config._attn_implementation,
    }


def _settings(request: Request, modes: Sequence[bool | None]) -> list[Settings]:
    """One for each combination of what is given; what only changes sampling is left out at temperature 0."""
    usual, several = Settings(), []
    values = [
        getattr(request, name) or (getattr(usual, name),) for name in ("top_k", "top_p", "min_p", "repetition_penalty")
    ]
    for mode, temperature, top_k, top_p, min_p, penalty in product(modes, request.temperatures, *values):
        if is_greedy(temperature):
            top_k, top_p, min_p = usual.top_k, usual.top_p, usual.min_p
        several.append(Settings(temperature, top_k, top_p, min_p, penalty, mode))
    return list(dict.fromkeys(several))


def _thinking(request: Request, model: Preset, tokenizer: Any) -> tuple[bool | None, ...]:
    """The modes to run; None for a chat template that knows no such switch."""
    if "enable_thinking" in (tokenizer.chat_template or ""):
        return (model.thinking,) if request.thinking is None else THINKING[request.thinking]
    if request.thinking is not None:
        raise UserError(
            f"--thinking {request.thinking} has no effect: the chat template of {model.target} has no enable_thinking"
        )
    return (None,)


def _identity(loaded: suites.Loaded) -> dict[str, Any]:
    suite = loaded.suite
    return {
        "version": suite.version,
        "source": loaded.source,
        "sha256": loaded.sha256,
        "prompts": len(loaded.prompts),
        "scorer": suite.scorer,
    }


def _has_code(loaded: Sequence[suites.Loaded]) -> bool:
    return bool(CODE_SCORERS & {each.suite.scorer for each in loaded})


def _cage(request: Request, loaded: Sequence[suites.Loaded]) -> sandbox.Cage | None:
    """Where the code that the model writes will run. Raises UserError where --unsafe-code would change nothing."""
    if not _has_code(loaded):
        if request.unsafe_code:
            raise UserError("--unsafe-code has no effect without a suite of code (humaneval or mbpp)")
        return None
    cage = sandbox.strongest()
    if cage and request.unsafe_code:
        raise UserError(f"--unsafe-code has no effect here: this system has a cage ({cage}), and code runs in it")
    return sandbox.UNSAFE if request.unsafe_code else cage


def _silence_transformers() -> None:
    """Its bars and advice would tear our progress display; what fails is raised in any case."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _device_and_dtype(request: Request, num_gpus: int) -> tuple[str, str]:
    device = request.device or ("cuda" if num_gpus and request.name != "nano" else "cpu")
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", device):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    kind, _, index = device.partition(":")
    if kind == "cuda" and not num_gpus:
        raise UserError("no CUDA device here; use --device cpu")
    if index and (len(index) > 4 or int(index) >= num_gpus):
        raise UserError(f"--device {device}: this machine has cuda:0 to cuda:{num_gpus - 1}")
    if kind == "cuda" and request.threads is not None:
        raise UserError("--threads has no effect on a GPU")
    if request.device_map is not None and kind == "cpu":
        raise UserError("--device-map has no effect on the CPU: it spreads a target over GPUs")
    dtype = request.dtype or ("float32" if kind == "cpu" else "bfloat16")
    return device, dtype


def _audit(request: Request) -> Audit:
    """What is drawn at random has no one right token to be audited against."""
    return cast(Audit, request.audit or "all") if any(map(is_greedy, request.temperatures)) else "none"


def _samples(request: Request) -> bool:
    return not all(map(is_greedy, request.temperatures))


def _refuse_unknown_values(request: Request) -> None:
    """What can be told before anything heavy is loaded."""
    if not all(math.isfinite(temperature) and temperature >= 0 for temperature in request.temperatures):
        raise UserError(f"--temperature takes numbers from 0 up, not {_listed(request.temperatures)}")
    if len(set(request.temperatures)) < len(request.temperatures):
        raise UserError(f"--temperature names one twice: {_listed(request.temperatures)}")
    _refuse_unknown_sampling(request)
    if request.thinking is not None and request.thinking not in THINKING:
        raise unknown("mode of thinking", request.thinking, list(THINKING))
    if request.audit is not None and request.audit not in get_args(Audit):
        raise unknown("audit", request.audit, list(get_args(Audit)))
    if request.audit is not None and not any(map(is_greedy, request.temperatures)):
        raise UserError("--audit has no effect above temperature 0: no single token is then the right one")
    if request.budget is not None:
        budget.seconds(request.budget)
    if request.dtype not in (None, *DTYPES):
        raise unknown("dtype", request.dtype, list(DTYPES))
    if request.threads is not None and request.threads > (os.cpu_count() or 1):
        raise UserError(f"--threads {request.threads} is more than the processors of this machine, {os.cpu_count()}")
    if request.device_map not in (None, "auto"):
        raise unknown("device map", request.device_map, ["auto"])
    if request.device_map is not None and request.device is not None:
        raise UserError("--device has no effect with --device-map")
    if (request.attention or "").startswith("flash"):
        raise UserError(
            f"--attention {request.attention} takes no mask, and this engine needs one for ragged rows and trees; "
            f"use {' or '.join(ATTENTION)}"
        )
    if request.attention not in (None, *ATTENTION):
        raise unknown("attention", request.attention, list(ATTENTION))


def _refuse_unknown_sampling(request: Request) -> None:
    if any(value < 1 for value in request.top_k):
        raise UserError(f"--top-k is a number of tokens from 1 up, not {_listed(request.top_k)}")
    for flag, value in [*(("--top-p", p) for p in request.top_p), *(("--min-p", p) for p in request.min_p)]:
        if not 0 < value < 1:
            raise UserError(f"{flag} is a share between 0 and 1, not {value:g}; leave it out to draw from all tokens")
    for penalty in request.repetition_penalty:
        if not math.isfinite(penalty) or penalty <= 0 or (penalty == 1 and len(request.repetition_penalty) == 1):
            raise UserError(
                f"--repetition-penalty is a number above 0 other than 1, which changes nothing; not {penalty:g}"
            )


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def _info(request: Request, identity: dict[str, Any]) -> dict[str, Any]:
    """What `run.json` holds."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(request).items()}
    return {
        "identity": identity,
        "options": options,
        "environment": environment.describe(),
        "command": shlex.join(["dflash-bench", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
