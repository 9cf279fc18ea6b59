"""`train`, from a request to a draft: prompts, answers, rows, the fit, and a folder that `run` can load."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method, parse
from dflash_bench.engine import loop
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters import dflash, eagle3, medusa
from dflash_bench.engine.loop import AcceptedAnswer, al_pooled, by_position
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Target
from dflash_bench.models import presets
from dflash_bench.models.architecture import final_norm
from dflash_bench.models.formats import medusa as medusa_format
from dflash_bench.models.formats import save_draft
from dflash_bench.models.loading import Models
from dflash_bench.training import answers, cards, drafts, prompts, trainer
from dflash_bench.training.answers import AnswerRequest
from dflash_bench.training.cards import Acceptance
from dflash_bench.training.config import TrainRequest, check
from dflash_bench.training.data import PackedRows, TrainingChat, stored
from dflash_bench.training.dflash import DFlashObjective
from dflash_bench.training.distributed import ALONE, Crew
from dflash_bench.training.eagle3 import Eagle3Objective
from dflash_bench.training.medusa import MedusaObjective
from dflash_bench.training.prepare import ROW_LENGTH, PreparedTraining, Tell, pad_id, prepare
from dflash_bench.training.trainer import DraftRecipe, History, Objective, claim
from dflash_bench.training.vocab import Voice

# How much of a draft the target accepts while it is in training: by decoding with it, as `run` does.
#
# Accuracy in training is not acceptance in serving: there a draft reads what was accepted, and not what was given.


DRAFTERS: dict[str, Callable[[Models, Target, Method], Drafter]] = {
    "dflash": dflash.build,
    "eagle3": eagle3.build,
    "medusa": medusa.build,
}


def answered(
    target: Target, method: str, draft: nn.Module, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[AcceptedAnswer]:
    """Each prompt's answer at temperature 0, with what of the draft was accepted in each round."""
    weights = copy.deepcopy(draft).to(target.model.dtype).eval()
    models = Models(target.model, None, {method: weights}, {})
    return loop.measure_acceptance(target, DRAFTERS[method](models, target, parse(method)), prompts, limits)


# A fresh draft fitted to rows: its objective, its rate, its steps, and what the target accepts of it.


ROWS = 4
"""Of a step, in each process."""
NUM_ANCHORS = 48
GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}
"""Of the loss, by block (paper A.1); of other blocks in proportion."""
NUM_STEPS = 4
"""Training-time-test steps of EAGLE-3."""
BLOCK_SIZE, DISTIL, EPOCHS, DRAFT_VOCAB = 16, 0.5, 6.0, 8192
"""Where the user says nothing."""
MEASURED, MEASURED_TOKENS = 32, 96
"""Held-out prompts that are decoded to measure acceptance, and how far."""
RATES = (0.005, 0.02, 0.08)
SEARCH_SHARE = 20
"""Each rate is tried for the twentieth part of the steps."""
OF_OTHERS = 0.1
"""The rate of what is not a matrix, as a share of the rate of matrices."""


def new_objective(prepared: PreparedTraining, rows: PackedRows) -> Objective:
    request, model, layers = prepared.request, prepared.models.target, prepared.layers
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    device = prepared.target.device
    counts = torch.bincount(rows.ids[rows.answer], minlength=len(embedding))
    if request.method == "medusa":
        return MedusaObjective(drafts.new_medusa(model).to(device), rows)
    if request.method == "eagle3":
        size = min(request.draft_vocab or DRAFT_VOCAB, len(embedding))
        draft = drafts.new_eagle3(
            model, drafts.eagle3_taps(layers), counts, size, request.seed, trains_head=not request.slim
        )
        return Eagle3Objective(draft.to(device), rows, Voice.of(embedding, head), NUM_STEPS)
    mask = drafts.mask_token(prepared.models.tokenizer, len(embedding), request.mask_token)
    num_layers, block = request.layers or drafts.NUM_LAYERS, request.block_size or BLOCK_SIZE
    voice = Voice.of(embedding, head, counts, request.draft_vocab)
    spoken = voice.token_ids if request.slim else None
    made = drafts.new_dflash(model, layers[:-1], num_layers, block, mask, request.seed, spoken)
    distil = DISTIL if request.distil is None else request.distil
    return DFlashObjective(made.to(device), rows, voice, NUM_ANCHORS, GAMMAS.get(block, block * 0.45), distil)


def num_steps(request: TrainRequest, num_rows: int, crew: Crew = ALONE) -> int:
    per_epoch = max(1, num_rows // (ROWS * crew.size))
    return request.steps or max(1, round((request.epochs or EPOCHS) * per_epoch))


def recipe_of(request: TrainRequest, steps: int, rate: float) -> DraftRecipe:
    return DraftRecipe(
        steps=steps, matrix_lr=rate, other_lr=rate * OF_OTHERS, rows=ROWS, warmup=max(1, min(60, steps // 10)),
        seed=request.seed, patience=request.patience,
    )  # fmt: skip


def searched_rate(prepared: PreparedTraining, rows: PackedRows, tell: Tell) -> float:
    """The rate whose short training ends with the best held-out acceptance."""
    request, work = prepared.request, prepared.request.out / "work"
    crew = prepared.crew
    steps = max(1, num_steps(request, len(rows.ids) - rows.num_held_out, crew) // SEARCH_SHARE)
    path = work / f"{request.method}-rates.json"
    if not crew.told(path.exists()):
        results: dict[str, float] = {}
        for rate in RATES:
            recipe = replace(recipe_of(request, steps, rate), measurements=1)
            objective = new_objective(prepared, rows)
            history = trainer.train(objective, rows, recipe, work / f"{request.method}-{rate}.pt", tell, crew=crew)
            results[str(rate)] = history[-1]["accepted"]
        if crew.is_first:
            files.write_whole(path, lambda file: file.write(json.dumps(results).encode()))
        crew.wait()
    tried: dict[str, float] = files.json_of(path)
    return float(max(tried, key=lambda rate: tried[rate]))


def fitted(
    prepared: PreparedTraining, rows: PackedRows, held_out: Sequence[TrainingChat], rate: float, tell: Tell
) -> tuple[Objective, History]:
    request = prepared.request
    objective = new_objective(prepared, rows)

    def measure() -> float:
        return acceptance(prepared, objective, held_out).al_pooled

    recipe = recipe_of(request, num_steps(request, len(rows.ids) - rows.num_held_out, prepared.crew), rate)
    path = request.out / "work" / f"{request.method}.pt"
    return objective, trainer.train(objective, rows, recipe, path, tell, measure, prepared.crew)


def acceptance(prepared: PreparedTraining, objective: Objective, held_out: Sequence[TrainingChat]) -> Acceptance:
    """Of the draft as it is, by decoding held-out prompts with it."""
    # A prompt may have been answered twice.
    prompts = list(dict.fromkeys(tuple(item.ids[: item.prompt_length].tolist()) for item in held_out))[:MEASURED]
    limits = Limits(MEASURED_TOKENS, prepared.stops)
    answers = answered(prepared.target, prepared.request.method, objective.draft, prompts, limits)
    return Acceptance(al_pooled(answers), tuple(by_position(answers)), len(prompts), MEASURED_TOKENS)


# Chats answered turn by turn: what is asked later follows the target's own greedy answers.


def collect(prepared: PreparedTraining, tell: Tell) -> list[Path]:
    """A folder of answers for each turn; a chat ends early where it leaves no room for another answer."""
    tokenizer, folder, asked, going = prepared.models.tokenizer, prepared.answers, prepared.asked, prepared.chats
    folders: list[Path] = []
    while asked:
        report = tell if not folders else _of_turn(tell, len(folders) + 1)
        answers.collect(prepared.target, prepared.stops, asked, prepared.plan, folder, report, prepared.crew)
        folders.append(folder)
        left = [number for number, chat in enumerate(going) if chat.later]
        said = _said(folder, tokenizer) if left else {}
        following = [going[number].continued(said[number]) for number in left]
        kept = prompts.fitting(following, tokenizer, ROW_LENGTH)
        asked = tuple(
            AnswerRequest(ids, first=asked[left[number]].first or asked[left[number]].ids)
            for ids, number in kept.items()
        )
        going = tuple(following[number] for number in kept.values())
        folder = prepared.answers.with_name(f"{prepared.answers.name}-{len(folders) + 1}")
    return folders


def _of_turn(tell: Tell, number: int) -> Tell:
    return lambda text: tell(f"turn {number}, {text}")


def _said(folder: Path, tokenizer: Any) -> dict[int, str]:
    """What the target said to each prompt, by its number."""
    return {
        item.prompt_number: tokenizer.decode(item.ids[item.prompt_length :], skip_special_tokens=True)
        for item in stored([folder])
    }


# `train`, from a request to a draft: prompts, the target's answers, rows, the loop, a folder that `run` can load.
#
# Every stage leaves what it made in the folder's `work`, and finds it there when it is started again.


HELD_OUT_ONE_IN, MOST_HELD_OUT = 16, 96
"""Chats that are never trained on."""


def perform(request: TrainRequest, tell: Tell) -> Path | None:
    """The folder of the trained draft; None in all processes but the first. Raises UserError."""
    check(request)
    folder = request.out / request.method
    # The card is written last: a draft without one was cut off, and is written again.
    if (folder / cards.NAME).exists():
        raise UserError(f"{folder} holds a draft already; name another --out")
    prepared = prepare(request, tell)
    crew = prepared.crew
    tell = tell if crew.is_first else _silent
    if crew.is_first:
        claim(request.out / "work" / f"{request.method}.json", _decisive(request), "a training")
    folders = collect(prepared, tell)
    items = stored(folders)
    trained, held_out = split(items, request.seed)
    model = prepared.models.target
    rows = PackedRows(
        trained, prepared.layers, final_norm(model), ROW_LENGTH, pad_id(prepared.models), request.seed, held_out,
        prepared.target.device, prepared.compute,
    )  # fmt: skip
    rate = request.rate or searched_rate(prepared, rows, tell)
    objective, history = fitted(prepared, rows, held_out, rate, tell)
    if not crew.is_first:
        return None
    measured = acceptance(prepared, objective, held_out)
    export(request, objective.draft, folder)
    num_later = sum(item.is_later_turn for item in items)
    cards.write(
        folder, request, prepared.chats, prepared.overlaps, history, rate, int(rows.answer.sum()), num_later, measured
    )
    return folder


def split(items: Sequence[TrainingChat], seed: int) -> tuple[list[TrainingChat], list[TrainingChat]]:
    """What is trained on, and what is not: all turns of a chat, and all answers to it, on one side."""
    chats = list(dict.fromkeys(item.chat for item in items))
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(MOST_HELD_OUT, max(1, len(chats) // HELD_OUT_ONE_IN))
    apart = {chats[number] for number in order[:count]}
    sides: tuple[list[TrainingChat], list[TrainingChat]] = ([], [])
    for item in items:
        sides[item.chat in apart].append(item)
    return sides


def _decisive(request: TrainRequest) -> dict[str, Any]:
    names = (
        "layers", "block_size", "draft_vocab", "mask_token", "epochs", "steps", "rate", "distil", "patience", "seed",
        "slim",
    )  # fmt: skip
    return {name: getattr(request, name) for name in names}


def export(request: TrainRequest, draft: nn.Module, folder: Path) -> None:
    """In bfloat16, half as large; a target in float32 reads it as well."""
    halved: Any = draft.to(torch.bfloat16)
    if request.method == "medusa":
        medusa_format.save(halved, folder, presets.name(request.target))
    else:
        save_draft(halved, folder, request.format, request.slim)


def _silent(text: str) -> None:
    """What all but the first process say."""
