"""One `run` command from its options to its records: check everything first, then load, open and run."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from dflash_bench import environment, methods
from dflash_bench.errors import UserError, unknown
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.records import CODE_SCORERS, SCHEMA_VERSION, Audit, Settings, is_greedy
from dflash_bench.results import store
from dflash_bench.results.identity import settings_of, settings_to_json
from dflash_bench.run import runner
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
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    block_size: int | None = None
    draft_steps: int | None = None
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
    chosen = _methods(request)
    _refuse_what_has_no_effect(request)
    _refuse_unknown_values(request)
    model = _model(request, chosen)
    # Before what is slow: a download, and the models.
    (store.check_resumable if resume else store.check_new)(folder)
    loaded = _prompts(request, model)
    scoring.require({each.suite.scorer for each in loaded})
    for each in loaded:
        scoring.check_references(each.suite.scorer, each.prompts)
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
    with (store.resume if resume else store.create)(folder, info) as run:
        run.keep_prompts(runner.asked_of(plan))
        with Progress(plan.num_generations, len(run.stored)) as progress:
            runner.execute(plan, backend, run, progress)
        run.mark_finished({})


def _methods(request: Request) -> list[methods.Method]:
    chosen = methods.chosen(request.methods or list(presets.parse_drafts(request.drafts)) or ["dflash"])
    if request.block_size is not None:
        if not any(method.leaves_open("block") for method in chosen):
            raise UserError("--block-size has no effect without --method dflash, or another that leaves its block open")
        chosen = _with_option(chosen, "block", request.block_size)
    if request.draft_steps is not None:
        if not any(method.leaves_open("steps") for method in chosen):
            raise UserError("--draft-steps has no effect without --method dflash, or where it says its steps itself")
        chosen = _with_option(chosen, "steps", request.draft_steps)
    return chosen


def _with_option(chosen: list[methods.Method], name: str, value: int) -> list[methods.Method]:
    """A method that says its own value keeps it."""
    given = [method.with_option(name, value) if method.leaves_open(name) else method for method in chosen]
    return methods.chosen([method.label for method in given])


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
        if getattr(request, flag) is not None and not _samples(request):
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
    loaded = [suites.load_prompts(suite, request.data or model.data, request.limit) for suite in known]
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
    """One for each mode of thinking and temperature; what only changes sampling is left out at temperature 0."""
    penalty = request.repetition_penalty or 1.0
    of_sampling = {name: getattr(request, name) for name in ("top_k", "top_p", "min_p")}
    given = {name: value for name, value in of_sampling.items() if value is not None}
    return [
        Settings(
            temperature=temperature, repetition_penalty=penalty, thinking=mode,
            **({} if is_greedy(temperature) else given),
        )
        for mode in modes
        for temperature in request.temperatures
    ]  # fmt: skip


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
    for flag, value in (("--top-p", request.top_p), ("--min-p", request.min_p)):
        if value is not None and not 0 < value < 1:
            raise UserError(f"{flag} is a share between 0 and 1, not {value:g}; leave it out to draw from all tokens")
    penalty = request.repetition_penalty
    if penalty is not None and (not math.isfinite(penalty) or penalty <= 0 or penalty == 1):
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
