"""Heads that correct a block's drafts, against what their publishers' own code drafts (`dflash_bench/conformance`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dflash_bench as db
from dflash_bench.engine.drafters import correction
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.models.nets.corrections import markov
from helpers.each import each
from helpers.golden_drafts import CASES, assert_drafts_as_published, golden

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


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        *((name, forward) for name in METHODS for forward in ("compiled", "native")),
        # The draft is that of torch, and what it reads of a target does not depend on its kind.
        ("speculators-dspark", "transformers"),
    ],
)
def test_a_head_drafts_what_its_publisher_drafts(name: str, forward: str) -> None:
    assert_drafts_as_published(name, METHODS[name], **FORWARDS[forward])


def first_answer(name: str) -> None:
    """Decode the first prompt of a case."""
    case = golden(name)
    drafts = {"dflash": CASES / name / "draft"}
    with db.Engine(target=(CASES / name / case["target"]).resolve(), drafts=drafts, dtype="float32") as engine:
        engine.generate(case["cases"][0]["prompt"], method=METHODS[name], max_new_tokens=40, stop_ids=())


@each("name", [name for name in METHODS if "dspark" in name])
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
    monkeypatch.setattr(DFlashDrafter, "reads_confidence", True)
    first_answer(name)
    assert len(ours) > 3
    for confidence, expected in zip(ours, known, strict=False):
        torch.testing.assert_close(confidence, torch.tensor(expected), atol=2e-5, rtol=0)


def test_confidences_that_nobody_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(markov.ConfidenceHead, "forward")
    first_answer("deepspec-dspark-vanilla")
    monkeypatch.setattr(DFlashDrafter, "reads_confidence", True)
    with pytest.raises(NotImplementedError):
        first_answer("deepspec-dspark-vanilla")


def test_lilicorrs_candidates_and_scores_are_its_publishers(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = golden("nvidia-lilicorr")["cases"][0]["checks"]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    among = correction.SamplingPick.among

    def kept(self: Any, ids: torch.Tensor, scores: torch.Tensor, place: int) -> torch.Tensor:
        seen.append((ids[0], scores[0]))
        return among(self, ids, scores, place)

    monkeypatch.setattr(correction.SamplingPick, "among", kept)
    first_answer("nvidia-lilicorr")
    candidates = [one for check in checks for one in check["candidates"]]
    scores = [one for check in checks for one in check["scores"]]
    assert len(candidates) == 18 <= len(seen)
    for (ids, ours), expected, values in zip(seen, candidates, scores, strict=False):
        assert ids.tolist() == expected
        torch.testing.assert_close(ours, torch.tensor(values), atol=1e-5, rtol=1e-5)
