"""Texts of a profile and of a run's width curve, for made-up cases."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import report
from dflash_bench.analysis.roofline import curve
from dflash_bench.core.forwards import (
    AttentionCost,
    DraftPass,
    DraftTiming,
    ForwardTiming,
    HostOverhead,
    LinearCost,
    ProfileData,
    Rates,
    Size,
)
from dflash_bench.perf.verdict import RoundCost, RoundVerdict, at_full_depth, places
from dflash_bench.report import perf as words
from dflash_bench.report import plots
from dflash_bench.report.perf import Profiled, as_json, estimate_note, sentence, text
from helpers.each import each
from helpers.runs import about, answers, stored

SIZE = Size(weight_bytes=1000, matrix_elements=250, num_layers=2, attention=(AttentionCost(2, None, 8, 16),))
RATES = Rates(1000.0, 1e9)
WIDTHS = (1, 2, 4, 8, 16)


def of_run(line: LinearCost) -> dict[str, Any]:
    seconds = {str(width): line.at(width) for width in WIDTHS}
    return {
        "rows": 1,
        "context": 128,
        "seconds": seconds,
        "bandwidth": 1e3,
        "products": 1e9,
        "size": asdict(replace(SIZE, attention=())),
    }


@each(
    "line, regime, shown",
    [
        (LinearCost(4.9, 0.1), "fixed cost", ("4,900 + 100 n ms", "5.0 times", "16 tokens costs 1.30 times")),
        (LinearCost(1.2, 0.01), "bandwidth", ("1,200 + 10 n ms", "1.2 times")),
        (LinearCost(1.0, 1.0), "arithmetic", ("2.0 times",)),
    ],
)
def test_a_curve_in_words(line: LinearCost, regime: str, shown: tuple[str, ...]) -> None:
    info = about(forwards=of_run(line))
    text = " ".join(words.sentences(info))
    assert [figure for figure in shown if figure not in text] == []
    stored_curve = words.curve_as_json(info)
    assert stored_curve is not None and stored_curve["regime"] == regime


def test_an_older_run_has_no_curve() -> None:
    (line,) = words.sentences(about())
    assert "n/a" in line and words.curve_as_json(about()) is None


def test_a_line_that_is_none_says_how_far_off_it_is() -> None:
    crooked = curve(
        [ForwardTiming(1, 1, 0, 1.0), ForwardTiming(1, 2, 0, 2.0), ForwardTiming(1, 3, 0, 1.0)], SIZE, RATES
    )
    assert "off by up to 33%" in words.formula(crooked)


def test_every_format_of_a_run_shows_its_curve_once(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", answers(6))
    path = folder / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"forwards": of_run(LinearCost(0.0049, 0.0001))}))
    document = report.read_document(folder)
    formula = "C(n) = 4.9 + 0.1 n ms"
    for name in ("table", "markdown", "latex"):
        assert report.FORMATS[name](document).count(formula) == 1, name
    assert json.loads(report.FORMATS["json"](document))["width_curve"]["line"]["c0"] == pytest.approx(0.0049)
    assert f"forward     {formula}" in report.card(document)
    report.write_page(document, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count(formula) == 1


def test_an_edited_curve_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", answers(2))
    path = folder / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"forwards": of_run(LinearCost(1, 1)) | {"seconds": {"1": "fast"}}}))
    with pytest.raises(Exception, match=r"forwards\.seconds\.1 is 'fast'"):
        report.read_document(folder)


ROUND = RoundCost("dflash", 16, 1.0, 0.5, 1.4, 0.1)


@each(
    "verdict, shown",
    [
        (
            RoundVerdict(ROUND, "acceptance", 4.0, "as given", 2.0),
            ("acceptance", "4 tokens", "2.00 times", "8.0 times"),
        ),
        (RoundVerdict(ROUND, "draft", 12.0, "as given", 6.0), ("draft", "12 tokens", "6.00 times", "8.00 times")),
        (RoundVerdict(ROUND, "launch overhead", 12.0, "as given", 6.0), ("launch overhead", "12 tokens", "6.00 times")),
        (RoundVerdict(ROUND, "verify", None, "", None), ("verifying", "more than 2.00 tokens", "--acceptance")),
    ],
)
def test_the_sentence_says_what_binds_and_what_it_costs(verdict: RoundVerdict, shown: tuple[str, ...]) -> None:
    text = sentence(verdict)
    assert text.startswith("dflash: ") and "16 tokens costs 2.00 plain steps" in text
    assert [figure for figure in shown if figure not in text] == []


def profiled(layers: int = 2) -> Profiled:
    forwards = tuple(ForwardTiming(1, width, 9, 1 + 0.1 * width, head_s=0.4) for width in WIDTHS)
    draft = DraftTiming("dflash", 15, 1, 9, 0.5, (DraftPass(SIZE, 16),))
    measured = ProfileData(
        RATES, SIZE, forwards, (draft,), (HostOverhead("ar", 1, 0.01), HostOverhead("dflash", 1, 0.02))
    )
    about = {
        "model": "m",
        "target": "org/m",
        "methods": ["dflash"],
        "layers": 2,
        "all_layers": layers,
        "random_weights": True,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "engine": "transformers",
    }
    full = replace(SIZE, num_layers=layers, attention=(AttentionCost(layers, None, 8, 16),))
    acceptance = {"dflash": (4.0, "as given")}
    estimated = places(at_full_depth(measured, full), acceptance) if layers > 2 else []
    return Profiled(about, measured, places(measured, acceptance), estimated, ["a note"])


def test_a_whole_target_is_not_estimated(tmp_path: Path) -> None:
    shown = text(profiled())
    assert "estimate" not in shown and "2 layers, random weights" in shown
    assert "batch 1, context 9: rounds\n" in shown and "note: a note" in shown
    assert estimate_note(profiled()) == ""


def test_what_is_estimated_says_so_wherever_it_stands(tmp_path: Path) -> None:
    cut = profiled(10)
    shown = text(cut)
    assert "2 of 10 layers" in shown and "An estimate" in shown and "all 10 layers" in shown
    assert "rounds, estimated" in shown and "context 9: rounds\n" not in shown
    assert estimate_note(cut) == " (estimated from 2 of 10 layers)"
    stored_json = json.loads(json.dumps(as_json(cut), allow_nan=False))
    assert stored_json["places"][0]["passes"][0]["seconds"] == pytest.approx(1.1)
    assert stored_json["estimated"][0]["passes"][0]["seconds"] == pytest.approx(0.4 + 0.7 * 5)
    drawn = plots.write_profile(cut.judged, "Cost", tmp_path / "profile.svg").read_text()
    assert "roofline" in drawn and "batch 1, context 9" in drawn
