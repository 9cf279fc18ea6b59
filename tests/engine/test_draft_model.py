"""A draft model: its drafts are what it would say itself, and the output never depends on them."""

from __future__ import annotations

import copy

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.draft_model import ModelDrafter, build
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from helpers.drafts.draft_model import drafter, nearly
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.tiny_architectures import HYBRID, made
from helpers.toy import generated, native, plain, run, tiny

PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [i * 7 % 97 for i in range(40)]]
NEW = 24


MODELS = {
    "the target": lambda: tiny("qwen3"),
    "nearly the target": nearly,
    "another": lambda: tiny("llama"),
    "of fewer tokens": lambda: tiny("llama", vocab_size=60),
    "of more tokens": lambda: tiny("llama", vocab_size=128),
    "with learned positions": lambda: tiny("gpt2"),
}


class Recording:
    """Hands on what a draft model proposes, and keeps it with the texts that it was proposed behind."""

    taps: tuple[int, ...] = ()

    def __init__(self, inner: ModelDrafter) -> None:
        self.inner, self.num_drafts = inner, inner.num_drafts
        self.proposed: list[tuple[list[list[int]], Draft]] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.inner.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.texts = [list(text) for text in committed.texts]
        self.inner.observe(committed)

    def propose(self) -> Draft:
        draft = self.inner.propose()
        self.proposed.append((self.texts, Draft(draft.tokens.clone(), probs=draft.probs)))
        return draft


@each(("kind", "num_drafts"), [*((kind, 5) for kind in MODELS), ("another", 1)])
def test_the_output_is_the_plain_one_whoever_drafts(kind: str, num_drafts: int) -> None:
    target = native(tiny("qwen3"))
    expected = plain_answers(target, PROMPTS, NEW)
    assert run(target, drafter(MODELS[kind](), num_drafts), PROMPTS, NEW).tokens == expected
    # Rows that stop in the middle of a block, at different rounds.
    stops = frozenset({expected[0][9], expected[2][14]})
    assert run(target, drafter(MODELS[kind](), num_drafts), PROMPTS, NEW, stops).tokens == plain_answers(
        target, PROMPTS, NEW, stops
    )


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_sampled_tokens_are_those_of_plain_decoding_under_the_match_rule(rule: str) -> None:
    target, sampling = native(tiny("qwen3")), Sampling(temperature=0.8, seed=3)
    same = run(target, drafter(nearly(), rule=rule), PROMPTS[1:2], NEW, sampling=sampling).tokens == plain(
        target, PROMPTS[1:2], NEW, sampling=sampling
    )
    # Rejection sampling draws from the same distribution, but with other numbers.
    assert same == (rule == "match")


def test_what_is_drafted_is_what_the_model_says_by_itself() -> None:
    """Against transformers' own greedy loop, after rounds that accepted all, some and none of the drafts, in rows of
    unequal length: whatever is in the cache must be what was committed."""
    model = nearly()
    watching = Recording(drafter(model))
    accepted = [step.accepted for step in run(native(tiny("qwen3")), watching, PROMPTS, NEW).rounds]
    assert {0, 4} < {count for counts in accepted for count in counts}
    for texts, draft in watching.proposed:
        for prompt, text, tokens in zip(PROMPTS, texts, draft.tokens.tolist(), strict=True):
            # A row that has ended stands still, and what is proposed for it is thrown away.
            if len(text) < len(prompt) + NEW:
                assert tokens == generated(model, text, 4)


def test_a_model_that_is_the_target_is_right_in_every_round() -> None:
    decoded = run(native(tiny("qwen3")), drafter(copy.deepcopy(tiny("qwen3"))), PROMPTS, 1 + 5 * 4)
    assert [step.accepted for step in decoded.rounds] == [[4, 4, 4]] * 4


@pytest.mark.parametrize(("own", "all_kept"), [(0.7, True), (1.4, False)])
def test_rejection_keeps_everything_that_is_drawn_from_the_targets_distribution(own: float, all_kept: bool) -> None:
    """With the target's own weights p is q, and every draw is kept; with sharper or flatter logits it is not."""
    model = copy.deepcopy(tiny("qwen3"))
    inner = drafter(model, rule="rejection")
    if not all_kept:
        # The head's logits are the embedding's products: scaling the last norm scales them.
        model.model.norm.weight.data.mul_(2)
    decoded = run(native(tiny("qwen3")), inner, PROMPTS, 1 + 5 * 4, sampling=Sampling(temperature=own, seed=1))
    kept = [step.accepted for step in decoded.rounds]
    assert (kept == [[4, 4, 4]] * 4) == all_kept


def test_probabilities_come_with_what_is_drawn_and_only_then() -> None:
    target = native(tiny("qwen3"))
    for rule, temperature, brings in (("match", 1.0, False), ("rejection", 0.0, False), ("rejection", 1.0, True)):
        watching = Recording(drafter(tiny("llama"), rule=rule))
        run(target, watching, PROMPTS, 6, sampling=Sampling(temperature=temperature, seed=2))
        for _, draft in watching.proposed:
            assert (draft.probs is not None) == brings
            if draft.probs is not None:
                assert draft.probs.shape == (3, 4, 97)
                torch.testing.assert_close(draft.probs.sum(dim=-1), torch.ones(3, 4))
                assert (draft.probs.gather(2, draft.tokens[..., None]) > 0).all()


def test_no_token_is_drafted_that_the_target_does_not_have() -> None:
    model = copy.deepcopy(tiny("llama", vocab_size=128))
    model.lm_head.weight.data[97:] += 3
    watching = Recording(drafter(model))
    run(native(tiny("qwen3")), watching, PROMPTS, 8)
    assert all(int(draft.tokens.max()) < 97 for _, draft in watching.proposed)


def test_a_recurrent_model_cannot_draft() -> None:
    models = Models(tiny("qwen3"), None, {"draft-model": made(next(iter(HYBRID)))}, {})
    with pytest.raises(UserError, match=r"--draft draft-model: a \w+ model has recurrent layers and cannot draft"):
        build(models, native(tiny("qwen3")), parse("draft-model"))


def test_options_reach_the_drafter() -> None:
    models = Models(tiny("qwen3"), None, {"draft-model": tiny("llama")}, {})
    built = build(models, native(tiny("qwen3")), parse("draft-model:n=3,rule=rejection"))
    assert built.num_drafts == 3 and built.draft_sampler.samples
    assert build(models, native(tiny("qwen3")), parse("draft-model")).num_drafts == 7
