"""Drafts with one thing changed, and what else is looked at or tried to explain low acceptance."""

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
from dflash_bench.engine.target import Target
from dflash_bench.models.architecture import final_norm
from dflash_bench.models.nets.dflash import DFlashDraft, default_target_layers
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary

# A draft with one thing changed, as a drafter of its own; the original stays as it is.


Draft = DFlashDraft | Eagle3Draft


def changed(draft: Draft, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Draft:
    """A copy with these tensors, by their names in its state, and with these values in its config.

    Where the config asks for a tensor that the draft does not have, `tensors` must hold it.
    """
    weight = draft.fc.weight
    with torch.device("meta"):
        network: Any = type(draft)
        copy = network(replace(draft.config, **config))
    state = {**draft.state_dict(), **(tensors or {})}
    copy = copy.to(weight.dtype).to_empty(device=weight.device)
    copy.load_state_dict({name: state[name] for name in copy.state_dict()})
    made: Draft = copy.eval()
    return made


def drafter(
    draft: Draft, target: Target, num_drafts: int, offset: int = 0, embedding: nn.Module | None = None
) -> Drafter:
    """It proposes so many tokens a round, and reads the target's embedding unless it has its own or is given one.

    `offset` moves the positions of a block.
    """
    embedding = embedding or target.embedding
    if isinstance(draft, Eagle3Draft):
        return Eagle3Drafter(draft, embedding, num_drafts)
    options = (draft, embedding, target.head, draft.config.block_for(num_drafts))
    return MovedDFlashDrafter(*options, offset=offset) if offset else DFlashDrafter(*options)


def num_drafts_of(draft: Draft, method: Method) -> int:
    """Tokens of a round, as the method's options say or the draft was trained."""
    if isinstance(draft, Eagle3Draft):
        return method.number("n")
    if method.option("block") == "auto":
        return draft.config.num_drafts(draft.config.block_size)
    return draft.config.num_drafts(dflash.block_size(draft, method))


class MovedDFlashDrafter(DFlashDrafter):
    """Its block lies `offset` places behind where it should, and its context where it is."""

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
    """Rotary tables of places further on; the first place has none before it."""

    def __init__(self, rotary: Rotary, offset: int) -> None:
        self.rotary, self.offset = rotary, offset

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary.at((positions + self.offset).clamp(min=0))

    def between(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        places = max(0, begin + self.offset)
        return self.rotary.between(places, places + end - begin)


class Scaled(nn.Module):
    """An embedding whose rows are all multiplied."""

    def __init__(self, embedding: nn.Module, factor: float) -> None:
        super().__init__()
        self.embedding, self.factor = embedding, factor

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding(ids)
        return rows * self.factor


# What may be wrong between a draft and its target, one thing at a time: each probe undoes one fault, if it is there.
#
# A checkpoint that was written by other conventions than it is read by still loads, and drafts badly. The conventions
# that implementations disagree on are the list of what is tried: which outputs are tapped and in which order, what a
# slot stands for, which id is the mask, how the embedding is scaled, how norms and rotary angles are meant, and how ids
# of a reduced vocabulary are counted.


MOST_MASKS = 12
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Those of Llama 2, Llama 3 and Qwen."""


@dataclass(frozen=True, slots=True)
class Patient:
    """A draft, and what it was opened with."""

    draft: Draft
    target: Target
    tokenizer: Any
    num_drafts: int


@dataclass(frozen=True, slots=True)
class DraftChange:
    """`cause` is what is wrong if acceptance rises with it, and `remedy` what to do then.

    Of one `kind` at most one is the fault: others may help as well, because they come close to it.
    """

    kind: str
    name: str
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A change, and the drafter that drafts with it."""

    change: DraftChange
    build: Callable[[], Drafter]


def probes(patient: Patient) -> Iterator[Probe]:
    """All that can be tried on this draft."""
    for group in (_taps, _labels, _masks, _positions, _rotary, _norms, _embedding, _head, _variants):
        yield from group(patient)


def _probe(
    patient: Patient,
    kind: str,
    name: str,
    cause: str,
    remedy: str,
    tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Probe:
    def build() -> Drafter:
        return drafter(changed(patient.draft, tensors, **config), patient.target, patient.num_drafts)

    return Probe(DraftChange(kind, name, cause, remedy), build)


def _taps(patient: Patient) -> Iterator[Probe]:
    taps, depth = patient.draft.config.target_layer_ids, patient.target.config.num_hidden_layers
    remedy = "name the layers in the draft's config.json in the convention of its format (see 'dflash-bench inspect')"
    tried: dict[tuple[int, ...], str] = {}
    counted = "its features are the outputs of layers {new}, and not of {old}: the list counts otherwise"
    for by in (-1, 1):
        tried.setdefault(tuple(i + by for i in taps), counted)
    tried.setdefault(taps[::-1], "its features stand in the order of layers {new}, and not {old}")
    if isinstance(patient.draft, DFlashDraft) and depth > len(taps) + 3:
        usual = default_target_layers(depth, len(taps))
        tried.setdefault(usual, "its features are those of the usual layers, {new}, and not {old}")
    for layers, cause in tried.items():
        if layers != taps and all(0 <= layer < depth - 1 for layer in layers):
            words = cause.format(new=_list(layers), old=_list(taps))
            yield _probe(patient, "layers", f"layers {_list(layers)}", words, remedy, target_layer_ids=layers)


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _labels(patient: Patient) -> Iterator[Probe]:
    draft = patient.draft
    if not isinstance(draft, DFlashDraft):
        return
    shifted = draft.config.shifted_labels
    means = ("the token at its own place", "the token after it")
    cause = f"a slot stands for {means[not shifted]}, and not for {means[shifted]}: labels are shifted by one"
    remedy = "say so in config.json (speculators: sample_from_anchor), or convert it from the format it was trained in"
    other = changed(draft, shifted_labels=not shifted)
    assert isinstance(other, DFlashDraft)
    # The block stays as wide as it was trained, so it drafts one token more, or one less.
    count = max(1, other.config.num_drafts(draft.config.block_for(patient.num_drafts)))
    change = DraftChange("labels", "labels moved by one", cause, remedy)
    yield Probe(change, lambda: drafter(other, patient.target, count))


def _masks(patient: Patient) -> Iterator[Probe]:
    if not isinstance(patient.draft, DFlashDraft):
        return
    current = patient.draft.config.mask_token_id
    remedy = "correct mask_token_id in the draft's config.json"
    for token_id in islice(mask_candidates(patient), MOST_MASKS):
        token = patient.tokenizer.convert_ids_to_tokens(token_id)
        named = "which no token has" if token is None else token
        cause = f"the mask is id {token_id}, {named}, and not {current}"
        yield _probe(patient, "mask", f"mask {token_id}", cause, remedy, mask_token_id=token_id)


def mask_candidates(patient: Patient) -> Iterator[int]:
    """Ids that a draft may have learnt as its mask: by name, behind the vocabulary, special, or off by one."""
    tokenizer, current = patient.tokenizer, patient.draft.config.mask_token_id  # type: ignore[union-attr]
    special = sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
    named = [token_id for token, token_id in special if "mask" in token.lower()]
    unused = [token_id for token, token_id in special if token not in (tokenizer.chat_template or "")]
    usual = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, 0]
    beside = [len(tokenizer), len(tokenizer) - 1, current - 1, current + 1, patient.target.vocab_size - 1]
    for token_id in dict.fromkeys([*named, *beside, *usual, *unused]):
        if token_id is not None and token_id != current and 0 <= token_id < patient.target.vocab_size:
            yield token_id


def _positions(patient: Patient) -> Iterator[Probe]:
    if not isinstance(patient.draft, DFlashDraft):
        return
    for offset, where in ((1, "after"), (-1, "before")):
        change = DraftChange(
            "positions", f"block one place {where}",
            f"its block was trained one place {where} where it is put here: positions",
            "train it again with the anchor at its own position; no checkpoint can say otherwise",
        )  # fmt: skip
        yield Probe(change, partial(drafter, patient.draft, patient.target, patient.num_drafts, offset=offset))


def _rotary(patient: Patient) -> Iterator[Probe]:
    draft, target = patient.draft.config, patient.target.config
    rope = dict(getattr(target, "rope_parameters", None) or {})
    theta = float(rope.pop("rope_theta", 10_000.0))
    scaling = rope if rope.get("rope_type", "default") != "default" else None
    remedy = "correct rope_theta and rope_scaling in the draft's config.json"
    for value in dict.fromkeys([theta, *THETAS]):
        if value != draft.rope_theta:
            cause = f"its rotary angles were trained with theta {value:g}, and not {draft.rope_theta:g}"
            yield _probe(patient, "rotary", f"theta {value:g}", cause, remedy, rope_theta=value)
    if scaling != draft.rope_scaling:
        cause = f"its rotary angles were trained with the target's scaling, {scaling}, and not {draft.rope_scaling}"
        yield _probe(patient, "rotary", "the target's scaling", cause, remedy, rope_scaling=scaling)
    if draft.rope_scaling is not None and scaling is not None:
        cause = f"its rotary angles were trained without scaling, and not with {draft.rope_scaling}"
        yield _probe(patient, "rotary", "no scaling", cause, remedy, rope_scaling=None)


def _norms(patient: Patient) -> Iterator[Probe]:
    state = patient.draft.state_dict()
    norms = {name: tensor for name, tensor in state.items() if tensor.ndim == 1 and tensor.is_floating_point()}
    more = {name: tensor + 1 for name, tensor in norms.items()}
    less = {name: tensor - 1 for name, tensor in norms.items()}
    remedy = "write the weights of its norms as x * weight, the convention of Llama and Qwen, into the checkpoint"
    yield _probe(
        patient, "norms", "norms plus one", "its norms are stored without the one that is added to them", remedy, more
    )
    yield _probe(
        patient, "norms", "norms minus one", "its norms are stored with a one that was to be added later", remedy, less
    )
    last: Any = final_norm(patient.target.model)
    theirs = {"norm.weight": last.weight.detach().to(state["norm.weight"])}
    if theirs["norm.weight"].shape == state["norm.weight"].shape:
        cause = "its last norm is not the one that it was trained with, which is the target's"
        yield _probe(
            patient, "norms", "the target's last norm", cause, "put norm.weight of the target into the draft", theirs
        )
    eps = float(getattr(patient.target.config, "rms_norm_eps", patient.draft.config.rms_norm_eps))
    if eps != patient.draft.config.rms_norm_eps:
        cause = f"its norms were trained with the target's epsilon, {eps:g}"
        yield _probe(
            patient, "norms", f"epsilon {eps:g}", cause, "correct rms_norm_eps in config.json", rms_norm_eps=eps
        )


def _embedding(patient: Patient) -> Iterator[Probe]:
    config, target = patient.draft.config, patient.target
    if config.own_embedding and not config.target_hidden_size:
        cause = "it reads the target's embedding, and the one in its checkpoint is another"
        yield _probe(
            patient, "embedding", "the target's embedding", cause, "leave embed_tokens out of it", own_embedding=False
        )
    factor = math.sqrt(config.hidden_size)
    mine: nn.Module = patient.draft.embed_tokens if config.own_embedding else target.embedding
    for name, value in ((f"embedding times {factor:.3g}", factor), (f"embedding by {factor:.3g}", 1 / factor)):
        cause = f"it was trained on embeddings that are scaled by {value:.3g} in comparison, the root of their width"
        remedy = "scale embed_tokens in the draft's own checkpoint, as its trainer did"
        yield Probe(DraftChange("embedding", name, cause, remedy), partial(_reading, patient, Scaled(mine, value)))


def _reading(patient: Patient, embedding: nn.Module) -> Drafter:
    shared = changed(patient.draft, own_embedding=False)
    return drafter(shared, patient.target, patient.num_drafts, embedding=embedding)


def _head(patient: Patient) -> Iterator[Probe]:
    draft, target_head = patient.draft, getattr(patient.target.head, "weight", None)
    if not hasattr(draft, "lm_head") or target_head is None:
        return
    size = len(draft.lm_head.weight)
    ids = draft.target_ids(torch.arange(size, device=draft.lm_head.weight.device))
    if target_head.shape[1] == draft.lm_head.weight.shape[1]:
        rows = {"lm_head.weight": target_head.detach()[ids]}
        cause = "its head is not the one that it was trained with: with the target's rows it is accepted more"
        yield _probe(patient, "head", "the target's head", cause, "put the target's rows into lm_head.weight", rows)
    if draft.config.draft_vocab_size is None or not hasattr(draft, "d2t"):
        return
    absolute = draft.d2t - torch.arange(size, device=draft.d2t.device)
    if bool((draft.d2t >= 0).all()) and bool((draft.d2t < patient.target.vocab_size).all()):
        cause = "d2t holds ids of the target, and not what is to be added to the draft's"
        yield _probe(patient, "head", "d2t as ids", cause, "subtract 0, 1, 2, ... from d2t", {"d2t": absolute})


def _variants(patient: Patient) -> Iterator[Probe]:
    """What EAGLE-3 networks of the same tensors differ in."""
    if not isinstance(patient.draft, Eagle3Draft):
        return
    config = patient.draft.config
    for name in ("norm_before_residual", "norm_output"):
        value = not getattr(config, name)
        cause = f"it is a network with {name} {value}, which its config.json does not say"
        flag: dict[str, Any] = {name: value}
        yield _probe(patient, "network", f"{name} {value}", cause, f"set {name} in config.json", **flag)
