"""A small causal LM, trained on the target's distribution over the target's own answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from dflash_bench.training.data import Batch, Data
from dflash_bench.training.masks import accepted_lengths, additive, causal, is_answer_after, shift
from dflash_bench.training.trainer import Objective


def new_model(target_config: Any, num_layers: int, embedding: Tensor, norm: Tensor, seed: int) -> Any:
    """Return the target's architecture with fewer layers, but its embedding (also the head) and its last norm."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    known = target_config.to_dict()
    changes = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers, "use_cache": False}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**known, **changes}, attn_implementation="eager"))
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.model.norm.weight.data.copy_(norm)
    return model


class DraftModelObjective(Objective):
    """Soft targets on answers; `embedding` [V, H] is the target's, which turns its hidden states into logits."""

    def __init__(self, draft: Any, rows: Data, embedding: Tensor) -> None:
        super().__init__(draft, rows)
        self.embedding = embedding

    def heads(self) -> list[nn.Parameter]:
        return [self.draft.model.embed_tokens.weight]

    def _forward(self, index: list[int]) -> tuple[Tensor, Batch]:
        """Return logits [R, N, V] and the batch."""
        batch, _ = self.rows.take(index, ())
        with self.half():
            out = self.draft(batch.ids, attention_mask=additive(causal(batch)), position_ids=batch.position)
        return out.logits, batch

    def loss(self, index: list[int], step: int) -> Tensor:
        """Return the soft cross-entropy [nats per answer token] against the target's distribution."""
        logits, batch = self._forward(index)
        use = is_answer_after(batch, 1)
        teacher = torch.softmax(self.rows.final(index)[use] @ self.embedding.T, dim=-1)
        return -(teacher * log_softmax(logits[use].float(), dim=-1)).sum(dim=-1).mean()

    def accepted(self, index: list[int]) -> Tensor:
        """Count the consecutive right answer tokens from each place on, plus one for the bonus token."""
        logits, batch = self._forward(index)
        use = is_answer_after(batch, 1)
        right = use & (logits.argmax(dim=-1) == shift(batch.ids, 1))
        in_a_row = torch.stack([shift(right, step) for step in range(MOST_COUNTED)], dim=-1)
        return accepted_lengths(in_a_row, use)


MOST_COUNTED = 7
"""The number of tokens in an EAGLE-3 chain, for comparability."""
