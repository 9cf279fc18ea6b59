"""The DFlash training loss: anchors, each with a block of masks behind it (paper, sections 4.1 and 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, log_softmax, scaled_dot_product_attention

from dflash_bench.models.nets.corrections.markov import ConfidenceHead, MarkovConfig, MarkovHead
from dflash_bench.models.nets.corrections.selector import CandidateSelector
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training.data import Batch, Data, tables
from dflash_bench.training.drafts import OUT_OF_VOCAB, DraftVocab
from dflash_bench.training.masks import (
    accepted_lengths,
    block_labels,
    causal,
    context_mask,
    sample_anchors,
    slots,
    uniform_anchors,
)
from dflash_bench.training.trainer import Objective


def block_hidden(
    draft: DFlashDraft,
    features: Tensor,
    embedding: Tensor,
    tables: Rotary,
    batch: Batch,
    ids: Tensor,
    anchors: Tensor,
) -> Tensor:
    """Return the normed states [R, A, B, H] of all blocks of a batch at once; blocks never see each other.

    `features` [R, N, K * H] are the target's states, `ids` [R, A, B] the tokens of the blocks, and `anchors` [R, A]
    their indices in a row.
    """
    config, (num_rows, num_anchors, block) = draft.config, ids.shape
    context, start = context_of(draft, features, embedding, tables, batch), batch.position.gather(1, anchors)
    groups = config.num_heads // config.num_kv_heads
    unseen = ~context_mask(batch, anchors)[:, None, :, None, :]
    later = torch.ones(block, block, dtype=torch.bool, device=ids.device).triu(1)

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (num_rows, num_anchors)).transpose(1, 2) for x in (query, keys, values))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        past_k, past_v = (x.repeat_interleave(groups, dim=1) for x in context[layer])
        past = torch.einsum("rhabd,rhnd->rhabn", q, past_k).masked_fill(unseen, -1e4)
        own = torch.einsum("rhabd,rhacd->rhabc", q, k)
        if config.body.view(layer).is_causal:
            own = own.masked_fill(later, -1e4)
        weights = torch.softmax(torch.cat([past, own], dim=-1).float() / math.sqrt(config.head_dim), dim=-1).to(v.dtype)
        mixed = torch.einsum("rhabn,rhnd->rhabd", weights[..., :-block], past_v)
        mixed = mixed + torch.einsum("rhabc,rhacd->rhabd", weights[..., -block:], v)
        return mixed.transpose(1, 2).flatten(0, 1)

    # Each block is a separate row: convolutions end at its borders.
    places = (start[..., None] + torch.arange(block, device=start.device)).flatten(0, 1)
    hidden: Tensor = draft(embedding[ids.flatten(0, 1)], tables.at(places), attend)
    return hidden.view(num_rows, num_anchors, block, -1)


def context_of(
    draft: DFlashDraft, features: Tensor, embedding: Tensor, tables: Rotary, batch: Batch
) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values per layer [R, kv_heads, N, D] of a batch's tokens, given their features [R, N, K * H]."""
    angles = tables.at(batch.position)
    if not draft.config.body.mixing.passes_layers:
        return draft.context(features, angles)
    context, groups = [], draft.config.num_heads // draft.config.num_kv_heads
    seen = causal(batch)[:, None]

    def attend(_layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        context.append((keys, values))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        return scaled_dot_product_attention(query, k, v, attn_mask=seen)

    draft(draft.context_inputs(embedding[batch.ids], features), angles, attend)
    return context


def slot_weights(block: int, gamma: float) -> Tensor:
    """Return [B]: exp(-(k - 1) / gamma) for slots 1 to B - 1, and 0 for slot 0, the anchor (paper, section 4.2)."""
    weights = torch.exp(-(torch.arange(block) - 1) / gamma)
    weights[0] = 0.0
    return weights


def teacher_places(anchors: Tensor, block: int, length: int, shift: int = 0) -> Tensor:
    """Return [R, A, B], the index of the token before slot k's label, whose target state predicts it.

    They are within `length`. The label is the token at the slot, or with a `shift` of 1 the token after it.
    """
    return (anchors[..., None] + torch.arange(block, device=anchors.device) - 1 + shift).clamp(0, length - 1)


Hidden = Callable[[DFlashDraft, Tensor, Tensor, Rotary, Batch, Tensor, Tensor], Tensor]
"""Conditions a draft on its context; arguments and result as in `block_hidden`."""


class DFlashObjective(Objective):
    """Cross-entropy of the answers' tokens, weighted by slot, over the slots with a label (paper, section 4.2).

    `distil` is the share of the loss that compares with the target's own probabilities instead. They hold more
    information about a place than the one chosen token, which matters if answers are few.
    """

    draft: DFlashDraft

    def __init__(
        self,
        draft: DFlashDraft,
        rows: Data,
        vocab: DraftVocab,
        num_anchors: int,
        gamma: float,
        distil: float = 0.0,
        compiled: bool = False,
        uniform: bool = False,
    ) -> None:
        super().__init__(draft, rows)
        self.vocab, self.num_anchors, self.distil, self.uniform = vocab, num_anchors, distil, uniform
        self.shift = int(draft.config.shifted_labels)
        self.weights = slot_weights(draft.config.block_size + self.shift, gamma)[self.shift :].to(self.device)
        self.tables = tables(draft.config, rows, self.device)
        self.hidden: Hidden = torch.compile(block_hidden, dynamic=False) if compiled else block_hidden

    def anchors(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """Return the anchors of a training step; held-out answers are measured at random ones, whatever this does."""
        if self.uniform:
            return uniform_anchors(batch, self.num_anchors, self.draft.config.block_size)
        return self.random_anchors(batch, seed)

    def random_anchors(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        return sample_anchors(batch, self.num_anchors, torch.Generator().manual_seed(seed))

    def labels(self, batch: Batch, anchors: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels of a block's slots [R, A, B], and their validity."""
        labels, valid = block_labels(batch, anchors, real, self.draft.config.block_size + self.shift)
        return labels[..., self.shift :], valid[..., self.shift :]

    def block_ids(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Return the tokens [R, A, B] of blocks: an anchor and masks, or the text if tokens are drafted singly."""
        config = self.draft.config
        ids, _, _ = slots(batch, anchors, config.block_size)
        if not config.body.is_autoregressive:
            ids[..., 1:] = config.mask_token_id
        return ids

    def _forward(self, index: list[int], seed: int, measures: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return normed states [R, A, B, H], labels and their validity [R, A, B], and anchors [R, A]."""
        batch, features = self.rows.take(index, self.draft.config.target_layer_ids)
        anchors, real = self.random_anchors(batch, seed) if measures else self.anchors(batch, seed)
        labels, valid = self.labels(batch, anchors, real)
        with self.half():
            hidden = self.hidden(
                self.draft,
                features,
                self.vocab.embedding,
                self.tables,
                batch,
                self.block_ids(batch, anchors),
                anchors,
            )
        return hidden, labels, valid, anchors

    def loss(self, index: list[int], step: int) -> Tensor:
        hidden, labels, valid, anchors = self._forward(index, step)
        indices, weights = self.vocab.index_of[labels], self.weights.expand(labels.shape)
        use = valid & (indices != OUT_OF_VOCAB) & (weights > 0)
        with self.half():
            logits = self.vocab.logits(hidden[use])
        scores = log_softmax(logits.float(), dim=-1)
        losses = (self.distil - 1) * scores.gather(1, indices[use][:, None])[:, 0]
        if self.distil:
            places = teacher_places(anchors, labels.shape[-1], self.rows.ids.shape[1], self.shift)
            teacher = self._teacher(index, places, use)
            losses = losses - self.distil * (teacher * scores).sum(dim=-1)
        # Without a slot to learn from the loss is 0, not NaN.
        return (losses * weights[use]).sum() / weights[use].sum().clamp(min=torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def _teacher(self, index: list[int], places: Tensor, use: Tensor) -> Tensor:
        """Return the target's probabilities [n, Vd] over the draft's vocabulary at the n `places` in use."""
        row = torch.arange(len(index), device=places.device)[:, None, None].expand_as(places)
        with self.half():
            logits = self.vocab.logits(self.rows.final(index)[row[use], places[use]])
        return torch.softmax(logits.float(), dim=-1)

    def accepted(self, index: list[int]) -> Tensor:
        hidden, labels, valid, _ = self._forward(index, 0, measures=True)
        with self.half():
            indices = self.vocab.logits(hidden).argmax(dim=-1)
        right = (self.vocab.token_ids[indices] == labels) & valid
        return accepted_lengths(right[..., 1 - self.shift :], valid[..., 0])


# The training losses of blocks with a correction head: DFlash 2's candidate selector and DSpark's Markov head.
#
# The head reads the true tokens before a slot instead of drafted ones. A draft counts up to its first wrong token, so
# the slots that matter read true tokens when decoding, too.


class CorrectedObjective(DFlashObjective):
    """The DFlash loss over drafting slots, with the head's logits and loss (`corrected` and `extra_loss`).

    Shapes: n slots in use, of hidden states [n, H], with the tokens `before` them [n] and base logits [n, Vd].
    """

    def __init__(
        self,
        draft: Any,
        rows: Data,
        vocab: DraftVocab,
        num_anchors: int,
        gamma: float,
        distil: float = 0.0,
        compiled: bool = False,
        uniform: bool = False,
    ) -> None:
        super().__init__(draft, rows, vocab, num_anchors, gamma, distil, compiled, uniform)
        config = draft.config
        self.num_drafts, self.slots = config.num_drafts(config.block_size), config.slots(config.block_size)
        self.weights = slot_weights(self.num_drafts + 1, gamma)[1:].to(self.device)
        # A head over the whole vocabulary has a row for each token, whichever tokens are drafted.
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
        """Return losses [n] of log-probabilities [n, C] at labels [n], mixed with the loss against a teacher [n, C]."""
        hard = -scores.gather(1, labels[:, None])[:, 0]
        return hard if teacher is None else (1 - self.distil) * hard - self.distil * (teacher * scores).sum(dim=-1)

    def slot_losses(
        self, hidden: Tensor, before: Tensor, logits: Tensor, labels: Tensor, teacher: Tensor | None
    ) -> Tensor:
        """Return the loss [n] of each slot."""
        raise NotImplementedError

    def extra_loss(self, hidden: Tensor, before: Tensor, valid: Tensor, right: Tensor) -> Tensor | float:
        """Return an additional loss, given all slots [R, A, N] and whether each is predicted right."""
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
        hidden, tokens, real, _ = self._forward(index, 0, measures=True)
        hidden, before = hidden[:, :, self.slots].float(), tokens[..., :-1]
        logits = self.corrected(hidden.flatten(0, 2), before.flatten(), self.base(hidden.flatten(0, 2)))
        best = self.vocab.token_ids[logits.argmax(dim=-1)].view(before.shape)
        return accepted_lengths((best == tokens[..., 1:]) & real[..., 1:], real[..., 0])


class SelectorObjective(CorrectedObjective):
    """DFlash 2: the block's own loss, and the selector's loss where the right token is among its candidates."""

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
    """DSpark: the loss of the corrected logits, and the loss of the confidence head, which learns the acceptance.

    No gradient flows through the confidence head into the draft.
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
        # A slot counts if all slots before it were accepted, as in decoding.
        reached = valid & torch.cat([torch.ones_like(right[..., :1]), right[..., :-1].cumprod(dim=-1).bool()], dim=-1)
        rows = self._markov().markov_w1(before)
        said = confidence(torch.cat([hidden, rows], dim=-1)[reached].detach())
        return binary_cross_entropy(said, right[reached].float()) if len(said) else 0.0
