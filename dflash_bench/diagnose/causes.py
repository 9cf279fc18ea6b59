"""Known causes why a server accepts other tokens than our engine, each emulated in our engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.methods import Method
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose.compare_counts import Cause
from dflash_bench.diagnose.doctor import EXAMINED
from dflash_bench.diagnose.probes import Patient, changed, drafter, probes
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.forward.native import Norm
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.quantization import linear_layers
from dflash_bench.runner.setup import MachineConfig

# Drafters as they are in servers with a known fault: none of these is a draft with something changed.


class FirstOf(DFlashDrafter):
    """Predicts a whole block, of which only the first tokens are verified."""

    def __init__(self, *options: Any, num_drafts: int) -> None:
        super().__init__(*options)
        self.num_drafts = min(num_drafts, self.num_slots)

    def propose(self) -> Draft:
        return Draft(super().propose().tokens[:, : self.num_drafts])


class Unanchored(DFlashDrafter):
    """Its block begins with a mask in place of the anchor."""

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.block[committed.slots, 0] = self.config.mask_token_id


class OneNorm(DFlashDrafter):
    """Norms the keys of the context by the weights of the first layer, in all layers."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        weights = [layer.self_attn.k_norm.weight for layer in self.draft.layers]
        first: Tensor = weights[0].detach()
        everywhere = first.expand(len(weights), 1, 1, 1, -1).contiguous()
        self.network.key_norm = Norm(everywhere, self.config.rms_norm_eps, first.dtype)


# A target as servers change it: computed in another type, or with weights that were rounded to few bits.


GROUP = 32
"""Weights that share a scale, as in the simplest formats of llama.cpp (Q8_0, Q4_0)."""


@torch.no_grad()
def round_weights(model: Any, bits: int) -> None:
    """Rounds the weights of the decoder's linear layers in place, symmetrically and to nearest."""
    decoder = model.get_decoder() or model
    for name in linear_layers(model):
        weight = decoder.get_submodule(name).weight.data
        weight.copy_(rounded(weight, bits))


def rounded(weight: Tensor, bits: int) -> Tensor:
    """[rows, columns] with a scale for every 32 columns, or one a row where these do not come out even."""
    groups = weight.float().unflatten(1, (-1, GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]))
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / most
    near: Tensor = (groups / scale).round() * scale
    return near.flatten(1).to(weight.dtype)


# Known causes why a server accepts other tokens than our engine, each of them emulated in our engine.
#
# What `doctor` tries in order to undo a fault of a draft, a server may do to a sound one; so its probes are tried here
# too. The others are what servers are known for: the number of drafted tokens, the anchor, labels, one norm for all
# layers, the target's type and its quantisation, and where they render prompts themselves, the way in which they do.


MEANS = {
    "layers": "it gives the draft the outputs of other layers of the target",
    "mask": "it fills the block with another mask token",
    "positions": "it puts the block at other positions",
    "rotary": "it computes other rotary angles for the draft",
    "norms": "it computes the draft's norms otherwise",
    "embedding": "it gives the draft other embeddings",
    "head": "it turns the draft's states into tokens by another head or another map of the vocabulary",
    "network": "it takes the draft for another variant of its network",
}
"""What a server does, by the kind of the doctor's change. Labels are moved below, where the number of tokens stays."""
TYPES = ("float32", "bfloat16", "float16")
BITS = (8, 4)
ROWS = 8

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Emulation:
    """`build` makes what decodes these prompts as a server with this cause would."""

    cause: Cause
    build: Callable[[], tuple[Target, Drafter]]
    prompts: Sequence[Tokens]
    is_enough: bool = False
    """Where it fits, is nothing left to explain?"""
    rows: int = ROWS
    """Prompts decoded together."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Our side of a comparison. `num_drafts` are the tokens that the server drafts a round, which may be others."""

    backend: LocalBackend
    method: Method
    num_drafts: int
    prompts: Sequence[Tokens]
    chats: Sequence[Sequence[Message]]
    settings: Settings
    wanted: MachineConfig
    opened: Callable[[MachineConfig], LocalBackend]
    """The same models, loaded anew in another way."""
    is_rendered_there: bool

    @property
    def has_draft(self) -> bool:
        """Is there a draft of which things can be changed?"""
        return self.method.name in EXAMINED and not self.method.options.keys() - {"n", "block"}

    @property
    def own_drafts(self) -> int:
        return self.backend.drafters[self.method.label].num_drafts

    def draft(self, backend: LocalBackend) -> Any:
        return backend.drafters[self.method.label].draft  # type: ignore[attr-defined]

    def drafter(self, backend: LocalBackend) -> Drafter:
        if not self.has_draft:
            return backend.drafters[self.method.label]
        return drafter(self.draft(backend), backend.target, self.num_drafts)


def emulations(bench: Bench) -> Iterator[Emulation]:
    """Cheap ones first; those that load the target again come last."""
    if bench.has_draft:
        yield from _of_drafts(bench)
    if bench.is_rendered_there:
        yield from _of_prompts(bench)
    yield from _of_targets(bench)


def _of_drafts(bench: Bench) -> Iterator[Emulation]:
    backend = bench.backend
    draft = bench.draft(backend)
    if bench.num_drafts != bench.own_drafts:
        yield _number(bench)
    if isinstance(draft, DFlashDraft):
        yield from _of_blocks(bench, draft)
    patient = Patient(draft, backend.target, backend.tokenizer, bench.num_drafts)
    for probe in probes(patient):
        if probe.change.kind in MEANS:
            yield _emulation(bench, probe.change.name, MEANS[probe.change.kind], probe.build)


def _emulation(bench: Bench, name: str, means: str, build: Callable[[], Drafter]) -> Emulation:
    return Emulation(Cause(name, means), lambda: (bench.backend.target, build()), bench.prompts)


def _number(bench: Bench) -> Emulation:
    name, count = bench.method.name, bench.num_drafts
    means = (
        f"it drafts {count} tokens a round, and our engine {bench.own_drafts}: compare with --method {name}:n={count}"
    )
    emulation = _emulation(bench, f"{count} tokens a round", means, partial(bench.drafter, bench.backend))
    return replace(emulation, is_enough=True)


def _of_blocks(bench: Bench, draft: DFlashDraft) -> Iterator[Emulation]:
    target, config, count = bench.backend.target, draft.config, bench.num_drafts
    block = config.block_for(count)

    def built(kind: type[DFlashDrafter]) -> Drafter:
        return kind(draft, target.embedding, target.head, block)

    def first_of(network: DFlashDraft, wide: int) -> Drafter:
        return FirstOf(network, target.embedding, target.head, wide, num_drafts=count)

    means = "its block begins with a mask in place of the last token"
    yield _emulation(bench, "no anchor", means, partial(built, Unanchored))
    if config.num_layers > 1:
        means = "it norms the draft's context keys of all layers by the weights of the first"
        yield _emulation(bench, "the first layer's norm for all", means, partial(built, OneNorm))
    moved = changed(draft, shifted_labels=not config.shifted_labels)
    assert isinstance(moved, DFlashDraft)
    # As many tokens as it drafts: the block is one wider where a slot is left out.
    enough = block if moved.config.num_drafts(block) >= count else block + 1
    means = f"it takes a slot of the block for the token {'at' if config.shifted_labels else 'after'} its place"
    yield _emulation(bench, "labels moved by one", means, partial(first_of, moved, enough))
    for wide in sorted({block + 1, config.block_size}):
        if wide > block:
            means = f"it drafts {count} tokens as the first of a block of {wide}, where our engine's block is {block}"
            yield _emulation(bench, f"a block of {wide}", means, partial(first_of, draft, wide))


def _of_prompts(bench: Bench) -> Iterator[Emulation]:
    """The chats as a server may render them, instead of how the target's own template does."""
    backend, rendered = bench.backend, [list(prompt) for prompt in bench.prompts]
    others: list[tuple[str, str, list[list[int]]]] = []
    if backend.has_thinking:
        other = replace(bench.settings, thinking=not bench.settings.thinking)
        mode = "on" if other.thinking else "off"
        asked = [backend.encode(chat, other) for chat in bench.chats]
        others.append((f"thinking {mode}", f"it renders chats with thinking {mode}", asked))
    texts = ["\n".join(message.content for message in chat) for chat in bench.chats]
    bare = [list(backend.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    others.append(("no template", "it uses no chat template", bare))
    first = backend.tokenizer.bos_token_id
    if first is not None:
        has_it = all(prompt[0] == first for prompt in rendered)
        means = f"it begins prompts with {'one more' if has_it else 'a'} token for their begin"
        others.append((f"{'two tokens' if has_it else 'a token'} of begin", means, [[first, *p] for p in rendered]))
        if has_it:
            means = "it leaves out the token with which prompts begin"
            others.append(("no token of begin", means, [prompt[1:] for prompt in rendered]))
    for name, means, prompts in others:
        if prompts != rendered:
            yield Emulation(Cause(name, means), lambda: (backend.target, bench.drafter(backend)), prompts)


def _of_targets(bench: Bench) -> Iterator[Emulation]:
    own = str(bench.backend.target.model.dtype).removeprefix("torch.")
    for kind in TYPES:
        if kind != own:
            cause = Cause(f"all in {kind}", f"it computes target and draft in {kind}, and our engine in {own}")
            build = partial(_reopened, bench, replace(bench.wanted, dtype=kind))
            # In few digits the rows of a pass change each other's rounding, and the server was asked one by one.
            yield Emulation(cause, build, bench.prompts, rows=1)
    if bench.wanted.quantize is not None:
        cause = Cause("the target as it was", f"its target is not quantised, as ours is ({bench.wanted.quantize})")
        yield Emulation(cause, partial(_reopened, bench, replace(bench.wanted, quantize=None)), bench.prompts)
        return
    for bits in BITS:
        cause = Cause(f"the target in {bits} bits", f"its target is quantised, to about {bits} bits a weight")
        yield Emulation(cause, partial(_quantised, bench, bits), bench.prompts)


def _reopened(bench: Bench, wanted: MachineConfig) -> tuple[Target, Drafter]:
    backend = bench.opened(wanted)
    return backend.target, bench.drafter(backend)


def _quantised(bench: Bench, bits: int) -> tuple[Target, Drafter]:
    backend = bench.opened(bench.wanted)
    round_weights(backend.target.model, bits)
    backend.target = target_of(backend.target.model, bench.wanted.engine)
    return backend.target, bench.drafter(backend)
