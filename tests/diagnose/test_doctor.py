"""`doctor` names a fault that was planted, blames nothing that is sound, and says what it cannot know."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.cli import main
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.diagnose import doctor, probes, show
from dflash_bench.diagnose.doctor import ChangeTrial, Diagnosis
from dflash_bench.diagnose.probes import DraftChange, Moved, change_draft, num_drafts_of
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.loop import AcceptedAnswer
from dflash_bench.engine.target import Target
from dflash_bench.models import loading
from dflash_bench.models.presets import NANO
from dflash_bench.results import table
from dflash_bench.runner.config import RunRequest
from helpers import cached_target, tiny
from helpers.each import each
from helpers.faults import planted

ENOUGH = {"dflash": "dflash:n=7", "eagle3": "eagle3:n=4"}
"""No answer here has room for longer drafts."""


def examined(method: str, draft: Path | None = None, **changes: Any) -> Diagnosis:
    # Many prompts tell more than long answers, and sooner.
    options: dict[str, Any] = {"limit": 4, "max_new_tokens": 8, **changes}
    drafts = () if draft is None else (f"{method}={draft}",)
    return doctor.diagnose(RunRequest(suites=(), methods=(ENOUGH[method],), drafts=drafts, **options), lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def nothing_kept() -> Iterator[None]:
    """Drop the target's kept output: no other file asks the same."""
    yield
    cached_target.KNOWN.clear()


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's output is kept, and not computed again for every draft that is tried."""
    monkeypatch.setattr(doctor, "measure_acceptance", cached_target.accepted)


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_target_that_is_read_once_accepts_as_the_real_one(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round of every probe on every prompt."""
    real = doctor.measure_acceptance
    seen: list[bool] = []

    def both(*asked: Any) -> list[AcceptedAnswer]:
        answers = real(*asked)
        seen.append(answers == cached_target.accepted(*asked))
        return answers

    monkeypatch.setattr(doctor, "measure_acceptance", both)
    examined(method, limit=1, max_new_tokens=6)
    assert len(seen) > 10 and all(seen)


NAMED = {
    ("dflash", "order of features"): "features are in the order of layers 13, 10, 7, 4, 1",
    ("dflash", "theta of another model"): "theta 10000, and not 500",
    ("dflash", "mask id"): "the mask is id 1000, which no token has, and not 5",
    ("dflash", "norms without one"): "stored without the 1 that is added",
    ("dflash", "labels"): "labels are shifted by one",
    ("eagle3", "order of features"): "features are in the order of layers 12, 7, 1",
    ("eagle3", "theta of another model"): "theta 10000, and not 500",
    ("eagle3", "norms with one"): "with a 1 that should be added later",
    ("eagle3", "ids in place of offsets"): "does not fit the target",
    ("eagle3", "head"): "its head is not the one it was trained with",
    ("eagle3", "embedding of another model"): "it should read the target's embedding",
    ("eagle3", "norm before residual"): "norm_before_residual False",
    ("eagle3", "norm of the output"): "norm_output False",
}


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("fault", NAMED, ids=" ".join)
def test_a_planted_fault_is_named_first(fault: tuple[str, str], tmp_path: Path) -> None:
    seen = examined(fault[0], planted.plant(fault, tmp_path / "draft"))
    assert NAMED[fault] in seen.findings[0].cause and seen.findings[0].is_cause
    shown = show.diagnosis_text(seen)
    assert f"1. {seen.findings[0].cause}" in shown and "to do" in shown


def test_ids_in_place_of_offsets_are_told_from_the_file(tmp_path: Path) -> None:
    seen = examined("eagle3", planted.plant(("eagle3", "ids in place of offsets"), tmp_path / "draft"))
    assert "d2t holds the target's ids" in seen.findings[0].evidence and not seen.samples


@pytest.mark.usefixtures("read_once")
def test_a_block_in_another_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can hold this fault, so it is planted in the drafter."""
    sound = DFlashDrafter._read_block

    def late(self: DFlashDrafter) -> torch.Tensor:
        kept, self.rotary = self.rotary, Moved(self.rotary, 1)  # type: ignore[assignment]
        try:
            return sound(self)
        finally:
            self.rotary = kept

    monkeypatch.setattr(DFlashDrafter, "_read_block", late)
    seen = examined("dflash")
    assert "one place before" in seen.findings[0].cause


def test_an_automatic_block_is_examined_whole() -> None:
    draft = loading.load("nano", ["dflash"], "cpu", torch.float32).drafts["dflash"]
    assert num_drafts_of(draft, parse("dflash:block=auto")) == 15


@pytest.mark.usefixtures("read_once")
def test_a_quantised_target_is_tried_as_it_was() -> None:
    seen = examined("dflash", limit=1, quantize="int8")
    (tried,) = [one for one in seen.trials if one.change.name == "the unquantised target"]
    assert "not in int8" in tried.change.cause and "leave out --quantize int8" in tried.change.remedy


@pytest.mark.usefixtures("read_once")
def test_the_other_mode_of_thinking_is_named() -> None:
    seen = examined("dflash", thinking="on")
    assert seen.findings[0].cause.endswith("trained with thinking off")


@pytest.mark.usefixtures("read_once")
def test_a_gain_that_may_be_chance_is_a_doubt() -> None:
    seen = examined("dflash", limit=2, max_new_tokens=16, thinking="on")
    doubt = seen.findings[0]
    assert doubt.cause.startswith("perhaps ") and "thinking off" in doubt.cause and not doubt.is_cause
    assert "chance (p " in doubt.evidence and not seen.has_cause


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_sound_draft_has_no_cause(method: str) -> None:
    seen = examined(method)
    assert not seen.has_cause and seen.trials and max(one.gain for one in seen.trials) < doctor.LEAST_GAIN
    assert not seen.findings or not any(one.is_cause for one in seen.findings)


@pytest.mark.usefixtures("read_once")
def test_text_that_the_draft_does_not_know_is_named(tmp_path: Path) -> None:
    asked = ["Describe the harbour at dawn.", "Who repairs old clocks?", "Compare tea and coffee.", "Why do cats purr?"]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps({"prompt": one}) for one in asked))
    seen = examined("eagle3", prompts=tmp_path / "mine.jsonl", max_new_tokens=16)
    assert seen.findings[0].cause.endswith("learnt this kind of text")
    assert [sample.name for sample in seen.samples] == ["as it is", "on our prompts"]


def test_a_draft_that_learnt_nothing_is_named(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "model")
    seen = examined("dflash", model=str(model))
    assert seen.findings[-1].cause.endswith("undertrained")


@pytest.mark.usefixtures("read_once")
def test_a_draft_below_its_card_is_named(tmp_path: Path) -> None:
    shutil.copytree(NANO / "dflash", tmp_path / "draft")
    card = {"al_pooled": 40.0, "by_position": [0.9, 0.8], "num_prompts": 8, "max_new_tokens": 96}
    (tmp_path / "draft" / "acceptance.json").write_text(json.dumps(card))
    seen = examined("dflash", tmp_path / "draft")
    assert "40.00 by its card" in seen.findings[0].evidence and seen.card is not None
    (line,) = [line for line in show.diagnosis_text(seen).splitlines() if line.startswith("by its card ")]
    assert "40.00" in line and line.endswith("90% 80%")
    (tmp_path / "draft" / "acceptance.json").write_text('{"al_pooled": 1}')
    with pytest.raises(UserError, match=r"acceptance\.json"):
        examined("dflash", tmp_path / "draft")


# Judged answers.


def change(name: str, kind: str = "kind") -> DraftChange:
    return DraftChange(kind, name, f"cause {name}", "remedy")


def answers(*counts: tuple[int, ...]) -> list[AcceptedAnswer]:
    return [AcceptedAnswer((), each) for each in counts]


def test_a_gain_by_chance_is_no_cause() -> None:
    before = answers((1, 1), (4, 4), (2, 2))
    better = doctor.judge(before, [(change("one lucky prompt"), answers((9, 9), (3, 3), (2, 2)))])
    assert better[0].gain > doctor.LEAST_GAIN and not better[0].is_cause
    sure = doctor.judge(before, [(change("all"), answers((4, 4), (9, 9), (6, 6)))])
    assert sure[0].is_cause


def test_many_trials_need_more_than_one() -> None:
    before = answers((1, 1), (2, 2), (2, 2), (1, 1))
    after = answers((2, 2), (3, 3), (2, 3), (2, 2))
    alone = doctor.judge(before, [(change("x"), after)])
    among = doctor.judge(before, [(change("x"), after), *[(change(str(n)), before) for n in range(60)]])
    assert alone[0].is_cause and not among[0].is_cause


def test_symptoms_are_left_out_and_one_of_a_kind_is_named() -> None:
    listed = [
        ChangeTrial(change("mask 7", "mask"), 4.0, 4.0, 0.0),
        ChangeTrial(change("mask 8", "mask"), 3.9, 3.9, 0.0),
        ChangeTrial(change("theta", "rotary"), 1.3, 1.3, 0.0),
        ChangeTrial(change("head", "head"), 3.0, 3.0, 0.0),
    ]
    assert [one.change.name for one in doctor.causes(listed)] == ["mask 7", "head"]


def test_a_single_prompt_needs_a_large_gain() -> None:
    assert doctor.judge(answers((1, 1)), [(change("x"), answers((3, 3)))])[0].is_cause
    assert not doctor.judge(answers((1, 1)), [(change("x"), answers((1, 2)))])[0].is_cause


@each(
    "tokens, loops",
    [
        (list(range(60)), False),
        ([*range(30), *[7, 8, 9] * 12], True),
        ([5] * 40, True),
        ([*range(10), *[1, 2] * 8], False),
        ([*range(20)] * 4, True),
    ],
)
def test_loops(tokens: list[int], loops: bool) -> None:
    assert (table.in_tokens(tokens) > 0) == loops


@pytest.mark.usefixtures("read_once")
def test_loops_of_the_target_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "in_tokens", lambda tokens: len(tokens))
    seen = examined("eagle3", limit=1)
    assert any(finding.cause == "the target repeats itself" and not finding.is_cause for finding in seen.findings)


def test_a_gain_from_loops_is_none() -> None:
    def sample(tokens: list[int]) -> doctor.Sample:
        return doctor.Sample("s", (AcceptedAnswer(tuple(tokens), (3,)), AcceptedAnswer(tuple(range(40)), (3,))))

    sound, looping = sample([*range(50, 90)]), sample([5] * 40)
    others = [(change("template"), looping), (change("thinking"), sound)]
    assert [one.name for one, _ in doctor.without_loops(others, sound)] == ["thinking"]
    assert [one.name for one, _ in doctor.without_loops(others, looping)] == ["template", "thinking"]


def test_a_changed_draft_leaves_the_original_as_it_was() -> None:
    draft = loading.load("nano", ["dflash"], "cpu", torch.float32).drafts["dflash"]
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    other = change_draft(draft, {"norm.weight": torch.zeros_like(draft.norm.weight)}, mask_token_id=7)
    assert other.config.mask_token_id == 7 and not other.norm.weight.any()
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in before.items())


def test_masks_are_tried_by_name_then_behind_the_vocabulary() -> None:
    models = loading.load("nano", ["dflash"], "cpu", torch.float32)
    draft = change_draft(models.drafts["dflash"], mask_token_id=5)
    subject = probes.DraftUnderTest(draft, Target(models.target), models.tokenizer, 15)
    tried = list(probes.mask_candidates(subject))
    assert tried[0] == len(models.tokenizer) == 1000 and 5 not in tried and len(set(tried)) == len(tried)


# The command.


@each(
    "options, named",
    [
        (["--method", "ngram"], "--method ngram dflash eagle3"),
        (["--method", "dflash", "--method", "eagle3"], "method"),
        (["--method", "dflash:steps=2"], "n= block= steps="),
        (["--data", "embedded"], "--data --suite"),
        (["--thinking", "sometimes"], "'sometimes'"),
        (["--thinking", "both"], "--thinking on off"),
        (["--suite", "nope"], "suite 'nope'"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    options: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dflash-bench", "doctor", *options])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().err
    assert end.value.code == 2 and [name for name in named.split(" ") if name not in told] == []


@pytest.mark.usefixtures("read_once")
def test_the_command_exits_with_1_where_there_is_a_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = planted.plant(("eagle3", "norms with one"), tmp_path / "draft")
    words = ["doctor", "--suite", "gsm8k", "--limit", "4", "--max-new-tokens", "8", "--json"]
    monkeypatch.setattr("sys.argv", ["dflash-bench", *words, "--method", "eagle3", "--draft", f"eagle3={draft}"])
    with pytest.raises(SystemExit) as end:
        main()
    given = json.loads(capsys.readouterr().out)
    assert end.value.code == 1 and given["findings"][0]["cause"].startswith("its norms")
    assert given["samples"][0]["num_prompts"] == 4 and given["tried"][0]["al_pooled"] > given["samples"][0]["al_pooled"]
