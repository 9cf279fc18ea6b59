"""Memory by hand, and what is predicted held against what models, caches and drafters really take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_bench.core import methods
from dflash_bench.core.forwards import AttentionCost, Size
from dflash_bench.core.types import Message
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.cache import KVCache
from dflash_bench.models import presets
from dflash_bench.models.loading import Models, load
from dflash_bench.models.memory import (
    Footprint,
    MemoryDemand,
    demand_of,
    needed_bytes,
    round_of,
    servers_bytes,
    size_of,
    token_bytes,
    what_fits,
)
from helpers import tiny
from helpers.each import each

NANO = presets.preset("nano")
SIZE = Size(
    weight_bytes=1000,
    matrix_elements=250,
    row_bytes=4,
    stored_bytes=1400,
    num_layers=2,
    vocab_size=100,
    attention=(AttentionCost(2, None, 8, 16),),
)
LABELS = tuple(
    """
    ar dflash dflash:block=4 dflash:3 dflash+ngram ddtree ddtree:nodes=auto eagle3 eagle3-tree
    eagle3-tree:nodes=20,top_k=4,depth=3 draft-model medusa:nodes=30 ngram suffix lookahead synthetic oracle random
    block-diffusion
    """.split()
)


def chosen(*labels: str) -> list[methods.Method]:
    counts = NANO.num_drafts or {}
    return [method.with_count(counts.get(method.name)) for method in map(methods.parse, labels)]


def demand(*labels: str, dtype: torch.dtype | None = torch.float32) -> MemoryDemand:
    some = chosen(*labels)
    drafts = {method.draft: Path(NANO.drafts[method.draft]) for method in some if method.draft}
    return demand_of(Path(NANO.target), drafts, some, dtype)


@pytest.fixture(scope="module")
def opened() -> tuple[Models, LocalBackend]:
    some = [methods.parse(label) for label in LABELS]
    models = load("nano", list(dict.fromkeys(method.draft for method in some if method.draft)), "cpu", torch.float32)
    return models, open_backend(models, NANO, some, max_new_tokens=8)


def test_by_hand() -> None:
    model = Footprint(weights_bytes=1000, place_bytes=10)
    needed = MemoryDemand(
        model, {"draft-model": Footprint(100, 2)}, [methods.parse("ar"), methods.parse("draft-model:4")]
    )
    held = needed.held(50)
    # One for the token after the last, four that are drafted; and in the draft's own cache another four to draft in.
    assert (held.target_cache_bytes, held.draft_cache_bytes) == (55 * 10, 59 * 2)
    assert held.total == 1000 + 100 + 550 + 118
    assert needed.longest_within(held.total) == 50
    assert needed.longest_within(held.total - 1) == 49
    assert needed.longest_within(0) < 0
    alone = needed.without_drafts()
    assert (alone.held(50).total, alone.longest_within(1000 + 510)) == (1510, 50)


def test_two_drafts_of_one_method_and_one_draft_of_two_methods() -> None:
    model, draft = Footprint(1000, 10), Footprint(100, 2)
    one = MemoryDemand(model, {"draft-model": draft}, [methods.parse("draft-model:4"), methods.parse("draft-model:2")])
    held = one.held(0)
    assert (held.draft_weights_bytes, held.draft_cache_bytes) == (100, 2 * (9 + 5))
    both = {"draft-model": draft, "draft-model@b": draft}
    two = MemoryDemand(model, both, [methods.parse("draft-model:4"), methods.parse("draft-model@b:4")]).held(0)
    assert (two.draft_weights_bytes, two.draft_cache_bytes) == (200, 2 * 2 * 9)


def test_rows_multiply_caches_and_nothing_else() -> None:
    one = MemoryDemand(Footprint(1000, 10), {}, [methods.parse("ar")])
    four = MemoryDemand(Footprint(1000, 10), {}, [methods.parse("ar")], rows=4)
    assert (one.held(9).total, four.held(9).total) == (1100, 1400)
    assert [four.most_rows_within(num_bytes, 9) for num_bytes in (1499, 1500, 1099, 900)] == [4, 5, 0, -1]


def test_weights_are_those_that_are_loaded(opened: tuple[Models, LocalBackend]) -> None:
    models, _ = opened
    predicted = demand(*LABELS)
    assert predicted.target.weights_bytes == held_by(models.target)
    for name, draft in predicted.drafts.items():
        assert draft.weights_bytes == held_by(models.drafts[name]), name
    assert 2 * demand("ar", dtype=torch.bfloat16).target.weights_bytes == predicted.target.weights_bytes
    assert demand("ar", dtype=None) == demand("ar")


def held_by(model: Any) -> int:
    """Tensors that share memory, such as a head and an embedding that are tied, once."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    return sum(tensor.nbytes for tensor in tensors.values())


@each("label", LABELS)
def test_a_round_takes_the_places_that_its_drafter_says(label: str, opened: tuple[Models, LocalBackend]) -> None:
    models, backend = opened
    (method,), drafter = chosen(label), backend.drafters[label]
    config = getattr(models.drafts.get(method.draft or ""), "config", None)
    predicted, scratch = round_of(method, getattr(config, "block_diffusion", config))
    if method.name == "lookahead":
        assert drafter.num_drafts <= predicted < 2 * drafter.num_drafts
        return
    assert predicted == drafter.num_drafts
    cached = getattr(drafter, "block", drafter) if method.name == "dflash+ngram" else drafter
    assert scratch == getattr(cached, "num_scratch", drafter.num_drafts if method.name == "draft-model" else 0)


@each("label", ["ar", "dflash", "ddtree", "eagle3", "eagle3-tree", "draft-model"])
def test_caches_are_as_large_as_predicted(label: str, opened: tuple[Models, LocalBackend]) -> None:
    backend = open_backend(opened[0], NANO, [methods.parse(label)], max_new_tokens=8)
    prompt = backend.encode([Message("user", "Add 3 and 4.")])
    assert not backend.generate_ids(label, [prompt])[0].error
    held = demand(label).held(len(prompt) + 8)
    assert held.target_cache_bytes == stored_in(backend.target.cache)
    drafter: Any = backend.drafters[label]
    cache = drafter.model.cache if label == "draft-model" else getattr(drafter, "cache", None)
    assert held.draft_cache_bytes == (stored_in(cache) if cache else 0)


def test_what_kernels_hold_twice_and_in_float32_is_predicted() -> None:
    some = chosen("ar", "dflash")
    models = load("nano", ["dflash"], "cpu", torch.bfloat16)
    backend = open_backend(models, NANO, some, max_new_tokens=8, may_free=True)
    prompt = backend.encode([Message("user", "Add 3 and 4.")])
    assert not backend.generate_ids("dflash", [prompt])[0].error
    predicted = demand_of(
        Path(NANO.target), {"dflash": Path(NANO.drafts["dflash"])}, some, torch.bfloat16, in_kernels=True
    )
    held, drafter = predicted.held(len(prompt) + 8), backend.drafters["dflash"]
    assert held.target_cache_bytes == stored_in(backend.target.cache)
    assert held.draft_cache_bytes == stored_in(drafter.cache)  # type: ignore[attr-defined]
    for network, model, weights_bytes in (
        (backend.target.network, models.target, held.target_weights_bytes),
        (drafter.network, models.drafts["dflash"], held.draft_weights_bytes),  # type: ignore[attr-defined]
    ):
        kept = {weight.data_ptr(): weight.nbytes for weight in model.parameters() if not weight.is_meta}
        arrays = [num for part in {id(part): part for part in vars(network).values()}.values() for num in _arrays(part)]
        assert weights_bytes == pytest.approx(sum(kept.values()) + sum(arrays), rel=0.02)


def _arrays(owner: Any) -> list[int]:
    """The bytes of what kernels read of a part of a network."""
    packed = getattr(owner, "decoder", owner)
    return [packed.weights.nbytes] if isinstance(getattr(packed, "weights", None), np.ndarray) else []


def stored_in(cache: KVCache) -> int:
    return sum(buffer.nbytes for pair in cache._layers.values() for buffer in pair)


def test_a_head_that_is_rows_of_the_targets_is_held_all_the_same(tmp_path: Path) -> None:
    from dflash_bench.models.formats import save_draft

    folder = tiny.build(tmp_path / "model")
    models = load(str(folder), ["eagle3"], "cpu", torch.float32)
    save_draft(models.drafts["eagle3"], tmp_path / "slim", slim=True)
    some = [methods.parse("eagle3")]
    slim, whole = (
        demand_of(folder / "target", {"eagle3": place}, some, torch.float32).drafts["eagle3"].weights_bytes
        for place in (tmp_path / "slim", folder / "eagle3")
    )
    assert slim == whole


def test_headers_and_the_loaded_model_predict_the_same(opened: tuple[Models, LocalBackend]) -> None:
    size, from_headers = size_of(opened[0].target), demand("ar").target
    assert (size.stored_bytes, token_bytes(size.attention)) == (from_headers.weights_bytes, from_headers.place_bytes)


def test_memory_is_weights_cache_and_logits() -> None:
    cache, logits = 3 * (50 + 4) * 2 * 16, 3 * 4 * 100 * 8
    assert needed_bytes(SIZE, 600, 3, 50, 4) == pytest.approx(1.05 * (1400 + 600 + cache + logits) + 0.5e9)


def test_what_fits_is_the_largest_that_does() -> None:
    size = replace(SIZE, weight_bytes=10**9 - 40, stored_bytes=10**9, attention=(AttentionCost(2, None, 8, 5000),))
    free = needed_bytes(size, 0, 2, 1000, 4)
    assert what_fits(size, 0, 4, 1000, 4, free, True) == "--batch 2 --context 1000 or --batch 4 --context 497 fits"
    assert needed_bytes(size, 0, 4, 497, 4) <= free < needed_bytes(size, 0, 4, 499, 4)
    assert what_fits(size, 0, 1, 9000, 4, free, True) == "--batch 1 --context 2004 fits"


def test_too_many_layers_are_answered_with_how_many_fit() -> None:
    size = replace(SIZE, num_layers=10, row_bytes=10**6, vocab_size=100, weight_bytes=2 * 10**9, stored_bytes=2 * 10**9)
    free = 0.5e9 + 1.05 * (10**8 + 4 * 1.9e8) + 2e6
    assert what_fits(size, 0, 1, 10, 4, free, True) == "--layers 4 fits"
    assert what_fits(size, 0, 1, 10, 4, free, False) == ""
    assert what_fits(size, 0, 1, 10, 4, 1e6, True) == ""


def test_servers_take_what_their_files_do(tmp_path: Path) -> None:
    for name, size in {"a.safetensors": 100, "b.safetensors": 20, "config.json": 7}.items():
        (tmp_path / name).write_bytes(bytes(size))
    file = tmp_path / "draft.gguf"
    file.write_bytes(bytes(5))
    assert servers_bytes(tmp_path, 3, [file, tmp_path]) == 3 * 120 + 5 + 120
