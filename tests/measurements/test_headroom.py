"""`run --headroom`: in every batch, refused by name where there are no logits, and told in reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import dflash_bench as db
from dflash_bench.core.methods import METHODS, parse
from dflash_bench.engine import recording
from dflash_bench.measurements.headroom import headroom_of, require_ranked, sections
from dflash_bench.report import plots
from helpers import tiny
from helpers.each import each
from helpers.refusals import assert_refused

TEXTS = ("What is 2+2?", "Name a colour.", "Count to five.", "Say it again.", "Why is that so?")
METHODS_RUN = ("dflash", "eagle3:3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headroom")
    tiny.build(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return folder


def measured(folder: Path, out: str, **options: object) -> db.Run:
    given = {"audit": "none", "max_new_tokens": 10, "headroom": 16, **options}
    return db.run(
        model=folder / "model", prompts=folder / "prompts.jsonl", methods=METHODS_RUN, out=folder / out, **given
    )


@pytest.fixture(scope="module")
def run(folder: Path) -> db.Run:
    return measured(folder, "run", concurrency=(1, 2), temperature=(0.0, 1.0))


def test_the_best_token_alone_gives_what_was_measured_and_more_give_no_less(run: db.Run) -> None:
    greedy = [cell for cell in run.document.cells if cell.settings.greedy and cell.method != "ar"]
    assert {cell.settings.concurrency for cell in greedy} == {1, 2}
    for cell in greedy:
        one, four, sixteen = (cell.value(f"headroom.{num}") for num in (1, 4, 16))
        assert one is not None and four is not None and sixteen is not None
        assert one == cell.value("al.pooled") and one <= four <= sixteen <= cell.widest
    assert any((cell.value("headroom.16") or 0) > (cell.value("headroom.1") or 0) for cell in greedy)


def test_drawn_answers_and_plain_ones_have_no_ranks(run: db.Run) -> None:
    others = [cell for cell in run.document.cells if not cell.settings.greedy or cell.method == "ar"]
    assert others and all(cell.value("headroom.1") is None for cell in others)
    assert {len(ranks) for ranks in run.rounds["ranks"] if ranks is not None} == {3}


def test_a_report_says_it_and_a_plot_draws_it(run: db.Run) -> None:
    (section,) = sections(run.document)
    assert section.table is not None and len(section.table.rows) == 4
    by_method = {row.values[0]: row for row in section.table.rows}
    columns = [column.id for column in section.table.columns]
    assert columns == ["method", "al.pooled", "headroom.4", "headroom.16", "limit", "best_4", "best_16"]
    texts = {
        name: [col.text(v) for col, v in zip(section.table.columns, row.values, strict=True)]
        for name, row in by_method.items()
    }
    assert texts["eagle3:3"][2].startswith("≥") and not texts["dflash"][2].startswith("≥")
    assert "train more, or rerank?" in str(run) and "from the draft's best K" in section.legend[0]
    svg = plots.svg(plots.Material(run.document), "headroom")
    assert "headroom.16" in svg and 'data-method="eagle3:3"' in svg


def test_fewer_candidates_leave_out_what_they_cannot_say(folder: Path) -> None:
    few = measured(folder, "few", headroom=4)
    (cell,) = (cell for cell in few.document.cells if cell.method == "dflash")
    assert cell.value("headroom.4") is not None and cell.value("headroom.16") is None
    (found, _) = headroom_of(few.document.results, few.document.cells)
    assert [num for num, _ in found.found] == [4]


def test_answers_that_are_drafted_otherwise_again_are_left_out_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_ranks, calls = recording.record_ranks, iter(range(99))
    monkeypatch.setattr(recording, "record_ranks", lambda *args: None if next(calls) < 2 else record_ranks(*args))
    spoiled = measured(folder, "spoiled")
    found = headroom_of(spoiled.document.results, spoiled.document.cells)
    assert sum(one.num_absent for one in found) == 2
    (section,) = sections(spoiled.document)
    assert sum("drafted otherwise" in text for text in section.sentences) >= 1


@each(
    "name, why",
    [
        ("ngram", "without logits.* dflash, eagle3, p-eagle"),
        *[(name, "without logits") for name in ("suffix", "rest:datastore=x", "lookahead", r"dflash\+ngram")],
        ("ddtree", "trees"),
        ("eagle3-tree", "trees"),
        ("medusa", "medusa:top_k=1"),
        ("dflash:block=auto", "times"),
        ("dflash:cut=auto", "times"),
    ],
)
def test_a_method_without_logits_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(db.UserError, match=f"--headroom: {name}.* {why}"):
        require_ranked(parse(name.replace("\\", "")))


@each(
    "name",
    [
        *(kind.name for kind in METHODS.values() if kind.is_ranked and kind.shape == "chain"),
        "medusa:top_k=1",
        "dflash:cut=0.5",
    ],
)
def test_chains_of_logits_are_ranked(name: str) -> None:
    require_ranked(parse(name))


def test_it_needs_answers_that_are_not_drawn(main: Callable[..., tuple[int, str, str]]) -> None:
    asked = ("run", "--suite", "gsm8k", "--method", "ngram", "--headroom", 16)
    assert_refused(main(*asked, "--temperature", 1), "--headroom", "temperature")
    assert_refused(main(*asked), "--headroom", "ngram")
