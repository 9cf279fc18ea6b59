"""Variants of a DFlash draft's training that differ in a single aspect, for `ablations.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, default_target_layers, initialise
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training.config import GAMMAS
from dflash_bench.training.data import Batch, Data
from dflash_bench.training.dflash import DFlashObjective, block_hidden
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.masks import causal, context_mask

NUM_ANCHORS = 32


@dataclass(frozen=True, slots=True)
class Variant:
    """A draft's architecture and training; the defaults are the base of all comparisons."""

    name: str
    layers: int = 3
    num_features: int = 5
    block: int = 16
    decay: bool = True
    anchors: str = "sampled"
    """Anchors: "sampled", or "uniform": answers cut into blocks once."""
    conditioning: str = "KV injection"
    """One of "KV injection", "input fusion" and "tokens": token embeddings in place of the target's states."""
    answers: str = "own"
    """Answers: "own", or "reference": the data set's answers."""
    masked: bool = True
    """Whether the loss ignores slots beyond the end of an answer."""

    @property
    def runs_in_engine(self) -> bool:
        """Whether a drafter supports the conditioning; otherwise only the training's own measure compares it."""
        return self.conditioning == "KV injection"


BASE = Variant("base")


@dataclass(frozen=True, slots=True)
class Table:
    """An ablation of the paper: its variants besides the base, and the paper's order, best first."""

    title: str
    paper: str
    variants: tuple[Variant, ...]
    order: tuple[str, ...]


def _alike(name: str, **changes: Any) -> Variant:
    return replace(BASE, name=name, **changes)


TABLES = (
    Table(
        "Layers of the draft",
        "Paper, table 6: acceptance rises from 3 to 5 to 8 layers",
        tuple(_alike(f"{n} layers" if n > 1 else "1 layer", layers=n) for n in (1, 2, 4, 5)),
        ("5 layers", "4 layers", "base", "2 layers", "1 layer"),
    ),
    Table(
        "Layers of the target that are tapped",
        "Paper, table 7: five features beat three",
        (_alike("3 features", num_features=3), _alike("1 feature", num_features=1)),
        ("base", "3 features", "1 feature"),
    ),
    Table(
        "Block size trained, and used",
        "Paper, table 8: 16 used 16, 8 used 8, 16 used 8, 8 used 16",
        (_alike("trained 8", block=8),),
        ("base", "trained 8"),
    ),
    Table(
        "Conditioning",
        "Paper, tables 9 and 10: KV injection beats input fusion, and that no features at all",
        (_alike("input fusion", conditioning="input fusion"), _alike("tokens only", conditioning="tokens")),
        ("base", "input fusion", "tokens only"),
    ),
    Table(
        "Anchors",
        "Paper, table 13: sampled anchors beat uniform blocks",
        (_alike("uniform blocks", anchors="uniform"),),
        ("base", "uniform blocks"),
    ),
    Table(
        "Decay of the loss along the block",
        "Paper, ablations: drafts learn faster with it, and end alike",
        (_alike("no decay", decay=False),),
        ("base", "no decay"),
    ),
    Table(
        "Whose answers",
        "Paper, section 5.1: the target's own",
        (_alike("reference answers", answers="reference"),),
        ("base", "reference answers"),
    ),
    Table(
        "Slots beyond an answer's end",
        "Not in the paper; implementations leave them out of the loss",
        (_alike("all slots", masked=False),),
        ("base", "all slots"),
    ),
)


def variants() -> Iterator[Variant]:
    yield BASE
    for table in TABLES:
        yield from table.variants


def taps(variant: Variant, depth: int) -> tuple[int, ...]:
    return default_target_layers(depth, variant.num_features)


def new_draft(variant: Variant, target: Any, mask_token_id: int, seed: int) -> DFlashDraft:
    """Return a fresh draft with the target's sizes and last norm."""
    config = target.config
    draft = DFlashDraft(
        DFlashConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=variant.layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=target.get_input_embeddings().weight.shape[0],
            block_size=variant.block,
            mask_token_id=mask_token_id,
            target_layer_ids=taps(variant, config.num_hidden_layers),
            num_target_layers=config.num_hidden_layers,
        )
    )
    initialise(draft, seed)
    draft.norm.weight.data.copy_(target.model.norm.weight)
    return draft


class VariantObjective(DFlashObjective):
    """The loss of a variant."""

    def __init__(self, variant: Variant, draft: DFlashDraft, rows: Data, vocab: DraftVocab) -> None:
        gamma = GAMMAS[variant.block] if variant.decay else math.inf
        super().__init__(draft, rows, vocab, NUM_ANCHORS, gamma, uniform=variant.anchors == "uniform")
        self.variant = variant
        # `TokenRows` makes features that only repeat the embedding of their token.
        self.hidden = {"KV injection": block_hidden, "input fusion": fused_hidden, "tokens": block_hidden}[
            variant.conditioning
        ]

    def labels(self, batch: Batch, anchors: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        labels, valid = super().labels(batch, anchors, real)
        if self.variant.masked:
            return labels, valid
        places = anchors[..., None] + torch.arange(self.variant.block)
        return labels, (places < batch.ids.shape[1]) & real[..., None]

    def accepted(self, index: list[int]) -> Tensor:
        """Measure over answers' tokens only, so that all variants are comparable."""
        trained_as, self.variant = self.variant, replace(self.variant, masked=True)
        try:
            return super().accepted(index)
        finally:
            self.variant = trained_as


def fused_hidden(
    draft: DFlashDraft,
    features: Tensor,
    embedding: Tensor,
    tables: Rotary,
    batch: Batch,
    ids: Tensor,
    anchors: Tensor,
) -> Tensor:
    """Return the hidden states if features are inputs: context places pass through the draft's layers like tokens.

    A layer's keys and values then come from the previous layer's output, not from the features.
    """
    config, (num_rows, num_anchors, block) = draft.config, ids.shape
    groups, length = config.num_heads // config.num_kv_heads, features.shape[1]
    context, x = draft.hidden_norm(draft.fc(features)), embedding[ids.flatten(1)]
    places = (batch.position.gather(1, anchors)[..., None] + torch.arange(block)).flatten(1)
    # Rows [context; blocks] attend to the preceding context of their conversation, and blocks also to themselves.
    of_blocks = context_mask(batch, anchors).repeat_interleave(block, dim=1)
    block_number = torch.arange(num_anchors).repeat_interleave(block)
    same_block = (block_number[:, None] == block_number).expand(num_rows, -1, -1)
    nothing = torch.zeros(num_rows, length, num_anchors * block, dtype=torch.bool)
    seen = torch.cat([torch.cat([causal(batch), nothing], dim=2), torch.cat([of_blocks, same_block], dim=2)], dim=1)
    both, all_places = torch.cat([context, x], dim=1), torch.cat([batch.position, places], dim=1)

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None])

    hidden: Tensor = draft(both, tables.at(all_places), attend)
    return hidden[:, length:].reshape(num_rows, num_anchors, block, -1)
