"""Memory bandwidth: measured by a known clock, and compared with known plain steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.core import environment
from dflash_bench.models import chat, hub, targets
from dflash_bench.perf import measure
from dflash_bench.results import table
from helpers.runs import answers, stored

MIB = 2**20
Main = Callable[..., tuple[int, str, str]]


def test_tests_that_do_not_ask_for_shared_models_have_the_product_itself() -> None:
    """Whatever ran before in this process."""
    sound = measure.forward_curve, measure.least_s, hub.weights_sha256, targets.load, targets.tokenizer_of, chat.decoder
    assert not any(hasattr(function, "__wrapped__") for function in sound)


class Ticking:
    """Between two marks lie the seconds of this list, the last of them for ever."""

    def __init__(self, seconds: list[float]) -> None:
        self.durations = seconds

    def mark(self) -> None: ...

    def seconds(self, _start: None, _end: None) -> float:
        return self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """The bandwidth of a machine with this cache and memory, whose sums take these seconds."""

    def bandwidth(seconds: list[float], cache: int | None, free: int | None, at_least: int = 0) -> float:
        monkeypatch.setattr(measure, "clock_for", lambda _: Ticking(list(seconds)))
        monkeypatch.setattr(environment, "cache_bytes", lambda: cache)
        monkeypatch.setattr(environment, "free_bytes", lambda: free)
        return measure.read_bandwidth(torch.device("cpu"), at_least)

    return bandwidth


def test_it_is_what_sums_read_of_more_than_the_caches_hold(clocked: Callable[..., float]) -> None:
    """A piece of 32 MiB takes a second."""
    assert clocked([1.0], cache=None, free=None) == 32 * MIB
    assert clocked([1.0], cache=160 * MIB, free=8 * 2**30) == 32 * MIB
    assert clocked([1.0], cache=2**20, free=8 * 2**30, at_least=320 * MIB) == 32 * MIB


def test_of_every_piece_the_quickest_turn_counts(clocked: Callable[..., float]) -> None:
    """Eight pieces three times: each of them is quick in one of the turns, and interrupted in the others."""
    turns = [4.0] * 5 + [1.0] * 3 + [1.0] * 5 + [9.0] * 3 + [2.0] * 7
    assert clocked([*turns, 2.0], cache=None, free=None) == 256 * MIB / 8


def test_it_reads_twice_the_cache_if_there_is_room(
    clocked: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(measure, "_quickest_s", lambda calls, _: read.append(len(calls)) or [1.0])
    for cache, free, at_least, pieces in (
        (None, None, 0, 8),
        (160 * MIB, 8 * 2**30, 0, 10),
        (2**20, 8 * 2**30, 320 * MIB, 10),
        # An eighth of the memory is free for it, but in less than 256 MiB caches would answer.
        (480 * MIB, 2560 * MIB, 0, 10),
        (480 * MIB, 100 * MIB, 0, 8),
    ):
        clocked([1.0], cache, free, at_least)
        assert read.pop() == pieces


def test_elsewhere_it_is_what_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "clock_for", lambda _: Ticking([0.0625, 0.03125, 0.0625]))
    assert measure.read_bandwidth(torch.device("meta")) == 2 * 2**30 / 0.03125


def test_the_largest_cache_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    assert environment.cache_bytes(tmp_path / "none") is None
    for number, size in enumerate(("48K", "2048K", "32768K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert environment.cache_bytes(tmp_path) == 32 * MIB


# The share of it that plain decoding reaches: `runs.answers` takes 10 ms for each of its rounds.


def run_with(folder: Path, **changes: Any) -> Path:
    """A step reads a megabyte, and two of eight experts of 100 kB each."""
    size = {
        "weight_bytes": 1_000_000,
        "matrix_elements": 250_000,
        "attention": [],
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_bytes": 100_000,
    }
    known = {"rows": 1, "context": 5, "seconds": {"1": 0.01}, "bandwidth": 1e9, "products": 1e15, "size": size}
    path = stored(folder, answers(noise=0))
    where = path / "run.json"
    where.write_text(json.dumps(json.loads(where.read_text()) | {"forwards": known | changes}))
    return path


def cells(folder: Path) -> list[Cell]:
    read = table.read_run(folder)
    return summarise(read.rows, read.info.identity)


def test_plain_decoding_reaches_the_share_that_its_weights_are_of_what_memory_gives(tmp_path: Path) -> None:
    for cell in cells(run_with(tmp_path / "run", read_bandwidth=240e6)):
        share = cell.value("bandwidth_share")
        # 1.2 MB at 240 MB/s are 5 ms of a round's 10.
        assert share == (pytest.approx(0.5, rel=1e-6) if cell.method == "ar" else None)


def test_a_run_that_did_not_measure_its_memory_has_no_share(tmp_path: Path) -> None:
    assert not any("bandwidth_share" in cell.figures for cell in cells(run_with(tmp_path / "run")))


def test_reports_show_the_share_where_it_is_known_and_no_column_elsewhere(tmp_path: Path, main: Main) -> None:
    run_with(tmp_path / "known", read_bandwidth=240e6)
    run_with(tmp_path / "unknown")
    assert "| bandwidth share |" in main("report", "known", "--format", "markdown")[1]
    assert "| bandwidth share |" not in main("report", "unknown", "--format", "markdown")[1]
    reached = "plain decoding uses 50 % of memory bandwidth"
    assert f"95 %; {reached})" in main("card", "known")[1] and reached not in main("card", "unknown")[1]
    main("report", "known", "-o", "page.html")
    assert "plain decoding uses 50 %" in (tmp_path / "page.html").read_text(encoding="utf-8")
