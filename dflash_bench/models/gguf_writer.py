"""Writes a target, or a draft of a kind that llama.cpp supports (DFlash, DFlash 2, DSpark, EAGLE-3), as GGUF."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core import files, terminal
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.models import formats, gguf, gguf_hybrid, gguf_tokenizer, presets, targets, weights
from dflash_bench.models.configs import Heads, optional
from dflash_bench.models.formats import Checkpoint, base, fit
from dflash_bench.models.gguf_tokenizer import PREFIX
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.bodies import PLAIN
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config
from dflash_bench.models.nets.layers import frequencies
from dflash_bench.models.nets.p_eagle import PEagleConfig

# A network in a GGUF file: settings and tensors, by llama.cpp's names.


LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
OUTSIDE = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
BARE = {
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
"""Parameters without `.weight` in our files; llama.cpp reads those of layers without it, too."""
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class GgufNetwork:
    """`settings` are prefixed with the architecture's name in the file; `tensors` have llama.cpp's names."""

    architecture: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Special tokens besides the tokenizer's own, by GGUF's names."""


def name_of(tensor: str) -> str:
    """Return llama.cpp's name of a tensor. Raises UserError if there is none."""
    if match := _IN_LAYER.fullmatch(tensor):
        number, part, kind = match.groups()
        if part in LAYER and kind:
            return f"blk.{number}.{LAYER[part]}.{kind}"
        if part in BARE and not kind:
            return f"blk.{number}.{BARE[part]}"
    stem, _, kind = tensor.rpartition(".")
    if stem in OUTSIDE and (kind == "weight" or stem == "confidence_head.proj"):
        return f"{OUTSIDE[stem]}.{kind}"
    if tensor in BARE:
        return BARE[tensor]
    raise UserError(f"llama.cpp has no place for tensor {tensor}")


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of a query or key projection [heads * D, ...] for an architecture that rotates neighbours.

    Publishers' Llama files store the two halves of a head one after the other; GGUF interleaves them.
    """
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def in_gguf_types(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices in their stored type; vectors (norms and biases) and kernels in float32, as llama.cpp requires."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in DTYPES:
            raise UserError(
                f"tensor {name} holds {tensor.dtype}; only float32, float16 and bfloat16 are written as GGUF"
            )
        yield name, tensor.float() if tensor.ndim in (1, 3) and tensor.is_floating_point() else tensor


# Writing a GGUF file atomically.


FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""`general.file_type`, by the type of the most common matrices (llama.cpp's enum llama_ftype)."""


def write(path: Path, network: GgufNetwork, name: str, vocabulary: Mapping[str, Any]) -> None:
    """Write a GGUF file. Raises UserError if that fails."""
    tensors = dict(in_gguf_types(network.tensors))
    settings = {
        "general.name": name,
        "general.file_type": FILE_TYPES[_main_type(tensors)],
        **{f"{network.architecture}.{key}": value for key, value in network.settings.items()},
        **vocabulary,
        **{f"{PREFIX}{token}_token_id": index for token, index in network.special_tokens.items()},
    }
    # The package opens the file itself, by name; `write_whole` syncs and renames the same file.
    files.write_whole(path, lambda file: _fill(Path(file.name), network.architecture, settings, tensors))


def _main_type(tensors: Mapping[str, Tensor]) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in FILE_TYPES and tensor.ndim > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _fill(path: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    scalars = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    types = {
        torch.float32: GGMLQuantizationType.F32,
        torch.float16: GGMLQuantizationType.F16,
        torch.bfloat16: GGMLQuantizationType.BF16,
        torch.int64: GGMLQuantizationType.I64,
    }
    writer = GGUFWriter(path, architecture)
    try:
        for key, value in settings.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, scalars[type(value)])
        arrays = {name: _bytes(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            # Declared as plain numbers of this size: numpy has no bfloat16.
            writer.add_tensor_info(name, tensor.shape, arrays[name].dtype, arrays[name].nbytes, types[tensor.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in terminal.with_bar(list(tensors), "tensors written"):
            writer.write_tensor_data(arrays[name])
    finally:
        writer.close()


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor as a numpy array; bfloat16 becomes 16-bit integers."""
    tensor = tensor.contiguous().cpu()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


# Drafts for llama.cpp's `draft-dflash` and `draft-eagle3`. Embedding and head may be the target's.


NUM_EAGLE3_TAPS = 3


def describe(checkpoint: Checkpoint, num_target_layers: int) -> GgufNetwork:
    """Describe a complete draft checkpoint. Raises UserError for a variant that llama.cpp cannot run."""
    config = checkpoint.config
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in ("d2t", "t2d")}
    network = _dflash(config, tensors) if isinstance(config, DFlashConfig) else _eagle3(config, tensors)
    # llama.cpp names the layer that reads a feature, our configs the layer that outputs it.
    taps = [layer + 1 for layer in config.target_layer_ids]
    if max(taps) >= num_target_layers:
        raise UserError(f"it taps layer {max(taps) - 1}, the target's last, which llama.cpp does not hand out")
    settings = {**_body(config), **network.settings, "target_layers": taps}
    if (chosen := checkpoint.tensors.get("d2t")) is None or len(chosen) == config.vocab_size:
        return replace(network, settings=settings)
    ids = (torch.arange(len(chosen)) + chosen).to(torch.int64)
    return replace(network, settings=settings, tensors={**network.tensors, "d2t": ids})


def _dflash(config: DFlashConfig, tensors: dict[str, Tensor]) -> GgufNetwork:
    _refuse(
        config, **_unheld(config), attention_bias=config.attention_bias, target_hidden_size=config.target_hidden_size
    )
    renamed = {"hidden_norm.weight": "enc.output_norm.weight"}
    settings = {
        "block_count": config.num_layers,
        "block_size": config.block_size,
        "attention.causal": config.body.view(0).is_causal,
        "sample_from_anchor": config.shifted_labels,
        **_windows(config),
    }
    if isinstance(config.correction, SelectorConfig):
        settings |= {name: getattr(config.body, name) for name in ("conv_kernel_size", "conv_group_size")}
        settings |= {name: getattr(config.correction, name) for name in ("selector_rank", "selector_top_k")}
        # It scales and caps the logits to which the selector adds its scores, but not those of other drafts.
        settings |= {"logit_scale": float(config.body.output_multiplier)}
        settings |= {"final_logit_softcapping": float(config.body.logit_softcap or 0)}
    named = {renamed.get(name) or name_of(name): tensor for name, tensor in tensors.items()}
    return GgufNetwork("dflash", settings, named, {"mask": config.mask_token_id})


def _unheld(config: DFlashConfig) -> dict[str, object]:
    """Return features that llama.cpp cannot compute for a block draft, by name, and whether this draft has them."""
    return {**_unheld_of_head(config), **_unheld_of_views(config), **_unheld_of_body(config)}


def _unheld_of_head(config: DFlashConfig) -> dict[str, object]:
    head, width = config.correction, config.hidden_size
    if isinstance(head, MarkovConfig):
        return {
            "a Markov head of type": head.markov_head_type != "vanilla" and head.markov_head_type,
            "a confidence head that reads no Markov row": head.has_confidence and not head.confidence_head_with_markov,
            "a Markov head whose slots predict themselves": not config.shifted_labels,
        }
    if isinstance(head, SelectorConfig):
        needed = head.selector_top_k * (head.selector_top_k + 1)
        return {
            f"{head.selector_top_k} candidates and a hidden size of {width} (it needs {needed})": width < needed,
            "a selector over a reduced vocabulary": config.draft_vocab_size,
            "a selector whose slots predict the token after them": config.shifted_labels,
            "a selector and no convolutions": config.body.conv_kernel_size is None,
        }
    return {f"the head of a {config.kind} draft": head is not None}


def _unheld_of_views(config: DFlashConfig) -> dict[str, object]:
    """Return features that its single causal flag and window, shared by all layers, cannot express."""
    views = [config.body.view(layer) for layer in range(config.num_layers)]
    narrow = [view.window for view in views if view.window and not view.is_causal and view.window < config.block_size]
    return {
        "layers of which only some are causal in the block": len({view.is_causal for view in views}) > 1,
        "windows of several widths": len({view.window for view in views} - {None}) > 1,
        "windows that end at the anchor": any(view.from_anchor for view in views),
        "a window that is not causal and is narrower than the block": narrow and narrow[0],
    }


def _unheld_of_body(config: DFlashConfig) -> dict[str, object]:
    body, held = config.body, replace(PLAIN, views=config.body.views)
    if isinstance(config.correction, SelectorConfig):
        names = ("output_multiplier", "logit_softcap", "conv_kernel_size", "conv_group_size")
        held = replace(held, **{name: getattr(body, name) for name in names})
    return {f"the body of a {body.kind} draft, or its scales": body != held}


def _windows(config: DFlashConfig) -> dict[str, object]:
    views = [config.body.view(layer) for layer in range(config.num_layers)]
    windows = [view.window for view in views if view.window is not None]
    if not windows:
        return {}
    sliding = [view.window is not None for view in views]
    return {"attention.sliding_window": windows[0], "attention.sliding_window_pattern": sliding}


def _eagle3(config: Eagle3Config, tensors: dict[str, Tensor]) -> GgufNetwork:
    fields = ("attention_bias", "qk_norm", "norm_before_fc", "fc_norm", "norm_output", "window")
    masks = {"P-EAGLE's masks": isinstance(config, PEagleConfig)}
    _refuse(config, **{name: getattr(config, name) for name in fields}, **masks)
    if len(config.target_layer_ids) != NUM_EAGLE3_TAPS:
        raise UserError(f"it taps {len(config.target_layer_ids)} layers, and llama.cpp only takes {NUM_EAGLE3_TAPS}")
    named = {name_of(name.replace("midlayer.", "layers.0.")): tensor for name, tensor in tensors.items()}
    for part, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
        named[f"blk.0.{part}.weight"] = interleaved(named[f"blk.0.{part}.weight"], heads)
    return GgufNetwork("eagle3", {"block_count": 1, "norm_before_residual": config.norm_before_residual}, named)


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


# Targets for llama.cpp: Llama, Qwen2 and Qwen3, dense, with plain, linear or Llama 3's rotary positions; and Qwen3.5
# (`gguf_hybrid.py`).


ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of `model_type`; llama.cpp uses the same names."""
BIASES = {"llama": (), "qwen2": ("attn_q", "attn_k", "attn_v"), "qwen3": ()}
"""The projections that may have a bias."""
ALTERNATING = ("llama",)
"""Architectures for which llama.cpp rotates adjacent rows."""
ROTARY = ("default", "linear", "llama3")
COMPUTED = "rotary_emb.inv_freq"
"""A tensor of old files that the config determines."""


def read(folder: Path) -> GgufNetwork:
    """Describe a target. Raises UserError for a model that llama.cpp would compute differently from its publisher."""
    config = targets.config_of(folder)
    if config.model_type == gguf_hybrid.MODEL_TYPE:
        return _hybrid(folder, config)
    _check(folder, config)
    tensors = {name: tensor for name, tensor in weights.read_tensors(folder).items() if not name.endswith(COMPUTED)}
    if config.tie_word_embeddings:
        tensors.pop(base.HEAD, None)
    _check_tensors(folder, config, tensors)
    try:
        named = {name_of(name): tensor for name, tensor in tensors.items()}
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    for name in named:
        if name.endswith(".bias") and name.split(".")[-2] not in BIASES[config.model_type]:
            raise UserError(f"{folder}: llama.cpp's {config.model_type} has no place for tensor {name}")
    if config.model_type in ALTERNATING:
        named = _with_alternating_rows(named, config)
    scaling, factors = _rotary(config)
    return GgufNetwork(config.model_type, {**_settings(config), **scaling}, {**named, **factors})


def _hybrid(folder: Path, config: Any) -> GgufNetwork:
    """Describe a target with linear attention. Raises UserError like `read`."""
    _refuse_for(folder, _reasons(folder, config))
    trunk, heads = gguf_hybrid.text_tensors(folder, weights.read_tensors(folder))
    if config.tie_word_embeddings:
        trunk.pop(base.HEAD, None)
    try:
        own = gguf_hybrid.settings(config, bool(heads))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    _check_tensors(folder, config, trunk)
    tensors = gguf_hybrid.named(config, trunk, heads)
    return GgufNetwork(gguf_hybrid.ARCHITECTURE, {**_settings(config), **own}, tensors)


def _reasons(folder: Path, config: Any) -> dict[str, bool]:
    """Return features that no target may have, and whether this one has them."""
    return {
        "it is quantised; convert the original": "quantization_config" in read_config(folder),
        f"hidden_act = {config.hidden_act!r}": config.hidden_act != "silu",
        f"rotary positions of type {_rope_type(config)!r}": _rope_type(config)
        not in (ROTARY if config.model_type in ARCHITECTURES else ("default",)),
    }


def _refuse_for(folder: Path, reasons: Mapping[str, Any]) -> None:
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{folder} cannot be written as GGUF: {reason}")


def _check(folder: Path, config: Any) -> None:
    if config.model_type not in ARCHITECTURES:
        known = [*ARCHITECTURES, gguf_hybrid.MODEL_TYPE]
        raise unknown(f"{folder}: architecture for GGUF", config.model_type, known)
    kinds = set(optional(config, "layer_types", default=()))
    reasons = {
        **_reasons(folder, config),
        "sliding-window attention": kinds - {"full_attention"} or optional(config, "use_sliding_window"),
        "rotary positions on a part of each head": config.rope_parameters.get("partial_rotary_factor")
        not in (None, 1.0),
    }
    _refuse_for(folder, reasons)


def _check_tensors(folder: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """Raise UserError unless the tensors are exactly those of the network that config.json describes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    expected = {name.removeprefix("model."): tensor.shape for name, tensor in network.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop(base.HEAD, None)
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "missing" if name in expected else "surplus"
        raise UserError(f"{folder}: {what} tensor {name}; copy the model again, or see if config.json belongs to it")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(f"{folder}: {name} is {list(tensors[name].shape)}, but config.json says {list(shape)}")


def _with_alternating_rows(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return {
        name: interleaved(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in tensors.items()
    }


def _head_dim(config: Any) -> int:
    return Heads.of_first(config).key_size


def _settings(config: Any) -> dict[str, Any]:
    head_dim = _head_dim(config)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }


def _rope_type(config: Any) -> str:
    return str(config.rope_parameters.get("rope_type", "default"))


def _rotary(config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings, and for Llama 3's scaling a tensor with the divisor of each frequency."""
    settings = dict(config.rope_parameters)
    theta = float(settings["rope_theta"])
    if _rope_type(config) == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(settings["factor"])}, {}
    if _rope_type(config) == "llama3":
        plain, _ = frequencies(_head_dim(config), theta, None)
        scaled, _ = frequencies(_head_dim(config), theta, settings)
        return {}, {"rope_freqs.weight": (plain / scaled).float()}
    return {}, {}


# Conversion to GGUF, so that llama.cpp runs the same weights that are measured here.


ENDING = ".gguf"
OF_DRAFTS = "fc.weight"
"""Name of the feature projection, or its prefix if packed: every DFlash and EAGLE-3 draft has it, and no target."""


def convert(reference: str, destination: Path, of_target: str | None) -> list[str]:
    """Write a target, or a draft of `of_target`, as a new file. Returns remarks; raises UserError."""
    if destination.suffix != ENDING:
        raise UserError(f"{destination} must name a GGUF file: one that ends in {ENDING}")
    if os.path.lexists(destination):
        raise UserError(f"{destination} exists already; name a new file")
    if not destination.parent.is_dir():
        raise UserError(f"{destination.parent} is not a folder; make it, or name another place")
    if gguf.is_file(reference):
        raise UserError(f"{reference} is a GGUF file already")
    if reference in presets.table():
        folder, is_draft = targets.find_target(reference), False
    else:
        folder = targets.find_draft(reference)
        is_draft = any(name.startswith(OF_DRAFTS) for name in weights.read_tensors(folder, lambda _: False))
    if is_draft:
        network, home = _draft(folder, of_target)
    elif of_target is not None:
        raise UserError(f"{reference} is a target, and --target is for drafts; leave it out")
    else:
        network, home = read(folder), folder
    settings, remarks = gguf_tokenizer.read(home, targets.shape_of(home).vocab_size, with_template=not is_draft)
    write(destination, network, reference.rstrip("/").rpartition("/")[2], settings)
    return [*remarks, *(_unfed(home) if is_draft else ())]


WITHOUT_FEATURES = ("qwen2",)
"""Targets whose layers' inputs llama.cpp b11549 does not keep, so that no draft can read them."""


def _unfed(home: Path) -> Iterator[str]:
    kind = targets.config_of(home).model_type
    if kind in WITHOUT_FEATURES:
        yield (
            f"llama.cpp b11549 keeps no features of {kind} targets: it starts with this draft, and aborts at the first "
            "request"
        )


def _draft(folder: Path, of_target: str | None) -> tuple[GgufNetwork, Path]:
    """Return the draft, and its target's folder."""
    if of_target is None:
        raise UserError(f"{folder} is a draft, and its GGUF file holds its target's tokenizer; give --target")
    home = targets.find_target(of_target)
    vocabulary = targets.tokenizer_of(home).get_vocab()
    shape = targets.with_tokens(targets.shape_of(home), vocabulary, folder)
    form, checkpoint = formats.read_checkpoint(folder, shape)
    problems = [*formats.problems(form, checkpoint, shape)]
    if other := targets.other_tokenizer(folder, vocabulary):
        problems.append(other)
    for problem in problems:
        raise UserError(f"{folder}: {problem}")
    checkpoint = fit.fitted(checkpoint, shape)
    if checkpoint.target_head:
        checkpoint = checkpoint.with_head(targets.vocabulary_of(home)[base.HEAD])
    try:
        return describe(checkpoint, shape.num_layers), home
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
