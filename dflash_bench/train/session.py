"""`train`, from a request to a draft: prompts, the target's answers, rows, the loop, a folder that `run` can load.

Every stage leaves what it made in the folder's `work`, and finds it there when it is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_bench.engine.architecture import final_norm
from dflash_bench.errors import UserError
from dflash_bench.models import presets
from dflash_bench.models.formats import medusa as medusa_format
from dflash_bench.models.formats import save_draft
from dflash_bench.train import cards, turns
from dflash_bench.train.claims import claim
from dflash_bench.train.fitting import acceptance, fitted, searched_rate
from dflash_bench.train.preparing import ROW_LENGTH, Tell, pad_id, prepare
from dflash_bench.train.request import Request, check
from dflash_bench.train.rows import Conversation, Rows, stored

HELD_OUT_ONE_IN, MOST_HELD_OUT = 16, 96
"""Chats that are never trained on."""


def perform(request: Request, tell: Tell) -> Path | None:
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
    folders = turns.collect(prepared, tell)
    items = stored(folders)
    trained, held_out = split(items, request.seed)
    model = prepared.models.target
    rows = Rows(
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


def split(items: Sequence[Conversation], seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """What is trained on, and what is not: all turns of a chat, and all answers to it, on one side."""
    chats = list(dict.fromkeys(item.chat for item in items))
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(MOST_HELD_OUT, max(1, len(chats) // HELD_OUT_ONE_IN))
    apart = {chats[number] for number in order[:count]}
    sides: tuple[list[Conversation], list[Conversation]] = ([], [])
    for item in items:
        sides[item.chat in apart].append(item)
    return sides


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


def _silent(text: str) -> None:
    """What all but the first process say."""
