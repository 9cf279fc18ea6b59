"""A run with a quantised target: what its files say, and what it is not mixed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.results import parts
from dflash_bench.results.run_info import read_info
from dflash_bench.runner import session
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_and_model
from helpers import tiny

Main = Callable[..., tuple[int, str, str]]
ASKED = RunRequest(suites=("gsm8k",), methods=("dflash",), limit=2, max_new_tokens=8)


def test_a_sweep_over_it_is_refused() -> None:
    with pytest.raises(UserError, match="--quantize"):
        methods_and_model(replace(ASKED, over=("quantize=none,int8",)))


def test_a_quantised_run_says_so_and_is_not_mixed_with_another(tmp_path: Path, main: Main) -> None:
    asked = replace(ASKED, model=str(tiny.build(tmp_path / "model")))
    for name, kind in (("plain", None), ("quantised", "int8")):
        session.perform(replace(asked, quantize=kind), tmp_path / name, resume=False, caller=session.Caller(print))
    infos = {name: read_info(tmp_path / name).to_json() for name in ("plain", "quantised")}
    assert [infos[name]["identity"]["quantize"] for name in infos] == [None, "int8"]
    assert infos["quantised"]["identity"]["network"] == "native, numba kernels"
    weights = [infos[name]["memory"]["target_weights_bytes"] for name in infos]
    assert weights[1] < weights[0]
    # The kernels hold the head once more, a byte for each weight.
    head = tiny.VOCABULARY * tiny.HIDDEN
    assert infos["quantised"]["forwards"]["size"]["stored_bytes"] + head == weights[1]
    kinds = {
        row["quantize"]
        for part in parts.of(tmp_path / "quantised")
        for batch in parts.batches(part, ["quantize"])
        for row in batch.to_pylist()
    }
    assert kinds == {"int8"}
    with pytest.raises(UserError, match='quantize was "int8"'):
        session.perform(asked, tmp_path / "quantised", resume=True, caller=session.Caller(print))
    status, _, error = main("compare", "plain", "quantised")
    assert status == 2 and "quantize none and int8" in error and "--allow dtype" in error
    shown = json.loads(main("compare", "plain", "quantised", "--allow", "dtype", "--json")[1])
    (agreement,) = shown["plain_answers"]
    assert agreement["num_answers"] == 2 and 0 <= agreement["num_equal"] <= 2
    assert "quantize int8" in main("report", "quantised")[1] + main("card", "quantised")[1]
