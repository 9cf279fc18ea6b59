"""`--launch`: start servers for methods and models, and stop them with the run."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

from dflash_bench.core.dialects import GGUF, LaunchSpec, Program
from dflash_bench.core.draft_kinds import FAMILY
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import METHODS, SYNTHETIC, Method, parse
from dflash_bench.core.secrets import Arguments
from dflash_bench.models import formats, gguf, memory, mtp_heads, presets, targets
from dflash_bench.models.configs import optional
from dflash_bench.models.convert import convert
from dflash_bench.models.formats.base import DraftConfig
from dflash_bench.models.hub import read_config
from dflash_bench.models.loading import free_bytes
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan
from dflash_bench.runner.setup import device_and_dtype
from dflash_bench.servers import launch as servers_launch
from dflash_bench.servers.address import Address
from dflash_bench.servers.launch import LaunchedServers, ServerFlags

PROMPT_TOKENS = 4096
"""Tokens reserved for a prompt, unless --context is longer."""
RATE_DIGITS = 6
GPU_SHARE = 0.9
"""The share of a GPU's memory for all servers and the target here, in equal parts."""


def check(request: RunRequest, methods: Sequence[Method]) -> None:
    """Raise UserError for a missing program, and for methods by which it cannot draft."""
    assert request.launch is not None
    program = servers_launch.program_named(request.launch)
    servers_launch.executable(program, request.launch_with)
    for method in methods[1:]:
        if (why := program.lacks.get(method.name)) is not None:
            raise UserError(f"--launch {program.name} cannot draft by {method.label}: {why}")
        if not can_draft(program, method):
            known = "; ".join(f"{name} ({', '.join(options)})" for name, options in program.methods.items())
            raise UserError(
                f"--launch {program.name} cannot draft by {method.label}; it can by these, with these options: {known}"
            )
        imposed(program, method)


def can_draft(program: Program, method: Method) -> bool:
    """Return whether a program knows the method, and all of its options."""
    told = program.methods.get(method.name)
    return told is not None and all(
        f"{name}={value}" in told or (name in told and value != "auto") for name, value in method.options.items()
    )


def imposed(program: Program, method: Method) -> tuple[Method | None, tuple[float, ...]]:
    """Return the method whose draft a server uses, and the imposed acceptance rates, as in `LaunchSpec`.

    None, and no rates, for a method that the target verifies.
    """
    if method.name != SYNTHETIC:
        return None, ()
    from dflash_bench.engine.drafters.synthetic import rates_of

    known = [name for name in program.methods if METHODS[name].weights and METHODS[name].count]
    base = parse(str(method.option("base") or BASELINE))
    if base.name not in known or base.options:
        raise UserError(
            f"--launch {program.name}: {method.label} needs the method whose draft drafts, without options, such as "
            f"base=dflash; it can be {', '.join(known)}"
        )
    rates, count = rates_of(method), str(base.kind.count)
    _refuse_more(method, len(rates), base.kind.option(count).high)
    # Servers require rates that never rise; rounded products of numbers up to 1 do not.
    shares = (round(share, RATE_DIGITS) for share in accumulate(rates, mul))
    return base.with_option(count, len(rates)), tuple(shares)


def _refuse_more(method: Method, num_rates: int, most: float | None) -> None:
    if most is not None and num_rates > most:
        raise UserError(
            f"--launch: {method.label} has rates for {num_rates} tokens, and its base drafts {most:g} at most; leave "
            "some out, as in rates=0.9/0.8, or name another base"
        )


def computes(program: Program, spec: LaunchSpec) -> bool:
    """Return whether a program computes drafts of this kind; drafts outside the DFlash family have no kind."""
    return spec.kind not in FAMILY.values() or spec.kind in program.kinds


def server_flags(request: RunRequest, model: Preset, method: Method) -> tuple[ServerFlags, ...]:
    """Return the flags for this method, per program: only the program to launch, or all that support the method."""
    programs = servers_launch.programs() if request.launch is None else [servers_launch.program_named(request.launch)]
    able = [program for program in programs if can_draft(program, method)]
    if not able:
        return ()
    home = model.target if gguf.is_file(model.target) else str(targets.find_target(model.target))
    plain = LaunchSpec(parse(BASELINE), request.name, home, None, None, 1, 1, "auto", GPU_SHARE)
    config = reference = None
    if method.draft is not None and method.name != presets.MTP:
        reference = _without_revision(model.reference(method.draft))
        config = _draft_config(targets.find_draft(model.reference(method.draft)), home)
        plain = replace(plain, kind=getattr(config, "kind", ""), shifted=getattr(config, "shifted_labels", False))
    found = []
    for program in able:
        if computes(program, plain) and _refused_target(program, method, home) is None:
            drafting = replace(plain, method=method, num_drafts=_num_drafts(method, model, config))
            found.append(servers_launch.flags_of(program, plain, drafting, reference, request.name))
    return tuple(found)


def _without_revision(reference: str) -> str:
    return reference if os.path.isdir(reference) else reference.partition("@")[0]


def launch(
    resolved: RunPlan, folder: Path, stack: ExitStack, tell: Callable[[str], object]
) -> tuple[LaunchedServers, list[Address]]:
    """Start all servers and wait until they are ready; logs are first written beside `folder`. Raises UserError."""
    request = resolved.request
    assert request.launch is not None
    program = servers_launch.program_named(request.launch)
    specs = launch_specs(program, resolved, tell)
    path = servers_launch.executable(program, request.launch_with)
    beside = folder.absolute().with_name(f"{folder.absolute().name}.servers")
    launched = stack.enter_context(LaunchedServers(program, path, request.launch_args or Arguments(()), beside))
    return launched, launched.start(specs)


def with_dtype(resolved: RunPlan) -> RunPlan:
    """Set the same dtype for the servers and the target in this process, whatever their devices."""
    import torch

    request = resolved.request
    on_gpus = torch.cuda.device_count() > 0 and not request.is_small
    return replace(resolved, request=replace(request, dtype=request.dtype or ("bfloat16" if on_gpus else "float32")))


def launch_specs(program: Program, resolved: RunPlan, tell: Callable[[str], object]) -> list[LaunchSpec]:
    import torch

    request, model = resolved.request, resolved.model
    home = model.target if gguf.is_file(model.target) else str(targets.find_target(model.target))
    drafts = {name: targets.find_draft(model.drafts[name]) for name in resolved.drafts if name in model.drafts}
    num_gpus = torch.cuda.device_count()
    device, dtype = device_and_dtype(request, num_gpus)
    if dtype not in program.dtypes:
        raise UserError(
            f"--launch {program.name} does not compute in {dtype}; give --dtype {' or '.join(program.dtypes)}"
        )
    # The target here shares the servers' memory unless it is on the CPU and they are on GPUs.
    num_copies = len(resolved.methods) + (0 if num_gpus and device == "cpu" else 1)
    _refuse_too_little(home, num_copies, list(drafts.values()), num_gpus)
    plain = LaunchSpec(
        resolved.methods[0],
        request.name.rpartition("/")[2],
        home,
        None,
        None,
        _length(resolved, home),
        max(request.concurrency, default=1),
        dtype,
        GPU_SHARE / num_copies,
        request.trust_remote_code,
    )
    if program.wants_gguf:
        plain = replace(plain, target=str(_converted(home, None, GGUF, tell)))
    specs = [plain]
    for method in resolved.methods[1:]:
        if (refused := _refused_target(program, method, home)) is not None:
            raise UserError(refused)
        base, rates = imposed(program, method)
        drafter, own = base or method, replace(plain, method=method, base=base, rates=rates)
        if method.draft is None:
            specs.append(replace(own, num_drafts=_num_drafts(drafter, model, None)))
            continue
        if drafter.name == presets.MTP:
            _require_own_heads(home, method.draft in drafts)
            specs.append(replace(own, num_drafts=_num_drafts(drafter, model, None), kind="MTP"))
            continue
        draft = drafts[method.draft]
        config = _draft_config(draft, home)
        if isinstance(config, DFlashConfig):
            _refuse_more(method, len(rates), config.num_drafts(config.block_size))
        drafting = replace(
            own,
            num_drafts=_num_drafts(drafter, model, config),
            kind=getattr(config, "kind", ""),
            shifted=getattr(config, "shifted_labels", False),
        )
        if not computes(program, drafting):
            raise UserError(
                f"--launch {program.name} cannot draft by {method.label}, a {drafting.kind} draft; of its family it "
                f"computes {', '.join(program.kinds)}"
            )
        weights = draft
        if program.draft_format is not None:
            weights = _converted(str(draft), home, program.draft_format, tell)
        specs.append(replace(drafting, draft=str(weights)))
    return specs


def _refused_target(program: Program, method: Method, home: str) -> str | None:
    """Return why the program does not draft by this method for the target; None if it does."""
    known = program.targets.get(method.name)
    if known is None or gguf.is_file(home):
        return None
    names = read_config(Path(home)).get("architectures") or ()
    if {*names} & {*known}:
        return None
    return (
        f"--launch {program.name} supports {method.label} for {', '.join(known)} only, not for "
        f"{', '.join(names) or 'a target without architectures in config.json'}; leave the method out, or use another "
        "program"
    )


def _require_own_heads(home: str, are_apart: bool) -> None:
    """Raise UserError unless the heads are one module in the target's own checkpoint, where servers look for them."""
    if are_apart:
        raise UserError(
            "--launch: a server drafts by MTP with the heads of its target's own checkpoint, and these are apart; give "
            "a target that holds them, without --draft mtp="
        )
    if mtp_heads.read(Path(home), headers_only=True)[0].num_layers > 1:
        raise UserError(
            "--launch cannot draft with several MTP modules: vLLM steps the first alone, and SGLang needs options of "
            "its own for them; start the server yourself, and give it as --server"
        )


def _draft_config(draft: Path, home: str) -> DraftConfig:
    shape = None if gguf.is_file(home) else targets.shape_of(Path(home))
    return formats.read_checkpoint(draft, shape, headers_only=True)[1].config


def _num_drafts(method: Method, model: Preset, config: DraftConfig | None) -> int:
    """Return the number of drafted tokens that our engine would use."""
    counts = model.num_drafts or {}
    known = method if method.tag else method.with_count(counts.get(method.name))
    return memory.round_of(known, config)[0]


def _length(resolved: RunPlan, home: str) -> int:
    wanted = resolved.max_new_tokens + max([PROMPT_TOKENS, *(context or 0 for context in resolved.request.context)])
    known = None if gguf.is_file(home) else targets.config_of(Path(home), resolved.request.trust_remote_code)
    return min(wanted, int(optional(known, "max_position_embeddings", default=wanted)))


def _refuse_too_little(home: str, num_copies: int, drafts: Sequence[Path], num_gpus: int) -> None:
    """Check memory for all servers at once, and for the target here, which judges them."""
    needed = memory.servers_bytes(Path(home), num_copies, drafts)
    free = free_bytes("cuda" if num_gpus else "cpu", num_gpus > 0)
    if free is not None and needed > free:
        raise UserError(
            f"--launch: all servers run at once, and the target here judges them: that is {num_copies} times the "
            f"target's weights and {needed / 1e9:.1f} GB with the drafts, and {free / 1e9:.1f} GB are free; measure "
            "fewer methods per run, or start servers on other machines and give --server"
        )


def _converted(weights: str, home: str | None, form: str, tell: Callable[[str], object]) -> Path:
    """Convert weights to a format of `convert --to` in the cache, under a name that changes with the weights."""
    is_gguf = form == GGUF
    if is_gguf and gguf.is_file(weights):
        return Path(weights)
    if home is not None and gguf.is_file(home):
        raise UserError("--launch: a draft is converted with its target's folder; give that, not a GGUF file")
    stamps = [
        f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
        for folder in (weights, home or weights)
        for file in sorted(Path(folder).iterdir())
        if file.is_file()
    ]
    digest = hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:12]
    cached = presets.cache_folder() / form / f"{Path(weights).name}-{digest}{'.gguf' if is_gguf else ''}"
    if not cached.exists():
        tell(f"note: {weights} is written in the format {form}, once: {cached}")
        cached.parent.mkdir(parents=True, exist_ok=True)
        begun = cached.with_name(f"{os.getpid()}-{cached.name}")
        try:
            convert(weights, begun, form, home)
            os.replace(begun, cached)
        finally:
            begun.unlink(missing_ok=True) if is_gguf else shutil.rmtree(begun, ignore_errors=True)
    return cached
