"""What every format is read into: the one description that networks, checks and writers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dflash_bench.models.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.eagle3 import Eagle3Config, Eagle3Draft

DraftModel = DFlashDraft | Eagle3Draft
DraftConfig = DFlashConfig | Eagle3Config
Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Stored = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json and the tensors beside it."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a draft must agree with."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A draft, whoever published it. `tensors` carry the names of our networks.

    `config` holds what the file declares; the depth of a target that is given decides the taps which the file leaves
    to it, as the formats say, and nothing else.
    """

    config: DraftConfig
    tensors: Tensors
    trained_for: str | None = None
    """The target, as far as the config names it."""
    notes: tuple[str, ...] = ()
    """How what the file leaves open was read."""
    derived_taps: str | None = None
    """A formula for the tapped layers: the file names none, and the depth of the target is not known."""


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store one kind of draft. `read` gets the target's depth where it is known.

    `holds_vocabulary`: do files carry the target's embedding and head along, or leave them to the target?
    `layer` is what files call the layer that SafeAILab calls `midlayer`.
    """

    name: str
    kind: str
    read: Callable[[Json, Tensors, int | None], Checkpoint]
    write: Callable[[Checkpoint], Stored]
    holds_vocabulary: bool
    layer: str = "midlayer."
