"""`conform`: golden cases under each forward and from a server; planted faults are named by the misreading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.dialects import WHOLE, AcceptanceCounts, Conversion, rule_of
from dflash_bench.diagnose import compare_rounds, conform, conform_server, golden_cases, show_conform
from dflash_bench.diagnose.causes import ONE_NORM, OneNorm
from dflash_bench.diagnose.compare_rounds import DecodedPrompt, DetailDifference
from dflash_bench.diagnose.conform import FORWARDS, CaseSubject, Conformance
from dflash_bench.diagnose.golden_cases import (
    AskedPrompt,
    CaseRound,
    GoldenCase,
    WrongReading,
    answer_of,
    asked_prompts,
    read_case,
)
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.drafters.ddtree import DDTreeDrafter, ExpandedTreeDrafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.runner.config import RunRequest
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.servers.fake_server import Count, FakeServer

Main = Callable[..., tuple[int, str, str]]
DOMINO, CUT, XPRESS = "specforge-domino-in-place", "deepspec-dspark-rnn-cut", "speculators-xpress"


def quiet(_: str) -> None:
    pass


def published(case: GoldenCase) -> list[DecodedPrompt]:
    return [DecodedPrompt(prompt.tokens, prompt.rounds) for prompt in case.prompts]


def decoded(case: GoldenCase, reading: WrongReading | None = None, asked: Sequence[AskedPrompt] = ()) -> Any:
    """Rounds of our engine, with a misreading if asked."""
    subject, target = loaded(case.name)
    prompts = [one.prompt for one in asked] or case.prompts
    found = conform.decode_prompts(target, subject.drafter(target, reading), prompts, together=True)
    return found if asked else conform.shrunk(subject, target, reading, found)


@cache
def loaded(name: str) -> tuple[CaseSubject, Target]:
    """The shipped case, which no test of it changes."""
    subject = CaseSubject.load(read_case(name), "cpu")
    return subject, target_of(subject.models.target, "native", "torch")


@pytest.fixture(scope="module", autouse=True)
def misread_once() -> Iterator[None]:
    """A misreading's rounds do not depend on the server; they are decoded once for all tests."""
    known: dict[str, list[tuple[str, list[DecodedPrompt]]]] = {}
    misread = conform_server.Served._misread

    def remembered(self: conform_server.Served) -> list[tuple[str, list[DecodedPrompt]]]:
        if self.case.name not in known:
            known[self.case.name] = list(misread(self))
        return known[self.case.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conform_server.Served, "_misread", remembered)
        yield
    loaded.cache_clear()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Ships cases whose drafts have other keys in config.json; all else is as it was."""

    def plant(name: str, edit: dict[str, Any]) -> None:
        cases = tmp_path / "cases"
        shutil.copytree(golden_cases.CASES / "_targets", cases / "_targets", dirs_exist_ok=True)
        shutil.copytree(golden_cases.CASES / name, cases / name)
        shutil.rmtree(cases / name / "draft")
        golden_cases.edited_copy(golden_cases.CASES / name / "draft", edit, cases / name / "draft")
        monkeypatch.setattr(golden_cases, "CASES", cases)

    return plant


# The cases


@each("name", golden_cases.known_cases())
def test_a_case_is_read_and_conforms_to_itself(name: str) -> None:
    case = read_case(name)
    rounds = published(case)
    assert not list(compare_rounds.differences_of(case, rounds))
    assert compare_rounds.num_equal_rounds(case, rounds) == case.num_rounds > 0
    assert compare_rounds.accepted_per_round(case, rounds) == pytest.approx(case.accepted_per_round)
    stored = json.loads((golden_cases.CASES / name / "golden.json").read_text())
    figure = compare_rounds.published_figure(case, rounds)
    assert case.overruns or f"{figure:.4g}" == f"{stored['accepted_per_round']:.4g}"
    assert case.readings and case.what and (case.target / "config.json").is_file()


def test_methods_are_as_a_user_types_them() -> None:
    methods = {name: read_case(name).method for name in golden_cases.known_cases()}
    assert methods[CUT] == "dflash:cut=0.5" and methods["deepspec-dspark-vanilla"] == "dflash"
    assert methods["mtp-qwen3.5-hybrid"] == "mtp:3" and methods["specforge-p-eagle"] == "p-eagle:5"
    assert {method for name, method in methods.items() if name.startswith("zlab")} == {"dflash"}


def test_what_a_server_is_asked_is_cut_by_nothing() -> None:
    for case in map(read_case, golden_cases.known_cases()):
        for one in asked_prompts(case):
            assert len(one.prompt.tokens) == one.limit <= case.prompts[one.number - 1].max_new_tokens
            whole = 1 + sum(step.accepted + 1 for step in one.prompt.rounds)
            assert whole == one.limit or (whole > one.limit and not case.shrinks)
            assert 1 + sum(one.emitted) == one.limit and not one.prompt.stop_ids


# Differences, by what differs


def other(case: GoldenCase, **changes: Any) -> list[DecodedPrompt]:
    """The second prompt's third round, changed."""
    rounds = published(case)
    third = replace(rounds[1].rounds[2], **changes)
    rounds[1] = replace(rounds[1], rounds=(*rounds[1].rounds[:2], third, *rounds[1].rounds[3:]))
    return rounds


def test_the_first_differing_round_is_named() -> None:
    case = read_case(DOMINO)
    third = case.prompts[1].rounds[2]
    bent = (third.drafted[0] ^ 1, *third.drafted[1:])
    (difference,) = compare_rounds.differences_of(case, other(case, drafted=bent))
    assert (difference.prompt, difference.round, difference.part) == (2, 3, "drafted")
    assert (difference.anchor_at, difference.expected, difference.found) == (third.anchor_at, third.drafted, bent)
    (difference,) = compare_rounds.differences_of(case, other(case, accepted=third.accepted - 1))
    assert (difference.part, difference.expected, difference.found) == (
        "accepted",
        (third.accepted,),
        (third.accepted - 1,),
    )
    assert compare_rounds.num_equal_rounds(case, other(case, accepted=9 + third.accepted)) == case.num_rounds - (
        third.accepted < case.num_drafts
    )
    fewer = [replace(one, rounds=one.rounds[:-1]) for one in published(case)]
    assert next(compare_rounds.differences_of(case, fewer)).part == "rounds"
    longer = [replace(one, tokens=(*one.tokens, 7)) for one in published(case)]
    assert next(compare_rounds.differences_of(case, longer)).part == "tokens"


def test_a_cut_that_differs_is_a_difference() -> None:
    case = read_case(CUT)
    (difference,) = compare_rounds.differences_of(case, other(case, verified=99))
    assert difference.part == "verified" and difference.found == (99,)


def test_drafts_beyond_the_limit_are_not_compared() -> None:
    """z-lab's last block shrinks, and ours is cut afterwards."""
    case = read_case("zlab-causal-full")
    assert case.shrinks and not read_case(DOMINO).shrinks
    rounds = published(case)
    last = rounds[0].rounds[-1]
    assert len(last.drafted) == last.accepted == 2
    whole = replace(last, drafted=(*last.drafted, 5, 6, 7), accepted=5)
    rounds[0] = replace(rounds[0], rounds=(*rounds[0].rounds[:-1], whole))
    assert not list(compare_rounds.differences_of(case, rounds))
    assert compare_rounds.accepted_per_round(case, rounds) == pytest.approx(case.accepted_per_round)


# Our engine


def test_a_case_conforms_under_every_forward(main: Main, tmp_path: Path) -> None:
    code, out, _ = main("conform", DOMINO, CUT, "-o", "page.md")
    assert code == 0 and "2 of 2 cases conform." in out
    table, _, notes = out.partition("rounds equal = ")
    lines = [line.split() for line in table.splitlines() if line.startswith((DOMINO, CUT))]
    assert [line[2] for line in lines] == [*FORWARDS, *FORWARDS] and notes.count("size 12") == 2
    assert sum(line[-1] == "conforms" for line in lines) == 4  # heads of size 12 are none of numba's
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Conformance") and "sgl-project/SpecForge" in page and "conform specforge-domino" in page


@pytest.mark.parametrize(
    ("name", "edit", "reading"),
    [
        (DOMINO, {"dflash_config.shift_label": True}, "`shift_label` True"),
        (DOMINO, {"dflash_config.pure_draft_prefix_len": 1}, "`pure_draft_prefix_len` 1"),
        (XPRESS, {"num_jacobi_passes": 1}, "one pass"),
        ("zlab-sliding-default", {"sliding_window": 400}, "window ignored (400)"),
        ("zlab-dflash2", {"is_causal": True}, "causal block"),
        ("jetspec-causal-head", {"dflash_config.causal_head": False}, "read as plain DFlash (bidirectional)"),
    ],
)
def test_a_planted_fault_is_named(
    main: Main, planted: Callable[..., None], name: str, edit: dict[str, Any], reading: str
) -> None:
    planted(name, edit)
    code, out, _ = main("conform", name, "--forward", "torch", "--json")
    (found,) = json.loads(out)
    assert (code, found["state"]) == (1, "differs")
    assert [(one["reading"], one["how"]) for one in found["named"]] == [(reading, "rounds")]
    assert found["difference"]["round"] >= 1 and found["num_equal_rounds"] < found["num_rounds"]


def test_a_fault_is_named_in_words(main: Main, planted: Callable[..., None]) -> None:
    planted(XPRESS, {"num_jacobi_passes": 1})
    code, out, _ = main("conform", XPRESS, "--forward", "torch")
    assert code == 1 and "differs: one pass" in out and "0 of 1 case conforms." in out
    assert "round" in out and "and the publisher's code" in " ".join(out.split())


# Trees, and the probabilities of drawn tokens


def details_of(case: GoldenCase, forward: str) -> Conformance:
    """Rounds of a case that are taken for equal."""
    subject = CaseSubject.load(case, "cpu")
    target = target_of(subject.models.target, FORWARDS[forward].engine, FORWARDS[forward].kernels)
    checked = conform._Checked(subject, FORWARDS[forward], quiet)
    found = checked._with_details(target, Conformance(case, forward, "equal"))
    subject.close()
    return found


DETAILED = {
    "jetspec-causal-head": "trees",
    "zlab-dflash2": "drawn",
    "zlab-dflash2-sliding": "drawn",
    "zlab-sliding-default": "drawn",
}


@each("forward", ["torch", "transformers"])
@each("name", DETAILED)
def test_trees_and_drawn_blocks_are_the_publishers(name: str, forward: str) -> None:
    found = details_of(read_case(name), forward)
    assert (found.state, found.details) == ("equal", (DETAILED[name],))
    assert "equal, too: " in " ".join(show_conform.conform_text([found]).split())


def _undecided(self: Any, ids: Any, scores: Any, place: int, usual: Any = DraftSampler.sample_among) -> Any:
    return usual(self, ids, scores / 2, place)


def _narrow(self: Any, usual: Any = ExpandedTreeDrafter.whole_tree) -> Any:
    self.top_k = 2
    return usual(self)


@each(
    "name, place, wrong, part",
    [
        ("jetspec-causal-head", (ExpandedTreeDrafter, "whole_tree"), _narrow, "tree"),
        ("jetspec-causal-head", (ExpandedTreeDrafter, "whole_tree"), DDTreeDrafter.whole_tree, "tree_rounds"),
        ("zlab-dflash2", (DraftSampler, "sample_among"), _undecided, "q"),
        ("zlab-sliding-default", (Target, "forward"), None, "p"),
    ],
)
def test_a_wrong_tree_and_a_wrong_probability_are_found(
    name: str, place: tuple[Any, str], wrong: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Target.forward

    def other(self: Target, tokens: Any, *rest: Any, **options: Any) -> Any:
        """Passes that verify say something else."""
        read = usual(self, tokens, *rest, **options)
        return read if "keep_logits" in options else replace(read, logits=read.logits.roll(1, dims=-1))

    monkeypatch.setattr(*place, wrong or other)
    found = details_of(read_case(name), "torch")
    assert isinstance(found.difference, DetailDifference)
    assert (found.state, found.difference.part) == ("differs", part) and not found.details
    assert "the publisher" in show_conform.detail_text(found.difference)


def test_what_is_not_read_is_said_and_never_passes(main: Main, planted: Callable[..., None]) -> None:
    planted(DOMINO, {"dflash_config.an_unknown_key": 1})
    code, out, _ = main("conform", DOMINO, "--forward", "torch")
    assert code == 1 and "not read" in out and "'an_unknown_key'" in out
    assert "0 of 1 case conforms." in out


TRIED = {
    f"{name}, {reading.name}": (name, reading.name)
    for name in golden_cases.known_cases()
    for reading in read_case(name).readings
    if reading.can_be_tried
}


@pytest.mark.parametrize("which", TRIED)
def test_a_misreading_gives_here_what_it_gives_in_the_publishers_code(which: str) -> None:
    name, wanted = TRIED[which]
    case = read_case(name)
    (reading,) = [one for one in case.readings if one.name == wanted]
    rounds = decoded(case, reading)
    assert sum(1 for _ in compare_rounds.differences_of(case, rounds)) == reading.num_prompts
    if not case.overruns:
        assert compare_rounds.same_figure(compare_rounds.published_figure(case, rounds), reading)


def test_rows_that_disturb_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = conform.decode_prompts

    def disturbed(*given: Any, together: bool = False) -> list[DecodedPrompt]:
        found = original(*given, together=together)
        return [replace(found[0], rounds=found[0].rounds[:-1]), *found[1:]] if together else found

    monkeypatch.setattr(conform, "decode_prompts", disturbed)
    (found,) = conform.check_engine([read_case(DOMINO)], [FORWARDS["torch"]], RunRequest(), quiet)
    assert found.state == "differs" and found.difference is not None and found.difference.together
    assert "decoded together with others" in show_conform.conform_text([found])


def test_the_exit_status_counts_what_is_computed_by_nothing() -> None:
    case = read_case(DOMINO)
    none, equal = Conformance(case, "numba", "inapplicable", "why"), Conformance(case, "torch", "equal")
    assert conform.exit_status([none, equal]) == 0 and conform.exit_status([none]) == 1
    for state, status in (("differs", 1), ("unread", 1), ("failed", 1), ("untold", 2)):
        assert conform.exit_status([equal, replace(equal, state=state)]) == status  # type: ignore[arg-type]


@each(
    "words, named",
    [
        (["zlab-dflsh2"], "'zlab-dflsh2' 'zlab-dflash2' angelslim-dflare,"),
        ([DOMINO, "--forward", "hf"], "'hf' numba, torch, transformers"),
        (["--server", "http://127.0.0.1:9"], "--server CASE"),
        (["--suite", "gsm8k"], "--suite golden"),
        ([DOMINO, "--chats"], "--chats golden"),
        (["--server", "dflash=http://127.0.0.1:9", "--forward", "torch"], "--forward golden"),
        ([DOMINO, "--server", "http://127.0.0.1:9", "--forward", "torch"], "--forward --server"),
        ([DOMINO, "--server", "nowhere"], "--server http://"),
        ([DOMINO, "--dialect", "vllm"], "--dialect --server"),
        ([DOMINO, "--out", "absent/page.md"], "absent page.md"),
        ([DOMINO, "--device", "tpu"], "'tpu'"),
    ],
)
def test_what_cannot_be_done_is_one_line(main: Main, words: list[str], named: str) -> None:
    assert_refused(main("conform", *words), *named.split(" "))


# A server


@contextmanager
def serving(
    case: GoldenCase, says: Sequence[DecodedPrompt] | None = None, conversion: Conversion = WHOLE, **does: Any
) -> Iterator[FakeServer]:
    """Says what was decoded for what is asked, and counts it in its way."""
    asked = list(asked_prompts(case))
    said = {
        json.dumps(list(one.prompt.prompt)): (
            one,
            DecodedPrompt(one.prompt.tokens, one.prompt.rounds) if says is None else says[place],
        )
        for place, one in enumerate(asked)
    }

    def counts(prompt: str) -> AcceptanceCounts:
        one, spoken = said[prompt]
        accepted = [step.accepted for step in spoken.rounds]
        return conversion.convert(answer_of(spoken.tokens, accepted, case.num_drafts, one.limit))

    def count(prompt: str) -> Count:
        found = counts(prompt)
        return Count(found.rounds, found.drafted or 0, found.accepted, list(found.at or ()))

    behaviour: dict[str, Any] = {
        "answer": lambda prompt, _: said[prompt][1].tokens,
        "ends": frozenset(),
        "block": 1,
        "counts": count,
        "rounds": lambda prompt: [step.accepted for step in said[prompt][1].rounds],
    }
    with FakeServer(**{**behaviour, **does}) as running:
        yield running


LLAMACPP = rule_of("llamacpp.counters")
assert LLAMACPP is not None


@each("name", [DOMINO, "zlab-causal-full", "mtp-qwen3.5-hybrid"])
@each(
    "does, conversion",
    [
        ({"dialect": "vllm", "counts_by_request": True}, WHOLE),
        ({"dialect": "sglang"}, WHOLE),
        ({"dialect": "llamacpp"}, LLAMACPP.conversions[0]),
    ],
)
def test_a_server_that_answers_as_published_conforms(
    main: Main, name: str, does: dict[str, Any], conversion: Conversion
) -> None:
    if name.startswith("mtp"):
        pytest.importorskip("dflash_bench.engine.drafters.mtp", exc_type=ImportError)
    with serving(read_case(name), None, conversion, **does) as running:
        code, out, err = main("conform", name, "--server", running.url, "--json")
    assert code == 0, err
    (found,) = json.loads(out)
    assert (found["state"], found["num_equal_rounds"]) == ("equal", found["num_rounds"])
    assert set(found["compared"]) == {"rounds", "counts", "tokens"}
    sent = [body.get("prompt") or body.get("input_ids") for _, body, _ in running.asked if len(body) > 2]
    assert sent == [list(one.prompt.prompt) for one in asked_prompts(read_case(name))]


@pytest.mark.parametrize("tells_rounds", [True, False])
def test_a_server_that_reads_the_draft_wrongly_is_named(main: Main, tells_rounds: bool) -> None:
    case = read_case(DOMINO)
    asked = list(asked_prompts(case))
    reading = next(one for one in case.readings if one.name == "`pure_draft_prefix_len` 1")
    wrong = decoded(case, reading, asked)
    does = {} if tells_rounds else {"rounds": None}
    with serving(case, wrong, counts_by_request=True, **does) as running:
        code, out, _ = main("conform", DOMINO, "--server", running.url, "--json")
    (found,) = json.loads(out)
    assert (code, found["state"]) == (1, "differs")
    assert {"reading": reading.name, "how": "counts"} in found["named"]
    assert (found["difference"]["round"] is not None) == tells_rounds
    assert found["difference"]["part"] == ("accepted" if tells_rounds else "counts")


def test_a_server_that_norms_the_keys_of_all_layers_by_the_first_is_named(main: Main) -> None:
    name = "zlab-causal-full"
    asked = list(asked_prompts(read_case(name)))
    subject, target = loaded(name)
    sound = subject.drafter(target)
    assert isinstance(sound, DFlashDrafter)
    faulty = OneNorm(sound.draft, target.embedding, target.head, sound.block_size)
    wrong = conform.decode_prompts(target, faulty, [one.prompt for one in asked])
    with serving(read_case(name), wrong, counts_by_request=True) as running:
        code, out, _ = main("conform", name, "--server", running.url, "--json")
    assert (code, json.loads(out)[0]["named"]) == (1, [{"reading": ONE_NORM, "how": "counts"}])


def test_a_misreading_that_cannot_be_tried_is_known_by_its_figure(main: Main) -> None:
    """The engine accepts as many drafts as the publisher's code does with it."""
    case = read_case(DOMINO)
    reading = next(one for one in case.readings if one.name == "correction left out")
    assert not reading.can_be_tried
    total = round(reading.accepted_per_round * 117)
    assert f"{total / 117:.4g}" == f"{reading.accepted_per_round:.4g}"
    asked = list(asked_prompts(case))
    counts = [AcceptanceCounts(117, total, 117 * case.num_drafts, None, "vllm.request"), *[None] * (len(asked) - 1)]
    served = conform_server.Served(case, asked, (), "vllm", "vllm", quiet)
    named = list(served._explanations(counts, WHOLE))
    assert [(one.reading, one.how) for one in named] == [(reading.name, "totals")]


def test_another_number_of_drafts_and_another_text_are_seen(main: Main) -> None:
    case = read_case(DOMINO)
    bent = [DecodedPrompt(one.prompt.tokens, one.prompt.rounds) for one in asked_prompts(case)]
    bent[0] = replace(bent[0], tokens=(*bent[0].tokens[:4], bent[0].tokens[4] ^ 1, *bent[0].tokens[5:]))
    with serving(case, bent, counts_by_request=True) as running:
        code, out, _ = main("conform", DOMINO, "--server", running.url)
    assert code == 1 and "from token 4 " in " ".join(out.split())
    by_prompt = {json.dumps(list(one.prompt.prompt)): one.decoded(9) for one in asked_prompts(case)}

    def wide(prompt: str) -> Count:
        counts = WHOLE.convert(by_prompt[prompt])
        return Count(counts.rounds, counts.drafted or 0, counts.accepted, list(counts.at or ()))

    with serving(case, counts=wide, counts_by_request=True) as running:
        code, out, _ = main("conform", DOMINO, "--server", running.url)
    assert code == 1 and "9 tokens drafted per round" in " ".join(out.split())


def test_a_server_that_hides_its_counts_cannot_be_told(main: Main) -> None:
    with serving(read_case(DOMINO), has_metrics=False) as running:
        code, out, _ = main("conform", DOMINO, "--server", running.url)
    assert code == 2 and "cannot tell" in out and "start vLLM with" in " ".join(out.split())


def test_a_server_without_prompts_of_ids_and_a_failed_answer(main: Main) -> None:
    case = read_case(DOMINO)
    with serving(case, dialect="openai") as running:
        code, out, err = main("conform", DOMINO, "--server", running.url)
    assert (code, out) == (2, "") and "openai" in err and "--dialect" in err
    with serving(case, faults={1: "500"}) as running:
        code, out, _ = main("conform", DOMINO, "--server", running.url)
    assert code == 1 and "failed: HTTP 500" in " ".join(out.split())


def test_a_round_of_a_chain_has_no_verified_tree() -> None:
    assert CaseRound(3, (1, 2), 1).verified is None
