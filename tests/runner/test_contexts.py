"""`--context`: prompts as long as wanted, cells of their own for each length, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.concurrency import by_context
from dflash_bench.core import environment
from dflash_bench.core.errors import UserError
from dflash_bench.core.option import context_lengths
from dflash_bench.core.types import Generation, Message, Prompt, Settings, context_name
from dflash_bench.report import plots, read_document
from dflash_bench.report.answers import page_answers
from dflash_bench.report.html import read_page
from dflash_bench.report.plots.style import Material, scope_of
from dflash_bench.results import run_info, store, table
from dflash_bench.results.identity import full_names, settings_to_json, short_names
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import settings_of as settings_of_request
from dflash_bench.runner.work import WorkPlan, prompt_rows
from dflash_bench.tasks import padding
from dflash_bench.tasks.suites import Loaded
from helpers.each import each
from helpers.fake_backend import FakeBackend
from helpers.refusals import assert_refused
from helpers.runs import answers, bare, stored
from helpers.work import Runs, loaded, prompts

Main = Callable[..., tuple[int, str, str]]
NONE, SHORT, LONG = (Settings(thinking=False, context=context) for context in (None, 256, 4096))


def size(messages: Sequence[Message]) -> int:
    """A token a word, and two for each message."""
    return sum(2 + len(message.content.split()) for message in messages)


def source(number: int = 8, num_turns: int = 1, **fields: Any) -> Loaded:
    """All prompts are drawn, of ten words each."""
    some = [
        Prompt("gsm8k", f"p{n}", tuple(" ".join(f"w{n}.{turn}.{at}" for at in range(10)) for turn in range(num_turns)))
        for n in range(number)
    ]
    return replace(loaded(*some), pool=tuple(some), **fields)


# Command lines


def test_contexts_are_written_as_they_are_named() -> None:
    assert context_lengths("none,1k,1000,4096", "--context") == (None, 1024, 1000, 4096)
    assert [context_name(tokens) for tokens in (None, 1024, 1000, 4096)] == ["none", "1k", "1000", "4k"]
    longer = replace(NONE, context=4096)
    assert full_names([longer])[longer] == "temperature 0, thinking off, context 4k"
    assert short_names([NONE, LONG]) == {NONE: "context none", LONG: "context 4k"}


@each("text", ["", "0", "0k", "-1", "1.5k", "4K", "none,", "1k,,2k", "k", "99999999", "all"])
def test_what_is_no_context_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^--context .*none"):
        context_lengths(text, "--context")


@pytest.mark.parametrize("text", ["1k,1024", "none,none"])
def test_a_context_given_twice_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="lists a value twice"):
        context_lengths(text, "--context")


def test_every_context_is_run_under_all_other_settings() -> None:
    request = RunRequest(suites=("gsm8k",), temperature=(0.0, 1.0), context=(None, 4096))
    made = settings_of_request(request, (None,))
    assert [(one.temperature, one.context) for one in made] == [(0, None), (0, 4096), (1, None), (1, 4096)]
    assert settings_of_request(RunRequest(suites=("gsm8k",)), (None,)) == [Settings()]


# Padding


@settings(max_examples=40, deadline=None)
@given(wanted=st.integers(1, 300), num_turns=st.integers(1, 2))
def test_a_padded_prompt_is_never_longer_than_wanted(wanted: int, num_turns: int) -> None:
    suite = source(num_turns=num_turns)
    made = padding.padded([suite], (None, wanted), size, 4096, 20)
    for prompt in suite.prompts:
        text = made.paddings["gsm8k", prompt.prompt_id, wanted]
        tokens = size([Message("user", text + prompt.turns[0])])
        # A word is a token, and so is the line between.
        assert tokens == 12 if not text else wanted - 2 <= tokens <= wanted
        assert prompt.turns[0] not in text
    longer = made.about["gsm8k"][context_name(wanted)]["longer"]
    assert longer == [prompt.prompt_id for prompt in suite.prompts if wanted < 12]


def test_the_longest_row_has_all_turns_and_answers() -> None:
    # 12 a turn, 3 for the "Yes." between, and an answer of 20 a turn.
    assert padding.padded([source()], (), size, 4096, 20).longest == 12 + 20
    made = padding.padded([source(), source(num_turns=2)], (None, 200), size, 4096, 20)
    assert (made.longest, made.rest) == (200 + 3 + 12 + 2 * 20, 3 + 12 + 2 * 20)
    assert padding.padded([source()], (), size, 25, 20).longest == 25


def test_a_context_without_room_for_the_answers_is_refused_with_the_largest_that_has_it() -> None:
    with pytest.raises(UserError) as refused:
        padding.padded([source(num_turns=2)], (None, 100, 1024), size, 1024, 20)
    largest = 1024 - 3 - 12 - 2 * 20
    assert str(refused.value).startswith("--context 1k: ") and str(refused.value).endswith(f" {largest}")
    assert " 1024 " in str(refused.value) and " 55" in str(refused.value)
    padding.padded([source(num_turns=2)], (largest,), size, 1024, 20)
    with pytest.raises(UserError, match="give a smaller --max-new-tokens"):
        padding.padded([source()], (100,), size, 64, 64)


def test_what_is_longer_or_repeated_is_told() -> None:
    made = padding.padded([source(4)], (8, 100), size, 4096, 20)
    assert made.about == {
        "gsm8k": {
            "8": {"longer": ["p0", "p1", "p2", "p3"], "repeated": []},
            "100": {"longer": [], "repeated": ["p0", "p1", "p2", "p3"]},
        }
    }
    assert [note.count("4 prompts of gsm8k") for note in made.notes] == [1, 1]
    assert set(made.sha256["gsm8k"]) == {"8", "100"} and len({*made.sha256["gsm8k"].values()}) == 2


# The runner


def plan_of(suite: Loaded, *several: Settings) -> WorkPlan:
    paddings = {("gsm8k", "p0", 256): "behind this\n\n---\n\n", ("gsm8k", "p0", 4096): "and this, behind this "}
    return WorkPlan((suite,), ("ar", "dflash"), settings=several, paddings=paddings)


def test_a_prompt_is_asked_behind_the_text_of_its_context(tmp_path: Path) -> None:
    backend = FakeBackend()
    plan = plan_of(loaded(*prompts(1, 2)), NONE, SHORT, LONG)
    records = Runs(tmp_path / "run")(plan, backend)
    firsts = {messages[0].content for _, messages in backend.calls}
    assert firsts == {"question 0", "behind this\n\n---\n\nquestion 0", "and this, behind this question 0"}
    seconds = {messages[2].content for _, messages in backend.calls if len(messages) == 3}
    assert seconds == {"and then? 0"}
    assert {(row.settings, row.method, row.turn) for row in records} == {
        (one, method, turn) for one in (NONE, SHORT, LONG) for method in ("ar", "dflash") for turn in (0, 1)
    }
    # The question is the same; the settings hold what precedes it.
    assert len({row.prompt_hash for row in records}) == 1
    assert Runs(tmp_path / "run")(plan, FakeBackend()) == records


def test_what_stood_before_prompts_is_kept_beside_the_parts(tmp_path: Path) -> None:
    rows = prompt_rows(plan_of(loaded(*prompts(2)), NONE, SHORT, LONG))
    with store.create(tmp_path / "run", bare()) as run:
        run.keep_prompts(rows)
    assert run_info.read_prompts(tmp_path / "run") == rows
    assert [[one["context"] for one in row["paddings"]] for row in rows] == [[256, 4096], []]


# With nano


def test_a_run_of_two_contexts_is_exact_in_cells_of_their_own(tmp_path: Path, main: Main) -> None:
    words = "run --suite gsm8k --limit 1 --max-new-tokens 8 --method dflash --out out".split()
    status, _, err = main(*words, "--context", "none,300")
    assert status == 0, err
    out = main("report", "out", "--full")[1]
    info, records = store.load(Path("out"))
    assert {(row.settings.context, row.method, row.exactness, row.audit) for row in records} == {
        (context, method, "exact", "exact") for context in (None, 300) for method in ("ar", "dflash")
    }
    for row in records:
        tokens = row.generation.num_prompt_tokens
        assert 280 < tokens <= 300 if row.settings.context else tokens < 120
    results = table.read_run(Path("out"))
    cells = summarise(results.rows, results.info.identity)
    assert [(cell.setting, cell.method) for cell in cells] == [
        (f"context {name}", method) for name in ("none", "300") for method in ("ar", "dflash")
    ]
    assert "\nby context\n" in out and "gsm8k (embedded; context 300)" in out
    assert "weights 15 MB for the target and 5 MB for drafts" in out
    info = info.to_json()
    assert list(info["identity"]["suites"]["gsm8k"]["contexts"]) == ["300"]
    assert info["contexts"] == {"gsm8k": {"300": {"longer": [], "repeated": []}}}
    memory = info["memory"]
    # 16 layers, 2 heads of 64, keys and values in float32; the answer, and 15 that are drafted, behind the prompt.
    assert memory["target_cache_bytes"] == 16 * 2 * 2 * 64 * 4 * (300 + 8 + 1 + 15)
    assert memory["largest_context"] == 4096 - 8
    (kept,) = run_info.read_prompts(Path("out"))
    (before,) = kept["paddings"]
    assert before["context"] == 300 and before["text"].endswith("\n\n---\n\n")
    document = read_document(Path("out"))
    said = page_answers(document, read_page(document, 10).answers, None).prompts
    assert sorted(said) == sorted([kept["turns"][0], before["text"] + kept["turns"][0]])
    # Behind other text it is another run.
    told = main(*words, "--context", "none,200", "--resume")[2]
    assert "started differently" in told and "contexts.300" in told and "settings[1].context was 300, now 200" in told
    told = main("run", "--suite", "gsm8k", "--limit", "1", "--context", "4k")[2]
    assert all(name in told for name in ("--context 4k", "4096 tokens", "fits is 3904"))


def test_too_little_memory_is_refused_before_anything_is_loaded(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.runner.session.open_local", lambda *_: pytest.fail("loaded a model"))
    words = "run --suite gsm8k --limit 1 --max-new-tokens 8 --method dflash --context 3k".split()

    def free(num_bytes: int) -> str:
        monkeypatch.setattr(environment, "free_bytes", lambda: num_bytes)
        status, out, told = main(*words)
        assert (status, out) == (2, "")
        return told

    told = free(50_000_000)
    assert "0.08 GB" in told and "0.05 GB are free on cpu" in told
    largest = int(told.split("that fits is ")[1].split()[0])
    assert 1024 < largest < 3072
    monkeypatch.setattr("dflash_bench.runner.session.open_local", lambda *_: (_ for _ in ()).throw(UserError("fits")))
    words[-1] = str(largest)
    assert "fits" in free(50_000_000)
    words[-1] = str(largest + 1)
    assert "fits is" in free(50_000_000)
    assert "without drafts" in free(16_000_000)
    assert "weights alone" in free(1_000_000)


# Memory that is free


def test_free_memory_is_what_the_system_has_and_its_container_allows(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9000 kB\nMemAvailable:       4000 kB\n")
    assert environment.free_bytes(meminfo, tmp_path) == 4000 * 1024
    for name, text in (("max", "3000000\n"), ("current", "1000000\n"), ("stat", "anon 5\ninactive_file 200000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert environment.free_bytes(meminfo, tmp_path) == 2_200_000
    (tmp_path / "memory.max").write_text("max\n")
    assert environment.free_bytes(meminfo, tmp_path) == 4000 * 1024
    assert environment.free_bytes(tmp_path / "none", tmp_path) == environment.memory_bytes()[0]


# Reports


def at_contexts(folder: Path, *several: Settings, source: dict[str, str] | None = None) -> Path:
    """The longer the context, the fewer drafted tokens are accepted."""
    rows = [
        replace(row, settings=one, generation=_behind(row.generation, one.context or 60, row.method))
        for one in several
        for row in answers(8, noise=0)
    ]
    identity: dict[str, Any] = {"settings": settings_to_json(several)}
    if source is not None:
        known = {"version": 1, "source": "embedded", "sha256": "s", "prompts": 24, "scorer": "gsm8k_number"}
        identity["suites"] = {"gsm8k": known | {"contexts": source}}
    return stored(folder, rows, **identity)


def _behind(answer: Generation, num_tokens: int, method: str) -> Generation:
    """To a prompt of so many tokens, each of which takes the draft 10 us; the rounds come behind that."""
    prefill_s = 0.0 if method == "ar" else num_tokens / 1e5
    return replace(
        answer, num_prompt_tokens=num_tokens, draft_prefill_s=prefill_s, decode_s=answer.decode_s + prefill_s
    )


def test_the_table_has_a_row_for_each_context_the_shortest_first(tmp_path: Path, main: Main) -> None:
    at_contexts(tmp_path / "run", LONG, NONE, SHORT)
    lines = main("report", "run")[1].splitlines()
    # Its ten columns do not fit 100 characters, so that its rows stand one value a line.
    at = lines.index("by context")
    assert lines[at + 1] == "gsm8k (embedded) · dflash"
    places = [lines.index(f"  {context}") for context in ("none", "256", "4k")]
    assert places == sorted(places) and places[0] == at + 2
    told = [dict(line.strip().split(": ") for line in lines[place + 1 : place + 10]) for place in places]
    assert [row["prompt tokens"] for row in told] == ["60", "256", "4,096"]
    assert {row["prompts"] for row in told} == {"8"}
    assert [row["draft prefill ms"] for row in told] == ["0.60", "2.56", "40.96"]
    passes = [(row["draft ms"], row["verify ms"], row["plain step ms"]) for row in told]
    assert passes == [("5.00", "12.00", "10.00")] * 3
    markdown = main("report", "run", "--format", "markdown")[1]
    assert "## By context" in markdown and "| 4k | 4,096 | 8 |" in markdown.replace("|   4k", "| 4k")
    figures = json.loads(main("report", "run", "--format", "json")[1])["cells"][1]["figures"]
    assert figures["draft_prefill_ms"][0] == 40.96 and figures["prompt_tokens"][0] == 4096


def test_other_settings_are_told_apart(tmp_path: Path) -> None:
    warm = [replace(one, temperature=1.0) for one in (NONE, SHORT)]
    rows = [
        replace(row, settings=one, exactness=None if one.temperature else row.exactness)
        for one in (NONE, SHORT, *warm)
        for row in answers(4)
    ]
    run = stored(tmp_path / "run", rows, settings=settings_to_json([NONE, SHORT, *warm]))
    series = by_context(read_document(run).cells)
    assert [(one.label, len(one.cells)) for one in series] == [
        ("gsm8k (embedded; temperature 0)", 2),
        ("gsm8k (embedded; temperature 1)", 2),
    ]


def test_the_plot_has_break_even_beside_acceptance(tmp_path: Path) -> None:
    material = Material(read_document(at_contexts(tmp_path / "run", NONE, SHORT, LONG)))
    assert "context" in plots.names_for(material)
    figure = plots.PLOTS["context"](material)
    axes = [one for one in figure.axes if one.get_visible()]
    assert [one.get_ylabel() for one in axes] == ["tokens per round", "speed-up", "ms per round", "draft prefill ms"]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["none", "256", "4k"]
    through, dashed = (line for line in axes[0].lines if len(line.get_xdata()) == 3 and line.get_linestyle() != "None")
    assert list(through.get_xdata()) == [60, 256, 4096]
    assert dashed.get_ydata() == pytest.approx([1.7, 1.7, 1.7], rel=0.02)
    assert 'data-suite="gsm8k" data-settings=""' in plots.svg(material, "context")
    assert {scope_of(line).get("method") for line in axes[0].lines} == {"dflash"}


def test_a_run_of_one_context_has_neither_table_nor_plot(tmp_path: Path, main: Main) -> None:
    run = at_contexts(tmp_path / "run", SHORT)
    assert "by context" not in main("report", "run")[1]
    assert "context" not in plots.names_for(Material(read_document(run)))
    with pytest.raises(plots.NothingToPlotError):
        plots.PLOTS["context"](Material(read_document(run)))


def test_a_sweep_begins_with_prompts_as_they_are(tmp_path: Path) -> None:
    (sweep,) = read_document(at_contexts(tmp_path / "run", LONG, NONE, SHORT)).sweeps
    assert (sweep.option, sweep.unit) == ("context", "tokens")
    assert [point.value for point in sweep.summaries[0].points] == ["none", 256, 4096]


def test_runs_behind_other_texts_are_not_compared(tmp_path: Path, main: Main) -> None:
    at_contexts(tmp_path / "a", NONE, SHORT, source={"256": "a" * 64})
    at_contexts(tmp_path / "again", NONE, SHORT, source={"256": "a" * 64})
    at_contexts(tmp_path / "b", NONE, SHORT, source={"256": "b" * 64})
    at_contexts(tmp_path / "c", LONG)
    at_contexts(tmp_path / "d", SHORT)
    assert main("compare", "a", "again")[0] == 0
    assert_refused(main("compare", "a", "b"), "gsm8k at context 256", "--allow prompts")
    assert main("compare", "a", "b", "--allow", "prompts")[0] == 0
    assert_refused(main("compare", "c", "d"), "context 4096 and 256")


def test_too_many_answers_at_a_time_are_refused_with_the_number_that_fits(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "free_bytes", lambda: 100_000_000)
    monkeypatch.setattr("dflash_bench.runner.session.open_local", lambda *_: (_ for _ in ()).throw(UserError("loaded")))
    words = "run --suite gsm8k --limit 16 --max-new-tokens 8 --method dflash --context 1k --concurrency".split()
    told = main(*words, "16")[2]
    assert "concurrency 16" in told
    fitting = int(told.split("--concurrency ")[1].split()[0])
    assert 1 < fitting < 16
    assert "loaded" in main(*words, str(fitting))[2] and "loaded" not in main(*words, str(fitting + 1))[2]
