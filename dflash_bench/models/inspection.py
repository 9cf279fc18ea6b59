"""What a draft's checkpoint says of itself, and what keeps it from being run: read from headers, no weights loaded."""

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
    """What it is made for, as in `--draft METHOD=`."""
    used_by: tuple[str, ...]
    """The methods that can run with it."""
    block_size: int | None
    num_drafts: int | None
    """Tokens a round; None where the file does not decide it."""
    tapped_outputs: tuple[int, ...] | None
    """0-based layers whose output is tapped; None where only the target's depth would tell."""
    tapped_inputs: tuple[int, ...] | None
    """The same places, named by the layer that reads them."""
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
    """Raises UserError for what is no draft at all, or is of a kind that is not supported."""
    folder = targets.find_draft(reference)
    home = targets.find_target(target) if target is not None else None
    shape = targets.shape_of(home) if home else None
    form, checkpoint = formats.read(folder, shape, headers_only=True)
    config = checkpoint.config
    dflash = config if isinstance(config, DFlashConfig) else None
    known = checkpoint.derived_taps is None
    held = [tensor for tensor in checkpoint.tensors.values() if tensor.is_floating_point()]
    return Inspection(
        format=form.name,
        method=form.kind,
        used_by=tuple(users_of(form.kind)),
        block_size=dflash.block_size if dflash else None,
        num_drafts=dflash.num_drafts(dflash.block_size) if dflash else None,
        tapped_outputs=config.target_layer_ids if known else None,
        tapped_inputs=tuple(i + 1 for i in config.target_layer_ids) if known else None,
        tapped_formula=checkpoint.derived_taps,
        mask_token_id=dflash.mask_token_id if dflash else None,
        labels=LABELS[dflash.shifted_labels] if dflash else None,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size or config.vocab_size,
        own_embedding=config.own_embedding,
        own_head=dflash.own_head if dflash else True,
        layers=_layers(config),
        rotary=_rotary(config),
        num_parameters=sum(tensor.numel() for tensor in held),
        size_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dtype=", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in held})),
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
    found = list(formats.problems(form, checkpoint, shape))
    # A file of another kind misses all of them, or has as many that do not belong; the first say it.
    for kind in ("missing tensor", "surplus tensor"):
        of_kind = [problem for problem in found if problem.startswith(kind)]
        if len(of_kind) > MOST_OF_A_KIND:
            rest = set(of_kind[MOST_OF_A_KIND:])
            found = [problem for problem in found if problem not in rest] + [f"{len(rest)} more {kind}s"]
    return found


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
    told = [checkpoint.trained_for, f"a target of {depth} layers" if depth else None]
    return ", ".join(part for part in told if part) or None


def text(seen: Inspection) -> str:
    """The same for people."""
    rows: dict[str, Any] = {
        "format": f"{seen.format} ({seen.method})",
        "used by": ", ".join(seen.used_by),
        "block size": seen.block_size and f"{seen.block_size}, drafts {seen.num_drafts} tokens a round",
        "tapped layers": _taps(seen),
        "mask id": seen.mask_token_id,
        "labels": seen.labels,
        "vocabulary": f"{seen.vocab_size}, drafts from {_share(seen)}",
        "embedding": "its own" if seen.own_embedding else "the target's",
        "head": "its own" if seen.own_head else "the target's",
        "layers": seen.layers,
        "rotary": seen.rotary,
        "size": f"{seen.num_parameters:,} parameters, {seen.size_bytes / 2**20:,.1f} MiB, {seen.dtype}",
        "trained for": seen.trained_for,
    }
    lines = [f"{name:<14} {value}" for name, value in rows.items() if value is not None]
    lines += [f"{'note':<14} {note}" for note in seen.notes]
    lines += [f"{'does not fit':<14} {problem}" for problem in seen.problems]
    if seen.target is not None and not seen.problems:
        lines.append(f"{'fits':<14} {seen.target}")
    return "\n".join(lines)


def _taps(seen: Inspection) -> str:
    if seen.tapped_outputs is None or seen.tapped_inputs is None:
        return f"outputs of {seen.tapped_formula}, n the target's depth; --target shows them"
    outputs, inputs = (" ".join(map(str, ids)) for ids in (seen.tapped_outputs, seen.tapped_inputs))
    return f"outputs of {outputs} (inputs of {inputs})"


def _share(seen: Inspection) -> str:
    return "all of it" if seen.draft_vocab_size == seen.vocab_size else f"{seen.draft_vocab_size} of it"


def as_json(seen: Inspection) -> dict[str, Any]:
    return asdict(seen)
