"""Known causes of different acceptance on a server, emulated in our engine.

`doctor` changes a draft to undo a fault; a server may apply the same change to a sound draft, so the same probes are
tried here. The other causes are known from servers: the number of drafted tokens, the anchor, labels, the same norm for
all layers, the target's dtype and quantisation and, where servers render prompts themselves, the rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.labels import dtype_name
from dflash_bench.core.methods import Method
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose.compare_counts import Cause
from dflash_bench.diagnose.doctor import EXAMINED
from dflash_bench.diagnose.probes import DraftUnderTest, build_drafter, change_draft, probes
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.forward.layers import Norm
from dflash_bench.engine.forward.native_drafts import NativeDFlash
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.corrections.base import BlockPass, Corrected, CorrectionHead, Pick
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.quantization import linear_layers
from dflash_bench.runner.config import RunRequest

# Drafters with a known fault of servers that a change to the draft cannot express.


class FirstOf(DFlashDrafter):
    """Predicts a whole block, but proposes only its first `num_drafts` tokens."""

    def __init__(self, *options: Any, num_drafts: int) -> None:
        super().__init__(*options)
        self.num_drafts = min(num_drafts, self.num_predicted)

    def propose(self) -> Draft:
        return Draft(super().propose().tokens[:, : self.num_drafts])


class Unanchored(DFlashDrafter):
    """Begins its block with a mask in place of the anchor."""

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.block[committed.row_slice, 0] = self.config.mask_token_id


ONE_NORM = "the first layer's norm for all"


class OneNorm(DFlashDrafter):
    """Norms the context's keys of all layers with the weights of the first layer."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        weights = [layer.self_attn.k_norm.weight for layer in self.draft.layers]
        first: Tensor = weights[0].detach()
        everywhere = first.expand(len(weights), 1, 1, 1, -1).contiguous()
        assert isinstance(self.network, NativeDFlash)
        self.network.key_norm = Norm(everywhere, self.config.rms_norm_eps)


class SelectingAtOnce(DFlashDrafter):
    """Chooses the tokens of all slots by the anchor, instead of by the previous slot's token."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        assert self.corrector is not None
        self.corrector.head = AnchoredHead(self.corrector.head)


class AnchoredHead:
    """A head that corrects every slot as if it were the first."""

    def __init__(self, head: CorrectionHead) -> None:
        self.head = head

    def correct(self, block: BlockPass, pick: Pick) -> Corrected:
        tokens = []
        for slot in range(block.num_drafts):
            place = block.slots.start + slot
            alone = replace(block, logits=block.logits[:, slot : slot + 1], slots=slice(place, place + 1))
            tokens.append(self.head.correct(alone, pick).tokens)
        return Corrected(torch.cat(tokens, dim=1))


# Targets with weights rounded to few bits.


GROUP = 32
"""Weights that share a scale, as in the simplest formats of llama.cpp (Q8_0, Q4_0)."""


@torch.no_grad()
def round_weights(model: Any, bits: int) -> None:
    """Round the weights of the decoder's linear layers in place, symmetrically and to nearest."""
    decoder = model.get_decoder() or model
    for name in linear_layers(model):
        weight = decoder.get_submodule(name).weight.data
        weight.copy_(round_to_bits(weight, bits))


def round_to_bits(weight: Tensor, bits: int) -> Tensor:
    """Round a weight [rows, columns] with one scale per 32 columns, or per row if 32 does not divide the columns."""
    groups = weight.float().unflatten(1, (-1, GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]))
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / most
    near: Tensor = (groups / scale).round() * scale
    return near.flatten(1).to(weight.dtype)


# Hypotheses: causes, and how to decode with them.


EFFECTS = {
    "layers": "it feeds the draft the outputs of other target layers",
    "mask": "it fills the block with another mask token",
    "positions": "it puts the block at other positions",
    "rotary": "it computes other rotary angles for the draft",
    "norms": "it computes the draft's norms differently",
    "embedding": "it gives the draft other embeddings",
    "head": "it turns the draft's states into tokens with another head or another vocabulary map",
    "network": "it takes the draft for another variant of its network",
    "correction": "it leaves out the draft's head, or computes it in another order",
}
"""The server's fault by the kind of the doctor's change. Labels are moved below, keeping the number of tokens."""
DTYPES = ("float32", "bfloat16", "float16")
BITS = (8, 4)
ROWS = 8

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A cause, and the target and drafter that decode these prompts as a server with this cause would."""

    cause: Cause
    build: Callable[[], tuple[Target, Drafter]]
    prompts: Sequence[Tokens]
    is_enough: bool = False
    """If it fits, no other cause is tried."""
    rows: int = ROWS
    """Prompts decoded together."""


@dataclass(frozen=True, slots=True)
class ReferenceSide:
    """Our side of a comparison. `num_drafts` is the server's number of drafted tokens per round, if reported."""

    backend: LocalBackend
    method: Method
    num_drafts: int
    prompts: Sequence[Tokens]
    chats: Sequence[Sequence[Message]]
    settings: Settings
    wanted: RunRequest
    reopen: Callable[[RunRequest], LocalBackend]
    """Load the same models again, with other options."""
    server_renders: bool
    """Whether the server gets chats, and renders them itself."""

    @property
    def has_draft(self) -> bool:
        """Whether it has a draft that can be changed."""
        return self.method.name in EXAMINED and not self.method.options.keys() - {"n", "block"}

    @property
    def own_drafts(self) -> int:
        return self.backend.drafters[self.method.label].num_drafts

    def draft(self, backend: LocalBackend) -> Any:
        return backend.drafters[self.method.label].draft  # type: ignore[attr-defined]

    def drafter(self, backend: LocalBackend) -> Drafter:
        if not self.has_draft:
            return backend.drafters[self.method.label]
        return build_drafter(self.draft(backend), backend.target, self.num_drafts)


def hypotheses(side: ReferenceSide) -> Iterator[Hypothesis]:
    """Yield cheap hypotheses first; those that load the target again come last."""
    if side.has_draft:
        yield from _about_drafts(side)
    if side.server_renders:
        yield from _about_prompts(side)
    yield from _about_targets(side)


def _about_drafts(side: ReferenceSide) -> Iterator[Hypothesis]:
    backend = side.backend
    draft = side.draft(backend)
    if side.num_drafts != side.own_drafts:
        name, count = side.method.name, side.num_drafts
        effect = (
            f"it drafts {count} tokens per round, and our engine {side.own_drafts}: compare with --method "
            f"{name}:n={count}"
        )
        build = partial(side.drafter, backend)
        yield replace(_hypothesis(side, f"{count} tokens per round", effect, build), is_enough=True)
    if isinstance(draft, DFlashDraft):
        yield from _about_blocks(side, draft)
    for probe in probes(DraftUnderTest(draft, backend.target, backend.tokenizer, side.num_drafts)):
        if probe.change.kind in EFFECTS:
            yield _hypothesis(side, probe.change.name, EFFECTS[probe.change.kind], probe.build)


def _hypothesis(side: ReferenceSide, name: str, effect: str, build: Callable[[], Drafter]) -> Hypothesis:
    return Hypothesis(Cause(name, effect), lambda: (side.backend.target, build()), side.prompts)


def _about_blocks(side: ReferenceSide, draft: DFlashDraft) -> Iterator[Hypothesis]:
    target, config, count = side.backend.target, draft.config, side.num_drafts
    block = config.block_for(count)

    def first_of(network: Any, wide: int) -> Drafter:
        return FirstOf(network, target.embedding, target.head, wide, num_drafts=count)

    options = (draft, target.embedding, target.head, block)
    effect = "its block begins with a mask in place of the last token"
    yield _hypothesis(side, "no anchor", effect, partial(Unanchored, *options))
    if config.num_layers > 1:
        effect = "it norms the draft's context keys of all layers with the weights of the first"
        yield _hypothesis(side, ONE_NORM, effect, partial(OneNorm, *options))
    if isinstance(config.correction, SelectorConfig):
        effect = "its selector scores the candidates of all slots by the last token, and not by the one chosen before"
        yield _hypothesis(side, "all selected at once", effect, partial(SelectingAtOnce, *options))
    if not config.has_fixed_slots:
        moved = change_draft(draft, shifted_labels=not config.shifted_labels)
        assert isinstance(moved, DFlashDraft)
        # Keep the number of drafted tokens: widen the block by one where a slot is left out.
        enough = block if moved.config.num_drafts(block) >= count else block + 1
        effect = f"it takes a slot of the block for the token {'at' if config.shifted_labels else 'after'} its place"
        yield _hypothesis(side, "labels moved by one", effect, partial(first_of, moved, enough))
    for wide in sorted({config.block_size} if config.has_fixed_slots else {block + 1, config.block_size}):
        if wide > block:
            effect = f"it drafts {count} tokens as the first of a block of {wide}, where our engine's block is {block}"
            yield _hypothesis(side, f"a block of {wide}", effect, partial(first_of, draft, wide))


def _about_prompts(side: ReferenceSide) -> Iterator[Hypothesis]:
    """Render the chats as a server might, instead of with the target's own template."""
    backend, rendered = side.backend, [list(prompt) for prompt in side.prompts]
    others: list[tuple[str, str, list[list[int]]]] = []
    if backend.has_thinking:
        other = replace(side.settings, thinking=not side.settings.thinking)
        mode = "on" if other.thinking else "off"
        prompts = [backend.encode(chat, other) for chat in side.chats]
        others.append((f"thinking {mode}", f"it renders chats with thinking {mode}", prompts))
    texts = ["\n".join(message.content for message in chat) for chat in side.chats]
    bare = [list(backend.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    others.append(("no template", "it uses no chat template", bare))
    first = backend.tokenizer.bos_token_id
    if first is not None and all(prompt[0] == first for prompt in rendered):
        effect = "it starts prompts with one more begin-of-text token"
        others.append(("two begin-of-text tokens", effect, [[first, *prompt] for prompt in rendered]))
        effect = "it leaves out the begin-of-text token of prompts"
        others.append(("no begin-of-text token", effect, [prompt[1:] for prompt in rendered]))
    elif first is not None:
        effect = "it starts prompts with a begin-of-text token"
        others.append(("a begin-of-text token", effect, [[first, *prompt] for prompt in rendered]))
    for name, effect, prompts in others:
        if prompts != rendered:
            yield Hypothesis(Cause(name, effect), lambda: (backend.target, side.drafter(backend)), prompts)


def _about_targets(side: ReferenceSide) -> Iterator[Hypothesis]:
    own = dtype_name(side.backend.target.model.dtype)
    for dtype in DTYPES:
        if dtype != own:
            cause = Cause(f"all in {dtype}", f"it computes target and draft in {dtype}, and our engine in {own}")
            build = partial(_reopen, side, replace(side.wanted, dtype=dtype))
            # In low precision batched rows change each other's rounding, and the server had one request at a time.
            yield Hypothesis(cause, build, side.prompts, rows=1)
    if side.wanted.quantize is not None:
        cause = Cause("the unquantised target", f"its target is not quantised, as ours is ({side.wanted.quantize})")
        yield Hypothesis(cause, partial(_reopen, side, replace(side.wanted, quantize=None)), side.prompts)
        return
    for bits in BITS:
        cause = Cause(f"the target in {bits} bits", f"its target is quantised to about {bits} bits per weight")
        yield Hypothesis(cause, partial(_reopen, side, side.wanted, bits), side.prompts)


def _reopen(side: ReferenceSide, wanted: RunRequest, bits: int | None = None) -> tuple[Target, Drafter]:
    backend = side.reopen(wanted)
    if bits is not None:
        round_weights(backend.target.model, bits)
        backend.target = target_of(backend.target.model, wanted.engine, wanted.kernels)
    return backend.target, side.drafter(backend)
