"""The training losses of blocks with a correction head: DFlash 2's candidate selector and DSpark's Markov head.

The head reads the true tokens before a slot in place of drafted ones. A draft counts up to its first wrong token, so
the slots that decide read true tokens when decoding, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, log_softmax

from dflash_bench.models.nets.corrections.markov import ConfidenceHead, MarkovConfig, MarkovHead
from dflash_bench.models.nets.corrections.selector import CandidateSelector
from dflash_bench.training.data import Batch, Data
from dflash_bench.training.dflash import DFlashObjective, slot_weights
from dflash_bench.training.drafts import OUT_OF_VOCAB, DraftVocab
from dflash_bench.training.masks import accepted_lengths, block_labels


class CorrectedObjective(DFlashObjective):
    """The DFlash loss over the slots that draft, with what the head adds; `corrected` and `extra_loss` are the head's.

    Shapes: n slots in use, of hidden states [n, H], with the tokens `before` them [n] and base logits [n, Vd].
    """

    def __init__(
        self, draft: Any, rows: Data, vocab: DraftVocab, num_anchors: int, gamma: float, distil: float = 0.0,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(draft, rows, vocab, num_anchors, gamma, distil, compiled)
        config = draft.config
        self.num_drafts, self.slots = config.num_drafts(config.block_size), config.slots(config.block_size)
        self.weights = slot_weights(self.num_drafts + 1, gamma)[1:].to(self.device)
        # A head of the whole vocabulary has a row for each token, whatever it learns to distinguish.
        self.of_head = vocab.token_ids if config.draft_vocab_size is None else torch.arange(len(vocab.token_ids))

    def labels(self, batch: Batch, anchors: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the anchor and the tokens that its block drafts [R, A, N + 1], and their validity."""
        return block_labels(batch, anchors, real, self.num_drafts + 1)

    def base(self, hidden: Tensor) -> Tensor:
        with self.half():
            return self.vocab.logits(hidden).float()

    def corrected(self, hidden: Tensor, before: Tensor, logits: Tensor) -> Tensor:
        """Return the logits [n, Vd] from which a greedy draft takes the likeliest token."""
        raise NotImplementedError

    def losses(self, scores: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return losses [n] of log-probabilities [n, C] at labels [n], mixed with those against a teacher's [n, C]."""
        hard = -scores.gather(1, labels[:, None])[:, 0]
        return hard if teacher is None else (1 - self.distil) * hard - self.distil * (teacher * scores).sum(dim=-1)

    def slot_losses(
        self, hidden: Tensor, before: Tensor, logits: Tensor, labels: Tensor, teacher: Tensor | None
    ) -> Tensor:
        """Return the loss [n] of each slot."""
        raise NotImplementedError

    def extra_loss(self, hidden: Tensor, before: Tensor, valid: Tensor, right: Tensor) -> Tensor | float:
        """Return what is added to the loss, given all slots [R, A, N] and which are predicted right."""
        return 0.0

    def loss(self, index: list[int], step: int) -> Tensor:
        hidden, tokens, real, anchors = self._forward(index, step)
        hidden, before, labels, valid = hidden[:, :, self.slots], tokens[..., :-1], tokens[..., 1:], real[..., 1:]
        indices = self.vocab.index_of[labels]
        use = valid & (indices != OUT_OF_VOCAB)
        teacher = None
        if self.distil:
            places = anchors[..., None] + torch.arange(self.num_drafts, device=anchors.device)
            teacher = self._teacher(index, places.clamp(max=self.rows.ids.shape[1] - 1), use)
        chosen, prior = hidden[use].float(), before[use]
        logits = self.base(chosen)
        weights = self.weights.expand(labels.shape)[use]
        losses = self.slot_losses(chosen, prior, logits, indices[use], teacher)
        right = torch.zeros_like(valid)
        with torch.no_grad():
            right[use] = self.corrected(chosen, prior, logits).argmax(dim=-1) == indices[use]
        mean = (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        return mean + self.extra_loss(hidden.float(), before, valid, right)

    def accepted(self, index: list[int]) -> Tensor:
        hidden, tokens, real, _ = self._forward(index, 0)
        hidden, before = hidden[:, :, self.slots].float(), tokens[..., :-1]
        logits = self.corrected(hidden.flatten(0, 2), before.flatten(), self.base(hidden.flatten(0, 2)))
        best = self.vocab.token_ids[logits.argmax(dim=-1)].view(before.shape)
        return accepted_lengths((best == tokens[..., 1:]) & real[..., 1:], real[..., 0])


class SelectorObjective(CorrectedObjective):
    """DFlash 2: the block's own loss, and that of the selector among its candidates, where the right one is there."""

    def _selector(self) -> CandidateSelector:
        selector = self.draft.candidate_selector
        assert isinstance(selector, CandidateSelector)
        return selector

    def heads(self) -> list[nn.Parameter]:
        selector = self._selector()
        return [selector.predecessor_codebook, selector.successor_codebook]

    def _candidates(self, hidden: Tensor, before: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates' indices and scores [n, C]."""
        selector = self._selector()
        values, ids = logits.topk(selector.top_k, dim=-1)
        wanted = selector.hidden_projection(hidden) * selector.predecessor_codebook[before]
        gains = (selector.successor_codebook[self.of_head[ids]] * wanted[:, None]).sum(dim=-1)
        return ids, values + gains

    def corrected(self, hidden: Tensor, before: Tensor, logits: Tensor) -> Tensor:
        ids, scores = self._candidates(hidden, before, logits)
        return torch.full_like(logits, -torch.inf).scatter(1, ids, scores)

    def slot_losses(
        self, hidden: Tensor, before: Tensor, logits: Tensor, labels: Tensor, teacher: Tensor | None
    ) -> Tensor:
        unary = self.losses(log_softmax(logits, dim=-1), labels, teacher)
        ids, scores = self._candidates(hidden, before, logits)
        is_right = ids == labels[:, None]
        among = None
        if teacher is not None:
            mass = teacher.gather(1, ids)
            among = mass / mass.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        chosen = self.losses(log_softmax(scores, dim=-1), is_right.long().argmax(dim=-1), among)
        return unary + torch.where(is_right.any(dim=-1), chosen, 0.0)


class MarkovObjective(CorrectedObjective):
    """DSpark: the loss of the corrected logits, and that of the confidence head, which learns the draft's acceptance.

    The confidence head only looks on: no gradient goes through it into the draft.
    """

    def _markov(self) -> MarkovHead:
        head = self.draft.markov_head
        assert isinstance(head, MarkovHead)
        return head

    def _confidence(self) -> ConfidenceHead | None:
        config = self.draft.config.correction
        assert isinstance(config, MarkovConfig)
        head = self.draft.confidence_head if config.has_confidence else None
        assert head is None or isinstance(head, ConfidenceHead)
        return head

    def heads(self) -> list[nn.Parameter]:
        confidence = self._confidence()
        of_confidence = [] if confidence is None else [p for p in confidence.parameters() if p.dim() > 1]
        return [*self._markov().parameters(), *of_confidence]

    def corrected(self, hidden: Tensor, before: Tensor, logits: Tensor) -> Tensor:
        markov = self._markov()
        correction: Tensor = markov.markov_w1(before) @ markov.markov_w2.weight[self.of_head].T
        return logits + correction

    def slot_losses(
        self, hidden: Tensor, before: Tensor, logits: Tensor, labels: Tensor, teacher: Tensor | None
    ) -> Tensor:
        return self.losses(log_softmax(self.corrected(hidden, before, logits), dim=-1), labels, teacher)

    def extra_loss(self, hidden: Tensor, before: Tensor, valid: Tensor, right: Tensor) -> Tensor | float:
        confidence = self._confidence()
        if confidence is None:
            return 0.0
        # As when decoding: a slot counts if all before it were accepted.
        reached = valid & torch.cat([torch.ones_like(right[..., :1]), right[..., :-1].cumprod(dim=-1).bool()], dim=-1)
        rows = self._markov().markov_w1(before)
        said = confidence(torch.cat([hidden, rows], dim=-1)[reached].detach())
        return binary_cross_entropy(said, right[reached].float()) if len(said) else 0.0
