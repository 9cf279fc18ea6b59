"""The training loop with a toy: early stop, the best weights, and going on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_bench.training import trainer
from dflash_bench.training.trainer import DraftRecipe


class Rows:
    ids = torch.arange(9)[:, None]
    answer = torch.ones(9, 1, dtype=torch.bool)
    num_held_out = 1


class Toy(trainer.Objective):
    """Its loss pulls the weights on and on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.draft = nn.Linear(3, 3)

    def loss(self, index: list[int], step: int) -> Tensor:
        return (self.draft.weight - 5).square().mean() + self.draft.bias.square().mean()

    def accepted(self, index: list[int]) -> Tensor:
        return torch.ones(1)


def trained(path: Path, measures: list[float], **changes: Any) -> tuple[Toy, list[Any], list[Tensor]]:
    """With the weights at each measurement."""
    toy, seen, given = Toy(), [], iter(measures)

    def measure() -> float:
        seen.append(toy.draft.weight.detach().clone())
        return next(given)

    settings: dict[str, Any] = {"steps": 20, "matrix_lr": 0.1, "other_lr": 0.01, "rows": 4, "warmup": 1, **changes}
    rows: Any = Rows()
    history = trainer.train(toy, rows, DraftRecipe(**settings), path, lambda _: None, measure)
    return toy, history, seen


def test_training_ends_with_the_best_weights(tmp_path: Path) -> None:
    toy, history, seen = trained(tmp_path / "toy.pt", [1.0, 3.0, 2.0, 2.5, 2.9, 9.0], patience=3)
    assert [entry["al_pooled"] for entry in history] == [1.0, 3.0, 2.0, 2.5, 2.9]
    assert torch.equal(toy.draft.weight, seen[1]) and not torch.equal(seen[1], seen[-1])


def test_without_patience_the_last_weights_are_the_drafts(tmp_path: Path) -> None:
    toy, history, seen = trained(tmp_path / "toy.pt", [3.0, 1.0, 1.0, 1.0], steps=4)
    assert len(history) == 4 and torch.equal(toy.draft.weight, seen[-1])
    assert not (tmp_path / "toy.best").exists()


def test_the_best_weights_outlive_an_interruption(tmp_path: Path) -> None:
    """Stopped at the third measurement, by a failure, and started again."""

    def failing() -> Iterator[float]:
        yield from (1.0, 3.0)
        raise RuntimeError("the power went")

    toy, given = Toy(), failing()
    seen: list[Tensor] = []

    def measure() -> float:
        value = next(given)
        seen.append(toy.draft.weight.detach().clone())
        return value

    recipe = DraftRecipe(steps=20, matrix_lr=0.1, other_lr=0.01, rows=4, warmup=1, patience=3)
    rows: Any = Rows()
    run: Callable[..., Any] = trainer.train
    with pytest.raises(RuntimeError, match="the power went"):
        run(toy, rows, recipe, tmp_path / "toy.pt", lambda _: None, measure)
    again, history, _ = trained(tmp_path / "toy.pt", [2.0, 2.5, 2.9], patience=3)
    assert [entry["al_pooled"] for entry in history] == [1.0, 3.0, 2.0, 2.5, 2.9]
    assert torch.equal(again.draft.weight, seen[1])


def test_between_measurements_it_is_saved_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted training continues as if it had never stopped."""

    class Cut(Toy):
        def loss(self, index: list[int], step: int) -> Tensor:
            if step == 6 and (tmp_path / "cut.pt").exists() and not (tmp_path / "again").exists():
                raise RuntimeError("the power went")
            return super().loss(index, step)

    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    recipe = DraftRecipe(steps=8, matrix_lr=0.1, other_lr=0.01, rows=1, warmup=1)
    rows: Any = Rows()
    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train(Cut(), rows, recipe, tmp_path / "cut.pt", lambda _: None)
    assert torch.load(tmp_path / "cut.pt", weights_only=True)["step"] == 5
    (tmp_path / "again").touch()
    cut, whole = Cut(), Toy()
    trainer.train(cut, rows, recipe, tmp_path / "cut.pt", lambda _: None)
    trainer.train(whole, rows, recipe, tmp_path / "whole.pt", lambda _: None)
    assert torch.equal(cut.draft.weight, whole.draft.weight)


def test_a_short_training_is_measured_eight_times_and_a_long_one_twice_an_epoch(tmp_path: Path) -> None:
    _, history, _ = trained(tmp_path / "short.pt", [1.0] * 9, steps=16, rows=1)
    assert [entry["step"] for entry in history] == [2, 4, 6, 8, 10, 12, 14, 16]
    _, history, _ = trained(tmp_path / "once.pt", [1.0] * 9, steps=8, rows=1, measurements=1)
    assert [entry["step"] for entry in history] == [4, 8]


def test_the_history_counts_the_tokens_that_were_read(tmp_path: Path) -> None:
    _, history, _ = trained(tmp_path / "toy.pt", [1.0] * 4, steps=4)
    assert [entry["tokens"] for entry in history] == [4, 8, 12, 16]
