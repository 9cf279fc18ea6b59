"""Tiny P-EAGLE drafts of random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dflash_bench.engine.drafters.p_eagle import PEagleDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.eagle3 import vocabulary_map
from dflash_bench.models.nets.p_eagle import PEagleConfig, PEagleDraft
from helpers.drafts.tiny import BODY, randomised

CONFIG = PEagleConfig(
    **BODY, draft_vocab_size=97, target_layer_ids=(0, 1, 2), mask_token_id=96, num_layers=2, own_embedding=True
)


def made(**changes: Any) -> PEagleDraft:
    draft: PEagleDraft = randomised(PEagleDraft(replace(CONFIG, **changes)))
    if draft.config.draft_vocab_size < 97:
        counts = torch.randint(0, 1000, (97,), generator=torch.Generator().manual_seed(1))
        draft.d2t, draft.t2d = vocabulary_map(counts, draft.config.draft_vocab_size)
    return draft


def drafter(
    target: Target, num_drafts: int = 5, draft: PEagleDraft | None = None, rule: str = "match"
) -> PEagleDrafter:
    return PEagleDrafter(draft or made(), target.embedding, num_drafts, rule)
