"""`train`, from a request to a draft: prompts, the target's answers, rows, the loop, a folder that `run` can load.

Every stage leaves what it made in the folder's `work`, and finds it there when it is started again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_bench import atomic, reading
from dflash_bench.engine.acceptance import al_pooled, by_position
from dflash_bench.engine.architecture import final_norm
from dflash_bench.engine.local import stop_ids
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target
from dflash_bench.errors import UserError
from dflash_bench.models import loading, presets
from dflash_bench.models.formats import medusa as medusa_format
from dflash_bench.models.formats import save_draft
from dflash_bench.models.loading import Models
from dflash_bench.train import answers, cards, chats, drafts, invented, loop, measuring, overlap
from dflash_bench.train.answers import Asked, Plan
from dflash_bench.train.cards import Acceptance
from dflash_bench.train.chats import Chat
from dflash_bench.train.checkpoint import History
from dflash_bench.train.claims import claim
from dflash_bench.train.dflash import DFlashObjective
from dflash_bench.train.eagle3 import Eagle3Objective
from dflash_bench.train.loop import DraftRecipe, Objective
from dflash_bench.train.medusa import MedusaObjective
from dflash_bench.train.overlap import Overlap
from dflash_bench.train.request import Request, check
from dflash_bench.train.rows import Conversation, Rows, stored
from dflash_bench.train.voice import Voice

ROW_LENGTH = 512
ROWS = 4
"""Of a step."""
NUM_ANCHORS = 48
GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}
"""Of the loss, by block (paper A.1); of other blocks in proportion."""
NUM_STEPS = 4
"""Training-time-test steps of EAGLE-3."""
BLOCK_SIZE, DISTIL, EPOCHS, DRAFT_VOCAB = 16, 0.5, 6.0, 8192
"""Where the user says nothing."""
HELD_OUT_ONE_IN, MOST_HELD_OUT, MEASURED = 16, 96, 8
"""Conversations that are never trained on, and how many of their prompts are decoded to measure acceptance."""
MEASURED_TOKENS = 96
RATES = (0.005, 0.02, 0.08)
SEARCH_SHARE = 20
"""Each rate is tried for the twentieth part of the steps."""
OF_OTHERS = 0.1
"""The rate of what is not a matrix, as a share of the rate of matrices."""

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before the first step: the target, its prompts, and what they share with test suites."""

    request: Request
    models: Models
    target: Target
    chats: tuple[Chat, ...]
    asked: tuple[Asked, ...]
    overlaps: tuple[Overlap, ...]
    plan: Plan

    @property
    def stops(self) -> frozenset[int]:
        return stop_ids(self.models.target, self.models.tokenizer)

    @property
    def answers(self) -> Path:
        return self.request.out / "work" / "answers"


def perform(request: Request, tell: Tell) -> Path:
    """The folder of the trained draft. Raises UserError."""
    check(request)
    folder = request.out / request.method
    # The card is written last: a draft without one was cut off, and is written again.
    if (folder / cards.NAME).exists():
        raise UserError(f"{folder} holds a draft already; name another --out")
    prepared = prepare(request, tell)
    claim(request.out / "work" / f"{request.method}.json", _decisive(request), "a training")
    answers.collect(prepared.target, prepared.stops, prepared.asked, prepared.plan, prepared.answers, tell)
    trained, held_out = split(stored([prepared.answers]), request.seed)
    model = prepared.models.target
    rows = Rows(
        trained, prepared.plan.layers, final_norm(model), ROW_LENGTH, pad_id(prepared.models), request.seed, held_out
    )
    rate = request.rate or searched_rate(prepared, rows, tell)
    objective, history = fitted(prepared, rows, held_out, rate, tell)
    measured = acceptance(prepared, objective, held_out)
    export(request, objective.draft, folder)
    cards.write(folder, request, prepared.chats, prepared.overlaps, history, rate, int(rows.answer.sum()), measured)
    return folder


def prepare(request: Request, tell: Tell) -> Prepared:
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    tell("loading the target")
    models = loading.load(presets.combine(*_named(request.target), {}), [], "cpu", torch.bfloat16)
    target = Target(models.target)
    found = [*chats.given(request.prompts), *chats.written(request.written, request.seed)]
    found += _invented(request, models, target, tell)
    overlaps = overlap.found([one.text for one in found], request.against)
    if "overlap" not in request.allow:
        overlap.refuse(overlaps)
    encoded = chats.encoded(found, models.tokenizer, ROW_LENGTH)
    asked = [Asked(ids) for _, ids in encoded]
    asked += [Asked(ids, 1.0) for _, ids in encoded[: round(request.sampled * len(encoded))]]
    layers = drafts.taps(target.config.num_hidden_layers)
    plan = Plan(models.revisions["target"], layers, request.max_new_tokens, request.batch_size, request.seed)
    prepared = Prepared(request, models, target, tuple(one for one, _ in encoded), tuple(asked), tuple(overlaps), plan)
    _require_disk(prepared)
    return prepared


def _named(target: str) -> tuple[str | None, str | None]:
    """As `run` takes them: the name of a model, or a target."""
    return (target, None) if target in presets.table() else (None, target)


def _invented(request: Request, models: Models, target: Target, tell: Tell) -> list[Chat]:
    """Those of an earlier start are kept: others would need other answers."""
    if not request.invented:
        return []
    work = request.out / "work"
    path, names = work / "invented.json", ("invented", "openings", "batch_size", "seed")
    claim(work / "invented-by.json", {name: getattr(request, name) for name in names}, "prompts of the target's own")
    if not path.exists():
        openings = request.openings or ("",)
        stops = stop_ids(models.target, models.tokenizer)
        texts = list(
            invented.invent(
                target, models.tokenizer, stops, request.invented, openings, request.batch_size, request.seed, tell
            )
        )
        atomic.write_whole(path, lambda file: file.write(json.dumps(texts).encode()))
    return [chats.of_user("made up by the target", text) for text in reading.json_of(path)]


def _require_disk(prepared: Prepared) -> None:
    out, needed = prepared.request.out, disk_bytes(prepared) / 1e9
    room = os.statvfs(_existing(out))
    free = room.f_bavail * room.f_frsize / 1e9
    takes = f"the target's states on {len(prepared.asked):,} answers take up to {needed:.1f} GB"
    if needed > prepared.request.max_disk_gb:
        raise UserError(f"{takes}; give --max-disk {needed + 0.1:.1f}, or fewer prompts")
    if needed > free:
        raise UserError(f"{takes}, and {out} has room for {free:.1f} GB; name another --out, or give fewer prompts")


def disk_bytes(prepared: Prepared) -> int:
    """Of the states, if every answer is as long as it may be."""
    tokens = sum(len(one.ids) + prepared.plan.max_new_tokens for one in prepared.asked)
    return tokens * len(prepared.plan.layers) * int(prepared.target.config.hidden_size) * torch.bfloat16.itemsize


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def split(items: Sequence[Conversation], seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """What is trained on, and what is not: all answers to a prompt on one side."""
    prompts = list(dict.fromkeys(tuple(item.ids[: item.prompt_length].tolist()) for item in items))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(MOST_HELD_OUT, max(1, len(prompts) // HELD_OUT_ONE_IN))
    apart = {prompts[number] for number in order[:count]}
    sides: tuple[list[Conversation], list[Conversation]] = ([], [])
    for item in items:
        sides[tuple(item.ids[: item.prompt_length].tolist()) in apart].append(item)
    return sides


def pad_id(models: Models) -> int:
    tokenizer = models.tokenizer
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def new_objective(prepared: Prepared, rows: Rows) -> Objective:
    request, model, layers = prepared.request, prepared.models.target, prepared.plan.layers
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    counts = torch.bincount(rows.ids[rows.answer], minlength=len(embedding))
    if request.method == "medusa":
        return MedusaObjective(drafts.new_medusa(model), rows)
    if request.method == "eagle3":
        size = min(request.draft_vocab or DRAFT_VOCAB, len(embedding))
        draft = drafts.new_eagle3(
            model, drafts.eagle3_taps(layers), counts, size, request.seed, trains_head=not request.slim
        )
        return Eagle3Objective(draft, rows, Voice.of(embedding, head), NUM_STEPS)
    mask = drafts.mask_token(prepared.models.tokenizer, len(embedding), request.mask_token)
    num_layers, block = request.layers or drafts.NUM_LAYERS, request.block_size or BLOCK_SIZE
    voice = Voice.of(embedding, head, counts, request.draft_vocab)
    spoken = voice.token_ids if request.slim else None
    made = drafts.new_dflash(model, layers[:-1], num_layers, block, mask, request.seed, spoken)
    distil = DISTIL if request.distil is None else request.distil
    return DFlashObjective(made, rows, voice, NUM_ANCHORS, GAMMAS.get(block, block * 0.45), distil)


def num_steps(request: Request, num_rows: int) -> int:
    return request.steps or max(1, round((request.epochs or EPOCHS) * max(1, num_rows // ROWS)))


def recipe_of(request: Request, steps: int, rate: float) -> DraftRecipe:
    return DraftRecipe(
        steps=steps, matrix_lr=rate, other_lr=rate * OF_OTHERS, rows=ROWS, warmup=max(1, min(60, steps // 10)),
        seed=request.seed, patience=request.patience,
    )  # fmt: skip


def searched_rate(prepared: Prepared, rows: Rows, tell: Tell) -> float:
    """The rate whose short training ends with the best held-out acceptance."""
    request, work = prepared.request, prepared.request.out / "work"
    steps = max(1, num_steps(request, len(rows.ids) - rows.num_held_out) // SEARCH_SHARE)
    path = work / f"{request.method}-rates.json"
    if not path.exists():
        results: dict[str, float] = {}
        for rate in RATES:
            recipe, objective = recipe_of(request, steps, rate), new_objective(prepared, rows)
            history = loop.train(objective, rows, recipe, work / f"{request.method}-{rate}.pt", tell)
            results[str(rate)] = history[-1]["accepted"]
        atomic.write_whole(path, lambda file: file.write(json.dumps(results).encode()))
    tried: dict[str, float] = reading.json_of(path)
    return float(max(tried, key=lambda rate: tried[rate]))


def fitted(
    prepared: Prepared, rows: Rows, held_out: Sequence[Conversation], rate: float, tell: Tell
) -> tuple[Objective, History]:
    request = prepared.request
    objective = new_objective(prepared, rows)

    def measure() -> float:
        return acceptance(prepared, objective, held_out).al_pooled

    recipe = recipe_of(request, num_steps(request, len(rows.ids) - rows.num_held_out), rate)
    path = request.out / "work" / f"{request.method}.pt"
    return objective, loop.train(objective, rows, recipe, path, tell, measure)


def acceptance(prepared: Prepared, objective: Objective, held_out: Sequence[Conversation]) -> Acceptance:
    """Of the draft as it is, by decoding held-out prompts with it."""
    # A prompt may have been answered twice.
    prompts = list(dict.fromkeys(tuple(item.ids[: item.prompt_length].tolist()) for item in held_out))[:MEASURED]
    limits = Limits(MEASURED_TOKENS, prepared.stops)
    answers = measuring.answered(prepared.target, prepared.request.method, objective.draft, prompts, limits)
    return Acceptance(al_pooled(answers), tuple(by_position(answers)), len(prompts), MEASURED_TOKENS)


def _decisive(request: Request) -> dict[str, Any]:
    names = (
        "layers", "block_size", "draft_vocab", "mask_token", "epochs", "steps", "rate", "distil", "patience", "seed",
        "slim",
    )  # fmt: skip
    return {name: getattr(request, name) for name in names}


def export(request: Request, draft: nn.Module, folder: Path) -> None:
    """In bfloat16, half as large; a target in float32 reads it as well."""
    halved: Any = draft.to(torch.bfloat16)
    if request.method == "medusa":
        medusa_format.save(halved, folder, presets.name(request.target))
    else:
        save_draft(halved, folder, request.format, request.slim)
