"""The one loop: whatever is drafted, the tokens are those of plain decoding, and the counts add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafter import Committed, Drafter, NoDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import DecodingError, HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from helpers.decoding import (
    PARTS,
    PROMPTS,
    STOP,
    VOCAB,
    answers,
    table,
    texts,
)
from helpers.each import each
from helpers.toy import (
    Change,
    Decoded,
    RandomTree,
    Sampled,
    SampledTree,
    Scripted,
    TableTarget,
    Tree,
    Watching,
    changes,
    follows,
    plain,
    run,
    sometimes_wrong,
    tiny,
)


def test_the_toy_answers_are_varied_and_end_in_different_ways() -> None:
    given = answers(PROMPTS)
    assert len({len(answer) for answer in given}) >= 5
    assert {answer[-1] == STOP for answer in given} == {True, False}
    assert len({token for answer in given for token in answer}) > 15


@each("num_rows", [1, 3, 8])
@each("num_drafts", [1, 2, 5, 16])
@each("kind", changes(VOCAB, STOP))
def test_every_chain_gives_the_plain_tokens(kind: str, num_drafts: int, num_rows: int) -> None:
    expected = answers(PROMPTS)
    for first in range(0, len(PROMPTS) - num_rows + 1, num_rows):
        prompts = PROMPTS[first : first + num_rows]
        drafter = Scripted(texts(prompts), num_drafts, changes(VOCAB, STOP)[kind]())
        out = run(table(), drafter, prompts, stop_ids=frozenset({STOP}))
        assert out.tokens == expected[first : first + num_rows]


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_plain_decoding_gives_the_plain_tokens(num_rows: int) -> None:
    out = run(table(), NoDrafter(), PROMPTS[:num_rows], stop_ids=frozenset({STOP}))
    assert out.tokens == answers(PROMPTS[:num_rows])


@each("num_rows", [1, 3, 8])
@each("shape", ["chain", "branching", "duplicates", "late"])
def test_every_tree_gives_the_plain_tokens(shape: str, num_rows: int) -> None:
    prompts = PROMPTS[:num_rows]
    drafter = Tree(texts(prompts), 4, shape, VOCAB)
    out = run(table(), drafter, prompts, stop_ids=frozenset({STOP}))
    assert out.tokens == answers(prompts)
    assert max(count for step in out.rounds for count in step.accepted) >= 3


@each("num_rows", [1, 3, 8])
@each("num_drafts", [1, 15, 59])
@each("top_k", [1, 2, 10])
def test_trees_of_any_shape_give_the_plain_tokens(top_k: int, num_drafts: int, num_rows: int) -> None:
    for first in range(0, len(PROMPTS) - num_rows + 1, num_rows):
        prompts = PROMPTS[first : first + num_rows]
        drafter = RandomTree(texts(prompts), num_drafts, top_k, VOCAB, seed=first)
        out = run(table(), drafter, prompts, stop_ids=frozenset({STOP}))
        assert out.tokens == answers(PROMPTS)[first : first + num_rows]
        assert any(count for step in out.rounds for count in step.accepted) or len(out.rounds) < 3


def test_a_tree_keeps_as_much_as_the_chain_inside_it() -> None:
    for shape in ("branching", "late"):
        chain, tree = (
            run(table(), drafter, PROMPTS[:1])
            for drafter in (Scripted(texts(PROMPTS[:1]), 4), Tree(texts(PROMPTS[:1]), 4, shape, VOCAB))
        )
        assert [step.accepted for step in tree.rounds] == [step.accepted for step in chain.rounds]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_only_a_path_with_gaps_is_moved_in_the_cache(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    original = KVCache.keep_path

    def keep_path(cache: KVCache, starts: Sequence[int], path: Tensor) -> None:
        moved.append(path)
        original(cache, starts, path)

    monkeypatch.setattr(KVCache, "keep_path", keep_path)
    prompts = PROMPTS[:num_rows]
    for shape in ("chain", "branching"):
        moved.clear()
        out = run(table(), Tree(texts(prompts), 4, shape, VOCAB), prompts)
        assert sum(max(step.accepted) > 0 for step in out.rounds) > 3
        assert bool(moved) == (shape == "branching")
        # In the last round nothing is kept any more.
        assert len(moved) < len(out.rounds)
        assert all((path[:, 1:] > path[:, :-1] + 1).any() for path in moved)


def test_right_drafts_are_kept_and_wrong_ones_are_not() -> None:
    right = run(table(), Scripted(texts(PROMPTS[:1]), 5), PROMPTS[:1], 19)
    assert [step.accepted[0] for step in right.rounds] == [5, 5, 5]
    wrong = run(table(), Scripted(texts(PROMPTS[:1]), 5, lambda t: (t + 1) % VOCAB), PROMPTS[:1], 19)
    assert [step.accepted[0] for step in wrong.rounds] == [0] * 18


class Changing(Scripted):
    """Proposes another number of tokens each round, and sometimes nothing."""

    def propose(self) -> Draft:
        self.turn = getattr(self, "turn", 0) + 1
        draft = super().propose()
        return Draft(draft.tokens[:, : self.turn * 3 % (self.num_drafts + 1)])


def test_a_draft_may_change_its_length_from_round_to_round() -> None:
    assert run(table(), Changing(texts(PROMPTS), 5, sometimes_wrong(0.7, VOCAB)), PROMPTS).tokens == [
        table().answer(prompt, 24) for prompt in PROMPTS
    ]


# Real networks, where a wrong mask or position is a wrong feature.


@cache
def free_answers(kind: str) -> list[list[int]]:
    return plain(Target(tiny(kind)), PROMPTS)


def cut(answer: list[int], stop_ids: frozenset[int]) -> list[int]:
    ends = [i + 1 for i, token in enumerate(answer) if token in stop_ids]
    return answer[: ends[0]] if ends else answer


@each("kind", ["qwen3", "llama"])
@each(("num_drafts", "num_rows"), [(1, 3), (2, 8), (5, 3), (16, 1), (16, 8)])
def test_every_chain_gives_the_plain_tokens_of_a_random_network(kind: str, num_drafts: int, num_rows: int) -> None:
    target = Target(tiny(kind))
    prompts, free = PROMPTS[:num_rows], free_answers(kind)[:num_rows]
    # Two tokens that end some rows early.
    stop_ids = frozenset({free[0][5], free[-1][11]})
    expected = [cut(answer[:16], stop_ids) for answer in free]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, free, strict=True)]
    ways: tuple[Change, ...] = (lambda token: token, sometimes_wrong(0.6, 97), lambda token: (token + 1) % 97)
    for change in ways:
        # Known text continues after the limit, and right drafts reach past it.
        out = run(target, Scripted(known, num_drafts, change), prompts, 16, stop_ids=stop_ids)
        assert out.tokens == expected
    assert run(target, NoDrafter(), prompts, 16, stop_ids=stop_ids).tokens == expected


@each("shape", ["chain", "branching", "duplicates", "late"])
def test_every_tree_gives_the_plain_tokens_of_a_random_network(shape: str) -> None:
    target, prompts = Target(tiny("qwen3")), PROMPTS[:3]
    expected = free_answers("qwen3")[:3]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    out = run(target, Tree(known, 4, shape, 97), prompts)
    assert out.tokens == expected
    assert max(count for step in out.rounds for count in step.accepted) >= 3


@each(("num_drafts", "num_rows"), [(1, 3), (15, 8), (59, 1), (59, 3)])
def test_trees_of_any_shape_give_the_plain_tokens_of_a_random_network(num_drafts: int, num_rows: int) -> None:
    target, prompts, free = Target(tiny("llama")), PROMPTS[:num_rows], free_answers("llama")[:num_rows]
    stop_ids = frozenset({free[0][5], free[-1][11]})
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, free, strict=True)]
    for top_k in (1, 2, 10):
        out = run(target, RandomTree(known, num_drafts, top_k, 97), prompts, 16, stop_ids=stop_ids)
        assert out.tokens == [cut(answer[:16], stop_ids) for answer in free]
        assert any(count for step in out.rounds for count in step.accepted)


# Ends: stop tokens, limits, and prompts at the edges.


def test_a_stop_token_inside_a_block_ends_the_row_there() -> None:
    prompt = PROMPTS[0]
    free = table().answer(prompt, 24)
    stop = free[4]
    at = free.index(stop)
    out = run(table(), Scripted(texts([prompt]), 16), [prompt], stop_ids=frozenset({stop}))
    assert out.tokens == [free[: at + 1]]
    assert len(out.rounds) == 1 and len(out.rounds[0].emitted[0] or ()) == at < 17


@each("max_new_tokens", [1, 2, 3, 6, 7, 8])
def test_a_limit_inside_a_block_ends_the_row_there(max_new_tokens: int) -> None:
    out = run(table(), Scripted(texts(PROMPTS), 5), PROMPTS, max_new_tokens)
    assert out.tokens == [table().answer(prompt, max_new_tokens) for prompt in PROMPTS]


@each("max_new_tokens", [2, 3, 6, 7])
def test_a_stop_or_a_limit_inside_a_tree_ends_the_row_there(max_new_tokens: int) -> None:
    prompt = PROMPTS[0]
    free = table().answer(prompt, 24)
    # All nodes lie on the right way or beside it, so that what is kept reaches past the end.
    limited = run(table(), Tree(texts([prompt]), 8, "late", VOCAB), [prompt], max_new_tokens)
    assert limited.tokens == [free[:max_new_tokens]]
    assert limited.rounds[0].accepted == [8] and limited.rounds[0].drafted == [16]
    at = free.index(free[max_new_tokens - 1])
    stopped = run(table(), Tree(texts([prompt]), 8, "late", VOCAB), [prompt], stop_ids=frozenset({free[at]}))
    assert stopped.tokens == [free[: at + 1]]


def test_one_token_takes_no_round() -> None:
    out = run(table(), Scripted(texts(PROMPTS), 5), PROMPTS, 1)
    assert [len(tokens) for tokens in out.tokens] == [1] * len(PROMPTS)
    assert out.rounds == []


def test_a_first_token_that_is_a_stop_token_takes_no_round_and_no_draft_prefill() -> None:
    first = table().answer(PROMPTS[0], 1)[0]

    class Idle(NoDrafter):
        def observe(self, committed: Committed) -> None:
            raise AssertionError("nothing is left to draft for")

    out = run(table(), Idle(), PROMPTS[:1], stop_ids=frozenset({first}))
    assert out.tokens == [[first]] and out.rounds == []


def test_a_row_whose_first_token_stops_it_leaves_the_others_alone() -> None:
    first = table().answer(PROMPTS[1], 1)[0]
    for num_drafts in (1, 5, 16):
        out = run(table(), Scripted(texts(PROMPTS), num_drafts), PROMPTS, stop_ids=frozenset({first}))
        assert out.tokens == answers(PROMPTS, stop=first)
        assert out.tokens[1] == [first] and out.own(1) == []


@pytest.mark.parametrize("num_drafts", [0, 2, 16])
def test_a_row_ends_where_the_context_is_full(num_drafts: int) -> None:
    prompts = [[1] * 47, [2] * 46, [3]]
    drafter = Scripted(texts(prompts, 99), num_drafts) if num_drafts else NoDrafter()
    out = run(table(), drafter, prompts, 99)
    assert [len(tokens) for tokens in out.tokens] == [1, 2, 47]
    assert out.tokens == [table().answer(prompt, 99) for prompt in prompts]


@pytest.mark.parametrize("length", [48, 49, 500])
def test_a_prompt_that_fills_the_context_is_refused(length: int) -> None:
    with pytest.raises(DecodingError, match=f"a prompt of {length} tokens leaves no room in a context of 48"):
        run(table(), NoDrafter(), [[1, 2], [1] * length])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DecodingError, match="an empty prompt"):
        run(table(), NoDrafter(), [[1, 2], []])


# Counts.


@pytest.mark.parametrize("num_drafts", [1, 5, 16])
def test_counts_agree_with_the_tokens(num_drafts: int) -> None:
    drafter = Scripted(texts(PROMPTS), num_drafts, sometimes_wrong(0.7, VOCAB))
    out = run(table(), drafter, PROMPTS, stop_ids=frozenset({STOP}))
    for row, tokens in enumerate(out.tokens):
        own = out.own(row)
        emitted = [len(step.emitted[row] or ()) for step in own]
        accepted = [step.accepted[row] for step in own]
        assert sum(emitted) + 1 == len(tokens)
        assert all(step.drafted[row] == num_drafts for step in own)
        assert all(count <= num_drafts for count in accepted)
        assert all(e == a + 1 for e, a in list(zip(emitted, accepted, strict=True))[:-1])
        assert emitted[-1:] <= [accepted[-1] + 1] if own else True


def test_a_truncated_last_round_keeps_what_was_accepted_and_emits_less() -> None:
    out = run(table(), Scripted(texts(PROMPTS[:1]), 5), PROMPTS[:1], 9)
    assert [step.accepted[0] for step in out.rounds] == [5, 5]
    assert [len(step.emitted[0] or ()) for step in out.rounds] == [6, 2]


def test_rounds_after_a_rows_end_count_nothing_for_it() -> None:
    out = run(table(), Scripted(texts(PROMPTS), 5), PROMPTS, stop_ids=frozenset({STOP}))
    over = [(step, row) for step in out.rounds for row, new in enumerate(step.emitted) if new is None]
    assert over
    assert all(step.drafted[row] == step.accepted[row] == 0 for step, row in over)


def test_every_round_of_a_running_row_emits_something() -> None:
    out = run(table(), Scripted(texts(PROMPTS), 5, sometimes_wrong(0.5, VOCAB)), PROMPTS)
    assert all(step.emitted[row] for row in range(len(PROMPTS)) for step in out.own(row))


def test_marks_are_in_order() -> None:
    for step in run(table(), Scripted(texts(PROMPTS[:2]), 3), PROMPTS[:2]).rounds:
        assert all(isinstance(mark, float) for mark in step.marks)
        assert list(step.marks) == sorted(step.marks)  # type: ignore[type-var]


# Calls of drafters.


@pytest.mark.parametrize("shape", ["chain", "branching"])
def test_drafters_are_told_what_the_target_has_read_and_what_follows(shape: str) -> None:
    inner = Tree(texts(PROMPTS), 4, shape, VOCAB)
    inner.change = sometimes_wrong(0.6, VOCAB)
    watching = Watching(inner)
    out = run(table(), watching, PROMPTS, stop_ids=frozenset({STOP}))
    for prompt, tokens, read, following in zip(PROMPTS, out.tokens, watching.read, watching.following, strict=True):
        text = [*prompt, *tokens]
        # The hidden state of the toy is a token and its position. The last round of a row is not reported.
        assert [int(state[0]) for state in read] == text[: len(read)]
        assert [int(state[1]) for state in read] == list(range(len(read)))
        assert following == text[1 : len(read) + 1]
        assert len(read) >= len(prompt)


def test_the_anchor_is_the_last_token_and_its_own_state_is_never_reported() -> None:
    class Anchored(Watching):
        def propose(self) -> Draft | None:
            for read, following, anchor in zip(self.read, self.following, self.anchors, strict=True):
                assert len(read) == len(following) and following[-1] == anchor
            return super().propose()

    for prompt in PROMPTS:
        run(table(), Anchored(Scripted(texts([prompt]), 4, sometimes_wrong(0.6, VOCAB))), [prompt])


# Sampling.


def test_sampling_draws_the_same_tokens_with_and_without_drafts() -> None:
    sampling = Sampling(1.0, seed=11)
    alone = run(table(), NoDrafter(), PROMPTS, sampling=sampling)
    assert alone.tokens != [table().answer(prompt, 24) for prompt in PROMPTS]
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, alone.tokens, strict=True)]
    drafters: list[Callable[[], Drafter]] = [
        lambda: Scripted(known, 5),
        lambda: Scripted(known, 16, sometimes_wrong(0.5, VOCAB)),
        lambda: Scripted(texts(PROMPTS), 3),
        lambda: Tree(known, 4, "branching", VOCAB),
        lambda: Tree(known, 4, "late", VOCAB),
        lambda: RandomTree(known, 15, 3, VOCAB),
    ]
    for drafter in drafters:
        assert run(table(), drafter(), PROMPTS, sampling=sampling).tokens == alone.tokens
    assert max(
        count for step in run(table(), drafters[0](), PROMPTS, sampling=sampling).rounds for count in step.accepted
    )


def test_sampling_draws_the_same_tokens_from_a_random_network() -> None:
    target, sampling = Target(tiny("qwen3")), Sampling(0.7, seed=2)
    alone = run(target, NoDrafter(), PROMPTS[:3], sampling=sampling).tokens
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, alone, strict=False)]
    for num_drafts in (2, 16):
        drafter = Scripted(known, num_drafts, sometimes_wrong(0.7, 97))
        assert run(target, drafter, PROMPTS[:3], sampling=sampling).tokens == alone


def test_another_seed_draws_other_tokens() -> None:
    first, second = (run(table(), NoDrafter(), PROMPTS, sampling=Sampling(1.0, seed)).tokens for seed in (1, 2))
    assert first != second


def test_sampled_drafts_give_the_same_tokens_for_the_same_seed_whatever_else_is_drawn() -> None:
    def tokens(seed: int) -> list[list[int]]:
        torch.rand(seed + 5)
        return run(table(), Sampled(8, 4, VOCAB), PROMPTS, sampling=Sampling(1.0, seed)).tokens

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_sampled_drafts_are_sometimes_kept_and_follow_the_targets_distribution() -> None:
    num_rows = 3000
    target, drafter, seeds = TableTarget(5, 32), Sampled(num_rows, 2, 5), range(num_rows)
    out = run(target, drafter, [[1, 2]] * num_rows, 3, sampling=Sampling(1.0), seeds=seeds)
    assert 0.1 < sum(out.rounds[0].accepted) / (2 * num_rows) < 0.9
    assert follows_the_table(out)


def test_sampled_trees_are_sometimes_kept_and_follow_the_targets_distribution() -> None:
    num_rows = 3000
    target, drafter, seeds = TableTarget(5, 32), SampledTree(num_rows, 5), range(num_rows)
    out = run(target, drafter, [[1, 2]] * num_rows, 3, sampling=Sampling(1.0), seeds=seeds)
    assert min(out.rounds[0].accepted.count(count) for count in (0, 1, 2)) > 100
    assert follows_the_table(out)


def follows_the_table(out: Decoded) -> bool:
    """Do three tokens after [1, 2] come as often as the table of five says?"""
    target, prompt = TableTarget(5, 32), [1, 2]
    first = torch.softmax(target.logits_after(prompt), dim=-1)
    second = torch.stack([torch.softmax(target.logits_after([*prompt, a]), dim=-1) for a in range(5)])
    third = torch.stack(
        [torch.stack([torch.softmax(target.logits_after([*prompt, a, b]), -1) for b in range(5)]) for a in range(5)]
    )
    joint = first[:, None, None] * second[:, :, None] * third
    drawn = torch.tensor([(a * 5 + b) * 5 + c for a, b, c in out.tokens])
    return follows(drawn, joint.flatten())


def test_sampled_drafts_at_temperature_zero_are_kept_while_they_are_right() -> None:
    out = run(table(), Sampled(8, 4, VOCAB), PROMPTS, stop_ids=frozenset({STOP}))
    assert out.tokens == answers(PROMPTS)


# Broken logits.


class Breaking(TableTarget):
    """Says NaN, or what it is told, after a token of its own choice in one row."""

    def __init__(self, row: int, token: int, value: float = torch.nan) -> None:
        super().__init__(VOCAB, context_length=48)
        self.row, self.token, self.value = row, token, value

    def forward(self, tokens: Tensor, starts: Sequence[int], parents: Tensor | None = None, first: int = 0) -> Any:
        output = super().forward(tokens, starts, parents, first)
        output.logits[self.row, tokens[self.row] == self.token] = self.value
        return output


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_logits_stop_the_generation_and_name_the_row(value: float) -> None:
    answer = table().answer(PROMPTS[2], 24)
    token, at = next((t, i) for i, t in enumerate(answer) if t not in PROMPTS[2] and i > 2)
    for drafter in (NoDrafter(), Scripted(texts(PROMPTS), 5), Tree(texts(PROMPTS), 4, "late", VOCAB)):
        with pytest.raises(DecodingError, match=r"NaN or infinite logits after \d+ tokens \(row 2\)") as caught:
            run(Breaking(2, token, value), drafter, PROMPTS)
        # The round that reads the token is the one that fails.
        assert int(str(caught.value).split(" tokens")[0].split()[-1]) <= at + 1


def test_broken_logits_in_a_prompt_are_found() -> None:
    with pytest.raises(DecodingError, match=r"after 0 tokens \(row 1\)"):
        run(Breaking(1, PROMPTS[1][-1]), NoDrafter(), PROMPTS[:2])


def test_broken_logits_behind_a_refused_draft_do_no_harm() -> None:
    free = table().answer(PROMPTS[0], 24)
    spare = next(token for token in range(VOCAB) if token not in [*PROMPTS[0], *free])
    out = run(Breaking(0, spare), Scripted(texts(PROMPTS[:1]), 5, lambda token: spare), PROMPTS[:1])
    assert out.tokens == [free]


def test_broken_logits_on_a_side_branch_do_no_harm_and_on_the_kept_branch_are_found() -> None:
    free = table().answer(PROMPTS[0], 24)
    spare = next(token for token in range(VOCAB) if token not in [*PROMPTS[0], *free])
    last = free[4]
    assert last not in [*PROMPTS[0], *free[:4]]

    class Side(Tree):
        """The right chain behind a wrong node, so that rows of the block and depths differ."""

        def _tree(self, right: list[int]) -> tuple[list[int], list[int]]:
            return [spare, *right], [-1, -1, *range(1, self.depth)]

    assert run(Breaking(0, spare), Side(texts(PROMPTS[:1]), 4, "late", VOCAB), PROMPTS[:1]).tokens == [free]
    with pytest.raises(DecodingError, match="after 1 tokens"):
        run(Breaking(0, last), Side(texts(PROMPTS[:1]), 4, "late", VOCAB), PROMPTS[:1])


def test_a_row_that_has_ended_cannot_break_the_others() -> None:
    prompts = PROMPTS[2:5]
    stop = table().answer(prompts[1], 24)[3]
    expected = answers(prompts, stop=stop)
    assert stop not in {prompt[-1] for prompt in prompts}
    assert max(len(answer) for answer in expected) > len(expected[1]) + 3
    assert run(Breaking(1, stop), NoDrafter(), prompts, stop_ids=frozenset({stop})).tokens == expected


# The cost of a round outside the model.


@each("num_rows", [1, 3])
@each("method", PARTS)
def test_caches_stay_where_they_are_from_round_to_round(method: str, num_rows: int) -> None:
    target, drafter = PARTS[method]()
    caches = [target, drafter] if method != "plain" else [target]

    def places() -> list[int]:
        return [b.data_ptr() for owner in caches for layer in owner.cache._layers.values() for b in layer]

    seen = [places() for _ in decode(target, drafter, PROMPTS[:num_rows], Limits(12), Sampling(), HostClock())]
    assert len(seen) > 5 and len(seen[0]) >= 8
    assert all(earlier == later for earlier, later in pairwise(seen))
    # A shorter generation with as many rows uses the same memory again.
    *_, last = (places() for _ in decode(target, drafter, [[5, 6]] * num_rows, Limits(8), Sampling(), HostClock()))
    assert last == seen[0]


def decoded(target: Any, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> Decoded:
    return run(target, drafter, prompts, 12)


@each("num_rows", [1, 3])
@each("method", PARTS)
def test_what_an_earlier_generation_left_behind_changes_nothing(method: str, num_rows: int) -> None:
    short = [[9], [8, 7, 6], [5, 4]][:num_rows]
    target, drafter = PARTS[method]()
    decoded(target, drafter, PROMPTS[1 : num_rows + 1])
    used = decoded(target, drafter, short)
    fresh = decoded(*PARTS[method](), short)
    assert used.tokens == fresh.tokens
    assert [step.accepted for step in used.rounds] == [step.accepted for step in fresh.rounds]


def test_what_was_drafted_rides_in_the_rounds_own_transfer_padding_left_out() -> None:
    target = Target(tiny("qwen3"))
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain(target, PROMPTS), strict=True)]
    drafter = Scripted(texts, 4, lambda token: token if token % 3 else 7)
    out = run(target, drafter, PROMPTS)
    for row, text in enumerate(texts):
        end = len(PROMPTS[row])
        for step in out.own(row):
            expected = [*text[end + 1 : end + 5], *[0] * 4][:4]
            assert step.drafted_ids[row] == [token if token % 3 else 7 for token in expected]
            assert len(step.drafted_ids[row]) == step.drafted[row] and step.drafted_parents is None
            end += step.accepted[row] + 1


def test_of_a_tree_the_parents_of_what_was_drafted_are_kept_too() -> None:
    out = run(TableTarget(5, 32), SampledTree(2, 5), [[1, 2]] * 2, 6, sampling=Sampling(1.0, 4))
    for step in out.rounds:
        assert step.drafted_parents is not None
        for ids, parents, count in zip(step.drafted_ids, step.drafted_parents, step.drafted, strict=True):
            assert len(ids) == len(parents) == count
            assert all(-1 <= parent < place for place, parent in enumerate(parents))
