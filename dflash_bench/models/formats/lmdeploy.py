"""Drafts as lmdeploy 0.18 reads them: z-lab's DFlash and SafeAILab's EAGLE-3, with other keys.

lmdeploy refuses a DFlash draft unless its block size is in `dflash_config`; z-lab's own files have it at the top level.
It recognises an EAGLE-3 draft by Llama's architecture, and always taps the inputs of layers 2, n//2 and n-3
(lmdeploy/pytorch/spec_decode/dflash_utils.py and configurations/llama.py, version 0.18.0 of September 2026).
Read back, these are z-lab's and SafeAILab's files.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import base, safeailab, zlab
from dflash_bench.models.formats.base import Checkpoint, Format, Stored
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config, default_target_layers

NAME = "lmdeploy"


def write_dflash(checkpoint: Checkpoint) -> Stored:
    """Return the files of a draft. Raises UserError for one that lmdeploy refuses, or would compute differently."""
    config = checkpoint.config
    assert isinstance(config, DFlashConfig)
    if config.kind != "DFlash":
        raise _refusal(f"a {config.kind} draft, only DFlash's")
    layers = config.target_layer_ids
    if any(after <= before for before, after in pairwise(layers)):
        raise _refusal(f"tapped layers that do not rise, {[*layers]}")
    if checkpoint.target_head:
        whole = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in ("d2t", "t2d")}
        config = replace(config, draft_vocab_size=None)
        checkpoint = replace(checkpoint, config=config, tensors=whole, target_head=False)
    written, tensors = zlab.write_dflash(checkpoint)
    inside = written["dflash_config"]
    if config.num_target_layers is None:
        raise _refusal("a draft that does not declare the target's number of layers; give --target")
    if layers[-1] == config.num_target_layers - 1:
        # z-lab's code reads that layer after the final norm, and lmdeploy before it.
        raise _refusal("a tap of the target's last layer")
    # Attention of an unusual kind, and other parts of a draft.
    for key in ({*written} & {"is_causal"}) | ({*inside} - {"mask_token_id", "target_layer_ids"}):
        raise _refusal(f"a draft with {key}")
    return {**written, "dflash_config": {**inside, "block_size": config.block_size}}, tensors


def write_eagle3(checkpoint: Checkpoint) -> Stored:
    """Return the files of a draft. Raises UserError for one that lmdeploy would compute differently."""
    config = checkpoint.config
    assert isinstance(config, Eagle3Config)
    base.cannot_hold(NAME, config, "norm_before_fc fc_norm norm_output attention_bias target_hidden_size")
    depth = config.num_target_layers
    if depth is None:
        raise _refusal("a draft that does not declare the target's number of layers, by which it taps; give --target")
    if tuple(config.target_layer_ids) != (usual := default_target_layers(depth)):
        raise _refusal(f"taps of layers {[*config.target_layer_ids]}: of this target, lmdeploy taps {[*usual]}")
    if checkpoint.target_head:
        raise _refusal("a draft without its own head; give --target, and it is written out")
    written, tensors = safeailab.write_eagle3(checkpoint)
    return {**written, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, tensors


def _refusal(what: str) -> UserError:
    return UserError(f"the {NAME} format cannot hold {what}")


DFLASH = Format(NAME, "dflash", zlab.read_dflash, write_dflash, holds_vocabulary=False, widens=True)
EAGLE3 = Format(NAME, "eagle3", safeailab.read_eagle3, write_eagle3, holds_vocabulary=False)
