"""Servers that do not fit into memory together are refused before any of them starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_bench.core import environment
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]


def test_servers_that_do_not_fit_together_are_refused(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_bytes", lambda: 1_000_000)
    words = "run --suite gsm8k --model nano --limit 2 --method dflash --launch vllm --launch-with sh --out run".split()
    assert_refused(main(*words), "3 times", "0.0 GB are free")
    assert not Path("run").exists()
