"""Variants of block draft bodies: views of slots, convolutions (DFlash 2), contexts by layer (DFlare)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

LARGEST = 1 << 24
"""Above any size of a body: a damaged number must not make us allocate huge memory."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """The places that the slots of a block attend to in a layer: slots of the block, and the context before it.

    With a `window` w a slot sees places less than w before it, and if it is not causal, less than w after it.
    """

    window: int | None = None
    is_causal: bool = False
    """A slot attends to the block's slots up to itself."""
    from_anchor: bool = False
    """The window ends at the anchor for all slots, and does not apply inside the block (the speculators library)."""

    @property
    def name(self) -> str:
        """Return a name that identifies the kind of layer."""
        parts = ["causal"] * self.is_causal
        parts += [] if self.window is None else [f"window {self.window}" + " from the anchor" * self.from_anchor]
        return ", ".join(parts) or "full"


WHOLE = BlockView()


class Mixing(StrEnum):
    """How the target's tapped features become the context of a draft's layers."""

    JOINED = "joined"
    """One projection of all features concatenated (DFlash)."""
    BY_LAYER = "by layer"
    """A weighted mean of them per layer, then one norm for all (DFlare as its authors publish it)."""
    BY_LAYER_NORMED = "by layer, normed apart"
    """The same, then a separate norm per layer (DFlare in the speculators library)."""
    AT_INPUT = "at the input"
    """One projection, added to the context's embeddings, which pass through the layers (paper, table 9)."""
    ABSENT = "absent"
    """No features: the context's embeddings alone pass through the layers (paper, table 10)."""

    @property
    def passes_layers(self) -> bool:
        """Return whether the context itself passes through the draft's layers, each token seeing those before it."""
        return self in (Mixing.AT_INPUT, Mixing.ABSENT)


FUSIONS = {"kv": Mixing.JOINED, "input": Mixing.AT_INPUT, "none": Mixing.ABSENT}
"""Feature fusion by its name in files and options."""
JETSPEC, AUTOREGRESSIVE = "JetSpec", "autoregressive DFlash"
ABLATED = {Mixing.AT_INPUT: "DFlash with input fusion", Mixing.ABSENT: "DFlash without features"}
"""Kinds of drafts of the paper's ablations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBody:
    """How a body differs from the first DFlash drafts, which are the default."""

    views: tuple[BlockView, ...] = ()
    """One view per layer; empty: all slots see the whole context and the whole block."""
    embedding_scale: float = 1.0
    """Factor of the target's raw embedding rows."""
    output_multiplier: float = 1.0
    """Factor of the draft's logits."""
    logit_softcap: float | None = None
    """c of c * tanh(logits / c), after the factor."""
    own_mask: bool = False
    """The mask has its own embedding instead of the target's row, scaled in the same way."""
    has_sinks: bool = False
    """Each head has a learned score that joins the sum of its softmax without a value (MiMo)."""
    value_scale: float = 1.0
    """Factor of attention's values."""
    turns_neighbours: bool = False
    """Rotary pairs are adjacent rows, as in GPT-J; only in files, since weights are reordered when loaded."""
    conv_kernel_size: int | None = None
    """Taps of the convolutions around attention and feed-forward; None without convolutions."""
    conv_group_size: int = 16
    """Channels that share the slot-dependent part of a convolution's coefficients."""
    mixing: Mixing = Mixing.JOINED
    own_context_weights: bool = False
    """The context has separate key and value projections in each layer."""
    is_autoregressive: bool = False
    """Slots hold the tokens drafted before them instead of masks, and each drafts the token after it (table 9)."""

    @property
    def kind(self) -> str:
        """Return the publisher's name for drafts with this body and no head of their own."""
        if self.conv_kernel_size is not None:
            return "DFlash 2"
        if self.is_autoregressive:
            return AUTOREGRESSIVE
        if self.mixing in ABLATED:
            return ABLATED[self.mixing]
        if self.mixing is not Mixing.JOINED:
            return "DFlare"
        return JETSPEC if self.is_causal_head else "DFlash"

    @property
    def is_causal_head(self) -> bool:
        """Return whether every layer is causal and without a window, as in JetSpec's heads."""
        return bool(self.views) and all(view == BlockView(is_causal=True) for view in self.views)

    @property
    def has_usual_attention(self) -> bool:
        """Return whether its layers use standard attention, so that compiled kernels can compute them."""
        return not self.has_sinks and self.value_scale == 1

    def view(self, layer: int) -> BlockView:
        return self.views[layer] if self.views else WHOLE

    def logits(self, logits: Tensor) -> Tensor:
        """Return the head's logits [..., Vd], scaled and capped."""
        if self.output_multiplier != 1:
            logits = logits * self.output_multiplier
        cap = self.logit_softcap
        return logits if cap is None else (logits.float() / cap).tanh() * cap

    def unsound(self, num_layers: int, hidden_size: int) -> Iterator[tuple[str, object]]:
        """Yield names and values of impossible fields."""
        if self.views and len(self.views) != num_layers:
            yield "layer_types", f"{len(self.views)} layers, where num_hidden_layers is {num_layers}"
        for view in self.views:
            if view.window is not None and not _is_size(view.window):
                yield "sliding_window", view.window
            if type(view.is_causal) is not bool:
                yield "is_causal", view.is_causal
        if self.is_autoregressive and not self.is_causal_head:
            yield "autoregressive", f"{self.is_autoregressive}, where a slot sees those after it"
        for name in ("has_sinks", "turns_neighbours", "is_autoregressive"):
            if type(getattr(self, name)) is not bool:
                yield name, getattr(self, name)
        for name in ("embedding_scale", "output_multiplier", "logit_softcap", "value_scale"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 < value < 1e30):
                yield name, value
        if self.conv_kernel_size is not None:
            for name, value in (("conv_kernel_size", self.conv_kernel_size), ("conv_group_size", self.conv_group_size)):
                if not _is_size(value):
                    yield name, value
                    return
            if hidden_size % self.conv_group_size:
                yield "conv_group_size", self.conv_group_size


PLAIN = DraftBody()


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


class BlockConvolution(nn.Module):
    """Filters a sublayer's input and output over the slots of a block, with coefficients per slot.

    Tap 0 is the slot itself, tap t the t-th slot before it in the same block; nothing precedes slot 0. The coefficients
    are a base for each channel, plus a projection of the sublayer's input for each group of channels.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        identity = torch.zeros(2, kernel_size, hidden_size)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * hidden_size // group_size, bias=False)

    def coefficients(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients [B, N, taps, H] for a sublayer's input and for its output, given the input [B, N, H]."""
        rows, width = normed.shape[:2]
        projected = self.kernel_projection(normed).view(rows, width, *self.base_kernel.shape[:2], -1)
        before, after = (self.base_kernel + projected.repeat_interleave(self.group_size, dim=-1)).unbind(2)
        return before, after


def filtered(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return x [B, N, H] filtered over N by coefficients [B, N, taps, H]."""
    out = x * coefficients[:, :, 0]
    for tap in range(1, coefficients.shape[2]):
        before = pad(x, (0, 0, tap, 0))[:, : x.shape[1]]
        out = out + before * coefficients[:, :, tap]
    return out


def mixed_features(weights: Tensor, features: Tensor) -> Sequence[Tensor]:
    """Return means [B, N, Ht] of features [B, N, K * Ht] for each layer, by weights [layers, K] before softmax."""
    parts = features.unflatten(-1, (weights.shape[1], -1))
    shares = weights.float().softmax(dim=-1).to(features.dtype)
    return [torch.einsum("k,bnkh->bnh", share, parts) for share in shares]
