"""A fresh draft fitted to rows: its objective, its rate, its steps, and what the target accepts of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch

from dflash_bench import atomic, reading
from dflash_bench.engine.acceptance import al_pooled, by_position
from dflash_bench.engine.sequences import Limits
from dflash_bench.train import drafts, loop, measuring
from dflash_bench.train.cards import Acceptance
from dflash_bench.train.checkpoint import History
from dflash_bench.train.crew import ALONE, Crew
from dflash_bench.train.dflash import DFlashObjective
from dflash_bench.train.eagle3 import Eagle3Objective
from dflash_bench.train.loop import DraftRecipe, Objective
from dflash_bench.train.medusa import MedusaObjective
from dflash_bench.train.preparing import Prepared, Tell
from dflash_bench.train.request import Request
from dflash_bench.train.rows import Conversation, Rows
from dflash_bench.train.voice import Voice

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


def new_objective(prepared: Prepared, rows: Rows) -> Objective:
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


def num_steps(request: Request, num_rows: int, crew: Crew = ALONE) -> int:
    per_epoch = max(1, num_rows // (ROWS * crew.size))
    return request.steps or max(1, round((request.epochs or EPOCHS) * per_epoch))


def recipe_of(request: Request, steps: int, rate: float) -> DraftRecipe:
    return DraftRecipe(
        steps=steps, matrix_lr=rate, other_lr=rate * OF_OTHERS, rows=ROWS, warmup=max(1, min(60, steps // 10)),
        seed=request.seed, patience=request.patience,
    )  # fmt: skip


def searched_rate(prepared: Prepared, rows: Rows, tell: Tell) -> float:
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
            history = loop.train(objective, rows, recipe, work / f"{request.method}-{rate}.pt", tell, crew=crew)
            results[str(rate)] = history[-1]["accepted"]
        if crew.is_first:
            atomic.write_whole(path, lambda file: file.write(json.dumps(results).encode()))
        crew.wait()
    tried: dict[str, float] = reading.json_of(path)
    return float(max(tried, key=lambda rate: tried[rate]))


def fitted(
    prepared: Prepared, rows: Rows, held_out: Sequence[Conversation], rate: float, tell: Tell
) -> tuple[Objective, History]:
    request = prepared.request
    objective = new_objective(prepared, rows)

    def measure() -> float:
        return acceptance(prepared, objective, held_out).al_pooled

    recipe = recipe_of(request, num_steps(request, len(rows.ids) - rows.num_held_out, prepared.crew), rate)
    path = request.out / "work" / f"{request.method}.pt"
    return objective, loop.train(objective, rows, recipe, path, tell, measure, prepared.crew)


def acceptance(prepared: Prepared, objective: Objective, held_out: Sequence[Conversation]) -> Acceptance:
    """Of the draft as it is, by decoding held-out prompts with it."""
    # A prompt may have been answered twice.
    prompts = list(dict.fromkeys(tuple(item.ids[: item.prompt_length].tolist()) for item in held_out))[:MEASURED]
    limits = Limits(MEASURED_TOKENS, prepared.stops)
    answers = measuring.answered(prepared.target, prepared.request.method, objective.draft, prompts, limits)
    return Acceptance(al_pooled(answers), tuple(by_position(answers)), len(prompts), MEASURED_TOKENS)
