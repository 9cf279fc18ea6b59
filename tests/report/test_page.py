"""The HTML page without a browser: what it holds, that nothing in it can run, and how answers are chosen and cut."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.report import answers as report_answers
from dflash_bench.report import html, read_document
from dflash_bench.results import parts, run_info
from helpers.each import each
from helpers.pages import HOSTILE, NANO, REJECTED, SAID, TEXT, Elements, data, told
from helpers.rows import failed
from helpers.runs import SUITES, about, answers, changed, stored

Main = Callable[..., tuple[int, str, str]]


def page_of(folder: Path, **options: Any) -> str:
    document = read_document(folder)
    read = html.read_page(document, options.get("most", 300))
    return html.page(document, {}, report_answers.page_answers(document, read.answers, options.get("tokenizer")), read)


# Hostile text


def test_nothing_that_a_run_holds_becomes_an_element(tmp_path: Path) -> None:
    rows = [
        *told(HOSTILE, HOSTILE, suite=f"gsm8k{HOSTILE}"),
        *(failed(method, "x", HOSTILE, suite=f"gsm8k{HOSTILE}") for method in ("ar", "dflash")),
    ]
    methods = {"dflash": {"name": "dflash", "num_drafts": 4}, HOSTILE: {"name": HOSTILE, "num_drafts": 1}}
    folder = stored(tmp_path / "run", rows, model=HOSTILE, methods=methods, environment={"cpu": HOSTILE})
    page = page_of(folder)
    found = Elements(page).found
    assert [attributes.get("id") for tag, attributes in found if tag == "script"] == ["data", None]
    assert not any(tag == "img" for tag, _ in found)
    assert not any(name.startswith("on") for _, attributes in found for name in attributes)
    assert "<!--" not in page
    assert data(page)["rows"][0]["prompt"] == HOSTILE


def test_only_its_own_script_may_run_and_nothing_may_be_loaded(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path / "run", told()))
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (attributes["content"] for tag, attributes in Elements(page).found if "http-equiv" in attributes)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    references = [
        value for _, attributes in Elements(page).found for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(value and value.startswith("#") for value in references)


def test_a_run_cannot_fill_a_place_of_the_template(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path / "run", told(), model="{{data}} {{version}}"))
    assert "{{data}} {{version}}" in page


# Content


def test_the_page_is_written_with_its_plots(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", told())
    assert main("report", "run", "-o", "out/page.html") == (0, "", "wrote out/page.html\n")
    page = Path("out/page.html").read_text(encoding="utf-8")
    assert page.count("<figure data-name=") == page.count("<svg role=") == 6
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 20
    assert "#0072b2" not in page.replace("var(--series-0, #0072b2)", "").partition("</style>")[2]


def test_the_page_reads_each_part_once_for_its_tables_and_once_for_plots_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored(tmp_path / "run", answers(12), in_parts=True)
    opened: list[Path] = []
    read = parts.batches
    monkeypatch.setattr(
        parts, "batches", lambda part, *rest, **named: opened.append(part) or read(part, *rest, **named)
    )
    html.write_page(read_document(folder), tmp_path / "page.html")
    assert sorted(opened) == sorted(2 * parts.of(folder)) and len(opened) > 2


# Answers


def test_an_answer_stands_below_what_was_asked_in_its_turn(tmp_path: Path) -> None:
    rows = [*told("p0"), *told("p0", turn=1), *told("unknown")]
    folder = stored(tmp_path / "run", rows)
    opening = [{"role": "system", "content": "Be brief."}]
    prompt = {"suite": "gsm8k", "prompt_id": "p0", "prompt_hash": "h", "category": None, "reference": "7"}
    run_info.write_prompts(folder, [{**prompt, "opening": opening, "turns": ["What is 3 + 4?", "And 5?"]}])
    page = data(page_of(folder))
    assert page["prompts"] == ["Be brief.\n\nWhat is 3 + 4?", "And 5?"]
    assert [row.get("asked") for row in page["rows"]] == [0, 0, 1, 1, None, None]
    assert data(page_of(stored(tmp_path / "old", told())))["prompts"] == []


def test_an_answer_is_cut_into_its_tokens_and_said_with_its_rounds(tmp_path: Path) -> None:
    stored_page = data(page_of(stored(tmp_path / "run", told())))
    plain, drafted = stored_page["rows"]
    (pieces,) = stored_page["pieces"]
    assert "".join(pieces) == TEXT
    assert len(pieces) == drafted["tokens"] == 1 + sum(drafted["counts"][2::3])
    assert (drafted["counts"][:3], drafted["times"][:2]) == ([4, 2, 3], [5000, 12000])
    assert len(drafted["counts"]) // 3 == len(drafted["times"]) // 2
    assert not {"counts", "times"} & plain.keys()
    assert drafted["speedup"] == pytest.approx(plain["ms"] / drafted["ms"], rel=1e-3)


def test_thinking_is_told_from_the_answer(tmp_path: Path) -> None:
    thinking = {"num_thinking_tokens": 3, "num_thinking_chars": 5}
    rows = [replace(row, generation=replace(row.generation, **thinking)) for row in told()]
    found = [row["thinking"] for row in data(page_of(stored(tmp_path / "run", rows)))["rows"]]
    assert found == [3, 3]  # tokens of a text that is cut into them
    hidden = [
        replace(row, generation=replace(row.generation, token_ids=(), text="\U0001f600 thinks", **thinking))
        for row in told()[:1]
    ]
    assert report_answers._num_thinking({"text": hidden[0].generation.text, **thinking}, False) == 6
    assert all("thinking" not in row for row in data(page_of(stored(tmp_path / "plain", told())))["rows"])


def test_tokens_are_cut_where_a_browser_counts_two_units_for_a_letter(tmp_path: Path) -> None:
    text = "So \U0001f600 it is \u05e9\u05dc\u05d5\u05dd."
    stored_page = data(page_of(stored(tmp_path / "run", told(text=text))))
    assert "".join(stored_page["pieces"][0]) == text
    assert sum(stored_page["lengths"][0]) == len(text) + 1


def test_without_the_tokenizer_the_text_is_whole_and_the_page_says_why(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path / "run", told(), model="elsewhere"))
    assert data(page)["texts"] == [NANO.decode(NANO.encode(TEXT).ids, skip_special_tokens=True)]
    assert "give --tokenizer FOLDER" in page
    given = page_of(tmp_path / "run", tokenizer=report_answers.NANO)
    assert "".join(data(given)["pieces"][0]) == TEXT


def test_a_tokenizer_that_gives_another_text_is_not_believed(tmp_path: Path) -> None:
    rows = [replace(row, generation=replace(row.generation, text="another text")) for row in told()]
    page = page_of(stored(tmp_path / "run", rows))
    assert data(page)["texts"] == ["another text"]
    assert report_answers.OTHER in page


def test_of_a_large_run_whole_prompts_of_each_suite_are_shown(tmp_path: Path) -> None:
    rows = [*answers(30), *answers(30, suite="math500")]
    page = page_of(stored(tmp_path / "run", rows), most=11)
    places = [(row["suite"], row["prompt"], row["method"]) for row in data(page)["rows"]]
    numbers = [
        ("gsm8k (embedded)", 0),
        ("math500", 0),
        ("gsm8k (embedded)", 1),
        ("math500", 1),
        ("gsm8k (embedded)", 2),
    ]
    expected = [(suite, f"p{number:03}") for suite, number in numbers]
    assert sorted(places) == sorted((*place, method) for place in expected for method in ("ar", "dflash"))
    assert "10 of 120 answers" in page


def test_one_prompt_is_shown_even_where_it_is_too_much(tmp_path: Path) -> None:
    assert len(data(page_of(stored(tmp_path / "run", answers(3)), most=1))["rows"]) == 2


def test_a_failed_answer_is_a_row_with_its_error_and_no_speed(tmp_path: Path) -> None:
    rows = [*told("a"), *told("b")[:1], failed("dflash", "b", "boom")]
    last = data(page_of(stored(tmp_path / "run", rows)))["rows"][-1]
    assert (last["method"], last["error"]) == ("dflash", "boom")
    assert not {"ms", "speedup"} & last.keys()


def test_what_was_rejected_and_expected_is_there(tmp_path: Path) -> None:
    assert len(REJECTED) == 2
    folder = stored(tmp_path / "run", [replace(row, passed=False, answer="7") for row in told()])
    (plain, drafted) = data(page_of(folder))["rows"]
    assert "rejected" not in plain
    said = drafted["rejected"].split("\0")
    assert set(said[:-1]) == {SAID}
    assert len(said) == len(drafted["counts"]) // 3
    assert "expected" not in drafted, "this run stored no prompts"
    prompt = dict.fromkeys(run_info.PROMPTS_COLUMNS) | {"suite": "gsm8k", "prompt_id": "p0", "turns": ["3 + 5?"]}
    run_info.write_prompts(folder, [prompt | {"reference": "3 + 5 = 8\n#### 8"}])
    assert [row["expected"] for row in data(page_of(folder))["rows"]] == ["#### 8", "#### 8"]


def test_without_the_tokenizer_nothing_is_said_of_what_was_rejected(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", told(), model="another")
    assert not any("rejected" in row for row in data(page_of(folder))["rows"])


@each(
    "reference, scorer, shown",
    [
        ("18 + 14 = 32\n#### 32\n", "gsm8k_number", "#### 32"),
        ("x" * 200, "math", "x" * report_answers.LONGEST_REFERENCE),
        ("assert f(1) == 2", "mbpp", None),
        ("", "math", None),
        (None, "math", None),
    ],
)
def test_the_end_of_a_reference_is_shown_but_not_of_code(reference: str | None, scorer: str, shown: str | None) -> None:
    info = about(identity={"suites": SUITES | {"gsm8k": SUITES["gsm8k"] | {"scorer": scorer}}})
    found = report_answers._references([{"suite": "gsm8k", "prompt_id": "p", "reference": reference}], info)
    assert found == ({} if shown is None else {("gsm8k", "p"): shown})


@pytest.mark.parametrize("others", [[], ["dflash:block=8"]])
def test_what_is_not_exact_stands_above_all_else_in_a_sweep_too(tmp_path: Path, others: list[str]) -> None:
    wrong = changed(answers(12), "dflash", first=2, exactness="mismatch")
    rows = [*wrong, *(replace(row, method=other) for other in others for row in answers(12) if row.method == "dflash")]
    methods = {name: {"name": "dflash", "num_drafts": 4 + 3 * at} for at, name in enumerate(["dflash", *others])}
    folder = stored(tmp_path / "run", rows, methods=methods)
    assert len(read_document(folder).sweeps) == len(others)
    page = page_of(folder)
    head = page[page.index("<header>") : page.index("</header>")]
    assert ">dflash is NOT exact: 2 answers" in head
    assert "times as fast" not in head
