"""The judge: transformers' own forward against answers that are right, wrong, or different by rounding only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dflash_bench.core.types import Divergence
from dflash_bench.engine import judge as judging
from dflash_bench.engine.judge import Judge
from dflash_bench.engine.masks import TargetMasks
from dflash_bench.engine.target import Target
from helpers.each import each
from helpers.tiny_architectures import ATTENTION, HYBRID, made
from helpers.toy import generated, tiny

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def answer_of(model: Any, num_tokens: int = 12) -> list[int]:
    return generated(model, PROMPT, num_tokens)


def logits_after(model: Any, text: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(text)])).logits[0, -1]
    return logits


def with_other_token(answer: Sequence[int], at: int) -> list[int]:
    return [*answer[:at], (answer[at] + 1) % 97, *answer[at + 1 :]]


def twins(kind: str, closeness: float) -> tuple[Any, int, int, int]:
    """A model, and a place in its answer where a second token has the first one's logit times (1 - closeness)."""
    model = copy.deepcopy(tiny(kind))
    answer = answer_of(model)
    at = next(i for i in range(4, 12) if answer[i] not in answer[:i])
    twin = next(token for token in range(2, 97) if token not in answer)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[twin] = weight[answer[at]] * (1 - closeness)
    return model, at, answer[at], twin


# Two answers


@each("at", [0, 1, 6, 11])
def test_a_wrong_token_is_a_mismatch_and_the_gap_is_what_the_model_has_against_it(at: int) -> None:
    model = tiny("qwen3")
    answer = answer_of(model)
    wrong = with_other_token(answer, at)
    logits = logits_after(model, [*PROMPT, *answer[:at]])
    for one, other in ((answer, wrong), (wrong, answer)):
        divergence = Judge(model).divergence(PROMPT, one, other)
        assert divergence.index == at
        assert divergence.gap == pytest.approx(float(logits.max() - logits[wrong[at]]), rel=1e-4)
        assert divergence.tolerance is not None and divergence.gap is not None
        assert divergence.tolerance <= 1e-3 < divergence.gap
        assert divergence.verdict == "mismatch"


def test_two_tokens_that_only_rounding_tells_apart_are_a_near_tie() -> None:
    model, at, token, twin = twins("llama", 1e-7)
    answer = answer_of(model)
    assert answer[at] in (token, twin)
    other = [*answer[:at], token + twin - answer[at], *answer[at + 1 :]]
    divergence = Judge(model).divergence(PROMPT, answer, other)
    assert divergence.index == at
    assert divergence.verdict == "near_tie"


def test_a_third_token_at_a_near_tie_is_a_mismatch() -> None:
    model, at, *pair = twins("llama", 1e-7)
    answer = answer_of(model)
    logits = logits_after(model, [*PROMPT, *answer[:at]])
    for third in (int(logits.argmin()), int(logits.topk(3).indices[2])):
        assert third not in pair
        other = [*answer[:at], third, *answer[at + 1 :]]
        divergence = Judge(model).divergence(PROMPT, answer, other)
        assert divergence.gap == pytest.approx(float(logits.max() - logits[third]), rel=1e-4)
        assert divergence.verdict == "mismatch"
        assert Judge(model).divergence(PROMPT, other, answer).verdict == "mismatch"


def test_two_answers_that_are_both_wrong_do_not_excuse_each_other() -> None:
    model, at, token, twin = twins("llama", 1e-7)
    with torch.no_grad():
        # Both twins fall below what is now the best token.
        model.get_output_embeddings().weight[[token, twin]] *= 0.5
    answer = answer_of(model)[:at]
    both = [[*answer, token], [*answer, twin]]
    divergence = Judge(model).divergence(PROMPT, *both)
    assert divergence.verdict == "mismatch"


def test_a_tie_that_is_wider_than_rounding_is_a_mismatch() -> None:
    model, at, token, twin = twins("llama", 1e-4)
    answer = answer_of(model)
    other = [*answer[:at], token + twin - answer[at], *answer[at + 1 :]]
    divergence = Judge(model).divergence(PROMPT, answer, other)
    assert divergence.gap is not None and divergence.gap < 1e-2
    assert divergence.verdict == "mismatch"


@pytest.mark.parametrize("kept", [0, 7, 11])
def test_an_answer_that_breaks_off_differs_where_it_ends(kept: int) -> None:
    model = tiny("qwen3")
    answer = answer_of(model)
    for pair in ((answer, answer[:kept]), (answer[:kept], answer)):
        divergence = Judge(model).divergence(PROMPT, *pair)
        assert divergence == Divergence(kept)
        assert divergence.verdict == "mismatch"


# Tolerance for rounding


@each(
    ("gap", "tolerance", "verdict"),
    [
        (0.0, 0.0, "near_tie"),
        (0.5, 0.5, "near_tie"),
        (0.5001, 0.5, "mismatch"),
        (float("nan"), 0.5, "mismatch"),
        (None, None, "mismatch"),
    ],
)
def test_the_tolerance_is_a_limit_and_nothing_is_added_to_it(
    gap: float | None, tolerance: float | None, verdict: str
) -> None:
    assert Divergence(3, gap, tolerance).verdict == verdict


def test_the_tolerance_is_three_times_what_the_two_forms_of_the_judge_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, text, pair = with_forms_apart(monkeypatch, 5e-6)
    divergence = judge.divergence(PROMPT, *([*text, token] for token in pair))
    assert divergence.tolerance == pytest.approx(3 * 5e-6 * abs(pair[0] - pair[1]), rel=0.1)


def test_the_tolerance_has_a_ceiling_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, text, pair = with_forms_apart(monkeypatch, 100.0)
    tolerance = judge.divergence(PROMPT, *([*text, token] for token in pair)).tolerance
    assert tolerance == judging.CEILINGS[torch.float32] == 1e-3
    assert list(judging.CEILINGS.values()) == sorted(judging.CEILINGS.values())


def with_forms_apart(monkeypatch: pytest.MonkeyPatch, off: float) -> tuple[Judge, list[int], tuple[int, int]]:
    """A judge whose steps move each token's logit by its id times `off`; after the text, the pair is nearly tied."""
    model, at, *pair = twins("llama", 1e-5)
    judge = Judge(model)
    steps = judge._in_steps

    def moved(text: Sequence[int], places: int) -> torch.Tensor:
        return steps(text, places) + off * torch.arange(97)

    monkeypatch.setattr(judge, "_in_steps", moved)
    return judge, answer_of(model)[:at], (pair[0], pair[1])


def test_64_places_are_read_in_eight_passes_and_no_place_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, at, *pair = twins("llama", 1e-7)
    judge, widths = Judge(model), list[int]()
    prompt = [*PROMPT, *([7] * 64), *answer_of(model)[:at]]
    # Whatever the model makes of this prompt, it is torn between the pair.
    logits = logits_after(model, prompt)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[pair] *= float(2 * logits.max() / logits[pair[0]])
    forward = model.forward

    def counted(tokens: torch.Tensor, **options: Any) -> Any:
        widths.append(tokens.shape[1])
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", counted)
    place = len(prompt)
    divergence = judge.divergence(prompt, [pair[0]], [pair[1]])
    assert divergence.verdict == "near_tie"
    assert widths == [place, place, place - 63, 1, 2, 4, 8, 16, 31, 1]
    widths.clear()
    departures = [judge.audit(prompt, [token]) for token in pair]
    worse = next((one for one in departures if one is not None), divergence)
    assert widths == [place, place] and worse.tolerance == divergence.tolerance


def test_what_no_rounding_excuses_is_not_measured_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes several passes: every wrong answer would pay them."""
    model = tiny("qwen3")
    judge, answer = Judge(model), answer_of(model)
    monkeypatch.setattr(judge, "_in_steps", lambda *_: pytest.fail("asked in steps"))
    divergence = judge.divergence(PROMPT, answer, with_other_token(answer, 6))
    assert divergence.verdict == "mismatch" and divergence.tolerance == judge.ceiling


def test_the_two_forms_agree_up_to_rounding_on_every_architecture() -> None:
    for kind in ("qwen3", "llama", "mistral"):
        judge = Judge(tiny(kind))
        text = [*PROMPT, *answer_of(tiny(kind))]
        for places in (1, 5, len(text)):
            one, steps = judge._in_one_pass(text, places), judge._in_steps(text, places)
            assert one.shape == steps.shape == (places, 97)
            assert float((one - steps).abs().max()) < 1e-4


@each("kind", [*ATTENTION, *HYBRID])
def test_windows_and_recurrent_layers_have_both_forms_too(kind: str) -> None:
    model = made(kind)
    judge = Judge(model)
    text = [(7 * i + 2) % 60 + 2 for i in range(24)]
    one, steps = judge._in_one_pass(text, 12), judge._in_steps(text, 12)
    assert float((one - steps).abs().max()) < 1e-3


# One answer


def test_the_models_own_answer_is_its_own_and_an_empty_one_too() -> None:
    model = tiny("qwen3")
    assert Judge(model).audit(PROMPT, answer_of(model)) is None
    assert Judge(model).audit(PROMPT, []) is None


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_token_that_is_not_the_models_choice_is_named(at: int) -> None:
    model = tiny("qwen3")
    answer = answer_of(model)[:at]
    logits = logits_after(model, [*PROMPT, *answer])
    wrong = int(logits.argmin())
    answer += [wrong]
    answer += generated(model, [*PROMPT, *answer], 12 - at)
    departure = Judge(model).audit(PROMPT, answer)
    assert departure is not None
    assert departure.index == at
    assert departure.gap == pytest.approx(float(logits.max() - logits[wrong]), rel=1e-4)
    assert departure.verdict == "mismatch"


def test_the_worst_of_several_wrong_tokens_is_named() -> None:
    model = tiny("qwen3")
    answer = answer_of(model)
    wrong = with_other_token(with_other_token(answer, 3), 8)
    departure = Judge(model).audit(PROMPT, wrong)
    assert departure is not None
    gaps = []
    for at, token in enumerate(wrong):
        logits = logits_after(model, [*PROMPT, *wrong[:at]])
        gaps.append(float(logits.max() - logits[token]))
    assert departure.index == gaps.index(max(gaps))


def test_the_second_of_two_near_tied_tokens_is_a_near_tie_in_the_audit() -> None:
    model, at, token, twin = twins("llama", 1e-7)
    verdicts = []
    for choice in (token, twin):
        answer = [*answer_of(model)[:at], choice]
        departure = Judge(model).audit(PROMPT, answer)
        verdicts.append("exact" if departure is None else departure.verdict)
    assert set(verdicts) <= {"exact", "near_tie"}


@pytest.mark.filterwarnings("ignore")
def test_logits_that_are_not_finite_excuse_nothing() -> None:
    model = copy.deepcopy(tiny("llama"))
    answer = answer_of(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[50] = float("nan")
    departure = Judge(model).audit(PROMPT, answer)
    assert departure is not None and departure.gap is None
    assert departure.verdict == "mismatch"
    assert Judge(model).divergence(PROMPT, answer, with_other_token(answer, 4)).verdict == "mismatch"


# Where it ends


def test_an_answer_must_end_behind_its_first_stop_token_and_no_later_than_at_the_limit() -> None:
    model = tiny("qwen3")
    answer = answer_of(model)
    stop = next(token for place, token in enumerate(answer) if 2 < place < 9 and token not in answer[:place])
    end = answer.index(stop) + 1
    judge = Judge(model, frozenset({stop}), 12)
    assert judge.audit(PROMPT, answer[:end]) is None
    assert judge.audit(PROMPT, answer) == Divergence(end)
    assert judge.audit(PROMPT, answer[: end - 1]) == Divergence(end - 1)
    unstopped = frozenset({96}) - frozenset(answer)
    assert Judge(model, unstopped, 12).audit(PROMPT, answer) is None
    assert Judge(model, unstopped, 11).audit(PROMPT, answer) == Divergence(11)
    assert Judge(model, unstopped, 13).audit(PROMPT, answer) == Divergence(12)
    assert Judge(model, unstopped, 13).audit(PROMPT, []) == Divergence(0)


def test_an_answer_may_end_where_the_context_is_full() -> None:
    model = tiny("qwen3")
    prompt = [(7 * place) % 90 + 3 for place in range(90)]
    answer = generated(model, prompt, 6)
    judge = Judge(model, frozenset(), 50)
    assert judge.audit(prompt, answer) is None
    assert judge.audit(prompt, answer[:5]) == Divergence(5)


# Outside the engine


def test_the_judge_does_not_go_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    answer = answer_of(model)
    expected = Judge(model).audit(PROMPT, with_other_token(answer, 6))
    for name in ("forward", "prefill", "begin", "commit"):
        monkeypatch.setattr(Target, name, None)
    monkeypatch.setattr(TargetMasks, "build", None)
    assert Judge(model).audit(PROMPT, with_other_token(answer, 6)) == expected


def test_asking_leaves_the_model_as_it_was() -> None:
    model = tiny("qwen3")
    target = Target(model)
    judge = Judge(model)
    before = answer_of(model)
    judge.divergence(PROMPT, before, with_other_token(before, 4))
    judge.audit(PROMPT, with_other_token(before, 4))
    assert answer_of(model) == before
    assert target.taps == ()
