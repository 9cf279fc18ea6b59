"""Suites by hand-written rows: the prompts they make, the rows they draw, and every message they refuse with.

Set DFLASH_BENCH_DATA to a folder of the real sets to check their row counts as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_bench.core.types import Message, Prompt
from dflash_bench.tasks import suites
from dflash_bench.tasks.suites import Suite
from helpers.each import each
from helpers.refusals import names, refusal

TOY = Suite(
    name="toy",
    version=3,
    title="a toy",
    source="nobody/toy",
    scorer="none",
    seed=7,
    columns=("key", "question", "hints"),
    list_columns=("hints",),
    id="key",
    category="key",
    reference="<{question}>",
    turns=("{question}\n{hints}\nEnd with \\boxed{{}}.", "And again: {question}"),
)
CHAT = replace(TOY, columns=("key", "hints"), category=None, reference=None, turns=(), turns_column="hints")
ROWS: list[dict[str, Any]] = [
    {"key": "a", "question": "One?", "hints": ["first", "second"]},
    {"key": "b", "question": "What is {x} in {question}?", "hints": []},
    {"key": 3, "question": "Zwölf\u2028für\x0c 日本 🙂?", "hints": ["{}"]},
]
REAL_ROWS = {
    "gsm8k": 1319,
    "math500": 500,
    "aime24": 30,
    "aime25": 30,
    "humaneval": 164,
    "mbpp": 257,
    "mt_bench": 80,
}


def write(folder: Path, text: str, kind: str = "jsonl") -> Path:
    path = folder / "toy" / f"test.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def lines(*rows: object, end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def test_a_row_becomes_a_prompt_through_the_templates(tmp_path: Path) -> None:
    write(tmp_path, lines(*ROWS))
    loaded = suites.load_prompts(TOY, tmp_path)
    assert loaded.prompts[0] == Prompt(
        suite="toy",
        prompt_id="a",
        turns=("One?\nfirst\nsecond\nEnd with \\boxed{}.", "And again: One?"),
        category="a",
        reference="<One?>",
        row=ROWS[0],
    )
    assert (loaded.suite, loaded.num_rows, loaded.source) == (TOY, 3, f"folder {tmp_path}")


def test_braces_in_the_data_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, lines(*ROWS))
    second, third = suites.load_prompts(TOY, tmp_path).prompts[1:]
    assert second.turns[1] == "And again: What is {x} in {question}?"
    assert third.turns[0] == "Zwölf\u2028für\x0c 日本 🙂?\n{}\nEnd with \\boxed{}."


def test_a_turns_column_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, lines({"key": 1, "hints": ["Name {x}.", "Why?"]}))
    assert suites.load_prompts(CHAT, tmp_path).prompts[0].turns == ("Name {x}.", "Why?")


def test_a_suite_without_an_id_column_numbers_its_rows_from_zero(tmp_path: Path) -> None:
    write(tmp_path, lines(*ROWS))
    assert [prompt.prompt_id for prompt in suites.load_prompts(replace(TOY, id=None), tmp_path).prompts] == [
        "0",
        "1",
        "2",
    ]


# Drawing


def test_the_drawn_ids_are_the_same_on_every_machine(tmp_path: Path) -> None:
    write(tmp_path, lines(*({"key": n, "question": "?", "hints": []} for n in range(100))))
    drawn = [prompt.prompt_id for prompt in suites.load_prompts(TOY, tmp_path, limit=5).prompts]
    by_hand = sorted(range(100), key=lambda n: hashlib.sha256(f"7:{n}".encode()).hexdigest())[:5]
    assert drawn == [str(n) for n in sorted(by_hand)] == ["4", "7", "71", "77", "89"]


def ids_drawn(ids: list[str], limit: int | None, seed: int = 7) -> list[str]:
    prompts = [Prompt("toy", key, ("?",)) for key in ids]
    return [prompt.prompt_id for prompt in suites.draw(replace(TOY, seed=seed), prompts, "here", limit).prompts]


distinct_ids = st.lists(st.text("0aé日🙂 ", max_size=5), min_size=1, max_size=30, unique=True)


@given(distinct_ids, st.integers(1, 40), st.integers(0, 40))
def test_a_larger_limit_only_adds_prompts(ids: list[str], limit: int, more: int) -> None:
    few, many = ids_drawn(ids, limit), ids_drawn(ids, limit + more)
    assert len(few) == min(limit, len(ids))
    assert set(few) <= set(many)
    assert many == [key for key in ids if key in many]


@given(distinct_ids.flatmap(lambda ids: st.tuples(st.just(ids), st.permutations(ids))), st.integers(1, 30))
def test_the_draw_does_not_depend_on_the_order_of_the_file(orders: tuple[list[str], list[str]], limit: int) -> None:
    assert set(ids_drawn(orders[0], limit)) == set(ids_drawn(orders[1], limit))


def by_category(sizes: dict[str | None, int]) -> list[Prompt]:
    return [
        Prompt("toy", f"{name}{number}", ("?",), category=name, slices={"level": str(number % 3)})
        for name, size in sizes.items()
        for number in range(size)
    ]


def drawn_by(prompts: list[Prompt], limit: int, balance: str | None) -> list[Prompt]:
    return list(suites.draw(TOY, prompts, "here", limit, balance=balance).prompts)


sizes = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1)


@given(sizes, st.integers(1, 60), st.integers(0, 9), st.randoms())
def test_a_balanced_draw_takes_equally_many_of_each_value(
    sizes: dict[str | None, int], limit: int, more: int, random: Any
) -> None:
    prompts = by_category(sizes)
    drawn = drawn_by(prompts, limit, "category")
    counts = {name: sum(prompt.category == name for prompt in drawn) for name in sizes}
    most = max(counts.values())
    assert sum(counts.values()) == min(limit, sum(sizes.values()))
    # One fewer than others only where it was not its turn yet, or there are no more.
    assert all(count >= min(most - 1, sizes[name]) for name, count in counts.items())
    assert set(map(id, drawn)) <= set(map(id, drawn_by(prompts, limit + more, "category")))
    random.shuffle(prompts)
    again = drawn_by(prompts, limit, "category")
    assert {prompt.prompt_id for prompt in again} == {prompt.prompt_id for prompt in drawn}


def test_a_balanced_draw_differs_from_one_of_all_prompts_alike() -> None:
    prompts = by_category({"rare": 4, "common": 96})
    rare = {
        balance: sum(one.category == "rare" for one in drawn_by(prompts, 8, balance)) for balance in (None, "category")
    }
    assert rare == {None: 1, "category": 4}
    assert {prompt.slices["level"] for prompt in drawn_by(prompts, 3, "level")} == {"0", "1", "2"}
    loaded = suites.draw(TOY, prompts, "here", 8, balance="category")
    assert [prompt.prompt_id for prompt in suites.as_drawn(loaded).prompts] == list(loaded.order)
    assert {prompt.category for prompt in suites.as_drawn(loaded).prompts[:2]} == {"rare", "common"}


def test_prompts_without_a_value_are_a_group_of_their_own_and_a_column_that_nobody_has_is_refused() -> None:
    prompts = by_category({None: 3, "a": 30})
    assert sum(prompt.category is None for prompt in drawn_by(prompts, 4, "category")) == 2
    told = "unknown --balance column of toy 'levle' (did you mean 'level'?); known: category, level"
    assert refusal(drawn_by, prompts, 4, "levle") == told
    assert refusal(drawn_by, by_category({None: 3}), 4, "category").endswith("'category'; known: level")


def test_prompts_can_be_left_out_as_if_they_had_not_been_drawn(tmp_path: Path) -> None:
    write(tmp_path, lines(*ROWS))
    loaded = suites.load_prompts(TOY, tmp_path)
    left = suites.without(loaded, {"a"})
    assert [prompt.prompt_id for prompt in left.prompts] == ["b", "3"]
    write(tmp_path, lines(*ROWS[1:]))
    assert left.sha256 == suites.load_prompts(TOY, tmp_path).sha256 != loaded.sha256


def test_columns_that_make_no_text_of_a_prompt_are_its_slices(tmp_path: Path) -> None:
    write(tmp_path, lines(*(row | {"level": number, "solution": "x" * 300} for number, row in enumerate(ROWS))))
    loaded = suites.load_prompts(TOY, tmp_path)
    assert [prompt.slices for prompt in loaded.prompts] == [{"level": "0"}, {"level": "1"}, {"level": "2"}]
    (math,) = suites.expand(["math500"])
    assert set(suites.load_prompts(math).prompts[0].slices) >= {"subject", "level"}


def test_each_suite_draws_with_a_seed_of_its_own() -> None:
    ids = [str(n) for n in range(100)]
    assert ids_drawn(ids, 5, seed=7) != ids_drawn(ids, 5, seed=8)
    seeds = [suite.seed for suite in suites.known_suites().values()]
    assert len(set(seeds)) == len(seeds)


def test_the_digest_covers_the_drawn_rows_only_and_ignores_the_order_of_keys(tmp_path: Path) -> None:
    write(tmp_path / "all", lines(*ROWS))
    write(tmp_path / "turned", lines(*(dict(reversed(row.items())) for row in ROWS)))
    write(tmp_path / "one", lines(ROWS[0]))
    digests = {name: suites.load_prompts(TOY, tmp_path / name).sha256 for name in ("all", "turned", "one")}
    assert digests["all"] == digests["turned"] != digests["one"]
    (drawn,) = suites.load_prompts(TOY, tmp_path / "all", limit=1).prompts
    write(tmp_path / "drawn", lines(drawn.row))
    digests_of_one = {suites.load_prompts(TOY, tmp_path / name, limit=1).sha256 for name in ("all", "drawn")}
    assert len(digests_of_one) == 1
    canonical = '[{"hints":["first","second"],"key":"a","question":"One?"}]'
    assert digests["one"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_hash_of_a_prompt_covers_its_opening_and_turns_only() -> None:
    prompt = Prompt("toy", "1", ("Hi", "Why?"))
    assert suites.prompt_hash(prompt) == hashlib.sha256(b'[[],["Hi","Why?"]]').hexdigest()[:16]
    assert suites.prompt_hash(replace(prompt, suite="x", prompt_id="2", category="c")) == suites.prompt_hash(prompt)
    opened = replace(prompt, opening=(Message("system", "Be brief."),))
    canonical = b'[[["system","Be brief."]],["Hi","Why?"]]'
    assert suites.prompt_hash(opened) == hashlib.sha256(canonical).hexdigest()[:16]
    assert suites.prompt_hash(replace(prompt, turns=("Hi",))) != suites.prompt_hash(prompt)
    hashes = {
        suites.prompt_hash(one)
        for one in (
            opened,
            replace(prompt, opening=(Message("system", "Be brief.", '{"name": "x"}'),)),
            replace(prompt, closing=(Message("system", "Be brief."),)),
            replace(opened, closing=(Message("system", "Be brief."),)),
        )
    }
    assert len(hashes) == 4


# Refusals

GOOD = lines(ROWS[0])


@each(
    ("text", "place", "named"),
    [
        (GOOD + lines({"key": 1, "hints": []}), "{path} line 2: ", "'question' key, hints"),
        (lines(ROWS[0] | {"hints": "x"}), "{path} line 1: ", "'hints' str"),
        (lines(ROWS[0] | {"hints": ["x", 1]}), "{path} line 1: ", "'hints' list"),
        (lines(ROWS[0] | {"question": None}), "{path} line 1: ", "'question' NoneType"),
        (lines(*ROWS, ROWS[1]), "folder {folder}: ", "`rows 2 and 4` 'b'"),
        ("\n", "folder {folder}: ", "'toy'"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, place: str, named: str) -> None:
    path = write(tmp_path, text)
    told = refusal(suites.load_prompts, TOY, tmp_path)
    assert told.startswith(place.format(path=path, folder=tmp_path))
    assert [name for name in names(named) if name not in told] == []


@pytest.mark.parametrize("hints", [[], ["Hi", " "]])
def test_a_prompt_that_asks_nothing_is_refused(tmp_path: Path, hints: list[str]) -> None:
    path = write(tmp_path, lines({"key": 1, "hints": hints}))
    assert refusal(suites.load_prompts, CHAT, tmp_path).startswith(f"{path} line 1: ")


def test_without_any_column_there_is_nothing_to_balance() -> None:
    told = refusal(suites.draw, TOY, [Prompt("toy", "a", ("?",))], "here", 1, balance="language")
    assert told.startswith("--balance language: ") and "toy" in told


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    write(tmp_path, lines(*ROWS))
    assert refusal(suites.load_prompts, TOY, tmp_path, limit=0).startswith("--limit ")
    assert len(suites.load_prompts(TOY, tmp_path, limit=99).prompts) == 3


# The suites that ship


def test_groups_expand_in_order_and_each_suite_comes_once() -> None:
    assert [suite.name for suite in suites.expand(["code", "gsm8k", "humaneval", "math"])] == [
        "humaneval",
        "mbpp",
        "gsm8k",
        "math500",
        "aime24",
        "aime25",
    ]
    of_hub = {suite.name for suite in suites.known_suites().values() if suite.home == "hub"}
    assert {suite.name for suite in suites.expand(["paper"])} == of_hub == set(REAL_ROWS)


def test_an_unknown_name_lists_suites_and_groups() -> None:
    known = (
        "agentic_coding, aime24, aime25, alpaca, bfcl, blazedit_10k, blazedit_5k, ceval, chat, cnn_dm, code, "
        "financeqa, gpqa, gsm8k, hotpotqa, humaneval, ifeval, instructcoder, livecodebench, longbench_v2, math, "
        "math500, mbpp, mrcr, mt_bench, multilingual, paper, spec_bench, speed_bench, speed_bench_16k, "
        "speed_bench_1k, speed_bench_2k, speed_bench_32k, speed_bench_8k, swe_bench, swe_rebench"
    )
    told = refusal(suites.expand, ["math", "gsm8"])
    assert "'gsm8'" in told and "'gsm8k'" in told and told.endswith(f": {known}")


@each("suite", suites.known_suites().values())
def test_a_shipped_suite_is_pinned_and_uses_only_columns_it_requires(suite: Suite) -> None:
    templates = [*suite.turns, *suite.verbatim, suite.reference or ""]
    fields = {field for text in templates for _, field, _, _ in string.Formatter().parse(text) if field}
    parts = suite.id, suite.category, suite.turns_column, suite.messages, suite.conversation, suite.session
    fields -= {*suites.LETTERS[: len(suite.options)]}
    assert fields | {*parts, *suite.list_columns} - {None} <= set(suite.columns)
    forms = suite.turns, suite.turns_column, suite.messages, suite.conversation
    assert [bool(form) for form in forms].count(True) == 1
    if suite.home == "hub":
        assert len(suite.revision) == 40
        assert set(suite.revision) <= set("0123456789abcdef")
    assert suite.licence != "unknown"


def test_the_table_lists_groups_and_counts_the_shipped_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.toml").write_text('version = 1\ntitle = "t"\nsource = "n/t"\nscorer = "none"\n')
    (tmp_path / "bare.toml").write_text('version = 1\ntitle = "b"\nsource = "n/b"\nscorer = "none"\n')
    (tmp_path / "groups.toml").write_text('all = ["bare", "toy"]\nfew = ["toy"]\n')
    write(tmp_path / "embedded", lines(*ROWS))
    monkeypatch.setattr(suites, "data_folder", lambda: tmp_path)
    found = {listing.suite.name: (listing.groups, listing.num_embedded) for listing in suites.listings()}
    assert found == {"bare": (("all",), 0), "toy": (("all", "few"), 3)}
    assert suites.load_prompts(TOY).source == "embedded"


SCRIPTS = {
    "Arabic": "ARABIC",
    "Hindi": "DEVANAGARI",
    "Russian": "CYRILLIC",
    "Chinese": "CJK",
    "Japanese": "HIRAGANA",
    "Korean": "HANGUL",
}
"""Languages that are not written in Latin letters."""


def test_the_multilingual_suite_is_balanced_and_shipped_whole() -> None:
    (suite,) = suites.expand(["multilingual"])
    loaded = suites.load_prompts(suite, "hub")  # and no network
    assert (loaded.source, len(loaded.prompts)) == ("shipped", 192)
    places = Counter((prompt.slices["language"], prompt.category) for prompt in loaded.prompts)
    assert len(places) == 16 * 3 and set(places.values()) == {4}
    assert {category for _, category in places} == {"chat", "mathematics", "translation"}
    assert len({prompt.turns for prompt in loaded.prompts}) == 192
    drawn = suites.load_prompts(suite, limit=16, balance="language").prompts
    assert {prompt.slices["language"] for prompt in drawn} == {language for language, _ in places}


@each("prompt", suites.load_prompts(suites.known_suites()["multilingual"]).prompts)
def test_a_prompt_is_in_the_script_of_its_language(prompt: Prompt) -> None:
    (text,) = prompt.turns
    script = SCRIPTS.get(prompt.slices["language"], "LATIN")
    letters = [unicodedata.name(letter, "").split()[0] for letter in text if letter.isalpha()]
    # The sentence to translate is in English.
    own = letters[: letters.index("LATIN")] if prompt.category == "translation" and script != "LATIN" else letters
    assert sum(name == script for name in own) > (0.2 if script == "HIRAGANA" else 0.9) * len(own), text
    assert text == text.strip() and "  " not in text


def test_a_suite_of_the_users_own_folder_says_where_to_get_it(tmp_path: Path) -> None:
    (suite,) = suites.expand(["spec_bench"])
    for data in ("embedded", "hub"):
        told = refusal(suites.load_prompts, suite, data)
        for named in ("'spec_bench'", "question.jsonl", "suites prepare spec_bench --from FOLDER", "--data data"):
            assert named in told
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Again."], "reference": []},
        {"question_id": 401, "category": "rag", "turns": ["Where?"], "reference": [["here", "there"]]},
    ]
    (tmp_path / "spec_bench").mkdir()
    (tmp_path / "spec_bench/question.jsonl").write_text(lines(*rows))
    loaded = suites.load_prompts(suite, tmp_path)
    assert [(one.prompt_id, one.category, len(one.turns)) for one in loaded.prompts] == [
        ("81", "writing", 2),
        ("401", "rag", 1),
    ]
    listed = {one.suite.name: one.num_embedded for one in suites.listings()}
    assert (listed["spec_bench"], listed["multilingual"]) == (0, 192)


def test_longbench_is_read_from_its_one_json_file(tmp_path: Path) -> None:
    (suite,) = suites.expand(["longbench_v2"])
    about = {"domain": "Code", "sub_domain": "x", "difficulty": "easy", "length": "short", "answer": "B"}
    choices = {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    row = about | choices | {"_id": "66f", "question": "What does {f} do?", "context": "def f(): ...\n" * 50}
    (tmp_path / "longbench_v2").mkdir()
    path = tmp_path / "longbench_v2/data.json"
    path.write_text(json.dumps([row]))
    (prompt,) = suites.load_prompts(suite, tmp_path).prompts
    assert prompt.turns[0].startswith("Read this document.\n\ndef f(): ...\n")
    assert "Question: What does {f} do?\nA) a\nB) b\nC) c\nD) d\n" in prompt.turns[0]
    assert (prompt.reference, prompt.slices) == ("B", {key: about[key] for key in about if key != "answer"})
    path.write_text(json.dumps(row))
    assert refusal(suites.load_prompts, suite, tmp_path).startswith(f"{path}: ")
    path.write_text(json.dumps([row, 1]))
    assert refusal(suites.load_prompts, suite, tmp_path).startswith(f"{path} row 2: ")


def test_a_home_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text('version = 1\ntitle = "t"\nsource = "n/t"\nscorer = "none"\nhome = "cloud"\n')
    told = refusal(suites._parse, path)
    assert str(path) in told and "'cloud'; known: folder, hub, shipped" in told


def test_an_installed_package_reads_the_copy_inside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "__file__", str(tmp_path / "dflash_bench" / "tasks" / "suites.py"))
    assert suites.data_folder() == tmp_path / "suites"
    (tmp_path / "dflash_bench" / "_suites").mkdir(parents=True)
    assert suites.data_folder() == tmp_path / "dflash_bench" / "_suites"


@pytest.mark.parametrize("suite", suites.known_suites().values(), ids=lambda suite: suite.name)
def test_the_embedded_sample_loads(suite: Suite) -> None:
    if not (suites.data_folder() / "embedded" / suite.name).is_dir():
        pytest.skip(f"no embedded sample of {suite.name}")
    assert suites.load_prompts(suite).prompts


@pytest.mark.parametrize(("name", "num_rows"), REAL_ROWS.items())
def test_the_real_sets_load_whole(name: str, num_rows: int) -> None:
    folder = os.environ.get("DFLASH_BENCH_DATA")
    if not folder:
        pytest.skip("DFLASH_BENCH_DATA names no folder of the real sets")
    (suite,) = suites.expand([name])
    loaded = suites.load_prompts(suite, folder)
    assert loaded.num_rows == len(loaded.prompts) == num_rows
    assert {len(prompt.turns) for prompt in loaded.prompts} == {2 if name == "mt_bench" else 1}
    assert all((prompt.reference is None) == (suite.reference is None) for prompt in loaded.prompts)
