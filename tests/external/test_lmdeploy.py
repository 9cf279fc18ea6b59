"""lmdeploy's command line, checks of drafts, HTTP server and counters, over an engine that answers from a table.

lmdeploy's engines need CUDA; all else of it runs here. The table is our engine's answers with DFlash, so that tokens
and counts are known.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import contracts
import pytest
from contracts import Told

from dflash_bench.models import presets

pytestmark = pytest.mark.lmdeploy
AS_PUBLISHED = """
import sys
from lmdeploy.pytorch.config import CacheConfig, SpecDecodeConfig
cache = CacheConfig(max_batches=1, block_size=64, num_cpu_blocks=0, num_gpu_blocks=0)
SpecDecodeConfig.from_config("dflash", 7, sys.argv[1], cache, target_model=sys.argv[2], dtype="bfloat16")
"""
FOUND = (
    "The client received exactly the table's tokens and counts. z-lab's files are rejected as published, because their "
    "block size is not in `dflash_config`; files from `convert --to lmdeploy` are accepted."
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, server_environment: Callable[[str], Path]) -> Told:
    server_environment("lmdeploy")
    return contracts.told_by("lmdeploy", tmp_path_factory.mktemp("lmdeploy"))


def test_it_takes_our_flags_and_drafts_and_gives_its_tokens(told: Told) -> None:
    """The server starts only if its own parser and its own check of drafts take what `--launch` gives."""
    contracts.assert_same_tokens(told.plain, told.table)
    contracts.assert_same_tokens(told.drafted, told.table)


def test_its_counters_are_read_as_the_engine_told_them(told: Told) -> None:
    contracts.assert_same_counts(told.drafted, told.table, "lmdeploy.counters")


def test_it_refuses_a_draft_as_published(server_environment: Callable[[str], Path]) -> None:
    """If this fails, lmdeploy reads z-lab's files, and `convert --to lmdeploy` is not needed any more."""
    python = server_environment("lmdeploy") / "bin" / "python"
    done = subprocess.run(
        [python, "-c", AS_PUBLISHED, str(presets.NANO / "dflash"), str(presets.NANO / "target")],
        capture_output=True,
        text=True,
    )
    assert done.returncode and "block_size" in done.stderr.splitlines()[-1]


def test_page(
    told: Told,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    server_environment: Callable[[str], Path],
) -> None:
    version = contracts.version(server_environment("lmdeploy"), "lmdeploy")
    parts = f"lmdeploy {version}: its command line, its check of drafts, its HTTP server and its counters. Its engines"
    blocks = contracts.blocks("lmdeploy", command("lmdeploy"), parts, FOUND, told.drafted)
    write_page("servers/contract-lmdeploy.md", blocks)
