"""A draft as llama.cpp's `draft-dflash` and `draft-eagle3` read it. Embedding and head may be the target's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models.dflash import DFlashConfig
from dflash_bench.models.eagle3 import Eagle3Config
from dflash_bench.models.formats import Checkpoint
from dflash_bench.models.llamacpp.networks import Network, interleaved, name_of

NUM_EAGLE3_TAPS = 3


def describe(checkpoint: Checkpoint, num_target_layers: int) -> Network:
    """`checkpoint` must be complete. Raises UserError with what llama.cpp cannot run."""
    config = checkpoint.config
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in ("d2t", "t2d")}
    network = _dflash(config, tensors) if isinstance(config, DFlashConfig) else _eagle3(config, tensors)
    # Numbered by the layer that reads them, where we name the one that wrote them.
    taps = [layer + 1 for layer in config.target_layer_ids]
    if max(taps) >= num_target_layers:
        raise UserError(f"it taps layer {max(taps) - 1}, the target's last, which llama.cpp does not hand out")
    settings = {**_body(config), **network.settings, "target_layers": taps}
    if (chosen := checkpoint.tensors.get("d2t")) is None or len(chosen) == config.vocab_size:
        return replace(network, settings=settings)
    ids = (torch.arange(len(chosen)) + chosen).to(torch.int64)
    return replace(network, settings=settings, tensors={**network.tensors, "d2t": ids})


def _dflash(config: DFlashConfig, tensors: dict[str, Tensor]) -> Network:
    _refuse(
        config,
        shifted_labels=config.shifted_labels,
        attention_bias=config.attention_bias,
        target_hidden_size=config.target_hidden_size,
    )
    renamed = {"hidden_norm.weight": "enc.output_norm.weight"}
    settings = {
        "block_count": config.num_layers,
        "block_size": config.block_size,
        "attention.causal": False,
        "sample_from_anchor": False,
    }
    named = {renamed.get(name) or name_of(name): tensor for name, tensor in tensors.items()}
    return Network("dflash", settings, named, {"mask": config.mask_token_id})


def _eagle3(config: Eagle3Config, tensors: dict[str, Tensor]) -> Network:
    _refuse(
        config,
        attention_bias=config.attention_bias,
        qk_norm=config.qk_norm,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    if len(config.target_layer_ids) != NUM_EAGLE3_TAPS:
        raise UserError(f"it taps {len(config.target_layer_ids)} layers, and llama.cpp only takes {NUM_EAGLE3_TAPS}")
    named = {name_of(name.replace("midlayer.", "layers.0.")): tensor for name, tensor in tensors.items()}
    for part, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
        named[f"blk.0.{part}.weight"] = interleaved(named[f"blk.0.{part}.weight"], heads)
    return Network("eagle3", {"block_count": 1, "norm_before_residual": config.norm_before_residual}, named)


def _refuse(config: DFlashConfig | Eagle3Config, **variants: object) -> None:
    """Raise UserError for the first variant of the network that is set."""
    scaling = (config.rope_scaling or {}).get("rope_type")
    for name, value in {**variants, "rotary scaling": scaling}.items():
        if value:
            raise UserError(f"llama.cpp cannot run a draft with {name}{'' if value is True else f' = {value}'}")


def _body(config: DFlashConfig | Eagle3Config) -> dict[str, object]:
    return {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size or config.hidden_size,
    }
