"""The target: published architectures on our cache say what they say on their own, and the others are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.rows import DecodingError
from dflash_bench.engine.target import Target, concat_taps
from helpers.each import each
from helpers.toy import Scripted, generated, plain, run, sometimes_wrong, tiny

PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], list(range(2, 40)), [90, 1, 90]]
KINDS: dict[str, Any] = {
    "qwen3, tied": lambda: tiny("qwen3"),
    "qwen3, untied": lambda: tiny("qwen3", tie_word_embeddings=False),
    "llama, untied": lambda: tiny("llama"),
    "llama, tied": lambda: tiny("llama", tie_word_embeddings=True),
    "mistral": lambda: tiny("mistral"),
    "gpt2, learned positions": lambda: tiny("gpt2", n_layer=6),
}


@each("kind", KINDS)
def test_plain_decoding_gives_what_transformers_generates(kind: str) -> None:
    model = KINDS[kind]()
    expected = [generated(model, prompt, 12) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 8
    target = Target(model)
    assert plain(target, PROMPTS, 12) == expected
    assert run(target, NoDrafter(), PROMPTS, 12).tokens == expected


@each("kind", ["qwen3, tied", "gpt2, learned positions"])
@each("num_drafts", [0, 5, 16])
def test_a_context_is_used_to_its_last_token(kind: str, num_drafts: int) -> None:
    model = KINDS[kind]()
    target = Target(model)
    prompts = [list(range(1, target.context_length - 10)), list(range(1, target.context_length)), [7, 8]]
    expected = [generated(model, prompt, target.context_length - len(prompt)) for prompt in prompts]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    drafter = Scripted(known, num_drafts, sometimes_wrong(0.8, 97)) if num_drafts else NoDrafter()
    assert run(target, drafter, prompts, 1000).tokens == expected


def test_a_wide_block_and_a_long_prompt_need_no_special_mask() -> None:
    """Blocks of up to 64 tokens use a window into a mask made once; longer ones, and ragged rows, have their own."""
    model = tiny("llama", max_position_embeddings=256)
    prompts = [[i * 7 % 97 for i in range(length)] for length in (90, 3)]
    expected = [generated(model, prompt, 40) for prompt in prompts]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    for num_drafts in (30, 63, 70):
        for row in (0, 1):
            assert run(Target(model), Scripted([known[row]], num_drafts), [prompts[row]], 40).tokens == [expected[row]]
        assert run(Target(model), Scripted(known, num_drafts), prompts, 40).tokens == expected


def test_prefill_gives_the_logits_at_each_prompts_end() -> None:
    model = tiny("llama")
    target = Target(model)
    target.begin(len(PROMPTS), 40)
    with torch.inference_mode():
        logits = target.prefill(PROMPTS).logits
        expected = torch.stack([model(torch.tensor([prompt])).logits[:, -1] for prompt in PROMPTS])
    assert logits.shape == (4, 1, 97)
    assert torch.allclose(logits, expected, atol=1e-4)


def test_a_model_that_cannot_be_told_which_logits_to_keep_gives_the_same() -> None:
    model = copy.copy(tiny("llama"))

    class Old(type(model)):  # type: ignore[misc]
        def forward(
            self, input_ids: Any, position_ids: Any, attention_mask: Any, past_key_values: Any, use_cache: Any
        ) -> Any:
            return super().forward(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
            )

    model.__class__ = Old
    target = Target(model)
    assert not target.network.keeps_some_logits
    expected = plain(Target(tiny("llama")), PROMPTS, 12)
    assert plain(target, PROMPTS, 12) == expected
    assert run(target, NoDrafter(), PROMPTS, 12).tokens == expected


def test_taps_are_the_hidden_states_of_these_layers_in_the_order_asked_for() -> None:
    model = tiny("qwen3")
    target = Target(model)
    target.tap((2, 0, 1))
    target.begin(1, 16)
    with torch.inference_mode():
        hidden = target.prefill([PROMPTS[1]]).hidden
        states = model(torch.tensor([PROMPTS[1]]), output_hidden_states=True).hidden_states
    assert hidden is not None
    assert torch.allclose(hidden, torch.cat([states[3], states[1], states[2]], dim=-1), atol=1e-4)


def test_taps_from_several_devices_come_together_on_one() -> None:
    parts = [torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, device="meta")]
    joined = concat_taps(parts, torch.device("meta"))
    assert joined is not None and joined.shape == (1, 2, 6) and joined.device.type == "meta"
    assert concat_taps([], torch.device("cpu")) is None


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


class Tapping(NoDrafter):
    taps = (1, 2)


def test_the_loop_leaves_no_hooks_on_the_model_even_when_it_breaks_off() -> None:
    model = tiny("qwen3")
    before = hooks(model)
    target = Target(model)
    run(target, Tapping(), PROMPTS[:1], 4)
    assert hooks(model) == before
    with pytest.raises(DecodingError):
        run(target, Tapping(), [[]])
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[5] = torch.nan
    with pytest.raises(DecodingError):
        run(Target(broken), Tapping(), [[5]])
    assert hooks(broken) == hooks(model) == before


def test_two_targets_on_one_model_do_not_see_each_others_taps() -> None:
    model = tiny("qwen3")
    first, second = Target(model), Target(model)
    expected = plain(first, PROMPTS[:2], 8)
    first.tap((1,))
    assert plain(second, PROMPTS[:2], 8) == expected
    assert plain(first, PROMPTS[:2], 8) == expected


def poisoned(prompts: Sequence[Sequence[int]], num_drafts: int) -> tuple[list[list[int]], list[list[int]]]:
    """The answers to prompts after a generation that ended in NaN, and what they should be."""
    model = copy.deepcopy(tiny("llama"))
    weight = model.get_input_embeddings().weight
    target = Target(model)
    expected = plain(target, prompts, 12)
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    drafter = Scripted(known, num_drafts) if num_drafts else NoDrafter()
    saved = weight[96].clone()
    with torch.no_grad():
        weight[96] = torch.nan
    long = [[1, 2, 96, *range(3, 43)]] * len(prompts)
    with pytest.raises(DecodingError, match=r"NaN or infinite logits after 0 tokens \(row 0\)"):
        run(target, drafter, long, 12)
    with torch.no_grad():
        weight[96] = saved
    return run(target, drafter, prompts, 12).tokens, expected


@each("num_drafts", [0, 4])
@each("num_rows", [1, 3])
def test_nan_in_one_generation_does_not_spread_to_the_next(num_drafts: int, num_rows: int) -> None:
    # Ragged rows look at places behind their end, which are masked but multiplied all the same.
    got, expected = poisoned([[5], [6, 7, 8], [9, 10]][:num_rows], num_drafts)
    assert got == expected


def test_a_cache_is_used_again_if_it_is_large_enough_and_fits_the_rows() -> None:
    target = Target(tiny("qwen3"))
    target.begin(2, 20)
    first = target.cache
    target.begin(2, 10)
    assert target.cache is first
    target.begin(2, 21)
    second = target.cache
    assert second is not first and second.capacity == 21
    target.begin(1, 21)
    assert target.cache.num_rows == 1


# Refusals.

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def lfm2() -> Any:
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))


def recurrent_gemma() -> Any:
    shape = {**SMALL, "num_hidden_layers": 3, "lru_width": 16}
    return transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**shape))


def rwkv() -> Any:
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2))


def mamba() -> Any:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    )


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    )


def bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2))


def gpt_neo() -> Any:
    return transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
        )
    )


def falcon_with_alibi() -> Any:
    return transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True)
    )


def gemma3_both_ways() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True))


def llama4_in_chunks() -> Any:
    shape = {**SMALL, "num_local_experts": 2, "intermediate_size_mlp": 16}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**shape))


def llama_with_flex_attention() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation="flex_attention"))


REFUSED = {
    gemma3_both_ways: "a gemma3_text target with use_bidirectional_attention",
    llama4_in_chunks: "a llama4_text target with chunked_attention layers",
    llama_with_flex_attention: "flex_attention attention does not accept our masks; .*: eager, sdpa",
    lfm2: "a lfm2 target with conv layers",
    recurrent_gemma: "a recurrent_gemma target",
    mamba: "a mamba target with linear_attention layers",
    rwkv: "a rwkv target keeps a recurrent state",
    t5: "t5 is an encoder-decoder model",
    bloom: "a bloom target is not supported: its forward pass takes no position_ids",
    gpt_neo: "a gpt_neo target with local layers",
    falcon_with_alibi: r"a falcon target is not supported: .*ALiBi",
}


@each("make", REFUSED)
def test_what_cannot_be_rolled_back_or_placed_is_refused_by_name(make: Any) -> None:
    with pytest.raises(UserError, match=REFUSED[make]):
        Target(make())


def test_a_window_as_wide_as_the_context_is_no_window() -> None:
    model = tiny("mistral", sliding_window=96)
    assert plain(Target(model), PROMPTS[:2], 12) == [generated(model, prompt, 12) for prompt in PROMPTS[:2]]
