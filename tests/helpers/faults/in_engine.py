"""Engine faults, planted one at a time: each is a mistake that someone could make, and that changes what is said.

Where a fault lies in what the engine asks of the network (mask, positions, which logits), the network is wrapped for
the length of the engine's own passes only; the judge asks the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_bench.engine import loop, verify
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward import compiled, delta, layers
from dflash_bench.engine.forward.arrays import Placed
from dflash_bench.engine.forward.compiled import CompiledForward
from dflash_bench.engine.forward.delta import DeltaStates
from dflash_bench.engine.forward.hf import KeptTokens, PassInputs, Recurrence
from dflash_bench.engine.masks import Masks, PassMask
from dflash_bench.engine.rows import Slot
from dflash_bench.engine.sampling import Sampler
from dflash_bench.engine.steady import SteadyRounds
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft, Verdict

Plant = Callable[[pytest.MonkeyPatch], None]
Pair = tuple[Tensor, Tensor]
"""Keys and values."""
TREES = ("eagle3-tree",)
DRAFTED = ("dflash", "eagle3", *TREES)
EVERY = ("ar", *DRAFTED)


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Plant
    methods: tuple[str, ...] = DRAFTED
    """Those whose answers it changes."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Changed(PassMask):
    """A mask that is not the one described."""

    built: Masks = field(default_factory=dict)
    sees_all = False

    def build(self) -> Masks:
        return self.built


ATTEND_BESIDE = layers.attend_beside
READ, PLACED_BY = CompiledForward.read, compiled.placed_by


def _placed_by(mask: PassMask, *rest: Any) -> Placed:
    """Let each token of a pass see those of it that the changed mask shows."""
    placed = PLACED_BY(mask, *rest)
    if not isinstance(mask, Changed):
        return placed
    built = mask.build()
    assert isinstance(built, Tensor)
    blocks = [
        built[min(row, len(built) - 1), 0, :, start : start + mask.width] >= 0 for row, start in enumerate(mask.starts)
    ]
    return placed._replace(seen=torch.stack(blocks)[None].numpy().astype(np.uint8))


class Wrapped:
    """The engine's network; `ask` may change what it is asked, `answer` its logits [B, N, V]."""

    def __init__(
        self, network: Any, ask: Callable[..., None] | None, answer: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._network, self._ask, self._answer = network, ask, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def _asked(self, tokens: Tensor, positions: Tensor, mask: PassMask) -> tuple[Tensor, Tensor, PassMask]:
        if self._ask is None:
            return tokens, positions, mask
        options = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask.build(), "mask": mask}
        self._ask(options)
        built = options["attention_mask"]
        changed = Changed(mask.masks, mask.starts, mask.width, mask.parents, mask.whole_block, built)
        return options["input_ids"], options["position_ids"], changed

    def through(self, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
        """In a pass that may be captured."""
        through: tuple[Tensor, list[Tensor]] = self._network.through(*self._asked(*inputs))
        return through

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self._network.logits(x)
        return self._answer(logits) if self._answer else logits

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        if self._ask:
            tokens, positions, mask = self._asked(inputs.tokens, inputs.positions, inputs.mask)
            inputs = replace(inputs, tokens=tokens, positions=positions, mask=mask)
        with pytest.MonkeyPatch.context() as patch:
            # Compiled kernels read the description of a mask, and not what is built of it.
            patch.setattr(compiled, "placed_by", _placed_by)
            logits, tapped = self._network.read(inputs)
        return self._answer(logits) if self._answer else logits, tapped


def _around_passes(
    patch: pytest.MonkeyPatch,
    ask: Callable[[dict[str, Any]], None] | None = None,
    answer: Callable[[Tensor], Tensor] | None = None,
    least: int = 2,
) -> None:
    """In passes after the prefill over at least so many tokens a row."""
    forward, verify_steadily = Target.forward, SteadyRounds._verify

    def wrapped(target: Target, call: Callable[[], Any]) -> Any:
        sound = target.network
        target.network = Wrapped(sound, ask, answer)
        try:
            return call()
        finally:
            target.network = sound

    def faulty(self: Target, tokens: Tensor, starts: Sequence[int], *args: Any, **options: Any) -> Any:
        if max(starts) == 0 or tokens.shape[1] < least:
            return forward(self, tokens, starts, *args, **options)
        return wrapped(self, lambda: forward(self, tokens, starts, *args, **options))

    def faulty_round(self: SteadyRounds, *inputs: Any) -> Any:
        if self.width < least:
            return verify_steadily(self, *inputs)
        return wrapped(self.target, lambda: verify_steadily(self, *inputs))

    patch.setattr(Target, "forward", faulty)
    patch.setattr(SteadyRounds, "_verify", faulty_round)


def _mask(change: Callable[[Tensor, int], None]) -> Plant:
    """`change` gets the part of the mask [B, 1, N, N] that is within the block, and its width."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def ask(options: dict[str, Any]) -> None:
            mask, width, cache = options["attention_mask"].clone(), options["mask"].width, options["mask"].masks.cache
            # A captured pass covers more places than its block ends at.
            places = cache.positions - (cache.visible - mask.shape[-1])
            columns = places[: len(mask), None, None].expand(len(mask), 1, width, width)
            block = mask.gather(-1, columns)
            change(block, width)
            options["attention_mask"] = mask.scatter(-1, columns, block)

        _around_passes(patch, ask)

    return plant


def _see_all(block: Tensor, width: int) -> None:
    block.zero_()


def _see_one_ahead(block: Tensor, width: int) -> None:
    block.diagonal(1, -2, -1).zero_()


def _see_all_before(block: Tensor, width: int) -> None:
    block.masked_fill_(torch.ones(width, width, dtype=torch.bool).tril(), 0)


def _hide_anchor(block: Tensor, width: int) -> None:
    block[..., 1:, 0] = torch.finfo(block.dtype).min


def _positions(change: Callable[[Tensor], Tensor], least: int = 2) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def ask(options: dict[str, Any]) -> None:
            options["position_ids"] = change(options["position_ids"].clone())

        _around_passes(patch, ask, least=least)

    return plant


def _block_ahead(positions: Tensor) -> Tensor:
    positions[:, 1:] += 1
    return positions


def _anchor_behind(positions: Tensor) -> Tensor:
    positions[:, 0] -= 1
    return positions


def _in_a_row(positions: Tensor) -> Tensor:
    return positions[:, :1] + torch.arange(positions.shape[1])


def _logits(change: Callable[[Tensor], Tensor], least: int = 2) -> Plant:
    return lambda patch: _around_passes(patch, answer=change, least=least)


def _row_before(logits: Tensor) -> Tensor:
    return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)


def _next_sequence(logits: Tensor) -> Tensor:
    return logits.roll(1, dims=0)


def stale(num_tokens: int | None = None) -> Callable[[pytest.MonkeyPatch], None]:
    """Keys and values of the first so many drafted tokens, or of all, are not written."""

    def keep(cache: KVCache, layer: int, width: int, write: Callable[[], Pair]) -> Pair:
        if layer not in cache._layers or width < 2 or cache._start in (None, 0):
            return write()
        first = cache.visible - width + 1
        at = slice(first, cache.visible if num_tokens is None else first + num_tokens)
        before = [buffer[:, :, at].clone() for buffer in cache._layers[layer]]
        result = write()
        for buffer, old in zip(cache._layers[layer], before, strict=True):
            buffer[:, :, at] = old
        return result

    def kept(layers: CompiledForward, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """The same where compiled kernels write: what they wrote is taken back after their pass."""
        cache, width = layers.cache, inputs.mask.width
        if width < 2 or cache._start in (None, 0):
            return READ(layers, inputs)
        first = cache.visible - width + 1
        at = slice(first, cache.visible if num_tokens is None else first + num_tokens)
        (stack,) = cache._stacks
        before = stack[:, :, :, at].clone()
        result = READ(layers, inputs)
        stack[:, :, :, at] = before
        return result

    def plant(patch: pytest.MonkeyPatch) -> None:
        around_writes(patch, keep)
        patch.setattr(CompiledForward, "read", kept)

    return plant


def around_writes(patch: pytest.MonkeyPatch, change: Callable[[KVCache, int, int, Callable[[], Pair]], Pair]) -> None:
    """`change` of cache, layer, width and the sound write replaces both ways to write into a target's cache."""

    def around(name: str) -> None:
        sound = getattr(KVCache, name)

        def faulty(self: KVCache, layer: int, *new: Tensor) -> Pair:
            if self.belongs_to_draft:  # type: ignore[attr-defined]
                return sound(self, layer, *new)
            return change(self, layer, new[0].shape[-2], lambda: sound(self, layer, *new))

        patch.setattr(KVCache, name, faulty)

    only_targets_cache(patch)
    for name in ("write", "write_pair"):
        around(name)


def only_targets_cache(patch: pytest.MonkeyPatch) -> None:
    """Drafts use the same class of cache; theirs stay sound."""
    begin = Target.begin

    def marked(self: Target, num_rows: int, capacity: int) -> None:
        begin(self, num_rows, capacity)
        self.cache.belongs_to_draft = False  # type: ignore[attr-defined]

    patch.setattr(KVCache, "belongs_to_draft", True, raising=False)
    patch.setattr(Target, "begin", marked)


def _rollback(by: int) -> Plant:
    """After a round that drafted, the row's length is wrong by so much."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        advance = loop._State._advance

        def faulty(self: Any, counts: list[int]) -> None:
            advance(self, counts)
            has_room = max(self.starts) + 2 * self.drafter.num_drafts + 4 < self.target.cache.capacity
            if self.drafter.num_drafts and has_room:
                self.starts = [
                    start + (by if count > 1 else 0) for start, count in zip(self.starts, counts, strict=True)
                ]

        patch.setattr(loop._State, "_advance", faulty)

    return plant


def _verdicts(change: Callable[[Verdict, Tensor | None], Verdict]) -> Plant:
    """`change` gets the verdict, and the parents of a tree."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        chain, tree = verify.verify_chain, verify.verify_tree

        def faulty_chain(tokens: Tensor, *rest: Any) -> Verdict:
            verdict = chain(tokens, *rest)
            return change(verdict, None) if tokens.shape[1] else verdict

        def faulty_tree(tokens: Tensor, parents: Tensor, *rest: Any) -> Verdict:
            return change(tree(tokens, parents, *rest), parents)

        # Captured passes apply the rule of one module, and the loop that of the other.
        for module in (loop, verify):
            patch.setattr(module, "verify_chain", faulty_chain)
            patch.setattr(module, "verify_tree", faulty_tree)

    return plant


def _choices(verdict: Verdict) -> Tensor:
    assert verdict.choices is not None
    return verdict.choices


def _bonus_of_anchor(verdict: Verdict, _parents: Tensor | None) -> Verdict:
    return replace(verdict, next_token=_choices(verdict)[:, 0])


def _bonus_of_last_slot(verdict: Verdict, _parents: Tensor | None) -> Verdict:
    return replace(verdict, next_token=_choices(verdict)[:, -1])


def _one_more(verdict: Verdict, _parents: Tensor | None) -> Verdict:
    """Keeps what comes after the last accepted token too."""
    choices = _choices(verdict)
    counts = (verdict.num_accepted + 1).clamp(max=choices.shape[1] - 1)
    return replace(verdict, num_accepted=counts, next_token=choices.gather(1, counts[:, None])[:, 0])


def _sibling(verdict: Verdict, parents: Tensor | None) -> Verdict:
    """In place of the last node that was kept, another child of the same parent, where there is one."""
    count = int(verdict.num_accepted[0])
    if parents is None or verdict.path is None or count == 0:
        return verdict
    path = verdict.path.clone()
    node = int(path[0, count]) - 1
    siblings = [i for i, parent in enumerate(parents[0].tolist()) if parent == parents[0, node] and i != node]
    if not siblings:
        return verdict
    path[0, count] = siblings[0] + 1
    return replace(verdict, path=path, next_token=_choices(verdict)[:, siblings[0] + 1])


def _second_best_at_near_ties(patch: pytest.MonkeyPatch) -> None:
    """Wherever the second-best token is within two logits, and a block is verified."""
    choose = Sampler.choose

    def faulty(self: Sampler, logits: Tensor, places: Tensor | None) -> Tensor:
        best = logits.topk(2, dim=-1)
        near = best.values[..., 0] - best.values[..., 1] < 2
        return (
            torch.where(near, best.indices[..., 1], best.indices[..., 0])
            if logits.shape[1] > 1
            else choose(self, logits, places)
        )

    def of_block(logits: Tensor) -> Tensor:
        return faulty(Sampler, logits, None) if logits.shape[1] > 1 else likeliest(logits)

    likeliest = verify.likeliest
    patch.setattr(Sampler, "choose", faulty)
    patch.setattr(verify, "likeliest", of_block)


def _relaxed(patch: pytest.MonkeyPatch) -> None:
    """A drafted token is kept where it is among the target's three best."""
    sound = loop._State._verify

    def faulty(self: Any, draft: Draft | None, logits: Tensor) -> Verdict:
        if draft is None:
            return sound(self, draft, logits)
        rows = torch.arange(draft.width)[None] if draft.parents is None else draft.parents + 1
        judged = logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))
        good = (judged.topk(3, dim=-1).indices == draft.tokens[..., None]).any(dim=-1)
        best = logits.amax(dim=-1, keepdim=True) + 1
        raised = logits.clone()
        for node in range(draft.width):
            row = rows[0, node]
            if bool(good[0, node]):
                raised[0, row] = logits[0, row]
                raised[0, row, draft.tokens[0, node]] = best[0, row, 0]
        return sound(self, draft, raised)

    patch.setattr(loop._State, "_verify", faulty)


def _path_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "keep_path", lambda *_: None)


def _past_the_stop(patch: pytest.MonkeyPatch) -> None:
    """A stop token ends an answer only as the last of a round."""
    emit = Slot.emit

    def faulty(self: Slot, new: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
        if len(new) > 1 and new[-1] not in stop_ids:
            return emit(self, new, frozenset())
        return emit(self, new, stop_ids)

    patch.setattr(Slot, "emit", faulty)


def _limit_ignored_by_one(patch: pytest.MonkeyPatch) -> None:
    """A round of several tokens may go one past the limit."""
    emit = Slot.emit

    def faulty(self: Slot, new: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
        if len(new) > 1:
            self.limit += 1
            try:
                return emit(self, new, stop_ids)
            finally:
                self.limit -= 1
        return emit(self, new, stop_ids)

    patch.setattr(Slot, "emit", faulty)


def _state_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recurrence, "commit", lambda *_: None)
    commit = DeltaStates.commit

    def everything(self: DeltaStates, counts: Sequence[int], width: int) -> None:
        commit(self, [width] * len(counts), width)

    patch.setattr(DeltaStates, "commit", everything)


def _decay_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    decays = delta._decays

    def shifted(total: Tensor, kept: KeptTokens) -> tuple[Tensor, Tensor]:
        return decays(torch.nn.functional.pad(total, (1, 0))[..., :-1], kept)

    patch.setattr(delta, "_decays", shifted)


def _no_sinks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        layers, "attend_beside", lambda sinks, *rest: ATTEND_BESIDE(torch.full_like(sinks, -torch.inf), *rest)
    )


def _window(by: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        from dflash_bench.engine import target

        sound = target.attention_windows

        def faulty(config: Any) -> dict[str, int | None]:
            return {kind: None if size is None else size + by for kind, size in sound(config).items()}

        patch.setattr(target, "attention_windows", faulty)

    return plant


def _first_row_for_all(patch: pytest.MonkeyPatch) -> None:
    """Ragged rows are all masked as the first one is."""

    def ask(options: dict[str, Any]) -> None:
        mask = options["attention_mask"]
        options["attention_mask"] = mask[:1].expand(len(mask), -1, -1, -1)

    _around_passes(patch, ask, least=1)


FAULTS = (
    Fault("a block sees all of itself", _mask(_see_all)),
    Fault("a block sees one token ahead", _mask(_see_one_ahead)),
    Fault("a tree sees all nodes before", _mask(_see_all_before), TREES),
    Fault("a block does not see its anchor", _mask(_hide_anchor)),
    Fault("positions of the block one too high", _positions(_block_ahead)),
    Fault("position of the anchor one too low", _positions(_anchor_behind)),
    Fault("positions of a tree in a row", _positions(_in_a_row), TREES),
    Fault("rotary positions one too high after the prompt", _positions(lambda at: at + 1, least=1), EVERY),
    Fault("a drafted token leaves its cache row stale", stale(1)),
    Fault("rollback one too short", _rollback(-1)),
    Fault("rollback one too long", _rollback(1)),
    Fault("bonus token of the anchor's row", _verdicts(_bonus_of_anchor)),
    Fault("bonus token of the last row", _verdicts(_bonus_of_last_slot)),
    Fault("one token too many accepted", _verdicts(_one_more)),
    Fault("a sibling kept on a tree path", _verdicts(_sibling), TREES),
    Fault("kept path not moved in the cache", _path_not_moved, TREES),
    Fault("second-best token at near-ties", _second_best_at_near_ties),
    Fault("relaxed acceptance: among the three best", _relaxed),
    Fault("logits of the row before", _logits(_row_before)),
    Fault("decoding goes on behind a stop token", _past_the_stop),
    Fault("one token past the limit", _limit_ignored_by_one),
)
"""For a target of full attention, one row at a time."""
ASKED = [fault.name for fault in FAULTS if any(word in fault.name for word in ("sees", "see ", "position", "logits"))]
"""Those in what a network is asked, or in what it said."""
SINKS = (Fault("sinks left out", _no_sinks),)
WINDOWS = (Fault("window one too wide", _window(1)), Fault("window one too narrow", _window(-1)))
STATES = (Fault("recurrent state not taken back", _state_kept),)
OUR_STATES = (*STATES, Fault("decay of the token before", _decay_of_the_token_before))
RAGGED = (
    Fault("logits of another row of the batch", _logits(_next_sequence, least=1)),
    Fault("mask of the first row for all", _first_row_for_all),
)
