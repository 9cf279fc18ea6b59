"""What a training starts from: the target, its prompts, what these share with test suites, and room for the states."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.engine.backend import stop_ids
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, presets
from dflash_bench.models.loading import Models
from dflash_bench.training import contamination, drafts, prompts
from dflash_bench.training.answers import AnswerPlan, AnswerRequest, Computed
from dflash_bench.training.config import TrainRequest
from dflash_bench.training.contamination import Overlap
from dflash_bench.training.distributed import Crew, assembled
from dflash_bench.training.prompts import Chat
from dflash_bench.training.trainer import claim

ROW_LENGTH = 512
MADE_UP = "made up by the target"
"""The source of such prompts."""
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class PreparedTraining:
    """What is known before the first step: the target, its prompts, and what they share with test suites."""

    request: TrainRequest
    models: Models
    target: Target
    chats: tuple[Chat, ...]
    asked: tuple[AnswerRequest, ...]
    overlaps: tuple[Overlap, ...]
    layers: tuple[int, ...]
    """The last is the target's last."""
    plan: AnswerPlan
    crew: Crew

    @property
    def stops(self) -> frozenset[int]:
        return stop_ids(self.models.target, self.models.tokenizer)

    @property
    def answers(self) -> Path:
        return self.request.out / "work" / ("tokens" if self.request.on_the_fly else "answers")

    @property
    def num_later(self) -> int:
        """Turns that follow the first ones, if all are asked."""
        return sum(len(one.later) for one in self.chats)

    @property
    def compute(self) -> Computed | None:
        """What gives states that are not stored."""
        return Computed(self.target, self.layers) if self.request.on_the_fly else None


def prepare(request: TrainRequest, tell: Tell) -> PreparedTraining:
    if request.against is not None:
        contamination.require_suites(request.against)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    tell("loading the target")
    crew, device = assembled(device_of(request.device))
    models = loading.load(presets.combine(*_named(request.target), {}), [], device, torch.bfloat16)
    target = target_of(models.target)
    found = [*prompts.given(request.prompts), *prompts.written(request.written, request.seed)]
    if crew.is_first:
        _invent(request, models, target, tell)
    crew.wait()
    found += _invented(request)
    overlaps = contamination.found([one.text for one in found], request.against)
    if "overlap" not in request.allow:
        # Nobody can take out what the target made up; the other prompts are the user's to mend.
        found, num_left_out = _without_leaks(found, overlaps)
        if num_left_out:
            tell(f"left out {num_left_out} prompts that the target made up and that stand in a test suite")
            overlaps = contamination.found([one.text for one in found], request.against)
        contamination.refuse(overlaps)
    encoded = prompts.encoded(found, models.tokenizer, ROW_LENGTH)
    asked = [AnswerRequest(ids) for _, ids in encoded]
    asked += [AnswerRequest(ids, 1.0) for _, ids in encoded[: round(request.sampled * len(encoded))]]
    layers = drafts.taps(target.config.num_hidden_layers)
    stored = () if request.on_the_fly else layers
    plan = AnswerPlan(models.revisions["target"], stored, request.max_new_tokens, request.batch_size, request.seed)
    prepared = PreparedTraining(
        request, models, target, tuple(one for one, _ in encoded), tuple(asked), tuple(overlaps), layers, plan, crew
    )
    _require_disk(prepared)
    return prepared


def device_of(wanted: str | None) -> str:
    """Raises UserError for a device that is not there."""
    count = torch.cuda.device_count()
    device = wanted or ("cuda" if count else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    if kind == "cuda" and int(index or 0) >= count:
        raise UserError("no CUDA device here; use --device cpu" if not count else f"this machine has {count} GPUs")
    return device


def _named(target: str) -> tuple[str | None, str | None]:
    """As `run` takes them: the name of a model, or a target."""
    return (target, None) if target in presets.table() else (None, target)


def _invent(request: TrainRequest, models: Models, target: Target, tell: Tell) -> None:
    """Those of an earlier start are kept: others would need other answers."""
    if not request.invented:
        return
    work = request.out / "work"
    path, names = work / "invented.json", ("invented", "openings", "batch_size", "seed")
    claim(work / "invented-by.json", {name: getattr(request, name) for name in names}, "prompts of the target's own")
    if not path.exists():
        openings = request.openings or ("",)
        stops = stop_ids(models.target, models.tokenizer)
        texts = list(
            prompts.invent(
                target, models.tokenizer, stops, request.invented, openings, request.batch_size, request.seed, tell
            )
        )
        files.write_whole(path, lambda file: file.write(json.dumps(texts).encode()))


def _invented(request: TrainRequest) -> list[Chat]:
    texts = files.json_of(request.out / "work" / "invented.json") if request.invented else []
    return [prompts.of_user(MADE_UP, text) for text in texts]


def _without_leaks(found: Sequence[Chat], overlaps: Sequence[Overlap]) -> tuple[list[Chat], int]:
    """Without the target's own prompts that stand in a suite, and how many these were."""
    shared = {text for overlap in overlaps for text in overlap.shared}
    kept = [one for one in found if one.source != MADE_UP or one.text not in shared]
    return kept, len(found) - len(kept)


def _require_disk(prepared: PreparedTraining) -> None:
    out, needed = prepared.request.out, disk_bytes(prepared) / 1e9
    room = os.statvfs(_existing(out))
    free = room.f_bavail * room.f_frsize / 1e9
    takes = f"the target's states on {len(prepared.asked) + prepared.num_later:,} answers take up to {needed:.1f} GB"
    if needed > prepared.request.max_disk_gb:
        raise UserError(f"{takes}; give --max-disk {needed + 0.1:.1f}, fewer prompts, or --on-the-fly")
    if needed > free:
        raise UserError(f"{takes}, and {out} has room for {free:.1f} GB; name another --out, or give --on-the-fly")


def disk_bytes(prepared: PreparedTraining) -> int:
    """Of the states, if every answer is as long as it may be."""
    longest = prepared.plan.max_new_tokens
    tokens = sum(len(one.ids) + longest for one in prepared.asked)
    tokens += prepared.num_later * (round(prompts.LONGEST_SHARE * ROW_LENGTH) + longest)
    return tokens * len(prepared.plan.layers) * int(prepared.target.config.hidden_size) * torch.bfloat16.itemsize


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def pad_id(models: Models) -> int:
    tokenizer = models.tokenizer
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
