"""Block diffusion: it answers as a plain reading of the recipe does, without any cache, and no target is asked."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import METHODS, parse
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.drafters.block_diffusion import BlockDiffusionDrafter, build
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models
from dflash_bench.models.presets import Preset
from helpers.each import each
from helpers.toy import run, tiny

PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [i * 7 % 97 for i in range(40)]]
MASK, NEW = 96, 23


@cache
def sure(kind: str) -> Any:
    """A random model whose best tokens are likely ones, some more than others."""
    model = copy.deepcopy(tiny(kind))
    with torch.no_grad():
        model.model.norm.weight.mul_(60)
    return model


def drafter(model: Any, block_size: int = 4, threshold: float = 0.5) -> BlockDiffusionDrafter:
    return BlockDiffusionDrafter(Target(model), block_size, MASK, threshold)


def answered(model: Any, prompt: list[int], block_size: int, threshold: float) -> tuple[list[int], int]:
    """The recipe, token by token, reading everything anew in every pass; and how many passes blocks took."""
    text = [*prompt, int(logits_of(model, prompt, [])[-1].argmax())]
    passes = 0
    while len(text) < len(prompt) + NEW:
        tokens: list[int | None] = [None] * block_size
        while None in tokens:
            passes += 1
            block = [text[-1], *(MASK if token is None else token for token in tokens[:-1])]
            p, best = logits_of(model, text[:-1], block).softmax(dim=-1).max(dim=-1)
            missing = [i for i, token in enumerate(tokens) if token is None]
            surest = max(missing, key=lambda i: float(p[i]))
            for i in missing:
                if p[i] >= threshold or i == surest:
                    tokens[i] = int(best[i])
        text += [token for token in tokens if token is not None]
    return text[len(prompt) :][:NEW], passes


def logits_of(model: Any, before: list[int], block: list[int]) -> Tensor:
    """Logits of the block's places; the text before it is read causally, the block sees all of both."""
    size = len(before) + len(block)
    allowed = torch.ones(size, size, dtype=torch.bool).tril()
    allowed[len(before) :] = True
    mask = torch.zeros(size, size).masked_fill_(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        ids = torch.tensor([[*before, *block]])
        out: Tensor = model(ids, attention_mask=mask[None, None], use_cache=False).logits[0]
    return out[-len(block) :] if block else out


@each("block_size", [2, 5])
@each("threshold", [0.0, 0.3, 0.6, 1.0])
def test_answers_are_those_of_the_recipe_read_without_a_cache(block_size: int, threshold: float) -> None:
    model = sure("qwen3")
    inner = drafter(model, block_size, threshold)
    expected = [answered(model, prompt, block_size, threshold) for prompt in PROMPTS]
    for prompt, (tokens, passes) in zip(PROMPTS, expected, strict=True):
        before = inner.num_passes
        assert run(inner.reader, inner, [prompt], NEW).tokens == [tokens]
        assert inner.num_passes - before == passes
    # Rows of unequal length together, which end alike.
    assert run(inner.reader, inner, PROMPTS, NEW).tokens == [tokens for tokens, _ in expected]


def test_passes_are_between_one_and_a_place_each() -> None:
    model = sure("qwen3")
    counts = {}
    for threshold in (0.0, 0.5, 1.0):
        inner = drafter(model, 5, threshold)
        rounds = len(run(inner.reader, inner, PROMPTS[1:2], 21).rounds)
        counts[threshold] = inner.num_passes / rounds
    assert counts[0.0] == 1 < counts[0.5] < counts[1.0] == 5


def test_a_block_is_emitted_whole_until_a_stop_or_the_limit() -> None:
    model = sure("qwen3")
    whole = run(Target(model), drafter(model), PROMPTS[1:2], 12)
    assert [(step.drafted, step.accepted) for step in whole.rounds] == [([3], [3])] * 3
    assert [len(step.emitted[0] or ()) for step in whole.rounds] == [4, 4, 3]
    stop = whole.tokens[0][6]
    first = whole.tokens[0].index(stop)
    assert run(Target(model), drafter(model), PROMPTS[1:2], 12, frozenset({stop})).tokens == [
        whole.tokens[0][: first + 1]
    ]


def test_drawn_tokens_depend_on_seed_and_temperature_and_not_on_the_batch() -> None:
    model = sure("qwen3")
    inner = drafter(model)

    def drawn(seed: int, prompts: list[list[int]] = PROMPTS[1:2]) -> list[list[int]]:
        return run(inner.reader, inner, prompts, NEW, sampling=Sampling(temperature=1.0, seed=seed)).tokens

    greedy = run(inner.reader, inner, PROMPTS[1:2], NEW).tokens
    assert drawn(1) == drawn(1) != drawn(2) and greedy != drawn(1)
    assert drawn(1, [PROMPTS[1], PROMPTS[2]])[0] == drawn(1)[0]


class Letters:
    chat_template: str | None = None
    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % 97 for c in text]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(i + 32) for i in ids)


def diffusing(**changes: Any) -> Any:
    model = sure("llama")
    model.config.block_diffusion = {"block_size": 6, "mask_token_id": MASK, **changes}
    return model


def backend(*methods: str) -> LocalBackend:
    models = Models(sure("qwen3"), Letters(), {"block-diffusion": diffusing()}, {})
    return open_backend(models, Preset("", {}), [parse(text) for text in methods], NEW)


def test_the_backend_lets_its_model_answer_in_the_targets_place() -> None:
    local = backend("ar", "block-diffusion:threshold=0.2")
    expected, _ = answered(sure("llama"), PROMPTS[1], 6, 0.2)
    expected = expected[: expected.index(1) + 1] if 1 in expected else expected
    assert list(local.generate_ids("block-diffusion:threshold=0.2", PROMPTS[1:2])[0].token_ids) == expected
    # For the others the target answers as before.
    plain = local.generate_ids("ar", PROMPTS[1:2])[0].token_ids
    stops = frozenset({1})
    assert list(plain) == run(Target(sure("qwen3")), local.drafters["ar"], PROMPTS[1:2], NEW, stops).tokens[0]
    assert list(plain) != expected


def test_it_is_labelled_lossy_and_all_other_methods_are_not() -> None:
    assert [name for name, kind in METHODS.items() if not kind.lossless] == ["block-diffusion"]


def test_options_reach_the_drafter() -> None:
    models = Models(sure("qwen3"), None, {"block-diffusion": diffusing()}, {})
    built = build(models, Target(sure("qwen3")), parse("block-diffusion:block=4,threshold=0.5"))
    assert (built.block_size, built.threshold, built.num_drafts) == (4, 0.5, 3)
    usual = build(models, Target(sure("qwen3")), parse("block-diffusion"))
    assert (usual.block_size, usual.threshold) == (6, 0.9)
    with pytest.raises(UserError, match="block-diffusion:block=7: the model was trained on blocks of 6"):
        build(models, Target(sure("qwen3")), parse("block-diffusion:block=7"))
