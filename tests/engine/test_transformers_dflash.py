"""Our DFlash engine against the one inside transformers, on the same weights: drafts, acceptance and tokens.

Theirs shares no code with ours: another cache, another mask, context and block in one pass through every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import candidate_generator

from dflash_bench.core.types import Message
from dflash_bench.engine.backend import LocalBackend, stop_ids
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models import loading
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.tasks import suites
from helpers.assistant import assistant
from helpers.toy import Watching, run

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"),
    reason=f"transformers {transformers.__version__} has no DFlash drafter of its own",
)
NUM_PROMPTS, MAX_NEW_TOKENS = 8, 64


@dataclass
class Decoded:
    """Per round what was drafted, and how many of it became part of the answer."""

    tokens: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


def theirs(
    target: Any, draft: DFlashDraft, prompt: Sequence[int], monkeypatch: pytest.MonkeyPatch, most: int = MAX_NEW_TOKENS
) -> Decoded:
    out = Decoded()
    lengths: list[int] = []
    inner = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Any, **options: Any) -> Any:
        candidates, logits = inner(self, input_ids, **options)
        # The first call of all drafts nothing: the target has not read the prompt yet.
        if not options["is_first_iteration"]:
            out.drafts.append(candidates[0, input_ids.shape[1] :].tolist())
            lengths.append(input_ids.shape[1])
        return candidates, logits

    monkeypatch.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", watched)
    ids = torch.tensor([list(prompt)])
    whole = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant(draft),
        speculation_type="dflash",
        max_new_tokens=most,
        do_sample=False,
    )[0].tolist()
    out.tokens = whole[len(prompt) :]
    out.kept = [after - before - 1 for before, after in pairwise([*lengths, len(whole)])]
    return out


class Recording(Watching):
    def __init__(self, inner: DFlashDrafter) -> None:
        super().__init__(inner)
        self.drafts: list[list[int]] = []

    def propose(self) -> Draft | None:
        draft = super().propose()
        assert draft is not None
        self.drafts.append(draft.tokens[0].tolist())
        return draft


def ours(
    target: Target, draft: DFlashDraft, prompt: Sequence[int], stops: frozenset[int], most: int = MAX_NEW_TOKENS
) -> Decoded:
    drafter = Recording(DFlashDrafter(draft, target.embedding, target.head))
    out = run(target, drafter, [prompt], most, stop_ids=stops)
    kept = [len(step.emitted[0] or ()) - 1 for step in out.rounds]
    # All that was accepted became part of the answer, but for what lies past its end.
    assert kept[:-1] == [step.accepted[0] for step in out.rounds[:-1]]
    return Decoded(out.tokens[0], drafter.drafts, kept)


def assert_same(mine: Decoded, other: Decoded) -> None:
    assert mine.tokens == other.tokens
    assert mine.kept == other.kept
    # With room for a single token transformers takes a plain step.
    last = None if other.drafts and other.drafts[-1] else -1
    assert mine.drafts[:last] == other.drafts[:last]


def test_nano_drafts_accepts_and_answers_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    models = loading.load("nano", ["dflash"], "cpu", torch.float32)
    stops = stop_ids(models.target, models.tokenizer)
    target, draft = Target(models.target), models.drafts["dflash"]
    backend = LocalBackend(target, models.tokenizer, {}, Limits(1))
    known = suites.known_suites()
    prompts = [
        backend.encode([Message("user", prompt.turns[0])])
        for name in ("gsm8k", "mt_bench")
        for prompt in suites.load_prompts(known[name], "embedded", NUM_PROMPTS // 2).prompts
    ]
    seen = []
    for prompt in prompts:
        mine = ours(target, draft, prompt, stops)
        assert_same(mine, theirs(models.target, draft, prompt, monkeypatch))
        seen.append(mine)
    # Blocks were refused at many places, and answers ended by a stop as well as by the limit.
    assert len({count for each in seen for count in each.kept}) > 5
    assert {each.tokens[-1] in stops for each in seen} == {True, False}


@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_random_weights_over_seven_tokens_too(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few tokens a random draft gets some right; shapes are as unlike nano's as the class allows."""
    draft = random_draft(block_size)
    kept = []
    for stop in (None, 2):
        model = random_target(stop)
        stops = frozenset() if stop is None else frozenset({stop})
        for prompt in ([5], [1, 2, 4, 5, 0, 1], [i * 5 % 7 for i in range(33)]):
            mine = ours(Target(model), draft, prompt, stops, 24)
            assert_same(mine, theirs(model, draft, prompt, monkeypatch, 24))
            kept += mine.kept
    assert 0 in kept and max(kept) > 0


def random_draft(block_size: int) -> DFlashDraft:
    config = DFlashConfig(
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=6,
        num_kv_heads=3,
        head_dim=10,
        vocab_size=7,
        block_size=block_size,
        mask_token_id=6,
        target_layer_ids=(0, 3, 2),
        num_target_layers=5,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    )
    draft = DFlashDraft(config)
    initialise(draft, 1)
    return outweigh(draft, 40)


def outweigh(model: Any, factor: float) -> Any:
    """Layers larger than the embedding, so that context and positions decide what is said."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(factor)
    return model


def random_target(stop: int | None) -> Any:
    torch.manual_seed(2)
    config = transformers.Qwen3Config(
        vocab_size=7,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=stop,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return outweigh(transformers.Qwen3ForCausalLM(config).eval(), 3)
