"""Converts a draft between formats, bit for bit unless quantised; errors name anything the other format cannot hold.

llama.cpp's format, the only one for targets too, is written by `gguf_writer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.dialects import GGUF
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.models import formats, gguf_writer, packed, targets, weights
from dflash_bench.models.formats import base, fit
from dflash_bench.models.formats.base import Checkpoint, Format

SHARED = {"dflash": (base.EMBEDDING, base.HEAD), "eagle3": (base.EMBEDDING,), "p-eagle": (base.EMBEDDING,)}
"""Tensors that a draft may take from its target; EAGLE-3 and P-EAGLE always have their own head."""


QUANTIZED = ["int8"]
WANTS_DEPTH = ("zlab", "lmdeploy")
"""Formats whose original readers fail without `num_target_layers`, even if the layers are named (z-lab's model.py)."""


def convert(reference: str, destination: Path, to: str, target: str | None, quantize: str | None = None) -> list[str]:
    """Convert a draft. Return notes on facts that only the new or only the old files declare.

    If the new format includes the target's embedding and head, they are taken from `target`. If it leaves them to the
    target, they are dropped, provided that `target` shows they are copies. With `quantize`, int8, matrices of linear
    layers are rounded (`packed.py`), and the format may stay, also without a head. Raises UserError for an incomplete
    checkpoint, and for anything that the new format cannot hold.
    """
    if quantize not in (None, *QUANTIZED):
        raise unknown("--quantize", str(quantize), QUANTIZED)
    if to == GGUF:
        if quantize is not None:
            raise UserError("--quantize has no effect on gguf; leave one of them out")
        return gguf_writer.convert(reference, destination, target)
    if destination.exists():
        raise UserError(f"{destination} exists already; name a new folder")
    folder = targets.find_draft(reference)
    home = targets.find_target(target) if target is not None else None
    shape = targets.shape_of(home) if home else None
    if shape and home:
        shape = targets.with_tokens(shape, targets.vocabulary_in(home), folder)
    form, checkpoint = formats.read_checkpoint(folder, shape)
    for problem in formats.problems(form, checkpoint, shape):
        raise UserError(f"{folder}: {problem}")
    checkpoint = fit.fitted(checkpoint, shape) if shape else checkpoint
    goal = formats.format_named(to, form.kind)
    stays = goal == form and quantize is not None
    if goal == form and not stays and not checkpoint.target_head:
        raise UserError(f"{folder} is already in the {to} format")
    if checkpoint.derived_taps:
        raise UserError(f"{folder} does not name the layers it taps; give --target, as they depend on its depth")
    leaves_head = stays or (goal.widens and checkpoint.target_head)
    if checkpoint.target_head and home is None and not leaves_head:
        raise UserError(f"{folder} leaves its head to the target; give --target, and it is written out")
    shared = targets.vocabulary_of(home) if home and not leaves_head else {}
    with_head = checkpoint.with_head(shared[base.HEAD]) if shared else checkpoint
    ready = with_head if stays else adapt(with_head, goal, shared)
    depth, known = "num_target_layers", ready
    if shape and goal.name in WANTS_DEPTH and ready.config.num_target_layers is None:
        known = replace(ready, config=replace(ready.config, num_target_layers=shape.num_layers))
    stored = goal.write(known)
    notes = []
    if known is not ready and depth in stored[0]:
        notes = [f"{depth} = {stored[0][depth]} is taken from --target; the draft does not declare it"]
    weights.write_checkpoint(destination, *(stored if quantize is None else packed.pack(*stored)))
    return notes + [f"{goal.name} has no place for {what}: it is left out" for what in _lost(ready, destination)]


def _lost(written: Checkpoint, destination: Path) -> Iterator[str]:
    """Yield the facts that the old config declares and the new one does not."""
    _, again = formats.read_checkpoint(destination, None, headers_only=True)
    for field in fields(written.config):
        value = getattr(written.config, field.name)
        if value is not None and getattr(again.config, field.name) != value:
            yield f"{field.name} = {value}"
    if written.trained_for != again.trained_for:
        yield f"the name of its target, {written.trained_for}"


def adapt(checkpoint: Checkpoint, goal: Format, shared: Mapping[str, Tensor]) -> Checkpoint:
    """Return the checkpoint with the target's tensors if the format includes them, else without copies of them."""
    tensors = dict(checkpoint.tensors)
    for name in SHARED[goal.kind]:
        if name not in shared:
            continue
        if goal.holds_vocabulary:
            tensors.setdefault(name, shared[name])
        elif name in tensors and _same(tensors[name], shared[name]):
            del tensors[name]
    flags: dict[str, Any] = {"own_embedding": base.EMBEDDING in tensors}
    if goal.kind == "dflash":
        flags["own_head"] = base.HEAD in tensors
    return replace(checkpoint, config=replace(checkpoint.config, **flags), tensors=tensors)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.float(), b.float())
