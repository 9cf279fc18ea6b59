"""Edited by hand, or measured by something broken: times, counts, texts and scores of a row that do not fit are found.

The run is a real one of nano: what is sound passes all checks, and each edit of it alone fails one.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.core.types import CEILINGS, Generation
from dflash_bench.engine.backend import LocalBackend, RequestTrace
from dflash_bench.results import parts, row_checks, store, table
from dflash_bench.runner import stopwatch
from dflash_bench.tasks import sandbox, scorers
from dflash_bench.tasks.scorers.base import Score, Scorer
from helpers import fake_backend
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.runs import known, listed

Main = Callable[..., tuple[int, str, str]]
Row = dict[str, Any]
WORDS = ("run", "--suite", "gsm8k", "--limit", 3, "--max-new-tokens", 64, "--threads", 1, "--out", "run")
BOTH = ("--method", "dflash", "--method", "eagle3-tree", "--concurrency", "1,3")
CELL = "dflash", 1
"""Method and concurrency of the answers whose scores are edited."""
LISTS = ("drafted", "accepted", "emitted", "draft_s", "verify_s", "round_s")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert fake_backend.main(patched, *WORDS, *BOTH) == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy; where it lies is the current folder of `main`."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edited(run: Path, change: Callable[[Row], Row], is_meant: Callable[[Row], bool] = lambda _: True) -> int:
    """All parts written again by somebody who knows the format, by the runner's own clock, whose call lasts for
    days, and by no counter; how many rows were changed."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    num = 0
    for part in parts.of(run):
        table = parquet.read_table(part)
        rows = table.to_pylist()
        for row in filter(is_meant, rows):
            row.update(change(row) | {"clock_s": 1e6})
            num += 1
        parquet.write_table(arrow.Table.from_pylist(rows, table.schema), part)
    listed(run)
    return num


def once(method: str, concurrency: int = 1) -> Callable[[Row], bool]:
    """The first of a method's answers that has three rounds at least."""
    left = [True]

    def is_first(row: Row) -> bool:
        fits = row["method"] == method and row["concurrency"] == concurrency and len(row["accepted"]) > 2
        return fits and bool(left) and left.pop()

    return is_first


def first_draft(row: Row) -> int:
    """The first round that accepts something, and does not end the answer."""
    return next(at for at, count in enumerate(row["accepted"][:-1]) if count)


def ids_of(row: Row, at: int) -> tuple[int, int]:
    before = sum(row["drafted"][:at])
    return before, before + row["drafted"][at]


def every_time(by: float) -> Callable[[Row], Row]:
    names = ("prefill_s", "decode_s", "draft_prefill_s", "start_s", "end_s")
    return lambda row: {
        name: [by * one for one in row[name]] if name in LISTS else by * row[name]
        for name in (*names, "draft_s", "verify_s", "round_s")
    }


def halved_counts(row: Row) -> Row:
    return {"drafted": [count // 2 for count in row["drafted"]]}


def halved_ids(row: Row) -> Row:
    """The second half of each round's draft was never there; of rounds that accepted less, nothing else shows it."""
    kept = [max(count // 2, have) for count, have in zip(row["drafted"], row["accepted"], strict=True)]
    ids = [row["drafted_ids"][slice(*ids_of(row, at))][: kept[at]] for at in range(len(kept))]
    return {"drafted": kept, "drafted_ids": [one for block in ids for one in block]}


def merged(row: Row) -> Row:
    """The first two rounds told as one, with a draft that fits what it accepted."""
    first, second, *_ = row["accepted"]
    whole = [first + second + 1, *row["accepted"][2:]]
    counts = {"accepted": whole, "emitted": [sum(row["emitted"][:2]), *row["emitted"][2:]]}
    times = {name: [sum(row[name][:2]), *row[name][2:]] for name in ("draft_s", "verify_s", "round_s")}
    ids = row["token_ids"][1 : 2 + whole[0]] + row["drafted_ids"][sum(row["drafted"][:2]) :]
    return counts | times | {"drafted": [whole[0] + 1, *row["drafted"][2:]], "drafted_ids": ids}


def another_id(row: Row) -> Row:
    at = ids_of(row, first_draft(row))[0]
    return {"drafted_ids": [*row["drafted_ids"][:at], row["drafted_ids"][at] + 1, *row["drafted_ids"][at + 1 :]]}


def one_more_was_right(row: Row) -> Row:
    """A round's last accepted token is reported as the target's own, in a separate round."""
    at = first_draft(row)
    split = {name: [*row[name][:at], row[name][at], *row[name][at:]] for name in LISTS}
    split["accepted"][at : at + 2] = [row["accepted"][at] - 1, 0]
    split["emitted"][at : at + 2] = [row["accepted"][at], 1]
    halves = {name: [*row[name][:at], *[row[name][at] / 2] * 2, *row[name][at + 1 :]] for name in LISTS[3:]}
    begin, end = ids_of(row, at)
    block = row["drafted_ids"][begin:end]
    parents = row["drafted_parents"]
    again = {"drafted_ids": [*row["drafted_ids"][:end], *block, *row["drafted_ids"][end:]]}
    if parents is not None:
        again["drafted_parents"] = [*parents[:end], *parents[begin:end], *parents[end:]]
    return split | halves | again


def moved(by: float) -> Callable[[Row], Row]:
    return lambda row: {"start_s": row["start_s"] + by, "end_s": row["end_s"] + by}


def excused(tolerance: float, gap: float) -> Callable[[Row], Row]:
    return lambda row: {"audit": "near_tie", "audit_index": 2, "audit_gap": gap, "audit_tolerance": tolerance}


EDITS: dict[str, tuple[Callable[[Row], Row], Callable[[], Callable[[Row], bool]], str]] = {
    "decode_s a third of its rounds": (
        lambda row: {"decode_s": 0.3 * sum(row["round_s"])},
        lambda: once("dflash"),
        "its rounds took longer than",
    ),
    "decode_s twice its rounds": (
        lambda row: {"decode_s": 2 * row["decode_s"]},
        lambda: once("ar"),
        "its rounds took less than decode_s",
    ),
    "a shared row's decode_s halved": (
        lambda row: {"decode_s": row["decode_s"] / 2},
        lambda: once("dflash", 3),
        "its rounds took longer than",
    ),
    "all times of a row halved": (
        # Where it now lies another answer may have been measured.
        every_time(0.5),
        lambda: once("eagle3-tree"),
        "do not add up to what the run|while another answer was",
    ),
    "all times of all rows halved": (every_time(0.5), lambda: lambda _: True, "do not add up to what the run"),
    "decode_s and its rounds halved": (
        lambda row: every_time(0.5)(row) | {name: row[name] for name in ("start_s", "end_s")},
        lambda: once("dflash", 3),
        "prefill_s and decode_s are shorter than from start_s",
    ),
    "a round shorter than its draft": (
        lambda row: {"draft_s": [row["round_s"][0] * 1.1, *row["draft_s"][1:]]},
        lambda: once("dflash"),
        "drafting and verifying took longer than their round",
    ),
    "an interval without room for its times": (
        lambda row: {"end_s": row["start_s"] + row["decode_s"] / 2},
        lambda: once("ar"),
        "are longer than from start_s",
    ),
    "one answer beside others": (
        lambda row: {"start_s": 0.0},
        lambda: once("dflash"),
        "it was measured while another answer was",
    ),
    "an answer after the run": (moved(1000), lambda: once("dflash"), "it ended after the run"),
    "an answer before the run": (moved(-1000), lambda: once("dflash"), "it began before the run"),
    "drafted halved": (halved_counts, lambda: once("dflash"), "a round accepts more tokens than it drafts"),
    "fewer ids than drafted": (
        lambda row: {"drafted_ids": row["drafted_ids"][:-7]},
        lambda: once("dflash"),
        "are not as many as were drafted",
    ),
    "drafted and drafted_ids halved": (halved_ids, lambda: once("dflash"), "drafts less than its method's block"),
    "more drafted than a block": (
        lambda row: {"drafted": [16, *row["drafted"][1:]], "drafted_ids": [0, *row["drafted_ids"]]},
        lambda: once("dflash"),
        "a round drafts more tokens than its method can",
    ),
    "two rounds told as one": (merged, lambda: once("dflash"), "a round drafts "),
    "another id in a chain": (another_id, lambda: once("dflash"), "what a round accepted is not what it drafted"),
    "another id in a tree": (
        lambda row: {"drafted_ids": [7] * len(row["drafted_ids"])},
        lambda: once("eagle3-tree"),
        "what a round accepted is not what it drafted",
    ),
    "parents after their children": (
        lambda row: {"drafted_parents": [1, *row["drafted_parents"][1:]]},
        lambda: once("eagle3-tree"),
        "drafted_parents are no tree",
    ),
    "less accepted in a chain": (one_more_was_right, lambda: once("dflash"), "a round accepted less than was right"),
    "less accepted in a tree": (one_more_was_right, lambda: once("eagle3-tree"), "a round accepted less than was"),
    "an answer that goes on behind its stop": (
        lambda row: {"finish_reason": "length" if row["finish_reason"] == "stop" else "stop"},
        lambda: once("dflash"),
        "it does not end at its first stop token",
    ),
    "more thinking than text": (
        lambda row: {"num_thinking_tokens": 1, "num_thinking_chars": len(row["text"]) + 1},
        lambda: once("dflash"),
        "it has more thinking than tokens or text",
    ),
    "thinking without a token": (
        lambda row: {"num_thinking_chars": 1},
        lambda: once("ar"),
        "it has more thinking than tokens or text",
    ),
    "rounds hidden": (
        lambda row: dict.fromkeys((*LISTS, "drafted_ids", "drafted_parents")) | {"total_rounds": 2},
        lambda: once("dflash"),
        "drafted is missing, which the engine always stores",
    ),
    "drafts hidden": (
        lambda row: {"drafted_ids": None, "drafted_parents": None},
        lambda: once("dflash"),
        "drafted_ids is missing, which the engine always stores",
    ),
    "tokens that only servers hide": (
        lambda row: {"token_ids": [], "num_hidden_tokens": len(row["token_ids"]), **dict.fromkeys(LISTS)},
        lambda: once("dflash"),
        "num_hidden_tokens is set, which only servers report",
    ),
    "an audit of float32 that excuses 25 logits": (
        excused(26, 25),
        lambda: once("dflash"),
        "a verdict excuses more than rounding can",
    ),
}


@each("what", EDITS)
def test_an_edit_is_named(what: str, run: Path) -> None:
    change, which, told = EDITS[what]
    assert edited(run, change, which())
    found = table.read_run(run, judging=True).problems
    assert {one.kind for one in found} == {"invalid"}
    assert any(re.search(told, one.what) for one in found), [one.what for one in found]


def test_an_edit_fails_the_check_and_is_refused_by_compare(run: Path, main: Main) -> None:
    edited(run, every_time(0.5))
    code, out, err = main("check", "run", "--json")
    assert (code, err) == (1, "")
    assert {check["kind"] for check in json.loads(out)["checks"] if check["failed"]} == {"invalid"}
    assert_refused(main("compare", "run"), "run is invalid: ")


def test_what_is_sound_passes_and_says_what_it_tried(run: Path, main: Main) -> None:
    _, out, err = main("check", "run")
    assert err == "" and "were not checked" not in out
    assert table.read_run(run).problems == ()


def test_a_row_that_was_edited_is_measured_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    before = {store.key(row): row for row in store.load(run)[1]}
    assert edited(run, lambda row: {"decode_s": row["decode_s"] / 2}, once("dflash")) == 1
    assert fake_backend.main(monkeypatch, *WORDS, *BOTH, "--resume") == 0
    after = {store.key(row): row for row in store.load(run)[1]}
    assert after.keys() == before.keys()
    assert len([place for place in before if before[place] != after[place]]) == 1


TOLD = {
    "texts": (lambda row: {"text": row["text"] + " #### 42"}, "text", "its text is not what its tokens say"),
    "thinking": (
        lambda row: {"num_thinking_tokens": 5, "num_thinking_chars": 1},
        "text",
        "its text is not what its tokens say",
    ),
    "all right": (lambda row: {"passed": True}, "score", "scored right, but gsm8k_number says wrong"),
    "all wrong": (lambda row: {"passed": False}, "score", "scored wrong, but gsm8k_number says right"),
    "answers": (lambda row: {"answer": "1234567"}, "score", "its answer is not what gsm8k_number takes from its text"),
    "values": (lambda row: {"score": 0.5}, "score", "scored 0.5, but gsm8k_number says None"),
}


@each("what", TOLD)
def test_edited_texts_and_scores_fail_the_check_by_name(what: str, run: Path, main: Main) -> None:
    change, kind, told = TOLD[what]
    edited(run, change)
    code, out, err = main("check", "run", "--json")
    failed = [check for check in json.loads(out)["checks"] if check["failed"]]
    assert failed, "no answer of this run is otherwise"
    assert (code, err, {check["kind"] for check in failed}) == (1, "", {kind})
    assert all(told in check["reason"] for check in failed)
    shown = db.load("run").metrics()
    contradicted = {check["method"] for check in failed if kind == "score"}
    assert not contradicted & {*shown[shown["metric"].isin(("passed", "score"))]["method"]}


@each("what, is_shown, is_found", [("thinking", False, True), ("answers", True, False)])
def test_scores_need_not_be_tried_again(what: str, is_shown: bool, is_found: bool, run: Path, main: Main) -> None:
    change, kind, _ = TOLD[what]
    edited(run, change)
    code, out, _ = main("report", "run")
    assert code == 0 and ("is scored wrongly" in out.splitlines()[0]) == is_shown
    code, out, _ = main("check", "run", "--no-rescore", "--json")
    assert (kind in {check["kind"] for check in json.loads(out)["checks"]}) == is_found


Values = list[tuple[bool, Any]]
"""Scores that a reader shows: whether the edited cell's, and None where they are left out."""


def shares(*words: object) -> Callable[[Main], Values]:
    return lambda main: [
        ((cell["method"], cell["settings"]["concurrency"]) == CELL and cell.get("run") != "sound", cell["passed"])
        for cell in json.loads(main(*words)[1])["cells"]
    ]


def lines(*words: object) -> Callable[[Main], Values]:
    """Rows of the first table: the share is the last column but one."""

    def read(main: Main) -> Values:
        table = main(*words)[1].partition("per round")[0]
        found = re.findall(r"concurrency (\d)\)\n.*\n +dflash .* (\S+) +\S+\n", table)
        return [(number == "1", None if share == "n/a" else share) for number, share in found]

    return read


def of_page(path: str, *words: object) -> Callable[[Main], Values]:
    def read(main: Main) -> Values:
        assert main(*words)[0] == 0
        (packed,) = re.findall(r'type="application/octet-stream">(.*?)</script>', Path(path).read_text(), re.DOTALL)
        rows = json.loads(zlib.decompress(b64decode(packed)))["rows"]
        own = [row for row in rows if row["method"] == "dflash"]
        return [("concurrency 1" in row["suite"], row.get(name)) for row in own for name in ("passed", "answer")]

    return read


def of_answers(_: Main) -> Values:
    answers = db.load("run").answers
    own = answers[answers["method"] == "dflash"]
    return [
        (not is_other, None if one != one else one)
        for name in ("passed", "answer")
        for is_other, one in zip(own["settings"].str.contains("concurrency"), own[name], strict=True)
    ]


READERS: dict[str, Callable[[Main], Values]] = {
    "report": shares("report", "run", "--format", "json"),
    "report --by": lines("report", "run", "--by", "category"),
    "page": of_page("page.html", "report", "run", "-o", "page.html"),
    "index": of_page("site/run.html", "index", ".", "-o", "site"),
    "compare": shares("compare", "run", "--json"),
    "compare of two": shares("compare", "sound", "run", "--json"),
    "closing screen": shares(*WORDS, *BOTH, "--resume", "--json"),
    "answers": of_answers,
}


@each("reader", READERS)
def test_no_reader_shows_a_score_that_check_refuses(reader: str, run: Path, main: Main) -> None:
    if reader == "compare of two":
        shutil.copytree(run, "sound")
    edited(run, lambda row: {"passed": not row["passed"]}, lambda row: (row["method"], row["concurrency"]) == CELL)
    shown = READERS[reader](main)
    assert {is_edited for is_edited, _ in shown} == {True, False}
    assert all((value is None) == is_edited for is_edited, value in shown), shown


def test_scores_that_check_refuses_are_no_baseline(run: Path, main: Main) -> None:
    edited(run, lambda row: {"passed": not row["passed"]}, lambda row: (row["method"], row["concurrency"]) == CELL)
    code, _, err = main("baseline", "run", "-o", "base.json")
    assert code == 2 and "is scored wrongly" in err and not Path("base.json").exists()


@each(
    "damage",
    [{"reference": "none"}, {"row": "{"}, {"turns": None}],
)
@each("command", ["check", "compare", "report"])
def test_prompts_that_no_answer_can_be_scored_by_are_refused(command: str, damage: Row, run: Path, main: Main) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    table = parquet.read_table(run / "prompts.parquet")
    first, *rest = table.to_pylist()
    parquet.write_table(arrow.Table.from_pylist([first | damage, *rest], table.schema), run / "prompts.parquet")
    code, out, err = main(command, "run")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.skipif(sandbox.strongest() is None, reason="nothing here sandboxes model-written code")
def test_scores_of_code_are_tried_where_it_is_asked_for(main: Main, tmp_path: Path) -> None:
    asked = "--suite humaneval --method ngram --limit 2 --out run".split()
    assert main("run", *asked)[0] == 0
    assert "--rescore" in main("check", "run")[1]
    code, out, err = main("check", "run", "--rescore")
    assert (code, err) == (0, "") and "were not checked" not in out
    edited(tmp_path / "run", lambda row: {"passed": not row["passed"]}, once("ngram"))
    assert main("check", "run")[0] == 0
    code, out, _ = main("check", "run", "--rescore", "--json")
    (failed,) = [check for check in json.loads(out)["checks"] if check["failed"]]
    assert code == 1 and failed["kind"] == "score" and "but humaneval says" in failed["reason"]


def test_texts_are_not_tried_without_the_tokenizer_and_check_says_so(
    run: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(run, lambda row: {"text": row["text"] + "!"})
    monkeypatch.setattr("dflash_bench.diagnose.reread._tokenizers", lambda _: iter([Path("absent")]))
    out = main("check", "run", "--no-rescore")[1]
    assert "note: texts were not checked: " in out and "tokenizer" in out


# Records of a broken tool


def halved(sound: Callable[..., Generation]) -> Callable[..., Generation]:
    def generation(*args: Any) -> Generation:
        answer = sound(*args)
        return replace(answer, decode_s=answer.decode_s / 2)

    return generation


def told_as_one(sound: Callable[..., Generation]) -> Callable[..., Generation]:
    """Rounds in pairs, in the engine's own bookkeeping, where a draft has the width of both."""

    def generation(*args: Any) -> Generation:
        answer = sound(*args)
        assert answer.accepted is not None and answer.emitted is not None
        if not any(answer.drafted or ()) or len(answer.accepted) < 3:
            return answer
        row = {name: list(getattr(answer, name)) for name in (*LISTS, "drafted_ids", "token_ids")}
        return replace(answer, **{name: tuple(value) for name, value in merged(row).items()})

    return generation


RULES = {
    "decode_s halved": (halved, ("ar", "dflash"), "its rounds took longer than decode_s"),
    "rounds told as one": (told_as_one, ("dflash",), "cannot be right: a round "),
}


@each("what", RULES)
def test_bookkeeping_that_is_broken_gives_failed_rows(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    broken, methods, told = RULES[what]
    # Without the runner's own clock and counter, which would be the first to object.
    monkeypatch.setattr(stopwatch, "objection", lambda *_, **__: None)
    monkeypatch.setattr(stopwatch.Stopwatch, "clock_s", lambda *_: 1e6)
    monkeypatch.setattr(RequestTrace, "generation", broken(RequestTrace.generation))
    assert fake_backend.main(monkeypatch, *WORDS) == 1
    rows = [row for row in store.load(Path("run"))[1] if row.method in methods]
    errors = {row.generation.error for row in rows}
    assert rows and all(told in str(error) for error in errors), errors
    assert "cannot be right: " in " ".join(capsys.readouterr().out.split())


def test_texts_that_the_engine_turns_around_give_failed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    decode = LocalBackend.decode
    monkeypatch.setattr(LocalBackend, "decode", lambda self, ids: decode(self, ids)[::-1])
    assert fake_backend.main(monkeypatch, *WORDS) == 1
    rows = store.load(Path("run"))[1]
    assert all("its text is not what its tokens say" in str(row.generation.error) for row in rows)


def test_a_scorer_that_is_always_right_is_found_by_a_sound_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(scorers.SCORERS.own, "gsm8k_number", Scorer(lambda prompt, _: Score(prompt.reference, True)))
        assert fake_backend.main(patched, *WORDS) == 0
    code, out, _ = main("check", "run")
    assert code == 1 and "gsm8k_number" in out


def test_the_ceilings_are_those_of_the_judge() -> None:
    from dflash_bench.engine import judge

    assert {str(kind).removeprefix("torch."): value for kind, value in judge.CEILINGS.items()} == CEILINGS
    assert row_checks.RunFacts.of(known(dtype="bfloat16")).ceiling == 2.0
    assert row_checks.RunFacts.of(known(dtype="float64")).ceiling == CEILINGS["float32"]


def test_each_law_has_a_name_of_its_own() -> None:
    assert len({one.why for one in row_checks.ROW_CHECKS}) == len(row_checks.ROW_CHECKS) > 40
