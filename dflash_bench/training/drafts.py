"""A fresh draft for a target, whatever its architecture: sizes and rotary angles are the target's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models.architecture import final_norm
from dflash_bench.models.nets import dflash, eagle3
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads
from dflash_bench.training.medusa import new_heads

NUM_FEATURES = 5
NUM_LAYERS = 2
NUM_HEADS = 4


def taps(num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs are stored for all drafts: DFlash's, and the last, which says what the target says."""
    return (*dflash.default_target_layers(num_layers, min(NUM_FEATURES, max(1, num_layers - 3))), num_layers - 1)


def eagle3_taps(stored: tuple[int, ...]) -> tuple[int, ...]:
    """Of the layers that are stored low, middle and high ones."""
    of_dflash = stored[:-1]
    return (of_dflash[0], of_dflash[len(of_dflash) // 2], of_dflash[-1])


def mask_token(tokenizer: Any, num_embeddings: int, wanted: str | None) -> int:
    """The id of the token that stands in for what is not there yet. Raises UserError if none is spare or known."""
    if wanted is not None:
        token_id = tokenizer.get_vocab().get(wanted)
        if token_id is None:
            raise UserError(f"--mask-token {wanted}: the tokenizer has no such token")
        return int(token_id)
    if len(tokenizer) < num_embeddings:
        return len(tokenizer)
    special = [token for token in tokenizer.get_added_vocab() if token not in tokenizer.chat_template]
    raise UserError(
        "every id of the target's vocabulary has a token, so none is spare for the mask; name one that texts do not "
        f"have: --mask-token {special[0] if special else 'TOKEN'}"
        + (f" (or {', '.join(special[1:6])})" if special[1:] else "")
    )


def new_dflash(
    target: Any, layers: tuple[int, ...], num_layers: int, block_size: int, mask_token_id: int, seed: int,
    token_ids: Tensor | None = None,
) -> DFlashDraft:  # fmt: skip
    """With `token_ids` [Vd], ascending, it says no others: its head holds the target's rows for them, and stays so."""
    reduced: dict[str, Any] = {} if token_ids is None else {"own_head": True, "draft_vocab_size": len(token_ids)}
    config = DFlashConfig(
        num_layers=num_layers, block_size=block_size, mask_token_id=mask_token_id, target_layer_ids=layers,
        **reduced, **_shape(target),
    )  # fmt: skip
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
    target: Any, layers: tuple[int, ...], counts: Tensor, vocab_size: int, seed: int, trains_head: bool = True
) -> Eagle3Draft:
    """It says the tokens that `counts` [V] has most of; its head starts as the target's rows for these."""
    config = Eagle3Config(draft_vocab_size=vocab_size, target_layer_ids=layers, **_shape(target))
    draft = Eagle3Draft(config)
    dflash.initialise(draft, seed)
    draft.d2t, draft.t2d = eagle3.vocabulary_map(counts, vocab_size)
    _share_head(draft, target)
    draft.lm_head.requires_grad_(trains_head)
    _quieten(draft.norm, target)
    return draft


def _share_head(draft: DFlashDraft | Eagle3Draft, target: Any) -> None:
    ids = torch.arange(len(draft.d2t)) + draft.d2t
    head = target.get_output_embeddings().weight
    draft.lm_head.weight.data.copy_(head[ids.to(head.device)])


def new_medusa(target: Any) -> MedusaHeads:
    head = target.get_output_embeddings().weight
    return new_heads(MedusaConfig(head.shape[1], head.shape[0], NUM_HEADS), head)


def _quieten(norm: Any, target: Any) -> None:
    """A draft's last norm starts as the target's, scaled so that logits of random states vary by 1.

    Its states mean nothing yet, and loud guesses would cost most: unscaled, the first loss can be 100.
    """
    weight: Any = final_norm(target).weight
    weight, head = weight.detach().float(), target.get_output_embeddings().weight.detach().float()
    variance = (weight * head).square().sum(dim=-1).mean()
    norm.weight.data.copy_(weight / variance.sqrt())


def _shape(target: Any) -> Mapping[str, Any]:
    config = target.config.get_text_config()
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10000.0)
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": target.get_input_embeddings().weight.shape[0],
        "num_target_layers": config.num_hidden_layers,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": float(theta),
        "max_positions": getattr(config, "max_position_embeddings", 4096),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
    }
