"""What is found out before any weights are loaded: how prompts are padded, how long rows become, and do they fit?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dflash_bench import environment
from dflash_bench.errors import UserError
from dflash_bench.models import hub
from dflash_bench.records import Message
from dflash_bench.run import contexts
from dflash_bench.run.contexts import Contexts
from dflash_bench.run.opening import device_and_dtype, wanted_of
from dflash_bench.run.resolving import Resolved, modes_of
from dflash_bench.tasks.suites import chats


@dataclass(frozen=True, slots=True)
class Prepared:
    contexts: Contexts
    memory: dict[str, int | None] | None
    """As `run.json` holds it; None where nothing is loaded."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """Of target and drafts that come from the hub, what their ids meant when they were fetched: ID@COMMIT."""

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, of target and drafts."""
        held = self.memory or {}
        return sum(held.get(name) or 0 for name in ("target_cache_bytes", "draft_cache_bytes"))

    def pinned(self, resolved: Resolved) -> Resolved:
        """With these commits for ids: what is loaded is what was looked at, whatever the hub does in between. And with
        what the caches will take, beside which the judge's own weights must fit."""
        model, commits = resolved.model, self.commits
        drafts = {name: commits.get(name, reference) for name, reference in model.drafts.items()}
        found = replace(model, target=commits.get("target", model.target), drafts=drafts)
        return replace(resolved, model=found, cache_bytes=self.cache_bytes)

    def unpinned(self, resolved: Resolved) -> list[str]:
        """The parts whose ids named no commit."""
        return [part for part in self.commits if not hub.is_pinned(_reference(resolved, part))]


def _reference(resolved: Resolved, part: str) -> str:
    return resolved.model.target if part == "target" else resolved.model.drafts[part]


def prepare(resolved: Resolved) -> Prepared:
    """Checkpoints are fetched, and their tokenizer, configs and headers read. Raises UserError as loading them would,
    for a context that the target has not, and for too little memory."""
    import torch

    from dflash_bench.models import chat, gguf, language, memory, networks, targets
    from dflash_bench.models.language import Placement

    wanted, elsewhere = wanted_of(resolved.request), resolved.request.ray_address is not None
    device, dtype = device_and_dtype(wanted, 1 if elsewhere else torch.cuda.device_count())
    model, trusted = resolved.model, wanted.trust_remote_code
    fetched = {name: networks.fetch(name, model.drafts[name]) for name in resolved.drafts}
    drafts = {name: draft.folder for name, draft in fetched.items()}
    place = str(gguf.converted(Path(model.target))) if gguf.is_file(model.target) else model.target
    target = hub.fetch(place, code=trusted)
    folder, of_hub = target.folder, {"target": target, **fetched}
    commits = {part: one.revision for part, one in of_hub.items() if "@" in one.revision}
    spread = wanted.device_map is not None
    config = language.check(folder, Placement(spread=spread, trust_remote_code=trusted, quantize=wanted.quantize))
    tokenizer = targets.tokenizer_of(folder, trusted)
    modes = [bool(mode) for mode in modes_of(resolved.request, model, chat.has_thinking(tokenizer))]
    for mode in modes:
        chat.check(tokenizer, [asked for loaded in resolved.suites for asked in chats(loaded)], mode)

    def size(messages: Sequence[Message]) -> int:
        return max(len(chat.encoded(tokenizer, messages, mode)) for mode in modes)

    length = getattr(config, "max_position_embeddings", None) or 2**31
    padded = contexts.padded(resolved.suites, resolved.request.context, size, length, resolved.max_new_tokens)
    counts = model.num_drafts or {}
    methods = [one if one.tag else one.with_count(counts.get(one.name)) for one in resolved.methods]
    kind = None if dtype == "auto" else getattr(torch, dtype)
    demand = memory.demand_of(folder, drafts, methods, kind, trusted, wanted.quantize)
    demand = replace(demand, rows=max(resolved.request.concurrency, default=1))
    # How much is free on the machines of a cluster is not known here.
    free = None if elsewhere else _free_bytes(device, spread)
    if free is not None and device == "cpu":
        free //= resolved.request.workers or 1
        if wanted.packs:
            demand = demand.packed(free)
    held = demand.held(padded.longest)
    with_drafts, without = (
        None if free is None else max(0, min(one.longest_within(free), length) - padded.rest)
        for one in (demand, demand.without_drafts())
    )
    # A GPU is only given quantised weights; the processor holds them as they were before.
    if free is not None and device == "cpu" and demand.target.loading_bytes > free:
        raise _too_little(demand.target.loading_bytes, free, device, 0, 0)
    if free is not None and held.total > free:
        where = f"{device} at concurrency {demand.rows}" if demand.rows > 1 else device
        where += " for each worker" if (resolved.request.workers or 1) > 1 else ""
        rows = demand.most_rows_within(free, padded.longest) if demand.rows > 1 else 0
        raise _too_little(held.total, free, where, with_drafts or 0, without or 0, rows)
    found = {"free_bytes": free, "largest_context": with_drafts, "largest_context_without_drafts": without}
    return Prepared(padded, asdict(held) | found, commits)


def _free_bytes(device: str, spread: bool) -> int | None:
    import torch

    if device == "cpu":
        return environment.free_bytes()
    return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in (range(torch.cuda.device_count()) if spread else [device]))


def _too_little(needed: int, free: int, where: str, largest: int, without: int, rows: int = 0) -> UserError:
    words = f"weights and caches need {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on {where}"
    if rows > 0:
        words += f"; --concurrency {rows} fits"
    if largest > 0:
        return UserError(f"{words}; the largest context that fits is {largest} tokens, and {without} without drafts")
    if without > 0:
        return UserError(f"{words}; without drafts a context of {without} tokens fits")
    return UserError(f"{words}, too few for the weights alone; use a smaller model or --dtype, or another --device")
