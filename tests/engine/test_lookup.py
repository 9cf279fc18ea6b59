"""Drafters that look tokens up on the host: what they draft, and that the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.drafters.base import Trie, chains, trees
from dflash_bench.engine.drafters.lookahead import LookaheadDrafter, NgramPool, Window, max_nodes
from dflash_bench.engine.drafters.ngram import NGramDrafter
from dflash_bench.engine.drafters.oracle import OracleDrafter
from dflash_bench.engine.drafters.random import RandomDrafter
from dflash_bench.engine.drafters.rest import RestDrafter, most_frequent
from dflash_bench.engine.drafters.suffix import Node, Place, SuffixDrafter, SuffixTree
from dflash_bench.engine.drafters.synthetic import SyntheticDrafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.models import datastore
from helpers.each import each
from helpers.repeating_targets import (
    CPU,
    PROMPTS,
    STOP,
    VOCAB,
    accepted,
    chains_of,
    drafted_after,
    sampled,
    table,
    tell,
)
from helpers.toy import plain, run


def ngram(num_drafts: int = 5, longest: int = 3, shortest: int = 1, copies_prompt: bool = True) -> NGramDrafter:
    return NGramDrafter(num_drafts, longest, shortest, CPU, copies_prompt)


def suffix(num_drafts: int = 8, threshold: float = 0.1, depth: int = 12, earlier: bool = True) -> SuffixDrafter:
    return SuffixDrafter(num_drafts, threshold, depth, 2.0, earlier, CPU)


def rest(texts: Sequence[Sequence[int]], nodes: int = 12, depth: int = 5, longest: int = 4) -> RestDrafter:
    return RestDrafter(datastore.of_texts(texts), nodes, depth, longest, 1, CPU)


DRAFTERS: dict[str, Callable[[], Any]] = {
    "ngram": ngram,
    "ngram of one token": lambda: ngram(1, 1, 1),
    "ngram, wide": lambda: ngram(16, 2, 2),
    "ngram, own text": lambda: ngram(copies_prompt=False),
    "suffix": suffix,
    "suffix, own text": lambda: suffix(earlier=False),
    "suffix, shallow": lambda: suffix(depth=2),
    "lookahead": lambda: LookaheadDrafter(4, 4, 3, CPU),
    "lookahead, bigrams": lambda: LookaheadDrafter(5, 2, 4, CPU),
    "lookahead, one column": lambda: LookaheadDrafter(1, 5, 2, CPU),
    "rest": lambda: rest([table().answer(prompt, 60) for prompt in PROMPTS]),
    "rest, a chain": lambda: rest([[*range(6)] * 3, table().answer([8], 60)], nodes=4, depth=9),
    "random": lambda: RandomDrafter(3, 0, table()),  # type: ignore[arg-type]
}


@each("num_rows", [1, 3, 8])
@each("name", DRAFTERS)
def test_the_tokens_are_the_plain_ones_whatever_was_looked_up(name: str, num_rows: int) -> None:
    target, drafter = table(), DRAFTERS[name]()
    answers = [target.answer(prompt, 24, frozenset({STOP})) for prompt in PROMPTS]
    kept = 0
    for first in range(0, len(PROMPTS) - num_rows + 1, num_rows):
        out = run(table(), drafter, PROMPTS[first : first + num_rows], stop_ids=frozenset({STOP}))
        assert out.tokens == answers[first : first + num_rows]
        kept += sum(sum(step.accepted) for step in out.rounds)
    assert kept >= 8 or name == "random"


@each("name", DRAFTERS)
def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(name: str) -> None:
    assert sampled(DRAFTERS[name]()) == sampled(NoDrafter())


# N-grams.


def by_scanning(text: Sequence[int], limit: int, longest: int, shortest: int, first: int) -> list[int]:
    """Prompt lookup by definition: every place of every suffix, the longest suffix first, the latest place first."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, max(size, first) - 1, -1):
            if size < len(text) and text[end - size : end] == text[-size:]:
                return list(text[end : end + limit])
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=40),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.data(),
)
def test_the_index_says_what_a_scan_of_the_text_says(
    text: list[int], limit: int, shortest: int, more: int, copies_prompt: bool, data: st.DataObject
) -> None:
    drafter = ngram(limit, shortest + more, shortest, copies_prompt)
    drafter.begin(1, 100)
    row: list[int] = []
    first = None
    while len(row) < len(text):
        # Rounds bring several tokens at a time.
        row += text[len(row) : len(row) + data.draw(st.integers(1, 5))]
        tell(drafter, [row])
        first = (0 if copies_prompt else len(row) - 1) if first is None else first
        assert chains_of(drafter.propose()) == [by_scanning(row, limit, shortest + more, shortest, first)]


def test_the_longest_suffix_counts_and_of_its_places_the_latest() -> None:
    # "1 2" occurred twice, and "2" once more.
    assert drafted_after(ngram(2), [1, 2, 7, 1, 2, 8, 2, 9, 1, 2]) == [8, 2]
    assert drafted_after(ngram(2, 1), [1, 2, 7, 1, 2, 8, 2, 9, 1, 2]) == [9, 1]
    assert drafted_after(ngram(9), [5, 6, 7, 5]) == [6, 7, 5]
    assert drafted_after(ngram(shortest=2), [1, 2, 3, 4, 3]) == []


def test_rows_without_a_match_get_no_tokens_and_rounds_without_any_no_draft() -> None:
    drafter = ngram(3)
    drafter.begin(3, 40)
    tell(drafter, [[1, 2, 1], [1, 2, 3], [4, 5, 6, 4]])
    assert chains_of(drafter.propose()) == [[2, 1], [], [5, 6, 4]]
    # Rows that have ended get none either.
    tell(drafter, [[1, 2, 1], [1, 2, 3, 7], [4, 5, 6, 4, 5]], [0, 1, 1])
    assert chains_of(drafter.propose()) == [[], [], [6, 4, 5]]
    tell(drafter, [[1, 2, 1], [1, 2, 3, 7, 9], [4, 5, 6, 4, 5, 8]], [0, 1, 1])
    assert drafter.propose() is None


class Cycling:
    """Satisfies the loop as the table target does, and says 0 1 2 3 4 5 0 1 2 ... whatever it has read."""

    def __new__(cls) -> Any:
        target = table()
        target.table = torch.zeros_like(target.table)
        successor = torch.eye(VOCAB)[(torch.arange(VOCAB) + 1) % 6]
        target.after = successor.repeat(2, 1, 1)  # type: ignore[attr-defined]
        return target


def test_acceptance_on_a_text_that_goes_round() -> None:
    # From prompt "0": six plain rounds until 0 comes again. Then "0" has stood once, and "1 2 3 4 5 0" follows.
    out = run(Cycling(), ngram(4, 2), [[0]], 18)
    assert out.tokens == [[*range(1, 6), *range(6), *range(6), 0]]
    assert [step.drafted[0] for step in out.rounds] == [0, 0, 0, 0, 0, 4, 4, 4]
    assert accepted(out) == [0, 0, 0, 0, 0, 4, 4, 4]


# Suffix trees.


def counted(texts: Sequence[Sequence[int]], depth: int) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for text in texts:
        for first in range(len(text)):
            for last in range(first + 1, min(len(text), first + depth) + 1):
                piece = tuple(text[first:last])
                counts[piece] = counts.get(piece, 0) + 1
    return counts


def told_by(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """All that the tree holds, pieces that occur once followed through the text."""
    counts: dict[tuple[int, ...], int] = {}

    def walk(piece: tuple[int, ...], place: Place) -> None:
        if piece:
            counts[piece] = place.count if isinstance(place, Node) else 1
        if len(piece) == tree.depth:
            assert isinstance(place, int) or not place.children
            return
        following = set(place.children) if isinstance(place, Node) else {*tree.tokens[place + 1 : place + 2]} - {-1}
        for token in following:
            longer = tree.after(place, token)
            assert longer is not None
            walk((*piece, token), longer)

    walk((), tree.root)
    return counts


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=6)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 6), st.data())
def test_a_tree_counts_every_piece_of_the_texts_that_it_holds(
    texts: list[list[int]], depth: int, data: st.DataObject
) -> None:
    tree = SuffixTree(depth)
    held: list[tuple[range, list[int]]] = []
    for text in texts:
        held.append((tree.add(text), text))
        if data.draw(st.booleans()):
            places, _ = held.pop(data.draw(st.integers(0, len(held) - 1)))
            tree.remove(places)
        assert told_by(tree) == counted([text for _, text in held], depth)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), max_size=20), st.integers(1, 6))
def test_suffixes_are_found_in_the_own_text_and_in_others(texts: list[list[int]], text: list[int], depth: int) -> None:
    own, others = SuffixTree(depth), SuffixTree(depth)
    for other in texts:
        others.add(other)
    matches: list[Place] = [others.root]
    for end, token in enumerate(text, start=1):
        own.append(token)
        matches = others.follow(matches, token)
        before, elsewhere = counted([text[:end]], depth), counted(texts, depth)
        for length in range(1, end + 1):
            piece = tuple(text[end - length : end])
            assert (length < len(own.suffixes)) == (before.get(piece, 0) > 1)
            assert (length < len(matches)) == (piece in elsewhere)
            if length < len(own.suffixes):
                place = own.suffixes[length]
                assert isinstance(place, Node) and place.count == before[piece]


def test_speculation_follows_what_is_frequent_and_stops_where_it_is_not() -> None:
    # After 1 came 2 twice and 3 once: 2/3. After "1 2" came 5 and 6: 1/2, so 1/3 in all.
    text = [1, 2, 5, 1, 3, 7, 1, 2, 6, 9, 1]
    assert drafted_after(suffix(2, threshold=0.4), text) == [2]
    assert drafted_after(suffix(2, threshold=0.3), text) == [2, 6]
    assert drafted_after(suffix(2, threshold=0.7), text) == []
    # At most two tokens for each that matched.
    assert drafted_after(suffix(8), [8, 1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2]
    assert drafted_after(suffix(8), [7, 8, 1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 3, 4]
    assert drafted_after(suffix(8, depth=3), [7, 8, 1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2]


def test_acceptance_of_suffixes_on_a_text_that_goes_round() -> None:
    # 0 matched: two tokens. Then 0 1 2 3, behind which six tokens stand so far; then as many as may be drafted.
    out = run(Cycling(), suffix(8), [[0]], 25)
    assert accepted(out) == [0, 0, 0, 0, 0, 2, 6, 8]


# Lookups in earlier answers.


def test_answers_to_other_prompts_are_drawn_on() -> None:
    drafter = suffix()
    first, second = [1, 2, 3, 1], [9, 3, 1]
    # The target answers both prompts alike, because it depends only on the last token.
    for prompt in (first, second):
        out = run(Cycling(), drafter, [prompt], 12)
    assert out.rounds[0].drafted[0] > 0
    alone = run(Cycling(), suffix(earlier=False), [second], 12)
    assert sum(accepted(out)) > sum(accepted(alone))
    assert out.tokens == alone.tokens


@pytest.mark.parametrize("again", [[1, 2, 3, 1], [1, 2, 3, 1, 8, 8], [1, 2, 3]])
def test_a_prompts_own_earlier_answers_are_not(again: list[int]) -> None:
    """Nor those to a prompt that begins like it: the next turn of a chat, or thinking switched on."""
    drafter, fresh = suffix(), suffix()
    run(table(), drafter, [[1, 2, 3, 1]])
    run(table(), drafter, [[1, 2, 3, 1]])
    assert drafts_of(drafter, again) == drafts_of(fresh, again)
    # With another prompt in between it is in the tree, and has to come out again.
    for other in ([7, 7, 7], [8, 7]):
        run(table(), drafter, [other])
        run(table(), fresh, [other])
    assert any(drafter.earlier._places) and (1, 2, 3, 1) in drafter.earlier._places  # type: ignore[union-attr]
    fresh.earlier.keep(again, [])  # type: ignore[union-attr]
    drafter.earlier.keep(again, [])  # type: ignore[union-attr]
    assert drafts_of(drafter, again) == drafts_of(fresh, again)


def drafts_of(drafter: Any, prompt: list[int]) -> list[Any]:
    return [(step.drafted, step.accepted) for step in run(table(), drafter, [prompt]).rounds]


def test_a_tree_that_held_a_prompts_answers_holds_nothing_of_them_while_it_is_decoded() -> None:
    drafter = suffix()
    for prompt in ([1, 2, 3], [7, 7], [9]):
        run(table(), drafter, [prompt])
    answer = table().answer([7, 7], 24)
    drafter.begin(2, 64)
    tell(drafter, [[1, 2, 3, 0], [9, 0]])
    assert drafter.earlier is not None
    assert told_by(drafter.earlier.tree) == counted([answer], 12)
    assert set(drafter.earlier.answers) == {(1, 2, 3), (7, 7), (9,)}


def test_of_a_prompt_the_last_answer_is_kept_and_once() -> None:
    drafter = suffix()
    for _ in range(3):
        run(table(), drafter, [[1, 2, 3]])
    run(table(), drafter, [[9]])
    assert drafter.earlier is not None
    assert told_by(drafter.earlier.tree) == counted([table().answer([1, 2, 3], 24)], 12)


# Lookahead.


def test_a_window_is_a_tree_in_which_each_guess_sees_the_first_level_and_its_own_column() -> None:
    window = Window([1], 3, 4, NgramPool(2))
    window.levels = [[11, 12], [20, 21, 22], [30, 31, 32]]
    trie = Trie()
    window.hang_into(trie)
    paths = [path_to(trie, node) for node in window.ends]
    assert paths == [[20, 30], [11, 21, 31], [11, 12, 22, 32]]
    # Guesses that the pool has too are the same nodes.
    shared = Trie()
    shared.add([20, 30, 40])
    window.hang_into(shared)
    assert len(shared.tokens) == len(trie.tokens) + 1 and path_to(shared, window.ends[0]) == [20, 30]


def path_to(trie: Trie, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(trie, trie.parents[node]), trie.tokens[node]]


def test_a_window_moves_by_one_place_and_its_columns_are_n_grams() -> None:
    pool = NgramPool(2)
    window = Window([1], 3, 4, pool)
    window.levels = [[11, 12], [20, 21, 22], [30, 31, 32]]
    trie = Trie()
    window.hang_into(trie)
    choices = [0] * (len(trie.tokens) + 1)
    for node, guess in zip(window.ends, (40, 41, 42), strict=True):
        choices[node + 1] = guess
    window.advance(10, choices)
    assert window.levels == [[21, 22], [30, 31, 32], [40, 41, 42]]
    assert pool.starting_with(10) == [(20, 30, 40)]
    assert pool.starting_with(11) == [(21, 31, 41)] and pool.starting_with(12) == [(22, 32, 42)]


def test_a_pool_keeps_the_latest() -> None:
    pool = NgramPool(2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add(7, rest)
    assert pool.starting_with(7) == [(1,), (3,)] and pool.starting_with(8) == []


@each(("width", "size", "num_guesses"), [(4, 4, 3), (5, 2, 4), (1, 6, 2), (2, 7, 1)])
def test_a_window_fills_up_level_by_level_and_no_tree_is_larger_than_said(
    width: int, size: int, num_guesses: int
) -> None:
    drafter = LookaheadDrafter(width, size, num_guesses, CPU)
    widths: list[int] = []
    inner = drafter.propose

    def propose() -> Any:
        draft = inner()
        window = drafter.windows[0]
        widths.append(draft.width if draft else 0)
        shapes.append([len(level) for level in window.levels])
        return draft

    shapes: list[list[int]] = []
    drafter.propose = propose  # type: ignore[method-assign]
    run(Cycling(), drafter, [[3, 9, 4]], 30)
    assert max(widths) <= drafter.num_drafts == max_nodes(width, size, num_guesses)
    for rounds, shape in enumerate(shapes):
        num_levels = min(rounds + 1, size - 1)
        columns = width + size - 1 - num_levels
        assert shape == [columns - 1, *[columns] * (num_levels - 1)]


def test_a_target_that_goes_round_is_guessed_ahead() -> None:
    out = run(Cycling(), LookaheadDrafter(4, 4, 3, CPU), [[0]], 40)
    assert out.tokens == [[(i + 1) % 6 for i in range(40)]]
    # Once each of the six tokens has begun an N-gram of the pool, N - 1 of them are kept in each round.
    assert accepted(out)[7:-1] == [3] * (len(out.rounds) - 8) and len(out.rounds) > 12


# REST.


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 3))
def test_a_datastore_says_where_a_piece_occurs_and_which_suffix_is_the_longest(
    texts: list[list[int]], text: list[int], least: int, more: int
) -> None:
    store = datastore.of_texts(texts)
    tokens = [token for given in texts if given for token in (*given, -1)]
    assert store.tokens.tolist() == tokens

    def ends(piece: list[int]) -> list[int]:
        return [at + len(piece) for at in range(len(tokens) - len(piece) + 1) if tokens[at : at + len(piece)] == piece]

    assert sorted(store.ends_of(text).tolist()) == ends(text)
    sizes = range(min(least + more, len(text)), least - 1, -1)
    expected = next((ends(text[-size:]) for size in sizes if ends(text[-size:])), [])
    assert sorted(store.longest(text, least + more, least).tolist()) == expected


@given(st.lists(st.integers(-1, 3), max_size=150))
def test_a_suffix_array_is_in_order(tokens: list[int]) -> None:
    order = datastore.suffix_order(np.array(tokens, dtype=np.int32)).tolist()
    assert sorted(order) == list(range(len(tokens)))
    assert order == sorted(order, key=lambda at: (tokens[at : at + datastore.SORTED_TO], at))


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 2), st.integers(1, 9), st.integers(1, 4))
def test_a_tree_holds_the_most_frequent_continuations(
    texts: list[list[int]], token: int, num_nodes: int, depth: int
) -> None:
    store = datastore.of_texts(texts)
    trie = most_frequent(store, store.ends_of([token]), num_nodes, depth)
    pieces = {piece[1:]: times for piece, times in counted(texts, depth + 1).items() if piece[0] == token and piece[1:]}
    drafted = [tuple(path_to(trie, node)) for node in range(len(trie.tokens))]
    assert len(set(drafted)) == len(drafted) == min(num_nodes, len(pieces))
    assert sorted((pieces[path] for path in drafted), reverse=True) == sorted(pieces.values(), reverse=True)[:num_nodes]


def test_a_tree_is_drafted_from_the_texts_and_accepted_along_its_path() -> None:
    # After "5 0" came 1 twice and 9 once; after that 2, and 7.
    drafter = rest([[5, 0, 1, 2], [5, 0, 9], [5, 0, 1, 7]], nodes=4, depth=3)
    drafter.begin(1, 64)
    tell(drafter, [[5, 0]])
    draft = drafter.propose()
    assert draft is not None and draft.parents is not None
    assert draft.tokens.tolist() == [[1, 9, 2, 7]] and draft.parents.tolist() == [[-1, -1, 0, 0]]
    out = run(Cycling(), drafter, [[5]], 6)
    # 0 is the first token; 1 2 of the tree are right; then 3, and nothing like it is known.
    assert out.tokens == [[0, 1, 2, 3, 4, 5]] and accepted(out) == [2, 0, 0]


# Drafts of a known quality.


def foreseeing(drafter: Any, prompts: Sequence[list[int]], sampling: Sampling | None = None, limit: int = 24) -> Any:
    sampling = sampling or Sampling()
    drafter.foresee(prompts, Limits(limit, frozenset({STOP})), sampling)
    return run(drafter.target, drafter, prompts, limit, frozenset({STOP}), sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_is_always_right_and_drafts_nothing_past_the_end(temperature: float) -> None:
    sampling = Sampling(temperature, seed=5)
    out = foreseeing(OracleDrafter(5, table()), PROMPTS, sampling)  # type: ignore[arg-type]
    assert out.tokens == run(table(), NoDrafter(), PROMPTS, 24, frozenset({STOP}), sampling).tokens
    for row, tokens in enumerate(out.tokens):
        steps = out.own(row)
        assert [step.accepted[row] for step in steps] == [step.drafted[row] for step in steps]
        assert len(steps) == -(-(len(tokens) - 1) // 6)


def test_random_drafts_belong_to_the_prompt_and_the_seed() -> None:
    alone = drafted_with(RandomDrafter(4, 1, table()), [PROMPTS[2]])  # type: ignore[arg-type]
    beside = drafted_with(RandomDrafter(4, 1, table()), [PROMPTS[1], PROMPTS[2]])  # type: ignore[arg-type]
    other = drafted_with(RandomDrafter(4, 2, table()), [PROMPTS[2]])  # type: ignore[arg-type]
    assert alone[0] == beside[1] != beside[0] and alone != other
    assert all(0 <= token < VOCAB for row in beside for token in row)


def drafted_with(drafter: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    drafter.begin(len(prompts), 64)
    tell(drafter, [[*prompt, 0] for prompt in prompts])
    return chains_of(drafter.propose(), len(prompts))


def test_synthetic_drafts_are_right_at_the_rates_asked_for() -> None:
    rates = (0.9, 0.5, 0.0, 1.0)
    target = table(context_length=4096)
    drafter = SyntheticDrafter(rates, 7, target)  # type: ignore[arg-type]
    prompts = PROMPTS[:3]
    drafter.foresee(prompts, Limits(1200), Sampling())
    out = run(target, drafter, prompts, 1200)
    assert out.tokens == plain(table(4096), prompts, 1200)
    counts = [count for row in range(3) for count in accepted(out, row)]
    assert len(counts) > 1500
    assert sum(count >= 1 for count in counts) / len(counts) == pytest.approx(0.9, abs=0.03)
    assert sum(count >= 2 for count in counts) / sum(count >= 1 for count in counts) == pytest.approx(0.5, abs=0.04)
    assert max(counts) == 2
    again = SyntheticDrafter(rates, 7, target)  # type: ignore[arg-type]
    again.foresee(prompts[1:2], Limits(1200), Sampling())
    assert accepted(run(target, again, prompts[1:2], 1200)) == accepted(out, 1)


# From lists to drafts.


def test_a_tree_of_one_branch_is_sent_as_a_chain() -> None:
    first, second, empty = Trie(), Trie(), Trie()
    first.add([1, 2, 3])
    second.add([4])
    draft = trees([first, empty, second], CPU)
    assert chains_of(draft, 3) == [[1, 2, 3], [], [4]]
    assert trees([empty, empty], CPU) is None and chains([[], []], CPU) is None
    second.add([5, 6])
    second.add([4, 7])
    draft = trees([first, empty, second], CPU)
    assert draft is not None and draft.parents is not None
    assert draft.tokens.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 5, 6, 7]]
    assert draft.parents.tolist() == [[-1, 0, 1, -1], [-1, -1, -1, -1], [-1, -1, 1, 0]]
    assert draft.lengths == [3, 0, 4]
