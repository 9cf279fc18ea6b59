"""The one description of a draft that all formats are read into, and that networks, checks and writers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_bench.models.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.eagle3 import Eagle3Config, Eagle3Draft

HEAD = "lm_head.weight"
TARGET_HEAD = "target_head"
"""In config.json of a draft that this tool alone reads: its head is not in the file (`Checkpoint.target_head`)."""
DraftModel = DFlashDraft | Eagle3Draft
DraftConfig = DFlashConfig | Eagle3Config
Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Stored = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json and the tensors beside it."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a draft must match in its target."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A draft in any format. `tensors` have the names of our networks.

    `config` holds what the file declares. Only the tapped layers may come from the target: some formats derive them
    from its depth if the file does not name them.
    """

    config: DraftConfig
    tensors: Tensors
    trained_for: str | None = None
    """The target, if the config names it."""
    notes: tuple[str, ...] = ()
    """How we read what the file leaves open."""
    derived_taps: str | None = None
    """A formula for the tapped layers, if the file does not name them and the target's depth is not known."""
    target_head: bool = False
    """The file leaves out the head, because its rows are the target's for the tokens that `d2t` names."""

    def with_head(self, head: Tensor) -> Checkpoint:
        """Complete, with its rows of the target's head [V, H]."""
        if not self.target_head:
            return self
        d2t = self.tensors["d2t"]
        rows = head.detach()[(torch.arange(len(d2t)) + d2t).to(head.device)]
        return replace(self, tensors={**self.tensors, HEAD: rows}, target_head=False)

    def without_head(self) -> Checkpoint:
        """For a file that leaves it to the target."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in (HEAD, "t2d")}
        return replace(self, tensors=tensors, target_head=True)


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store one kind of draft. `read` gets the target's depth, or None if it is not known.

    `holds_vocabulary`: do files include the target's embedding and head, or leave them to the target?
    `layer` is the name that files use for the layer that SafeAILab calls `midlayer`.
    """

    name: str
    kind: str
    read: Callable[[Json, Tensors, int | None], Checkpoint]
    write: Callable[[Checkpoint], Stored]
    holds_vocabulary: bool
    layer: str = "midlayer."
