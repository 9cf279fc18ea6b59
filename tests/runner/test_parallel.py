"""Tensor parallel: two processes give the answers and acceptance of one; a failing process ends the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine.parallel import Follower
from dflash_bench.models import memory, parallel, targets
from dflash_bench.models.presets import NANO
from dflash_bench.results import store
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.setup import device_and_dtype
from helpers import tiny
from helpers.each import each
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]
METHODS = ("dflash", "eagle3:2", "ddtree:nodes=6")
WORDS = ["run", "--suite", "gsm8k", "--model", "model", "--method", ",".join(METHODS), "--max-new-tokens", "8"]
COMMAND = [sys.executable, "-m", "dflash_bench.cli"]


def answers(run: Path) -> dict[store.Key, tuple[Any, ...]]:
    rows = store.load(run)[1]
    return {
        store.key(row): (row.generation.token_ids, row.generation.accepted, row.exactness, row.audit) for row in rows
    }


def test_two_processes_give_what_one_gives(tmp_path: Path, main: Main) -> None:
    """The head is not tied to the embedding, so both are replicated."""
    tiny.build(tmp_path / "model", num_key_value_heads=2, tie_word_embeddings=False)
    done = subprocess.run(
        [*COMMAND, *WORDS, "--limit", "2", "--tensor-parallel", "2", "--out", "two"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert main(*WORDS, "--limit", 2, "--engine", "transformers", "--out", "one")[0] == 0
    two, one = answers(tmp_path / "two"), answers(tmp_path / "one")
    assert two == one and len(two) == 2 * (1 + len(METHODS))
    assert {row[2:] for row in two.values()} <= {("exact", "exact"), (None, "exact")}
    info = json.loads((tmp_path / "two" / "run.json").read_text())
    assert (info["identity"]["tensor_parallel"], info["identity"]["network"]) == (2, "transformers")


def test_a_process_that_ends_stops_the_run(tmp_path: Path) -> None:
    tiny.build(tmp_path / "model", num_key_value_heads=2, tie_word_embeddings=False)
    command = [*COMMAND, *WORDS, "--limit", "32", "--tensor-parallel", "2", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        ends_s = time.monotonic() + 120
        while not [*(tmp_path / "run").glob("part-*")] and time.monotonic() < ends_s and process.poll() is None:
            time.sleep(0.1)
        (follower,) = (
            int(pid)
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if parallel.CODE in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(follower, signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 2, said[-3000:]
    assert "--tensor-parallel: a process exited with status -9" in said.splitlines()[-1]


def test_a_pass_that_fails_here_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in the middle of the pass, and would take the next call for the rest of it."""
    monkeypatch.setattr(parallel.distributed, "broadcast_object_list", lambda *_, **__: None)
    with subprocess.Popen(["sleep", "600"]) as other:
        followers = parallel.Followers([other])
        failing = followers.announced("target", "forward", (), {})
        with pytest.raises(UserError, match="--tensor-parallel: CUDA out of memory; continue with --resume"), failing:
            raise RuntimeError("CUDA out of memory")
    assert other.returncode == -signal.SIGKILL


def test_a_process_that_ends_before_it_is_connected_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "CODE", "raise SystemExit(3)")
    with pytest.raises(UserError, match="--tensor-parallel: a process exited with status 3; give fewer"):
        parallel.start(2, "no source is read")
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys()


def test_an_interrupted_pass_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that clean up are not announced to processes that wait in the middle of the pass."""
    announced: list[object] = []
    monkeypatch.setattr(parallel.distributed, "broadcast_object_list", lambda calls, **_: announced.extend(calls))
    with subprocess.Popen(["sleep", "600"]) as other:
        followers = parallel.Followers([other])
        with pytest.raises(KeyboardInterrupt), followers.announced("target", "forward", (), {}):
            raise KeyboardInterrupt
        with followers.announced("target", "tap", (), {}):
            pass
    assert other.returncode == -signal.SIGKILL and len(announced) == 1


class CacheInOtherMode:
    """A cache that a pass fills, and the path of a tree is kept in."""

    def forward(self) -> None:
        self.stack = torch.zeros(4) + 1

    def keep_path(self, path: torch.Tensor) -> None:
        self.stack[:2] = self.stack[path]


def test_the_others_keep_the_path_of_a_tree() -> None:
    follower = object.__new__(Follower)
    follower.objects, follower.device = {"target": CacheInOtherMode()}, torch.device("cpu")
    with torch.inference_mode():
        follower.repeat(parallel.Announcement("target", "forward", (), {}))
    follower.repeat(parallel.Announcement("target", "keep_path", (torch.tensor([1, 3]),), {}))


def test_each_process_has_a_part_of_the_layers_and_whole_tables() -> None:
    whole = memory.footprint_of(NANO / "target", targets.torch.float32)
    shape = targets.shape_of(NANO / "target")
    tables = shape.vocab_size * shape.hidden_size * 4  # nano's head is its embedding
    for num in (2, 4):
        part = memory.sharded(whole, num, targets.torch.float32, NANO / "target")
        assert part.weights_bytes - tables == pytest.approx((whole.weights_bytes - tables) / num, abs=1)
        assert part.place_bytes == whole.place_bytes // num


class OtherConfig:
    model_type, num_attention_heads, num_key_value_heads, base_model_tp_plan = "odd", 9, 3, {"layers": "colwise"}

    def get_text_config(self) -> OtherConfig:
        return self


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="does not divide the target's 9 num_attention_heads"):
        parallel.options_of(OtherConfig(), 2)
    without = OtherConfig()
    without.base_model_tp_plan = {}
    with pytest.raises(UserError, match="no tensor parallel plan for a odd target"):
        parallel.options_of(without, 3)


@each(
    ("device", "num_gpus", "named"),
    [("cpu", 2, "leave --device cpu out"), ("cuda:1", 2, "--device cuda, not cuda:1"), ("cuda", 1, "needs 2 GPUs")],
)
def test_devices_that_do_not_suffice_are_refused(device: str, num_gpus: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        device_and_dtype(RunRequest(model="nano", device=device, tensor_parallel=2), num_gpus)


@each(
    "words",
    [("--workers", "2"), ("--quantize", "int8"), ("--engine", "native"), ("--kernels", "numba"), ("--graph", "on")],
)
def test_other_ways_to_compute_the_target_are_refused(words: tuple[str, str], main: Main) -> None:
    assert_refused(main(*WORDS, "--tensor-parallel", 2, *words), "--tensor-parallel", words[0])
