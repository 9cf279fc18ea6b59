"""Replayed passes say what computed ones say. `traced` bakes in what a CUDA graph bakes in, on any device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.core.option import check_options
from dflash_bench.core.types import Message
from dflash_bench.engine import graphs
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.capturing import capture_passes
from dflash_bench.engine.graphs import ANY, BUCKET, WHOLE, GraphCache, Replay, bucket_of
from dflash_bench.models import loading, presets
from dflash_bench.runner.config import RunRequest
from helpers.each import each
from helpers.pretended_gpu.traced import traced

LABELS = (
    "ar",
    "dflash",
    "dflash:steps=2",
    "dflash:block=auto",
    "ddtree:nodes=16",
    "eagle3",
    "eagle3-tree:nodes=15",
    "ngram",
)
TEXTS = (
    "Tom has 7 apples and buys 5 more. How many apples does he have?",
    "Write a function that adds two numbers.\n" * 3,
    "What is 2 + 2?",
    "Name three colours, and say why you like them.",
)


def opened(labels: tuple[str, ...] = LABELS) -> LocalBackend:
    models = loading.load("nano", ["dflash", "eagle3"], "cpu", torch.float32)
    # Compiled kernels are not captured.
    return open_backend(models, presets.preset("nano"), [parse(label) for label in labels], 10, kernels="torch")


def replaying(backend: LocalBackend, replays: Callable[[], GraphCache]) -> LocalBackend:
    backend.target.graph_cache = replays()
    for drafter in backend.drafters.values():
        if hasattr(drafter, "graph_cache"):
            drafter.graph_cache = replays()
    return backend


@pytest.fixture(scope="module")
def usual() -> LocalBackend:
    return opened()


@pytest.fixture(scope="module")
def replayed() -> LocalBackend:
    return replaying(opened(), lambda: GraphCache(traced))


@pytest.fixture(scope="module")
def prompts(usual: LocalBackend) -> list[list[int]]:
    return [usual.encode([Message("user", text)]) for text in TEXTS]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_answers_and_acceptance_are_those_of_computed_passes(
    usual: LocalBackend, replayed: LocalBackend, prompts: list[list[int]], num_rows: int
) -> None:
    # One by one a short and a long one; together another takes the place of the first that ends.
    prompts = prompts[:2] if num_rows == 1 else prompts
    for label in usual.drafters if num_rows > 1 else ("ar", "dflash", "eagle3-tree:nodes=15"):
        replayed.generate_ids(label, prompts[:num_rows], num_rows=num_rows)  # asks for its passes
        before = replayed.captured()["replayed"]
        sound = usual.generate_ids(label, prompts, num_rows=num_rows)
        again = replayed.generate_ids(label, prompts, num_rows=num_rows)
        assert replayed.captured()["replayed"] > before, label
        assert [one.token_ids for one in again] == [one.token_ids for one in sound], label
        if "auto" not in label:  # which follows its clock
            assert [one.accepted for one in again] == [one.accepted for one in sound], label
    assert replayed.captured()["not_captured"] == 0


def test_what_an_answer_runs_is_captured_before_the_next_and_nothing_later(prompts: list[list[int]]) -> None:
    labels = ("ar", "dflash", "eagle3")
    backend = replaying(opened(labels), lambda: GraphCache(traced))
    for label in labels:
        before = backend.captured()
        backend.generate_ids(label, prompts[:1])
        assert backend.captured() == before
        answer = backend.generate_ids(label, prompts[:1])[0]
        captured = backend.captured()
        # Each round verifies and keeps, but for the last, which keeps nothing; with a draft it drafts, too.
        num_passes = 2 + (label != "ar")
        assert captured["captured"] >= before["captured"] + num_passes
        assert captured["replayed"] == before["replayed"] + num_passes * len(answer.round_s) - 1
        backend.generate_ids(label, prompts[:1])
        assert backend.captured()["captured"] == captured["captured"]


def test_buckets_hold_what_they_are_for_and_waste_little() -> None:
    for places in range(1, 9000, 7):
        bucket = bucket_of(places)
        assert places <= bucket == bucket_of(bucket)
        assert bucket < places + max(BUCKET, places / 4)


def reading(_places: int, tokens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    return (tokens * 2.0 + starts[:, None],)


def with_a_number_of_the_host(_places: int, tokens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    return (tokens * 2.0 + starts.tolist()[0],)


def with_an_old_buffer(_places: int, tokens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    return (tokens.clone().fill_(5) * 2.0 + starts[:, None] if tokens.sum() == 0 else tokens * 2.0 + starts[:, None],)


@torch.inference_mode()
def after_capture(function: Callable[..., tuple[Tensor, ...]], must: bool = False) -> tuple[GraphCache, object]:
    replays, inputs = GraphCache(traced, must=must), (torch.tensor([[3.0, 4.0]]), torch.tensor([7]))
    replays.reset(BUCKET)
    assert replays.replay("key", function, 10, *inputs) is None
    assert replays.capture(1, 5, BUCKET, lambda _key: True)
    return replays, replays.replay("key", function, 10, *inputs)


def test_a_sound_pass_is_replayed_with_the_values_of_the_call() -> None:
    _, result = after_capture(reading)
    assert isinstance(result, tuple)
    assert result[0].tolist() == [[13.0, 15.0]]


@pytest.mark.parametrize("faulty", [with_a_number_of_the_host, with_an_old_buffer])
def test_what_a_capture_would_bake_in_is_found_and_not_replayed(
    faulty: Callable[..., tuple[Tensor, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    replays, result = after_capture(faulty)
    assert result is None and replays.why_not is not None
    assert "passes are not captured" in caplog.text
    with pytest.raises(UserError, match="--compile: a pass cannot be compiled"):
        after_capture(faulty, must=True)


def three_per_cent_off(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    replay = traced(function, inputs)
    return lambda: tuple(result * 1.03 for result in replay())


@torch.inference_mode()
def test_a_replay_that_differs_by_more_than_its_kernels_can_is_not_used() -> None:
    replays, inputs = GraphCache(three_per_cent_off), (torch.tensor([[3.0, 4.0]]).bfloat16(), torch.tensor([7]))
    replays.reset(BUCKET)
    replays.replay("key", reading, 10, *inputs)
    replays.capture(1, 5, BUCKET, lambda _key: True)
    assert replays.num_captured == 0 and "replayed results differ by" in str(replays.why_not)


@torch.inference_mode()
@pytest.mark.parametrize(("places", "captures"), [(10, 9), (WHOLE, 1), (ANY, 1)])
def test_a_pass_is_captured_once_if_more_places_cost_nothing(places: int, captures: int) -> None:
    replays, inputs = GraphCache(traced), (torch.tensor([[3.0, 4.0]]), torch.tensor([7]))
    replays.reset(bucket_of(9 * BUCKET))
    replays.replay("key", reading, places, *inputs)
    replays.capture(1, 5, 9 * BUCKET, lambda _key: True)
    assert replays.num_captured == captures
    for length in (10, 4 * BUCKET, 9 * BUCKET):
        assert replays.replay("key", reading, length if places == 10 else places, *inputs) is not None


@torch.inference_mode()
def test_what_lies_around_a_pass_stays_out_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    replays, inputs = GraphCache(traced), (torch.tensor([[3.0, 4.0]]), torch.tensor([7]))
    replays.reset(BUCKET)
    for _ in range(2):
        whole = replays.replay("whole", reading, 10, *inputs)
        around = replays.replay("around", with_a_number_of_the_host, ANY, *inputs)
        replays.capture(1, 5, BUCKET, lambda _key: True)
    assert whole is not None and around is None and replays.why_not is not None
    assert caplog.text.count("passes are not captured") == 1


def test_other_rows_and_a_larger_cache_are_captured_anew(replayed: LocalBackend, prompts: list[list[int]]) -> None:
    for num_rows in (1, 2):
        replayed.generate_ids("dflash", prompts[:num_rows])
    before = replayed.captured()["captured"]
    replayed.generate_ids("dflash", prompts[:1])
    assert replayed.captured()["captured"] > before


# Refusals


@pytest.fixture
def tiny_backend() -> Iterator[LocalBackend]:
    yield opened(("ar",))


def test_graphs_need_cuda_and_are_off_elsewhere(tiny_backend: LocalBackend) -> None:
    assert tiny_backend.describe()["capture"] == "off"
    with pytest.raises(UserError, match="--graph on needs a CUDA device"):
        capture_passes(tiny_backend.target, [], "graph")
    with pytest.raises(UserError, match="--compile needs a CUDA device"):
        capture_passes(tiny_backend.target, [], "inductor")


def test_compiled_code_is_kept_up_to_a_size_and_the_oldest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_BYTES", 250)
    for age, name in enumerate(("new/a", "old/b", "old/c"), start=1):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somebody's own")
    graphs.keep_compiled(tmp_path)
    assert len([*tmp_path.glob("*/*")]) == 3, "a folder that somebody set is theirs"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graphs.keep_compiled(tmp_path)
    assert {file.name for file in tmp_path.glob("*/*")} == {"a", "b"}
    graphs.keep_compiled(tmp_path / "not there")


@each(
    ("options", "message"),
    [
        ({"graph": "maybe"}, "unknown graph 'maybe'; known: off, on"),
        ({"compile": "tvm"}, "unknown compiler 'tvm'; known: inductor"),
        ({"compile": "inductor", "graph": "on"}, "leave one of them out"),
        ({"compile": "inductor", "engine": "transformers"}, "no effect on --engine transformers"),
    ],
)
def test_options_that_cannot_go_together(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_options(RunRequest(suites=("gsm8k",), methods=("dflash",), **options))  # type: ignore[arg-type]
