"""Fresh drafts for a target of any architecture, with the target's sizes, rotary angles and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.models.architecture import decoder_layers, final_norm
from dflash_bench.models.configs import Heads, optional
from dflash_bench.models.nets import dflash, eagle3
from dflash_bench.models.nets.bodies import FUSIONS, PLAIN, BlockView, DraftBody
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads, ResBlock
from dflash_bench.models.nets.mtp import FULL, MTPConfig, MTPDraft

NUM_FEATURES = 5
NUM_LAYERS = 2
NUM_HEADS = 4
OUT_OF_VOCAB = -1
"""Index of a token that is not in a reduced vocabulary."""


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The target's embedding [V, H] and the part of its vocabulary that a draft may use.

    `head` [Vd, H] holds the rows of the target's head for `token_ids` [Vd], ascending; `index_of` [V] maps a token id
    to its row, or to OUT_OF_VOCAB.
    """

    embedding: Tensor
    head: Tensor
    token_ids: Tensor
    index_of: Tensor

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor, counts: Tensor | None = None, size: int | None = None) -> DraftVocab:
        """Take the target's whole vocabulary, or the `size` tokens that are most frequent by `counts` [V]."""
        token_ids = torch.arange(len(head))
        if counts is not None and size is not None and size < len(head):
            token_ids = counts.argsort(descending=True, stable=True)[:size].sort().values
        index_of = torch.full((len(head),), OUT_OF_VOCAB)
        index_of[token_ids] = torch.arange(len(token_ids))
        token_ids, index_of = token_ids.to(head.device), index_of.to(head.device)
        return cls(embedding.detach(), head.detach()[token_ids], token_ids, index_of)

    @classmethod
    def only(cls, embedding: Tensor, head: Tensor, token_ids: Tensor | None) -> DraftVocab:
        """Take these tokens, ascending, or the whole vocabulary."""
        if token_ids is None:
            return cls.of(embedding, head)
        counts = torch.zeros(len(head)).index_fill(0, token_ids.cpu(), 1.0)
        return cls.of(embedding, head, counts, len(token_ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., Vd] of normed states [..., H], the draft's or the target's last ones."""
        return hidden @ self.head.to(hidden.dtype).T


def taps(num_layers: int, num_features: int | None = None) -> tuple[int, ...]:
    """Return the target layers whose outputs are stored for all drafts: DFlash's layers, and the last layer.

    Raises UserError for more features than there are layers from the second to the third-to-last.
    """
    most = max(1, num_layers - 3)
    if num_features is not None and num_features > most:
        raise UserError(f"--features is at most {most} for a target of {num_layers} layers")
    return (*dflash.default_target_layers(num_layers, num_features or min(NUM_FEATURES, most)), num_layers - 1)


def eagle3_taps(stored: tuple[int, ...]) -> tuple[int, ...]:
    """Return a low, a middle and a high layer among the stored layers."""
    *layers, _ = stored
    return (layers[0], layers[len(layers) // 2], layers[-1])


UNUSED = "mask", "reserved", "unused", "pad"


def mask_token(tokenizer: Any, num_embeddings: int, wanted: str | None) -> int:
    """Return the id of the token that stands for a masked position: `wanted`, or else a spare id.

    Raises UserError if the tokenizer lacks `wanted`, or if no id is spare.
    """
    if wanted is not None:
        token_id = tokenizer.get_vocab().get(wanted)
        if token_id is None:
            raise UserError(f"--mask-token {wanted}: the tokenizer has no such token; name one that it has")
        return int(token_id)
    if len(tokenizer) < num_embeddings:
        return len(tokenizer)
    raise UserError("every id of the target's vocabulary is taken; name a token for the mask: --mask-token TOKEN")


def unused_token(tokenizer: Any, num_embeddings: int) -> str | None:
    """Return a special token to stand for a masked position if no id is spare; None if one is.

    Raises UserError if the chat template, or the end of a text, uses all special tokens.
    """
    if len(tokenizer) < num_embeddings:
        return None
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    special: list[str] = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and token.content not in tokenizer.chat_template and token.content not in used
    ]
    if not special:
        raise UserError(
            "every id of the target's vocabulary is taken, and every special token is used, so none is left for the "
            "mask; name a token that texts do not contain: --mask-token TOKEN"
        )
    return min(special, key=lambda token: not any(word in token.lower() for word in UNUSED))


def body_of(fusion: str, is_autoregressive: bool, num_layers: int) -> DraftBody:
    """Return the body of a draft of the paper's ablations (tables 9 and 10), or the plain one."""
    views = (BlockView(is_causal=True),) * num_layers if is_autoregressive else ()
    return DraftBody(views=views, mixing=FUSIONS[fusion], is_autoregressive=is_autoregressive)


def new_dflash(
    target: Any,
    layers: tuple[int, ...],
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    seed: int,
    token_ids: Tensor | None = None,
    intermediate_size: int | None = None,
    body: DraftBody = PLAIN,
) -> DFlashDraft:
    """Return a fresh DFlash draft whose last norm starts as the target's, of the target's sizes or a narrower one.

    With `token_ids` [Vd], ascending, it drafts only these tokens: its head holds the target's rows for them, untrained.
    """
    reduced: dict[str, Any] = {} if token_ids is None else {"own_head": True, "draft_vocab_size": len(token_ids)}
    config = DFlashConfig(
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=layers,
        body=body,
        shifted_labels=body.is_autoregressive,
        **reduced,
        **_shape(target, intermediate_size),
    )
    draft = DFlashDraft(config)
    dflash.initialise(draft, seed)
    _quieten(draft.norm, target)
    if token_ids is not None:
        token_ids = token_ids.cpu()
        draft.d2t = token_ids - torch.arange(len(token_ids))
        draft.t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
        _share_head(draft, target)
        draft.lm_head.requires_grad_(False)
    return draft


def new_eagle3(
    target: Any,
    layers: tuple[int, ...],
    counts: Tensor,
    vocab_size: int,
    seed: int,
    trains_head: bool = True,
    intermediate_size: int | None = None,
) -> Eagle3Draft:
    """Return a fresh EAGLE-3 draft for the most frequent tokens by `counts` [V]; its head starts as the target's."""
    shape = _shape(target, intermediate_size)
    config = Eagle3Config(draft_vocab_size=vocab_size, target_layer_ids=layers, **shape)
    draft = Eagle3Draft(config)
    dflash.initialise(draft, seed)
    draft.d2t, draft.t2d = eagle3.vocabulary_map(counts, vocab_size)
    _share_head(draft, target)
    draft.lm_head.requires_grad_(trains_head)
    _quieten(draft.norm, target)
    return draft


def spoken(draft: DFlashDraft) -> Tensor | None:
    """Return the tokens [Vd] of a draft's own reduced vocabulary, or None."""
    if draft.config.draft_vocab_size is None:
        return None
    return torch.arange(draft.config.draft_vocab_size) + draft.d2t.cpu()


def _share_head(draft: DFlashDraft | Eagle3Draft, target: Any) -> None:
    ids = torch.arange(len(draft.d2t)) + draft.d2t
    head = target.get_output_embeddings().weight
    draft.lm_head.weight.data.copy_(head[ids.to(head.device)])


CONV_TAPS, CONV_GROUP = 2, 16
"""Taps of DFlash 2's convolutions, and channels that share a coefficient, as in published drafts."""
CANDIDATES = 16


def as_dflash2(draft: DFlashDraft, vocab: DraftVocab, rank: int, seed: int) -> DFlashDraft:
    """Return the draft with identity convolutions and a selector that adds nothing yet: its output is unchanged.

    Successors start as the head's rows, projected at random, so that similar tokens are close; predecessors at zero, so
    that unseen predecessors keep the block's own choice. Raises UserError for widths without whole groups.
    """
    config = draft.config
    if config.hidden_size % CONV_GROUP:
        raise UserError(
            f"DFlash 2 needs a hidden size in groups of {CONV_GROUP}; this target's is {config.hidden_size}"
        )
    body = replace(config.body, conv_kernel_size=CONV_TAPS, conv_group_size=CONV_GROUP)
    size = min(CANDIDATES, len(vocab.token_ids))
    made = _grown(draft, body=body, correction=SelectorConfig(selector_rank=rank, selector_top_k=size))
    selector: Any = made.candidate_selector
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(selector.hidden_projection.weight, std=config.hidden_size**-0.5, generator=generator)
    rows = vocab.token_ids if config.draft_vocab_size is None else torch.arange(len(vocab.token_ids))
    selector.successor_codebook.data[rows] = _projected(vocab.head, rank, generator)
    for layer in made.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            nn.init.zeros_(conv.kernel_projection.weight)  # type: ignore[union-attr, arg-type]
    return made


def as_dspark(draft: DFlashDraft, vocab: DraftVocab, rank: int, seed: int) -> DFlashDraft:
    """Return the draft with shifted labels, a Markov head that adds nothing yet, and a confidence head of one half."""
    markov = MarkovConfig(markov_rank=rank, enable_confidence_head=True)
    made = _grown(draft, shifted_labels=True, correction=markov)
    head: Any = made.markov_head
    head.markov_w1.weight.data.copy_(_projected(vocab.embedding, rank, torch.Generator().manual_seed(seed)))
    nn.init.zeros_(head.markov_w2.weight)
    confidence: Any = made.confidence_head
    nn.init.zeros_(confidence.proj.weight)
    nn.init.zeros_(confidence.proj.bias)
    return made


def _grown(draft: DFlashDraft, **changes: Any) -> DFlashDraft:
    """Return a draft with a changed config and all weights of `draft`."""
    made = DFlashDraft(replace(draft.config, **changes))
    made.load_state_dict({**made.state_dict(), **draft.state_dict()})
    if draft.config.own_head:
        made.lm_head.requires_grad_(draft.lm_head.weight.requires_grad)
    return made


def _projected(rows: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Return rows [n, H] projected at random to [n, rank], of variance 1."""
    codes = rows.detach().float().cpu() @ torch.randn(rows.shape[1], rank, generator=generator)
    return codes / codes.std().clamp(min=1e-6)


def new_mtp(target: Any, seed: int) -> MTPDraft:
    """Return MTP heads whose layer starts as the target's last layer with full attention, reading its state alone."""
    text = target.config.get_text_config()
    draft = MTPDraft(MTPConfig.of(text)).float().to_empty(device="cpu")
    kinds = optional(text, "layer_types") or [FULL] * text.num_hidden_layers
    last = max(index for index, kind in enumerate(kinds) if kind == FULL)
    draft.layer.load_state_dict(decoder_layers(target)[last].state_dict())
    norm: Any = final_norm(target)
    for own in (draft.pre_fc_norm_embedding, draft.pre_fc_norm_hidden, draft.norm):
        own.load_state_dict(norm.state_dict())
    size = text.hidden_size
    nn.init.normal_(draft.fc.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
    draft.fc.weight.data[:, size:] += torch.eye(size)
    return draft


def new_medusa(target_head: Tensor, num_heads: int = NUM_HEADS) -> MedusaHeads:
    """Return Medusa heads that all start as `target_head` [V, H]: residual blocks initially add nothing."""
    heads = MedusaHeads(MedusaConfig(target_head.shape[1], target_head.shape[0], num_heads))
    for head in heads:
        for part in head.children():
            if isinstance(part, ResBlock):
                nn.init.zeros_(part.linear.weight)
                nn.init.zeros_(part.linear.bias)
            elif isinstance(part, nn.Linear):
                part.weight.data.copy_(target_head)
    return heads


def _quieten(norm: Any, target: Any) -> None:
    """Start a draft's last norm as the target's, scaled so that the logits of random states have variance 1.

    The draft's states mean nothing yet, and confident guesses would cost most: unscaled, the first loss can be 100.
    """
    weight: Any = final_norm(target).weight
    weight, head = weight.detach().float(), target.get_output_embeddings().weight.detach().float()
    variance = (weight * head).square().sum(dim=-1).mean()
    norm.weight.data.copy_(weight / variance.sqrt())


def _shape(target: Any, intermediate_size: int | None) -> Mapping[str, Any]:
    config = target.config.get_text_config()
    rope = dict(optional(config, "rope_parameters", default={}))
    theta = rope.pop("rope_theta", 10000.0)
    heads = Heads.of_first(config)
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.key_size,
        "vocab_size": target.get_input_embeddings().weight.shape[0],
        "num_target_layers": config.num_hidden_layers,
        "rms_norm_eps": optional(config, "rms_norm_eps", default=1e-6),
        "rope_theta": float(theta),
        "max_positions": optional(config, "max_position_embeddings", default=4096),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
    }
