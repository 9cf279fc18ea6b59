"""Memory use of weights and caches, predicted before anything is loaded.

All memory is predicted here: for a run from the headers of its checkpoints, for a profile from a model on the `meta`
device, and for servers from file sizes. Activations come on top of a run's weights and caches: they depend on engine,
attention and device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.forwards import AttentionCost, Size
from dflash_bench.core.methods import Method
from dflash_bench.models import block_models, formats, loading, presets, quantization, targets
from dflash_bench.models import weights as models_weights
from dflash_bench.models.architecture import attention_windows, recurrent_layers
from dflash_bench.models.configs import Heads, index_sizes, keeps_keys, layer_configs, optional
from dflash_bench.models.formats import base
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config
from dflash_bench.models.nets.layers import DraftShape
from dflash_bench.models.nets.mtp import MTPConfig, heads_among
from dflash_bench.models.nets.p_eagle import PEagleConfig

MOST_NODES = 63
"""The most nodes that `ddtree:nodes=auto` can choose."""
SPARE = 1.05
"""Factor on the counted bytes for everything uncounted: activations and fragmentation."""
LIBRARIES = 0.5e9
"""Bytes of the process before anything is loaded."""

# The contents of a network, counted from its parameters and its config.


def size_of(model: Any) -> Size:
    """Return what a pass of this target reads and multiplies, and its stored size; the model may be on `meta`."""
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    named = {id(weight): (name, weight) for name, weight in model.named_parameters()}  # shared weights count once
    experts = [weight for name, weight in named.values() if "experts" in name.split(".")]
    # A pass over text reads the decoder and the head, not vision or audio encoders; of tables it reads only rows.
    decoder = model.get_decoder() or model
    tables = {id(m.weight): m.weight for m in decoder.modules() if isinstance(m, nn.Embedding) and m.weight is not head}
    apart = {id(weight) for weight in experts} | tables.keys()
    used = dict.fromkeys(map(id, [*decoder.parameters(), *model.get_output_embeddings().parameters()]))
    read = [named[weight][1] for weight in used if weight not in apart]
    rows = tables.values() or [embedding]
    num_experts, per_token = experts_of(config) if experts else (0, 0)
    return Size(
        weight_bytes=bytes_of(read),
        matrix_elements=matrix_elements(read),
        row_bytes=sum(table.shape[1] * table.element_size() for table in rows),
        stored_bytes=bytes_of(weight for _, weight in named.values()),
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_bytes=bytes_of(experts) // num_experts if experts else 0,
        expert_elements=sum(weight.numel() for weight in experts) // num_experts if experts else 0,
        attention=target_attention(config, embedding.element_size()),
        state_bytes=_state_bytes(config),
        num_layers=config.num_hidden_layers,
        vocab_size=embedding.shape[0],
        itemsize=embedding.element_size(),
    )


def experts_of(config: Any) -> tuple[int, int]:
    """Return the number of experts of a layer, and the number that each token is routed to."""
    return (
        optional(config, "num_experts", "num_local_experts", "n_routed_experts"),
        optional(config, "num_experts_per_tok", "experts_per_token", "top_k_experts"),
    )


def bytes_of(weights: Iterable[Any]) -> int:
    """Return the memory of these parameters, with their scales if quantised."""
    return sum(map(quantization.stored_bytes, weights))


def held_bytes(models: Iterable[nn.Module], device: torch.device) -> dict[int, int]:
    """Return the bytes of every parameter and buffer on the device, by its identity: shared ones count once."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return {id(tensor): quantization.stored_bytes(tensor) for tensor in tensors if tensor.device == device}


def matrix_elements(weights: Iterable[Any]) -> int:
    """Return the elements of all matrices among these; norms and biases are negligible."""
    return sum(quantization.num_elements(weight) for weight in weights if weight.ndim == 2)


def target_attention(config: Any, itemsize: int) -> tuple[AttentionCost, ...]:
    """Return the attention layers of a target, by kind, without recurrent layers, which keep no keys and values."""
    windows = attention_windows(config)
    kinds = optional(config, "layer_types") or [next(iter(windows))] * config.num_hidden_layers
    layers = zip(
        kinds, map(Heads.of, layer_configs(config), kinds), keeps_keys(config), index_sizes(config), strict=True
    )
    counted = Counter(
        (
            kind,
            heads.num_heads * (heads.key_size + heads.value_size) // 2,
            (heads.cached + index) * itemsize if keeps else 0,
        )
        for kind, heads, keeps, index in layers
        if kind in windows
    )
    return tuple(
        AttentionCost(count, windows[kind], query, cached) for (kind, query, cached), count in sorted(counted.items())
    )


def draft_attention(config: DraftShape, num_layers: int, itemsize: int) -> AttentionCost:
    """Return the attention of `num_layers` layers of a draft."""
    heads, kv_heads = (number * config.head_dim for number in (config.num_heads, config.num_kv_heads))
    return AttentionCost(num_layers, None, heads, 2 * kv_heads * itemsize)


def token_bytes(attention: Iterable[AttentionCost]) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return sum(kind.num_layers * kind.cache_bytes for kind in attention)


def _state_bytes(config: Any) -> int:
    """Return the size of all gated delta rule states: a matrix per head, in float32."""
    if not (layers := recurrent_layers(config)):
        return 0
    heads, key, value = (
        getattr(config, f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    return int(len(layers) * heads * key * value * 4)


# A run: its target and drafts, by the headers of their files, and the caches of its methods.


RoundConfig = DFlashConfig | Eagle3Config | MTPConfig | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one model, in bytes."""

    weights_bytes: int
    place_bytes: int
    """Keys and values of one token in all layers."""
    config: RoundConfig | None = None
    """The config of a draft for features, or a block-diffusion model's block settings; None for other models."""
    loading_bytes: int = 0
    """The weights as stored in the checkpoint, if they are quantised when loaded."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a run needs, in bytes."""

    target_weights_bytes: int
    target_cache_bytes: int
    draft_weights_bytes: int = 0
    draft_cache_bytes: int = 0

    @property
    def total(self) -> int:
        return self.target_weights_bytes + self.target_cache_bytes + self.draft_weights_bytes + self.draft_cache_bytes


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The models and methods of a run. Each method has a cache, each draft is held once."""

    target: Footprint
    drafts: Mapping[str, Footprint]
    methods: Sequence[Method]
    """Methods with the draft lengths of the preset."""
    rows: int = 1

    def held(self, longest: int) -> MemoryUse:
        """Return the memory of a run whose longest row has this many tokens, including answers."""
        rounds = [(method, *self._round(method)) for method in self.methods]
        places = longest + 1 + max((drafted for _, drafted, _ in rounds), default=0)
        caches = [
            self.drafts[method.draft].place_bytes * (longest + 1 + drafted + scratch)
            for method, drafted, scratch in rounds
            if method.draft is not None
        ]
        return MemoryUse(
            self.target.weights_bytes,
            self.rows * places * self.target.place_bytes,
            sum(draft.weights_bytes for draft in self.drafts.values()),
            self.rows * sum(caches),
        )

    def longest_within(self, num_bytes: int) -> int:
        """Return the tokens of the longest row that fits; 0 or less if the weights alone do not fit."""
        none, one = self.held(0).total, self.held(1).total
        return (num_bytes - none) // (one - none)

    def most_rows_within(self, num_bytes: int, longest: int) -> int:
        """Return the number of rows of this length that fit; 0 or less if the weights alone do not fit."""
        none, one = (replace(self, rows=rows).held(longest).total for rows in (0, 1))
        return (num_bytes - none) // (one - none)

    def without_drafts(self) -> MemoryDemand:
        return MemoryDemand(self.target, {}, [method for method in self.methods if method.draft is None], self.rows)

    def _round(self, method: Method) -> tuple[int, int]:
        return round_of(method, self.drafts[method.draft].config if method.draft else None)


def round_of(method: Method, config: RoundConfig | None) -> tuple[int, int]:
    """Return the most tokens that a method drafts per round, and a proposal's temporary places in the draft's cache."""
    given = {option.name: method.option(option.name) for option in method.kind.options}
    number = {name: value for name, value in given.items() if isinstance(value, int)}
    nodes = MOST_NODES if given.get("nodes") == "auto" else number.get("nodes")
    if isinstance(config, DFlashConfig):
        if given.get("shift") is not None:
            config = replace(config, shifted_labels=given["shift"] == "yes")
        block = config.block_for(number["n"]) if "n" in number else number.get("block", config.block_size)
        return nodes or max(config.num_drafts(block), number.get("copy", 0)), block
    if isinstance(config, Mapping):
        return int(number.get("block") or config["block_size"]) - 1, 0
    if isinstance(config, PEagleConfig):
        drafted = config.num_drafts(number.get("n"))
        return drafted, 2 * drafted
    if isinstance(config, Eagle3Config) and nodes:
        width = min(number["top_k"], nodes, config.draft_vocab_size or config.vocab_size)
        levels = min(number["depth"], nodes) - 1
        return min(nodes, width + levels * width * width), levels * width
    if "guesses" in number:
        return (number["window"] + number["guesses"]) * (number["ngram"] - 1), 0
    if "rates" in given:
        return str(given["rates"]).count("/") + 1, 0
    drafted = nodes or number.get("n", 0)
    return drafted, 0 if method.draft is None or nodes else drafted


def demand_of(
    target: Path,
    drafts: Mapping[str, Path],
    methods: Sequence[Method],
    dtype: torch.dtype | None,
    trusted: bool = False,
    quantize: str | None = None,
    in_kernels: bool = False,
) -> MemoryDemand:
    """Return the demand of checkpoints in these folders; `dtype` None is the target's own. Drafts are never quantised.

    With `in_kernels` a CPU's compiled kernels will compute them, which store weights in their own layouts and types.
    Raises UserError for a checkpoint that cannot be read.
    """
    if dtype is None:
        stored = optional(targets.config_of(target, trusted), "dtype")
        dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    shape = targets.shape_of(target)
    footprints = {name: _of_draft(name, folder, shape, dtype) for name, folder in drafts.items()}
    whole = footprint_of(target, dtype, trusted, quantize)
    if in_kernels:
        # The head stays beside its packed copy; a target's layers are freed, a draft's are not.
        head = shape.vocab_size * shape.hidden_size * (1 if quantize == "int8" else dtype.itemsize)
        whole = _in_kernels(whole, head, dtype)
        footprints = {name: _in_kernels(draft, draft.weights_bytes, dtype) for name, draft in footprints.items()}
    return MemoryDemand(whole, footprints, methods)


def sharded(footprint: Footprint, num: int, dtype: torch.dtype, folder: Path) -> Footprint:
    """Return the footprint per process of a target on `num` processes: embedding and head are replicated."""
    shape, is_tied = targets.shape_of(folder), optional(targets.config_of(folder), "tie_word_embeddings")
    tables = shape.vocab_size * shape.hidden_size * dtype.itemsize * (1 if is_tied else 2)
    layers = max(footprint.weights_bytes - tables, 0)
    return replace(footprint, weights_bytes=tables + -(-layers // num), place_bytes=-(-footprint.place_bytes // num))


def _in_kernels(footprint: Footprint, twice: int, dtype: torch.dtype) -> Footprint:
    """Return a model's footprint with `twice` bytes of weights held twice; keys and values are float32 there."""
    places = footprint.place_bytes * torch.float32.itemsize // dtype.itemsize
    return replace(footprint, weights_bytes=footprint.weights_bytes + twice, place_bytes=places)


def _of_draft(name: str, folder: Path, shape: formats.TargetShape, dtype: torch.dtype) -> Footprint:
    weights = name.partition("@")[0]
    if weights == "medusa":
        return Footprint(_weights(loading.read_heads(weights, folder)[1], dtype), 0)
    if weights == presets.MTP:
        heads, tensors_of_heads = loading.read_heads(weights, folder)
        place = heads.num_layers * token_bytes(target_attention(heads.text, dtype.itemsize))
        return Footprint(_weights(tensors_of_heads, dtype), place, heads)
    if weights in loading.LANGUAGE_MODELS:
        return replace(footprint_of(folder, dtype), config=block_models.settings_of(read_config(folder)))
    checkpoint = formats.read_checkpoint(folder, shape, headers_only=True)[1]
    config = checkpoint.config
    attention = draft_attention(config, getattr(config, "num_layers", 1), dtype.itemsize)
    tensors = _weights(checkpoint.tensors, dtype)
    if checkpoint.target_head:
        # Its head is a copy of rows of the target's head.
        tensors += (config.draft_vocab_size or 0) * config.hidden_size * dtype.itemsize
    place_bytes = token_bytes([attention])
    return Footprint(tensors, place_bytes, config)


def footprint_of(folder: Path, dtype: torch.dtype, trusted: bool = False, quantize: str | None = None) -> Footprint:
    """Return a language model's footprint. Raises UserError for a checkpoint that cannot be read."""
    config = targets.config_of(folder, trusted)
    stored = models_weights.read_tensors(folder, models_weights.only_maps)
    # MTP heads are not part of the model: they are loaded if a method drafts with them.
    heads = heads_among(stored, config.num_hidden_layers).values()
    tensors = {name: tensor for name, tensor in stored.items() if name not in heads}
    if optional(config, "tie_word_embeddings"):
        tensors.pop(base.HEAD, None)
    place, weights = token_bytes(target_attention(config, dtype.itemsize)), _weights(tensors, dtype)
    if quantize is None:
        return Footprint(weights, place)
    return Footprint(_quantized(tensors, dtype, quantize), place, loading_bytes=weights)


def _weights(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Return the bytes of tensors loaded in this type; packed integers are kept as stored."""
    return sum(
        tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)
        for tensor in tensors.values()
    )


def _quantized(tensors: Mapping[str, Tensor], dtype: torch.dtype, kind: str) -> int:
    sizes = {name: quantization.predicted_bytes(name, tensor.shape, kind) for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in tensors.items() if sizes[name] is None}
    if kind == "int8" and base.HEAD not in tensors and (embedding := tensors.get(base.EMBEDDING)) is not None:
        # A head that was tied to the embedding gets its own weights.
        sizes[base.HEAD] = quantization.predicted_bytes(base.HEAD, embedding.shape, kind)
    return _weights(plain, dtype) + sum(size for size in sizes.values() if size is not None)


# A profile: by the size of a target, which may be truncated to some of its layers.


def needed_bytes(size: Size, draft_bytes: int, rows: int, context: int, widest: int) -> float:
    """Return the bytes of weights, cache, and the logits of the widest pass, which are also copied once as float32."""
    cache = rows * ((context + widest) * token_bytes(size.attention) + size.state_bytes * (widest + 1))
    logits = rows * widest * size.vocab_size * (size.itemsize + 4)
    return SPARE * (size.stored_bytes + draft_bytes + cache + logits) + LIBRARIES


def what_fits(size: Size, draft_bytes: int, rows: int, context: int, widest: int, free: float, may_cut: bool) -> str:
    """Return advice with the nearest smaller workload that fits, or "" if none does."""
    if needed_bytes(size, draft_bytes, 1, 1, widest) > free:
        layers = _most_layers(size, draft_bytes, widest, free) if may_cut else 0
        return f"--layers {layers} fits" if layers else ""
    fewer = max((n for n in range(1, rows) if needed_bytes(size, draft_bytes, n, context, widest) <= free), default=0)
    shorter = _longest(size, draft_bytes, rows, widest, free)
    offers = [f"--batch {fewer} --context {context}"] if fewer else []
    offers += [f"--batch {rows} --context {shorter}"] if shorter else []
    alone = _longest(size, draft_bytes, 1, widest, free)
    return " or ".join(offers or [f"--batch 1 --context {alone}"]) + " fits"


def _longest(size: Size, draft_bytes: int, rows: int, widest: int, free: float) -> int:
    empty, one = (needed_bytes(size, draft_bytes, rows, context, widest) for context in (0, 1))
    return max(0, int((free - empty) / (one - empty))) if one > empty else 0


def _most_layers(size: Size, draft_bytes: int, widest: int, free: float) -> int:
    """Return the most layers that fit; embedding and head remain, counted once if tied."""
    table = size.row_bytes * size.vocab_size
    is_tied = size.stored_bytes == size.weight_bytes + size.num_experts * size.expert_bytes
    outside = table if is_tied else 2 * table
    a_layer = (size.stored_bytes - outside) / size.num_layers
    left = free - needed_bytes(replace(size, stored_bytes=outside), draft_bytes, 1, 1, widest)
    return max(0, int(left / (SPARE * a_layer)))


# Servers: by their files alone, since their own memory management is unknown.


def file_bytes(weights: Path) -> int:
    """Return the size of a weights file, or of those in a folder."""
    if weights.is_file():
        return weights.stat().st_size
    files = [file for pattern in ("*.safetensors", "*.bin") for file in weights.glob(pattern)]
    return sum(file.stat().st_size for file in files)


def servers_bytes(target: Path, num_copies: int, drafts: Sequence[Path]) -> int:
    """Return the memory of `num_copies` copies of a target together, with a draft in some of them."""
    return num_copies * file_bytes(target) + sum(map(file_bytes, drafts))
