"""Prompts are read in parts: results are those of one pass, and nothing grows with the square of their length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_bench.engine import target as target_module
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters.draft_model import ModelDrafter
from dflash_bench.engine.forward import layers
from dflash_bench.engine.selection import name_of, target_of
from dflash_bench.engine.target import Output, Target
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from helpers.drafts.tiny import EAGLE3, eagle3_drafter, enlarged
from helpers.each import each
from helpers.tiny_architectures import ATTENTION, HYBRID, OURS, made, opened
from helpers.toy import generated, run, tiny

PROMPTS = [list(range(2, 24)), [5], [3, 4, 5, 6, 7, 8, 9, 10], [i * 7 % 97 for i in range(17)]]
WAYS: dict[str, Callable[[], Target]] = {
    "native": lambda: target_of(tiny("llama"), "native"),
    "native, a window": lambda: target_of(made("a window, two rotary tables"), "native"),
    "transformers": lambda: Target(tiny("qwen3")),
    "learned positions": lambda: Target(tiny("gpt2")),
    **{kind: lambda kind=kind: opened(kind) for kind in (*ATTENTION, *HYBRID, *OURS)},  # type: ignore[misc]
}


def in_parts_of(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(target_module, "PART", size)


def read(target: Target) -> tuple[Output, Output]:
    """The outputs for all prompts, and for a block behind each of them."""
    target.tap((2, 0))
    target.begin(len(PROMPTS), 40)
    with torch.inference_mode():
        prefilled = target.prefill(PROMPTS)
        block = torch.arange(40, 40 + 3 * len(PROMPTS)).view(-1, 3)
        return prefilled, target.forward(block, [len(prompt) for prompt in PROMPTS])


@cache
def in_one_pass(way: str) -> tuple[Output, Output]:
    return read(WAYS[way]())


def assert_near(ours: Tensor | None, expected: Tensor | None) -> None:
    assert ours is not None and expected is not None
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=1e-3, rtol=1e-3), (ours - expected).abs().max()


@each(("way", "size"), [(way, (2, 4, 7)[number % 3]) for number, way in enumerate(WAYS)])
def test_parts_give_what_one_pass_gives(way: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, block = in_one_pass(way)
    in_parts_of(monkeypatch, size)
    ours, behind = read(WAYS[way]())
    assert_near(ours.logits, whole.logits)
    assert_near(behind.logits, block.logits)
    assert whole.hidden is not None and ours.hidden is not None
    for row, prompt in enumerate(PROMPTS):
        assert_near(ours.hidden[row, : len(prompt)], whole.hidden[row, : len(prompt)])
    assert_near(behind.hidden, block.hidden)


@each("way", ["native", "transformers", "qwen3.5", "a window in all layers"])
def test_answers_are_those_of_the_published_code(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts_of(monkeypatch, 5)
    target = WAYS[way]()
    expected = [generated(target.model, prompt, 20) for prompt in PROMPTS]
    assert run(target, NoDrafter(), PROMPTS, 20).tokens == expected


@pytest.mark.parametrize("way", ["native", "qwen3.5", "qwen3-next"])
def test_a_prompt_that_gets_a_slot_is_read_in_parts_beside_others(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts_of(monkeypatch, 4)
    target = WAYS[way]()
    target.begin(3, 40)
    with torch.inference_mode():
        target.prefill(PROMPTS[1:])
        newcomer = target.prefill(PROMPTS[:1], first=1).logits
        rows = [PROMPTS[1], PROMPTS[0], PROMPTS[3]]
        block = torch.tensor([[7], [8], [9]])
        behind = target.forward(block, [len(row) for row in rows]).logits
        for row, prompt in enumerate(rows):
            alone = WAYS[way]()
            alone.begin(1, 40)
            expected = alone.prefill([prompt]).logits
            if row == 1:
                assert_near(newcomer, expected)
            assert_near(behind[row : row + 1], alone.forward(block[row : row + 1], [len(prompt)]).logits)


def test_an_eagle3_draft_reads_a_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny("qwen3"), "native")
    draft = enlarged(Eagle3Draft(EAGLE3))
    drafter, in_parts = (eagle3_drafter(target, 4, draft) for _ in range(2))
    for reader in (drafter, in_parts):
        target.tap(reader.taps)
        reader.begin(len(PROMPTS), 40)
        observed(reader, target, PROMPTS)
        in_parts_of(monkeypatch, 4)
    assert_near(in_parts.hidden, drafter.hidden)
    with torch.inference_mode():
        assert torch.equal(in_parts.propose().tokens, drafter.propose().tokens)


def observed(drafter: Any, target: Target, prompts: Sequence[Sequence[int]]) -> None:
    """The prompts are read, by the target and then by the draft."""
    width = max(len(prompt) for prompt in prompts)
    target.begin(len(prompts), width + 10)
    hidden = target.prefill(prompts).hidden
    following = torch.zeros(len(prompts), width, dtype=torch.long)
    counts = [len(prompt) for prompt in prompts]
    texts = [[*prompt, 1] for prompt in prompts]
    anchor = torch.ones(len(prompts), dtype=torch.long)
    with torch.inference_mode():
        drafter.observe(Committed(hidden, following, anchor, [0] * len(prompts), counts, texts, is_prompt=True))


class Largest(TorchDispatchMode):
    """The most numbers in the memory of any tensor that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.untyped_storage().nbytes() // value.itemsize)
        return result


def long(kind: str, engine: str, kernels: str | None = None) -> Target:
    windows = {"mistral": {"sliding_window": 64}}.get(kind, {})
    model = tiny(kind, max_position_embeddings=8192, num_hidden_layers=3, **windows)
    target = target_of(model, engine, kernels if engine == "native" else None)
    assert name_of(target) == engine
    return target


LONG = [(kind, engine, "eagle3") for kind in ("qwen3", "mistral") for engine in ("native", "transformers")]


@each(("kind", "engine", "drafts"), [*LONG, ("qwen3", "native", "draft model")])
def test_memory_grows_with_a_prompt_and_not_with_its_square(
    kind: str, engine: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_of(monkeypatch, 64)
    largest = []
    for length in (500, 1000):
        target = long(kind, engine)
        drafter: Any = eagle3_drafter(target, 4) if drafts == "eagle3" else ModelDrafter(long(kind, engine), 97, 4)
        target.tap((0, 1, 2) if drafts == "eagle3" else ())
        drafter.begin(2, length + 10)
        with Largest() as mode:
            observed(drafter, target, [[i % 97 for i in range(length)], [1, 2, 3]])
        largest.append(mode.numbers)
    assert largest[1] < 2.5 * largest[0] and largest[1] < 200 * 1010


@contextmanager
def places_read(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Over how many places each call of attention goes."""
    attention, read = layers.scaled_dot_product_attention, list[int]()

    def noting(query: Tensor, keys: Tensor, *rest: Any, **options: Any) -> Tensor:
        read.append(keys.shape[2])
        return attention(query, keys, *rest, **options)

    with patch.context() as within:
        within.setattr(layers, "scaled_dot_product_attention", noting)
        within.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
        yield read


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_layer_with_a_window_reads_the_windows_places_only(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = long("mistral", engine, "torch")
    target.begin(2, 1200)
    with places_read(monkeypatch) as prefill:
        target.prefill([[i % 97 for i in range(1000)], [3, 4]])
    with places_read(monkeypatch) as together:
        target.forward(torch.tensor([[5, 6], [7, 8]]), [1000, 1000])
    with places_read(monkeypatch) as ragged:
        target.forward(torch.tensor([[5, 6], [7, 8]]), [1000, 990])
    with places_read(monkeypatch) as tree:
        target.forward(torch.tensor([[5, 6, 7]] * 2), [1000, 990], parents=torch.tensor([[-1, -1]] * 2))
    assert prefill and max(prefill) <= 256 + 63
    assert set(together) == {63 + 2} and set(ragged) == {63 + 10 + 2} and set(tree) == {63 + 10 + 3}
