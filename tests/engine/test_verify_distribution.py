"""The proof of sampling: sound methods draw as the model does, and every planted wrong rule is found out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import Scripted, TableTarget, tiny
from wrong_rules import MATCH, REJECTION, SUBTLE, TREE, WRONG_RULES, WrongRule

from dflash_bench.analysis.distribution import compared, verdicts
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.continuations import cell_of, drawn, entropies, expected
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters.picking import Picker
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.records import OTHER, Draws, Settings
from dflash_bench.run.distribution import LENGTH, Place, measure

VOCAB = 12
SETTINGS = Settings(temperature=1.4, top_p=0.9)
PLACES = [Place("a", (1, 2), 2.0), Place("b", (5, 6, 7), 2.0)]
NUM_DRAWS = 2048


class TableModel:
    """What a published model is asked, answered from the table: no cache, and no loop."""

    def __init__(self, table: TableTarget) -> None:
        self.table = table

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.zeros(0))

    def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
        rows = [torch.stack([self.table.logits_after(row[: i + 1]) for i in range(len(row))]) for row in ids.tolist()]
        return SimpleNamespace(logits=torch.stack(rows))

    __call__ = forward


class Near:
    """Drafts from probabilities that are near the target's, as a chain by either rule, or as a tree of best tokens."""

    taps: tuple[int, ...] = ()

    def __init__(self, table: TableTarget, rule: str, is_tree: bool = False) -> None:
        self.table, self.is_tree = table, is_tree
        self.noise = TableTarget(VOCAB, seed=7)
        self.picker = Picker(rule, lambda ids: ids)
        self.num_drafts = 4 if is_tree else 3

    def begin(self, num_rows: int, capacity: int) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        self.texts, self.picker.sampler = committed.texts, committed.sampler

    def logits(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        near = [self.table.logits_after(text) + 0.7 * self.noise.logits_after(text) for text in texts]
        return torch.stack(near)[:, None]

    def propose(self) -> Draft:
        if self.is_tree:
            best = self.logits(self.texts).topk(2, dim=-1).indices[:, 0]
            below = self.logits([[*text, first] for text, first in zip(self.texts, best[:, 0].tolist(), strict=True)])
            tokens = torch.cat([best, below.topk(2, dim=-1).indices[:, 0]], dim=1)
            return Draft(tokens, torch.tensor([-1, -1, 0, 0]).expand_as(tokens))
        texts, tokens, probs = [list(text) for text in self.texts], [], []
        for i in range(self.num_drafts):
            token, p = self.picker.pick(self.logits(texts), first=i)
            tokens.append(token)
            probs.append(p)
            for text, new in zip(texts, token[:, 0].tolist(), strict=True):
                text.append(new)
        return Draft(torch.cat(tokens, 1), probs=torch.cat(probs, 1) if probs[0] is not None else None)  # type: ignore[arg-type]


def toy() -> Any:
    table = TableTarget(VOCAB)
    table.model = TableModel(table)  # type: ignore[attr-defined]
    drafters = {
        "ar": NoDrafter(), REJECTION: Near(table, "rejection"), MATCH: Near(table, "match"),
        TREE: Near(table, "match", is_tree=True),
    }  # fmt: skip
    return SimpleNamespace(target=table, drafters=drafters)


def state(method: str, settings: Settings = SETTINGS) -> str:
    draws = measure(toy(), {method: PLACES}, settings, NUM_DRAWS)
    (verdict,) = verdicts(draws, compared(draws))
    return verdict.state


@pytest.fixture(scope="module")
def sound() -> list[Draws]:
    return measure(toy(), dict.fromkeys(("ar", REJECTION, MATCH, TREE), PLACES), SETTINGS, NUM_DRAWS)


def test_sound_methods_draw_as_the_model_does_and_their_drafts_are_put_to_the_test(sound: list[Draws]) -> None:
    tests = compared(sound)
    assert {verdict.state for verdict in verdicts(sound, tests)} == {"as the model"}
    assert min(test.fit.num_cells for test in tests) > 4
    for draws in sound:
        assert sum(draws.counts.values()) == NUM_DRAWS
        if draws.method == "ar":
            assert draws.num_kept is draws.num_refused is None
        else:
            assert draws.num_kept is not None and draws.num_refused is not None
            assert min(draws.num_kept, draws.num_refused) > 0.1 * NUM_DRAWS
            assert draws.num_kept + draws.num_refused == NUM_DRAWS


def test_every_draw_of_a_command_has_a_seed_of_its_own(sound: list[Draws]) -> None:
    assert len({str(sorted(draws.counts.items())) for draws in sound}) == len(sound)


@pytest.mark.parametrize(
    ("rule", "method"), [(rule, method) for rule in WRONG_RULES for method in rule.methods],
    ids=lambda one: one.name if isinstance(one, WrongRule) else one,
)  # fmt: skip
def test_a_wrong_rule_is_found_out(rule: WrongRule, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule.plant(monkeypatch)
    # The toy's target has a begin of its own, and its drafters no cache.
    monkeypatch.setattr(KVCache, "belongs_to_draft", False, raising=False)
    assert state(method) == "differs"


def test_a_mistake_that_top_p_hides_is_found_out_where_top_p_leaves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Settings(temperature=1.4, top_p=0.5)
    assert state(REJECTION, low) == "as the model"
    SUBTLE.plant(monkeypatch)
    assert state(REJECTION, low) == "differs"


def test_drafts_that_are_never_refused_prove_nothing() -> None:
    backend = toy()
    backend.drafters["right"] = NeverRefused(backend.target)
    draws = measure(backend, {"right": PLACES}, SETTINGS, 200)
    assert verdicts(draws, compared(draws))[0].state == "not tested"


class NeverRefused(Near):
    """Knows what the target is going to draw."""

    def __init__(self, table: TableTarget) -> None:
        super().__init__(table, "match")
        self.num_drafts = 1

    def propose(self) -> Draft:
        sampler = self.picker.sampler
        assert sampler is not None
        logits = torch.stack([self.table.logits_after(text) for text in self.texts])[:, None]
        return Draft(sampler.choose(logits, sampler.places(1)))


# What is expected, and which cell an answer falls into.


def test_cells_exclude_each_other_and_hold_everything() -> None:
    cells = expected(TableModel(TableTarget(VOCAB)), (1, 2), LENGTH, Settings(1.0), 500)
    assert sum(cells.values()) == pytest.approx(1)
    assert {len(cell) for cell in cells} == {1, 2, 3} and any(cell[-1] == OTHER for cell in cells)
    for text in ([a, b, c] for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)):
        cell = cell_of(text, cells)
        known = cell[:-1] if cell[-1] == OTHER else cell
        assert tuple(text[: len(known)]) == known
        if cell[-1] == OTHER:
            assert tuple(text[: len(cell)]) not in cells


@pytest.mark.parametrize("settings", [Settings(0.8), Settings(1.5, 6, 0.8, 0.05, 1.4)])
def test_what_is_expected_of_a_network_is_what_plain_decoding_draws(settings: Settings) -> None:
    """All filters at once, and the repetition penalty, which the first of these tokens changes for the next."""
    model, prompt, num_draws = tiny("qwen3"), [5, 6, 5, 7], 1500
    cells = expected(model, prompt, LENGTH, settings, num_draws)
    answers = drawn(
        Target(model), NoDrafter(), [prompt] * num_draws, LENGTH, Sampling.of(settings), list(range(num_draws))
    )
    counts: dict[Any, int] = {}
    for answer in answers:
        cell = cell_of(answer.tokens, cells)
        counts[cell] = counts.get(cell, 0) + 1
    draws = [Draws("ar", "a", cells, counts, None, None)]
    tests = compared(draws)
    assert not any(test.failed for test in tests) and max(test.fit.num_cells for test in tests) > 3


def test_entropies_are_those_of_the_next_token_after_each_place() -> None:
    table, settings = TableTarget(VOCAB), Settings(1.5, top_k=4)
    given = entropies(TableModel(table), [1, 2, 3, 4], settings, 2)
    for entropy, text in zip(given, ([1, 2, 3], [1, 2, 3, 4]), strict=True):
        p = torch.softmax(table.logits_after(text).topk(4).values.double() / 1.5, dim=-1)
        assert entropy == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)


def test_a_drafter_that_is_asked_for_more_than_there_is_room_for_still_says_what_became_of_its_draft() -> None:
    table = TableTarget(VOCAB)
    (answer,) = drawn(table, Scripted([[1, 2, 3, 4, 5, 6, 7]], 4), [[1, 2]], 2, Sampling(1.0), [3])  # type: ignore[arg-type]
    assert len(answer.tokens) == 2 and answer.num_drafted == 4


@pytest.mark.parametrize("settings", [Settings(1.0, top_p=0.75), Settings(1.0, top_k=2), Settings(1.0, min_p=0.5)])
def test_a_beginning_after_which_rounding_decides_is_not_followed(settings: Settings) -> None:
    """Probabilities 1/2, 1/4, 1/4 are on the edge of each of these filters."""

    class Even:
        def get_input_embeddings(self) -> Any:
            return SimpleNamespace(weight=torch.zeros(0))

        def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
            even = torch.tensor([0.5, 0.25, 0.25]).log()
            sure = torch.tensor([0.6, 0.35, 0.05]).log()
            rows = [[*[sure] * (len(row) - 1), even if row[-1] == 1 else sure] for row in ids]
            return SimpleNamespace(logits=torch.stack([torch.stack(row) for row in rows]))

        __call__ = forward

    cells = expected(Even(), (0,), 2, settings, 1000)
    assert sum(cells.values()) == pytest.approx(1)
    assert (1,) in cells and (1, 0) not in cells and (0, 0) in cells
    assert cell_of([1, 2], cells) == (1,)
    assert expected(Even(), (1,), 2, settings, 1000) == {(OTHER,): 1.0}
    assert cell_of([0, 0], {(OTHER,): 1.0}) == (OTHER,)
