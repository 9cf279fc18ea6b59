"""Prepare the machine for a run: check devices, dtypes and memory, and open the backend."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_bench.core import environment
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import Method, shown
from dflash_bench.core.types import Message
from dflash_bench.models import hub, quantization
from dflash_bench.models.configs import optional
from dflash_bench.models.presets import Preset
from dflash_bench.results.identity import full_names
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan, drafts_of, modes_of, refuse_too_few
from dflash_bench.runner.work import Backend, JudgeReport
from dflash_bench.tasks import padding
from dflash_bench.tasks.padding import Contexts
from dflash_bench.tasks.suites import Loaded, chats, without

if TYPE_CHECKING:
    import torch

    from dflash_bench.engine.backend import LocalBackend
    from dflash_bench.engine.judge_weights import ChatJudge
    from dflash_bench.models.targets import Placement
    from dflash_bench.servers.address import Address
    from dflash_bench.servers.backend import ServerBackend

# From the plan of a run to a backend: choose the device and dtype, and load the weights.


def open_local(resolved: RunPlan, begins: Callable[[str], object] = lambda _: None) -> LocalBackend:
    """Open the engine of this process with the models of a run, and load the weights of its judge.

    `begins` is called before the judge is loaded. Raises UserError as `open_engine` does.
    """
    backend = open_engine(
        resolved.model, resolved.methods, resolved.request, resolved.max_new_tokens, resolved.cache_bytes, may_free=True
    )
    begins("loading the judge")
    backend.chat_judge.read()
    return backend


def open_servers(resolved: RunPlan, addresses: Sequence[Address]) -> ServerBackend:
    """Connect to servers. Raises UserError for a server that cannot be measured."""
    from dflash_bench.runner.served import access_of
    from dflash_bench.servers.backend import ServerBackend

    request = resolved.request
    backend = ServerBackend(
        addresses,
        access_of(request),
        resolved.max_new_tokens,
        request.seed or 0,
        dialect=request.dialect,
        model=request.served_model,
        num_clients=request.clients,
        ray_address=request.ray_address,
    )
    backend.asks_to_think = request.thinking is not None
    for one in resolved.instruments.values():
        one.connected(backend)
    return backend


def add_judge(backend: ServerBackend, resolved: RunPlan) -> None:
    """Load the same target in this process, to tokenize prompts and judge answers."""
    attach(backend, open_local(resolved.judging))


def attach(backend: ServerBackend, local: LocalBackend) -> None:
    """Let `local` tokenize prompts from now on, and its judge read the answers."""
    about = local.describe()
    judge = {**about["judge"], "device": about.get("device")}
    backend.local, backend.vocabulary = local, len(local.target.model.get_input_embeddings().weight)
    backend.about = {"target": about["target"], "revisions": about["revisions"], "judge": judge}


def kernels_note(resolved: RunPlan) -> str | None:
    """Return a note if opening the engine will compile kernels; whether they cover the target is not checked."""
    from dflash_bench.engine.forward.choice import compile_note

    request = resolved.request
    uses_numba = request.kernels != "torch" and not request.is_published_code
    return compile_note() if uses_numba and configure_torch(request)[0] == "cpu" else None


def gpu_note(request: RunRequest) -> str | None:
    """Return a note if others use the GPU, or if the CPU computes by default, because torch cannot use the GPUs."""
    import torch

    from dflash_bench.models.loading import no_gpu

    device, _ = device_and_dtype(request, torch.cuda.device_count())
    if taken := _taken(device, request.device_map is not None):
        return f"others hold {taken} of {device}: whatever they compute disturbs all times"
    if request.device is not None or request.is_small or device != "cpu" or not environment.gpus():
        return None
    return f"{no_gpu()}; the CPU computes this run"


def model_note(request: RunRequest) -> str | None:
    """Return a note if a user's own prompts are measured on nano, which nobody serves, because no model is named."""
    if request.prompts is None or request.has_target or request.asks_servers:
        return None
    return (
        "no model is named, so these prompts are measured on nano, a small model that comes with dflash-bench; this "
        "says nothing about your model: name it with --model or --target"
    )


def fallen_back(about: Mapping[str, Any]) -> list[str]:
    """Return notes if the engine's own forward pass, its compiled kernels, or a GPU's fast paths could not be used."""
    paths: Mapping[str, Mapping[str, str | None]] = about.get("paths") or {}
    notes = [
        f"{part} on the GPU: {path['used']} ({path['why_slow']})" for part, path in paths.items() if path["why_slow"]
    ]
    if reason := about.get("fallback"):
        notes.append(f"the target is computed by transformers' code, because the engine's own {reason}")
    if reason := about.get("why_torch"):
        notes.append(f"torch computes the target, because numba's kernels cannot: {reason}")
    return notes


def judge_report(backend: Backend) -> JudgeReport:
    """Return the final report of a backend's judge, beyond verdicts on answers."""
    chat_judge = _chat_judge_of(backend)
    return JudgeReport() if chat_judge is None else JudgeReport(chat_judge.changed(), dict(chat_judge.objections))


def _chat_judge_of(backend: Backend) -> ChatJudge | None:
    from dflash_bench.engine.backend import LocalBackend
    from dflash_bench.servers.backend import ServerBackend

    local = backend.local if isinstance(backend, ServerBackend) else backend
    return local.chat_judge if isinstance(local, LocalBackend) else None


LATE_S = 0.01


def late(backend: Backend) -> list[str]:
    """Return notes on cells in which this process, not the server, was late."""
    from dflash_bench.servers.backend import ServerBackend

    lags = backend.lags if isinstance(backend, ServerBackend) else {}
    named = full_names(list(dict.fromkeys(settings for _, settings in lags)))
    return [
        f"{shown(method)}, {named[settings]}: this machine noticed arrivals up to {1000 * lag_s:.0f} ms late, so its "
        "times are partly the client's; give more --clients, or lower --concurrency or --rate"
        for (method, settings), lag_s in lags.items()
        if lag_s > LATE_S
    ]


def open_engine(
    model: Preset,
    methods: Sequence[Method],
    request: RunRequest,
    max_new_tokens: int,
    cache_bytes: int = 0,
    may_free: bool = False,
) -> LocalBackend:
    """Open the engine of this process with these models, for runs, workers and diagnoses alike.

    `cache_bytes` is the size of the caches; the judge gets separate weights if these fit beside them. With `may_free`
    the models drop weights that the engine holds in another layout (`selection.target_of`). Raises UserError for an
    unavailable device, dtype or model.
    """
    device, dtype, threads = configure_torch(request)
    import torch

    from dflash_bench.engine.backend import open_backend
    from dflash_bench.models.loading import load

    kind = "auto" if dtype == "auto" else getattr(torch, dtype)
    models = load(model, drafts_of(methods), device, kind, placement_of(request))
    if (num_workers := request.workers or 1) > 1 and device == "cpu":
        models = models.sharing_memory(num_workers)
    where = {"device": device, "device_map": request.device_map, "threads": threads, "quantize": request.quantize}
    where |= {"tensor_parallel": request.tensor_parallel} if request.tensor_parallel > 1 else {}
    return open_backend(
        models,
        model,
        methods,
        max_new_tokens,
        request.seed or 0,
        where,
        request.engine,
        request.capture,
        cache_bytes,
        request.kernels,
        may_free,
    )


def placement_of(request: RunRequest) -> Placement:
    from dflash_bench.models.targets import Placement

    return Placement(
        spread=request.device_map is not None,
        attention=request.attention,
        trust_remote_code=request.trust_remote_code,
        quantize=request.quantize,
        date=request.date or date.today().isoformat(),
        parallel=request.tensor_parallel,
    )


def forwards_of(backend: Backend) -> dict[str, Any] | None:
    """Measure the cost of this backend's forward passes; None if its target is not in this process."""
    from dflash_bench.engine.backend import LocalBackend
    from dflash_bench.perf.measure import forward_curve

    return forward_curve(backend.target) if isinstance(backend, LocalBackend) else None


def pass_of(backend: Backend) -> dict[str, float]:
    """Measure the shortest pass over a single token again at the end of a run; empty if the target is elsewhere."""
    from dflash_bench.engine.backend import LocalBackend
    from dflash_bench.perf.measure import shortest_forward_s

    return {"pass_at_end_s": shortest_forward_s(backend.target)} if isinstance(backend, LocalBackend) else {}


def captured_of(backend: Backend) -> dict[str, float | int]:
    """Return the number of captured passes and the seconds it took; empty if the target is elsewhere."""
    from dflash_bench.engine.backend import LocalBackend

    return backend.captured() if isinstance(backend, LocalBackend) else {}


def configure_torch(request: RunRequest) -> tuple[str, str, int | None]:
    """Configure torch. Return the device, the dtype and the number of threads (None: a GPU)."""
    # Read when torch is imported: spinning threads take the cores from working threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from dflash_bench.models.quiet import silence_transformers

    device, dtype = device_and_dtype(request, torch.cuda.device_count())
    # Small models are faster on one thread, and two busy threads spin against each other.
    threads = (request.threads or 1) if device == "cpu" else None
    if threads is not None:
        torch.set_num_threads(threads)
    else:
        _steady_kernels()
    silence_transformers()
    return device, dtype, threads


def _steady_kernels() -> None:
    """Choose kernels that give consistent results and speed at every length, for the engine and the judge.

    On Hopper, torch prefers cuDNN's attention, which spends tens of milliseconds planning each new length. Sums rounded
    to half precision between the parts of a split product differ between one token and several.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def device_and_dtype(request: RunRequest, num_gpus: int) -> tuple[str, str]:
    """Return the device and dtype. Raises UserError for a missing device, and for options without effect."""
    device = request.device or ("cuda" if num_gpus and not request.is_small else "cpu")
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", device):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    kind, _, index = device.partition(":")
    if kind == "cuda" and not num_gpus:
        from dflash_bench.models.loading import no_gpu

        raise UserError(no_gpu(), "use --device cpu")
    if index and (len(index) > 4 or int(index) >= num_gpus):
        raise UserError(f"--device {device}: this machine has cuda:0 to cuda:{num_gpus - 1}")
    if kind == "cuda" and request.threads is not None:
        raise UserError("--threads has no effect on a GPU")
    if request.device_map is not None and kind == "cpu":
        raise UserError("--device-map has no effect on the CPU: it spreads a target over GPUs")
    if request.tensor_parallel > 1:
        _refuse_parts(request.tensor_parallel, device, num_gpus)
    if request.quantize is not None:
        quantization.check(request.quantize, device)
    return device, request.dtype or default_dtype(device)


def default_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def _refuse_parts(num: int, device: str, num_gpus: int) -> None:
    """Refuse more processes than GPUs: transformers places rank i on cuda:i."""
    if device == "cpu" and num_gpus:
        raise UserError("--tensor-parallel uses the GPUs if there are any; leave --device cpu out")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--tensor-parallel uses cuda:0 and up: give --device cuda, not {device}")
    if device == "cuda" and num_gpus < num:
        raise UserError(f"--tensor-parallel {num} needs {num} GPUs, and this machine has {num_gpus}; lower it")


# Checks before any weights are loaded: how prompts are padded, how long rows become, and whether they fit.


def reference(resolved: RunPlan, part: str) -> str:
    """Return the folder or id of the target or a draft."""
    return resolved.model.target if part == "target" else resolved.model.reference(part)


def pinned(model: Preset, commits: Mapping[str, str]) -> Preset:
    """Return the model with commits in place of ids, so that the checked weights are loaded."""
    drafts = {name: commits.get(name, reference) for name, reference in model.drafts.items()}
    return replace(model, target=commits.get("target", model.target), drafts=drafts)


def fitting(resolved: RunPlan, left_out: Mapping[str, Collection[str]]) -> tuple[Loaded, ...]:
    """Return the suites without these prompts, and without suites left empty.

    Raises UserError if fewer prompts are left than the concurrency or the shards need.
    """
    if not left_out:
        return resolved.suites
    kept = [without(loaded, left_out.get(loaded.suite.name, ())) for loaded in resolved.suites]
    kept = [loaded for loaded in kept if loaded.prompts]
    refuse_too_few(kept, resolved.request)
    return tuple(kept)


def check_fits(resolved: RunPlan) -> RunPlan:
    """Fetch checkpoints, and check tokenizer, configs, headers and memory without loading weights.

    Returns the plan with what this found. On servers, only the target that judges is checked. Raises UserError
    as loading does, for a context longer than the target's, and for too little memory.
    """
    import torch

    from dflash_bench.models import chat, loading, targets

    request, trusted = resolved.request, resolved.request.trust_remote_code
    # Before anything is fetched: this machine may lack the device, or torch may be unable to use it.
    place = device_and_dtype(request, 1 if request.ray_address is not None else torch.cuda.device_count())
    # The free memory of a cluster's machines is unknown here.
    free = None if request.ray_address is not None else loading.free_bytes(place[0], request.device_map is not None)
    loaded = resolved.judging if request.asks_servers else resolved
    fetched = {name: loading.fetch(name, resolved.model.reference(name)) for name in loaded.drafts}
    target = hub.fetch(_converted(resolved.model.target), code=trusted)
    commits = {part: one.revision for part, one in {"target": target, **fetched}.items() if "@" in one.revision}
    config = targets.check(target.folder, placement_of(request))
    tokenizer = targets.tokenizer_of(target.folder, trusted, request.date)
    if resolved.has_date and not chat.names_date(tokenizer):
        raise UserError("--date has no effect: the target's chat template asks for no date; leave it out")
    if request.shard is not None and chat.names_date(tokenizer) and not resolved.has_date:
        raise UserError(
            f"the target's chat template names the date, which all shards share: give each --date {request.date}"
        )
    modes = [bool(mode) for mode in modes_of(request, resolved.model, chat.has_thinking(tokenizer))]
    for mode in modes:
        chat.check(tokenizer, [asked for loaded in resolved.suites for asked in chats(loaded)], mode)
    length = optional(config, "max_position_embeddings", default=2**31)
    num_tokens = targets.shape_of(target.folder).vocab_size

    def size(messages: Sequence[Message]) -> int:
        return max(chat.length(tokenizer, messages, mode, length, num_tokens) for mode in modes)

    drafts = {name: draft.folder for name, draft in fetched.items()}
    padded = padding.padded(resolved.suites, request.context, size, length, resolved.max_new_tokens)
    suites = fitting(resolved, padded.left_out)
    return replace(
        resolved,
        model=pinned(resolved.model, commits),
        suites=suites,
        contexts=padded,
        memory=_memory(loaded, place, free, (target.folder, drafts), padded, length),
        unpinned=tuple(part for part in commits if not hub.is_pinned(reference(resolved, part))),
        limit=length - padded.rest,
        date=request.date if chat.names_date(tokenizer) else None,
        rendered={
            one.suite.name: {"on" if mode else "off": chat.rendered(tokenizer, chats(one), mode) for mode in modes}
            for one in suites
        },
        has_template=tokenizer.chat_template is not None,
    )


def _converted(target: str) -> str:
    """Return the folder to which a GGUF file is converted, or the target itself."""
    from dflash_bench.models import gguf

    return str(gguf.converted_folder(Path(target))) if gguf.is_file(target) else target


def _memory(
    resolved: RunPlan,
    place: tuple[str, str],
    free: int | None,
    folders: tuple[Path, Mapping[str, Path]],
    padded: Contexts,
    length: int,
) -> dict[str, int | None]:
    """Return the memory as in `run.json`. Raises UserError if there is too little.

    `place` is device and dtype, with `free` bytes; `folders` are the target's and the drafts'; `length` is the
    target's context.
    """
    import torch

    from dflash_bench.models import memory, targets

    request, (device, dtype), (target, drafts) = resolved.request, place, folders
    counts = resolved.model.num_drafts or {}
    methods = [one if one.tag else one.with_count(counts.get(one.name)) for one in resolved.methods]
    kind = None if dtype == "auto" else getattr(torch, dtype)
    in_kernels = _expects_kernels(request, device, targets.check(target, placement_of(request)), kind)
    demand = memory.demand_of(target, drafts, methods, kind, request.trust_remote_code, request.quantize, in_kernels)
    demand = replace(demand, rows=max(request.concurrency, default=1))
    if request.tensor_parallel > 1:
        stored = kind or targets.check(target, placement_of(request)).dtype
        demand = replace(demand, target=memory.sharded(demand.target, request.tensor_parallel, stored, target))
    if free is not None and device == "cpu":
        free //= (request.workers or 1) * request.tensor_parallel
    footprint = demand.held(padded.longest)
    with_drafts, alone = (
        None if free is None else max(0, min(one.longest_within(free), length) - padded.rest)
        for one in (demand, demand.without_drafts())
    )
    # A GPU only receives quantised weights; on a CPU the original weights are held, too.
    if free is not None and device == "cpu" and demand.target.loading_bytes > free:
        raise _too_little(demand.target.loading_bytes, free, device, 0, 0)
    if free is not None and footprint.total > free:
        where = f"{device} at concurrency {demand.rows}" if demand.rows > 1 else device
        where += " for each worker" if (request.workers or 1) > 1 else ""
        taken = _taken(device, request.device_map is not None)
        where += f", where others hold {taken}" if taken else ""
        rows = demand.most_rows_within(free, padded.longest) if demand.rows > 1 else 0

        def needed(dtype: torch.dtype | None, quantize: str | None) -> int:
            lighter = memory.demand_of(target, drafts, methods, dtype, request.trust_remote_code, quantize)
            return replace(lighter, rows=demand.rows).held(padded.longest).total

        lighter = ""
        if device != "cpu" and request.quantize is None:
            options = {"--dtype bfloat16": (torch.bfloat16, None), "--quantize int8": (kind, "int8")}
            lighter = next((option for option, how in options.items() if needed(*how) <= free), "")
        raise _too_little(footprint.total, free, where, with_drafts or 0, alone or 0, rows, lighter)
    found = {"free_bytes": free, "largest_context": with_drafts, "largest_context_without_drafts": alone}
    return asdict(footprint) | found


def _expects_kernels(request: RunRequest, device: str, config: Any, dtype: torch.dtype | None) -> bool:
    """Return whether numba's kernels will compute this target, as `engine/selection.py` chooses."""
    from dflash_bench.engine.forward.choice import expects_kernels

    others = request.is_published_code or request.kernels == "torch"
    return device == "cpu" and not others and expects_kernels(config, dtype or config.dtype)


def _taken(device: str, spread: bool) -> str:
    """Return how much memory of a GPU other processes hold; empty if it is little, or the CPU's."""
    import torch

    gpus = () if device == "cpu" else range(torch.cuda.device_count()) if spread else [device]
    sizes = [torch.cuda.mem_get_info(gpu) for gpu in gpus]
    own, whole = sum(map(torch.cuda.memory_reserved, gpus)), sum(size for _, size in sizes)
    taken = whole - own - sum(free for free, _ in sizes)
    # A context alone takes half a gigabyte.
    return f"{taken / 1e9:.2f} of {whole / 1e9:.2f} GB" if taken > max(1e9, whole / 10) else ""


def _too_little(
    needed: int, free: int, where: str, largest: int, without: int, rows: int = 0, lighter: str = ""
) -> UserError:
    """Return the refusal with what would fit: contexts with drafts and without, rows, or an option (`lighter`)."""
    words = f"weights and caches need {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on {where}"
    if largest <= 0 and without <= 0:
        words += ", too few for the weights alone"
    if rows > 0:
        words += f"; --concurrency {rows} fits"
    if lighter:
        words += f"; {lighter} fits"
    if largest > 0:
        return UserError(f"{words}; the largest context that fits is {largest} tokens, and {without} without drafts")
    if without > 0:
        return UserError(f"{words}; without drafts a context of {without} tokens fits")
    return UserError(f"{words}; {'or ' if lighter else ''}use a smaller model or --dtype, or another --device")
