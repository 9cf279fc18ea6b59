"""The target: a causal language model over our KV cache, with taps on its layers.

Its network is computed by the publisher's code (`forward/hf.py`) or by our own (`forward/native.py`), for supported
architectures; cache, positions and masks (`masks.py`) are ours. So rows of different lengths share one forward pass,
and dropping rejected tokens costs nothing. Layers with a sliding window also cache the full length, and their mask
limits them to the window; recurrent states are rolled back (`forward/hf.py`, `forward/delta.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dflash_bench.core.types import NOBODY, Listener
from dflash_bench.engine.cache import KVCache, on_host
from dflash_bench.engine.forward.hf import HFForward, PassInputs
from dflash_bench.engine.graphs import WHOLE, GraphCache, bucket_of
from dflash_bench.engine.masks import PassMask, TargetMasks, depths
from dflash_bench.models.architecture import (
    attention_windows,
    context_length,
    final_norm,
    recurrent_layers,
    refuse_unsupported,
)

ALL = 0
"""`keep_logits` of a pass that needs the logits of all its places."""
PART, PART_ON_GPU = 256, 2048
"""Number of prompt tokens per pass: enough to keep the processor busy for each weight that it loads."""


def part_size(device: torch.device) -> int:
    """Return how many tokens of each prompt are read in one pass."""
    return PART if device.type == "cpu" else PART_ON_GPU


@dataclass(frozen=True, slots=True)
class Output:
    """`logits` [B, N, V] (prefill: [B, 1, V], at each prompt's end), and the K taps' outputs `hidden` [B, N, K * H].

    `ruled` [B, n] is the result of a rule on the logits, if it was captured with the head.
    """

    logits: Tensor
    hidden: Tensor | None
    ruled: Tensor | None = None


Rule = Callable[..., Tensor]
"""(logits [B, N, V], tokens [B, N], parents [B, N - 1] of a tree) -> [B, n], by operations of the device alone."""


class Network(Protocol):
    """A forward pass: reads tokens, and writes their keys and values into a cache."""

    keeps_some_logits: bool
    """Whether it can skip the head at places whose logits are not needed."""
    head: Callable[[Tensor], Tensor]

    def tap(self, taps: Sequence[int]) -> None: ...

    def serve(self, cache: KVCache, device: torch.device) -> None: ...

    def clear(self) -> None: ...

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]: ...

    def commit(self, counts: Sequence[int], width: int) -> None:
        """Keep the first counts[b] of the `width` tokens of row b of the last pass."""
        ...


@runtime_checkable
class Steady(Network, Protocol):
    """A network whose passes can be captured: `through` needs nothing but shapes from the host."""

    by_lengths: bool
    """Whether attention uses lengths (`lengths.py`) instead of masks; trees always need masks."""

    why_unsteady: str | None
    """Why its passes cannot be captured after all, or None."""

    def through(self, tokens: Tensor, positions: Tensor, mask: PassMask) -> tuple[Tensor, list[Tensor]]:
        """Return outputs [B, N, ...] of the last layer, for `logits`, and [B, N, H] of each tapped layer."""
        ...

    def logits(self, x: Tensor) -> Tensor: ...


class Target:
    """Runs one forward pass at a time over B rows; call `begin` once per batch of prompts.

    `network` computes `model` instead of its publisher's code. Raises UserError for an unsupported architecture.
    """

    def __init__(self, model: Any, network: Network | None = None) -> None:
        refuse_unsupported(model)
        self.model = model.eval()
        self.network: Network | Steady = network or HFForward(model)
        self.config = model.config.get_text_config()
        # Layers may be spread over devices; tokens enter on the embedding's device, and all results return there.
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.context_length = context_length(self.config)
        self.part = part_size(self.device)
        self.taps: tuple[int, ...] = ()
        self._cache: KVCache | None = None
        self._uncommitted = 0
        """Tokens per row of the last pass, if it is not yet decided which are kept."""
        self.graph_cache: GraphCache | None = None
        self.fallback: str | None = None
        """Why our own forward does not compute this target, as a phrase that begins with a verb; None if it does."""
        self.why_torch: str | None = None
        """Why torch and not numba's kernels computes it on a CPU; None if numba does, or if torch was chosen."""
        self.why_uncaptured: str | None = None
        """Why passes cannot be captured on this GPU; None if they can, or if capturing is off."""
        self.why_unfused: str | None = None
        """Why small operations of captured passes are not fused; None if they are."""
        self.rule: Rule | None = None
        """The rule that captured passes also apply to their logits."""
        self.fixed: dict[Hashable, Any] = {}
        """Tensors at fixed addresses that captured passes hand to each other, by their shapes (`steady.py`)."""
        self.listener: Listener = NOBODY
        """Notified of every pass."""

    def tap(self, taps: Sequence[int]) -> None:
        """Record the outputs of these layers (0-based) from now on.

        The number of layers means the last layer's output behind the final norm, as in transformers' `hidden_states`.
        """
        self.taps, last = tuple(taps), self.config.num_hidden_layers - 1
        self.network.tap([min(tap, last) for tap in taps])

    @property
    def reads_trees(self) -> bool:
        """Return True if the target can verify trees; a recurrent state has a single past without branches."""
        return not recurrent_layers(self.config)

    @property
    def reads_in_parts(self) -> bool:
        """Return True if other rows may decode between two parts of a prompt; recurrent states would advance."""
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
        """Return the function from the last norm's output [..., H] to logits [..., V]."""
        return self.network.head

    @torch.inference_mode()
    def begin(self, num_rows: int, capacity: int) -> None:
        """Allocate `capacity` tokens in each of `num_rows` rows; buffers that are large enough are reused."""
        capacity, self._uncommitted = capacity if self.graph_cache is None else bucket_of(capacity), 0
        if self._cache is not None and self._cache.serves(num_rows, capacity):
            self.network.clear()
            return
        if self._cache is None:
            # Only a layer determines the shape of its keys: one token reveals it, and then all buffers can be stacked.
            self._allocate(1, 1)
            self.forward(torch.zeros(1, 1, dtype=torch.long, device=self.device), [0], counts=[1])
        self._allocate(num_rows, capacity)

    def capture(self, shortest: int, longest: int) -> None:
        """Capture passes that have been run before, over `shortest` to `longest` places (`graphs.py`)."""
        graphs, num_rows = self.graph_cache, self.cache.num_rows
        if graphs is not None and graphs.capture(num_rows, shortest, longest, self._is_tapped):
            self.cache.clear()

    def _is_tapped(self, key: Hashable) -> bool:
        return isinstance(key, tuple) and key[-1] == self.taps

    def release(self) -> None:
        """Free the buffers: the next `begin` allocates new ones, no larger than necessary."""
        self._cache = None
        if self.graph_cache is not None:
            self.graph_cache.clear()

    def _allocate(self, num_rows: int, capacity: int) -> None:
        self._cache = KVCache(num_rows, capacity, self.device, like=self._cache)
        if self.graph_cache is not None:
            self.graph_cache.reset(capacity)
        self.network.serve(self._cache, self.device)
        self._masks = TargetMasks(attention_windows(self.config), self._cache, self.model.dtype)

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "begin comes first"
        return self._cache

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None, first: int = 0) -> Output:
        """Read prompts into rows `first` ...; return logits [b, 1, V] at each end.

        A pass reads about `part` tokens of each prompt, so that no mask is larger than [b, part + 1, visible]. They are
        padded on the right; the padding lies beyond each row's length, so it is overwritten. With `starts`, `prompts`
        are the rest of prompts of which starts[i] tokens have been read.
        """
        begins = list(starts or [0] * len(prompts))
        if len(prompts) == self.cache.num_rows and not any(begins):
            self.network.clear()
        ends: dict[int, Tensor] = {}
        hidden: list[Tensor] = []
        width = max(len(prompt) for prompt in prompts)
        # A single token is added to the part before: recurrent layers read it as a step of all rows (`forward/hf.py`).
        cuts = range(0, max(1, width - 1), self.part)
        for at, end in zip(cuts, [*cuts[1:], width], strict=True):
            parts = [prompt[at:end] for prompt in prompts]
            ended, output = self._read_part(parts, prompts, [begin + at for begin in begins], first)
            ends |= ended
            hidden += [] if output is None else [output]
        logits = torch.stack([ends[row] for row in range(len(prompts))])[:, None]
        return Output(logits, torch.cat(hidden, dim=1) if len(hidden) > 1 else next(iter(hidden), None))

    def _read_part(
        self, parts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], starts: Sequence[int], first: int
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Read a part of each prompt; return the logits [V] at the end of each part, by row, and the taps' outputs.

        A part is empty if its prompt has ended before; only the logits of a prompt's last part count.
        """
        width = max(len(part) for part in parts)
        rows = [[*part, *[prompt[-1]] * (width - len(part))] for part, prompt in zip(parts, prompts, strict=True)]
        last = {row: len(part) - 1 for row, part in enumerate(parts) if part}
        # If the model allows it, the head runs only at the ends of rows, not over whole prompts.
        places = sorted({*last.values()}) if self.network.keeps_some_logits else list(range(width))
        output = self.forward(
            torch.tensor(rows, device=self.device),
            starts,
            # The index stays on the host, because the head may be on any device.
            keep_logits=torch.tensor(places),
            counts=[len(part) for part in parts],
            first=first,
        )
        return {row: output.logits[row, places.index(at)] for row, at in last.items()}, output.hidden

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
        """Read tokens [B, N] from each row's start on; with `parents` [B, N - 1] these are an anchor and a tree.

        If these are fewer rows than the cache has, they are rows `first` ..., and the others stand still.

        Row b keeps the first counts[b] tokens. If counts are not known yet, call `commit` before the next pass;
        otherwise all tokens are kept. With `whole_block` every token sees all tokens of its row, not only the tokens
        before it, as block diffusion needs.
        """
        assert parents is None or self.reads_trees, "open_backend refuses these"
        cache, width = self.cache, tokens.shape[1]
        self.begin_pass(width if counts is None else 0)
        is_block = counts is None and keep_logits is ALL and not whole_block and len(starts) == cache.num_rows
        if self.graph_cache is not None and is_block:
            output = self._replayed(self.graph_cache, tokens, starts, parents)
            if output is not None:
                return output
        cache.place(starts, width, first)
        positions = self._positions(parents)
        mask = PassMask(self._masks, starts, width, parents, whole_block)
        some = None if len(starts) == cache.num_rows else slice(first, first + len(starts))
        logits, tapped = self.network.read(PassInputs(tokens, positions, mask, keep_logits, counts, some))
        return Output(logits.to(self.device), self.features(tapped))

    def begin_pass(self, uncommitted: int) -> None:
        """Keep all tokens of the last pass if nobody called `commit`, and expect it for `uncommitted` tokens per row.

        0 if the pass itself keeps its tokens. Notifies the listener.
        """
        self.listener.passed()
        self.commit([self._uncommitted] * self.cache.num_rows)
        self._uncommitted = uncommitted

    def _replayed(
        self, graphs: GraphCache, tokens: Tensor, starts: Sequence[int], parents: Tensor | None
    ) -> Output | None:
        """Return the output of a captured pass over all rows, or None if it has not been captured."""
        assert isinstance(self.network, Steady)
        rule = self.rule if graphs.captures_small else None
        inputs = [tokens, on_host(starts, self.device), *([] if parents is None else [parents])]
        key = (rule, tokens.shape[1], parents is not None, self.taps)
        num_places = self.reach(starts, tokens.shape[1], parents is not None)
        function = self.steady if rule is None else partial(self._ruled, rule)
        results = graphs.replay(key, function, num_places, *inputs)
        if results is None:
            return None
        if rule is None:
            return Output(self.network.logits(results[0]), self.features(results[1:]))
        logits, ruled, *tapped = results
        # A copy: another replay may overwrite it before the next round reads its anchor.
        return Output(logits, self.features(tapped), ruled.clone())

    def reach(self, starts: Sequence[int], width: int, is_tree: bool = False) -> int:
        """Return how many places a captured pass over `width` tokens must cover (`graphs.py`)."""
        assert isinstance(self.network, Steady)
        return WHOLE if self.network.by_lengths and not is_tree else max(starts) + width

    def _ruled(
        self, rule: Rule, num_places: int, tokens: Tensor, starts: Tensor, parents: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return logits [B, N, V], the rule's result on them, and the outputs of each tapped layer."""
        assert isinstance(self.network, Steady)
        hidden, *tapped = self.steady(num_places, tokens, starts, parents)
        logits = self.network.logits(hidden)
        return logits, rule(logits, tokens, *([] if parents is None else [parents])), *tapped

    def steady(
        self, num_places: int, tokens: Tensor, starts: Tensor, parents: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Read tokens [B, N] from starts [B] on; return outputs [B, N, H] of the last and of each tapped layer."""
        assert isinstance(self.network, Steady)
        self.cache.place_at(starts, tokens.shape[1], num_places)
        positions = self._positions(parents)
        mask = PassMask(self._masks, [], tokens.shape[1], parents)
        hidden, tapped = self.network.through(tokens, positions, mask)
        return hidden, *tapped

    def features(self, tapped: Sequence[Tensor]) -> Tensor | None:
        """Return K tapped outputs [B, N, H] side by side [B, N, K * H], or None without taps."""
        hidden, last = concat_taps(tapped, self.device), self.config.num_hidden_layers
        if hidden is None or last not in self.taps:
            return hidden
        norm: Any = final_norm(self.model)
        place = norm.weight.device  # of a model that is spread over devices, the last one
        parts = zip(hidden.chunk(len(self.taps), dim=-1), self.taps, strict=True)
        return concat_taps([norm(x.to(place)) if tap == last else x for x, tap in parts], self.device)

    def _positions(self, parents: Tensor | None) -> Tensor:
        """Return the positions [B, N] of the tokens just placed, in a tree by depth.

        Tokens beyond the context are cut off later and seen by no other token, but their position must exist.
        """
        positions = self.cache.positions
        if parents is not None:
            positions = positions[:, :1] + depths(parents)
        return positions.clamp(max=self.context_length - 1)

    def keep_path(self, starts: Sequence[int], path: Tensor) -> None:
        """Move the accepted path [B, n] of a tree to the positions after each row's start in the cache."""
        self.cache.keep_path(starts, path)

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] tokens of row b of the last pass (0: it has ended, and is never read again)."""
        if self._uncommitted:
            width, self._uncommitted = self._uncommitted, 0
            self.network.commit(counts, width)


def concat_taps(tapped: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Return K layer outputs [B, N, H] on one device and side by side [B, N, K * H], or None if there are none."""
    return torch.cat([hidden.to(device) for hidden in tapped], dim=-1) if tapped else None
