"""MTP heads on this disk: in the target's own checkpoint, which transformers loads without them, or in a folder apart.

Either holds tensors `mtp.*` beside a config.json that describes the target: the heads' one layer is of its kind. Norms
are stored as that kind stores them (Qwen3-Next and Qwen3.5 as differences from 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import ANOTHER_DRAFT, DraftProblem, UserError
from dflash_bench.models import targets, weights
from dflash_bench.models.configs import optional
from dflash_bench.models.formats.base import COPY, FLOATS, MISSING, SURPLUS, TargetShape
from dflash_bench.models.hub import UNREADABLE, cannot_load
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft

PREFIX = "mtp."
KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Kinds of targets whose layer the heads may have."""
ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary angles that depend on the position alone."""
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys of a config that say how many layers its heads have."""
EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
MOST_EXPERTS = 1 << 14


def is_of_heads(name: str) -> bool:
    return name.startswith(PREFIX)


def are_apart(names: Iterable[str]) -> bool:
    """Return True if these are the names of tensors of heads, and of nothing else."""
    names = list(names)
    return bool(names) and all(map(is_of_heads, names))


def read(folder: Path, headers_only: bool = False) -> tuple[MTPConfig, dict[str, Tensor]]:
    """Return the heads' config and tensors, without `mtp.`, experts joined as the network holds them.

    Raises UserError if there are none, if they are not complete, or of a kind that is not supported.
    """
    stored = weights.read_tensors(folder, lambda name: not headers_only and is_of_heads(name))
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items() if is_of_heads(name)}
    if not tensors:
        raise UserError(
            f"{folder} has no MTP heads: expected tensors {PREFIX}* in its weights, such as {PREFIX}fc.weight",
            "give heads that are apart from the target as --draft mtp=PATH",
        )
    tensors = _joined(folder, tensors)
    try:
        config = _config(folder, tensors)
        expected = MTPDraft(config)
        expected.rotary()
    except UNREADABLE as error:
        raise cannot_load(folder, error) from error
    for problem in _unsound(expected.state_dict(), tensors):
        raise UserError(f"{folder}: {problem}")
    return config, tensors


def load(folder: Path, target: TargetShape, dtype: torch.dtype, device: str) -> MTPDraft:
    """Load heads. Raises UserError as `read` does, and for heads that were made for another target."""
    config, tensors = read(folder)
    for problem in misfits(config, target):
        raise UserError(f"{folder}: {problem}")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{folder}: {PREFIX}{name} holds NaN or infinite values; {COPY}")
    draft = MTPDraft(config).to(dtype).to_empty(device=device)
    draft.load_state_dict(tensors)
    return draft.eval()


def save(draft: MTPDraft, folder: Path, target: Mapping[str, Any]) -> None:
    """Write heads apart from their target; `target` is the target's config.json. Raises UserError."""
    config = {key: value for key, value in target.items() if key not in ("architectures", "_name_or_path", *COUNTS)}
    tensors = {PREFIX + name: tensor for name, tensor in draft.state_dict().items()}
    weights.write_checkpoint(folder, {**config, COUNTS[0]: 1}, tensors)


def misfits(config: MTPConfig, target: TargetShape) -> Iterator[DraftProblem]:
    """Yield the sizes that show that the heads were made for another target."""
    for code, name, size, expected in (
        ("hidden_size", "hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", "vocabulary", config.vocab_size, target.vocab_size),
        ("target_depth", "number of target layers", config.num_target_layers, target.num_layers),
    ):
        if size != expected:
            yield DraftProblem(code, f"{name} {size}, but the target's is {expected}", ANOTHER_DRAFT)


def note(folder: Path, names: Iterable[str]) -> str | None:
    """Return a note about heads in the checkpoint of a language model, given its tensors' names; None without any."""
    if any(map(is_of_heads, names)):
        return f"it has MTP heads of its own, tensors {PREFIX}*: --method mtp drafts with them"
    if _declared(targets.config_of(folder)):
        return f"its config.json names MTP heads, but there are no tensors {PREFIX}*; --method mtp needs --draft mtp="
    return None


def _declared(config: Any) -> int | None:
    number: int | None = optional(config, *COUNTS)
    return number


def _config(folder: Path, tensors: Mapping[str, Tensor]) -> MTPConfig:
    """Return the config of the heads' layer. Raises UserError for a kind that is not supported."""
    text = targets.config_of(folder)
    if text.model_type not in KINDS:
        raise UserError(
            f"{folder}: MTP heads of a {text.model_type} target are not supported; only those of {', '.join(KINDS)} are"
        )
    if (number := _declared(text)) not in (None, 1):
        raise UserError(f"{folder}: MTP heads of {number!r} layers are not supported; only those of one layer are")
    if optional(text, "mtp_use_dedicated_embeddings"):
        raise UserError(f"{folder}: MTP heads with an embedding of their own are not supported")
    parameters = optional(text, "rope_parameters", default={})
    kind = (parameters.get("full_attention") or parameters).get("rope_type", "default")
    if kind not in ROTARY:
        raise UserError(
            f"{folder}: MTP heads with rotary scaling '{kind}' are not supported; only {', '.join(ROTARY)} are"
        )
    return MTPConfig.of(text, is_dense="layers.0.mlp.gate_proj.weight" in tensors)


def _joined(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with experts that are stored one by one stacked [experts, out, in], gate and up joined."""
    joined = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            if len(match[2]) > len(str(MOST_EXPERTS)):
                raise UserError(f"{folder}: {PREFIX}{name} numbers an expert that no model has; {COPY}")
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for name, parts in experts.items():
        indices = {tuple(sorted(part)) for part in parts.values()}
        if len(parts) < 3 or len(indices) > 1 or (whole := indices.pop()) != tuple(range(len(whole))):
            raise UserError(f"{folder}: {PREFIX}{name}.* lacks a part of some expert; {COPY}")
        try:
            gate, up, down = (torch.stack([parts[kind][i] for i in whole]) for kind in ("gate", "up", "down"))
            joined |= {f"{name}.gate_up_proj": torch.cat([gate, up], dim=1), f"{name}.down_proj": down}
        except RuntimeError as error:
            raise UserError(f"{folder}: {PREFIX}{name}.* are of different shapes; {COPY}") from error
    return joined


def _unsound(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[DraftProblem]:
    """Yield each tensor that is missing, surplus, or of the wrong shape or type, by its name in the file."""
    for name in sorted(expected.keys() - tensors.keys()):
        yield DraftProblem(MISSING, f"missing tensor {PREFIX}{name}", f"{COPY}, or see if config.json belongs to it")
    for name in sorted(tensors.keys() - expected.keys()):
        what = f"surplus tensor {PREFIX}{name}: heads of this kind have no place for it"
        yield DraftProblem(SURPLUS, what, "see if config.json belongs to the weights")
    for name in sorted(expected.keys() & tensors.keys()):
        tensor, shape = tensors[name], list(expected[name].shape)
        if list(tensor.shape) != shape:
            what = f"{PREFIX}{name} is {list(tensor.shape)}, config.json says {shape}: they do not belong together"
            yield DraftProblem("tensor_shape", what, COPY)
        elif tensor.dtype not in FLOATS:
            what = f"{PREFIX}{name} holds {tensor.dtype}: quantised heads are not supported"
            yield DraftProblem("tensor_type", what, "use the original")
