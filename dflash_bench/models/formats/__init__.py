"""Checkpoints of drafts in the formats of their publishers: read into one description, checked, written again.

A format is a file here with a reader and a writer; the networks know nothing of formats. A checkpoint is never loaded
in part: an error names what is missing, surplus, of the wrong shape or made for another target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_bench.errors import DraftProblem, UserError, unknown
from dflash_bench.models import files
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.models.folders import read_config
from dflash_bench.models.formats import checks, fields
from dflash_bench.models.formats.checkpoint import Checkpoint, DraftModel, Format, TargetShape
from dflash_bench.models.formats.detect import FORMATS, detect

__all__ = [
    "FORMATS", "Checkpoint", "DraftModel", "Format", "TargetShape", "format_named", "load_draft", "problems",
    "read_checkpoint", "read_config", "save_draft",
]  # fmt: skip


def load_draft(
    folder: Path, target: TargetShape, dtype: torch.dtype, device: str, head: Tensor | None = None
) -> DraftModel:
    """`head` [V, H] is the target's, for a draft that leaves its own to it.

    Raises UserError for a folder without a draft that we know, a damaged file, or a draft for another target."""
    form, checkpoint = read_checkpoint(folder, target)
    for problem in problems(form, checkpoint, target):
        raise UserError(f"{folder}: {problem}")
    if checkpoint.target_head:
        assert head is not None
        checkpoint = checkpoint.with_head(head)
    draft = checks.skeleton(checkpoint.config).to(dtype).to_empty(device=device)
    draft.load_state_dict(dict(checkpoint.tensors))
    return draft.eval()


def save_draft(draft: DraftModel, folder: Path, format_name: str | None = None, slim: bool = False) -> None:
    """Raises UserError if the format (by default z-lab's or SafeAILab's) cannot hold this draft.

    A slim one leaves out its head, which must be rows of the target's.
    """
    kind = "dflash" if isinstance(draft, DFlashDraft) else "eagle3"
    form = format_named(format_name or {"dflash": "zlab", "eagle3": "safeailab"}[kind], kind)
    checkpoint = Checkpoint(draft.config, draft.state_dict())
    files.write_checkpoint(folder, *form.write(checkpoint.without_head() if slim else checkpoint))


def read_checkpoint(folder: Path, target: TargetShape | None, headers_only: bool = False) -> tuple[Format, Checkpoint]:
    """A folder's format and description. Call `problems` to check that it is complete and fits."""
    config, path = read_config(folder), folder / "config.json"
    tensors = files.read_tensors(folder, files.only_maps if headers_only else files.everything)
    checks.check_map(str(folder), tensors)
    try:
        form = detect(folder, config, tensors)
        checkpoint = form.read(config, tensors, target.num_layers if target else None)
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{path}: {error}") from error
    except KeyError as error:
        raise UserError(f"{path} lacks {error}") from error
    except (AttributeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise UserError(f"{path} holds a value of the wrong type ({error})") from error
    checks.check_values(str(path), checkpoint.config)
    return form, replace(checkpoint, tensors=fields.with_whole_map(checkpoint.config, checkpoint.tensors))


def problems(form: Format, checkpoint: Checkpoint, target: TargetShape | None) -> Iterator[DraftProblem]:
    """Everything that prevents running it. Without a target, what the file alone shows."""
    yield from checks.misfits(checkpoint.config, target or checks.own_target(checkpoint.config))
    yield from checks.unsound_tensors(checkpoint, form.layer)


def format_named(name: str, kind: str) -> Format:
    if (name, kind) not in FORMATS:
        names = [format_name for format_name, format_kind in FORMATS if format_kind == kind]
        raise unknown(f"format for a draft of kind {kind}:", name, names)
    return FORMATS[name, kind]
