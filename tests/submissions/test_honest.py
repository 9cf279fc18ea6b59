"""Honest runs of many kinds are accepted: what a kind leaves unchecked is named, and nothing is refuted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.results import pack
from dflash_bench.results.merge import merge
from dflash_bench.submissions.accept import accept
from dflash_bench.submissions.request import AcceptRequest
from helpers.each import each

USUAL: dict[str, Any] = {"model": "nano", "suite": "gsm8k", "methods": ["dflash"], "limit": 2, "max_new_tokens": 16}


def unchecked(run: Path, **more: Any) -> set[str]:
    """Accept the run, with all of its answers drawn. Return the checks without a result."""
    file = run.with_suffix(".zip")
    pack.write(run, file)
    record = accept(AcceptRequest(file, share=1.0, **more), run.with_name("accepted"), lambda _: None)
    assert record.is_accepted, record.findings
    return {one.check for one in record.of_state("unchecked")} - {"times"}


OFTEN: Sequence[tuple[dict[str, Any], set[str]]] = [
    ({"temperature": [0.0, 1.0], "methods": ["dflash", "eagle3"]}, set()),
    ({"suite": "mt_bench"}, {"scores"}),
    ({"over": ["temperature=0,1"], "headroom": 4}, set()),
    ({"limit": 4, "concurrency": [1, 4]}, set()),
    ({"suite": "humaneval", "repeats": 2}, set()),
]
IN_FULL: Sequence[tuple[dict[str, Any], set[str]]] = [
    ({"methods": ["eagle3-tree", "ddtree"]}, set()),
    ({"methods": ["suffix"]}, {"counts"}),
    ({"methods": ["dflash:block=auto"]}, {"counts"}),
    ({"methods": ["ngram", "lookahead"]}, set()),
    ({"thinking": "both"}, set()),
    ({"dtype": "bfloat16"}, set()),
    ({"quantize": "int8"}, set()),
    ({"context": [512]}, set()),
    ({"engine": "transformers"}, set()),
    ({"kernels": "torch"}, set()),
    ({"suite": "math500", "record": "every-position"}, {"measurements"}),
    ({"headroom": 4}, set()),
    ({"methods": ["suffix", "ngram"]}, {"counts"}),
    ({"methods": ["dflash:block=auto", "ngram"]}, {"counts"}),
    ({"over": ["block=4,8"]}, set()),
    ({"over": ["temperature=0,1"]}, set()),
    ({"over": ["context=256,512"]}, set()),
    ({"suite": ["gsm8k", "mt_bench"]}, set()),
    ({"audit": "none"}, set()),
    ({"skip": 1}, set()),
    ({"budget": "3s", "limit": 8}, set()),
]


def accepted(changes: dict[str, Any], names: set[str], out: Path) -> None:
    db.run(**{**USUAL, **changes}, out=out / "run")
    assert unchecked(out / "run") == names


@each("changes, names", OFTEN)
def test_an_honest_run_is_accepted(tmp_path: Path, changes: dict[str, Any], names: set[str]) -> None:
    accepted(changes, names, tmp_path)


@pytest.mark.in_full
@each("changes, names", IN_FULL)
def test_honest_runs_of_all_kinds_are_accepted(tmp_path: Path, changes: dict[str, Any], names: set[str]) -> None:
    accepted(changes, names, tmp_path)


def test_merged_shards_are_accepted(tmp_path: Path) -> None:
    for number in (1, 2):
        db.run(**{**USUAL, "limit": 4}, shard=f"{number}/2", out=tmp_path / str(number))
    with pytest.raises(db.UserError, match="merge all shards"):
        pack.write(tmp_path / "1", tmp_path / "1.zip")
    merge([tmp_path / "1", tmp_path / "2"], tmp_path / "run")
    assert unchecked(tmp_path / "run") == set()


def test_own_prompts_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "What is 2 plus 3?"}\n')
    db.run(**{**USUAL, "suite": (), "limit": None}, prompts=prompts, out=tmp_path / "run")
    with pytest.raises(db.UserError, match="--prompts"):
        unchecked(tmp_path / "run")
    prompts.rename(tmp_path / "elsewhere.jsonl")
    assert unchecked(tmp_path / "run", prompts=tmp_path / "elsewhere.jsonl") == {"scores"}
