"""DiffuSpec: its path and its length; exact, as is SpecDiff-2, with readers of every kind."""

from __future__ import annotations

import json
import math
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.drafters import block_diffusion
from dflash_bench.engine.drafters.diffuspec import LengthController, TextModel, best_path, kept_guesses
from dflash_bench.engine.drafters.guesser import WholeTextGuesser
from dflash_bench.engine.target import Target
from dflash_bench.models import block_models, loading, targets
from dflash_bench.models.block_models import ALIGNED, SEES_ALL
from engine.test_block_diffusion import MASK, NEW, PROMPTS, sure
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny

KINDS: dict[str, dict[str, Any]] = {
    "sees all": {SEES_ALL: True},
    "blocks behind the anchor": {"block_size": 5},
    "aligned blocks": {"block_size": 4, ALIGNED: True},
}


def drafter(target: Target, kind: str, method: str = "diffuspec:n=8,least=3", model: Any = None) -> Any:
    draft = sure("qwen3") if model is None else model
    draft.config.block_diffusion = {"mask_token_id": MASK, **KINDS[kind]}
    models: Any = SimpleNamespace(draft_of=lambda _method: draft)
    known = parse(method)
    return import_module(f"dflash_bench.engine.drafters.{known.name}").build(models, target, known)


@each("kind", KINDS)
@each("draft", ["another", "its own"])
@each("method", ["diffuspec:n=8,least=3", "specdiff2:n=5,samples=4"])
def test_answers_are_the_targets_and_a_batch_drafts_as_each_row_alone(kind: str, draft: str, method: str) -> None:
    target = native(tiny("qwen3"))
    model = None if draft == "another" else tiny("qwen3")
    out = run(target, drafter(target, kind, method, model), PROMPTS, NEW)
    assert out.tokens == plain_answers(target, PROMPTS, NEW)
    for row, prompt in enumerate(PROMPTS):
        alone = run(target, drafter(target, kind, method, model), [prompt], NEW)
        assert [(step.drafted[row], step.accepted[row]) for step in out.own(row)] == [
            (step.drafted[0], step.accepted[0]) for step in alone.own(0)
        ]


@each("kind", KINDS)
def test_guesses_are_those_of_the_text_and_its_masks_read_at_once(kind: str) -> None:
    model = sure("qwen3")
    inner = drafter(native(tiny("qwen3")), kind)
    inner.guesses.guesser.begin(2, 64)
    for text in (PROMPTS[1], [*PROMPTS[1], 7, 9]):
        got = inner.guesses.guesser.guess(1, text, 3)
        size = KINDS[kind].get("block_size", 3)
        end = len(text) // size * size if kind == "aligned blocks" else len(text) - 1
        masks = 3 if kind == "sees all" else size - len(text) + end
        ids = [*text, *[MASK] * masks]
        place = torch.arange(len(ids))
        if kind == "sees all":
            hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
        elif kind == "aligned blocks":
            hidden = place[None] // size > place[:, None] // size
        else:
            hidden = (place[None] > place[:, None]) & (place[:, None] < end)
        mask = torch.zeros(len(ids), len(ids)).masked_fill_(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits[0]
        first = len(text) if kind == "aligned blocks" else len(text) - 1
        torch.testing.assert_close(got, logits[first : first + len(got)], atol=1e-3, rtol=1e-3)
        assert 1 <= len(got) <= 3


def test_a_path_is_the_best_of_all_if_the_beam_holds_all() -> None:
    random = Random(0)
    model = TextModel(9)
    model.read([random.randrange(9) for _ in range(60)])
    places = [[(token, math.log(random.uniform(0.1, 1))) for token in random.sample(range(9), 4)] for _ in range(4)]

    def score(path: tuple[int, ...]) -> float:
        text = [1, 2]
        total = 0.0
        for token, guesses in zip(path, places, strict=True):
            total += 0.3 * dict(guesses)[token] + 0.7 * model.log_prob(text[-2:], token)
            text.append(token)
        return total

    best = max(product(*[[token for token, _ in guesses] for guesses in places]), key=score)
    assert best_path(places, model, [1, 2], 4**4, 0.3, ()) == list(best)
    likeliest = [max(guesses, key=lambda guess: guess[1])[0] for guesses in places]
    assert best_path(places, model, [1, 2], 1, 1.0, ()) == likeliest
    few = [[(1, -0.1)], [(2, -0.2), (3, -2.0)], [(4, -0.1)]]
    assert best_path(few, model, [], 3, 1.0, {2}) == [1, 2] and best_path(few, model, [], 3, 1.0, {3}) == [1, 2, 4]


def test_a_text_model_prefers_what_followed_and_backs_off() -> None:
    model = TextModel(100)
    model.read([1, 2, 3, 1, 2, 4, 1, 2, 3])
    assert model.log_prob([1, 2], 3) == pytest.approx(math.log(2 / 3))
    assert model.log_prob([9, 2], 3) == pytest.approx(math.log(0.4) + math.log(2 / 3))
    assert model.log_prob([9, 9], 4) == pytest.approx(2 * math.log(0.4) + math.log(1 / 9))
    assert model.log_prob([9, 9], 50) == pytest.approx(3 * math.log(0.4) - math.log(100))
    assert model.log_prob([], 1) == pytest.approx(2 * math.log(0.4) + math.log(3 / 9))


def test_guesses_are_kept_up_to_their_mass_and_ends_always() -> None:
    guesses = [(1, math.log(0.5)), (2, math.log(0.35)), (3, math.log(0.1)), (4, math.log(0.05))]
    assert [token for token, _ in kept_guesses(guesses, 0.8, {4})] == [1, 2, 4]


def test_the_length_follows_what_was_drafted_and_grows_while_all_is_accepted() -> None:
    controller = LengthController(4, 30)
    assert controller.length == 4
    controller.learn(4, 4)
    assert controller.length == 14
    controller.learn(14, 2)
    assert controller.length == 9  # the means are 9 and 3
    controller.learn(2, 2)
    assert controller.length == 6


def test_llada_is_read_under_its_own_names(tmp_path: Path) -> None:
    model = tiny("llama")
    usual = model.config
    ours = {"model_type": "llada", "architectures": ["LLaDAModelLM"], "mask_token_id": MASK, "rope_theta": 10000.0}
    ours |= {own: getattr(usual, name) for own, name in block_models.LLADA_KEYS.items()}
    ours |= {"vocab_size": usual.vocab_size, "rms_norm_eps": usual.rms_norm_eps}
    names = {
        "model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm", "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
    }  # fmt: skip
    tensors = {}
    for name, tensor in model.state_dict().items():
        for old, new in names.items():
            name = name.replace(f"{old}.", f"{new}.")
        tensors[f"model.transformer.{name.removeprefix('model.').replace('layers.', 'blocks.')}"] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(ours))
    loading.check_blocks(tmp_path, ours)
    loaded = targets.load(tmp_path, "cpu", torch.float32)
    assert loaded.config.block_diffusion == {"mask_token_id": MASK, SEES_ALL: True, ALIGNED: True}
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in loaded.state_dict().items())


def test_a_slot_of_llada_predicts_itself() -> None:
    reader = native(tiny("llama"))
    text, count = (3, 4, 5), 2
    found = {}
    for is_aligned in (False, True):
        guesser = WholeTextGuesser(reader, MASK, is_aligned)
        guesser.begin(1, 16)
        found[is_aligned] = guesser.guess(0, text, count)
    # The last of a shifted model's slots is the first of an aligned one's.
    torch.testing.assert_close(found[False][1], found[True][0])


def test_dream_is_read_without_its_code_and_cannot_answer_alone(tmp_path: Path) -> None:
    model = tiny("qwen2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "Dream", "architectures": ["DreamModel"]}
    config |= {"auto_map": {"AutoModel": "modeling_dream.DreamModel"}, "mask_token_id": MASK}
    path.write_text(json.dumps(config))
    loading.check_blocks(tmp_path, config)
    loaded = targets.load(tmp_path, "cpu", torch.float32)
    assert loaded.config.block_diffusion == {"mask_token_id": MASK, SEES_ALL: True}
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in loaded.state_dict().items())
    with pytest.raises(UserError, match="mask_token_id"):
        loading.check_blocks(tmp_path, config | {"mask_token_id": None})
    models: Any = SimpleNamespace(draft_of=lambda _method: loaded)
    with pytest.raises(UserError, match="diffuspec"):
        block_diffusion.build(models, native(tiny("qwen2")), parse("block-diffusion"))
