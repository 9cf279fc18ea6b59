"""Did answers get worse with speculation on? Said within a run and between runs, and not where chance explains it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.core.types import Answer
from dflash_bench.report.findings import Finding, findings
from helpers.each import each
from helpers.runs import answers, frame_of, known, stored

Main = Callable[..., tuple[int, str, str]]
NUM = 60


def rows(wrong: int, righted: int = 0, method: str = "dflash") -> list[Answer]:
    """Plain decoding gets two of three right; of a method so many of these are wrong, and so many others right."""
    made, left, found = [], {True: wrong, False: righted}, answers(NUM)
    for row in found:
        if row.method == method and left[bool(row.passed)]:
            left[bool(row.passed)] -= 1
            row = replace(row, passed=not row.passed)
        made.append(replace(row, exactness="differs" if row.method == "dflash" else None, divergence=None))
    return [replace(row, exactness=None) for row in made]


SERVER = {
    "address": "a",
    "dialect": "vllm",
    "version": None,
    "model": None,
    "prompts": "chats",
    "prefix_cache": "off",
    "facts": {},
}


def found(records: Sequence[Answer], identity: dict[str, Any] | None = None) -> list[Finding]:
    frame = frame_of(records)
    made = findings(frame, summarise(frame, known()), known(**(identity or {})))
    return [one for one in made if one.kind == "worse_answers"]


def test_a_method_that_loses_right_answers_is_a_finding() -> None:
    (one,) = found(rows(12, 1), {"servers": dict.fromkeys(("ar", "dflash"), SERVER)})
    values = {name: one.values[0][name] for name in ("lost", "gained", "num_prompts")}
    assert (one.remedy_code, values) == ("judge", {"lost": 12, "gained": 1, "num_prompts": 60})
    assert "-18.3 points" in one.text


@each("wrong, righted", [(0, 0), (6, 4), (3, 0), (1, 12)])
def test_what_chance_explains_and_what_got_better_is_none(wrong: int, righted: int) -> None:
    assert not found(rows(wrong, righted))


def changes(main: Main, *words: str) -> dict[tuple[str, str, str | None], Any]:
    status, out, err = main("compare", *words, "--json")
    assert status == 0, err
    return {(one["before"], one["after"], one["method"]): one for one in json.loads(out)["changes"]}


SAMPLED = [
    {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "thinking": None,
        "concurrency": 1,
        "context": None,
        "rate": None,
    }
]


def test_compare_says_it_within_a_run(main: Main, tmp_path: Path) -> None:
    stored(tmp_path / "worse", rows(12, 1), settings=SAMPLED)
    stored(tmp_path / "same", rows(0), settings=SAMPLED)
    one = changes(main, "worse")["ar", "dflash", None]
    assert (one["num_scored"], one["lost"], one["gained"], one["passed_verdict"]) == (60, 12, 1, "worse")
    text = main("compare", "worse")[1]
    assert "p (McNemar, Holm)" in text and "-18.3 [" in text
    assert changes(main, "same")["ar", "dflash", None]["passed_verdict"] == "same"


def test_compare_says_it_between_runs(main: Main, tmp_path: Path) -> None:
    """A server once without speculation and once with it, under the same name."""
    stored(tmp_path / "off", rows(0), settings=SAMPLED)
    stored(tmp_path / "on", rows(12, method="ar"), settings=SAMPLED)
    shown = changes(main, "off", "on")
    assert shown["off", "on", "ar"]["passed_verdict"] == "worse"
    assert shown["off", "on", "dflash"]["passed_verdict"] == "same"
    # The smaller of two p, so twice itself.
    assert shown["off", "on", "ar"]["p_passed"] == pytest.approx(2 * 2 / 2**12)
