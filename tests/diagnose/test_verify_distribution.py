"""The proof of sampling: sound methods draw as the model does, and every planted wrong rule is found out."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kstest

from dflash_bench.core import methods
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose.distribution import (
    Continuation,
    Odds,
    Spot,
    continue_prompts,
    measure,
    odds_of,
    open_backend,
    score_answers,
    score_replacements,
    score_tokens,
)
from dflash_bench.diagnose.forcing import Guide, forced
from dflash_bench.diagnose.goodness_of_fit import REPLACED, Draws, count_decisions, judge_methods, run_tests
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.selection import network_name
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.runner.config import RunRequest
from helpers.each import each
from helpers.faults.wrong_rules import FAINT, MATCH, NUMBERS, REJECTION, SUBTLE, TREE, WRONG_RULES, WrongRule
from helpers.toy import NUM_STATES, Scripted, TableTarget, _weight, tiny

VOCAB = 12
SETTINGS = Settings(temperature=1.4, top_p=0.9)
PROMPTS = [(1, 2), (5, 6, 7)]
NUM_DRAWS, LENGTH = 256, 15


class TableModel:
    """A published model that answers from the table: no cache, and no loop."""

    def __init__(self, table: TableTarget) -> None:
        self.table = table

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.zeros(VOCAB))

    def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
        states = (_weight(torch.arange(ids.shape[1])) * (ids + 1)).cumsum(dim=1) % NUM_STATES
        return SimpleNamespace(logits=self.table.table[states])

    __call__ = forward


TREE_PARENTS = [-1, -1, 0, 0, 2, 4, 5]
WEIGHTS = [_weight(place) for place in range(64)]


class Near:
    """Drafts from probabilities that are near the target's, as a chain by either rule, or as a tree of best tokens."""

    taps: tuple[int, ...] = ()

    def __init__(self, table: TableTarget, rule: str, is_tree: bool = False) -> None:
        self.table, self.is_tree = table, is_tree
        self.logits = table.table + 0.7 * TableTarget(VOCAB, seed=7).table
        self.draft_sampler = DraftSampler(rule, lambda ids: ids)
        self.num_drafts = len(TREE_PARENTS) if is_tree else 6

    def begin(self, num_rows: int, capacity: int) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        self.texts, self.draft_sampler.sampler = committed.texts, committed.sampler

    def propose(self) -> Draft:
        """The table is read at the state after each text, to which a token adds by its place alone."""
        states = torch.tensor([sum(map(mul, WEIGHTS, text)) + sum(WEIGHTS[: len(text)]) for text in self.texts])
        places = torch.tensor([len(text) for text in self.texts])
        return self.tree(states, places) if self.is_tree else self.chain(states, places)

    def chain(self, states: torch.Tensor, places: torch.Tensor) -> Draft:
        tokens, probs = [], []
        for i in range(self.num_drafts):
            token, p = self.draft_sampler.sample(self.logits[states % NUM_STATES][:, None], first=i)
            tokens.append(token)
            probs.append(p)
            states = states + _weight(places + i) * (token[:, 0] + 1)
        return Draft(torch.cat(tokens, 1), probs=torch.cat(probs, 1) if probs[0] is not None else None)  # type: ignore[arg-type]

    def tree(self, states: torch.Tensor, places: torch.Tensor) -> Draft:
        """The best tokens for each node's children, as many as it has."""
        tokens, ways = [], {-1: (states, places)}
        for node, parent in enumerate(TREE_PARENTS):
            states, places = ways[parent]
            elder = TREE_PARENTS[:node].count(parent)
            tokens.append(self.logits[states % NUM_STATES].topk(elder + 1).indices[:, elder])
            ways[node] = states + _weight(places) * (tokens[-1] + 1), places + 1
        return Draft(torch.stack(tokens, dim=1), torch.tensor([TREE_PARENTS] * len(self.texts)))


def toy() -> Any:
    table = TableTarget(VOCAB)
    table.model = TableModel(table)  # type: ignore[attr-defined]
    drafters = {
        "ar": NoDrafter(),
        REJECTION: Near(table, "rejection"),
        MATCH: Near(table, "match"),
        TREE: Near(table, "match", is_tree=True),
    }
    return SimpleNamespace(target=table, judge=SimpleNamespace(model=table.model), drafters=drafters)


def state(method: str, settings: Settings = SETTINGS, num_draws: int = NUM_DRAWS) -> str:
    draws = measure(toy(), [method], PROMPTS, settings, num_draws, LENGTH)
    (verdict,) = judge_methods(draws, run_tests(draws))
    return verdict.state


@pytest.fixture(scope="module")
def sound() -> list[Draws]:
    return measure(toy(), ["ar", REJECTION, MATCH, TREE], PROMPTS, SETTINGS, NUM_DRAWS, LENGTH)


def test_sound_methods_draw_as_the_model_does_and_their_drafts_are_put_to_the_test(sound: list[Draws]) -> None:
    tests = run_tests(sound)
    assert [(v.state, v.unreached) for v in judge_methods(sound, tests)] == [("as the model", ())] * 4
    for draws in sound:
        assert draws.num_answers == 2 * NUM_DRAWS and (draws.columns["place"] == LENGTH).sum() == 2 * NUM_DRAWS
        assert not draws.columns["is_impossible"].any()
        views = {test.view for test in tests if test.method == draws.method}
        decisions = count_decisions(draws)
        if draws.method == "ar":
            assert decisions is None and "bonus token" not in views
        else:
            assert decisions is not None and min(decisions) > 0.1 * NUM_DRAWS
            # To the end of every draft, and behind it.
            assert {"draft place 1", "draft places 2-3", "bonus token"} <= views
            assert ("draft places 4-6" if draws.method != TREE else "draft places 4-5") in views


def test_answers_have_seeds_of_their_own_which_are_the_same_under_all_methods(sound: list[Draws]) -> None:
    plain, rejection, match, tree = (draws.columns["likelihood"].reshape(-1, LENGTH) for draws in sound)
    assert len({str(row) for row in plain}) > 0.99 * len(plain)
    for same in (match, tree):
        assert np.array_equal(plain, same, equal_nan=True)
    assert not np.array_equal(plain, rejection, equal_nan=True)


@each("rule, method", [(rule, method) for rule in (*WRONG_RULES, *NUMBERS) for method in rule.methods])
def test_a_wrong_rule_is_found_out(rule: WrongRule, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule.plant(monkeypatch)
    # The toy's target has a begin of its own, and its drafters no cache.
    monkeypatch.setattr(KVCache, "belongs_to_draft", False, raising=False)
    # Few draws show most of them.
    assert "differs" in (state(method, num_draws=number) for number in (NUM_DRAWS // 4, NUM_DRAWS))


@pytest.mark.parametrize("share", ["p - q/2", "p - 2q"])
def test_a_wrong_residual_shows_in_the_tokens_in_place_of_refused_ones_alone(
    share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as few draws as these no other test finds it."""
    (rule,) = (rule for rule in WRONG_RULES if rule.name.endswith(share))
    rule.plant(monkeypatch)
    (draws,) = measure(toy(), [REJECTION], PROMPTS, SETTINGS, 12, LENGTH)
    assert {test.view for test in run_tests([draws]) if test.failed} == {REPLACED}
    (verdict,) = judge_methods([draws], run_tests([draws]))
    assert verdict.state == "differs" and verdict.why.startswith(REPLACED)


def test_what_replaces_a_refused_token_is_held_to_what_p_leaves_above_q() -> None:
    """p - q is 0.3, 0.1, -0.4, 0: three quarters and one quarter, never the third; of the last, rounding decides."""
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.6, 0.1])
    odds = Odds(p.log().expand(4, 2, 4), torch.zeros(4, 2, dtype=torch.bool))
    spots = (Spot(), Spot(1, favourites={2: 0.6}))
    answers = [Continuation((0, token), spots, {1: q}) for token in range(4)]
    found = score_replacements([*answers, Continuation((0, 0), spots)], odds, 0)
    assert not found["is_open"][::2].any() and np.isnan(found["rank"][::2]).all()  # first tokens
    assert found["is_impossible"][1::2].tolist() == [False, False, True, False, False]
    assert found["is_open"][1::2].tolist() == [True, True, True, False, False]
    assert 0 <= found["rank"][1] < 0.75 <= found["rank"][3] < 1 and np.isnan(found["rank"][5::2]).all()
    assert found["likelihood"][[1, 3]] == pytest.approx([-0.287682, -1.386294], abs=1e-5)
    assert found["likelihood_mean"][1] == pytest.approx(-0.562335, abs=1e-5)  # 3/4 ln 3/4 + 1/4 ln 1/4
    # The draft's share: 0.1 / (0.1 + 0.75), 0.2 / (0.2 + 0.25).
    assert found["leaning"][[1, 3]] == pytest.approx([0.117647, 0.444444], abs=1e-5)
    assert found["leaning_mean"][1] == pytest.approx(0.199346, abs=1e-5)


def test_a_mistake_that_top_p_hides_is_found_out_where_top_p_leaves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Settings(temperature=1.4, top_p=0.5)
    assert state(REJECTION, low) == "as the model"
    SUBTLE.plant(monkeypatch)
    assert state(REJECTION, low) == "differs"


# Changes to drafts.


class Listed(Near):
    """Proposes the same draft in every round."""

    def __init__(self, table: TableTarget, draft: Draft) -> None:
        super().__init__(table, "match")
        self.draft, self.num_drafts = draft, draft.width

    def propose(self) -> Draft:
        return self.draft


def guide_of(table: TableTarget, prompts: Sequence[Sequence[int]], seeds: Sequence[int], seed: int = 0) -> Guide:
    answers = continue_prompts(table, NoDrafter(), prompts, LENGTH, Sampling.of(SETTINGS), seeds)  # type: ignore[arg-type]
    tokens = [answer.tokens for answer in answers]
    return Guide(tokens, odds_of(TableModel(table), prompts[0], tokens, SETTINGS).log_p, seed)


def test_drafts_are_changed_only_while_it_lasts() -> None:
    table = TableTarget(VOCAB)
    drafter = Near(table, "match")
    guide = guide_of(table, [(1, 2)] * 4, range(4))
    with forced(drafter, guide) as proposals:
        assert drafter.propose.__self__ is not drafter  # type: ignore[attr-defined]
    assert not proposals and drafter.propose.__self__ is drafter  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_every_depth_is_forced_and_every_place_of_a_block_reached(rule: str) -> None:
    table, prompts, seeds = TableTarget(VOCAB), [(1, 2)] * 60, range(60)
    spots = []
    for seed in range(24 if rule == "rejection" else 4):
        guide = guide_of(table, prompts, seeds, seed)
        answers = continue_prompts(
            table,
            Near(table, rule),
            prompts,
            LENGTH,
            Sampling.of(SETTINGS),
            seeds,
            guide,  # type: ignore[arg-type]
        )
        spots += [spot for answer in answers for spot in answer.spots]
    for depth in range(1, 7):
        here = [spot for spot in spots if spot.depth == depth]
        assert sum(spot.is_forced for spot in here) > 5
        assert all(spot.is_kept for spot in here if spot.is_forced)
        tested = [spot for spot in here if not spot.is_forced and not spot.is_bonus]
        assert {spot.is_kept for spot in tested} == {True, False}
        assert all(spot.favourites for spot in tested)
    bonus = [spot for spot in spots if spot.is_bonus]
    assert {spot.depth for spot in bonus} >= {2, 7} and not any(spot.is_kept or spot.favourites for spot in bonus)


def test_how_deep_a_draft_is_forced_does_not_depend_on_what_comes_behind() -> None:
    """Else the token that is tested would be known in part."""
    table, prompts, seeds = TableTarget(VOCAB), [(1, 2)] * 40, range(40)
    guide = guide_of(table, prompts, seeds)
    tokens = torch.arange(40 * 6).reshape(40, 6) % VOCAB

    def depths(guide: Guide) -> list[int]:
        drafter = Listed(table, Draft(tokens))
        with forced(drafter, guide) as proposals:
            continue_prompts(table, drafter, prompts, 2, Sampling.of(SETTINGS), seeds)  # type: ignore[arg-type]
        return list(proposals[0].forced)

    sound = depths(guide)
    assert len(set(sound)) > 3
    for place in range(1, 6):
        log_p = guide.log_p.clone()
        log_p[:, place + 1 :] = log_p[:, place + 1 :].roll(1, dims=-1)
        answers = [[*answer[: place + 1], *[0] * (LENGTH - place - 1)] for answer in guide.answers]
        changed = depths(Guide(answers, log_p, guide.seed))
        for before, after in zip(sound, changed, strict=True):
            assert after == before if before < place else after >= place


def test_a_draft_of_several_lengths_and_one_that_learns_from_choices() -> None:
    table, prompts, seeds = TableTarget(VOCAB), [(1, 2)] * 30, range(30)
    tokens, lengths = torch.arange(30 * 6).reshape(30, 6) % VOCAB, [row % 7 for row in range(30)]
    ragged = continue_prompts(
        table,
        Listed(table, Draft(tokens, lengths=lengths)),
        prompts,
        LENGTH,
        Sampling.of(SETTINGS),
        seeds,  # type: ignore[arg-type]
        guide_of(table, prompts, seeds),
    )
    for answer, length in zip(ragged, lengths, strict=True):
        assert max(spot.depth for spot in answer.spots) <= (length + 1 if length else 0)
    learning = continue_prompts(
        table,
        Listed(table, Draft(tokens, wants_choices=True)),
        prompts,
        LENGTH,
        Sampling.of(SETTINGS),
        seeds,  # type: ignore[arg-type]
        guide_of(table, prompts, seeds),
    )
    # They may have been drawn with the target's own numbers: nothing of them is tested by its place in the draft.
    assert all(spot.is_forced and not spot.favourites for answer in learning for spot in answer.spots if spot.depth)
    assert {spot.depth for answer in ragged for spot in answer.spots} >= {0, 1, 2, 3}


def test_of_a_tree_the_bonus_stands_behind_a_leaf() -> None:
    table, prompts, seeds = TableTarget(VOCAB), [(1, 2)] * 60, range(60)
    drafter = Near(table, "match", is_tree=True)
    for answer in continue_prompts(
        table,
        drafter,
        prompts,
        LENGTH,
        Sampling.of(SETTINGS),
        seeds,
        guide_of(table, prompts, seeds),  # type: ignore[arg-type]
    ):
        for spot in answer.spots:
            assert spot.is_bonus == (spot.depth > 0 and not spot.favourites and not spot.is_forced)


# The published model's probabilities of the tokens.


@pytest.mark.parametrize("settings", [Settings(0.8), Settings(1.5, 6, 0.8, 0.05, 1.4)])
def test_what_plain_decoding_draws_of_a_network_is_as_its_odds_say(settings: Settings) -> None:
    """All filters at once, and the repetition penalty, which each token changes for the next."""
    model, prompt, seeds = tiny("qwen3"), [5, 6, 5, 7], range(300)
    answers = continue_prompts(Target(model), NoDrafter(), [prompt] * 300, 12, Sampling.of(settings), seeds)
    odds = odds_of(model, prompt, [answer.tokens for answer in answers], settings)
    draws = [Draws("ar", 300, score_answers(answers, odds, 0))]
    tests = run_tests(draws)
    assert judge_methods(draws, tests)[0].state == "as the model" and max(test.num_tokens for test in tests) > 500
    other = odds_of(model, prompt, [answer.tokens for answer in answers], Settings(0.6 * settings.temperature))
    assert judge_methods(draws, run_tests([Draws("ar", 300, score_answers(answers, other, 0))]))[0].state == "differs"


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_each_place_has_the_distribution_that_generate_would_draw_from(penalty: float) -> None:
    model, prompt, answer, settings = (
        tiny("qwen3"),
        [5, 6, 5, 7],
        [9, 5, 11, 9, 3],
        Settings(0.8, 9, 0.9, 0.02, penalty),
    )
    odds = odds_of(model, prompt, [answer, answer], settings)
    for place in range(len(answer)):
        out = model.generate(
            torch.tensor([[*prompt, *answer[:place]]]),
            max_new_tokens=1,
            do_sample=True,
            temperature=0.8,
            top_k=9,
            top_p=0.9,
            min_p=0.02,
            repetition_penalty=penalty,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        for row in range(2):
            given = odds.log_p[row, place]
            assert torch.allclose(out.scores[0][0].log_softmax(dim=-1), given, atol=1e-4)


@each("settings", [Settings(1.0, top_p=0.75), Settings(1.0, top_k=2), Settings(1.0, min_p=0.5)])
def test_where_rounding_decides_what_the_filters_leave_nothing_is_tested(settings: Settings) -> None:
    """Probabilities 1/2, 1/4, 1/4 are on the edge of each of these filters."""

    class Even:
        def get_input_embeddings(self) -> Any:
            return SimpleNamespace(weight=torch.zeros(3))

        def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
            even, sure = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.6, 0.35, 0.05]).log()
            rows = [torch.stack([even if token == 1 else sure for token in row]) for row in ids.tolist()]
            return SimpleNamespace(logits=torch.stack(rows))

        __call__ = forward

    odds = odds_of(Even(), (0,), [[1, 2], [0, 0]], settings)
    assert odds.on_edge.tolist() == [[False, True], [False, False]]
    columns = score_answers([Continuation((1, 2), (Spot(), Spot())), Continuation((0, 0), (Spot(), Spot()))], odds, 0)
    assert columns["is_open"].tolist() == [True, False, True, True] and not columns["is_impossible"].any()
    assert np.isnan(columns["rank"]).tolist() == [False, True, False, False]


def test_ranks_ids_and_moments_are_those_of_the_distribution() -> None:
    """Draw from it and check: uniform places, and scores with the stated mean, variance and third moment."""
    p = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3], dtype=torch.float64)
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    number = len(tokens)
    ids, favour = torch.tensor([[4, 1, 0]]).expand(number, -1), torch.tensor([[0.9, 0.1, 0.0]]).expand(number, -1)
    uniform = torch.rand(number, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    on_edge = torch.zeros(number, dtype=torch.bool)
    columns = score_tokens(p.log().expand(number, -1), tokens, ids, favour.double(), uniform, on_edge)
    for name in ("rank", "by_id"):
        assert kstest(columns[name].numpy(), "uniform").pvalue > 1e-3
    assert columns["rank"][tokens == 2].max() < 0.4 and columns["rank"][tokens == 0].min() >= 0.9
    assert columns["by_id"][tokens == 0].max() < 0.1 and columns["by_id"][tokens == 4].min() >= 0.7
    for name in ("likelihood", "leaning"):
        off = columns[name] - columns[f"{name}_mean"]
        assert float(off.mean()) == pytest.approx(0, abs=0.005)
        assert float((off**2).mean()) == pytest.approx(float(columns[f"{name}_variance"][0]), rel=0.03)
        assert float((off**3).mean()) == pytest.approx(float(columns[f"{name}_third"][0]), rel=0.1, abs=1e-3)
    assert float(columns["leaning"].max()) == pytest.approx(0.9 / 1.2)


def test_a_token_that_the_filters_leave_out_is_impossible() -> None:
    p = torch.tensor([[0.6, 0.4, 0.0]])
    odds = Odds(p.log()[:, None].expand(1, 2, 3), torch.zeros(1, 2, dtype=torch.bool))
    columns = score_answers([Continuation((0, 2), (Spot(), Spot(1, favourites={2: 1.0})))], odds, 0)
    assert columns["is_impossible"].tolist() == [False, True] and np.isnan(columns["likelihood"][1])


def test_a_drafter_that_is_asked_for_more_than_there_is_room_for_still_says_where_tokens_stood() -> None:
    table = TableTarget(VOCAB)
    (answer,) = continue_prompts(table, Scripted([[1, 2, 3, 4, 5, 6, 7]], 4), [[1, 2]], 2, Sampling(1.0), [3])  # type: ignore[arg-type]
    assert [spot.depth for spot in answer.spots] == [0, 1] and set(answer.spots[1].favourites or {}) == {4}


@pytest.mark.parametrize("label", [REJECTION, TREE])
def test_a_stale_cache_is_planted_in_compiled_kernels_too(label: str) -> None:
    """They write their cache themselves: a plant that they do not see would be missed by whoever looks for it."""
    backend = open_backend(RunRequest(methods=(label,), dtype="float32"), [methods.parse(label)], seed=0)
    assert network_name(backend.target).endswith("numba kernels")
    prompts = [backend.encode([Message("user", "What is 3 plus 4?")])]
    sound, again = (measure(backend, [label], prompts, SETTINGS, 4, LENGTH)[0] for _ in range(2))
    assert pd.DataFrame(sound.columns).equals(pd.DataFrame(again.columns))
    stale = [rule for rule in (*WRONG_RULES, FAINT) if rule.name.startswith("stale cache") and label in rule.methods]
    assert len(stale) >= 2
    for rule in stale:
        with pytest.MonkeyPatch.context() as patch:
            rule.plant(patch)
            (faulty,) = measure(backend, [label], prompts, SETTINGS, 4, LENGTH)
        is_seen = not pd.DataFrame(sound.columns).equals(pd.DataFrame(faulty.columns))
        assert is_seen, rule.name
