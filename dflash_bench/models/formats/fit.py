"""Whether a draft fits a target, and a common vocabulary where the two are padded differently.

Publishers pad embedding and head with rows that no token uses, to different sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dflash_bench.core.errors import ANOTHER_DRAFT, DraftProblem
from dflash_bench.models.formats.base import (
    COPY,
    HEAD,
    Checkpoint,
    DraftConfig,
    TargetShape,
    skeleton,
    with_whole_map,
)
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.p_eagle import PEagleConfig

MOST_PADDING = 4096
"""The most rows after the last token that count as padding."""


def own_target(config: DraftConfig) -> TargetShape:
    """Return the shape of the target that the file itself describes; without a depth, a sufficient one."""
    depth = config.num_target_layers or max(config.target_layer_ids) + 2
    return TargetShape(config.target_hidden_size or config.hidden_size, config.vocab_size, depth)


def misfits(config: DraftConfig, of_target: TargetShape | None, reads_last: bool) -> Iterator[DraftProblem]:
    """Yield every reason why a draft does not fit a target, or any if it is None; `reads_last` is its format's."""
    target = of_target or own_target(config)
    width = config.target_hidden_size or config.hidden_size
    if width != target.hidden_size:
        what = f"hidden size {width}, but the target's is {target.hidden_size}"
        yield DraftProblem("hidden_size", what, ANOTHER_DRAFT)
    elif config.hidden_size != width:
        yield from _missing_vocabulary(config)
    if config.vocab_size != target.vocab_size:
        yield from other_vocabulary(config.vocab_size, target, has_rows(config))
    outside = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers - (not reads_last)]
    if outside:
        what = f"taps layer {outside[0]}, but the target has layers 0 to {target.num_layers - 1}"
        if not reads_last:
            what += " (in this format the last cannot be tapped: whether it is read behind the final norm is not known)"
        yield DraftProblem("tapped_layer", what, ANOTHER_DRAFT)
    if config.num_target_layers not in (None, target.num_layers):
        what = f"made for a target of {config.num_target_layers} layers, but this one has {target.num_layers}"
        yield DraftProblem("target_depth", what, ANOTHER_DRAFT)
    if isinstance(config, DFlashConfig | PEagleConfig):
        mask = config.mask_token_id
        if config.own_embedding and mask >= config.vocab_size:
            what = f"mask id {mask} is outside its own embedding of {config.vocab_size} rows"
            yield DraftProblem("mask_id", what, COPY)
        elif of_target and mask >= target.vocab_size:
            what = f"mask id {mask} is outside the target's embedding of {target.vocab_size} rows"
            yield DraftProblem("mask_id", what, "use a target whose embedding is padded")


def _missing_vocabulary(config: DraftConfig) -> Iterator[DraftProblem]:
    """Yield a problem if a draft whose hidden size differs from its target's lacks its own embedding or head."""
    if not config.own_embedding or (isinstance(config, DFlashConfig) and not config.own_head):
        what = (
            f"hidden size {config.hidden_size} is not its target's {config.target_hidden_size}, "
            "but it lacks its own embedding or head"
        )
        yield DraftProblem("no_vocabulary", what, "ask its publisher for them")


def other_vocabulary(num_rows: int, target: TargetShape, has_rows: bool = True) -> Iterator[DraftProblem]:
    """Yield a problem if a vocabulary differs from the target's by more than padding.

    A draft without its own rows reads the target's: its size then only indicates another tokenizer.
    """
    if num_rows == target.vocab_size:
        return
    least = target.num_tokens if has_rows else target.vocab_size - MOST_PADDING
    if least is not None and least <= num_rows <= max(least, target.vocab_size) + MOST_PADDING:
        return
    what = f"vocabulary of {num_rows}, but the target's is {target.vocab_size}"
    if least is None:
        remedy = f"{ANOTHER_DRAFT}, or copy the target's tokenizer into its folder"
        yield DraftProblem("vocabulary", f"{what}, and no tokenizer shows whether only padding differs", remedy)
    else:
        tokens = "" if target.num_tokens is None else f", of which {target.num_tokens} are tokens"
        yield DraftProblem("vocabulary", f"{what}{tokens}: more differs than padding", ANOTHER_DRAFT)


def notes(num_rows: int, target: TargetShape) -> tuple[str, ...]:
    """Return a note on a vocabulary padded to another size than the target's."""
    if num_rows == target.vocab_size:
        return ()
    tokens = "" if target.num_tokens is None else f", for {target.num_tokens} tokens"
    rest = "rows of its own beyond the target's are never drafted"
    if num_rows < target.vocab_size:
        rest = "where it has rows of its own, missing ones are read as zeros and never drafted"
    return (f"vocabulary padded to {num_rows} rows, and the target's to {target.vocab_size}{tokens}: {rest}",)


def has_rows(config: DraftConfig) -> bool:
    """Return whether the draft has its own rows for ids of the vocabulary."""
    sizes, others = (
        {name: tensor.shape for name, tensor in skeleton(one).state_dict().items()}
        for one in (config, replace(config, vocab_size=config.vocab_size + 1))
    )
    return sizes != others


def fitted(checkpoint: Checkpoint, target: TargetShape) -> Checkpoint:
    """Return a draft without `misfits` for a target of `target.vocab_size` rows.

    Ids that the target lacks are removed, so that they are never drafted. Ids that the draft lacks are read as zeros,
    and its own head does not draft them.
    """
    config, tensors, size = checkpoint.config, dict(checkpoint.tensors), target.vocab_size
    if config.vocab_size == size:
        return checkpoint
    num_ids = config.draft_vocab_size
    if num_ids is not None:
        ids = torch.arange(num_ids) + tensors["d2t"]
        num_ids = int((ids < size).sum())  # they are ascending
        tensors.pop("t2d", None)
    elif HEAD in tensors and config.vocab_size < size:
        num_ids = config.vocab_size
    config = replace(config, vocab_size=size, draft_vocab_size=num_ids)  # type: ignore[arg-type]
    expected = skeleton(config).state_dict()
    resized = {name: _resized(tensor, len(expected[name])) for name, tensor in tensors.items()}
    return replace(checkpoint, config=config, tensors=with_whole_map(config, resized))


def _resized(tensor: Tensor, num_rows: int) -> Tensor:
    """Return the first rows, or all rows padded with zeros."""
    missing = num_rows - len(tensor)
    return tensor[:num_rows] if missing <= 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
