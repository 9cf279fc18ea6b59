"""Tiny drafts with each kind of head that corrects a block, for the tiny target of `toy.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.corrections.domino import DominoConfig
from dflash_bench.models.nets.corrections.lilicorr import LiLiCorrConfig
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.corrections.xpress import XPressConfig
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from helpers.drafts.tiny import DFLASH

MARKOV: dict[str, Any] = {"markov_rank": 6, "enable_confidence_head": True}
DOMINO: dict[str, Any] = {"emb_dim": 5, "gru_hidden_dim": 7}
XPRESS: dict[str, Any] = {"xpress_rank": 6, "xpress_mlp_ratio": 2, "num_jacobi_passes": 3}
LILICORR = LiLiCorrConfig(
    lilicorr_candidate_topk=4,
    lilicorr_factor_dim=8,
    lilicorr_hidden_size=16,
    lilicorr_num_layers=2,
    lilicorr_num_heads=2,
    lilicorr_mlp_ratio=2.0,
    lilicorr_logit_scale=8.0,
    lilicorr_vector_eps=1e-4,
)
SHIFTED: dict[str, Any] = {"shifted_labels": True}
HEADS: dict[str, DFlashConfig] = {
    "selector": replace(DFLASH, correction=SelectorConfig(selector_rank=6, selector_top_k=5)),
    "vanilla": replace(DFLASH, **SHIFTED, correction=MarkovConfig(**MARKOV)),
    "gated": replace(DFLASH, **SHIFTED, correction=MarkovConfig(**MARKOV, markov_head_type="gated")),
    "rnn": replace(
        DFLASH, **SHIFTED, correction=MarkovConfig(**MARKOV, markov_head_type="rnn", confidence_head_with_markov=False)
    ),
    "domino": replace(DFLASH, correction=DominoConfig(**DOMINO, pure_draft_prefix_len=0)),
    "shifted domino": replace(
        DFLASH, **SHIFTED, last_slot_idle=True, correction=DominoConfig(**DOMINO, pure_draft_prefix_len=1)
    ),
    "xpress": replace(DFLASH, correction=XPressConfig(**XPRESS)),
    "shifted xpress": replace(DFLASH, **SHIFTED, correction=XPressConfig(**XPRESS)),
    "lilicorr": replace(DFLASH, correction=LILICORR),
    "wide lilicorr": replace(DFLASH, correction=replace(LILICORR, lilicorr_hidden_size=32)),
}


def draft_of(kind: str, scale: float = 8.0, **changes: Any) -> DFlashDraft:
    """A body with the same weights in every kind; a head of random weights, times `scale`: with 0 it does nothing."""
    draft = DFlashDraft(replace(HEADS[kind], **changes))
    plain = DFlashDraft(DFLASH)
    initialise(plain, 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        weights = dict(plain.named_parameters())
        for name, parameter in draft.named_parameters():
            if name in weights:
                parameter.copy_(weights[name] * (8 if parameter.ndim == 2 else 1))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 * scale)
    return draft.eval()


def drafter_of(target: Target, kind: str, scale: float = 8.0, rule: str = "match", **changes: Any) -> DFlashDrafter:
    return DFlashDrafter(draft_of(kind, scale, **changes), target.embedding, target.head, rule=rule)
