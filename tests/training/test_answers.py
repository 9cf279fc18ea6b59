"""From prompts to rows: the target's own answers, its states on them, and how both are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models import loading
from dflash_bench.training import answers
from dflash_bench.training import prompts as training_prompts
from dflash_bench.training.answers import AnswerPlan, AnswerRequest
from dflash_bench.training.config import TrainRequest
from dflash_bench.training.data import PackedRows, stored
from helpers.toy import tiny

LAYERS = (0, 2, 3)
PLAN = AnswerPlan("tiny", LAYERS, max_new_tokens=9, batch_size=3)
STOP = frozenset({5, 6, 7})


def asked(count: int = 8, temperature: float = 0.0) -> list[AnswerRequest]:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [
        AnswerRequest(tuple(torch.randint(8, 90, (length,), generator=generator).tolist()), temperature)
        for length in lengths
    ]


def collected(folder: Path, prompts: list[AnswerRequest] | None = None, plan: AnswerPlan = PLAN) -> Target:
    target = Target(tiny("llama"))
    answers.collect(target, STOP, prompts or asked(), plan, folder, lambda _: None)
    return target


def begun(folder: Path) -> None:
    """The first batch, and then an interrupt."""

    def interrupt(told: str) -> None:
        if "batch 2" in told:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers.collect(Target(tiny("llama")), STOP, asked(), PLAN, folder, interrupt)


def test_answers_are_the_plain_ones_with_the_states_of_one_pass(tmp_path: Path) -> None:
    target = collected(tmp_path)
    items = stored([tmp_path])
    assert sorted(tuple(item.ids[: item.prompt_length].tolist()) for item in items) == sorted(a.ids for a in asked())
    for item in items:
        prompt = item.ids[: item.prompt_length].tolist()
        steps = decode(target, NoDrafter(), [prompt], Limits(9, STOP), Sampling(), HostClock())
        assert item.ids.tolist() == prompt + [t for step in steps for t in step.emitted[0] or ()]
        # Stored in bfloat16, which has 8 bits.
        torch.testing.assert_close(item.states.float(), outputs(target, item.ids), rtol=0.01, atol=0.01)


def outputs(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """States of the layers [T, K, H], from transformers' own pass over the whole text."""
    seen: list[torch.Tensor] = []
    layers = target.model.model.layers
    hooks = [layers[i].register_forward_hook(lambda _m, _a, out: seen.append(out[0])) for i in LAYERS]
    with torch.inference_mode():
        target.model(ids[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def test_what_is_stored_is_not_made_again_and_what_is_missing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected(tmp_path / "whole")
    begun(tmp_path / "broken")
    made = []
    original = answers._answer
    monkeypatch.setattr(answers, "_answer", lambda *given: made.append(1) or original(*given))
    collected(tmp_path / "broken")
    assert len(made) == 2
    for whole, broken in zip(*(sorted((tmp_path / n).glob("*.safetensors")) for n in ("whole", "broken")), strict=True):
        assert whole.read_bytes() == broken.read_bytes()


@pytest.mark.parametrize(
    ("plan", "count", "said"),
    [
        (AnswerPlan("other", LAYERS, 9, 3), 8, "revision tiny, not other"),
        (AnswerPlan("tiny", LAYERS, 10, 3), 8, "max_new_tokens 9, not 10"),
        (PLAN, 7, "prompts"),
    ],
)
def test_answers_of_other_options_are_not_continued(plan: AnswerPlan, count: int, said: str, tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(UserError, match=said):
        collected(tmp_path, asked(count), plan)


def test_every_prompt_is_in_one_batch_and_batches_have_one_temperature() -> None:
    prompts = asked(40) + asked(25, temperature=1.0)
    made = answers.batches(prompts, 4, seed=3)
    assert sorted(row for rows in made for row in rows) == list(range(65))
    assert all(len({prompts[row].temperature for row in rows}) == 1 for rows in made)
    assert made != answers.batches(prompts, 4, seed=4)


def test_sampled_answers_differ_from_greedy_ones_and_are_the_same_again(tmp_path: Path) -> None:
    drawn = []
    for name, temperature in (("greedy", 0.0), ("one", 1.0), ("again", 1.0)):
        collected(tmp_path / name, asked(temperature=temperature))
        drawn.append({tuple(item.ids.tolist()) for item in stored([tmp_path / name])})
    assert drawn[0] != drawn[1] == drawn[2]


def test_rows_hold_every_conversation_whole_with_its_states(tmp_path: Path) -> None:
    collected(tmp_path)
    items = stored([tmp_path])
    rows = PackedRows(items, LAYERS, torch.nn.Identity(), length=30, pad=1, seed=2)
    seen = []
    batch, features = rows.take(range(len(rows.packed)), (2, 0))
    for row in range(len(rows.packed)):
        for number, item in enumerate(rows.packed[row]):
            place = (rows.batch.document[row] == number).nonzero()[:, 0]
            assert rows.ids[row, place].equal(item.ids) and rows.batch.position[row, place].tolist() == [
                *range(len(place))
            ]
            assert rows.answer[row, place].tolist() == [i >= item.prompt_length for i in range(len(place))]
            assert features[row, place].equal(item.states[:, [1, 0]].float().flatten(1))
            assert rows.final([row])[0, place].equal(item.states[:, 2].float())
            seen.append(tuple(item.ids.tolist()))
    assert sorted(seen) == sorted(tuple(item.ids.tolist()) for item in items)
    assert batch.weights.sum() == rows.answer.sum() and len(rows.packed) < len(items)


def test_a_row_is_never_longer_than_it_may_be(tmp_path: Path) -> None:
    collected(tmp_path)
    rows = PackedRows(stored([tmp_path]), LAYERS, torch.nn.Identity(), length=7, pad=1)
    assert rows.ids.shape[1] == 7 and all(len(item.ids) <= 7 for row in rows.packed for item in row)


def test_no_answers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no answers in"):
        stored([tmp_path])


@pytest.mark.parametrize("kind", training_prompts.KINDS)
def test_prompts_of_ours_differ_and_have_no_gaps(kind: str) -> None:
    made = list(training_prompts.from_templates(kind, 400))
    assert len(set(made)) == 400 and made == list(training_prompts.from_templates(kind, 400))
    assert not any(
        "{" + name + "}" in text for text in made for name in (*training_prompts.NUMBERS, "topic", "person", "data")
    )


class Nano:
    """The writer of a user's turns."""

    def __init__(self) -> None:
        self.models = loading.load("nano", [], "cpu", torch.float32)
        self.target = Target(self.models.target)

    def prompts(self, count: int, openings: list[str], batch_size: int = 6) -> list[str]:
        tokenizer: Any = self.models.tokenizer
        stops = frozenset({tokenizer.eos_token_id})
        request = TrainRequest(
            target="nano", out=Path("out"), invented=count, openings=tuple(openings), batch_size=batch_size
        )
        return list(training_prompts.invent(self.target, tokenizer, stops, request, lambda _: None))


def test_the_target_makes_up_different_prompts_that_begin_as_asked() -> None:
    openings = ["Write a Python function that", "What is"]
    made = Nano().prompts(8, openings)
    assert len(set(made)) == 8
    assert all(text.startswith(tuple(openings)) and len(text) > len("Write a Python function that") for text in made)


def test_where_no_turn_is_ever_finished_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_prompts, "MOST_TOKENS", 2)
    with pytest.raises(UserError, match="give --prompts FILE"):
        Nano().prompts(2, [""], batch_size=4)


def test_without_a_template_no_turn_can_be_written() -> None:
    tokenizer: Any = loading.load("nano", [], "cpu", torch.float32).tokenizer
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        training_prompts.turn_start(tokenizer)
