"""A whole model in a folder, of random weights: a Qwen3 target that shares nano's tokenizer, and both drafts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_bench.models.formats import save_draft
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.presets import NANO

HIDDEN, VOCABULARY, LAYERS = 32, 1024, 4
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
BODY = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": VOCABULARY,
    "num_target_layers": LAYERS,
}


def build(folder: Path, seed: int = 0, **of_target: Any) -> Path:
    """Untrained drafts are mostly wrong, which is what a test of exactness wants."""
    _save_target(folder / "target", seed, of_target)
    dflash = DFlashDraft(
        DFlashConfig(head_dim=16, num_layers=1, block_size=4, mask_token_id=3, target_layer_ids=(0, 2), **BODY)  # type: ignore[arg-type]
    )
    # A list of layers that starts with the lowest would be read in the other convention.
    eagle3 = Eagle3Draft(Eagle3Config(head_dim=16, draft_vocab_size=64, target_layer_ids=(1, 0, 2), **BODY))  # type: ignore[arg-type]
    for name, draft in (("dflash", dflash), ("eagle3", eagle3)):
        initialise(draft, seed)
        save_draft(draft, folder / name)
    return folder


def _save_target(folder: Path, seed: int, changes: Mapping[str, Any]) -> None:
    torch.manual_seed(seed)
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.5,
    }
    config = Qwen3Config(**usual | changes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(NANO / "target" / name, folder / name)
