"""Where the right token is among a draft's likeliest ones: counted by the book, for every kind, and held to a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.core.types import Generation
from dflash_bench.engine.backend import RequestTrace
from dflash_bench.engine.drafters.dflash import CutDFlashDrafter, DFlashDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.recording import CandidateListener, record_ranks
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.measurements.headroom import leads
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.results import parts, row_checks
from dflash_bench.results.row_arrays import RunFacts
from helpers.drafts import draft_model, medusa, mtp, p_eagle
from helpers.drafts.tiny import DFLASH, PROMPTS
from helpers.each import each
from helpers.heads import HEADS, draft_of, drafter_of
from helpers.rows import record
from helpers.toy import tiny

LENGTH, NUM = 16, 16
GREEDY = Sampling()
OF_CANDIDATES = ("selector", "lilicorr", "wide lilicorr")
"""Random heads whose four or five candidates do not hold the right token."""
CHECK = "its ranks are not those of its drafts and tokens"


def answered(target: Target, drafter: Any, prompt: Sequence[int], length: int = LENGTH) -> Generation:
    trace = RequestTrace(prompt)
    for step in decode(target, drafter, [prompt], Limits(length), GREEDY, HostClock()):
        trace.add(0, step)
    return trace.generation(HostClock(), "", frozenset(), None)


def ranked(
    target: Target, drafter: Any, prompt: Sequence[int], num: int = NUM
) -> tuple[Generation, tuple[int, ...] | None]:
    answer = answered(target, drafter, prompt)
    return answer, record_ranks(target, drafter, prompt, answer, GREEDY, num)


def broken(answer: Generation, ranks: tuple[int, ...] | None) -> list[str]:
    batch = parts.to_table([record("dflash", "p", answer, ranks=ranks)], {}).combine_chunks().to_batches()[0]
    return [*row_checks.faults(batch, RunFacts(blocks={}, ceiling=1e-3))]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


@pytest.fixture(scope="module")
def often_right(target: Target) -> DFlashDrafter:
    """It drafts with a body of random weights; half of its logits are made to know the answer."""
    drafter = DFlashDrafter(draft_without_head(), target.embedding, target.head)
    text = [*PROMPTS[1], *answered(target, drafter, PROMPTS[1], 80).token_ids]
    read = drafter.block_logits

    def helped() -> Tensor:
        logits, place = read(), drafter.starts[0] + 1
        for slot in range(logits.shape[1]):
            best = logits[0, slot].topk(40).values
            # The right token is the likeliest one, or the 3rd, 9th or 30th.
            rank = (0, 0, 2, 0, 8, 0, 0, 29)[(place + slot) % 8]
            logits[0, slot, text[place + slot]] = best[rank] + (1.0 if rank == 0 else 1e-4)
        return logits

    drafter.block_logits = helped  # type: ignore[method-assign]
    return drafter


def draft_without_head() -> DFlashDraft:
    bare = DFlashDraft(DFLASH)
    bare.load_state_dict(
        {name: value for name, value in draft_of("selector").state_dict().items() if name in bare.state_dict()}
    )
    return bare.eval()


def test_ranks_are_those_that_the_logits_of_the_measured_rounds_give(
    target: Target, often_right: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[Tensor] = []
    read = often_right.block_logits
    monkeypatch.setattr(often_right, "block_logits", lambda: logits.append(read()) or logits[-1])
    answer = answered(target, often_right, PROMPTS[1])
    text = answered(target, often_right, PROMPTS[1], 40).token_ids
    num_rounds, expected, place = len(answer.drafted or ()), [], 1
    for own, emitted in zip(logits[:num_rounds], answer.emitted or (), strict=True):
        for slot, values in enumerate(own[0]):
            rank = int((values > values[text[place + slot]]).sum()) + 1
            expected.append(rank if rank <= NUM else 0)
        place += emitted
    found = record_ranks(target, often_right, PROMPTS[1], answer, GREEDY, NUM)
    assert found == tuple(expected) and {0, 1, 3, 9} <= {*expected} and max(answer.accepted or ()) > 1


def test_the_law_holds_and_shifted_ranks_break_it(target: Target, often_right: DFlashDrafter) -> None:
    answer, ranks = ranked(target, often_right, PROMPTS[1])
    assert ranks is not None and not broken(answer, ranks)
    first_right = ranks.index(1)
    first_wrong = next(at for at, rank in enumerate(ranks) if rank != 1)
    spoiled = {
        "one slot on": (0, *ranks[:-1]),
        "one slot back": (*ranks[1:], 0),
        "all are right": (1,) * len(ranks),
        "none is": (2,) * len(ranks),
        "too few": ranks[:-1],
        "a right one is unknown": (*ranks[:first_right], -1, *ranks[first_right + 1 :]),
        "the first wrong one is unknown": (*ranks[:first_wrong], -1, *ranks[first_wrong + 1 :]),
        "not a rank": tuple(-2 if rank == 0 else rank for rank in ranks),
    }
    for what, other in spoiled.items():
        assert broken(answer, other) == [CHECK], what
    assert not broken(answer, None)


def test_choosing_from_more_accepts_as_much_or_more(target: Target, often_right: DFlashDrafter) -> None:
    answer, ranks = ranked(target, often_right, PROMPTS[1])
    places, drafted = torch.tensor(ranks).numpy(), torch.tensor(answer.drafted).numpy()
    one, four, sixteen = (leads(places, drafted, drafted, num) for num in (1, 4, 16))
    assert tuple(one) == answer.accepted
    assert (one <= four).all() and (four <= sixteen).all() and one.sum() < four.sum() < sixteen.sum() < drafted.sum()
    _, few = ranked(target, often_right, PROMPTS[1], num=4)
    assert few == tuple(rank if rank <= 4 else 0 for rank in ranks or ())


@each("kind", HEADS)
def test_every_head_is_ranked_by_what_it_chose_from(target: Target, kind: str) -> None:
    answer, ranks = ranked(target, drafter_of(target, kind), PROMPTS[1])
    assert ranks is not None and not broken(answer, ranks)
    assert any(rank > 1 for rank in ranks) or kind in OF_CANDIDATES
    # XPress chooses all tokens of a block at once; the others go from left to right.
    assert (-1 in ranks) == ("xpress" not in kind)


OTHERS: dict[str, tuple[Callable[[Target], Any], bool]] = {
    "p-eagle": (p_eagle.drafter, False),
    "medusa": (lambda target: medusa.drafter(target, top_k=1), False),
    "mtp": (mtp.drafter, True),
    "draft-model": (lambda target: draft_model.drafter(draft_model.nearly()), True),
}
"""How each is made, and whether it drafts token by token."""


@each("name", OTHERS)
def test_other_chains_of_logits_are_ranked(target: Target, name: str) -> None:
    make, is_by_token = OTHERS[name]
    answer, ranks = ranked(target, make(target), PROMPTS[1], num=97)
    assert ranks is not None and not broken(answer, ranks) and 0 not in ranks
    assert any(rank > 1 for rank in ranks) and (-1 in ranks) == is_by_token


def test_candidates_are_ranked_by_their_scores_and_named_by_the_targets_ids(target: Target) -> None:
    listener = CandidateListener(drafter_of(target, "selector").draft_sampler, 3)
    listener.choosing(torch.tensor([[[0.5, 0.9, 0.7, 0.9]]]), torch.tensor([[[11, 12, 13, 14]]]))
    listener.choosing(torch.tensor([[[0.1, float("nan")]]]), torch.tensor([[[11, 12]]]))
    first, second = (heard.tolist()[0] for heard in listener.heard)
    assert first == [12, 14, 13] and second == [11, 12, -1]


def test_what_a_cut_leaves_out_is_not_accepted_from_any_candidates(target: Target) -> None:
    answer, ranks = ranked(
        target, CutDFlashDrafter(draft_of("gated"), target.embedding, target.head, threshold=0.4), PROMPTS[1]
    )
    assert ranks is not None and answer.verified is not None and not broken(answer, ranks)
    places, drafted, verified = (torch.tensor(values).numpy() for values in (ranks, answer.drafted, answer.verified))
    assert (leads(places, drafted, verified, 1000) <= verified).all() and (verified < drafted).any()


def test_rounds_that_are_others_the_second_time_have_no_ranks(target: Target, often_right: DFlashDrafter) -> None:
    answer = answered(target, often_right, PROMPTS[1])
    ids, accepted = answer.drafted_ids or (), answer.accepted or ()
    for other in (
        replace(answer, drafted_ids=(*ids[:-1], ids[-1] + 1)),
        replace(answer, accepted=(accepted[0] + 1, *accepted[1:])),
        replace(answer, token_ids=(*answer.token_ids[:-1], answer.token_ids[-1] + 1)),
    ):
        assert record_ranks(target, often_right, PROMPTS[1], other, GREEDY, NUM) is None
    assert often_right.draft_sampler.listener is None
