"""Describes a draft from its checkpoint's headers, and lists the problems that prevent running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_bench.core.draft_kinds import with_kind
from dflash_bench.core.errors import DraftProblem, UserError
from dflash_bench.core.labels import dtype_name
from dflash_bench.core.methods import users_of
from dflash_bench.models import block_models, formats, loading, mtp_heads, presets, targets, weights
from dflash_bench.models.configs import optional
from dflash_bench.models.formats import TargetShape, base, fit, known, medusa, zlab
from dflash_bench.models.formats.base import Checkpoint, DraftConfig, Format
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.bodies import PLAIN, WHOLE, BlockView
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.mtp import MTPConfig

MOST_OF_A_KIND = 3
LABELS = {
    False: "infill: slot k predicts the token at slot k, slot 0 is idle",
    True: "shift: slot k predicts the token after slot k",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A draft's description; `problems` is empty if it can be run (with the target, if given)."""

    format: str
    method: str
    """The method it was made for, as in `--draft METHOD=`."""
    kind: str | None = None
    """For the method dflash, the publisher's name for the kind of draft: DFlash, DFlash 2, DSpark, ..."""
    used_by: tuple[str, ...]
    """The methods that can run with it."""
    block_size: int | None = None
    num_drafts: int | None = None
    """Drafted tokens per round; None if the file does not determine it."""
    tapped_outputs: tuple[int, ...] | None = None
    """0-based layers whose output is tapped; None if they depend on a target's unknown depth, or without taps."""
    tapped_inputs: tuple[int, ...] | None = None
    """The same outputs, named by the layer that reads them."""
    tapped_formula: str | None = None
    mask_token_id: int | None = None
    labels: str | None = None
    vocab_size: int
    draft_vocab_size: int
    own_embedding: bool | None
    """None for Medusa heads, which have no embedding."""
    own_head: bool = True
    layers: str
    attention: str | None = None
    """The attention of a block's slots, unless every layer sees the whole context and the whole block."""
    body: str | None = None
    """Other differences of a block's body from DFlash's."""
    correction: str | None = None
    """The head that corrects a block, with its sizes."""
    rotary: str | None = None
    num_parameters: int
    size_bytes: int
    dtype: str
    trained_for: str | None = None
    notes: tuple[str, ...] = ()
    target: str | None
    problems: tuple[DraftProblem, ...]


def inspect(reference: str, target: str | None = None) -> Inspection:
    """Return a draft's description. Raises UserError for anything but a draft of a supported kind."""
    folder = targets.find_draft(reference)
    if target is None:
        return _described(folder, None, None)
    home = targets.find_target(target)
    shape, tokenizer = targets.shape_of(home), []
    try:
        vocabulary = targets.tokenizer_of(home).get_vocab()
        shape = targets.with_tokens(shape, vocabulary, folder)
        if problem := targets.other_tokenizer(folder, vocabulary):
            tokenizer = [problem]
    except UserError as error:
        tokenizer = [DraftProblem("unreadable_tokenizer", error.what, error.remedy)]
    seen = _described(folder, shape, target)
    notes = () if seen.problems else fit.notes(seen.vocab_size, shape)
    return replace(seen, notes=(*seen.notes, *notes), problems=(*seen.problems, *tokenizer))


def _described(folder: Path, shape: TargetShape | None, target: str | None) -> Inspection:
    if known.is_medusa(folder):
        return _of_heads(folder, shape, target)
    names = weights.read_tensors(folder, weights.only_maps) if any(folder.glob("*.safetensors")) else {}
    if mtp_heads.are_apart(folder, names):
        return _of_mtp_heads(folder, shape, target)
    known.refuse_others(folder, read_config(folder), names)
    if loading.is_language_model(folder):
        return _of_language_model(folder, shape, target)
    return _of_draft(folder, shape, target)


def _of_draft(folder: Path, shape: TargetShape | None, target: str | None) -> Inspection:
    form, checkpoint = formats.read_checkpoint(folder, shape, headers_only=True)
    config = checkpoint.config
    dflash = config if isinstance(config, DFlashConfig) else None
    num_drafts = dflash.num_drafts(dflash.block_size) if dflash else getattr(config, "trained_drafts", None)
    taps_are_known = checkpoint.derived_taps is None
    return Inspection(
        format=form.name,
        kind=loading.kind_of(config),
        block_size=dflash.block_size if dflash else None,
        num_drafts=num_drafts,
        tapped_outputs=config.target_layer_ids if taps_are_known else None,
        tapped_inputs=tuple(i + 1 for i in config.target_layer_ids) if taps_are_known else None,
        tapped_formula=checkpoint.derived_taps,
        mask_token_id=getattr(config, "mask_token_id", None),
        labels=LABELS[dflash.shifted_labels] if dflash else None,
        own_embedding=config.own_embedding,
        own_head=not checkpoint.target_head and (dflash.own_head if dflash else True),
        layers=_layers(config),
        **(_of_block(dflash) if dflash else _of_pairs(config)),
        rotary=_rotary(config),
        **_of_all(form.kind, config.vocab_size, checkpoint.tensors)
        | {"draft_vocab_size": config.draft_vocab_size or config.vocab_size},
        trained_for=_trained_for(checkpoint),
        notes=checkpoint.notes + _unknown_keys(folder, form) + _doubts(folder, target),
        target=target,
        problems=tuple(_problems(form, checkpoint, shape)),
    )


def _unknown_keys(folder: Path, form: Format) -> tuple[str, ...]:
    """Return a note about keys beside `dflash_config` whose meaning is unknown."""
    if form.kind != "dflash" or form.name not in ("zlab", "specforge", "nvidia"):
        return ()
    unknown = known.unknown_keys(read_config(folder), zlab.BESIDE)
    return (f"keys of config.json that are not read: {', '.join(unknown)}",) if unknown else ()


def _of_heads(folder: Path, shape: TargetShape | None, target: str | None) -> Inspection:
    config, tensors = medusa.read(folder, headers_only=True)
    blocks = f"{config.num_layers} residual block{'s' if config.num_layers > 1 else ''}"
    return Inspection(
        format="fasterdecoding",
        num_drafts=config.num_heads,
        own_embedding=None,
        layers=f"{config.num_heads} heads of {blocks} of {config.hidden_size}",
        target=target,
        **_of_all("medusa", config.vocab_size, tensors),
        problems=() if shape is None else tuple(medusa.misfits(config, shape)),
    )


def _of_mtp_heads(folder: Path, shape: TargetShape | None, target: str | None) -> Inspection:
    config, tensors = mtp_heads.read(folder, headers_only=True)
    return Inspection(
        format=f"MTP heads ({config.text.model_type})",
        own_embedding=False,
        own_head=False,
        layers=_layers(config),
        target=target,
        **_of_all(presets.MTP, config.vocab_size, tensors),
        trained_for=f"a target of {config.num_target_layers} layers",
        problems=() if shape is None else tuple(mtp_heads.misfits(config, shape)),
    )


def _of_language_model(folder: Path, shape: TargetShape | None, target: str | None) -> Inspection:
    config, blocks = targets.config_of(folder), block_models.settings_of(read_config(folder))
    if blocks is not None:
        loading.check_blocks(folder, read_config(folder))
    rows = targets.shape_of(folder).vocab_size
    problems = [] if shape is None else loading.other_vocabulary(folder, rows, shape)
    method = "block-diffusion" if blocks else "draft-model"
    tensors = weights.read_tensors(folder, weights.only_maps)
    note, inner = mtp_heads.note(folder, tensors), optional(config, "intermediate_size", default="?")
    return Inspection(
        format=f"language model ({config.model_type})",
        block_size=blocks and blocks["block_size"],
        mask_token_id=blocks and blocks["mask_token_id"],
        own_embedding=True,
        target=target,
        problems=tuple(problems),
        layers=f"{config.num_hidden_layers} of {config.hidden_size}/{inner}",
        notes=(note,) if note else (),
        **_of_all(method, rows, tensors),
    )


def _of_all(method: str, num_rows: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what every draft has: the methods that use it, its vocabulary and its size."""
    parameters = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return {
        "method": method,
        "used_by": tuple(users_of(method)),
        "vocab_size": num_rows,
        "draft_vocab_size": num_rows,
        "num_parameters": sum(tensor.numel() for tensor in parameters),
        "size_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "dtype": ", ".join(sorted({dtype_name(tensor.dtype) for tensor in parameters})),
    }


def _doubts(folder: Path, target: str | None) -> tuple[str, ...]:
    doubt = targets.other_verifier(formats.read_config(folder), targets.name_of(target)) if target is not None else None
    return (doubt,) if doubt else ()


def _problems(form: Format, checkpoint: Checkpoint, shape: formats.TargetShape | None) -> list[DraftProblem]:
    problems = list(formats.problems(form, checkpoint, shape))
    # A file of another kind lacks all tensors, or has many surplus tensors; the first few are enough.
    for code in (base.MISSING, base.SURPLUS):
        of_kind = [problem for problem in problems if problem.code == code]
        if len(of_kind) > MOST_OF_A_KIND:
            rest = set(of_kind[MOST_OF_A_KIND:])
            more = DraftProblem(code, f"{len(rest)} more {code.replace('_', ' ')}s")
            problems = [*(problem for problem in problems if problem not in rest), more]
    return problems


def _layers(config: DraftConfig | MTPConfig) -> str:
    count = getattr(config, "num_layers", 1)
    heads = f"{config.num_heads} heads on {config.num_kv_heads} of {config.head_dim}"
    variants = [
        name
        for name in ("attention_bias", "qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(config, name, False)
    ]
    return ", ".join([f"{count} of {config.hidden_size}/{config.intermediate_size}", heads, *variants])


def _of_block(config: DFlashConfig) -> dict[str, Any]:
    """Return the differences of a block draft from a plain DFlash, as lines of text."""
    body, head = config.body, config.correction
    kept = Counter(body.view(layer) for layer in range(config.num_layers))
    seen = [f"{count} layer{'s' * (count > 1)} {_view(view)}" for view, count in kept.items()]
    taps, group = body.conv_kernel_size, body.conv_group_size
    plain = replace(PLAIN, conv_kernel_size=taps, conv_group_size=group)
    parts = [] if taps is None else [f"convolutions of {taps} taps in groups of {group}"]
    for field in fields(body):
        value = getattr(body, field.name)
        if field.name != "views" and value != getattr(plain, field.name):
            parts.append(field.name if value is True else f"{field.name} {value}")
    own = "" if head is None else f"{head.kind.lower()}_"
    sizes = [] if head is None else [f"{name.removeprefix(own)} {value}" for name, value in asdict(head).items()]
    return {
        "attention": None if kept.keys() == {WHOLE} else "; ".join(seen),
        "body": ", ".join(parts) or None,
        "correction": None if head is None else f"{head.kind}: {', '.join(sizes)}",
    }


def _of_pairs(config: Any) -> dict[str, Any]:
    """Return the attention of an EAGLE-3 or P-EAGLE draft as a line of text, unless it covers the whole context."""
    return {} if config.window is None else {"attention": f"a window of {config.window}"}


def _view(view: BlockView) -> str:
    order = "causal in the block" if view.is_causal else "both ways in the block"
    if view.window is None:
        return f"{order}, no window"
    return f"{order}, a window of {view.window}" + " before the anchor" * view.from_anchor


def _rotary(config: DraftConfig) -> str:
    scaling = config.rope_scaling
    return f"theta {config.rope_theta:g}" + (f", {scaling['rope_type']} x {scaling['factor']:g}" if scaling else "")


def _trained_for(checkpoint: Checkpoint) -> str | None:
    depth = checkpoint.config.num_target_layers
    parts = [checkpoint.trained_for, f"a target of {depth} layers" if depth else None]
    return ", ".join(part for part in parts if part) or None


def text(inspection: Inspection) -> str:
    """Return the inspection as lines of text."""
    parameters, mebibytes = f"{inspection.num_parameters:,} parameters", f"{inspection.size_bytes / 2**20:,.1f} MiB"
    values: dict[str, Any] = {
        "format": f"{inspection.format} ({inspection.method})",
        "kind": inspection.kind and with_kind(inspection.method, inspection.kind),
        "used by": ", ".join(inspection.used_by),
        "block size": _block(inspection),
        "tapped layers": _taps(inspection),
        "mask id": inspection.mask_token_id,
        "labels": inspection.labels,
        "vocabulary": f"{inspection.vocab_size}, drafts from {_share(inspection)}",
        "embedding": _embedding(inspection),
        "head": "its own" if inspection.own_head else "the target's",
        "layers": inspection.layers,
        "attention": inspection.attention,
        "body": inspection.body,
        "correction": inspection.correction,
        "rotary": inspection.rotary,
        "size": f"{parameters}, {mebibytes}, {inspection.dtype}",
        "trained for": inspection.trained_for,
    }
    lines = [f"{name:<14} {value}" for name, value in values.items() if value is not None]
    lines += [f"{'note':<14} {note}" for note in inspection.notes]
    lines += [f"{'does not fit':<14} {problem}" for problem in inspection.problems]
    if inspection.target is not None and not inspection.problems:
        lines.append(f"{'fits':<14} {inspection.target}")
    return "\n".join(lines)


def _block(inspection: Inspection) -> str | None:
    drafts = f"drafts {inspection.num_drafts} tokens per round"
    if inspection.block_size is None:
        return None if inspection.num_drafts is None else drafts
    return str(inspection.block_size) if inspection.num_drafts is None else f"{inspection.block_size}, {drafts}"


def _embedding(inspection: Inspection) -> str | None:
    if inspection.own_embedding is None:
        return None
    return "its own" if inspection.own_embedding else "the target's"


def _taps(inspection: Inspection) -> str | None:
    if inspection.tapped_formula is None and inspection.tapped_outputs is None:
        return None
    if inspection.tapped_outputs is None or inspection.tapped_inputs is None:
        return f"outputs of {inspection.tapped_formula}, where n is the target's depth; give --target to see them"
    outputs, inputs = (" ".join(map(str, ids)) for ids in (inspection.tapped_outputs, inspection.tapped_inputs))
    return f"outputs of {outputs} (inputs of {inputs})"


def _share(inspection: Inspection) -> str:
    return (
        "all of it" if inspection.draft_vocab_size == inspection.vocab_size else f"{inspection.draft_vocab_size} of it"
    )


def as_json(inspection: Inspection) -> dict[str, Any]:
    return asdict(inspection)
