"""SDAR: it answers as a plain reading of its recipe does, without a cache, and its published files are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafters.sdar import SDARDrafter, SDARReader
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models import block_models, loading, targets
from engine.test_block_diffusion import MASK, NEW, PROMPTS, sure
from helpers.each import each
from helpers.toy import run, tiny


def drafter(model: object, size: int, threshold: float) -> SDARDrafter:
    return SDARDrafter(SDARReader(Target(model), size, MASK, threshold))


def answered(model: object, prompt: list[int], size: int, threshold: float) -> tuple[list[int], int]:
    """The recipe, reading everything anew in every pass: the answer, and how many passes filled in tokens."""
    text: list[int] = list(prompt)
    passes = 0
    while len(text) < len(prompt) + NEW:
        end = (len(text) // size + 1) * size
        open_places = list(range(len(text), end))
        text += [MASK] * len(open_places)
        while open_places:
            passes += 1
            place = torch.arange(end) // size
            mask = torch.zeros(end, end).masked_fill_(place[None] > place[:, None], torch.finfo(torch.float32).min)
            with torch.no_grad():
                out = model(torch.tensor([text]), attention_mask=mask[None, None], use_cache=False)  # type: ignore[operator]
            p, best = out.logits[0].softmax(dim=-1).max(dim=-1)
            surest = max(open_places, key=lambda at: float(p[at]))
            for at in [at for at in open_places if p[at] >= threshold or at == surest]:
                text[at] = int(best[at])
                open_places.remove(at)
    return text[len(prompt) :][:NEW], passes


@each("size", [2, 4, 5])
@each("threshold", [0.0, 0.5, 1.0])
def test_sdar_answers_as_its_recipe_does_without_a_cache(size: int, threshold: float) -> None:
    model = sure("qwen3")
    expected = [answered(model, prompt, size, threshold) for prompt in PROMPTS]
    for prompt, (tokens, passes) in zip(PROMPTS, expected, strict=True):
        inner = drafter(model, size, threshold)
        assert run(inner.reader, inner, [prompt], NEW).tokens == [tokens]
        # A round fills in a block more than it must, so that all rows emit as many tokens.
        assert passes <= inner.num_passes <= passes + size
    inner = drafter(model, size, threshold)
    assert run(inner.reader, inner, PROMPTS, NEW).tokens == [tokens for tokens, _ in expected]


def test_a_stop_inside_a_block_ends_its_row_alone() -> None:
    model = sure("qwen3")
    whole = run(drafter(model, 4, 0.5).reader, drafter(model, 4, 0.5), PROMPTS, NEW).tokens
    stop = whole[0][5]
    inner = drafter(model, 4, 0.5)
    stopped = run(inner.reader, inner, PROMPTS, NEW, frozenset({stop})).tokens
    for answer, cut in zip(whole, stopped, strict=True):
        assert cut == (answer[: answer.index(stop) + 1] if stop in answer else answer)


def test_it_draws_nothing() -> None:
    inner = drafter(sure("qwen3"), 4, 0.5)
    with pytest.raises(UserError, match="temperature 0"):
        run(inner.reader, inner, PROMPTS[:1], NEW, sampling=Sampling(temperature=1.0))


def test_its_published_files_are_read_without_its_code(tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "sdar", "architectures": ["SDARForCausalLM"]}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}, "block_size": 4}
    config |= {"mask_token_id": MASK}
    path.write_text(json.dumps(config))
    loading.check_blocks(tmp_path, config)
    loaded = targets.load(tmp_path, "cpu", torch.float32)
    known = {"block_size": 4, "mask_token_id": MASK, block_models.ALIGNED: True}
    assert loaded.config.block_diffusion == known
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in loaded.state_dict().items())
    with pytest.raises(UserError, match="block_size"):
        loading.check_blocks(tmp_path, config | {"block_size": None})


def test_a_waiting_prompt_takes_the_row_of_a_finished_one() -> None:
    model = sure("qwen3")
    inner = drafter(model, 4, 0.5)
    limits = Limits(NEW, frozenset())
    rounds = list(decode(inner.reader, inner, PROMPTS, limits, Sampling(), HostClock(), num_rows=2))  # type: ignore[arg-type]
    answers: dict[int, list[int]] = {}
    for step in rounds:
        for request, tokens in zip(step.requests, step.emitted, strict=True):
            answers.setdefault(request, []).extend(tokens or ())
    assert [answers[number] for number in range(3)] == [answered(model, prompt, 4, 0.5)[0] for prompt in PROMPTS]
