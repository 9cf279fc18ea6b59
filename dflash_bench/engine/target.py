"""The target: a causal language model with our cache, and with taps on its layers.

Its network is computed by the publisher's code (`forward/hf.py`) or, where that is covered, by ours
(`forward/native.py`); cache, positions and masks are ours. So rows of different lengths can share one forward pass, and
dropping rejected tokens costs nothing. Layers with a sliding window also cache the full length, and their mask limits
them to the window; layers with a recurrent state roll it back (`forward/recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dflash_bench.core.types import NOBODY, Listener
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.hf import HFForward, PassInputs
from dflash_bench.engine.graphs import Replays, room_for
from dflash_bench.engine.masks import Masks, TargetMasks, depths
from dflash_bench.models.architecture import attention_windows, context_length, recurrent_layers, refuse_unsupported

ALL = 0
"""Places of which logits are wanted: all."""


@dataclass(frozen=True, slots=True)
class Output:
    """`logits` [B, N, V] (after prefill: [B, 1, V], at each prompt's end); `hidden` [B, N, K * H] of the taps."""

    logits: Tensor
    hidden: Tensor | None


class Network(Protocol):
    """Reads tokens, and writes their keys and values into a cache."""

    needs_masks: bool
    """Also where every token sees all that is in the cache."""
    keeps_some_logits: bool
    """Can the head be left out at places where nobody asks?"""
    head: Callable[[Tensor], Tensor]

    def tap(self, taps: Sequence[int]) -> None: ...

    def serve(self, cache: KVCache, device: torch.device) -> None: ...

    def clear(self) -> None: ...

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]: ...

    def commit(self, counts: Sequence[int]) -> None: ...


@runtime_checkable
class Steady(Network, Protocol):
    """One whose passes can be captured: `through` asks the host for nothing but shapes."""

    has_experts: bool
    """Then it does ask, which expert a token goes to, where a capture would not notice."""

    def through(self, tokens: Tensor, positions: Tensor, masks: Masks | None) -> tuple[Tensor, list[Tensor]]: ...

    def logits(self, x: Tensor) -> Tensor: ...


class Target:
    """Runs one forward pass at a time over B rows; call `begin` once per batch of prompts.

    `network` computes `model` in another way than its publisher's code.
    """

    def __init__(self, model: Any, taps: Sequence[int] = (), network: Network | None = None) -> None:
        refuse_unsupported(model)
        self.model = model.eval()
        self.network: Network | Steady = network or HFForward(model)
        self.config = model.config.get_text_config()
        # Layers may be spread over devices; tokens enter on the embedding's device, and all results return there.
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.context_length = context_length(self.config)
        self.taps: tuple[int, ...] = ()
        self.tap(taps)
        self._cache: KVCache | None = None
        self.replays: Replays | None = None
        self.fallback: str | None = None
        """What our own code does with this target, where that is why it is not computed by it; a verb comes first."""
        self.listener: Listener = NOBODY
        """Is told of every pass."""

    def tap(self, taps: Sequence[int]) -> None:
        """Record the outputs of these layers (0-based) from now on."""
        self.taps = tuple(taps)
        self.network.tap(self.taps)

    @property
    def reads_trees(self) -> bool:
        """Can it verify trees? Not with a recurrent state, which has a single past without branches."""
        return not recurrent_layers(self.config)

    @property
    def reads_in_parts(self) -> bool:
        """May other rows be read while a prompt is? A recurrent state would go on with them."""
        return not recurrent_layers(self.config)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def embedding(self) -> nn.Module:
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """From what the last norm says [..., H] to logits [..., V]."""
        return self.network.head

    @torch.inference_mode()
    def begin(self, num_rows: int, capacity: int) -> None:
        """Make room for `capacity` tokens in each of `num_rows` rows; buffers that are large enough are reused."""
        capacity = capacity if self.replays is None else room_for(capacity)
        if self._cache is not None and self._cache.serves(num_rows, capacity):
            self.network.clear()
            return
        if self._cache is None:
            # Only a layer knows the shape of what it stores: one token shows it, and then all buffers can be stacked.
            self._allocate(1, 1)
            self.forward(torch.zeros(1, 1, dtype=torch.long, device=self.device), [0], counts=[1])
        self._allocate(num_rows, capacity)

    def capture(self, shortest: int, longest: int) -> None:
        """Passes that have been asked for before, over so many places; see `graphs.py`."""
        if self.replays is not None and self.replays.prepare(self.cache.num_rows, shortest, longest, self._is_tapped):
            self.cache.clear()

    def _is_tapped(self, key: Hashable) -> bool:
        return isinstance(key, tuple) and key[-1] == self.taps

    def release(self) -> None:
        """The buffers are needed no more: the next `begin` makes its own, no larger than it needs."""
        self._cache = None
        if self.replays is not None:
            self.replays.forget()

    def _allocate(self, num_rows: int, capacity: int) -> None:
        self._cache = KVCache(num_rows, capacity, self.device, like=self._cache)
        if self.replays is not None:
            self.replays.moved(capacity)
        self.network.serve(self._cache, self.device)
        self._masks = TargetMasks(attention_windows(self.config), capacity, self.model.dtype, self.device)

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "begin comes first"
        return self._cache

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None, first: int = 0) -> Output:
        """Read prompts, padded on the right; the padding lies beyond each row's length, so it is overwritten.

        With `starts` they are parts of prompts, of which so many tokens have been read. They go to as many rows, from
        row `first` on.
        """
        if len(prompts) == self.cache.num_rows and not any(starts or ()):
            self.network.clear()
        width = max(len(prompt) for prompt in prompts)
        rows = [[*prompt, *([prompt[-1]] * (width - len(prompt)))] for prompt in prompts]
        last = [len(prompt) - 1 for prompt in prompts]
        # If the model allows it, the head is run only where some row ends, not over whole prompts.
        places = sorted(set(last)) if self.network.keeps_some_logits else list(range(width))
        # The index stays on the host, because the head may be on any device.
        output = self.forward(
            torch.tensor(rows, device=self.device),
            starts or [0] * len(rows),
            keep_logits=torch.tensor(places),
            counts=[len(prompt) for prompt in prompts],
            first=first,
        )
        ends = torch.tensor([places.index(i) for i in last], device=self.device)
        return Output(output.logits[torch.arange(len(rows), device=self.device), ends][:, None], output.hidden)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        starts: Sequence[int],
        parents: Tensor | None = None,
        keep_logits: int | Tensor = ALL,
        counts: Sequence[int] | None = None,
        whole_block: bool = False,
        first: int = 0,
    ) -> Output:
        """Read tokens [B, N] from each row's start on; with `parents` they are an anchor and a tree below it.

        Fewer rows than the cache has are those from row `first` on, and the others stand still.

        Row b keeps the first counts[b] tokens. If that is not known yet, call `commit` before the next pass; without
        it, all tokens are kept. With `whole_block` every token sees all tokens of its row, not only those before it,
        as block diffusion needs.
        """
        assert parents is None or self.reads_trees, "open_backend refuses these"
        self.listener.passed()
        cache, width = self.cache, tokens.shape[1]
        is_block = counts is None and keep_logits is ALL and not whole_block and len(starts) == cache.num_rows
        if self.replays is not None and is_block:
            output = self._replayed(self.replays, tokens, starts, parents)
            if output is not None:
                return output
        cache.place(starts, width, first)
        positions = self._positions(parents)
        needs_none = not self.network.needs_masks and self._masks.sees_all(cache, width)
        masks = None if needs_none else self._masks.build(cache, starts, width, parents, whole_block)
        some = None if len(starts) == cache.num_rows else slice(first, first + len(starts))
        logits, tapped = self.network.read(PassInputs(tokens, positions, masks, keep_logits, counts, some))
        return Output(logits.to(self.device), together(tapped, self.device))

    def _replayed(
        self, replays: Replays, tokens: Tensor, starts: Sequence[int], parents: Tensor | None
    ) -> Output | None:
        """A pass over all rows that has been captured; None if it has not."""
        assert isinstance(self.network, Steady)
        inputs = [tokens, torch.tensor(starts), *([] if parents is None else [parents])]
        key = (tokens.shape[1], parents is not None, self.taps)
        said = replays.run(key, self._steady, max(starts) + tokens.shape[1], *inputs)
        return None if said is None else Output(self.network.logits(said[0]), together(said[1:], self.device))

    def _steady(
        self, num_places: int, tokens: Tensor, starts: Tensor, parents: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Tokens [B, N] from starts [B] on: what the last layer says of them, and each tapped one."""
        assert isinstance(self.network, Steady)
        self.cache.place_at(starts, tokens.shape[1], num_places)
        positions = self._positions(parents)
        masks = self._masks.build(self.cache, [], tokens.shape[1], parents)
        hidden, tapped = self.network.through(tokens, positions, masks)
        return hidden, *tapped

    def _positions(self, parents: Tensor | None) -> Tensor:
        """Of the tokens just placed [B, N]; of a tree, an anchor and its depths.

        Tokens beyond the context are cut off later and no other token sees them, but their position is looked up.
        """
        positions = self.cache.positions
        if parents is not None:
            positions = positions[:, :1] + depths(parents)
        return positions.clamp(max=self.context_length - 1)

    @torch.inference_mode()
    def commit(self, counts: Sequence[int]) -> None:
        """Row b keeps the first counts[b] tokens of the last pass (0: it has ended, and is never read again)."""
        self.network.commit(counts)


def together(tapped: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Layer outputs [B, N, H], moved to one device and put side by side; None if there are none."""
    return torch.cat([hidden.to(device) for hidden in tapped], dim=-1) if tapped else None
