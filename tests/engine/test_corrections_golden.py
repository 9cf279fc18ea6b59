"""Heads that correct a block's drafts, against what their publishers' own code drafts (`dflash_bench/conformance`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from golden_drafts import CASES, assert_drafts_as_published, golden

import dflash_bench as db
from dflash_bench.core import methods
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters import dflash
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.sampling import Sampler, Sampling

METHODS = {
    "deepspec-dspark-vanilla": "dflash",
    "deepspec-dspark-rnn-cut": "dflash:cut=0.5",
    "specforge-dspark-gated": "dflash",
    "speculators-dspark": "dflash",
    "specforge-domino-in-place": "dflash",
    "specforge-domino-shifted": "dflash",
    "speculators-xpress": "dflash",
    "nvidia-lilicorr": "dflash",
}
FORWARDS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "native": {"kernels": "torch"},
    "transformers": {"engine": "transformers"},
}


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("name", METHODS)
def test_a_head_drafts_what_its_publisher_drafts(name: str, forward: str) -> None:
    assert_drafts_as_published(name, METHODS[name], **FORWARDS[forward])


def first_answer(name: str) -> None:
    """Decode the first prompt of a case."""
    case = golden(name)
    drafts = {"dflash": CASES / name / "draft"}
    with db.Engine(target=(CASES / name / case["target"]).resolve(), drafts=drafts, dtype="float32") as engine:
        engine.generate(case["cases"][0]["prompt"], method=METHODS[name], max_new_tokens=40, stop_ids=())


@pytest.mark.parametrize("name", [name for name in METHODS if "dspark" in name])
def test_confidences_are_the_publishers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [step["confidence"] for step in golden(name)["cases"][0]["rounds"]]
    ours: list[torch.Tensor] = []
    draft_tokens = DFlashDrafter.draft_tokens

    def kept(self: DFlashDrafter, logits: torch.Tensor) -> Any:
        corrected, probs = draft_tokens(self, logits)
        assert corrected.confidence is not None
        ours.append(corrected.confidence[0])
        return corrected, probs

    monkeypatch.setattr(DFlashDrafter, "draft_tokens", kept)
    first_answer(name)
    assert len(ours) > 3
    for confidence, expected in zip(ours, known, strict=False):
        torch.testing.assert_close(confidence, torch.tensor(expected), atol=2e-5, rtol=0)


def test_lilicorrs_candidates_and_scores_are_its_publishers(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = golden("nvidia-lilicorr")["cases"][0]["checks"]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    among = dflash.SamplingPick.among

    def kept(self: Any, ids: torch.Tensor, scores: torch.Tensor, place: int) -> torch.Tensor:
        seen.append((ids[0], scores[0]))
        return among(self, ids, scores, place)

    monkeypatch.setattr(dflash.SamplingPick, "among", kept)
    first_answer("nvidia-lilicorr")
    candidates = [one for check in checks for one in check["candidates"]]
    scores = [one for check in checks for one in check["scores"]]
    assert len(candidates) == 18 <= len(seen)
    for (ids, ours), expected, values in zip(seen, candidates, scores, strict=False):
        assert ids.tolist() == expected
        torch.testing.assert_close(ours, torch.tensor(values), atol=1e-5, rtol=1e-5)


# Sampled drafts: q of each slot given the tokens that were drawn before it, and the target's p, filters and all.

SAMPLED = ("zlab-dflash2", "zlab-dflash2-sliding", "zlab-sliding-default")


class Forced(dflash.SamplingPick):
    """Computes as usual, and then takes the tokens of the case."""

    tokens: Sequence[int] = ()

    def among(self, ids: torch.Tensor, scores: torch.Tensor, place: int) -> torch.Tensor:
        super().among(ids, scores, place)
        return (ids == self.tokens[place]).int().argmax(dim=1)


def assert_distribution(ours: torch.Tensor, slot: dict[str, Any], name: str) -> None:
    assert int((ours > 0).sum()) == slot[f"{name}_support"]
    values = torch.tensor(slot[name])
    torch.testing.assert_close(ours[slot[f"{name}_ids"]].float(), values, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("name", SAMPLED)
@torch.inference_mode()
def test_drawn_drafts_have_the_publishers_probabilities(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = golden(name)
    monkeypatch.setattr(dflash, "SamplingPick", Forced)
    drafts = {"dflash": CASES / name / "draft"}
    with db.Engine(target=(CASES / name / case["target"]).resolve(), drafts=drafts, dtype="float32") as engine:
        drafter: Any = engine._drafter(methods.parse("dflash:rule=rejection"))
        target = engine._target
        for drawn in case["sampled"]:
            prompt, anchor, slots = drawn["prompt"], drawn["anchor"], drawn["slots"]
            tokens = [slot["token"] for slot in slots]
            monkeypatch.setattr(Forced, "tokens", tokens)
            sampling = Sampling(drawn["temperature"], top_k=drawn["top_k"], top_p=drawn["top_p"])
            sampler = Sampler(sampling, 1, 64, target.device)
            target.tap(drafter.taps)
            target.begin(1, 128)
            drafter.begin(1, 128)
            hidden = target.prefill([prompt]).hidden
            sampler.begin([prompt], [0], target.vocab_size)
            following, last = torch.tensor([[*prompt[1:], anchor]]), torch.tensor([anchor])
            text = [*prompt, anchor]
            drafter.observe(Committed(hidden, following, last, [0], [len(prompt)], [text], sampler, is_prompt=True))
            q = drafter.propose().probs[0]
            p = sampler.probabilities(target.forward(torch.tensor([[anchor, *tokens]]), [len(prompt)]).logits)[0]
            assert len(q) == len(slots) == len(p) - 1
            for place, slot in enumerate(slots):
                assert_distribution(q[place], slot, "q")
                assert_distribution(p[place], slot, "p")
        target.tap(())
