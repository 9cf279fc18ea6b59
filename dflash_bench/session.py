"""One `run` command from its options to its records: check everything first, then load, open and run."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_bench import environment, methods, runner, sandbox, scoring, store, suites
from dflash_bench.errors import UserError, unknown
from dflash_bench.progress import Progress
from dflash_bench.records import SCHEMA_VERSION, Record

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `run` as the user gave them; None is "not given"."""

    suites: tuple[str, ...]
    methods: tuple[str, ...]
    model: str = "nano"
    data: str | None = None
    prompts: Path | None = None
    limit: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    block_size: int | None = None
    repeats: int = 1
    threads: int | None = None
    device: str | None = None
    dtype: str | None = None


def perform(request: Request, folder: Path, resume: bool) -> list[Record]:
    """Run or continue, and return all of the run's records. Raises UserError before anything is written."""
    chosen = _methods(request)
    _refuse_what_has_no_effect(request)
    # Before what is slow: a download, and the models.
    (store.check_resumable if resume else store.check_new)(folder)
    loaded = _prompts(request)
    scoring.require({each.suite.scorer for each in loaded})
    identity, backend = _open(request, chosen, loaded)
    plan = runner.Plan(
        tuple(loaded), tuple(method.label for method in chosen), request.repeats, request.temperature == 0
    )
    info = _info(request, identity) | {"sandbox": _sandbox(loaded)}
    with (store.resume if resume else store.create)(folder, info) as run:
        with Progress(plan.num_generations, len(run.stored)) as progress:
            runner.execute(plan, backend, run, progress.report)
        run.mark_finished({})
        return list(run.stored.values())


def _methods(request: Request) -> list[methods.Method]:
    chosen = methods.chosen(list(request.methods) or ["dflash"])
    if request.block_size is None:
        return chosen
    if not any(method.label == "dflash" for method in chosen):
        raise UserError("--block-size has no effect without --method dflash")
    return [
        replace(method, num_drafts=request.block_size - 1) if method.label == "dflash" else method for method in chosen
    ]


def _refuse_what_has_no_effect(request: Request) -> None:
    if not request.suites and request.prompts is None:
        known = [*suites.known_suites(), *suites.known_groups()]
        raise UserError(f"nothing to run: give --suite ({', '.join(known)}) or --prompts FILE.jsonl")
    if request.data is not None and not request.suites:
        raise UserError("--data has no effect without --suite")
    if not math.isfinite(request.temperature):
        raise UserError(f"--temperature must be a number from 0 up, not {request.temperature}")
    if request.seed is not None and request.temperature == 0:
        raise UserError(
            "--seed has no effect at temperature 0; it seeds sampling (prompts are drawn by the suite's own seed)"
        )


def _prompts(request: Request) -> list[suites.Loaded]:
    known = suites.expand(request.suites)
    # `datasets` reads this when it is imported; its bars would tear ours.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from dflash_bench.models.loading import preset

    model = preset(request.model)
    loaded = [suites.load(suite, request.data or model.data, request.limit) for suite in known]
    if request.prompts is not None:
        loaded.append(suites.load_prompts_file(request.prompts, request.limit))
    return loaded


def _open(
    request: Request, chosen: Sequence[methods.Method], loaded: Sequence[suites.Loaded]
) -> tuple[dict[str, Any], runner.Backend]:
    """The backend, and what decides its answers: a run is continued only under the same."""
    # Read when torch is imported: waiting threads that spin take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from dflash_bench.engine.local import open_backend
    from dflash_bench.engine.sampling import Sampling
    from dflash_bench.models import loading

    preset = loading.preset(request.model)
    device, dtype = _device_and_dtype(request, torch.cuda.is_available())
    # Small models are faster on one thread, and two busy threads spin against each other.
    threads = (request.threads or 1) if device == "cpu" else None
    if threads is not None:
        torch.set_num_threads(threads)
    _silence_transformers()
    drafts = list(dict.fromkeys(method.draft for method in chosen if method.name != "ar"))
    models = loading.load(request.model, drafts, device, getattr(torch, dtype))
    max_new_tokens, seed = request.max_new_tokens or preset.max_new_tokens, request.seed or 0
    backend = open_backend(models, preset, chosen, max_new_tokens, Sampling(request.temperature, seed))
    identity = {
        "schema_version": SCHEMA_VERSION,
        "methods": {m.label: {"name": m.name, "num_drafts": backend.drafters[m.label].num_drafts} for m in chosen},
        "model": request.model,
        "revisions": models.revisions,
        "suites": {each.suite.name: _identity(each) for each in loaded},
        "max_new_tokens": max_new_tokens,
        "temperature": request.temperature,
        "seed": seed,
        "repeats": request.repeats,
        "thinking": False,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "attention": models.target.config._attn_implementation,
    }
    return identity, backend


def _identity(loaded: suites.Loaded) -> dict[str, Any]:
    suite = loaded.suite
    return {
        "version": suite.version,
        "source": loaded.source,
        "sha256": loaded.sha256,
        "prompts": len(loaded.prompts),
        "scorer": suite.scorer,
    }


def _sandbox(loaded: Sequence[suites.Loaded]) -> str | None:
    """What held the code that the model wrote."""
    return sandbox.isolation() if scoring.CODE_SCORERS & {each.suite.scorer for each in loaded} else None


def _silence_transformers() -> None:
    """Its bars and advice would tear our progress display; what fails is raised in any case."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _device_and_dtype(request: Request, has_cuda: bool) -> tuple[str, str]:
    device = request.device or ("cuda" if has_cuda and request.model != "nano" else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    if kind == "cuda" and not has_cuda:
        raise UserError("no CUDA device here; use --device cpu")
    if kind == "cuda" and request.threads is not None:
        raise UserError("--threads has no effect on a GPU")
    dtype = request.dtype or ("float32" if kind == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, list(DTYPES))
    return device, dtype


def _info(request: Request, identity: dict[str, Any]) -> dict[str, Any]:
    """What `run.json` holds."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(request).items()}
    return {
        "identity": identity,
        "options": options,
        "environment": environment.describe(),
        "command": shlex.join(["dflash-bench", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
