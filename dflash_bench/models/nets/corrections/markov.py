"""DSpark's Markov head: a low-rank bias on a slot's logits by the token before, and a confidence head (2607.05147).

With e = W1[x], the row of the token x before the slot (the anchor before the first), and h the slot's hidden state:

    vanilla   bias = W2 e
    gated     bias = W2 (sigmoid(G [h; e] + b) * e)
    rnn       gate, candidate, output = J [s; e; h] + b, and bias = W2 tanh(output);
              s <- sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate), which is 0 before the first slot

The confidence head estimates the probability that a slot's token is accepted if its predecessors are: sigmoid(w [h; e]
+ c), or of h alone. It does not read the slot's own token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.corrections.base import (
    BlockPass,
    Corrected,
    CorrectionConfig,
    CorrectionHead,
    HeadSizes,
    Pick,
)

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovConfig(CorrectionConfig):
    kind: ClassVar[str] = "DSpark"
    lookups: ClassVar[tuple[str, ...]] = ("markov_w1.weight",)
    markov_rank: int
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {"markov_head": MarkovHead(self, sizes)}
        if self.enable_confidence_head:
            width = sizes.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)
            modules["confidence_head"] = ConfidenceHead(width)
        return modules

    def head(self, draft: Any) -> CorrectionHead:
        return MarkovCorrection(
            draft.markov_head,
            draft.confidence_head if self.enable_confidence_head else None,
            self.confidence_head_with_markov,
        )

    @property
    def has_confidence(self) -> bool:
        return self.enable_confidence_head

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        yield from CorrectionConfig.unsound(self, sizes)
        if self.markov_head_type not in MARKOV_HEADS:
            yield "markov_head_type", self.markov_head_type


class MarkovHead(nn.Module):
    """W1 is looked up by target id; W2 has a row per id of the draft's head."""

    def __init__(self, config: MarkovConfig, sizes: HeadSizes) -> None:
        super().__init__()
        rank, width = config.markov_rank, sizes.hidden_size
        self.kind, self.rank = config.markov_head_type, rank
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, sizes.num_ids, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def start(self, num_rows: int) -> Tensor:
        """Return the state [B, r] before the first slot."""
        return self.markov_w1.weight.new_zeros(num_rows, self.rank)

    def bias(self, hidden: Tensor, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return a slot's bias [..., Vd] and the next state [..., r], given h [..., H], e [..., r] and the state."""
        if self.kind == "vanilla":
            return self.markov_w2(row), state
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, row], dim=-1)).sigmoid()
            return self.markov_w2(gate * row), state
        gate, candidate, output = self.joint_proj(torch.cat([state, row, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self.markov_w2(output.tanh()), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities [B] for [B, width], in float32."""
        scores: Tensor = self.proj(x)
        return scores[..., 0].float().sigmoid()


class MarkovCorrection:
    """Corrects the slots from left to right."""

    def __init__(self, markov: MarkovHead, confidence: ConfidenceHead | None, with_markov: bool) -> None:
        self.markov, self.confidence, self.with_markov = markov, confidence, with_markov

    def correct(self, block: BlockPass, pick: Pick) -> Corrected:
        state, last = self.markov.start(len(block.anchor)), block.anchor
        tokens: list[Tensor] = []
        confidence: list[Tensor] = []
        for slot in range(block.num_drafts):
            hidden, row = block.drafting[:, slot], self.markov.markov_w1(last)
            bias, state = self.markov.bias(hidden, row, state)
            if self.confidence is not None and block.wants_confidence:
                confidence.append(self.confidence(torch.cat([hidden, row], dim=-1) if self.with_markov else hidden))
            last = pick((block.logits[:, slot] + bias)[:, None], slot)[:, 0]
            tokens.append(last)
        return Corrected(torch.stack(tokens, dim=1), torch.stack(confidence, dim=1) if confidence else None)

    def branches(self, block: BlockPass) -> MarkovBranches:
        return MarkovBranches(self.markov, block, self.markov.start(len(block.anchor))[:, None])


@dataclass(frozen=True, slots=True)
class MarkovBranches:
    """Each slot's candidates are all tokens of the draft's head."""

    markov: MarkovHead
    block: BlockPass
    state: Tensor

    def after(self, last: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        hidden = self.block.drafting[:, slot, None].expand(-1, last.shape[1], -1)
        bias, state = self.markov.bias(hidden, self.markov.markov_w1(last), state)
        return self.block.logits[:, slot, None] + bias, state

    def ids(self, candidates: Tensor, slot: int) -> Tensor:
        return self.block.to_target(candidates)
