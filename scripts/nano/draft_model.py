"""A small causal LM that learns to speak as the target does: soft targets on the target's own answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from dflash_bench.training.data import Batch, Data


def new_model(target_config: Any, num_layers: int, embedding: Tensor, norm: Tensor, seed: int) -> Any:
    """The target's architecture with fewer layers; its embedding, which is also its head, and its last norm."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    known = target_config.to_dict()
    changes = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers, "use_cache": False}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**known, **changes}, attn_implementation="eager"))
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.model.norm.weight.data.copy_(norm)
    return model


class DraftModelObjective:
    """`embedding` is the target's, which turns its stored hidden states into what it would say."""

    def __init__(self, draft: Any, rows: Data, embedding: Tensor) -> None:
        self.draft, self.rows, self.embedding = draft, rows, embedding

    def heads(self) -> list[nn.Parameter]:
        return [self.draft.model.embed_tokens.weight]

    def _forward(self, index: list[int]) -> tuple[Tensor, Batch]:
        batch, _ = self.rows.take(index, ())
        with torch.autocast("cpu", torch.bfloat16):
            out = self.draft(batch.ids, attention_mask=batch.mask(torch.float32), position_ids=batch.position)
        return out.logits, batch

    def loss(self, index: list[int], step: int) -> Tensor:
        """Soft cross-entropy [nats per answer token] against the target's own distribution."""
        logits, batch = self._forward(index)
        use = _predicts_answer(batch)
        teacher = torch.softmax(self.rows.final(index)[use] @ self.embedding.T, dim=-1)
        return -(teacher * log_softmax(logits[use].float(), dim=-1)).sum(dim=-1).mean()

    def accepted(self, index: list[int]) -> Tensor:
        """How many answer tokens in a row are right, from each place on, plus one for the bonus token."""
        logits, batch = self._forward(index)
        use = _predicts_answer(batch)
        right = use[:, :-1] & (logits[:, :-1].argmax(dim=-1) == batch.ids[:, 1:])
        lengths = torch.zeros_like(right, dtype=torch.float32)
        run = torch.zeros(len(index))
        for place in reversed(range(right.shape[1])):
            run = (run + 1) * right[:, place]
            lengths[:, place] = run.clamp(max=MOST_COUNTED)
        return lengths[use[:, :-1]] + 1.0


MOST_COUNTED = 7
"""As many tokens as an EAGLE-3 chain proposes, so that the two can be compared."""


def _predicts_answer(batch: Batch) -> Tensor:
    """[R, N]: the next token belongs to an answer of the same conversation."""
    answer = torch.zeros_like(batch.ids, dtype=torch.bool)
    answer[:, :-1] = (batch.weights[:, 1:] > 0) & (batch.document[:, 1:] == batch.document[:, :-1])
    return answer
