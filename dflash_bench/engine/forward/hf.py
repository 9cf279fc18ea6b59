"""The target's forward pass by its publisher's code in transformers, over our cache.

It supports any architecture that takes positions, a mask and a cache; taps are hooks on its layers. The cache's buffers
stay where they are and its masks are made on the device, so a pass without recurrent layers can be captured.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from dflash_bench.core.errors import UserError
from dflash_bench.engine.cache import KVCache, to_device
from dflash_bench.engine.masks import PassMask, seen_by
from dflash_bench.models.architecture import cache_argument, decoder_layers, recurrent_layers
from dflash_bench.models.configs import optional
from dflash_bench.models.weights import lay_out

# Rolls back the states of gated delta net layers (Qwen3.5, Qwen3-Next), which cannot be shortened like a KV cache.
#
# Before a layer reads a block, its state S [B, heads, Dk, Dv] and the inputs of its convolution are kept. If only part
# of the block is accepted, we recompute the state from the old one and the keys, values and gates of those tokens:
#
#     S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T
#
# A row that keeps fewer tokens than another has g = beta = 0 after its last one, which leaves S unchanged, so one call
# serves rows of different lengths. No projection, attention or feed-forward is repeated, only this sum, once per layer.
# A fully accepted block costs nothing, nor does plain decoding. (Measured on an 8-layer Qwen3.5 of hidden size 256,
# blocks of 16, one CPU thread: 7 % of a verify pass with one row, 12 % with 8 rows of different lengths; and twice the
# memory of the states.) The convolution needs no recomputing: its state is a slice of its inputs. When lengths are
# known beforehand, the same gates keep the padding of prompts out of the state.
# (Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10.)


Rule = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The number of a block's tokens that each row keeps: a tensor [B], or an int if it is the same for all rows."""

    counts: Tensor | int
    longest: int

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> KeptTokens:
        same = min(counts) == max(counts)
        return cls(counts[0] if same else to_device(counts, device), max(counts))

    def close(self, gate: Tensor) -> Tensor:
        """Return the gates [B, N, heads], zero after each row's last kept token."""
        if isinstance(self.counts, int):
            return gate
        dropped = torch.arange(gate.shape[1], device=gate.device) >= self.counts.to(gate.device)[:, None]
        return gate.masked_fill(dropped[:, :, None], 0)

    def window(self, inputs: Tensor, size: int) -> Tensor:
        """Return the `size` inputs of [B, C, size + N] that end with each row's last kept token."""
        if isinstance(self.counts, int):
            return inputs[:, :, self.counts : self.counts + size].contiguous()
        places = self.counts.to(inputs.device)[:, None, None] + torch.arange(size, device=inputs.device)
        return inputs.gather(2, places.expand(-1, inputs.shape[1], -1))


class Recurrence:
    """The states of a model's recurrent layers, and the inputs needed to recompute them for the last block."""

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.states = {index: State(self) for index in indices}
        # The published classes offer no hook between projection and rule. But they call the rule, a fused kernel or
        # the fallback, by its name in their module: during a pass we replace that name by a function that records.
        self._names = vars(sys.modules[type(layers[indices[0]]).__module__])
        self._rules: dict[str, Rule] = {k: v for k, v in self._names.items() if k.endswith("gated_delta_rule")}
        self._watching = {name: self._watched(rule) for name, rule in self._rules.items()}
        self.call: Callable[[KeptTokens], Tensor] | None = None
        self.known: KeptTokens | None = None
        self._width = 0

    def clear(self) -> None:
        for state in self.states.values():
            state.clear()

    @contextmanager
    def reading(
        self, width: int, counts: Sequence[int] | None, rows: slice | None = None, begins: bool = True
    ) -> Iterator[None]:
        """Wrap a pass over `width` tokens per row, of which each row keeps `counts`, if that is known.

        With `rows`, only these are read, and the others keep their states. With `begins`, their prompts begin here,
        without a state.
        """
        self.known = None if counts is None else KeptTokens.of(counts, self.device)
        assert rows is None or counts is not None, "what begins a row is not rolled back"
        self._width = width
        self._names.update(self._watching)
        kept = None if begins else rows
        aside = [] if rows is None else [state.set_aside(kept) for state in self.states.values()]
        try:
            yield
        finally:
            self._names.update(self._rules)
        for state, whole in zip(self.states.values(), aside, strict=False):
            state.put_back(whole, rows)

    @property
    def is_final(self) -> bool:
        """Return True if nothing of this pass will be rolled back: counts are known, or there is only one token."""
        return self.known is not None or self._width == 1

    @torch.inference_mode()
    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] tokens of row b of the last pass (0: it has ended, and its state is not used)."""
        if self.is_final or all(count in (0, self._width) for count in counts):
            return
        kept = KeptTokens.of(counts, self.device)
        for state in self.states.values():
            state.go_back(kept)

    def _watched(self, rule: Rule) -> Rule:
        def run(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> Any:
            def again(kept: KeptTokens) -> Tensor:
                k, v, decay, rate = (x[:, : kept.longest] for x in (key, value, g, beta))
                before = options.get("initial_state")
                normalised = options.get("use_qk_l2norm_in_kernel", False)
                return advance(before, k, v, kept.close(decay), kept.close(rate), normalised)

            self.call = again
            if self.known is not None:
                g, beta = self.known.close(g), self.known.close(beta)
            return rule(query, key, value, g=g, beta=beta, **options)

        return run


class State(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """One layer's state, in the form that transformers expects; the old state is kept until the next pass."""

    def __init__(self, recurrence: Recurrence) -> None:
        super().__init__()
        self.recurrence = recurrence
        self.clear()

    def clear(self) -> None:
        self.conv_states[0] = self.recurrent_states[0] = None
        self.has_previous_state[0] = False
        self.again: Callable[[KeptTokens], Tensor] | None = None
        self.inputs: Tensor | None = None

    def set_aside(self, kept: slice | None) -> tuple[Tensor, Tensor]:
        """Return the states of all rows, and continue with the states of the `kept` rows, or without a state."""
        conv, recurrent = whole = self.conv_states[0], self.recurrent_states[0]
        self.clear()
        if kept is not None:
            self.conv_states[0], self.recurrent_states[0] = conv[kept], recurrent[kept]
            self.has_previous_state[0] = True
        return whole

    def put_back(self, whole: tuple[Tensor, Tensor], rows: slice | None) -> None:
        """Restore the states of all rows except `rows`, which keep their new states."""
        for states, all_rows in zip((self.conv_states, self.recurrent_states), whole, strict=True):
            all_rows[rows] = states[0]
            states[0] = all_rows

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        """Append new inputs [B, C, N] of the convolution; return the old and new inputs [B, C, kernel + N]."""
        before = self.conv_states[0]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        inputs = torch.cat([before, conv_states], dim=-1)
        kept = self.recurrence.known or KeptTokens(conv_states.shape[-1], conv_states.shape[-1])
        self.conv_states[0] = kept.window(inputs, conv_kernel_size)
        self.has_previous_state[0] = True
        self.inputs = None if self.recurrence.is_final else inputs
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.recurrence.call is None:
            raise UserError(
                "the target's linear attention runs as a kernel that hides its keys and gates; "
                "load the target without that kernel"
            )
        self.again = None if self.recurrence.is_final else self.recurrence.call
        self.recurrence.call = None
        self.recurrent_states[0] = recurrent_states
        return recurrent_states

    def go_back(self, kept: KeptTokens) -> None:
        assert self.inputs is not None and self.again is not None, "a pass comes first"
        self.conv_states[0] = kept.window(self.inputs, self.conv_states[0].shape[-1])
        self.recurrent_states[0] = self.again(kept)


def advance(before: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool) -> Tensor:
    """Return the float32 state [B, heads, Dk, Dv] after tokens k, v [B, N, heads, D] with g, beta [B, N, heads].

    Token t writes u_t = beta_t (v_t - S'_t^T k_t), where S'_t is the decayed state before it. Each u_t depends on its
    predecessors, so one triangular solve gives all u_t; the state is then the sum of decayed products k_t u_t^T.
    """
    repeats = v.shape[2] // k.shape[2]
    k, v, g, beta = (x.float().transpose(1, 2) for x in (k, v, g, beta))
    if normalised:
        k = k * (k.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
    k = k.repeat_interleave(repeats, dim=1)
    total = g.cumsum(dim=-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp()
    weighted = k * beta[..., None]
    right_side = v * beta[..., None]
    if before is not None:
        right_side = right_side - (weighted * total.exp()[..., None]) @ before.float()
    # The solve only reads below the diagonal, so there is no need to zero the rest.
    written = torch.linalg.solve_triangular(weighted @ k.mT * decay, right_side, upper=False, unitriangular=True)
    end = total[..., -1:]
    after: Tensor = (k * (end - total).exp()[..., None]).mT @ written
    return after if before is None else after + before.float() * end.exp()[..., None]


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The inputs of a network's pass over B rows whose places in the cache are set."""

    tokens: Tensor
    """[B, N]"""
    positions: Tensor
    """[B, N]"""
    mask: PassMask
    keep_logits: int | Tensor
    """The places whose logits are needed: this many from the end (0: all), or an index."""
    counts: Sequence[int] | None
    """Number of tokens that each row keeps; None if `commit` sets it later."""
    rows: slice | None
    """The rows of the cache that the pass reads, if not all."""


class HFForward:
    """Computes a model by its publisher's code; its layers may be spread over devices.

    Its own modules share the model's parameters, so that the model itself gets no hooks.
    """

    by_lengths = False

    def __init__(self, model: Any) -> None:
        self.model = model = lay_out(model)
        self.head = model.get_output_embeddings()
        self.keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._layers = decoder_layers(model)
        self._recurrent = recurrent_layers(model.config.get_text_config())
        self._recurrence: Recurrence | None = None
        self.why_unsteady: str | None = None
        if self._recurrent:
            self.why_unsteady = "transformers' code moves recurrent states"
        elif len({weight.device for weight in model.parameters()}) > 1:
            self.why_unsteady = "its layers are on several devices"
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._taps: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        """Record the outputs of these layers (0-based) from now on."""
        for hook in self._hooks:
            hook.remove()
        self._tapped.clear()
        self._taps = tuple(taps)
        self._hooks = [self._layers[i].register_forward_hook(self._recorder(i)) for i in self._taps]

    def _recorder(self, index: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[index] = output[0] if isinstance(output, tuple) else output

        return record

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on."""
        kinds = optional(self.model.config.get_text_config(), "layer_types") or [""] * len(self._layers)
        layers: list[Any] = [CachedLayer(cache, i, kind) for i, kind in enumerate(kinds)]
        if self._recurrent:
            self._recurrence = Recurrence(self._layers, self._recurrent, device)
            for index, state in self._recurrence.states.items():
                layers[index] = state
        self._cache = Cache(layers=layers)

    def clear(self) -> None:
        if self._recurrence is not None:
            self._recurrence.clear()

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N or fewer, V] and the output of each tapped layer [B, N, H]."""
        options = {"logits_to_keep": inputs.keep_logits} if self.keeps_some_logits else {}
        width, recurrence = inputs.tokens.shape[1], self._recurrence
        begins = not any(inputs.mask.starts)
        with recurrence.reading(width, inputs.counts, inputs.rows, begins) if recurrence else nullcontext():
            return self.through(inputs.tokens, inputs.positions, inputs.mask, **options)

    def through(self, tokens: Tensor, positions: Tensor, mask: PassMask, **options: Any) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N, V] and the output of each tapped layer [B, N, H]."""
        options[self._cache_argument], masks = self._cache, mask.build()
        for layer in self._cache.layers:
            if isinstance(layer, CachedLayer):
                layer.mask = masks if isinstance(masks, Tensor) else masks[layer.kind]
        out = self.model(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=True, **options)
        return out.logits, [self._tapped[i] for i in self._taps]

    def logits(self, x: Tensor) -> Tensor:
        """Return `x`: caps and scales of logits are the publisher's, so `through` computes them."""
        return x

    def commit(self, counts: Sequence[int], width: int) -> None:
        """Roll back recurrent states; keys and values beyond a row's end are simply overwritten."""
        if self._recurrence is not None:
            self._recurrence.commit(counts)


class CachedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of our cache in the form that transformers expects; it writes where the tokens were placed.

    It returns the places that the columns of the pass's mask for this kind of layer stand for.
    """

    def __init__(self, cache: KVCache, index: int, kind: str) -> None:
        super().__init__()
        self.cache, self.index, self.kind, self.is_initialized = cache, index, kind, True
        self.mask: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.write(self.index, key_states, value_states)
        return seen_by(self.mask, keys), seen_by(self.mask, values)

    def update_indexer(self, indexer_keys: Tensor) -> Tensor:
        """Store an indexer's keys [B, N, D] like a head of another layer; return those of all places [B, visible, D].

        The mask of the pass keeps its selection within each row's past.
        """
        keys, _ = self.cache.write(~self.index, indexer_keys[:, None], indexer_keys[:, None, :, :0])
        return keys[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.visible, 0

    def get_seq_length(self) -> int:
        return self.cache.visible

    def get_max_length(self) -> int:
        return self.cache.capacity

    # The name in older releases of transformers 5.
    get_max_cache_shape = get_max_length
