"""Order, judgement and storage of a run, with a backend that decodes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.dialects import ServerRequest
from dflash_bench.core.errors import GpuMemoryError
from dflash_bench.core.types import GREEDY, Answer, Divergence, Generation, Message, Prompt, Settings
from dflash_bench.results import store
from dflash_bench.runner.work import WorkPlan
from dflash_bench.tasks import scorers
from dflash_bench.tasks.sandbox import Isolation
from helpers.fake_backend import FakeBackend, other_tokens
from helpers.runs import Stop
from helpers.work import Runs, Watch, loaded, prompts

METHODS = ("ar", "dflash", "eagle3")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    yield Runs(tmp_path / "run")


def places(records: list[Answer]) -> list[tuple[object, ...]]:
    return [(row.prompt_id, row.repeat, row.turn, row.method) for row in records]


def judgements(records: list[Answer]) -> dict[tuple[object, ...], str | None]:
    return dict(zip(places(records), (row.exactness for row in records), strict=True))


# Order


def test_methods_take_turns_in_alternating_order_after_one_warm_up_a_suite(runs: Runs) -> None:
    backend = FakeBackend()
    plan = WorkPlan((loaded(*prompts(3)), loaded(*prompts(1), name="mbpp")), METHODS)
    records = runs(plan, backend)
    asked = [f"{method[0]}{messages[-1].content[-1]}" for method, messages in backend.calls]
    # The second and third plain answers are decoded twice: the controls.
    assert asked == "a0 d0 e0  a0 d0 e0  e1 d1 a1 a1  a2 a2 d2 e2   a0 d0 e0  a0 d0 e0".split()
    assert [row.order for row in records] == list(range(12)) == list(range(plan.num_generations))
    assert [row.suite for row in records] == ["gsm8k"] * 9 + ["mbpp"] * 3
    assert {row.suite_version for row in records} == {3}


def test_repeats_reverse_the_order_too(runs: Runs) -> None:
    plan = WorkPlan((loaded(*prompts(2)),), METHODS[:2], repeats=2)
    records = runs(plan, FakeBackend())
    assert [f"{row.prompt_id[1]}{row.repeat}{row.method[0]}" for row in records] == (
        "00a 00d 01d 01a 10d 10a 11a 11d".split()
    )
    assert plan.num_generations == 8


def test_every_method_sees_the_plain_answers_to_the_earlier_turns(runs: Runs) -> None:
    opening = (Message("system", "be brief"),)
    backend = FakeBackend(faults={"dflash": lambda answer: replace(answer, text="something else")})
    records = runs(WorkPlan((loaded(*prompts(1, 2, opening=opening)),), METHODS), backend)
    talk = (
        *opening,
        Message("user", "question 0"),
        Message("assistant", "about question 0"),
        Message("user", "and then? 0"),
    )
    assert [messages for _, messages in backend.calls[3:]] == [talk[:2]] * 3 + [talk] * 3
    assert [(row.turn, row.method, row.order) for row in records] == [
        (turn, method, 3 * turn + number) for turn in range(2) for number, method in enumerate(METHODS)
    ]


def test_the_thinking_of_an_earlier_turn_is_for_the_template(runs: Runs) -> None:
    thinks = {"ar": lambda answer: replace(answer, text="<think>Hm</think>\n\n42", num_thinking_chars=17)}
    backend = FakeBackend(faults=thinks)
    runs(WorkPlan((loaded(*prompts(1, 2)),), METHODS[:1]), backend)
    said = backend.calls[-1][1][-2]
    assert said == Message("assistant", "42", '{"reasoning_content": "Hm"}')
    # So a server that renders chats itself gets what the engine and its judge render.
    (sent,) = ServerRequest("m", [said], None, GREEDY, 8, 0, salt=None).chat
    assert sent == {"role": "assistant", "content": "42", "reasoning_content": "Hm"}


def test_work_is_told_before_it_is_done_and_each_record_after(runs: Runs) -> None:
    watch = Watch()
    runs(WorkPlan((loaded(*prompts(1)),), METHODS[:2]), FakeBackend(), watch)
    assert watch.told == [
        "gsm8k · warming up",
        *("gsm8k · plain", "plain", "gsm8k · judging"),
        *("gsm8k · dflash", "dflash", "gsm8k · judging"),
    ]


# Judgement


def test_every_answer_is_judged_by_the_plain_one_and_three_plain_ones_a_suite_by_another(runs: Runs) -> None:
    judged = judgements(runs(WorkPlan((loaded(*prompts(6, 2)),), METHODS), FakeBackend()))
    plain = [verdict for place, verdict in judged.items() if place[3] == "ar"]
    first_turns, second_turns = plain[::2], plain[1::2]
    assert first_turns == ["exact", None, "exact", None, None, "exact"]
    assert second_turns == [None] * 6
    assert {verdict for place, verdict in judged.items() if place[3] != "ar"} == {"exact"}


@pytest.mark.parametrize(
    "gap, verdict", [(1.5, "mismatch"), (0.001001, "mismatch"), (0.001, "near_tie"), (None, "mismatch")]
)
def test_other_tokens_are_a_mismatch_or_a_near_tie(runs: Runs, gap: float | None, verdict: str) -> None:
    backend = FakeBackend(faults={"dflash": other_tokens}, where=Divergence(2, gap, 0.001))
    records = runs(WorkPlan((loaded(*prompts(2)),), METHODS), backend)
    wrong = [row for row in records if row.method == "dflash"]
    assert [(row.exactness, row.divergence) for row in wrong] == [(verdict, backend.where)] * 2
    assert {row.exactness for row in records if row.method == "eagle3"} == {"exact"}


def test_plain_decoding_that_disagrees_with_its_warm_up_is_a_mismatch(runs: Runs) -> None:
    answers = iter([other_tokens])  # the first one, from the warm-up
    backend = FakeBackend(faults={"ar": lambda answer: next(answers, lambda same: same)(answer)})
    judged = judgements(runs(WorkPlan((loaded(*prompts(1)),), METHODS[:2]), backend))
    assert judged == {("p0", 0, 0, "ar"): "mismatch", ("p0", 0, 0, "dflash"): "exact"}


def test_plain_decoding_that_disagrees_with_itself_later_in_a_suite_is_a_mismatch_too(runs: Runs) -> None:
    def changes(answer: Generation) -> Generation:
        repeat_baseline = [messages[-1].content[-1] for method, messages in backend.calls if method == "ar"][-2:] == [
            "2"
        ] * 2
        return other_tokens(answer) if repeat_baseline else answer

    backend = FakeBackend(faults={"ar": changes})
    judged = judgements(runs(WorkPlan((loaded(*prompts(3)),), METHODS[:2]), backend))
    assert [verdict for place, verdict in judged.items() if place[3] == "ar"] == ["exact", "exact", "mismatch"]


# The audit


def audits(records: list[Answer]) -> dict[str, list[str | None]]:
    return {method: [row.audit for row in records if row.method == method] for method in METHODS}


def test_every_distinct_answer_is_read_once_by_the_judge(runs: Runs) -> None:
    backend = FakeBackend(faults={"eagle3": other_tokens}, where=Divergence(2, 0.0, 0.001))
    records = runs(WorkPlan((loaded(*prompts(3)),), METHODS), backend)
    assert audits(records) == {method: ["exact"] * 3 for method in METHODS}
    assert len(backend.audited) == 3 * 2


def test_a_departure_from_the_published_model_is_recorded_even_where_all_methods_agree(runs: Runs) -> None:
    plain = FakeBackend().generate("ar", [Message("user", "question 1")]).token_ids
    departure = Divergence(3, 2.0, 0.001)
    backend = FakeBackend(departures={plain: departure})
    records = runs(WorkPlan((loaded(*prompts(3)),), METHODS), backend)
    wrong = [row for row in records if row.generation.token_ids == plain]
    assert {(row.exactness, row.audit, row.departure) for row in wrong if row.method != "ar"} == {
        ("exact", "mismatch", departure)
    }
    assert {row.audit for row in wrong if row.method == "ar"} == {"mismatch"}


def test_an_answer_that_a_full_gpu_cannot_judge_has_failed_and_the_run_goes_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = FakeBackend.audit

    def audit(self: FakeBackend, messages: Sequence[Message], *args: Any) -> Divergence | None:
        if messages[-1].content.endswith("1"):
            raise GpuMemoryError("out of GPU memory")
        return sound(self, messages, *args)

    monkeypatch.setattr(FakeBackend, "audit", audit)
    records = runs(WorkPlan((loaded(*prompts(3)),), METHODS), FakeBackend())
    assert len(records) == 9
    for row in records:
        failed = row.prompt_id == "p1"
        assert bool(row.generation.error) == failed == (row.audit is None) == (row.generation.decode_s == 0)
        assert not failed or str(row.generation.error).endswith("out of GPU memory")


def test_divergent_audits_what_leaves_the_plain_answer_and_none_nothing(runs: Runs, tmp_path: Path) -> None:
    def backend() -> FakeBackend:
        return FakeBackend(faults={"dflash": other_tokens}, where=Divergence(2, 0.0, 0.001))

    divergent = runs(WorkPlan((loaded(*prompts(3)),), METHODS, audit="divergent"), backend())
    assert audits(divergent) == {"ar": [None] * 3, "dflash": ["exact"] * 3, "eagle3": [None] * 3}
    nothing_read = backend()
    none = Runs(tmp_path / "none")(WorkPlan((loaded(*prompts(3)),), METHODS, audit="none"), nothing_read)
    assert audits(none) == {method: [None] * 3 for method in METHODS}
    assert not nothing_read.audited
    # Whether they left it is asked all the same.
    assert {row.exactness for row in none if row.method == "dflash"} == {"near_tie"}


def test_later_repeats_of_plain_decoding_are_compared_with_the_first(runs: Runs) -> None:
    plan = WorkPlan((loaded(*prompts(2, 2)),), ("ar", "dflash"), repeats=2)
    judged = judgements(runs(plan, FakeBackend()))
    assert {verdict for place, verdict in judged.items() if place[1] == 1} == {"exact"}


def test_a_repeat_that_said_something_else_is_not_compared_in_later_turns(runs: Runs) -> None:
    def changes(answer: Generation) -> Generation:
        num_plain = sum(method == "ar" for method, _ in backend.calls)
        # The warm-up, two turns, and then the first turn of the second repeat.
        return replace(other_tokens(answer), text="else") if num_plain == 4 else answer

    backend = FakeBackend(faults={"ar": changes})
    judged = judgements(runs(WorkPlan((loaded(*prompts(1, 2)),), ("ar",), repeats=2), backend))
    assert judged == {
        ("p0", 0, 0, "ar"): "exact",
        ("p0", 0, 1, "ar"): None,
        ("p0", 1, 0, "ar"): "mismatch",
        ("p0", 1, 1, "ar"): None,
    }


def test_sampled_answers_and_failed_ones_are_not_judged(runs: Runs, tmp_path: Path) -> None:
    sampled = runs(WorkPlan((loaded(*prompts(2)),), METHODS, settings=(Settings(1.0),)), FakeBackend())
    assert {row.exactness for row in sampled} == {None}
    broken = FakeBackend(faults={"eagle3": lambda answer: replace(answer, error="NaN", token_ids=())})
    scored = loaded(*prompts(2, reference="1"), scorer="gsm8k_number")
    failed = Runs(tmp_path / "failed")(WorkPlan((scored,), METHODS), broken)
    assert {(row.exactness, row.passed) for row in failed if row.method == "eagle3"} == {(None, None)}


def test_the_last_answer_is_scored_and_equal_texts_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []

    def score(name: str, prompt: Prompt, text: str, isolation: Isolation | None, num_chars: int) -> scorers.Score:
        assert (isolation, num_chars) == (Isolation(landlock=True), 0)
        scored.append(f"{name} {prompt.prompt_id} {text}")
        return scorers.Score("42", True)

    monkeypatch.setattr(scorers, "score", score)
    plan = WorkPlan((loaded(*prompts(2, 2), scorer="math"),), METHODS, isolation=Isolation(landlock=True))
    records = runs(plan, FakeBackend(text_of=lambda question: question))
    assert [one.partition(" and then? ")[0] for one in scored] == ["math p0", "math p1"]
    assert {(row.turn, row.answer, row.passed) for row in records} == {(0, None, None), (1, "42", True)}


# Storage


def comparable(records: list[Answer]) -> list[Answer]:
    """In the order of the run, and without its clock."""
    untimed = [replace(row, start_s=None, end_s=None, clock_s=None) for row in records]
    return sorted(untimed, key=lambda row: row.order)


ENDED = WorkPlan((loaded(*prompts(2, 2)), loaded(*prompts(1), name="mbpp")), METHODS, repeats=2)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return Runs(tmp_path_factory.mktemp("unbroken") / "run")(ENDED, FakeBackend())


# Steps of five: with each of the methods, in each turn and repeat, and at odd and even calls.
@pytest.mark.parametrize("call", [*range(1, 34, 5), 2, 3, 33])
def test_a_run_that_ends_anywhere_continues_to_the_same_records(runs: Runs, unbroken: list[Answer], call: int) -> None:
    plan = ENDED
    with pytest.raises(Stop):
        runs(plan, FakeBackend(fails_at={call: Stop()}))
    stored = len(store.load(runs.folder)[1])
    backend = FakeBackend()
    assert comparable(runs(plan, backend)) == comparable(unbroken)
    num_warm_up_and_controls = len(backend.calls) - (plan.num_generations - stored)
    assert num_warm_up_and_controls in range(8)
    # Only answers that waited for the plain one are generated again.
    assert stored >= call - 1 - 6 - 1 - 2


def test_a_warm_up_after_a_resume_is_no_control_of_another_prompt(runs: Runs) -> None:
    plan = WorkPlan((loaded(*prompts(3)),), ("ar",))
    with pytest.raises(Stop):
        runs(plan, FakeBackend(fails_at={3: Stop()}))
    warm_up_is_the_same = FakeBackend(faults={"ar": lambda answer: answer})
    assert list(judgements(runs(plan, warm_up_is_the_same)).values()) == ["exact", "exact", "exact"]
    asked = [messages[-1].content[-1] for _, messages in warm_up_is_the_same.calls]
    # The one of its own prompt it is, and the last prompt gets another.
    assert asked == "1 1 2 2".split()


def test_an_answer_is_on_disk_before_the_next_one_begins(runs: Runs) -> None:
    num_stored: list[int] = []

    watch = Watch(lambda: num_stored.append(len(store.load(runs.folder)[1])))
    runs(WorkPlan((loaded(*prompts(2)),), METHODS), FakeBackend(), watch)
    assert num_stored == [0, *(0, 0), *(1, 1), *(2, 2), 3, 3, 3, 3]
