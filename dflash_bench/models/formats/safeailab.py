"""EAGLE-3 as SafeAILab, SpecForge and AngelSlim publish it: one Llama layer named `midlayer`.

The default layers are named by their input (2, n//2, n-3). Lists in files name inputs or outputs: a list that starts
with 1 is read as outputs, any other as inputs. `num_hidden_layers` cannot be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_bench.models.formats import base, variants, zlab
from dflash_bench.models.formats.base import Checkpoint, Format, Json, Stored, Tensors
from dflash_bench.models.nets.eagle3 import Eagle3Config, default_target_layers

FORMULA = "1, n//2 - 1, n - 4"
WHAT = "an EAGLE-3 draft"
READ = (*base.READ, "eagle_aux_hidden_state_layer_ids", *base.EAGLE3_FLAGS, "draft_vocab_size")
"""Keys of `eagle_config` that are read here."""
OLDER_NAME = "norm_output is read as in EAGLE 3.1; SpecForge used the name for something else before September 2026"


def read_eagle3(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    inner = config.get("eagle_config") or {}
    both = {**config, **inner}
    variants.refuse_unknown(inner, "eagle_config", WHAT, READ)
    variants.refuse(both, WHAT, variants.OF_LAYERS)
    taps = both.get("eagle_aux_hidden_state_layer_ids") or ()
    tensors = base.rename_tensors(tensors, "layers.0.", "midlayer.")
    draft = Eagle3Config(
        draft_vocab_size=both["draft_vocab_size"],
        target_layer_ids=tapped_outputs(taps) if taps else default_target_layers(depth or zlab.UNKNOWN_DEPTH),
        num_target_layers=None,
        # Publishers copy attention_bias from the target even if the draft's layer has no bias.
        attention_bias="midlayer.self_attn.q_proj.bias" in tensors,
        **base.eagle3_flags(both),
        own_embedding="embed_tokens.weight" in tensors,
        **base.body(both, WHAT, both.get("head_dim") or both["hidden_size"] // both["num_attention_heads"]),
    )
    notes = [f"eagle_aux_hidden_state_layer_ids {list(taps)}: {_convention(taps)}"] if taps else []
    notes += [OLDER_NAME] if draft.norm_output else []
    formula = None if taps or depth else FORMULA
    return Checkpoint(draft, tensors, None, tuple(notes), formula, base.leaves_head(config, tensors))


def tapped_outputs(taps: Sequence[int]) -> tuple[int, ...]:
    """Return the tapped outputs for a file's list of inputs or outputs."""
    ids = tuple(taps)
    return ids if ids[0] == 1 else base.shift_ids(ids, -1)


def _convention(taps: Sequence[int]) -> str:
    if taps[0] == 1:
        return "starts with 1, so it is taken for outputs of layers"
    return f"{'starts with 2' if taps[0] == 2 else 'does not start with 1'}, so it is taken for inputs of layers"


def write_eagle3(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, Eagle3Config)
    inputs = base.shift_ids(config.target_layer_ids, 1)
    own = {"query_and_key_norms": config.qk_norm, "taps_that_start_with_layer_0": inputs[0] == 1}
    base.cannot_hold("safeailab", config, "norm_before_residual window", **own)
    norms = {name: True for name in ("fc_norm", "norm_output") if getattr(config, name)}
    inner = {"norm_before_fc": True} if config.norm_before_fc else {}
    width = {} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        **base.head_json(checkpoint),
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(inputs), **inner},
        **norms,
        **width,
        **base.body_json(config, checkpoint.tensors),
    }
    return written, base.without_whole_map(config, checkpoint.tensors)


EAGLE3 = Format("safeailab", "eagle3", read_eagle3, write_eagle3, holds_vocabulary=False)
