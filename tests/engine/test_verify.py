"""The verify rule alone: what of a draft stays, what comes next, and that sampling follows the target."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dflash_bench.engine.sampling import inverse_cdf, likeliest
from dflash_bench.engine.verify import (
    Outcome,
    Verdict,
    greedy_outcome,
    verify_chain,
    verify_children,
    verify_sampled,
    verify_tree,
)
from helpers.toy import follows

NUM_DRAWS = 20_000
P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0])
AFTER = torch.tensor([0.05, 0.5, 0.05, 0.1, 0.2, 0.1])
"""Fixed target distributions: after the anchor, and after any first token."""


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_a_chain_is_kept_up_to_its_first_wrong_token() -> None:
    tokens = ids([5, 6, 7], [5, 0, 7], [0, 6, 7])
    choices = ids([5, 6, 7, 8]).expand(3, -1)
    verdict = verify_chain(tokens, choices)
    assert verdict.num_accepted.tolist() == [3, 1, 0]
    assert verdict.next_token.tolist() == [8, 6, 5]
    assert verdict.path is None


def test_a_right_token_behind_a_wrong_one_does_not_count() -> None:
    verdict = verify_chain(ids([0, 6, 7, 8]), ids([5, 6, 7, 8, 9]))
    assert verdict.num_accepted.item() == 0
    assert verdict.next_token.item() == 5


def test_an_empty_chain_gives_the_targets_own_choice() -> None:
    verdict = verify_chain(torch.empty(2, 0, dtype=torch.long), ids([3], [4]))
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [3, 4]


def test_a_tree_that_is_a_chain_is_verified_as_one() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 3, (64, 5), generator=generator)
    choices = torch.randint(0, 3, (64, 6), generator=generator)
    chain = verify_chain(tokens, choices)
    tree = verify_tree(tokens, torch.arange(-1, 4).expand(64, -1), choices)
    assert set(chain.num_accepted.tolist()) >= {0, 1, 2, 3}
    assert tree.num_accepted.tolist() == chain.num_accepted.tolist()
    assert tree.next_token.tolist() == chain.next_token.tolist()
    for b, count in enumerate(chain.num_accepted.tolist()):
        assert tree.path[b, : count + 1].tolist() == list(range(count + 1))


def test_a_tree_is_walked_along_the_targets_choices() -> None:
    #      anchor -> a(1) -> c(3) -> e(5)
    #             -> b(2) -> d(4)
    parents = ids([-1, -1, 0, 1, 2])
    tokens = ids([10, 20, 30, 40, 50])
    choices = ids([20, 99, 40, 98, 77, 97])
    verdict = verify_tree(tokens, parents, choices)
    assert verdict.num_accepted.item() == 2
    assert verdict.path[0, :3].tolist() == [0, 2, 4]
    assert verdict.next_token.item() == 77


def test_each_row_walks_its_own_tree() -> None:
    parents = ids([-1, -1, 0], [-1, 0, 1])
    tokens = ids([1, 2, 3], [1, 2, 3])
    verdict = verify_tree(tokens, parents, ids([2, 0, 9, 0], [1, 2, 3, 4]))
    assert verdict.num_accepted.tolist() == [1, 3]
    assert verdict.path[0, :2].tolist() == [0, 2]
    assert verdict.next_token.tolist() == [9, 4]


def test_of_two_equal_children_the_first_is_taken() -> None:
    verdict = verify_tree(ids([7, 7, 8]), ids([-1, -1, 1]), ids([7, 8, 5, 6]))
    assert verdict.num_accepted.item() == 1
    assert verdict.path[0, :2].tolist() == [0, 1]
    assert verdict.next_token.item() == 8


def sample(q: Tensor, num_drafts: int = 2, seed: int = 0) -> tuple[Verdict, Tensor]:
    """Verdicts over many drafts drawn from q, the same at each place, against P and then AFTER."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(q, NUM_DRAWS * num_drafts, replacement=True, generator=generator)
    tokens = tokens.view(NUM_DRAWS, num_drafts)
    p = torch.stack([P, *[AFTER] * num_drafts]).expand(NUM_DRAWS, -1, -1)
    accept = torch.rand(NUM_DRAWS, num_drafts, generator=generator)
    draw = torch.rand(NUM_DRAWS, num_drafts + 1, generator=generator)
    return verify_sampled(tokens, p, q.expand(NUM_DRAWS, num_drafts, -1), accept, draw), tokens


def emitted(verdict: Verdict, tokens: Tensor) -> Tensor:
    """[draws, N + 1], -1 where nothing is emitted."""
    out = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
    out = out.scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    return out.masked_fill(torch.arange(out.shape[1]) > verdict.num_accepted[:, None], -1)


DRAFTS = {
    "right": P,
    "uniform": torch.full((6,), 1 / 6),
    "skewed": torch.tensor([0.02, 0.03, 0.05, 0.1, 0.3, 0.5]),
    "narrow": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
    "disjoint": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
}


def test_the_chi_square_test_can_fail() -> None:
    drawn = torch.multinomial(DRAFTS["uniform"], NUM_DRAWS, replacement=True)
    assert not follows(drawn, P)
    assert not follows(torch.tensor([0, 5]), P)


def test_the_first_token_follows_the_target_whatever_the_draft() -> None:
    for name, q in DRAFTS.items():
        verdict, tokens = sample(q)
        assert follows(emitted(verdict, tokens)[:, 0], P), name


def test_the_second_token_follows_the_target_where_the_first_was_kept() -> None:
    for name in ("right", "uniform", "skewed", "narrow"):
        verdict, tokens = sample(DRAFTS[name])
        second = emitted(verdict, tokens)[:, 1]
        assert (second >= 0).sum() > 1000, name
        assert follows(second[second >= 0], AFTER), name


def test_the_token_after_a_draft_that_is_kept_whole_follows_the_target() -> None:
    verdict, tokens = sample(DRAFTS["uniform"], num_drafts=1)
    bonus = emitted(verdict, tokens)[:, 1]
    assert follows(bonus[bonus >= 0], AFTER)


def test_a_draft_drawn_from_the_target_is_always_kept() -> None:
    verdict, _ = sample(P, num_drafts=1)
    assert verdict.num_accepted.min().item() == 1


def test_a_draft_the_target_never_says_is_never_kept() -> None:
    verdict, _ = sample(DRAFTS["disjoint"])
    assert verdict.num_accepted.max().item() == 0


def test_the_share_kept_is_the_overlap_of_the_two_distributions() -> None:
    for name, q in DRAFTS.items():
        verdict, _ = sample(q, num_drafts=1)
        overlap = torch.minimum(P, q).sum().item()
        assert abs(verdict.num_accepted.double().mean().item() - overlap) < 0.015, name


def test_a_refused_token_is_replaced_from_what_the_draft_left_over() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.2, 0.8, 0.0]]])
    for draw in (0.0, 0.5, 0.999):
        verdict = verify_sampled(ids([1]), p, q, torch.tensor([[0.99]]), torch.tensor([[draw, 0.0]]))
        assert verdict.num_accepted.item() == 0
        assert verdict.next_token.item() == 0


def test_each_place_draws_with_its_own_number() -> None:
    p = torch.tensor([[[0.2, 0.4, 0.4]] * 2]).expand(2, -1, -1)
    q = torch.tensor([[[1.0, 0.0, 0.0]]]).expand(2, -1, -1)
    verdict = verify_sampled(ids([0], [0]), p, q, torch.tensor([[0.1], [0.9]]), torch.tensor([[0.9, 0.1]] * 2))
    assert verdict.num_accepted.tolist() == [1, 0]
    assert verdict.next_token.tolist() == [0, 2]


# Child by child.

NODES, PARENTS = ids([3, 1, 0, 2, 0]), ids([-1, -1, 1, 1, 1])
"""
anchor -> 3
       -> 1 -> 0
            -> 2
            -> 0, which its elder twin leaves nothing
"""
FIRST, SECOND = (torch.tensor(p, dtype=torch.double) for p in ([0.4, 0.3, 0.2, 0.1], [0.5, 0.25, 0.25, 0.0]))
TREE_P = torch.stack([FIRST, FIRST, SECOND, SECOND, SECOND, SECOND])[None]
"""After the anchor, and after each node."""


def grid(*parts: int) -> Tensor:
    """Every combination of the midpoints of so many equal parts of [0, 1) each."""
    return torch.cartesian_prod(*((torch.arange(n, dtype=torch.double) + 0.5) / n for n in parts))


def shares(verdict: Verdict) -> dict[tuple[int, ...], Fraction]:
    """How often, exactly, which tokens are emitted."""
    said = emitted(Verdict(verdict.path, verdict.num_accepted, verdict.next_token), along(verdict))
    counts = Counter(tuple(token for token in row if token >= 0) for row in said.tolist())
    return {tokens: Fraction(count, len(said)) for tokens, count in counts.items()}


def along(verdict: Verdict) -> Tensor:
    """The nodes' tokens in the order of the path [B, N]."""
    block = torch.cat([ids([99]), NODES], dim=1).expand_as(verdict.path)
    return block.gather(1, verdict.path)[:, 1:]


def shares_by_hand() -> dict[tuple[int, ...], Fraction]:
    """The target says x with probability p(x); where a child says so too, the way goes on below it."""
    first, second = ([Fraction(round(100 * x), 100) for x in p.tolist()] for p in (FIRST, SECOND))
    said = {(0,): first[0], (2,): first[2], (1, 1): first[1] * second[1]}
    said |= {(3, x): first[3] * first[x] for x in range(4)}
    said |= {(1, child, x): first[1] * second[child] * second[x] for child in (0, 2) for x in range(3)}
    return said


def test_children_tried_one_by_one_give_exactly_the_targets_distribution() -> None:
    """Over a grid of numbers so fine that every share comes out to the last digit."""
    numbers = grid(10, 4, 60)
    num_rows = len(numbers)
    verdict = verify_children(
        NODES.expand(num_rows, -1),
        PARENTS.expand(num_rows, -1),
        TREE_P.expand(num_rows, -1, -1),
        None,
        # The anchor and node 1 have children, and need a number.
        numbers[:, [0, 0, 1, 0, 0, 0]],
        numbers[:, 2:].expand(-1, 6),
    )
    assert shares(verdict) == shares_by_hand()
    assert sum(shares_by_hand().values()) == 1


def test_the_match_rule_follows_each_child_as_often_as_trying_them_one_by_one() -> None:
    numbers = grid(10, 20, 4)[:, [0, 1, 1, 2, 2, 2]]
    choices = inverse_cdf(TREE_P.expand(len(numbers), -1, -1), numbers)
    verdict = verify_tree(NODES.expand(len(numbers), -1), PARENTS.expand(len(numbers), -1), choices)
    assert shares(verdict) == shares_by_hand()


def test_a_chain_is_tried_as_sampled_chains_are() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.softmax(2 * torch.randn(500, 3, 6, generator=generator), dim=-1)
    p = torch.softmax(2 * torch.randn(500, 4, 6, generator=generator), dim=-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(500, 3)
    accept, draw = (torch.rand(500, 4, generator=generator) for _ in range(2))
    chain = verify_sampled(tokens, p, q, accept[:, :-1], draw)
    tree = verify_children(tokens, torch.arange(-1, 2).expand(500, -1), p, q, accept, draw)
    assert set(chain.num_accepted.tolist()) == {0, 1, 2, 3}
    assert tree.num_accepted.tolist() == chain.num_accepted.tolist()
    assert tree.next_token.tolist() == chain.next_token.tolist()
    assert emitted(tree, tokens).tolist() == emitted(chain, tokens).tolist()


def siblings(q: Tensor, replaced: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two children of the anchor drawn from q, and what each was drawn from [draws, 2, V]."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.multinomial(q, NUM_DRAWS, replacement=True, generator=generator)[:, None]
    rest = q.expand(NUM_DRAWS, -1)
    if not replaced:
        rest = rest.scatter(1, first, 0.0)
        rest = rest / rest.sum(dim=-1, keepdim=True)
    second = torch.multinomial(rest, 1, generator=generator)
    return torch.cat([first, second], dim=1), torch.stack([q.expand(NUM_DRAWS, -1), rest], dim=1)


def tried(tokens: Tensor, q: Tensor, seed: int = 1) -> tuple[Verdict, Tensor]:
    """Verdicts over pairs of siblings, and the first token each emits."""
    generator = torch.Generator().manual_seed(seed)
    accept, draw = (torch.rand(NUM_DRAWS, 3, generator=generator) for _ in range(2))
    p = torch.stack([P, AFTER, AFTER]).expand(NUM_DRAWS, -1, -1)
    verdict = verify_children(tokens, ids([-1, -1]).expand(NUM_DRAWS, -1), p, q, accept, draw)
    kept = tokens.gather(1, verdict.path[:, 1:2] - 1)[:, 0]
    return verdict, torch.where(verdict.num_accepted == 1, kept, verdict.next_token)


def test_drawn_siblings_leave_the_target_its_distribution() -> None:
    for name in ("right", "uniform", "skewed"):
        for replaced in (True, False):
            verdict, first = tried(*siblings(DRAFTS[name], replaced))
            assert follows(first, P), (name, replaced)
            # The number that decided on the children does not decide on what comes after them.
            bonus = verdict.next_token[verdict.num_accepted == 1]
            assert follows(bonus, AFTER), (name, replaced)


def test_a_sibling_that_hides_what_it_was_drawn_from_is_found_out() -> None:
    tokens, q = siblings(DRAFTS["skewed"], replaced=False)
    verdict, first = tried(tokens, DRAFTS["skewed"].expand_as(q))
    assert verdict.num_accepted.max() == 1
    assert not follows(first, P)


def test_a_second_child_is_kept_where_the_first_was_refused() -> None:
    tokens, q = siblings(DRAFTS["uniform"], replaced=False)
    verdict, _ = tried(tokens, q)
    by_child = torch.bincount(verdict.path[verdict.num_accepted == 1, 1], minlength=3)
    assert by_child[1] > 1000 and by_child[2] > 1000


@pytest.mark.parametrize("parents", [None, [[-1, 0, 0, 2], [-1, -1, 1, 1]]])
def test_a_packed_outcome_is_what_was_packed(parents: list[list[int]] | None) -> None:
    numbers = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 5, 7, generator=numbers)
    block = torch.cat([torch.zeros(2, 1, dtype=torch.long), logits.argmax(dim=-1)[:, :-1]], dim=1)
    block[1, 2] = 0
    logits[0, 2, 3] = torch.nan
    tree = None if parents is None else torch.tensor(parents)
    choices = likeliest(logits)
    verdict = verify_chain(block[:, 1:], choices) if tree is None else verify_tree(block[:, 1:], tree, choices)
    expected = Outcome.of(verdict, block, logits)
    opened = Outcome.opened(greedy_outcome(logits, block, tree), 5)
    assert opened.tokens.equal(expected.tokens) and opened.broken.bool().equal(expected.broken)
    assert expected.broken.any()
    for field in ("num_accepted", "next_token", "choices", "last"):
        assert getattr(opened.verdict, field).equal(getattr(verdict, field))
    assert (opened.verdict.path is None) == (tree is None)
