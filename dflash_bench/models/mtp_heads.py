"""MTP heads on disk: in the target's own checkpoint, which transformers loads without them, or in a separate folder.

Beside a config.json that describes the target are tensors in one of four layouts: `mtp.*` (Qwen), those of layers after
the target's last one (DeepSeek, GLM), `model.mtp_layers.0.*` (MiMo), or `model.mtp.layers.*` (MiMo-V2). Heads are
modules with a layer of the target's kind, and norms are stored as that kind stores them (Qwen3-Next and Qwen3.5 as
differences from 1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import ANOTHER_DRAFT, DraftProblem, UserError
from dflash_bench.models import targets, weights
from dflash_bench.models.configs import optional
from dflash_bench.models.formats import fit
from dflash_bench.models.formats.base import COPY, EMBEDDING, HEAD, TargetShape, unlike
from dflash_bench.models.hub import UNREADABLE, cannot_load, read_config
from dflash_bench.models.nets.mtp import KINDS, MIMO, PREFIX, MTPConfig, MTPDraft, heads_among, numbered, own_name

ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary angles that depend only on the position."""
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Config keys with the number of the heads' layers."""
EXPERT = re.compile(r"(.*layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
MOST_EXPERTS = 1 << 14
COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
"""Copies of the target's embedding and head that DeepSeek stores with a layer of the heads."""


def depth_of(folder: Path) -> int:
    """Return the number of the target's layers in config.json."""
    config = read_config(folder)
    text = config.get("text_config")
    depth = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    return depth if type(depth) is int else targets.LARGEST


def are_apart(folder: Path, names: Iterable[str]) -> bool:
    """Return whether these are the tensor names of heads, and nothing else."""
    names = list(names)
    if not names or not all(own_name(name, depth=0) for name in names):
        return False
    return len(heads_among(names, depth_of(folder))) == len(names)


def read(folder: Path, headers_only: bool = False) -> tuple[MTPConfig, dict[str, Tensor]]:
    """Return the heads' config and their tensors by the network's names, with experts joined.

    Raises UserError if heads are missing, incomplete, or of an unsupported kind.
    """
    depth = depth_of(folder)
    stored = weights.read_tensors(folder, lambda name: not headers_only and own_name(name, depth) is not None)
    names = heads_among(stored, depth)
    if not names:
        raise UserError(
            f"{folder} has no MTP heads: expected tensors {PREFIX}* in its weights, such as {PREFIX}fc.weight, or "
            f"model.layers.{depth}.eh_proj.weight",
            "give separately stored heads as --draft mtp=PATH",
        )
    if scales := [name for name in names.values() if name.endswith(("weight_scale_inv", "weight_scale"))]:
        raise UserError(f"{folder}: {min(scales)}: quantised heads are not supported; use the original")
    copies = {own: stored[names.pop(own)] for own in [*names] if own.rpartition("layers.0.")[2] in COPIES}
    _check_copies(folder, {} if headers_only else copies)
    as_stored = _naming(names)
    tensors = _joined(folder, {own: stored[name] for own, name in names.items()}, as_stored)
    if MIMO.pattern.fullmatch(names.get("fc.weight", "")):
        # MiMo-7B concatenates state and embedding in this order.
        tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=-1)[::-1], dim=-1)
    try:
        config = _config(folder, tensors)
        expected = MTPDraft(config)
        expected.rotary()
    except UNREADABLE as error:
        raise cannot_load(folder, error) from error
    surplus = "heads of this kind have no place for it", "see if config.json belongs to the weights"
    for problem in unlike(expected.state_dict(), tensors, as_stored, surplus, "heads"):
        raise UserError(f"{folder}: {problem}")
    for name, tensor in tensors.items():
        if not headers_only and not tensor.isfinite().all():
            raise UserError(f"{folder}: {as_stored(name)} holds NaN or infinite values; {COPY}")
    return config, tensors


Naming = Callable[[str], str]


def _naming(names: Mapping[str, str]) -> Naming:
    """Return a function from the network's names to stored names, in the layout of `names`."""
    found = numbered(names.get("fc.weight") or max(names.values()))
    if found is None:
        return lambda own: names.get(own, PREFIX + own)
    layout, match = found
    theirs = {inner: outer for outer, inner in layout.parts.items()}

    def as_stored(own: str) -> str:
        module = re.match(r"further\.(\d+)\.", own)
        number = int(match[2]) + (int(module[1]) + 1 if module else 0)
        inner = own[module.end() :] if module else own
        part, _, kind = inner.rpartition(".")
        within = theirs.get(inner) or (f"{theirs[part]}.{kind}" if part in theirs else inner.removeprefix("layers.0."))
        return f"{_prefix(match)}{number}.{within}"

    return as_stored


def _prefix(match: re.Match[str]) -> str:
    """Return what stands before the number of a module; files are read without `model.`."""
    return f"model.{match[1].removeprefix('model.')}"


def _tensors_of(names: Mapping[str, str]) -> str:
    """Return the pattern of the heads' stored names, for a note."""
    found = numbered(names.get("fc.weight") or max(names.values()))
    return f"{_prefix(found[1])}{found[1][2]}.*" if found else f"{PREFIX}*"


def _check_copies(folder: Path, copies: Mapping[str, Tensor]) -> None:
    """Raise UserError if an embedding or head stored with the heads differs from the target's own, if present."""
    tables = targets.stored_tables(folder) if copies else {}
    for own, copy in copies.items():
        what = own.rpartition("layers.0.")[2]
        table = tables.get(COPIES[what])
        if table is not None and not torch.equal(table, copy):
            what = what.removesuffix(".weight")
            raise UserError(f"{folder}: MTP heads with {what} of their own are not supported; only the target's is")


def load(folder: Path, target: TargetShape, dtype: torch.dtype, device: str) -> MTPDraft:
    """Load heads. Raises UserError like `read`, and for heads made for another target."""
    config, tensors = read(folder)
    for problem in misfits(config, target):
        raise UserError(f"{folder}: {problem}")
    draft = MTPDraft(config)
    for weight in draft.parameters():
        weight.data = weight.data.to(dtype)  # buffers, which correct an expert's score, keep their type
    draft = draft.to_empty(device=device)
    draft.load_state_dict(tensors)
    return draft.eval()


def save(draft: MTPDraft, folder: Path, target: Mapping[str, Any]) -> None:
    """Write heads without their target; `target` is the target's config.json. Raises UserError."""
    config = {key: value for key, value in target.items() if key not in ("architectures", "_name_or_path", *COUNTS)}
    tensors = {PREFIX + name: tensor for name, tensor in draft.state_dict().items()}
    weights.write_checkpoint(folder, {**config, COUNTS[0]: 1}, tensors)


def misfits(config: MTPConfig, target: TargetShape) -> Iterator[DraftProblem]:
    """Yield the sizes that show that the heads were made for another target."""
    for code, name, size, expected in (
        ("hidden_size", "hidden size", config.hidden_size, target.hidden_size),
        ("target_depth", "number of target layers", config.num_target_layers, target.num_layers),
    ):
        if size != expected:
            yield DraftProblem(code, f"{name} {size}, but the target's is {expected}", ANOTHER_DRAFT)
    yield from fit.other_vocabulary(config.vocab_size, target, has_rows=False)


def note(folder: Path, names: Iterable[str]) -> str | None:
    """Return a note about heads in a language model's checkpoint, given its tensors' names; None without heads."""
    depth = depth_of(folder)
    if found := heads_among(names, depth):
        try:
            read(folder, headers_only=True)
        except UserError as error:
            why = error.what.removeprefix(f"{folder}: ")
            return f"--method mtp cannot use its MTP heads, tensors {_tensors_of(found)}: {why}"
        return f"it has MTP heads of its own, tensors {_tensors_of(found)}: --method mtp drafts with them"
    if any(read_config(folder).get(key) for key in COUNTS):
        return f"its config.json names MTP heads, but there are no tensors {PREFIX}*; --method mtp needs --draft mtp="
    return None


def _declared(config: Any) -> int | None:
    number: int | None = optional(config, *COUNTS)
    return number


def _config(folder: Path, tensors: Mapping[str, Tensor]) -> MTPConfig:
    """Return the config of the heads' layer. Raises UserError for an unsupported kind."""
    text = _text_of(folder)
    found = sum(name.endswith("fc.weight") for name in tensors) or 1
    if (number := _declared(text)) not in (None, found):
        raise UserError(f"{folder}: MTP heads of {number!r} layers are not supported: its weights have {found}")
    if optional(text, "mtp_use_dedicated_embeddings"):
        raise UserError(f"{folder}: MTP heads with an embedding of their own are not supported")
    if optional(text, "index_share_for_mtp_iteration"):
        raise UserError(
            f"{folder}: MTP heads whose later tokens attend to what the first one selected (config.json: "
            "index_share_for_mtp_iteration, GLM-5.2) are not supported; only heads that select for each token are"
        )
    parameters = optional(text, "rope_parameters", default={})
    kind = (parameters.get(KINDS.get(text.model_type)) or parameters).get("rope_type", "default")
    if kind not in ROTARY:
        raise UserError(
            f"{folder}: MTP heads with rotary scaling '{kind}' are not supported; only {', '.join(ROTARY)} are"
        )
    try:
        return MTPConfig.of(text, "layers.0.mlp.gate_proj.weight" in tensors, found)
    except UserError as error:
        raise UserError(f"{folder}: {error.what}") from error


def _text_of(folder: Path) -> Any:
    """Return the target's text config; for MiMo-7B, whose layers are Qwen2's, without its bundled code."""
    config = read_config(folder)
    if config.get("model_type") != "mimo":
        return targets.config_of(folder)
    from transformers import AutoConfig

    return AutoConfig.for_model("qwen2", **{k: v for k, v in config.items() if k not in ("model_type", "auto_map")})


def _joined(folder: Path, tensors: Mapping[str, Tensor], as_stored: Naming) -> dict[str, Tensor]:
    """Return the tensors with separately stored experts stacked [experts, out, in], gate and up joined."""
    joined = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            if len(match[2]) > len(str(MOST_EXPERTS)):
                raise UserError(f"{folder}: {as_stored(name)} numbers an expert that no model has; {COPY}")
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for name, parts in experts.items():
        indices = {tuple(sorted(part)) for part in parts.values()}
        if len(parts) < 3 or len(indices) > 1 or (whole := indices.pop()) != tuple(range(len(whole))):
            raise UserError(f"{folder}: {as_stored(name)}.* lacks a part of some expert; {COPY}")
        try:
            gate, up, down = (torch.stack([parts[kind][i] for i in whole]) for kind in ("gate", "up", "down"))
            joined |= {f"{name}.gate_up_proj": torch.cat([gate, up], dim=1), f"{name}.down_proj": down}
        except RuntimeError as error:
            raise UserError(f"{folder}: {as_stored(name)}.* are of different shapes; {COPY}") from error
    return joined
