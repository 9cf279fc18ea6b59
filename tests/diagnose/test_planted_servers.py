"""Every cause that `crosscheck` emulates is named where a server has it, and no other one is.

The servers' faults are planted in checkpoints or in the engine's parts, and not by the code that emulates them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.core.types import Settings
from dflash_bench.diagnose import causes, compare_counts, conform_server
from dflash_bench.diagnose.compare_counts import drafts_per_round, fitting_causes
from dflash_bench.diagnose.show import sentence
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.forward.layers import Norm
from dflash_bench.engine.forward.native_drafts import NativeDFlash
from dflash_bench.engine.loop import AcceptedAnswer
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.presets import NANO
from helpers import cached_target
from helpers.each import each
from helpers.faults import planted
from helpers.serving import (
    OPENED,
    Said,
    by_method,
    chats,
    checked,
    decoded,
    drafted,
    engine,
    names,
    open_once,
    recalled,
    server,
    shared_engine,
)

Emulated = tuple[int, list[Any]] | None
EMULATED: dict[tuple[str, str, str], Emulated] = {}
"""Our engine's output under a cause does not depend on the server, and is decoded once for all tests."""


@dataclass
class Shaped:
    """A hypothesis, with the method and its number of drafts."""

    hypothesis: Any
    shape: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hypothesis, name)


DECODE, MEASURE = conform_server.CrossCheck._emulate, conform_server.measure_acceptance


@pytest.fixture(autouse=True)
def opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conform_server, "open_local", open_once)


@pytest.fixture(autouse=True)
def emulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def remembered(self: Any, one: Any) -> Emulated:
        key = (one.shape, one.cause.name, str(one.prompts))
        if key not in EMULATED:
            EMULATED[key] = DECODE(self, one.hypothesis)
        return EMULATED[key]

    hypotheses = conform_server.hypotheses

    def shaped(side: Any) -> Iterator[Any]:
        shape = f"{side.method.label} {side.num_drafts} {id(side.backend)}"
        for one in hypotheses(side):
            yield Shaped(one, shape)

    monkeypatch.setattr(conform_server.CrossCheck, "_emulate", remembered)
    monkeypatch.setattr(conform_server, "hypotheses", shaped)


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most causes leave our own target as it is: what it says is kept. One that a cause changes is read."""

    def remembered(target: Any, *asked: Any) -> list[AcceptedAnswer]:
        if not any(target is backend.target for backend in OPENED.values()):
            return MEASURE(target, *asked)
        target.__dict__["_weights"] = id(target)  # Its own are laid out anew, and it stays open.
        return cached_target.accepted(target, *asked)

    monkeypatch.setattr(conform_server, "measure_acceptance", remembered)


def test_a_target_that_is_read_once_accepts_under_these_causes_as_the_real_one() -> None:
    """`test_doctor.py` holds it against the probes that are tried there, too."""
    backend = shared_engine()
    prompts = [backend.encode(chat) for chat in chats()[:1]]
    found: list[str] = []
    side: Any = SimpleNamespace(backend=backend, num_drafts=7, prompts=prompts)
    for one in causes._about_blocks(side, backend.drafters["dflash"].draft):  # type: ignore[attr-defined]
        target, drafter = one.build()
        real = MEASURE(target, drafter, prompts, backend.limits)
        target.__dict__["_weights"] = id(target)
        assert cached_target.accepted(target, drafter, prompts, backend.limits) == real, one.cause
        found.append(one.cause.name)
    assert found == [
        "no anchor",
        "the first layer's norm for all",
        "labels moved by one",
        "a block of 9",
        "a block of 16",
    ]


IN_CHECKPOINTS = {
    ("dflash", "order of features"): "layers 13, 10, 7, 4, 1",
    ("dflash", "layers below"): "layers 0, 3, 6, 9, 12",
    ("dflash", "theta of Llama 3"): "theta 500000",
    ("dflash", "end as mask"): "mask 2",
    ("dflash", "norms without one"): "norms minus one",
    ("dflash", "norms with one"): "norms plus one",
    ("eagle3", "order of features"): "layers 12, 7, 1",
    ("eagle3", "layers above"): "layers 2, 8, 13",
    ("eagle3", "theta of Llama 3"): "theta 500000",
    ("eagle3", "norms with one"): "norms plus one",
    ("eagle3", "head of the target"): "the target's head",
    ("eagle3", "norm before residual"): "norm_before_residual True",
    ("eagle3", "norm of the output"): "norm_output True",
}


@pytest.mark.parametrize("fault", IN_CHECKPOINTS, ids=" ".join)
def test_a_server_that_reads_the_draft_otherwise(fault: tuple[str, str], tmp_path: Path) -> None:
    method = fault[0]
    answers = drafted(planted.plant(fault, tmp_path / "draft"), method)
    with server(answers) as running:
        found = checked(running.url, method)
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == [IN_CHECKPOINTS[fault]]


def unanchored(monkeypatch: pytest.MonkeyPatch) -> None:
    through = DFlashDrafter._through

    def masked(self: DFlashDrafter, block: Tensor) -> Tensor:
        return through(self, torch.full_like(block, self.config.mask_token_id))

    monkeypatch.setattr(DFlashDrafter, "_through", masked)


def normed_by_first(monkeypatch: pytest.MonkeyPatch) -> None:
    context = NativeDFlash.context

    def first(self: NativeDFlash, features: Tensor, tables: Any) -> Tensor:
        sound = self.key_norm
        weights = torch.stack([sound.weight[0]] * len(sound.weight))
        self.key_norm = Norm(weights, sound.eps)
        try:
            return context(self, features, tables)
        finally:
            self.key_norm = sound

    monkeypatch.setattr(NativeDFlash, "context", first)


def offsets_as_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eagle3Draft, "target_ids", lambda self, draft_ids: self.d2t[draft_ids])


def block_at(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's angles are those of so many places further on, and the context's are not."""
    through = DFlashDrafter._through

    def moved(self: DFlashDrafter, block: Tensor) -> Tensor:
        kept = self.rotary.cos, self.rotary.sin
        self.rotary.cos, self.rotary.sin = (table.roll(-offset, dims=0) for table in kept)
        try:
            return through(self, block)
        finally:
            self.rotary.cos, self.rotary.sin = kept

    monkeypatch.setattr(DFlashDrafter, "_through", moved)


def embedded(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = NativeDFlash.forward
    monkeypatch.setattr(NativeDFlash, "forward", lambda self, rows, *more: forward(self, rows * factor, *more))


def next_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of a slot is taken from the slot before."""
    read = DFlashDrafter._read_block

    def moved(self: DFlashDrafter) -> Tensor:
        read(self)
        self.cache.place(self.starts, self.block_size)
        hidden = self._through(self.block)
        logits: Tensor = self.head(hidden[:, : self.num_predicted])
        return logits

    monkeypatch.setattr(DFlashDrafter, "_read_block", moved)


IN_THE_ENGINE: dict[tuple[str, str], Callable[[pytest.MonkeyPatch], None]] = {
    ("dflash", "no anchor"): unanchored,
    ("dflash", "block one place after"): partial(block_at, 1),
    ("dflash", "block one place before"): partial(block_at, -1),
    ("dflash", "embedding times 11.3"): partial(embedded, 128**0.5),
    ("dflash", "embedding by 11.3"): partial(embedded, 128**-0.5),
    ("dflash", "embedding times 16"): partial(embedded, 16.0),
    ("dflash", "labels moved by one"): next_tokens,
    ("eagle3", "d2t as ids"): offsets_as_ids,
}


@each("fault", IN_THE_ENGINE)
def test_a_server_that_drafts_otherwise(fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    method, cause = fault
    with monkeypatch.context() as patch:
        IN_THE_ENGINE[fault](patch)
        # Where faults are planted.
        backend = shared_engine(method, kernels="torch")
        answers = recalled(backend, backend.drafters[method])
    with server(answers) as running:
        found = checked(running.url, method)
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == [cause]


@pytest.fixture
def few_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones of all, for models whose causes no other test needs."""
    hypotheses = conform_server.hypotheses
    monkeypatch.setattr(conform_server, "hypotheses", lambda side: islice(hypotheses(side), 6))


@pytest.mark.usefixtures("few_causes")
def test_a_server_that_norms_by_the_first_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In nano's draft the layers' norms differ by little, so that many prompts would be needed."""
    draft = planted.plant(("dflash", "loud keys"), tmp_path / "draft")
    with monkeypatch.context() as patch:
        normed_by_first(patch)
        answers = drafted(draft, "dflash", kernels="torch")
    with server(answers) as running:
        found = checked(running.url, drafts=(f"dflash={draft}",))
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == ["the first layer's norm for all"]


def test_a_server_that_norms_by_the_targets_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nano's own draft hardly changes, so the draft here has an odd norm."""
    hypotheses = conform_server.hypotheses
    monkeypatch.setattr(
        conform_server, "hypotheses", lambda side: [e for e in hypotheses(side) if "norm" in e.cause.name]
    )
    ours, theirs = (
        planted.plant(("eagle3", norm), tmp_path / norm) for norm in ("odd last norm", "last norm of the target")
    )
    with server(drafted(theirs, "eagle3")) as running:
        found = checked(running.url, "eagle3", drafts=(f"eagle3={ours}",))
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == ["the target's last norm"]


def test_a_server_that_drafts_fewer_tokens() -> None:
    answers = by_method("dflash:n=7")
    with server(answers) as running:
        found = checked(running.url)
    assert found.verdict == "differ" and drafts_per_round(found.base) == (15, 7)
    assert names(fitting_causes(found.trials)) == ["7 tokens per round"]
    assert " 7 tokens per round" in sentence(found) and " 15" in sentence(found)
    with server(answers) as running:
        assert checked(running.url, "dflash:n=7").verdict == "agree"


def test_a_server_that_drafts_more_tokens_than_its_method_says() -> None:
    with server(by_method("eagle3:n=9")) as running:
        found = checked(running.url, "eagle3")
    assert names(fitting_causes(found.trials)) == ["9 tokens per round"]


@pytest.mark.usefixtures("few_causes")
@pytest.mark.parametrize(("wide", "num_drafts"), [(16, 3), (6, 4)])
def test_a_server_that_verifies_a_part_of_its_block(
    wide: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few answers have other counts with a somewhat wider block that it might be luck; here it is not."""
    monkeypatch.setattr(compare_counts, "SAME", 1.0)
    monkeypatch.setattr(compare_counts, "GAINED", 1)
    method = f"dflash:block={wide}"
    with monkeypatch.context() as patch:
        propose = DFlashDrafter.propose
        patch.setattr(DFlashDrafter, "propose", lambda self: Draft(propose(self).tokens[:, :num_drafts]))
        answers = {p: replace(said, num_drafts=num_drafts) for p, said in by_method(method).items()}
    with server(answers) as running:
        found = checked(running.url, f"dflash:n={num_drafts}")
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == [f"a block of {wide}"]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_server_that_computes_in_another_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So short answers change in few of their counts, and one may be luck; here it is none."""
    monkeypatch.setattr(compare_counts, "SAME", 1.0)
    monkeypatch.setattr(compare_counts, "GAINED", 0)
    with server(decoded(engine(dtype=kind), "dflash", rows=1)) as running:
        found = checked(running.url)
    if found.base.state == "same":
        pytest.skip(f"no count changes in {kind} on this processor")
    assert f"all in {kind}" in names(fitting_causes(found.trials))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_server_with_a_quantised_target(bits: int, tmp_path: Path) -> None:
    """In its files: nothing that is laid out from them, or judges by them, has the weights as they were."""
    target = shutil.copytree(NANO / "target", tmp_path / "target")
    tensors = {name: tensor.float() for name, tensor in load_file(target / "model.safetensors").items()}
    for name, weight in tensors.items():
        if ".layers." in name and weight.ndim == 2:
            for_each_scale = weight.view(-1, 32)
            scale = for_each_scale.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            for_each_scale.copy_((for_each_scale / scale).round() * scale)
    save_file(tensors, target / "model.safetensors")
    backend = engine(target=target)
    with server(decoded(backend, "dflash")) as running:
        found = checked(running.url)
    assert found.verdict == "differ" and f"the target in {bits} bits" in names(fitting_causes(found.trials))


def test_a_server_that_thinks() -> None:
    answers = by_method(prompts=[shared_engine().encode(chat, Settings(thinking=True)) for chat in chats()])
    with server(answers, by_chat=True) as running:
        found = checked(running.url, sends_chats=True)
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == ["thinking on"]
    assert found.num_prompt_tokens is not None and found.base.mismatches
    asked = [body for path, body, _ in running.asked if path == "/v1/chat/completions"]
    assert asked and not any("chat_template_kwargs" in body for body in asked)


def test_a_server_without_a_template() -> None:
    backend = shared_engine()
    bare = [backend.tokenizer.encode("\n".join(m.content for m in chat)) for chat in chats()]
    with server(by_method(prompts=bare), by_chat=True) as running:
        found = checked(running.url, sends_chats=True)
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == ["no template"]


@each(
    "token, cause, change",
    [
        ("<|endoftext|>", "a begin-of-text token", lambda prompt: [0, *prompt]),
        ("<|im_start|>", "two begin-of-text tokens", lambda prompt: [1, *prompt]),
        ("<|im_start|>", "no begin-of-text token", lambda prompt: prompt[1:]),
    ],
)
def test_a_server_that_begins_prompts_otherwise(
    token: str, cause: str, change: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nano has no such token; here it is told that it has."""
    backend = copy(shared_engine())
    backend.tokenizer = deepcopy(backend.tokenizer)
    backend.tokenizer.bos_token = token
    monkeypatch.setattr(conform_server, "open_local", lambda resolved: backend)
    monkeypatch.setattr(conform_server, "hypotheses", causes._about_prompts)
    monkeypatch.setattr(conform_server.CrossCheck, "_emulate", DECODE)
    monkeypatch.setattr(conform_server, "measure_acceptance", cached_target.accepted)
    answers = by_method(prompts=[change(backend.encode(chat)) for chat in chats()])
    with server(answers, by_chat=True) as running:
        found = checked(running.url, sends_chats=True)
    assert found.verdict == "differ" and names(fitting_causes(found.trials)) == [cause]


def test_a_server_whose_target_is_not_quantised_as_ours_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_counts, "SAME", 1.0)
    monkeypatch.setattr(compare_counts, "GAINED", 1)
    monkeypatch.setattr(conform_server, "hypotheses", causes._about_targets)
    monkeypatch.setattr(conform_server.CrossCheck, "_emulate", DECODE)
    with server(decoded(shared_engine(), "dflash")) as running:
        found = checked(running.url, quantize="int8")
    assert found.verdict == "differ" and "the unquantised target" in names(fitting_causes(found.trials))


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_nothing_is_named_for_a_fault_that_is_not_known(method: str) -> None:
    """It accepts two drafts per round at most, though it drafts more."""
    answers = {prompt: replace(said, accepted=split(said)) for prompt, said in by_method(method).items()}
    with server(answers) as running:
        found = checked(running.url, method)
    assert found.verdict == "differ" and not fitting_causes(found.trials)
    assert "known causes fits" in sentence(found)


def split(said: Said) -> tuple[int, ...]:
    """The same tokens in rounds that accept no more than two drafts each."""
    rounds: list[int] = []
    left = len(said.tokens) - 1
    for accepted in said.accepted:
        emitted = min(accepted + 1, left)
        left -= emitted
        rounds += [2] * (emitted // 3) + ([emitted % 3 - 1] if emitted % 3 else [])
    return tuple(rounds)


def test_a_sound_server_has_no_cause() -> None:
    for method in ("dflash", "eagle3"):
        with server(decoded(shared_engine(method), method)) as running:
            found = checked(running.url, method)
        assert (found.verdict, found.base.state, found.trials) == ("agree", "same", ())
