"""One `run` command from its options to its records: check everything first, then open, run and load."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_bench import environment, methods, runner, store, suites
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
    loaded = _prompts(request)
    info, backend = _open(request, chosen, loaded)
    plan = runner.Plan(
        tuple(loaded), tuple(m.label for m in chosen), request.repeats, deterministic=request.temperature == 0
    )
    with (store.resume if resume else store.create)(folder, info) as run, Progress(plan, len(run.done())) as progress:
        runner.execute(plan, backend, run, progress.report)
        run.mark_finished({})
    return store.load(folder)[1]


def _methods(request: Request) -> list[methods.Method]:
    chosen = methods.chosen(list(request.methods) or ["dflash"])
    if request.block_size is None:
        return chosen
    if not any(method.label == "dflash" for method in chosen):
        raise UserError("--block-size has no effect without --method dflash")
    return [
        replace(method, num_drafts=request.block_size - 1) if method.label == "dflash" else method for method in chosen
    ]


def _prompts(request: Request) -> list[suites.Loaded]:
    if not request.suites and request.prompts is None:
        known = [*suites.known_suites(), *suites.known_groups()]
        raise UserError(f"nothing to run: give --suite ({', '.join(known)}) or --prompts FILE.jsonl")
    if request.data is not None and not request.suites:
        raise UserError("--data has no effect without --suite")
    if request.seed is not None and request.temperature == 0:
        raise UserError(
            "--seed has no effect at temperature 0; it seeds sampling (prompts are drawn by the suite's own seed)"
        )
    from dflash_bench.models.loading import preset

    data = request.data or preset(request.model).data
    loaded = [suites.load(suite, data, request.limit) for suite in suites.expand(request.suites)]
    if request.prompts is not None:
        loaded.append(suites.load_prompts_file(request.prompts, request.limit))
    return loaded


def _open(
    request: Request, chosen: list[methods.Method], loaded: list[suites.Loaded]
) -> tuple[dict[str, Any], runner.Backend]:
    import torch

    from dflash_bench.engine.local import open_backend
    from dflash_bench.engine.sampling import Sampling
    from dflash_bench.models import loading

    preset = loading.preset(request.model)
    device = _device(request, torch.cuda.is_available())
    dtype = request.dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, list(DTYPES))
    threads = None
    if device == "cpu":
        # Small models are faster on one thread, and two busy threads spin against each other.
        threads = request.threads or 1
        torch.set_num_threads(threads)
    drafts = list(dict.fromkeys(method.name for method in chosen if method.name != "ar"))
    models = loading.load(request.model, drafts, device, getattr(torch, dtype))
    max_new_tokens = request.max_new_tokens or preset.max_new_tokens
    backend = open_backend(models, preset, chosen, max_new_tokens, Sampling(request.temperature, request.seed or 0))
    identity = {
        "schema_version": SCHEMA_VERSION,
        "methods": {m.label: {"name": m.name, "num_drafts": backend.drafters[m.label].num_drafts} for m in chosen},
        "model": request.model,
        "revisions": models.revisions,
        "suites": {
            s.suite.name: {
                "version": s.suite.version,
                "source": s.source,
                "sha256": s.sha256,
                "prompts": len(s.prompts),
            }
            for s in loaded
        },
        "max_new_tokens": max_new_tokens,
        "temperature": request.temperature,
        "seed": request.seed or 0,
        "repeats": request.repeats,
        "thinking": False,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "attention": models.target.config._attn_implementation,
    }
    info = {
        "identity": identity,
        "options": json_able(asdict(request)),
        "environment": environment.describe(),
        "command": shlex.join(["dflash-bench", *sys.argv[1:]]),
        "started": _now(),
    }
    return info, backend


def _device(request: Request, has_cuda: bool) -> str:
    device = request.device or ("cuda" if has_cuda and request.model != "nano" else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    if kind == "cuda" and not has_cuda:
        raise UserError("no CUDA device here; use --device cpu")
    if kind == "cuda" and request.threads is not None:
        raise UserError("--threads has no effect on a GPU")
    return device


def json_able(options: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
