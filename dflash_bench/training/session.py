"""`train`, from a request to a draft: prompts, answers, rows, the fit, and a folder that `run` can load.

Every stage stores its result in the folder's `work`, and reuses it when the training is resumed.
"""

from __future__ import annotations

import copy
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
from dflash_bench.engine.drafters import dflash, eagle3, medusa, mtp
from dflash_bench.engine.loop import AcceptedAnswer, al_pooled, by_position
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, mtp_heads, presets
from dflash_bench.models.architecture import final_norm
from dflash_bench.models.formats import medusa as medusa_format
from dflash_bench.models.formats import save_draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.presets import Preset
from dflash_bench.training import answers, cards, drafts, prompts, trainer
from dflash_bench.training.answers import AnswerRequest
from dflash_bench.training.cards import Acceptance
from dflash_bench.training.config import DECISIVE, TrainRequest, check
from dflash_bench.training.data import PackedRows, TrainingChat, stored
from dflash_bench.training.dflash import DFlashObjective, MarkovObjective, SelectorObjective
from dflash_bench.training.distributed import ALONE, ProcessGroup
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.eagle3 import Eagle3Objective
from dflash_bench.training.medusa import MedusaObjective
from dflash_bench.training.mtp import MTPObjective
from dflash_bench.training.prepare import ROW_LENGTH, PreparedTraining, Tell, pad_id, prepare
from dflash_bench.training.trainer import DraftRecipe, History, Objective

# Acceptance of a draft in training, measured by decoding with it, as in `run`.
#
# Accuracy in training is not acceptance in serving, where a draft reads accepted tokens rather than given tokens.


DRAFTERS: dict[str, Callable[[Models, Target, Method], Drafter]] = {
    "dflash": dflash.build,
    "eagle3": eagle3.build,
    "medusa": medusa.build,
    "mtp": mtp.build,
}


def answered(
    target: Target, method: str, draft: nn.Module, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[AcceptedAnswer]:
    """Answer each prompt at temperature 0, and return the accepted tokens per round."""
    weights = copy.deepcopy(draft).to(target.model.dtype).eval()
    models = Models(target.model, None, {method: weights}, {})
    return loop.measure_acceptance(target, DRAFTERS[method](models, target, parse(method)), prompts, limits)


# A fresh draft fitted to rows: its objective, its learning rate, its steps, and its acceptance.


ROWS = 4
"""Rows per step and process."""
NUM_ANCHORS = 48
NUM_STEPS = 4
"""Number of training-time-test steps of EAGLE-3."""
BLOCK_SIZE, DISTIL, EPOCHS, DRAFT_VOCAB, RANK, DEPTH = 16, 0.5, 6.0, 8192, 64, 3
"""Defaults of options."""
MEASURED, MEASURED_TOKENS = 32, 96
"""Number of held-out prompts that are decoded to measure acceptance, and of tokens per answer."""
RATES = (0.005, 0.02, 0.08)
SEARCH_SHARE = 20
"""Each rate is tried for 1 / SEARCH_SHARE of the steps."""
OF_OTHERS = 0.1
"""Learning rate of parameters that are not matrices, as a share of the rate of matrices."""


def new_objective(prepared: PreparedTraining, rows: PackedRows) -> Objective:
    request, model, layers = prepared.request, prepared.models.target, prepared.layers
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    device = prepared.target.device
    counts = torch.bincount(rows.ids[rows.answer], minlength=len(embedding))
    if request.method == "medusa":
        return MedusaObjective(drafts.new_medusa(head).to(device), rows)
    if request.method == "mtp":
        mtp = drafts.new_mtp(model, request.seed)
        return MTPObjective(mtp.to(device), rows, DraftVocab.of(embedding, head), request.depth or DEPTH)
    if request.method == "eagle3":
        size = min(request.draft_vocab or DRAFT_VOCAB, len(embedding))
        taps = drafts.eagle3_taps(layers)
        draft = drafts.new_eagle3(model, taps, counts, size, request.seed, not request.slim, request.intermediate_size)
        vocab = DraftVocab.only(embedding, head, torch.arange(size) + draft.d2t)
        return Eagle3Objective(draft.to(device), rows, vocab, NUM_STEPS)
    if request.init is not None:
        made = _begun(prepared)
        spoken = drafts.spoken(made)
        vocab = DraftVocab.only(embedding, head, spoken)
    else:
        mask = drafts.mask_token(prepared.models.tokenizer, len(embedding), request.mask_token)
        num_layers, block = request.layers or drafts.NUM_LAYERS, request.block_size or BLOCK_SIZE
        vocab = DraftVocab.of(embedding, head, counts, request.draft_vocab)
        reduced = vocab.token_ids if request.slim else None
        width = request.intermediate_size
        body = drafts.body_of(request.fusion or "kv", request.autoregressive, num_layers)
        made = drafts.new_dflash(model, layers[:-1], num_layers, block, mask, request.seed, reduced, width, body)
    return block_objective(request, made, rows, vocab, device)


def block_objective(
    request: TrainRequest, draft: DFlashDraft, rows: PackedRows, vocab: DraftVocab, device: torch.device
) -> Objective:
    """Return the objective of the request's kind of DFlash, starting from this DFlash draft."""
    block, rank = draft.config.block_size, request.rank or RANK
    gamma, distil = request.gamma(block), DISTIL if request.distil is None else request.distil
    kind: type[DFlashObjective] = DFlashObjective
    if request.method == "dflash2":
        kind, draft = SelectorObjective, drafts.as_dflash2(draft, vocab, rank, request.seed)
    elif request.method == "dspark":
        kind, draft = MarkovObjective, drafts.as_dspark(draft, vocab, rank, request.seed)
    uniform = request.anchors == "uniform"
    return kind(draft.to(device), rows, vocab, NUM_ANCHORS, gamma, distil, uniform=uniform)


def _begun(prepared: PreparedTraining) -> DFlashDraft:
    """Return the draft of --init with its stored weights. Raises UserError if it cannot be trained further."""
    request, chosen = prepared.request, Preset(prepared.request.target, {"dflash": str(prepared.request.init)})
    named = f"--init {request.init}"
    try:
        models = loading.with_draft(prepared.models, chosen, "dflash", torch.float32)
    except UserError as error:
        raise UserError(f"{named}: {error.what}", "give a plain DFlash draft of this target") from error
    draft: DFlashDraft = models.drafts["dflash"].train()
    config = draft.config
    if config.kind != "DFlash" or config.shifted_labels or config.own_embedding:
        raise UserError(f"{named}: only a plain DFlash draft can be continued, and this is another kind")
    if config.own_head != request.slim:
        which = (
            "leaves its head to the target: add --slim" if config.own_head else "has no head to leave out: no --slim"
        )
        raise UserError(f"{named} {which}")
    if not {*config.taps} <= {*prepared.layers}:
        raise UserError(f"{named} reads target layers {config.taps}; it must be of {prepared.layers}")
    if config.own_head:
        draft.lm_head.requires_grad_(False)
    return draft


def num_steps(request: TrainRequest, num_rows: int, group: ProcessGroup = ALONE) -> int:
    per_epoch = max(1, num_rows // (ROWS * group.size))
    return request.steps or max(1, round((request.epochs or EPOCHS) * per_epoch))


def recipe_of(request: TrainRequest, steps: int, rate: float) -> DraftRecipe:
    return DraftRecipe(
        steps=steps,
        matrix_lr=rate,
        other_lr=rate * OF_OTHERS,
        rows=ROWS,
        warmup=max(1, min(60, steps // 10)),
        seed=request.seed,
        patience=request.patience,
    )


def searched_rate(prepared: PreparedTraining, rows: PackedRows, tell: Tell) -> float:
    """Return the learning rate whose short training ends with the best held-out acceptance."""
    request, work = prepared.request, prepared.request.out / "work"
    group = prepared.group
    steps = max(1, num_steps(request, len(rows.ids) - rows.num_held_out, group) // SEARCH_SHARE)
    path = work / f"{request.method}-rates.json"
    if not group.broadcast(path.exists()):
        results: dict[str, float] = {}
        for rate in RATES:
            recipe = replace(recipe_of(request, steps, rate), measurements=1)
            objective = new_objective(prepared, rows)
            history = trainer.train(objective, rows, recipe, work / f"{request.method}-{rate}.pt", tell, group=group)
            results[str(rate)] = history[-1]["accepted"]
        group.from_first(path.name, lambda: files.write_json(path, results))
    tried: dict[str, float] = files.json_of(path)
    return float(max(tried, key=lambda rate: tried[rate]))


def fitted(
    prepared: PreparedTraining, rows: PackedRows, held_out: Sequence[TrainingChat], rate: float, tell: Tell
) -> tuple[Objective, History, float]:
    """Return the trained objective, its history, and its acceptance before."""
    request = prepared.request
    objective = new_objective(prepared, rows)

    def measure() -> float:
        return acceptance(prepared, objective, held_out).al_pooled

    tell("measuring acceptance before the training")
    before = prepared.group.from_first("before", measure)
    recipe = recipe_of(request, num_steps(request, len(rows.ids) - rows.num_held_out, prepared.group), rate)
    path = request.out / "work" / f"{request.method}.pt"
    return objective, trainer.train(objective, rows, recipe, path, tell, measure, prepared.group), before


def acceptance(prepared: PreparedTraining, objective: Objective, held_out: Sequence[TrainingChat]) -> Acceptance:
    """Measure the current draft, by decoding held-out prompts with it."""
    # A prompt may have been answered twice.
    prompts = list(dict.fromkeys(tuple(item.ids[: item.prompt_length].tolist()) for item in held_out))[:MEASURED]
    limits = Limits(MEASURED_TOKENS, prepared.stops)
    answers = answered(prepared.target, prepared.request.drafter, objective.draft, prompts, limits)
    return Acceptance(al_pooled(answers), tuple(by_position(answers)), len(prompts), MEASURED_TOKENS)


# Chats answered turn by turn: later turns follow the target's own greedy answers.


def collect(prepared: PreparedTraining, tell: Tell) -> list[Path]:
    """Return a folder of answers for each turn; a chat ends early if there is no space for another answer."""
    tokenizer, folder, requests, chats = prepared.models.tokenizer, prepared.answers, prepared.requests, prepared.chats
    folders: list[Path] = []
    while requests:
        report = tell if not folders else _report_turn(tell, len(folders) + 1)
        enough = prepared.request.answer_tokens
        answers.collect(
            prepared.target, prepared.stops, requests, prepared.plan, folder, report, prepared.group, enough
        )
        folders.append(folder)
        texts = _answer_texts(folder, tokenizer, enough) if any(chat.later for chat in chats) else {}
        left = [number for number, chat in enumerate(chats) if chat.later and number in texts]
        following = [chats[number].continued(texts[number]) for number in left]
        kept = prompts.fitting(following, tokenizer, ROW_LENGTH)
        requests = tuple(
            AnswerRequest(ids, first=requests[left[number]].first or requests[left[number]].ids)
            for ids, number in kept.items()
        )
        chats = tuple(following[number] for number in kept.values())
        folder = prepared.answers.with_name(f"{prepared.answers.name}-{len(folders) + 1}")
    return folders


def _report_turn(tell: Tell, number: int) -> Tell:
    return lambda text: tell(f"turn {number}, {text}")


def _answer_texts(folder: Path, tokenizer: Any, enough: int | None) -> dict[int, str]:
    """Return the target's answer to each prompt, by the prompt's number."""
    return {
        item.prompt_number: tokenizer.decode(item.ids[item.prompt_length :], skip_special_tokens=True)
        for item in stored([folder], enough)
    }


HELD_OUT_ONE_IN, MOST_HELD_OUT = 16, 96
"""Chats that are never trained on: one in HELD_OUT_ONE_IN, at most MOST_HELD_OUT."""


def perform(request: TrainRequest, tell: Tell) -> Path | None:
    """Train a draft and return its folder; None in all processes but the first.

    Raises UserError for options without effect, for prompts of a test suite, and if `out` holds other work.
    """
    check(request)
    folder = request.out / request.method
    # The card is written last: a draft without a card was interrupted, and is written again.
    if (folder / cards.NAME).exists():
        raise UserError(f"{folder} holds a draft already; give another --out")
    prepared = prepare(request, tell)
    request, group = prepared.request, prepared.group
    if request.init is not None:
        _begun(prepared)  # before anything is written that another --init would have to match
    if group.is_first:
        # The number of processes decides how many rows a step has, and so how many steps there are.
        decisive = request.values(*DECISIVE, "rate", "seed") | {"processes": group.size}
        files.check_same_options(request.out / "work" / f"{request.method}.json", decisive, "a training")
    folders = collect(prepared, tell)
    items = stored(folders, request.answer_tokens)
    trained, held_out = split(items, request.seed)
    model = prepared.models.target
    rows = PackedRows(
        trained,
        prepared.layers,
        final_norm(model),
        ROW_LENGTH,
        pad_id(prepared.models),
        request.seed,
        held_out,
        prepared.target.device,
        prepared.compute,
    )
    rate = request.rate or searched_rate(prepared, rows, tell)
    objective, history, before = fitted(prepared, rows, held_out, rate, tell)
    if not group.is_first:
        return None
    measured = replace(acceptance(prepared, objective, held_out), al_before=before)
    export(prepared, objective.draft, folder)
    num_later = sum(item.is_later_turn for item in items)
    firsts = {item.chat for item in items}
    chats = [chat for chat, one in zip(prepared.chats, prepared.requests, strict=False) if one.ids in firsts]
    cards.write(folder, request, chats, prepared.overlaps, history, rate, int(rows.answer.sum()), num_later, measured)
    return folder


def split(items: Sequence[TrainingChat], seed: int) -> tuple[list[TrainingChat], list[TrainingChat]]:
    """Split into chats to train on and held-out ones: all turns of a chat, and all answers to it, are on one side."""
    chats = list(dict.fromkeys(item.chat for item in items))
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(MOST_HELD_OUT, max(1, len(chats) // HELD_OUT_ONE_IN))
    apart = {chats[number] for number in order[:count]}
    sides: tuple[list[TrainingChat], list[TrainingChat]] = ([], [])
    for item in items:
        sides[item.chat in apart].append(item)
    return sides


def export(prepared: PreparedTraining, draft: nn.Module, folder: Path) -> None:
    """Save the draft in bfloat16, at half the size; a target in float32 can use it, too."""
    request = prepared.request
    halved: Any = draft.to(torch.bfloat16)
    if request.method == "medusa":
        medusa_format.save(halved, folder, presets.name(request.target))
    elif request.method == "mtp":
        mtp_heads.save(halved, folder, prepared.models.target.config.to_dict())
    else:
        usual = "specforge" if request.method == "dspark" else None
        save_draft(halved, folder, request.format or usual, request.slim)
