"""Refusals of commands that read runs: one line that names the fault, exit status 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.results import store
from helpers import runs
from helpers.each import each
from helpers.refusals import SERVED, assert_refused, names
from helpers.rows import failed

Main = Callable[..., tuple[int, str, str]]
NOT_SERVED: dict[str, Any] = {
    "output_throughput": "fast",
    "completed": "many",
    "failed": True,
    "max_concurrency": 1.5,
    "mean_tpot_ms": float("nan"),
    "mean_ttft_ms": -1,
    "spec_decode_acceptance_rate": "38",
    "spec_decode_num_drafts": 10**400,
    "spec_decode_accepted_tokens": [1],
    "spec_decode_per_position_acceptance_rates": [0.9, "0.8"],
}
EDITS: dict[str, dict[str, Any]] = {
    "no-number": {"schema": "1"},
    "no-identity": {"identity": []},
    "no-environment": {"environment": None},
    "no-command": {"command": None},
    "later": {"schema": 99},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("refused")
    rows = runs.answers(6)
    for name, own in {
        "run": rows,
        "again": rows,
        "others": [replace(row, prompt_id=f"q{row.prompt_id}") for row in rows],
        "reworded": [replace(row, prompt_hash="other") if row.prompt_id == "p003" else row for row in rows],
        "suite": runs.answers(2, suite="math500"),
        "alone": [row for row in rows if row.method != "ar"],
        "failed": [failed("ar", "a", "no memory\nleft"), failed("dflash", "a", "later", order=1)],
        "damaged": runs.answers(12),
        **dict.fromkeys(EDITS, rows[:2]),
    }.items():
        runs.stored(home / name, own, in_parts=name == "damaged")
    for name, changes in EDITS.items():
        path = home / name / "run.json"
        info = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in info.items() if value is not None}))
    part = home / "damaged" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with store.create(home / "unfinished", runs.bare()) as unfinished:
        unfinished.append(runs.answers(2))
    asked = runs.asked("gsm8k")
    runs.stored(home / "hub", rows, **asked)
    runs.stored(home / "warm", rows, temperature=0.7, **asked)
    runs.stored(home / "other-7b", rows, model="qwen3-8b", target="my/Other-7B", **asked)
    runs.stored(home / "embedded-8b", rows, target="Qwen/Qwen3-8B")
    thinking = runs.answers(2, suite="mbpp")
    runs.stored(home / "thinking", thinking, target="Qwen/Qwen3-8B", thinking=True, **runs.asked("mbpp"))
    runs.stored(home / "another-model", rows, model="another")
    public = {"gsm8k": runs.SUITES["gsm8k"] | {"source": "hub openai/gsm8k@" + "a" * 40, "scorer": "gsm8k_number"}}
    runs.stored(home / "public", runs.changed(rows, passed=True), suites=runs.SUITES | public)
    (home / "file").write_text("")
    (home / "no-tokenizer.json").write_text('{"version": 1}')
    (home / "empty").mkdir()
    files = {"serve": SERVED, "nothing": {}, "idle": SERVED | {"completed": 0}} | {
        f"bad-{key}": SERVED | {key: value} for key, value in NOT_SERVED.items()
    }
    files["bad-by-name"] = SERVED | {"spec_decode_per_position_acceptance_rates": {"a": 1}}
    files["other-formula"] = SERVED | {"spec_decode_acceptance_length": 5.46}
    for name, made in files.items():
        (home / f"{name}.json").write_text(json.dumps(made))
    (home / "cut.json").write_text("[")
    return home


TABLE = [
    # (command, what its line names)
    ("compare run others", "run others prompt"),
    ("compare run suite", "run suite method"),
    ("compare run reworded", "prompts gsm8k p003 `1 of 6`"),
    ("compare run run", "itself"),
    ("compare run --allow model", "--allow model single"),
    ("compare alone --allow unfinished", "alone gsm8k"),
    ("compare damaged", "damaged/part-000001.parquet --allow damaged"),
    ("compare absent", "absent"),
    ("compare run --by colour", "'colour' category context-position"),
    ("compare run --by langauge", "'langauge'"),
    ("compare run --against blog", "'blog'"),
    ("compare run --compat vllm", "'vllm' zlab zlab-2026-08"),
    ("compare run --allow all", "'all' damaged"),
    ("compare run --compat zlab --by turn", "--compat --by"),
    ("compare run --compat zlab --against paper", "--compat"),
    ("compare run again -o x.html --json", "--json --out"),
    *[
        (f"compare {name}", f"{name}/run.json {what}")
        for name, what in (
            ("no-number", ""),
            ("no-identity", ""),
            ("no-environment", "environment"),
            ("no-command", "command"),
        )
    ],
    ("compare hub --against paper", "'nano'"),
    ("compare warm --against paper:Qwen3-4B", "Qwen3-4B `temperature 0.7`"),
    ("compare other-7b --against paper", "'my/Other-7B'"),
    ("compare embedded-8b --against paper", "gsm8k embedded --data"),
    ("compare thinking --against paper", "Qwen3-8B thinking mbpp"),
    ("compare serve.json", "folder run"),
    ("compare run nothing.json", "nothing.json SGLang"),
    ("compare run cut.json", "cut.json"),
    ("compare run idle.json", "idle.json"),
    ("compare run other-formula.json", "other-formula.json formula"),
    ("compare run bad-by-name.json", "spec_decode_per_position_acceptance_rates"),
    *[(f"compare run bad-{key}.json", f"`bad-{key}.json: {key}`") for key in NOT_SERVED],
    ("report run --format excel", "'excel' csv json latex markdown table"),
    ("report run --answers 5", "--answers --out"),
    ("report run --tokenizer x", "--tokenizer --out"),
    ("report run --allow anything", "'anything' damaged doubled foreign invalid unfinished"),
    ("report run -o page.html --tokenizer .", "tokenizer.json"),
    ("report run -o page.html --tokenizer no-tokenizer.json", "no-tokenizer.json"),
    ("report run -o file/page.html", "file/page.html"),
    ("report run -o page.pdf", "page.pdf .html .md"),
    ("report run -o run", "run"),
    ("report run -o a.csv --format json", "--format a.csv"),
    ("report run -o a.md --layout paper", "--layout"),
    ("report run --layout paper", "--layout --format"),
    ("report run --format latex --layout papr", "'papr' 'paper'"),
    ("report damaged", "part-000001.parquet --allow damaged"),
    ("report later", "`schema 99` update"),
    *[(f"{command} absent", "absent") for command in ("report", "card", "plot")],
    *[(f"{command} unfinished", "unfinished --allow") for command in ("report", "card", "plot")],
    *[
        (f"{command} failed{rest}", "failed `2 answers`")
        for command, rest in (
            ("compare", ""),
            ("movie", ""),
            ("plot", ""),
            ("card", " --hub hub"),
            ("report", " --format latex"),
            ("report", " --by category"),
        )
    ],
    ("plot run --format gif", "'gif' pdf pgf png svg"),
    ("plot run again", "-o"),
    ("plot run --allow dtype", "'dtype' damaged doubled foreign invalid"),
    ("plot run again -o there --allow all", "'all'"),
    ("plot run --paper colum", "'colum' 'column'"),
    ("plot run again -o x --paper page", "--paper"),
    ("movie run --method eagle3", "'eagle3' dflash"),
    ("movie run --answer gsm8k/none", "gsm8k/none"),
    ("movie run --tokenizer absent", "absent tokenizer.json"),
    ("movie another-model", "--tokenizer"),
    ("card run --hub card", "scores"),
    ("card public --hub file", "file"),
    ("card alone --hub card --allow unfinished", "alone plain"),
    ("index empty", "empty"),
]


@each("words, named", TABLE)
def test_it_is_refused_by_name(
    words: str, named: str, place: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    assert_refused(main(*words.split()), *names(named))
    assert sorted(place.iterdir()) == before
