"""What a draft's checkpoint says about itself, and what prevents running it; reads headers, loads no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.methods import users_of
from dflash_bench.models import formats, pairing, targets
from dflash_bench.models.dflash import DFlashConfig
from dflash_bench.models.formats.checkpoint import Checkpoint, DraftConfig, Format

MOST_OF_A_KIND = 3
LABELS = {
    False: "infill: slot k predicts the token at slot k, slot 0 is idle",
    True: "shift: slot k predicts the token after slot k",
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """`problems` is empty for a checkpoint that can be run (under the target, if one was given)."""

    format: str
    method: str
    """The method it was made for, as in `--draft METHOD=`."""
    used_by: tuple[str, ...]
    """The methods that can run with it."""
    block_size: int | None
    num_drafts: int | None
    """Drafted tokens per round; None if the file does not decide it."""
    tapped_outputs: tuple[int, ...] | None
    """0-based layers whose output is tapped; None if they depend on a target's depth that we do not know."""
    tapped_inputs: tuple[int, ...] | None
    """The same outputs, named by the layer that reads them."""
    tapped_formula: str | None
    mask_token_id: int | None
    labels: str | None
    vocab_size: int
    draft_vocab_size: int
    own_embedding: bool
    own_head: bool
    layers: str
    rotary: str
    num_parameters: int
    size_bytes: int
    dtype: str
    trained_for: str | None
    notes: tuple[str, ...]
    target: str | None
    problems: tuple[str, ...]


def inspect(reference: str, target: str | None = None) -> Inspection:
    """Raises UserError for what is not a draft at all, or is of a kind that is not supported."""
    folder = targets.find_draft(reference)
    home = targets.find_target(target) if target is not None else None
    shape = targets.shape_of(home) if home else None
    form, checkpoint = formats.read_checkpoint(folder, shape, headers_only=True)
    config = checkpoint.config
    dflash = config if isinstance(config, DFlashConfig) else None
    taps_are_known = checkpoint.derived_taps is None
    parameters = [tensor for tensor in checkpoint.tensors.values() if tensor.is_floating_point()]
    return Inspection(
        format=form.name,
        method=form.kind,
        used_by=tuple(users_of(form.kind)),
        block_size=dflash.block_size if dflash else None,
        num_drafts=dflash.num_drafts(dflash.block_size) if dflash else None,
        tapped_outputs=config.target_layer_ids if taps_are_known else None,
        tapped_inputs=tuple(i + 1 for i in config.target_layer_ids) if taps_are_known else None,
        tapped_formula=checkpoint.derived_taps,
        mask_token_id=dflash.mask_token_id if dflash else None,
        labels=LABELS[dflash.shifted_labels] if dflash else None,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size or config.vocab_size,
        own_embedding=config.own_embedding,
        own_head=dflash.own_head if dflash else True,
        layers=_layers(config),
        rotary=_rotary(config),
        num_parameters=sum(tensor.numel() for tensor in parameters),
        size_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dtype=", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters})),
        trained_for=_trained_for(checkpoint),
        notes=checkpoint.notes + _doubts(folder, target),
        target=target,
        problems=(*_problems(form, checkpoint, shape), *_other_tokenizer(folder, home)),
    )


def _other_tokenizer(folder: Path, home: Path | None) -> list[str]:
    if home is None:
        return []
    try:
        problem = pairing.other_tokenizer(folder, targets.tokenizer_of(home).get_vocab())
    except UserError as error:
        return [str(error)]
    return [problem] if problem else []


def _doubts(folder: Path, target: str | None) -> tuple[str, ...]:
    doubt = pairing.other_verifier(formats.read_config(folder), targets.name_of(target)) if target is not None else None
    return (doubt,) if doubt else ()


def _problems(form: Format, checkpoint: Checkpoint, shape: formats.TargetShape | None) -> list[str]:
    problems = list(formats.problems(form, checkpoint, shape))
    # A file of another kind lacks all tensors, or has many that do not belong; the first few are enough to see that.
    for kind in ("missing tensor", "surplus tensor"):
        of_kind = [problem for problem in problems if problem.startswith(kind)]
        if len(of_kind) > MOST_OF_A_KIND:
            rest = set(of_kind[MOST_OF_A_KIND:])
            problems = [problem for problem in problems if problem not in rest] + [f"{len(rest)} more {kind}s"]
    return problems


def _layers(config: DraftConfig) -> str:
    count = config.num_layers if isinstance(config, DFlashConfig) else 1
    heads = f"{config.num_heads} heads on {config.num_kv_heads} of {config.head_dim}"
    variants = [
        name
        for name in ("attention_bias", "qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(config, name, False)
    ]
    return ", ".join([f"{count} of {config.hidden_size}/{config.intermediate_size}", heads, *variants])


def _rotary(config: DraftConfig) -> str:
    scaling = config.rope_scaling
    return f"theta {config.rope_theta:g}" + (f", {scaling['rope_type']} x {scaling['factor']:g}" if scaling else "")


def _trained_for(checkpoint: Checkpoint) -> str | None:
    depth = checkpoint.config.num_target_layers
    parts = [checkpoint.trained_for, f"a target of {depth} layers" if depth else None]
    return ", ".join(part for part in parts if part) or None


def text(inspection: Inspection) -> str:
    """The inspection as lines for people."""
    parameters, mebibytes = f"{inspection.num_parameters:,} parameters", f"{inspection.size_bytes / 2**20:,.1f} MiB"
    values: dict[str, Any] = {
        "format": f"{inspection.format} ({inspection.method})",
        "used by": ", ".join(inspection.used_by),
        "block size": inspection.block_size
        and f"{inspection.block_size}, drafts {inspection.num_drafts} tokens a round",
        "tapped layers": _taps(inspection),
        "mask id": inspection.mask_token_id,
        "labels": inspection.labels,
        "vocabulary": f"{inspection.vocab_size}, drafts from {_share(inspection)}",
        "embedding": "its own" if inspection.own_embedding else "the target's",
        "head": "its own" if inspection.own_head else "the target's",
        "layers": inspection.layers,
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


def _taps(inspection: Inspection) -> str:
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
