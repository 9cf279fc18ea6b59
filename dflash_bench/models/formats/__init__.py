"""Draft checkpoints in all published formats: detection, reading, checking and writing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from dflash_bench.core.errors import DraftProblem, UserError, first_line, unknown
from dflash_bench.models import packed, weights
from dflash_bench.models.formats import base, bodies, fit, heads, known
from dflash_bench.models.formats.base import Checkpoint, DraftModel, Format, Json, TargetShape
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.p_eagle import PEagleDraft

__all__ = [
    "FORMATS",
    "Checkpoint",
    "DraftModel",
    "Format",
    "TargetShape",
    "format_named",
    "load_draft",
    "problems",
    "read_checkpoint",
    "read_config",
    "save_draft",
]

# Detecting the format by config and tensor names; errors name known kinds that are not supported.


FORMATS = {
    ("zlab", "dflash"): "zlab.DFLASH",
    ("speculators", "dflash"): "speculators.DFLASH",
    ("speculators", "eagle3"): "speculators.EAGLE3",
    ("deepspec", "dflash"): "deepspec.DFLASH",
    ("deepspec", "eagle3"): "deepspec.EAGLE3",
    ("safeailab", "eagle3"): "safeailab.EAGLE3",
    ("lmdeploy", "dflash"): "lmdeploy.DFLASH",
    ("lmdeploy", "eagle3"): "lmdeploy.EAGLE3",
    ("specforge", "dflash"): "projectors.SPECFORGE",
    ("nvidia", "dflash"): "projectors.NVIDIA",
    ("specforge", "p-eagle"): "p_eagle.SPECFORGE",
    ("speculators", "p-eagle"): "p_eagle.SPECULATORS",
}
"""The format of each name and kind of draft: its file here, which is loaded when it is needed, and its constant."""
SPECULATORS = {
    "dflash": "dflash",
    "dspark": "dflash",
    "xpress": "dflash",
    "dflare": "dflash",
    "dflash2": "dflash",
    "eagle3": "eagle3",
    "peagle": "p-eagle",
}
"""The kind of draft of each `speculators_model_type`."""
PROJECTORS = {"dspark": "specforge", "domino": "specforge", "lilicorr": "nvidia"}
"""The name of the format of each head that a config of z-lab's form names."""
ARCHITECTURES = {
    "DFlashDraftModel": ("zlab", "dflash"),
    "DFlash2DraftModel": ("zlab", "dflash"),
    "QwenDFlareDraftModel": ("zlab", "dflash"),
    bodies.OF_ABLATIONS: ("zlab", "dflash"),
    "Qwen3DSparkModel": ("deepspec", "dflash"),
    "Qwen3Eagle3Model": ("deepspec", "eagle3"),
    "PEagleDraftModel": ("specforge", "p-eagle"),
}
UNSUPPORTED_ARCHITECTURES = {
    "XPressDraftModel": "XPress",
    "Gemma4DSparkModel": "DeepSpec's DSpark for Gemma 4",
    "MuseGlimmerAssistantModel": "an assistant for transformers' own DFlash",
}
UNSUPPORTED_TENSORS = {
    r"encoder\.fc\.": "an assistant for transformers' own DFlash",
    r"\d+\.\d+\.linear\.": "Medusa",
}
MASK_FILE = "mask_embedding.pt"
LOOKED_FOR = (
    "config.json with speculators_model_type, dflash_config, draft_vocab_size or the architectures "
    f"{', '.join(ARCHITECTURES)}; tensors midlayer.* or d2t"
)


def detect(folder: Path, config: Json, names: Iterable[str]) -> Format:
    """Return the format of a folder. Raises UserError for an unsupported format, by name if known."""
    names = list(names)
    architectures = config.get("architectures") or ()
    _refuse_unsupported(folder, config, architectures, names)
    form = _detected(folder, config, architectures, names)
    if known.P_EAGLE_MASK in names and form.kind != "p-eagle":
        raise UserError(
            f"{folder} is P-EAGLE by its tensor {known.P_EAGLE_MASK}, but its config.json describes a draft for "
            f"{form.kind}; copy config.json and weights again"
        )
    return form


def _detected(folder: Path, config: Json, architectures: Sequence[str], names: Iterable[str]) -> Format:
    if "speculators_model_type" in config:
        return _speculators(folder, config)
    if (projector := heads.projector_of(config)) is not None:
        return format_named(PROJECTORS[projector], "dflash")
    for name in architectures:
        if name in ARCHITECTURES:
            return format_named(*ARCHITECTURES[name])
    if "dflash_config" in config:
        if config["dflash_config"] and isinstance(config["dflash_config"], Mapping):
            known.refuse_architectures(folder, list(architectures))
        return format_named("zlab", "dflash")
    if "draft_vocab_size" in config or any(name == "d2t" or name.startswith("midlayer.") for name in names):
        return format_named("safeailab", "eagle3")
    raise UserError(f"{folder} is not a draft that we know; looked for {LOOKED_FOR}")


def _speculators(folder: Path, config: Json) -> Format:
    kind = config["speculators_model_type"]
    if kind not in SPECULATORS:
        named = f" is {known.SPECULATORS[kind]}" if kind in known.SPECULATORS else ""
        others = "" if named else f" ({known.KNOWN_TYPES})"
        raise UserError(
            f"{folder}{named}: a speculators draft of type {kind!r} is not supported; only {', '.join(SPECULATORS)} "
            f"are{others}"
        )
    if SPECULATORS[kind] == "dflash":
        known.refuse_architectures(folder, config.get("architectures") or ())
    return format_named("speculators", SPECULATORS[kind])


def _refuse_unsupported(folder: Path, config: Json, architectures: Iterable[str], names: Iterable[str]) -> None:
    for architecture in architectures:
        if architecture in UNSUPPORTED_ARCHITECTURES and "speculators_model_type" not in config:
            what = UNSUPPORTED_ARCHITECTURES[architecture]
            raise UserError(f"{folder} is {what} (architecture {architecture}), which is not supported")
    for name in names:
        for pattern, what in UNSUPPORTED_TENSORS.items():
            if re.match(pattern, name):
                raise UserError(f"{folder} is {what} (tensor {name}), which is not supported")
        if name.startswith("mtp."):
            raise UserError(f"{folder} holds MTP heads (tensor {name}); give it as --draft mtp=PATH")


# Reading, checking and writing checkpoints.
#
# A format is a file here with a reader and a writer; networks are independent of formats. A checkpoint is never loaded
# partially: errors name tensors that are missing, surplus, of the wrong shape or made for another target.


def load_draft(
    folder: Path, target: TargetShape, dtype: torch.dtype, device: str, head: Tensor | None = None
) -> DraftModel:
    """Load a draft; `head` [V, H] is the target's, for a draft whose file omits it.

    Raises UserError for a folder without a known kind of draft, a damaged file, NaN or infinite weights, or a draft for
    another target.
    """
    form, checkpoint = read_checkpoint(folder, target)
    for problem in problems(form, checkpoint, target):
        raise UserError(f"{folder}: {problem}")
    checkpoint = fit.fitted(checkpoint, target)
    if checkpoint.target_head:
        assert head is not None
        checkpoint = checkpoint.with_head(head)
    base.refuse_broken(str(folder), checkpoint.tensors)
    config, tensors = checkpoint.config, checkpoint.tensors
    if target.num_layers - 1 in config.target_layer_ids:
        config = replace(config, num_target_layers=target.num_layers)
    if isinstance(config, DFlashConfig):
        config, tensors = bodies.in_halves(config, tensors)
    draft = base.skeleton(config).to(dtype).to_empty(device=device)
    draft.load_state_dict(dict(tensors))
    return draft.eval()


def save_draft(draft: DraftModel, folder: Path, format_name: str | None = None, slim: bool = False) -> None:
    """Write a draft, by default in the format of the publisher whose drafts it resembles.

    Raises UserError if the format cannot hold the draft. With `slim` the head is omitted, which must be rows of the
    target's.
    """
    kind = "dflash" if isinstance(draft, DFlashDraft) else "p-eagle" if isinstance(draft, PEagleDraft) else "eagle3"
    form = format_named(format_name or _usual_format(draft), kind)
    checkpoint = Checkpoint(draft.config, draft.state_dict())
    weights.write_checkpoint(folder, *form.write(checkpoint.without_head() if slim else checkpoint))


def _usual_format(draft: DraftModel) -> str:
    """Return the format of the publisher whose drafts this one resembles."""
    if not isinstance(draft, DFlashDraft):
        return "specforge" if isinstance(draft, PEagleDraft) else "safeailab"
    usual = {"Domino": "specforge", "LiLiCorr": "nvidia", "XPress": "speculators"}
    if draft.config.kind == "DSpark":
        if draft.config.draft_vocab_size is not None:
            return "speculators"
        return "deepspec" if draft.config.own_head else "specforge"
    return usual.get(draft.config.kind, "zlab")


def read_checkpoint(folder: Path, target: TargetShape | None, headers_only: bool = False) -> tuple[Format, Checkpoint]:
    """Return a folder's format and description. Use `problems` to check that it is complete and fits."""
    config, path = known.usually_named(read_config(folder)), folder / "config.json"
    tensors = weights.read_tensors(folder, weights.only_maps if headers_only else weights.everything)
    tensors |= _mask_embedding(folder, config)
    base.check_map(str(folder), tensors)
    try:
        notes = (packed.NOTE,) if packed.is_packed(config) else ()
        if notes:
            config, tensors = packed.unpack(config, tensors)
        form = detect(folder, config, tensors)
        checkpoint = form.read(config, tensors, target.num_layers if target else None)
        checkpoint = replace(checkpoint, notes=checkpoint.notes + notes)
        heads.refuse_other_heads(checkpoint.config, tensors)
        if isinstance(checkpoint.config, DFlashConfig):
            bodies.refuse_other_kinds(config, checkpoint.config, tensors)
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{path}: {error}") from error
    except KeyError as error:
        kind = known.named_kind(config)
        of = f", the config of a {kind} draft," if kind is not None else ""
        raise UserError(f"{path}{of} lacks {error}") from error
    except (AttributeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise UserError(f"{path} holds a value of the wrong type ({error})") from error
    base.check_values(str(path), checkpoint.config)
    return form, replace(checkpoint, tensors=base.with_whole_map(checkpoint.config, checkpoint.tensors))


def _mask_embedding(folder: Path, config: Json) -> dict[str, Tensor]:
    """Return the mask's own embedding [H] if a publisher stores it in a file beside the draft.

    The file holds a tensor, or a dictionary with one, which may name its token.
    """
    path = folder / MASK_FILE
    if not path.exists():
        return {}
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; copy the checkpoint again") from error
    if isinstance(stored, dict):
        inner = config.get("dflash_config")
        mask = {**config, **(inner if isinstance(inner, dict) else {})}.get("mask_token_id")
        if stored.get("mask_token_id", mask) != mask:
            raise UserError(f"{path} is for token {stored['mask_token_id']!r}, but the draft's mask is {mask!r}")
        tensors = [value for value in stored.values() if isinstance(value, Tensor)]
        stored = tensors[0] if len(tensors) == 1 else stored
    if not isinstance(stored, Tensor):
        raise UserError(f"{path} holds a {type(stored).__name__}, and not the embedding of the mask")
    return {bodies.MASK: stored.detach().flatten()}


def problems(form: Format, checkpoint: Checkpoint, target: TargetShape | None) -> Iterator[DraftProblem]:
    """Yield every problem that prevents running a draft; without a target, only problems of the file itself."""
    yield from fit.misfits(checkpoint.config, target, form.reads_last)
    yield from base.unsound_tensors(checkpoint, form.layer)


def format_named(name: str, kind: str) -> Format:
    """Return the format of this name for a kind of draft. Raises UserError for an unknown one."""
    if (name, kind) not in FORMATS:
        names = [format_name for format_name, format_kind in FORMATS if format_kind == kind]
        raise unknown(f"format for a draft of kind {kind}:", name, names)
    file, constant = FORMATS[name, kind].split(".")
    found: Format = getattr(import_module(f"{__name__}.{file}"), constant)
    return found
