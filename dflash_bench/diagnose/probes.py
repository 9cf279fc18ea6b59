"""Probes for faults between a draft and its target; each probe undoes a single possible fault.

A checkpoint read by other conventions than it was written by still loads, but drafts badly. Probes try the conventions
that implementations disagree on: which outputs are tapped and in which order, which token a slot predicts, which id is
the mask, the scaling of the embedding, the form of norms and rotary angles, and the mapping of reduced vocabularies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters import dflash
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.selection import compile_like
from dflash_bench.engine.target import Target
from dflash_bench.models.architecture import final_norm
from dflash_bench.models.configs import optional
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.dflash import DFlashDraft, default_target_layers
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary

# Changed copies of a draft. The original stays unchanged.


Draft = DFlashDraft | Eagle3Draft


def change_draft(draft: Draft, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Draft:
    """Return a copy with these tensors (by their names in its state dict) and these config values.

    If the config requires a tensor that the draft lacks, `tensors` must hold it.
    """
    weight = draft.norm.weight
    with torch.device("meta"):
        network: Any = type(draft)
        copy = network(replace(draft.config, **config))
    state = {**draft.state_dict(), **(tensors or {})}
    copy = copy.to(weight.dtype).to_empty(device=weight.device)
    copy.load_state_dict({name: state[name] for name in copy.state_dict()})
    made: Draft = copy.eval()
    return made


def build_drafter(
    draft: Draft, target: Target, num_drafts: int, offset: int = 0, embedding: nn.Module | None = None
) -> Drafter:
    """Return a drafter of `num_drafts` tokens per round, with the given embedding or else the target's.

    `offset` moves the positions of a block. A draft with its own embedding uses that.
    """
    embedding = embedding or target.embedding
    drafter: Eagle3Drafter | DFlashDrafter
    if isinstance(draft, Eagle3Draft):
        drafter = Eagle3Drafter(draft, embedding, num_drafts)
    else:
        options = (draft, embedding, target.head, draft.config.block_for(num_drafts))
        drafter = MovedDFlashDrafter(*options, offset=offset) if offset else DFlashDrafter(*options)
    compile_like(target, [drafter])
    return drafter


def num_drafts_of(draft: Draft, method: Method) -> int:
    """Return the number of drafted tokens per round, by the method's options or else the draft's training."""
    if isinstance(draft, Eagle3Draft):
        return method.number("n")
    if method.option("block") == "auto":
        return draft.config.num_drafts(draft.config.block_size)
    return draft.config.num_drafts(dflash.block_size(draft, method))


class MovedDFlashDrafter(DFlashDrafter):
    """Moves its block by `offset` positions; its context stays in place."""

    def __init__(self, *options: Any, offset: int) -> None:
        super().__init__(*options)
        self.offset = offset

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity + abs(self.offset))

    def _read_block(self) -> Tensor:
        kept, self.rotary = self.rotary, Moved(self.rotary, self.offset)  # type: ignore[assignment]
        try:
            return super()._read_block()
        finally:
            self.rotary = kept


class Moved:
    """Rotary tables with positions moved by `offset`, clamped at the first position."""

    def __init__(self, rotary: Rotary, offset: int) -> None:
        self.rotary, self.offset = rotary, offset

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary.at((positions + self.offset).clamp(min=0))

    def between(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        places = max(0, begin + self.offset)
        return self.rotary.between(places, places + end - begin)


class Scaled(nn.Module):
    """An embedding with all rows multiplied by a factor."""

    def __init__(self, embedding: nn.Module, factor: float) -> None:
        super().__init__()
        self.embedding, self.factor = embedding, factor

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding(ids)
        return rows * self.factor


# Probes.


MOST_MASKS = 12
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""The rotary bases of Llama 2, Llama 3 and Qwen, in this order."""


@dataclass(frozen=True, slots=True)
class DraftUnderTest:
    """A draft, its target and tokenizer, and the number of drafted tokens per round."""

    draft: Draft
    target: Target
    tokenizer: Any
    num_drafts: int


@dataclass(frozen=True, slots=True)
class DraftChange:
    """A change to a draft; if it raises acceptance, `cause` is the fault and `remedy` the way to mend it.

    At most one change of a `kind` is the fault; similar changes may help, too.
    """

    kind: str
    name: str
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A change, and the factory of a drafter with it."""

    change: DraftChange
    build: Callable[[], Drafter]


def probes(subject: DraftUnderTest) -> Iterator[Probe]:
    """Yield all probes that apply to this draft."""
    for group in (
        _taps,
        _labels,
        _masks,
        _positions,
        _rotary,
        _norms,
        _embedding,
        _head,
        _body,
        _correction,
        _variants,
    ):
        yield from group(subject)


def _probe(
    subject: DraftUnderTest,
    kind: str,
    name: str,
    cause: str,
    remedy: str,
    tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Probe:
    def build() -> Drafter:
        return build_drafter(change_draft(subject.draft, tensors, **config), subject.target, subject.num_drafts)

    return Probe(DraftChange(kind, name, cause, remedy), build)


def _taps(subject: DraftUnderTest) -> Iterator[Probe]:
    taps, depth = subject.draft.config.target_layer_ids, subject.target.config.num_hidden_layers
    remedy = "name the layers in the draft's config.json in the convention of its format (see 'dflash-bench inspect')"
    tried: dict[tuple[int, ...], str] = {}
    counted = "its features are the outputs of layers {new}, and not of {old}: the list counts layers differently"
    for by in (-1, 1):
        tried.setdefault(tuple(i + by for i in taps), counted)
    tried.setdefault(taps[::-1], "its features are in the order of layers {new}, and not {old}")
    if isinstance(subject.draft, DFlashDraft) and depth > len(taps) + 3:
        usual = default_target_layers(depth, len(taps))
        tried.setdefault(usual, "its features are those of the usual layers, {new}, and not {old}")
    for layers, cause in tried.items():
        if layers != taps and all(0 <= layer < depth - 1 for layer in layers):
            words = cause.format(new=_list(layers), old=_list(taps))
            yield _probe(subject, "layers", f"layers {_list(layers)}", words, remedy, target_layer_ids=layers)


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _labels(subject: DraftUnderTest) -> Iterator[Probe]:
    draft = subject.draft
    if not isinstance(draft, DFlashDraft) or draft.config.has_fixed_slots:
        return
    shifted = draft.config.shifted_labels
    means = ("the token at its own place", "the token after it")
    cause = f"a slot predicts {means[not shifted]}, and not {means[shifted]}: labels are shifted by one"
    remedy = "say so in config.json (speculators: sample_from_anchor), or convert it from the format it was trained in"
    if draft.config.body.is_causal_head:
        remedy = f"give shift={'no' if shifted else 'yes'} with --method: its file does not say"
    other = change_draft(draft, shifted_labels=not shifted)
    assert isinstance(other, DFlashDraft)
    # The block keeps its trained width, so the number of drafted tokens changes by one.
    count = max(1, other.config.num_drafts(draft.config.block_for(subject.num_drafts)))
    moved = DraftChange("labels", "labels moved by one", cause, remedy)
    yield Probe(moved, lambda: build_drafter(other, subject.target, count))


def _masks(subject: DraftUnderTest) -> Iterator[Probe]:
    if not isinstance(subject.draft, DFlashDraft):
        return
    current = subject.draft.config.mask_token_id
    remedy = "correct mask_token_id in the draft's config.json"
    for token_id in islice(mask_candidates(subject), MOST_MASKS):
        token = subject.tokenizer.convert_ids_to_tokens(token_id)
        named = "which no token has" if token is None else token
        cause = f"the mask is id {token_id}, {named}, and not {current}"
        yield _probe(subject, "mask", f"mask {token_id}", cause, remedy, mask_token_id=token_id)


def mask_candidates(subject: DraftUnderTest) -> Iterator[int]:
    """Yield candidates for the draft's mask id: by name, after the vocabulary, special, or off by one."""
    tokenizer, current = subject.tokenizer, subject.draft.config.mask_token_id  # type: ignore[union-attr]
    special = sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
    named = [token_id for token, token_id in special if "mask" in token.lower()]
    unused = [token_id for token, token_id in special if token not in (tokenizer.chat_template or "")]
    usual = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, 0]
    beside = [len(tokenizer), len(tokenizer) - 1, current - 1, current + 1, subject.target.vocab_size - 1]
    for token_id in dict.fromkeys([*named, *beside, *usual, *unused]):
        if token_id is not None and token_id != current and 0 <= token_id < subject.target.vocab_size:
            yield token_id


def _positions(subject: DraftUnderTest) -> Iterator[Probe]:
    if not isinstance(subject.draft, DFlashDraft):
        return
    for offset, where in ((1, "after"), (-1, "before")):
        moved = DraftChange(
            "positions",
            f"block one place {where}",
            f"its block was trained one place {where} where it is put here: positions",
            "train it again with the anchor at its own position; no checkpoint can express this",
        )
        yield Probe(moved, partial(build_drafter, subject.draft, subject.target, subject.num_drafts, offset=offset))


def _rotary(subject: DraftUnderTest) -> Iterator[Probe]:
    draft, target = subject.draft.config, subject.target.config
    rope = dict(optional(target, "rope_parameters", default={}))
    theta = float(rope.pop("rope_theta", 10_000.0))
    scaling = rope if rope.get("rope_type", "default") != "default" else None
    remedy = "correct rope_theta and rope_scaling in the draft's config.json"
    for value in dict.fromkeys([theta, *THETAS]):
        if value != draft.rope_theta:
            cause = f"its rotary angles were trained with theta {value:g}, and not {draft.rope_theta:g}"
            yield _probe(subject, "rotary", f"theta {value:g}", cause, remedy, rope_theta=value)
    if scaling != draft.rope_scaling:
        cause = f"its rotary angles were trained with the target's scaling, {scaling}, and not {draft.rope_scaling}"
        yield _probe(subject, "rotary", "the target's scaling", cause, remedy, rope_scaling=scaling)
    if draft.rope_scaling is not None and scaling is not None:
        cause = f"its rotary angles were trained without scaling, and not with {draft.rope_scaling}"
        yield _probe(subject, "rotary", "no scaling", cause, remedy, rope_scaling=None)


def _norms(subject: DraftUnderTest) -> Iterator[Probe]:
    state = subject.draft.state_dict()
    norms = {name: tensor for name, tensor in state.items() if tensor.ndim == 1 and tensor.is_floating_point()}
    more = {name: tensor + 1 for name, tensor in norms.items()}
    less = {name: tensor - 1 for name, tensor in norms.items()}
    remedy = "write the weights of its norms as x * weight, the convention of Llama and Qwen, into the checkpoint"
    yield _probe(
        subject, "norms", "norms plus one", "its norms are stored without the 1 that is added to them", remedy, more
    )
    yield _probe(
        subject, "norms", "norms minus one", "its norms are stored with a 1 that should be added later", remedy, less
    )
    last: Any = final_norm(subject.target.model)
    target_norm = {"norm.weight": last.weight.detach().to(state["norm.weight"])}
    if target_norm["norm.weight"].shape == state["norm.weight"].shape:
        cause = "its last norm is not the one it was trained with, which is the target's"
        yield _probe(
            subject,
            "norms",
            "the target's last norm",
            cause,
            "put norm.weight of the target into the draft",
            target_norm,
        )
    eps = float(optional(subject.target.config, "rms_norm_eps", default=subject.draft.config.rms_norm_eps))
    if eps != subject.draft.config.rms_norm_eps:
        cause = f"its norms were trained with the target's epsilon, {eps:g}"
        yield _probe(
            subject, "norms", f"epsilon {eps:g}", cause, "correct rms_norm_eps in config.json", rms_norm_eps=eps
        )


def _embedding(subject: DraftUnderTest) -> Iterator[Probe]:
    config, target = subject.draft.config, subject.target
    if config.own_embedding and not config.target_hidden_size:
        cause = "it should read the target's embedding, and its checkpoint holds a different one"
        yield _probe(
            subject, "embedding", "the target's embedding", cause, "leave embed_tokens out of it", own_embedding=False
        )
    factor = math.sqrt(config.hidden_size)
    mine: nn.Module = subject.draft.embed_tokens if config.own_embedding else target.embedding
    remedy = "scale embed_tokens in the draft's own checkpoint, as its trainer did"
    values = {f"embedding times {factor:.3g}": factor, f"embedding by {factor:.3g}": 1 / factor}
    if isinstance(subject.draft, DFlashDraft):
        remedy = "set input_embedding_scale in the draft's config.json to that, times what it says now"
        near = 2.0 ** round(math.log2(factor))
        values.setdefault(f"embedding times {near:.3g}", near)
    for name, value in values.items():
        root = ", the root of their width" if value in (factor, 1 / factor) else ""
        cause = f"it was trained on embeddings scaled by {value:.3g}{root}: its embedding scale is missing"
        yield Probe(DraftChange("embedding", name, cause, remedy), partial(_reading, subject, Scaled(mine, value)))


def _reading(subject: DraftUnderTest, embedding: nn.Module) -> Drafter:
    shared = change_draft(subject.draft, own_embedding=False)
    return build_drafter(shared, subject.target, subject.num_drafts, embedding=embedding)


def _head(subject: DraftUnderTest) -> Iterator[Probe]:
    draft, target_head = subject.draft, subject.target.model.get_output_embeddings().weight
    if not hasattr(draft, "lm_head") or not target_head.is_floating_point():
        return
    size = len(draft.lm_head.weight)
    ids = draft.target_ids(torch.arange(size, device=draft.lm_head.weight.device))
    if target_head.shape[1] == draft.lm_head.weight.shape[1]:
        rows = {"lm_head.weight": target_head.detach()[ids]}
        cause = "its head is not the one it was trained with: with the target's rows, more is accepted"
        yield _probe(subject, "head", "the target's head", cause, "put the target's rows into lm_head.weight", rows)
    if draft.config.draft_vocab_size is None or not hasattr(draft, "d2t"):
        return
    absolute = draft.d2t - torch.arange(size, device=draft.d2t.device)
    if bool((draft.d2t >= 0).all()) and bool((draft.d2t < subject.target.vocab_size).all()):
        cause = "d2t holds ids of the target, and not offsets to add to the draft's ids"
        yield _probe(subject, "head", "d2t as ids", cause, "subtract 0, 1, 2, ... from d2t", {"d2t": absolute})


def _body(subject: DraftUnderTest) -> Iterator[Probe]:
    """Yield probes of attention between slots and of embedding scales: config keys set them, and may have been lost."""
    if not isinstance(subject.draft, DFlashDraft):
        return
    body, num_layers = subject.draft.config.body, subject.draft.config.num_layers
    views = tuple(map(body.view, range(num_layers)))
    for name, changed, cause, remedy in (
        (
            "every layer causal",
            [replace(view, is_causal=True) for view in views],
            "its slots see only those before them, as a causal head's do",
            "set is_causal to true in config.json",
        ),
        (
            "no layer causal",
            [replace(view, is_causal=False) for view in views],
            "its slots see the whole block, and not only those before them",
            "set is_causal to false in config.json",
        ),
        (
            "sliding layers run as full",
            [replace(view, window=None) for view in views],
            "its layers see the whole context, and no window of it",
            "correct layer_types in config.json",
        ),
    ):
        if tuple(changed) != views:
            yield _probe(subject, "network", name, cause, remedy, body=replace(body, views=tuple(changed)))
    if body.embedding_scale != 1:
        cause = f"its embeddings are not scaled by {body.embedding_scale:g}"
        plain = replace(body, embedding_scale=1.0)
        yield _probe(
            subject, "embedding", "embedding scale left out", cause, "leave out input_embedding_scale", body=plain
        )


def _correction(subject: DraftUnderTest) -> Iterator[Probe]:
    """Yield probes of the head that corrects a block: without it, or with its parts in another order."""
    draft = subject.draft
    if not isinstance(draft, DFlashDraft) or draft.config.correction is None:
        return
    config, body = draft.config, draft.config.body
    cause = f"its {config.kind} head makes it worse: it was trained on another body, or is none of this draft"
    remedy = "put the head into the checkpoint that was trained with this body, or leave it out"
    yield _probe(subject, "correction", "no head", cause, remedy, correction=None)
    if not isinstance(config.correction, SelectorConfig):
        return
    first, second = (f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
    state = draft.state_dict()
    if state[first].shape == state[second].shape:
        swapped = {first: state[second], second: state[first]}
        cause = "its codebook of predecessors is that of successors: they are stored in the other order"
        yield _probe(subject, "correction", "codebooks swapped", cause, f"swap {first} and {second}", swapped)
    # The selector adds its scores to scaled and capped logits, or its candidates come in another order.
    for name, key, plain in (
        ("logits not scaled", "output_multiplier", replace(body, output_multiplier=1.0)),
        ("logits not capped", "final_logit_softcapping", replace(body, logit_softcap=None)),
    ):
        if plain != body:
            cause = f"its selector adds its scores to {name}, and its config.json has {key}"
            yield _probe(subject, "correction", name, cause, f"leave out {key}", body=plain)


def _variants(subject: DraftUnderTest) -> Iterator[Probe]:
    """Yield probes of the flags in which EAGLE-3 networks with the same tensors differ."""
    if not isinstance(subject.draft, Eagle3Draft):
        return
    config = subject.draft.config
    for name in ("norm_before_residual", "norm_output"):
        value = not getattr(config, name)
        cause = f"it is a network with {name} {value}, and its config.json says otherwise"
        flag: dict[str, Any] = {name: value}
        yield _probe(subject, "network", f"{name} {value}", cause, f"set {name} in config.json", **flag)
