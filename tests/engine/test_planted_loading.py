"""Faults in what the engine shares with nobody: its weights, hooks, stop ids, template and tokenizer.

Each is planted into `dflash-bench run` of nano, and ends in exit status 1: the judge has its own of all of these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.engine import backend, selection
from dflash_bench.engine.forward import layers
from dflash_bench.engine.judge_weights import OTHER_PROMPT
from dflash_bench.models import loading
from dflash_bench.models.weights import twin
from dflash_bench.results.run_info import read_info
from dflash_bench.runner.loop import Conversation
from helpers.faults import matrix
from helpers.faults.in_engine import Fault
from helpers.faults.in_loading import (
    PLANTS,
    hooked_head,
    in_loading,
)
from helpers.faults.matrix import Part, Way


def damaged_joined(patch: pytest.MonkeyPatch) -> None:
    """Where small weights are joined in a copy, and where large ones stay the model's own."""
    sound = layers.join_weights

    @torch.no_grad()
    def damaged(groups: Sequence[Sequence[Tensor]]) -> Tensor:
        whole = sound(groups)
        if len(groups[0]) > 1:
            whole[:, ::3] *= 0.5
        return whole

    patch.setattr(layers, "join_weights", damaged)


METHODS = matrix.METHODS[:1]
"""A fault in plain decoding is in every method; `scripts/study faults` takes all."""
SHORT = Part(limit=1, most=16, suites=matrix.SUITES[:1], methods=METHODS)
"""One answer of each method."""
OF_PROMPTS = ("another template", "another rendering", "a prompt without its first token")


@pytest.mark.parametrize(
    ("name", "engine"), [(name, engine) for name, (_, engines) in PLANTS.items() for engine in engines]
)
def test_what_the_engine_loaded_wrongly_is_found(name: str, engine: str, tmp_path: Path) -> None:
    plant, _ = PLANTS[name]
    # Uncut, the answer ends by itself.
    part = replace(SHORT, most=matrix.MOST) if name.startswith("stop") else SHORT
    status, rows = matrix.run(Fault(name, plant), Way(engine), tmp_path / "run", part)
    assert status == 1
    wrong = [row for row in rows if "mismatch" in (row.exactness, row.audit)]
    # Drafted answers equal the plain ones, so a comparison of both is blind to it.
    assert {row.method for row in wrong} == {"ar", *METHODS}
    objections = read_info(tmp_path / "run").to_json()["objections"]
    assert (set(objections) == {OTHER_PROMPT}) == (name in OF_PROMPTS)


def test_weights_damaged_where_they_are_joined_are_found(tmp_path: Path) -> None:
    """In bfloat16 the parts of what is joined are the model's own weights, so transformers' code computes with them."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        damaged_joined(patch)
        in_loading(lambda _models: None)(patch)
        # The comparison with transformers' code would refuse them.
        patch.setattr(selection, "_disagreement", lambda *_: None)

    # Nano bears this long: the answers differ from the 17th token of this suite on.
    part = Part(limit=1, suites=matrix.SUITES[1:], methods=METHODS)
    status, rows = matrix.run(Fault("damaged", plant), Way(dtype="bfloat16"), tmp_path / "run", part)
    assert status == 1
    assert {row.method for row in rows if "mismatch" in (row.exactness, row.audit)} == {"ar", *METHODS}


@pytest.mark.parametrize("way", [Way(), Way(dtype="bfloat16"), Way(kernels="torch")], ids=str)
def test_damaged_weights_do_not_pass_the_comparison_with_transformers_code(way: Way, tmp_path: Path) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        damaged_joined(patch)
        in_loading(lambda _models: None)(patch)

    status, _, error = matrix.ended(Fault("damaged", plant), way, tmp_path / "run", SHORT)
    assert status == 2 and "--engine native computes this target differently" in error


def test_a_run_that_fell_back_from_damaged_weights_says_so_and_fails_check(tmp_path: Path) -> None:
    """Its answers are right, and its speed-ups those of slower code."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        damaged_joined(patch)
        in_loading(lambda _models: None)(patch)

    words = ("--suite", "gsm8k", "--method", "ngram", "--limit", 1, "--max-new-tokens", 16, "--out", tmp_path / "run")
    with matrix.planted(Fault("damaged", plant), Way()):
        status, said, noted = matrix.command("run", *words)
    assert status == 0 and "transformers' code" in said and "transformers' code" in noted
    status, said, _ = matrix.command("check", tmp_path / "run", "--json")
    failed = [(one["kind"], one["code"]) for one in json.loads(said)["checks"] if one["failed"]]
    assert (status, failed) == (1, [("fallback", "fallback")])


# Where weights are shared


def shared(patch: pytest.MonkeyPatch) -> None:
    for room in ("has_room", "has_room_for_layers"):
        patch.setattr(f"dflash_bench.engine.judge_weights.{room}", lambda *_: False)
    # Models of its own: what is planted here changes them.
    patch.setattr(loading, "load", matrix.LOAD)


def test_a_judge_that_shares_weights_says_so_and_a_sound_run_passes(tmp_path: Path) -> None:
    status, rows = matrix.run(Fault("shared", shared), Way("transformers"), tmp_path / "run", SHORT)
    assert status == 0 and {row.audit for row in rows} == {"exact"}
    assert read_info(tmp_path / "run").to_json()["identity"]["judge"]["weights"] == "shared weights"


def test_shared_weights_that_change_while_a_run_goes_on_end_it_and_nobody_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        shared(patch)
        judged = Conversation.judged

        @torch.no_grad()
        def faulty(self: Any, *asked: Any) -> Any:
            self.backend.target.model.model.layers[3].mlp.down_proj.weight[5, 7] += 1e-3
            return judged(self, *asked)

        patch.setattr(Conversation, "judged", faulty)

    status, _, error = matrix.ended(Fault("changed", plant), Way("transformers"), tmp_path / "run", SHORT)
    assert status == 2
    assert "model.layers.3.mlp.down_proj.weight changed during the run" in error
    status, _, error = matrix.command("compare", tmp_path / "run", "--allow", "unfinished")
    assert status == 2 and "proves nothing" in error


def test_shared_weights_that_are_damaged_where_they_are_joined_are_refused(tmp_path: Path) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        shared(patch)
        sound = layers.join_weights

        @torch.no_grad()
        def faulty(groups: Sequence[Sequence[Tensor]]) -> Tensor:
            groups[0][0].data[0, 0:1] += 1
            return sound(groups)

        patch.setattr(layers, "join_weights", faulty)
        patch.setattr(selection, "_disagreement", lambda *_: None)

    status, _, error = matrix.ended(Fault("damaged", plant), Way(), tmp_path / "run", SHORT)
    assert status == 2 and "was changed when the engine laid out its weights" in error


def test_a_twin_of_shared_weights_has_no_hook() -> None:
    model = matrix.LOAD("nano", [], "cpu", torch.float32).target
    hooked_head(loading.Models(model, None, {}, {}))
    assert twin(model).lm_head._forward_hooks
    judge = backend.judge_of_model(model, frozenset, 8)
    assert not any(module._forward_hooks for module in judge.judge.model.modules())
