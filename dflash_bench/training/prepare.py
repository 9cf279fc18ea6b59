"""Preparation of a training: the target, its prompts, their overlap with test suites, and disk space for states."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.terminal import note
from dflash_bench.engine.backend import stop_ids
from dflash_bench.engine.selection import is_compiled, target_of
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, presets
from dflash_bench.models.loading import Models
from dflash_bench.training import contamination, drafts, prompts
from dflash_bench.training.answers import AnswerPlan, AnswerRequest, ComputedStates
from dflash_bench.training.config import BLOCKS, TrainRequest
from dflash_bench.training.contamination import Overlap
from dflash_bench.training.distributed import ProcessGroup, init_distributed
from dflash_bench.training.prompts import Chat

ROW_LENGTH = 512
PASSES = 3
"""Number of passes by which kernels are compared."""
FAR_FASTER = 0.85
MADE_UP = "made up by the target"
"""Source of prompts that the target invents."""
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class PreparedTraining:
    """All inputs of a training, complete before the first step."""

    request: TrainRequest
    models: Models
    target: Target
    chats: tuple[Chat, ...]
    requests: tuple[AnswerRequest, ...]
    """First turns to be answered: every chat's, and for a share of chats once more, at temperature 1."""
    overlaps: tuple[Overlap, ...]
    layers: tuple[int, ...]
    """Target layers whose outputs are used, ending with the target's last layer."""
    plan: AnswerPlan
    group: ProcessGroup

    @property
    def stops(self) -> frozenset[int]:
        return stop_ids(self.models.target, self.models.tokenizer)

    @property
    def answers(self) -> Path:
        """Return the folder of the answers to first turns."""
        return self.request.out / "work" / ("tokens" if self.request.on_the_fly else "answers")

    @property
    def num_later(self) -> int:
        """Return the number of later turns, if none is skipped."""
        return sum(len(one.later) for one in self.chats)

    @property
    def compute(self) -> ComputedStates | None:
        """Return the source of states if they are not stored."""
        return ComputedStates(self.target, self.layers) if self.request.on_the_fly else None


def prepare(request: TrainRequest, tell: Tell) -> PreparedTraining:
    """Load the target, gather prompts, and check them.

    Raises UserError for prompts that occur in a test suite, and if there is too little disk space.
    """
    if request.against is not None:
        contamination.require_suites(request.against)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    tell("loading the target")
    group, device = init_distributed(device_of(request.device))
    name, path = (request.target, None) if request.target in presets.table() else (None, request.target)
    models = loading.load(presets.combine(name, path, {}), [], device, torch.bfloat16)
    target = _faster_target(models.target, request.batch_size)
    request = _with_mask(request, models)
    found = [*prompts.from_files(request.prompts), *prompts.written(request.num_written, request.seed)]
    group.require_same(request.out / "work")
    group.from_first("invented", lambda: _invent(request, models, target, tell))
    found += _invented(request)
    overlaps = contamination.found([one.text for one in found], request.against)
    if "overlap" not in request.allow:
        # Our own prompts and the target's invented ones are dropped here; other prompts are for the user to correct.
        found, num_left_out = _without_leaks(found, overlaps)
        if num_left_out:
            tell(f"left out {num_left_out} prompts, our own or made up by the target, that occur in a test suite")
            overlaps = contamination.found([one.text for one in found], request.against)
        contamination.refuse(overlaps)
    encoded = prompts.encoded(found, models.tokenizer, ROW_LENGTH)
    requests = [AnswerRequest(ids) for _, ids in encoded]
    requests += [AnswerRequest(ids, 1.0) for _, ids in encoded[: round(request.sampled * len(encoded))]]
    layers = drafts.taps(target.config.num_hidden_layers, request.features)
    stored = () if request.on_the_fly else layers
    plan = AnswerPlan(models.revisions["target"], stored, request.max_new_tokens, request.batch_size, request.seed)
    prepared = PreparedTraining(
        request, models, target, tuple(one for one, _ in encoded), tuple(requests), tuple(overlaps), layers, plan, group
    )
    _require_disk(prepared)
    return prepared


def _with_mask(request: TrainRequest, models: Models) -> TrainRequest:
    """Return the request with a token for masked positions, if it needs one and the target has no spare id."""
    if request.method not in BLOCKS or request.init is not None or request.mask_token is not None:
        return request
    token = drafts.unused_token(models.tokenizer, models.target.get_input_embeddings().num_embeddings)
    if token is not None:
        note(f"no id is spare for masked positions, so {token} stands for them; --mask-token chooses another")
    return replace(request, mask_token=token)


def _faster_target(model: Any, num_rows: int) -> Target:
    """Return the target by torch's kernels instead of numba's if they compute a pass over `num_rows` rows far faster.

    They do for a large model on a processor that multiplies bfloat16. Small differences never change the choice.
    """
    usual = target_of(model)
    if not is_compiled(usual):
        return usual
    other = target_of(model, kernels="torch")
    return other if _pass_s(other, num_rows) < FAR_FASTER * _pass_s(usual, num_rows) else usual


def _pass_s(target: Target, num_rows: int) -> float:
    tokens = torch.arange(num_rows)[:, None] % target.vocab_size
    target.begin(num_rows, 1 + PASSES)
    times = [time.perf_counter()]
    for position in range(PASSES):
        target.forward(tokens, [position] * num_rows)
        times.append(time.perf_counter())
    target.release()
    return min(end - start for start, end in pairwise(times))


def device_of(wanted: str | None) -> str:
    """Return the device to train on: `wanted`, or else a GPU if there is one.

    Raises UserError for a device that this machine lacks.
    """
    count = torch.cuda.device_count()
    device = wanted or ("cuda" if count else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    if kind == "cuda" and int(index or 0) >= count:
        here = f"only {count} GPUs here" if count else loading.no_gpu()
        raise UserError(f"--device {device}: {here}; use one that is there, or --device cpu")
    return device


def _invent(request: TrainRequest, models: Models, target: Target, tell: Tell) -> None:
    """Store prompts that the target invents, unless they exist: new prompts would need new answers."""
    if not request.invented:
        return
    work = request.out / "work"
    path = work / "invented.json"
    options = request.values("invented", "openings", "batch_size", "seed")
    files.check_same_options(work / "invented-by.json", options, "prompts of the target's own")
    if not path.exists():
        stops = stop_ids(models.target, models.tokenizer)
        texts = list(prompts.invent(target, models.tokenizer, stops, request, tell))
        files.write_json(path, texts)


def _invented(request: TrainRequest) -> list[Chat]:
    texts = files.json_of(request.out / "work" / "invented.json") if request.invented else []
    return [prompts.user_chat(MADE_UP, text) for text in texts]


def _without_leaks(found: Sequence[Chat], overlaps: Sequence[Overlap]) -> tuple[list[Chat], int]:
    """Drop our own and the target's own prompts that occur in a suite; return the rest and the number dropped."""
    shared = {text for overlap in overlaps for text in overlap.shared}
    kept = [one for one in found if not one.source.startswith((MADE_UP, prompts.OWN)) or one.text not in shared]
    return kept, len(found) - len(kept)


def _require_disk(prepared: PreparedTraining) -> None:
    """Raise UserError if the states may exceed --max-disk or the free disk space."""
    out, needed = prepared.request.out, disk_bytes(prepared) / 1e9
    room = os.statvfs(_existing(out))
    free = room.f_bavail * room.f_frsize / 1e9
    takes = f"the target's states on {len(prepared.requests) + prepared.num_later:,} answers take up to {needed:.1f} GB"
    if needed > prepared.request.max_disk_gb:
        raise UserError(f"{takes}; give --max-disk {needed + 0.1:.1f}, fewer prompts, or --on-the-fly")
    if needed > free:
        raise UserError(f"{takes}, and {out} has room for {free:.1f} GB; name another --out, or give --on-the-fly")


def disk_bytes(prepared: PreparedTraining) -> int:
    """Return the bytes of the stored states if every answer has the maximum length, or together --answer-tokens."""
    longest, enough = prepared.plan.max_new_tokens, prepared.request.answer_tokens
    answers = longest * len(prepared.requests)
    if enough is not None:
        answers = min(answers, enough + longest * prepared.plan.batch_size * prepared.group.size)
    tokens = sum(len(one.ids) for one in prepared.requests) + answers
    tokens += prepared.num_later * (round(prompts.LONGEST_SHARE * ROW_LENGTH) + longest)
    return tokens * len(prepared.plan.layers) * int(prepared.target.config.hidden_size) * torch.bfloat16.itemsize


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def pad_id(models: Models) -> int:
    """Return the token that pads rows: the padding token, or else the end token."""
    tokenizer = models.tokenizer
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
