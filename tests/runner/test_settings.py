"""Several settings in one run: each is a cell of its own, from the plan to every table; many runs are one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from dflash_bench.analysis import scores
from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.core import methods
from dflash_bench.core.methods import MethodSpec
from dflash_bench.core.types import Answer, Divergence, Generation, Listener, Message, Settings
from dflash_bench.diagnose import reread
from dflash_bench.models import chat
from dflash_bench.report import plots, read_document
from dflash_bench.report.compare import compared
from dflash_bench.report.plots.style import Material
from dflash_bench.results import parts, run_info, store
from dflash_bench.results import table as results_table
from dflash_bench.results.identity import full_names, settings_to_json, short_names
from dflash_bench.results.run_info import read_info
from dflash_bench.runner.work import WorkPlan
from helpers.each import each
from helpers.fake_backend import FakeBackend, other_tokens
from helpers.rows import drafted, generation, pair, plain
from helpers.runs import answers, bare, frame_of, listed, slower, stored
from helpers.work import Runs, Watch, loaded, prompts

Main = Callable[..., tuple[int, str, str]]
GREEDY, SAMPLED = Settings(0.0, thinking=False), Settings(1.0, top_p=0.9, thinking=False)


def both(seed: int = 0, **changes: Any) -> list[Answer]:
    """Two settings: sampled answers accept less, and are judged by nobody."""
    rows = answers(seed=seed, settings=GREEDY)
    unjudged = {"exactness": None, "settings": SAMPLED}
    kept = [0, 3, 0, 4]
    sampled = [
        replace(row, order=48 + row.order, passed=row.passed, **unjudged)
        for number in range(24)
        for row in pair(f"p{number:03}", kept, order=2 * number)
    ]
    scored = [replace(row, passed=True) for row in sampled]
    return [*rows, *(replace(row, **changes) if row.method == "dflash" else row for row in scored)]


def of_both(folder: Path, rows: Sequence[Answer] | None = None, **identity: Any) -> Path:
    return stored(folder, rows or both(), settings=settings_to_json([GREEDY, SAMPLED]), **identity)


def rewritten(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Every row, as somebody might edit it."""
    import pyarrow as pa
    from pyarrow import parquet

    (part,) = parts.of(run)
    table = parquet.read_table(part)
    parquet.write_table(pa.Table.from_pylist(list(map(change, table.to_pylist())), table.schema), part)
    listed(run)


# Names


def test_settings_are_told_apart_by_what_differs_and_nothing_else() -> None:
    assert full_names([SAMPLED])[SAMPLED] == "temperature 1, top p 0.9, thinking off"
    assert short_names([SAMPLED]) == {SAMPLED: ""}
    assert short_names([GREEDY, SAMPLED]) == {GREEDY: "temperature 0", SAMPLED: "temperature 1"}
    wider = replace(SAMPLED, top_p=1.0)
    assert short_names([SAMPLED, wider]) == {SAMPLED: "top p 0.9", wider: "top p 1"}
    thinks = replace(GREEDY, thinking=True)
    assert short_names([GREEDY, thinks]) == {GREEDY: "thinking off", thinks: "thinking on"}


# The runner


def test_each_prompt_is_asked_under_all_settings_before_the_next(tmp_path: Path) -> None:
    watch = Watch()
    plan = WorkPlan((loaded(*prompts(2)),), ("ar", "dflash"), settings=(GREEDY, SAMPLED))
    records = Runs(tmp_path / "run")(plan, FakeBackend(), watch)
    assert [(row.prompt_id, row.settings.temperature, row.method) for row in records] == [
        ("p0", 0, "ar"),
        ("p0", 0, "dflash"),
        ("p0", 1, "dflash"),
        ("p0", 1, "ar"),
        ("p1", 0, "dflash"),
        ("p1", 0, "ar"),
        ("p1", 1, "ar"),
        ("p1", 1, "dflash"),
    ]
    assert [row.order for row in records] == list(range(8)) == list(range(plan.num_generations))
    # Only what is decoded greedily is judged.
    assert {(row.settings, row.exactness) for row in records if row.method == "dflash"} == {
        (GREEDY, "exact"),
        (SAMPLED, None),
    }
    assert "gsm8k · dflash temperature 1" in watch.told and "gsm8k · dflash" not in watch.told


def test_a_later_turn_sees_the_plain_answer_of_its_own_settings(tmp_path: Path) -> None:
    class Tempered(FakeBackend):
        def generate(
            self, method: str, messages: Sequence[Message], settings: Settings, repeat: int, listener: Listener
        ) -> Any:
            answer = super().generate(method, messages, settings, repeat, listener)
            return replace(answer, text=f"{method} at {settings.temperature:g}, {repeat}")

    plan = WorkPlan((loaded(*prompts(1, 2)),), ("ar", "dflash"), repeats=2, settings=(GREEDY, SAMPLED))
    backend = Tempered()
    Runs(tmp_path / "run")(plan, backend)
    second = [messages[1].content for _, messages in backend.calls if len(messages) == 3]
    assert sorted(second) == sorted(2 * [f"ar at {t}, {repeat}" for t in (0, 1) for repeat in (0, 1)])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return Runs(tmp_path_factory.mktemp("unbroken") / "run")(TWICE, FakeBackend())


TWICE = WorkPlan((loaded(*prompts(2)),), ("ar", "dflash"), repeats=2, settings=(GREEDY, SAMPLED))


@each("call", range(1, 22, 3))
def test_a_run_of_several_settings_that_ends_anywhere_continues(
    tmp_path: Path, unbroken: list[Answer], call: int
) -> None:
    plan, runs = TWICE, Runs(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runs(plan, FakeBackend(fails_at={call: KeyboardInterrupt()}))
    records = runs(plan, FakeBackend())

    def what(rows: list[Answer]) -> list[Any]:
        return [(store.key(row), row.order, row.exactness) for row in sorted(rows, key=lambda row: row.order)]

    assert what(records) == what(unbroken)


def test_the_runs_clock_never_goes_back_and_a_resumed_run_goes_on_after_the_last_answer(tmp_path: Path) -> None:
    plan = WorkPlan((loaded(*prompts(3)),), ("ar",))
    runs = Runs(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runs(plan, FakeBackend(fails_at={3: KeyboardInterrupt()}))
    info = read_info(runs.folder).to_json()
    with store.resume(runs.folder, info) as run:
        # The run seems long, and the wall clock is now behind it.
        late = [replace(row, end_s=5_000.0) for row in run.stored.values()]
        run.stored.update({store.key(row): row for row in late})
        assert (
            run._elapsed(run_info.with_changes(read_info(runs.folder), {"started": "2099-01-01T00:00:00+00:00"}))
            == 5_000
        )
        assert (
            run._elapsed(run_info.with_changes(read_info(runs.folder), {"started": "2020-01-01T00:00:00+00:00"}))
            > 100_000_000
        )
    records = runs(plan, FakeBackend())
    times = [time for row in records for time in (row.start_s, row.end_s)]
    assert None not in times and times == sorted(times)  # type: ignore[type-var]


# Stored rows


def test_rows_of_many_runs_are_one_table_in_which_no_query_mixes_two_of_them(tmp_path: Path) -> None:
    first = of_both(tmp_path / "a", run_id="a")
    second = of_both(tmp_path / "b", slower(both(), 2), run_id="b", model="qwen3-8b", dtype="bfloat16", seed=3)
    files = sorted(map(str, [*first.glob("part-*.parquet"), *second.glob("part-*.parquet")]))
    table = pyarrow.dataset.dataset(files, format="parquet").to_table()
    rows = table.to_pandas()
    counts = rows.groupby(["run_id", "model", "method", "temperature"]).size()
    assert counts.to_dict() == {
        (run, model, method, temperature): 24
        for run, model in ((read_info(first).run_id, "nano"), (read_info(second).run_id, "qwen3-8b"))
        for method in ("ar", "dflash")
        for temperature in (0.0, 1.0)
    }
    last = rows.iloc[-1]
    assert (last["dtype"], last["device"], last["seed"], last["source"]) == ("bfloat16", "cpu", 3, "embedded")
    assert json.loads(last["method_options"]) == {"num_drafts": 4}
    assert (last["top_p"], last["thinking"]) == (0.9, False)


def test_prompts_stand_once_beside_the_parts(tmp_path: Path) -> None:
    from dflash_bench.runner import work

    opening = (Message("tools", "[]"), Message("system", "be brief", '{"name": "x"}'))
    closing, slices = (Message("tool", "31 degrees", '{"tool_call_id": "c1"}'),), {"language": "da"}
    right = {"reference": "42", "alternatives": ("43",)}
    some = prompts(2, 2, opening=opening, closing=closing, slices=slices, category="maths", **right)
    plan = WorkPlan((loaded(*some),), ("ar",))
    rows = work.prompt_rows(plan)
    with store.create(tmp_path / "run", bare()) as run:
        run.keep_prompts(rows)
        run.keep_prompts(rows[:1])  # what is there stays
    assert run_info.read_prompts(tmp_path / "run") == rows
    assert rows[1]["turns"] == ["question 1", "and then? 1"]
    assert rows[1]["opening"][1] == {"role": "system", "content": "be brief", "more": '{"name": "x"}'}
    assert rows[1]["slices"] == [{"column": "language", "value": "da"}]
    assert run_info.read_slices(tmp_path / "run") == {"language": {("gsm8k", f"p{n}"): "da" for n in range(2)}}
    read_again = scores.prompt_of(run_info.read_prompts(tmp_path / "run")[1])
    assert read_again == replace(some[1], slices={}), "what is scored again is what was asked"
    (tmp_path / "run" / "prompts.parquet").write_bytes(b"PAR1")
    with pytest.raises(Exception, match=r"cannot read .*prompts\.parquet"):
        run_info.read_prompts(tmp_path / "run")


# Is it whole?


def test_what_is_missing_or_foreign_is_told_by_its_settings(tmp_path: Path, main: Main) -> None:
    rows = both()
    of_both(tmp_path / "run", rows)
    assert main("report", "run")[0] == 0
    short = [row for row in rows if (row.settings, row.method, row.prompt_id) != (SAMPLED, "dflash", "p003")]
    plan = read_info(tmp_path / "run").to_json()["plan"]
    of_both(tmp_path / "short", short, plan=plan)
    told = main("report", "short")[2]
    assert "gsm8k temperature 1 dflash: 1 of 24 " in told and "p003" in told
    rewritten(tmp_path / "run", lambda row: row | {"temperature": 0.5})
    told = main("report", "run")[2]
    assert "not in the plan" in told and "p000" in told
    # A plain answer was swapped for that of the other settings: its own is there twice, theirs is missing.
    of_both(tmp_path / "swapped", rows)
    sampled = {"temperature": 1.0, "top_p": 0.9}
    rewritten(tmp_path / "swapped", lambda row: row | (sampled if row["prompt_id"] < "p005" else {}))
    assert "gsm8k temperature 0 plain: 5 of 24 " in main("report", "swapped")[2]


def test_only_greedy_answers_must_have_been_compared(tmp_path: Path, main: Main) -> None:
    rows = [replace(row, exactness=None) if row.prompt_id == "p001" else row for row in both()]
    of_both(tmp_path / "run", rows)
    told = main("report", "run")[2]
    assert "gsm8k temperature 0 dflash: 1 answer " in told and "not compared" in told
    assert "temperature 1" not in told


# Results of several settings


def cells(run: Path) -> dict[tuple[str, str], Cell]:
    results = results_table.read_run(run)
    return {(c.setting, c.method): c for c in summarise(results.rows, results.info.identity)}


def test_each_settings_have_figures_of_their_own_against_their_own_baseline(tmp_path: Path) -> None:
    both_cells = cells(of_both(tmp_path / "run"))
    assert list(both_cells) == [
        ("temperature 0", "ar"),
        ("temperature 0", "dflash"),
        ("temperature 1", "ar"),
        ("temperature 1", "dflash"),
    ]
    alone = cells(stored(tmp_path / "alone", answers(settings=GREEDY), settings=settings_to_json([GREEDY])))
    assert both_cells["temperature 0", "dflash"].figures == alone["", "dflash"].figures
    assert both_cells["temperature 1", "dflash"].value("al.pooled") == pytest.approx(11 / 4)


def test_every_form_of_report_names_the_settings_of_a_run_of_several(tmp_path: Path, main: Main) -> None:
    run = of_both(tmp_path / "run")
    for kind in ("table", "markdown", "latex"):
        assert "gsm8k (embedded; temperature 1)" in main("report", "run", "--format", kind)[1], kind
    assert "gsm8k,embedded,temperature 1,dflash" in main("report", "run", "--format", "csv")[1]
    made = json.loads(main("report", "run", "--format", "json")[1])
    assert [cell["settings"]["temperature"] for cell in made["cells"]] == [0, 0, 1, 1]
    assert "dflash (temperature 1)" in main("card", "run")[1]
    material = Material(read_document(run))
    assert [material.label(group) for group in material.groups] == [
        "gsm8k (embedded)\ntemperature 0",
        "gsm8k (embedded)\ntemperature 1",
    ]
    for name in plots.names_for(material):
        # In a sweep temperature is what the axis shows.
        assert ("temperature" if name == "sweep" else "temperature 1") in plots.svg(material, name), name


def test_a_run_of_one_settings_names_them_nowhere_in_its_tables(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(settings=SAMPLED), settings=settings_to_json([SAMPLED]))
    for kind in ("table", "markdown", "latex", "csv"):
        assert "temperature" not in main("report", "run", "--format", kind)[1], kind


def test_compare_pairs_cells_of_the_same_settings(tmp_path: Path, main: Main) -> None:
    of_both(tmp_path / "before")
    stored(tmp_path / "after", answers(settings=GREEDY, seed=1), settings=settings_to_json([GREEDY]))
    found = compared([tmp_path / "before", tmp_path / "after"])
    assert {(change["suite"], change["method"]) for change in found.json["changes"]} == {
        ("gsm8k", "ar"),
        ("gsm8k", "dflash"),
    }
    dflash = next(change for change in found.json["changes"] if change["method"] == "dflash")
    assert dflash["ratios"]["al.pooled"]["ratio"] == [1, 1, 1]
    other = replace(SAMPLED, temperature=0.5)
    rows = [replace(row, settings=other, exactness=None) for row in answers()]
    stored(tmp_path / "other", rows, settings=settings_to_json([other]))
    assert "--allow sampling" in main("compare", "before", "other")[2]
    assert "none" not in main("compare", "before", "other", "--allow", "sampling")[1]
    assert "under the same settings" in main("compare", "before", "other", "--allow", "sampling")[2]
    # Runs with one settings each are compared if their difference is allowed by name.
    status, out, _ = main("compare", "after", "other", "--allow", "sampling")
    assert status == 0 and "sampling: temperature 0.0 and 0.5" in out


def test_the_gate_judges_each_settings_against_their_own(tmp_path: Path, main: Main) -> None:
    of_both(tmp_path / "run")
    assert main("baseline", "run", "-o", "base.json", "--time-free")[0] == 0
    assert main("check", "run", "--baseline", "base.json")[0] == 0
    worse = both()
    worse = [
        replace(row, generation=drafted(row.prompt_id, [0, 0, 3, 0, 0, 2], order=row.order).generation)
        if (row.settings, row.method) == (SAMPLED, "dflash")
        else row
        for row in worse
    ]
    of_both(tmp_path / "worse", worse)
    status, out, _ = main("check", "worse", "--baseline", "base.json")
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("FAIL ")]
    assert line.split()[1:5] == ["gsm8k", "(embedded;", "temperature", "1)"] and "al.pooled" in line


# Thinking


class Pieces:
    """A tokenizer whose tokens are pieces of text."""

    pieces = ("<th", "ink>", "a", "</", "think", ">\n", "b", "x</think>y")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.pieces[i] for i in ids)


@each(
    "prompt, answer, num",
    [
        ([2], [0, 1, 2, 3, 4, 5, 6, 6], 6),  # closed in pieces: up to and with the last of them
        ([2], [0, 1, 2, 2], 4),  # never closed
        ([2], [6, 6, 6], 0),  # never opened
        ([2, 0, 1], [2, 2], 2),  # opened by the template
        ([0, 1, 3, 4, 5], [6, 6], 0),  # opened and closed by the template
        ([2, 0, 1], [7, 2, 7], 1),  # the first end is the end
        ([2, 0, 1], [], 0),
        ([2], [2, 3, 4, 5, 6], 0),  # never opened, so an answer that writes the end is an answer
        ([2, 0, 1, 3, 4, 5], [2, 7], 0),  # opened and closed by the template, and the same
    ],
)
def test_thinking_is_what_stands_up_to_its_end(prompt: list[int], answer: list[int], num: int) -> None:
    assert chat.thinking_tokens(Pieces(), prompt, answer) == num


class Marks(Pieces):
    """A tokenizer whose marks are special tokens, which are not in the text."""

    pieces = ("<think>", "</think>", "\n\n", "4", "1", "2", "<eos>")
    chat_template = ""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.pieces[i].startswith("<"))]
        return "".join(self.pieces[i] for i in kept)


@each(
    "prompt, answer, finish, num, text",
    [
        ([3], [0, 3, 4, 1, 2, 3, 5, 6], "stop", 4, "42"),
        ([3, 0], [3, 4, 1, 3, 5], "length", 3, "42"),
        ([3, 0], [3, 4], "length", 2, ""),  # cut while it thinks
        ([3, 0, 1], [3, 5], "stop", None, "42"),
        ([3], [3, 5, 6], "stop", None, "42"),
    ],
)
def test_marks_that_are_not_in_the_text_are_found_by_ids(
    prompt: list[int], answer: list[int], finish: Any, num: int | None, text: str
) -> None:
    whole = Marks().decode(answer, True)
    found = chat.with_thinking(Marks(), prompt, Generation(tuple(answer), whole, finish, len(prompt), 0.1, 0.1))
    assert (found.num_thinking_tokens, found.answer_text, found.text) == (num, text, whole)


def test_without_ids_a_cut_answer_to_a_prompt_that_opens_thinking_is_none() -> None:
    cases: list[tuple[str, int, Any, bool, str]] = [
        ("42", 0, "length", True, ""),
        ("42", 0, "stop", True, "42"),
        ("42", 0, "length", False, "42"),
        ("41</think>42", 10, "stop", True, "42"),
        # The text after a stream without a target: the prompt did not open it.
        ("41</think>42", 10, "stop", False, "41</think>42"),
        ("<think>41</think>42", 17, "stop", False, "42"),
    ]
    for text, num, finish, opens, answer in cases:
        hidden = Generation((), text, finish, 1, 0.1, 0.1, num_hidden_tokens=2, num_thinking_chars=num)
        assert chat.with_thinking(Marks(), [3, 0] if opens else [3], hidden).answer_text == answer


def test_answers_that_are_cut_while_they_think_are_wrong_and_counted(main: Callable[..., tuple[int, str, str]]) -> None:
    words = "run --suite gsm8k --model nano --limit 3 --method dflash --thinking on --max-new-tokens 30 --out run"
    assert main(*words.split())[0] == 0
    rows = store.load(Path("run"))[1]
    assert {(row.generation.finish_reason, row.passed, row.generation.answer_text) for row in rows} == {
        ("length", False, "")
    }
    found = json.loads(main("report", "run", "--format", "json")[1])
    assert [(cell["passed"], cell["cut"]) for cell in found["cells"]] == [([0, 3], [3, 3])] * 2
    assert "0/3 correct (3 " in main("card", "run")[1]
    assert not reread.reread(results_table.read_run(Path("run")), True).flaws


def test_a_round_belongs_to_the_part_in_which_it_begins() -> None:
    # Rounds begin after 1, 6, 11, ... tokens; thinking ends within the second.
    rows = [replace(row, generation=replace(row.generation, num_thinking_tokens=7)) for row in pair("a", [4, 4, 2, 4])]
    found = frame_of(rows, by="part")
    own = found[found["method"] == "dflash"]
    assert own["slice"].tolist() == ["thinking", "answer"]
    assert own["num_rounds"].tolist() == [2, 2]
    assert own["num_accepted"].tolist() == [8, 6]
    assert own["decode_tokens"].tolist() == [10, 8]
    assert own["decode_s"].tolist() == pytest.approx([0.04, 0.04])
    assert own["passed"].isna().all()


def test_an_answer_without_thinking_has_one_part() -> None:
    found = frame_of([*pair("a", [4, 4]), plain("b", 0), drafted("b", [])], by="part")
    assert set(found["slice"]) == {"answer"}


def test_a_round_belongs_to_the_kind_of_text_of_its_first_token() -> None:
    # Rounds begin with tokens 1, 6, 11 and 14; kinds alternate, and those of one kind are one stretch.
    kinds = [0] * 6 + [1] * 5 + [0] * 3 + [2] * 5
    rows = [replace(row, measured={"text_kinds": tuple(kinds)}) for row in pair("a", [4, 4, 2, 4])]
    found = frame_of(rows, by="text-kind")
    own = found[found["method"] == "dflash"]
    assert own["slice"].tolist() == ["prose", "code", "json"]
    assert own["num_rounds"].tolist() == [2, 1, 1]
    assert own["num_accepted"].tolist() == [6, 4, 4]
    assert own["decode_tokens"].tolist() == [8, 5, 5]
    # The first token is of no round.
    plainly = found[found["method"] == "ar"]
    assert plainly["decode_tokens"].tolist() == [8, 5, 5]
    mixed = frame_of([rows[0], *pair("b", [4])], by="text-kind")
    assert set(mixed["slice"]) == {"prose", "code", "json", "unknown"}


def test_compare_and_report_tell_the_parts_apart(tmp_path: Path, main: Main) -> None:
    thinks = Settings(thinking=True)
    rows = [
        replace(row, settings=thinks, generation=replace(row.generation, num_thinking_tokens=6)) for row in answers()
    ]
    stored(tmp_path / "run", rows, settings=settings_to_json([thinks]))
    out = main("compare", "run", "--by", "part")[1]
    assert "thinking" in out and "answer" in out
    out = main("report", "run", "--by", "part")[1]
    assert "gsm8k (embedded; thinking)" in out and "gsm8k (embedded; answer)" in out


# Settings that change the target's output


def test_a_lossy_method_is_scored_and_never_judged(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = MethodSpec("rough", "not the target's output", None, "chain", False)
    monkeypatch.setitem(methods.METHODS.own, "rough", lossy)
    backend = FakeBackend(faults={"rough": other_tokens}, where=Divergence(2, 9.0, 0.001))
    records = Runs(tmp_path / "made")(WorkPlan((loaded(*prompts(2)),), ("ar", "rough")), backend)
    assert {(row.method, row.exactness, row.audit) for row in records if row.method == "rough"} == {
        ("rough", None, None)
    }
    rows = [replace(row, method="rough", exactness=None) if row.method == "dflash" else row for row in answers()]
    stored(tmp_path / "run", rows, methods={})
    out = main("report", "run")[1]
    line = next(line for line in out.splitlines() if line.startswith("  rough"))
    assert "lossy" in line
    assert "changes the target's output" in " ".join(out.split())
    status, out, _ = main("check", "run")
    assert status == 0
    assert not [line for line in out.splitlines() if "rough" in line and "mismatch" in line]
    monkeypatch.delitem(methods.METHODS.own, "rough")
    assert main("report", "run")[0] == 2


def test_hidden_rounds_have_no_drafted_ids(tmp_path: Path) -> None:
    with store.create(tmp_path / "run", bare()) as run:
        run.append([replace(plain("a", 2), generation=generation(None))])
    (row,) = store.load(tmp_path / "run")[1]
    assert row.generation.drafted_ids is None
