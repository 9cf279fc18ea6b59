"""Shared by all draft formats: the common description, common config fields, and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from dflash_bench.core.errors import DraftProblem, UserError
from dflash_bench.core.labels import dtype_name
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.layers import frequencies
from dflash_bench.models.nets.p_eagle import PEagleConfig, PEagleDraft

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TARGET_HEAD = "target_head"
"""A config.json key of drafts that only this tool reads: the head is not in the file (`Checkpoint.target_head`)."""
DraftModel = DFlashDraft | Eagle3Draft
DraftConfig = DFlashConfig | Eagle3Config
Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Stored = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json and the tensors beside it."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The sizes of a target that a draft must match.

    `vocab_size` is the number of rows of its embedding, and `num_tokens` how many of these its tokenizer uses, and
    the draft's, if it has one: the rest is padding. It is None without a tokenizer.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A draft in any format. `tensors` have the names of our networks.

    `config` holds the values declared by the file. Only the tapped layers may depend on the target: some formats derive
    them from its depth if the file does not name them.
    """

    config: DraftConfig
    tensors: Tensors
    trained_for: str | None = None
    """The target, if the config names it."""
    notes: tuple[str, ...] = ()
    """Our interpretation of what the file leaves open."""
    derived_taps: str | None = None
    """A formula for the tapped layers, if the file does not name them and the target's depth is unknown."""
    target_head: bool = False
    """The file omits the head, because its rows are the target's for the tokens of `d2t`."""

    def with_head(self, head: Tensor) -> Checkpoint:
        """Return a complete checkpoint, with its rows of the target's head [V, H]."""
        if not self.target_head:
            return self
        d2t = self.tensors["d2t"]
        rows = head.detach()[(torch.arange(len(d2t)) + d2t).to(head.device)]
        return replace(self, tensors={**self.tensors, HEAD: rows}, target_head=False)

    def without_head(self) -> Checkpoint:
        """Return the checkpoint for a file that omits the head."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in (HEAD, "t2d")}
        return replace(self, tensors=tensors, target_head=True)


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store one kind of draft. `read` gets the target's depth, or None if unknown.

    `holds_vocabulary`: whether files include the target's embedding and head, or leave them to the target.
    `layer` is the file's name for the layer that SafeAILab calls `midlayer`. `reads_last`: whether a draft may tap the
    target's last layer; its publisher's code then reads transformers' last hidden state, which is after the final norm.
    Where engines and trainers differ about it, or do not allow it, such a draft is refused. `widens`: a reduced
    vocabulary that uses rows of the target's head is dropped, so that the draft uses all of them.
    """

    name: str
    kind: str
    read: Callable[[Json, Tensors, int | None], Checkpoint]
    write: Callable[[Checkpoint], Stored]
    holds_vocabulary: bool
    layer: str = "midlayer."
    reads_last: bool = False
    widens: bool = False


# Common parts of all configs: the network's sizes, rotary positions and the vocabulary map.


SCALINGS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Rotary scalings independent of the text length, and their required keys."""
READ = tuple(
    """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers
    rms_norm_eps hidden_act rope_theta rope_scaling rope_parameters partial_rotary_factor attention_bias
    max_position_embeddings original_max_position_embeddings target_hidden_size layer_types sliding_window
    use_sliding_window max_window_layers quantization_config
    """.split()
)
"""Keys that describe a draft's layers, at any level of a config."""
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of an EAGLE-3 network, in files and in `Eagle3Config`."""
FROM_LENGTH = ("yarn", "llama3")
"""Scalings that also need the context length of the original training."""


def refuse(config: Json, what: str, *variants: str) -> None:
    """Raise UserError for variants of the network: they have the same tensors, so they would load but draft badly."""
    for name in variants:
        if config.get(name):
            raise UserError(f"{what} with {name} = {config[name]!r} in config.json is not supported")


def body(config: Json, what: str, head_dim: int | None = None, may_slide: bool = False) -> dict[str, Any]:
    """Return the fields shared by both kinds of draft. Raises KeyError for a missing key, UserError for a variant."""
    refuse(config, what, "quantization_config")
    if not may_slide:
        refuse_sliding(config, what)
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{what} with hidden_act = {config['hidden_act']!r} is not supported; only silu is")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim or config["head_dim"],
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "target_hidden_size": none_if_usual(config.get("target_hidden_size"), config["hidden_size"]),
        **_rotary(config),
    }


def refuse_sliding(config: Json, what: str) -> None:
    """Raise UserError for sliding layers of the draft itself; publishers also leave their target's list there."""
    types = config.get("layer_types")
    own = isinstance(types, list | tuple) and len(types) == config.get("num_hidden_layers")
    if own and "sliding_attention" in types:  # type: ignore[operator]
        raise UserError(f"{what} with sliding-window layers is not supported: its publisher's code computes none")


def body_json(config: DraftConfig, tensors: Tensors) -> dict[str, Any]:
    """Return the inverse of `body`, with the keys of transformers 4, which every reader supports."""
    scaling = {} if config.rope_scaling is None else {"rope_scaling": dict(config.rope_scaling)}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **scaling,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype_name(tensors["norm.weight"].dtype),
    }


def eagle3_flags(config: Json) -> dict[str, Any]:
    """Return the variants of an EAGLE-3 network in a config; an absent flag is false."""
    return {name: config.get(name) or False for name in EAGLE3_FLAGS}


def leaves_head(config: Json, tensors: Tensors) -> bool:
    """Return whether its head is rows of the target's. Raises UserError if the file does not name the rows."""
    if not config.get(TARGET_HEAD):
        return False
    if "d2t" not in tensors:
        raise UserError("the head is left to the target, but tensor d2t, its tokens, is missing; copy the draft again")
    return True


def head_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config entries of a file that leaves its head to the target."""
    reduced = {"draft_vocab_size": checkpoint.config.draft_vocab_size, TARGET_HEAD: True}
    return reduced if checkpoint.target_head else {}


def _rotary(config: Json) -> dict[str, Any]:
    """Return theta (default 10000), context length and scaling. Newer files have them in `rope_parameters`."""
    newer = config.get("rope_parameters") or {}
    newer = {**newer, **_of_kind(config, newer)}
    settings = {**(config.get("rope_scaling") or {}), **newer}
    theta = float(settings.pop("rope_theta", config.get("rope_theta", 10000.0)))
    length = config.get("max_position_embeddings", 4096)
    # transformers 4 wrote the older name beside the newer one.
    kinds = [settings.pop(key, None) for key in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if {**config, **settings}.get("partial_rotary_factor") not in (None, 1.0):
        raise UserError("a draft with partial_rotary_factor in config.json is not supported")
    plain = {"rope_theta": theta, "max_positions": length, "rope_scaling": None}
    if kind == "default":
        return plain
    if kind not in SCALINGS:
        raise UserError(f"a draft with rotary scaling '{kind}' is not supported; only {', '.join(SCALINGS)} are")
    scaling = {"rope_type": kind, **{key: value for key, value in settings.items() if not isinstance(value, Mapping)}}
    for key in SCALINGS[kind]:
        scaling[key]  # a missing key is a KeyError
    if kind in FROM_LENGTH and scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = config.get("original_max_position_embeddings") or length
    return {**plain, "rope_scaling": scaling}


def _of_kind(config: Json, angles: Json) -> Json:
    """Return the angles shared by all layers. Raises UserError if angles differ by kind of layer."""
    by_kind = {kind: value for kind, value in angles.items() if isinstance(value, Mapping)}
    kinds = config.get("layer_types") or ["full_attention"]
    used = {kind: by_kind[kind] for kind in kinds if kind in by_kind} or by_kind
    first: Json = next(iter(used.values()), {})
    if any(value != first for value in used.values()):
        raise UserError(f"a draft with rotary angles that differ by kind of layer ({', '.join(used)}) is not supported")
    return first


def none_if_usual(value: int | None, usual: int) -> int | None:
    return None if value == usual else value


def shift_ids(ids: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(i + by for i in ids)


def with_whole_map(config: DraftConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors with the parts of the vocabulary map that the file may omit.

    A draft of the whole vocabulary may omit its map, and any draft may omit `t2d`, which follows from `d2t`. In our
    networks, a DFlash draft of the whole vocabulary has no map, and one of a reduced vocabulary without a map uses the
    first ids. Sizes must have been checked before, as this allocates memory.
    """
    tensors, size = dict(tensors), config.draft_vocab_size
    if size is None:
        return without_whole_map(config, tensors) if "d2t" in tensors and not tensors["d2t"].any() else tensors
    if size == config.vocab_size or isinstance(config, DFlashConfig):
        tensors.setdefault("d2t", torch.zeros(size, dtype=torch.int64))
    if "d2t" in tensors and "t2d" not in tensors:
        covered = torch.zeros(config.vocab_size, dtype=torch.bool)
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        tensors["t2d"] = covered.index_fill(0, ids[(ids >= 0) & (ids < config.vocab_size)], True)
    return tensors


def without_whole_map(config: DraftConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors without the map of a whole vocabulary, which no format needs: its ids are the target's."""
    whole = config.draft_vocab_size in (None, config.vocab_size)
    return {name: tensor for name, tensor in tensors.items() if not (whole and name in ("d2t", "t2d"))}


def rename_tensors(tensors: Tensors, old: str, new: str) -> dict[str, Tensor]:
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


def cannot_hold(name: str, config: DraftConfig, fields: str = "", **contents: Any) -> None:
    """Raise UserError for the first of `contents` and the config's `fields` that is set: the format cannot hold it."""
    for what, value in (contents | {field: getattr(config, field) for field in fields.split()}).items():
        if value:
            setting = what if value is True else f"{what} = {value}"
            raise UserError(f"the {name} format cannot hold this draft's {setting}")


def needs_vocabulary(name: str, checkpoint: Checkpoint) -> None:
    for tensor in (EMBEDDING, HEAD):
        if tensor not in checkpoint.tensors:
            raise UserError(
                f"the {name} format includes {tensor}, which this draft takes from its target; give --target"
            )


# Checks: whether a checkpoint describes a network, is complete, and fits a target.


LARGEST = {"num_layers": 1 << 10, "num_heads": 1 << 12, "num_kv_heads": 1 << 12, "head_dim": 1 << 12}
LARGEST_OTHER = 1 << 24
"""Above any existing network: a damaged number must not make us allocate huge memory or loop forever."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
FLAGS = ("attention_bias", "shifted_labels", "last_slot_idle", "own_embedding", "own_head", "qk_norm", *EAGLE3_FLAGS)
OTHER_FLAGS = tuple(
    """
    is_causal has_sinks turns_neighbours is_autoregressive enable_confidence_head confidence_head_with_markov
    """.split()
)
REALS = tuple(
    """
    rms_norm_eps rope_theta embedding_scale output_multiplier logit_softcap value_scale lilicorr_mlp_ratio
    lilicorr_logit_scale lilicorr_vector_eps
    """.split()
)
EXPECTED = {
    **dict.fromkeys((*FLAGS, *OTHER_FLAGS), "true or false"),
    **dict.fromkeys(REALS, "a number above 0"),
    "target_layer_ids": "a list of layers",
    "rope_scaling": "an object",
    "layer_types": "one entry a layer",
    "autoregressive": "true only with is_causal",
    "markov_head_type": "vanilla, gated or rnn",
    "conv_group_size": "a whole number that divides the hidden size",
    "lilicorr_num_heads": "a whole number that divides lilicorr_hidden_size",
    "selector_top_k": "a whole number from 1 to the size of the draft's vocabulary",
    "lilicorr_candidate_topk": "a whole number from 2 to the size of the draft's vocabulary",
}
"""Requirements on fields; fields that are not listed are sizes."""
SIZE = "a whole number above 0, no larger than in any network"


def check_values(where: str, config: DraftConfig) -> None:
    """Raise UserError for the first impossible value."""
    for name, value in _unsound(config):
        raise UserError(f"{where}: {name} cannot be {value!r}; expected {EXPECTED.get(name, SIZE)}")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UserError(
            f"{where}: {config.num_heads} heads of {config.head_dim} on {config.num_kv_heads} key-value heads "
            "do not add up"
        )
    _check_windows(where, config)
    if isinstance(config, DFlashConfig) and config.num_drafts(config.block_size) < 1:
        raise UserError(f"{where}: a block of {config.block_size} drafts nothing")
    if isinstance(config, Eagle3Config) and config.norm_before_fc and config.fc_norm:
        raise UserError(f"{where}: norm_before_fc and fc_norm cannot both be set")
    if config.rope_scaling is not None:
        _check_scaling(where, config)


def _check_windows(where: str, config: DraftConfig) -> None:
    """Raise UserError for a window that no text can fill."""
    views = config.body.views if isinstance(config, DFlashConfig) else (config,)
    for window in (view.window for view in views):
        if window is not None and window > config.max_positions:
            raise UserError(
                f"{where}: a window of {window} is more than its context of {config.max_positions} "
                "(max_position_embeddings)"
            )


def _unsound(config: DraftConfig) -> Iterator[tuple[str, object]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ("correction", "body") and not _is_sound(field.name, field.type, value):
            yield field.name, value
    if isinstance(config, DFlashConfig):
        yield from config.body.unsound(config.num_layers, config.hidden_size)
    if isinstance(config, DFlashConfig) and config.correction is not None:
        yield from config.correction.unsound(config.head_sizes)


def _is_sound(name: str, kind: object, value: object) -> bool:
    if name == "target_layer_ids":
        return isinstance(value, tuple) and bool(value) and all(type(i) is int for i in value)
    if name == "rope_scaling":
        return value is None or isinstance(value, Mapping)
    if name in FLAGS:
        return isinstance(value, bool)
    if kind == "float":
        return type(value) in (int, float) and 0 < value < 1e30  # type: ignore[operator]
    if value is None:
        return "None" in str(kind)
    lowest, highest = 0 if name == "mask_token_id" else 1, LARGEST.get(name, LARGEST_OTHER)
    return type(value) is int and lowest <= value <= highest


def _check_scaling(where: str, config: DraftConfig) -> None:
    """Raise UserError unless the scaling's values are numbers and its formula yields valid angles."""
    scaling = dict(config.rope_scaling or {})
    for key, value in scaling.items():
        sound = value is None or (isinstance(value, int | float) and abs(value) < 1e30)
        if key != "rope_type" and not sound:
            raise UserError(f"{where}: {key} of its rotary scaling cannot be {value!r}")
    try:
        inverse, amplitude = frequencies(config.head_dim, config.rope_theta, scaling)
    except (ArithmeticError, ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{where}: rotary scaling {scaling} gives no valid angles ({error})") from error
    if not (inverse.isfinite() & (inverse > 0)).all() or not 0 < amplitude < math.inf:
        raise UserError(f"{where}: rotary scaling {scaling} gives no valid angles")


def check_map(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if `d2t` is not a vocabulary map, before it is used."""
    d2t = tensors.get("d2t")
    if d2t is not None and (d2t.ndim != 1 or d2t.dtype not in SIGNED):
        kind = dtype_name(d2t.dtype)
        raise UserError(f"{where}: d2t is {kind} {list(d2t.shape)}, not one integer offset per token of the draft")


def refuse_broken(where: str, tensors: Tensors) -> None:
    """Raise UserError for the first tensor with NaN or infinite weights."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{where}: {name} holds NaN or infinite weights; {COPY}")


def skeleton(config: DraftConfig) -> DraftModel:
    """Return the network on the `meta` device, where its parameters take no memory."""
    with torch.device("meta"):
        if isinstance(config, PEagleConfig):
            return PEagleDraft(config)
        return DFlashDraft(config) if isinstance(config, DFlashConfig) else Eagle3Draft(config)


MISSING, SURPLUS = "missing_tensor", "surplus_tensor"
COPY = "copy the checkpoint again"


def unsound_tensors(checkpoint: Checkpoint, layer: str) -> Iterator[DraftProblem]:
    """Yield each problem of a draft's tensors, by their names in the file."""
    expected, stored = skeleton(checkpoint.config).state_dict(), checkpoint.tensors
    if checkpoint.target_head and HEAD not in stored:
        del expected[HEAD]
    other = "config.json has no place for it", "the draft is of another kind"
    yield from unlike(expected, stored, lambda name: _in_file(name, layer), other, "drafts")
    if "d2t" in stored and "t2d" in stored:
        yield from _unsound_map(checkpoint.config, stored["d2t"], stored["t2d"])


def unlike(
    expected: Tensors, stored: Tensors, named: Callable[[str], str], surplus: tuple[str, str], what: str
) -> Iterator[DraftProblem]:
    """Yield each tensor that is missing, surplus, or of another shape or type, by its name in the file (`named`).

    `surplus` explains a surplus tensor, with its remedy; `what` names what is stored.
    """
    for name in sorted(expected.keys() - stored.keys()):
        yield DraftProblem(MISSING, f"missing tensor {named(name)}", f"{COPY}, or see if config.json belongs to it")
    for name in sorted(stored.keys() - expected.keys()):
        yield DraftProblem(SURPLUS, f"surplus tensor {named(name)}: {surplus[0]}", surplus[1])
    for name in sorted(expected.keys() & stored.keys()):
        tensor, shape = stored[name], list(expected[name].shape)
        if list(tensor.shape) != shape:
            problem = f"{named(name)} is {list(tensor.shape)}, config.json says {shape}: they do not belong together"
            yield DraftProblem("tensor_shape", problem, COPY)
        elif (tensor.dtype in FLOATS) != expected[name].is_floating_point() or tensor.is_complex():
            problem = f"{named(name)} holds {tensor.dtype}: quantised {what} are not supported"
            yield DraftProblem("tensor_type", problem, "use the original")


def _in_file(name: str, layer: str) -> str:
    return layer + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _unsound_map(config: DraftConfig, d2t: Tensor, t2d: Tensor) -> Iterator[DraftProblem]:
    ids = torch.arange(len(d2t)) + d2t
    if d2t.tolist() == t2d.nonzero().flatten().tolist():
        what = "d2t holds the target's ids, and not what is added to the draft's"
        yield DraftProblem("map_of_ids", what, "subtract 0, 1, 2, ... from it")
    elif not ((ids >= 0) & (ids < config.vocab_size)).all():
        what = f"d2t points outside the target's vocabulary of {config.vocab_size}"
        yield DraftProblem("map_outside", what, "it belongs to another target")
    elif ids.tolist() != t2d.nonzero().flatten().tolist():
        yield DraftProblem("maps_differ", "d2t and t2d name different tokens", COPY)
