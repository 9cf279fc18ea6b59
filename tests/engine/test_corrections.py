"""Heads that correct a block: one that does nothing gives the block's own drafts, and any is exact, drawn or not."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafters import ddtree, dflash, dflash_ngram
from dflash_bench.engine.drafters.dflash import AutoCutDFlashDrafter, AutoDFlashDrafter, CutDFlashDrafter, DFlashDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from helpers.drafts.tiny import PROMPTS, without_head
from helpers.each import each
from helpers.heads import HEADS, draft_of, drafter_of
from helpers.toy import native, plain, run, tiny

CONFIDENT = ("vanilla", "gated", "rnn")


def watched(drafter: Any) -> list[Draft]:
    """Proposals of the drafter from now on."""
    drafts: list[Draft] = []
    propose = drafter.propose

    def kept() -> Draft:
        drafts.append(propose())
        return drafts[-1]

    drafter.propose = kept
    return drafts


@each("kind", HEADS)
def test_a_head_of_zeros_drafts_what_the_block_drafts(kind: str) -> None:
    target = native(tiny("llama"))
    head = drafter_of(target, kind, scale=0)
    body = DFlashDrafter(without_head(head.draft), target.embedding, target.head)
    out = [run(target, drafter, PROMPTS, 20) for drafter in (head, body)]
    assert out[0].tokens == out[1].tokens
    assert [step.drafted_ids for step in out[0].rounds] == [step.drafted_ids for step in out[1].rounds]
    assert any(any(row) for step in out[0].rounds for row in step.drafted_ids)


@each("kind", HEADS)
def test_a_head_changes_what_is_drafted_and_never_what_is_said(kind: str) -> None:
    target = native(tiny("llama"))
    drafter = drafter_of(target, kind)
    body = DFlashDrafter(without_head(drafter.draft), target.embedding, target.head)
    out, other = (run(target, one, PROMPTS, 12) for one in (drafter, body))
    assert out.tokens == plain(target, PROMPTS, 12) == other.tokens
    assert out.rounds[0].drafted_ids != other.rounds[0].drafted_ids


@pytest.mark.parametrize("kind", HEADS)
def test_a_row_is_drafted_as_it_would_be_alone(kind: str) -> None:
    """Also where it takes the slot of an answer that has ended, and beside rows that read their prompts."""
    target, prompts = native(tiny("qwen3")), [*PROMPTS, [7, 8, 9], [11] * 20]
    stop_ids = frozenset({plain(target, prompts[:1], 12)[0][4]})
    limits = Limits(12, stop_ids)
    drafted: dict[int, list[list[int]]] = defaultdict(list)
    for step in decode(target, drafter_of(target, kind), prompts, limits, Sampling(), HostClock(), num_rows=2):
        for row, request in enumerate(step.requests):
            if step.emitted[row] is not None and step.drafted[row]:
                drafted[request].append(step.drafted_ids[row])
    for request, prompt in enumerate(prompts):
        alone = run(target, drafter_of(target, kind), [prompt], 12, stop_ids=stop_ids)
        assert drafted[request] == [step.drafted_ids[0] for step in alone.rounds]


@each(("kind", "num_drafts"), [(kind, 3 - 2 * (number % 2)) for number, kind in enumerate(HEADS)])
def test_a_smaller_block_has_fewer_slots_of_the_same_head(kind: str, num_drafts: int) -> None:
    target, draft = native(tiny("llama")), draft_of(kind)
    drafter = DFlashDrafter(draft, target.embedding, target.head, draft.config.block_for(num_drafts))
    out = run(target, drafter, PROMPTS, 12)
    assert out.tokens == plain(target, PROMPTS, 12) and out.rounds[0].drafted == [num_drafts] * 3


# Drawn drafts.


def by_prefix(drafts: Draft, rows: Sequence[int], place: int) -> dict[tuple[int, ...], list[int]]:
    """Rows by the tokens that were drafted before this place."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row in rows:
        groups[tuple(drafts.tokens[row, :place].tolist())].append(row)
    return groups


def drawn_from(tokens: Tensor, q: Tensor) -> bool:
    """Chi-square at one in a thousand, with all tokens together that are expected fewer than five times."""
    expected, counts = q.double() * len(tokens), torch.bincount(tokens, minlength=len(q)).double()
    often = expected >= 5
    both = [torch.cat([each[often], each[~often].sum()[None]]).numpy() for each in (counts, expected)]
    return bool(chisquare(*both, sum_check=False).pvalue > 1e-3)


@each("kind", HEADS)
def test_tokens_are_drawn_from_the_probabilities_that_a_draft_brings_given_those_before(kind: str) -> None:
    target, num_rows = native(tiny("qwen3")), 600
    drafter = drafter_of(target, kind, scale=3, rule="rejection")
    drafts = watched(drafter)
    out = run(target, drafter, [PROMPTS[1]] * num_rows, 2, sampling=Sampling(0.05), seeds=range(num_rows))
    tokens, probs = drafts[0].tokens, drafts[0].probs
    assert probs is not None and probs.shape == (*tokens.shape, 97)
    assert torch.allclose(probs.sum(dim=-1), torch.ones(tokens.shape), atol=1e-5)
    assert probs.gather(2, tokens[..., None]).min() > 0
    anchors = [row[0] for row in out.tokens]
    common = max(set(anchors), key=anchors.count)
    rows = [row for row, anchor in enumerate(anchors) if anchor == common]
    for place in range(tokens.shape[1]):
        largest = max(by_prefix(drafts[0], rows, place).values(), key=len)
        if len(largest) < 50:
            break
        # Rows with the same text have the same q, and draw from it.
        torch.testing.assert_close(probs[largest, place], probs[largest[:1], place].expand(len(largest), -1))
        assert drawn_from(tokens[largest, place], probs[largest[0], place])
    assert place > 1


@pytest.mark.parametrize(("kind", "rule"), [("selector", "match"), ("selector", "rejection"), ("rnn", "rejection")])
def test_answers_follow_the_targets_distribution(kind: str, rule: str) -> None:
    """The first two tokens of a round, from the draft or a replacement.

    Verification sees no more of a head than the tokens and probabilities of the test above.
    """
    target, sampling, num_rows = native(tiny("qwen3")), Sampling(0.08), 1000
    prompt = PROMPTS[1]
    drafter = drafter_of(target, kind, scale=2, rule=rule)
    out = run(target, drafter, [prompt] * num_rows, 3, sampling=sampling, seeds=range(num_rows))
    assert {count for step in out.rounds for count in step.accepted} >= {0, 1}
    firsts = [row[0] for row in out.tokens]
    common = max(set(firsts), key=firsts.count)
    assert firsts.count(common) > 100
    drawn = [row[1] for row in out.tokens if row[0] == common]
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*prompt, common]])).logits[0, -1]
    assert drawn_from(torch.tensor(drawn), torch.softmax(logits.float() / 0.08, dim=-1))


def test_under_match_the_tokens_are_the_heads_best_at_any_temperature() -> None:
    target = native(tiny("qwen3"))
    greedy, drawn = (drafter_of(target, "selector") for _ in range(2))
    drafts = [watched(each) for each in (greedy, drawn)]
    run(target, greedy, [PROMPTS[1]], 4)
    first = run(target, drawn, [PROMPTS[1]], 4, sampling=Sampling(1e-3), seeds=[1])
    assert first.rounds and drafts[1][0].probs is None
    assert torch.equal(drafts[0][0].tokens, drafts[1][0].tokens)


# Cutting by confidence.


@pytest.mark.parametrize("kind", CONFIDENT)
def test_a_draft_is_cut_before_its_first_token_below_the_threshold(kind: str) -> None:
    target = native(tiny("llama"))
    lengths: set[int] = set()
    for threshold in (0.2, 0.9):
        drafter = CutDFlashDrafter(draft_of(kind, 4), target.embedding, target.head, threshold=threshold)
        confidences = []
        draft_tokens = drafter.draft_tokens

        def kept(logits: Any, draft_tokens: Any = draft_tokens, confidences: list[Any] = confidences) -> Any:
            corrected, probs = draft_tokens(logits)
            confidences.append(corrected.confidence)
            return corrected, probs

        drafter.draft_tokens = kept  # type: ignore[method-assign]
        passes: list[int] = []
        forward = target.forward

        def counted(tokens: Any, *args: Any, passes: list[int] = passes, forward: Any = forward, **named: Any) -> Any:
            passes.append(tokens.shape[1])
            return forward(tokens, *args, **named)

        target.forward = counted  # type: ignore[method-assign]
        out = run(target, drafter, PROMPTS, 16)
        target.forward = forward  # type: ignore[method-assign]
        assert out.tokens == plain(target, PROMPTS, 16)
        for step, confidence, width in zip(out.rounds, confidences, passes[-len(out.rounds) :], strict=True):
            assert step.verified is not None and confidence.shape == (3, 8)
            for row, (emitted, verified) in enumerate(zip(step.emitted, step.verified, strict=True)):
                sure = list(itertools.takewhile(lambda one, least=threshold: one >= least, confidence[row].tolist()))
                assert verified == (0 if emitted is None else len(sure))
                assert step.drafted[row] == (0 if emitted is None else 8) == len(step.drafted_ids[row])
                assert step.accepted[row] <= verified
                lengths.add(verified)
            # Slots that nobody verifies are not computed.
            assert width == 1 + max(step.verified)
    assert 0 in lengths and len(lengths) > 3


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_cut_drafts_are_exact_above_temperature_0_too(rule: str) -> None:
    target, sampling, num_rows = native(tiny("qwen3")), Sampling(0.08), 1000
    drafter = CutDFlashDrafter(draft_of("gated", scale=2), target.embedding, target.head, rule=rule, threshold=0.7)
    out = run(target, drafter, [PROMPTS[1]] * num_rows, 3, sampling=sampling, seeds=range(num_rows))
    if rule == "match":
        few = run(target, drafter, [PROMPTS[1]] * 20, 3, sampling=sampling, seeds=range(20))
        assert few.tokens == [plain(target, [PROMPTS[1]], 3, sampling=sampling, seeds=[seed])[0] for seed in range(20)]
    firsts = [row[0] for row in out.tokens]
    common = max(set(firsts), key=firsts.count)
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*PROMPTS[1], common]])).logits[0, -1]
    drawn = torch.tensor([row[1] for row in out.tokens if row[0] == common])
    assert drawn_from(drawn, torch.softmax(logits.float() / 0.08, dim=-1))
    assert len({count for step in out.rounds for count in step.verified or ()}) > 2


@pytest.mark.parametrize("kind", CONFIDENT)
def test_auto_verifies_what_pays_which_may_be_nothing(kind: str) -> None:
    target = native(tiny("llama"))
    drafter = AutoCutDFlashDrafter(draft_of(kind), target.embedding, target.head)
    ticks = itertools.count()
    drafter.adaptive.now = lambda: float(next(ticks))  # every round takes as long, however wide it is
    out = run(target, drafter, PROMPTS, 40)
    assert out.tokens == plain(target, PROMPTS, 40)
    assert {count for step in out.rounds for count in step.drafted} <= {0, 8}
    assert 0 in drafter.adaptive.widths
    # Half the width is tried first; from then on nothing is gained by verifying less.
    assert all(step.verified == step.drafted for step in out.rounds[10:])


def test_auto_stops_verifying_where_the_target_reads_slowly_and_the_draft_is_unsure() -> None:
    target = native(tiny("llama"))
    draft = draft_of("vanilla")
    with torch.no_grad():
        draft.confidence_head.proj.bias.fill_(-20)
    drafter = AutoCutDFlashDrafter(draft, target.embedding, target.head)
    clock = [0.0]
    drafter.adaptive.now = lambda: clock[0]
    choose = drafter.adaptive.choose

    def slowly(scores: Any) -> int:
        width = choose(scores)
        clock[0] += 1.0 + width
        return width

    drafter.adaptive.choose = slowly  # type: ignore[method-assign]
    out = run(target, drafter, PROMPTS[1:2], 40)
    assert out.tokens == plain(target, PROMPTS[1:2], 40)
    # Rounds of 8 and 3 tokens are measured first, and then it goes down.
    assert [step.verified for step in out.rounds[24:34]] == [[0]] * 10


def test_a_head_drafts_beside_prompt_lookup() -> None:
    target = native(tiny("llama"))
    models = Models(None, None, {"dflash": draft_of("selector")}, {})
    drafter = dflash_ngram.build(models, target, methods.parse("dflash+ngram:match=2"))
    assert run(target, drafter, PROMPTS, 24).tokens == plain(target, PROMPTS, 24)


def test_the_whole_block_is_drafted_where_auto_shortens_it() -> None:
    target = native(tiny("llama"))
    for kind in ("selector", "xpress", "rnn"):
        drafter = AutoDFlashDrafter(draft_of(kind), target.embedding, target.head)
        assert run(target, drafter, PROMPTS, 24).tokens == plain(target, PROMPTS, 24)


# Parts that a kind lacks.


def build(kind: str, method: str) -> Any:
    target = native(tiny("llama"))
    chosen = methods.parse(method)
    models = Models(None, None, {"dflash": draft_of(kind)}, {})
    return (ddtree if chosen.name == "ddtree" else dflash).build(models, target, chosen)


@each(
    ("kind", "method", "message"),
    [
        ("selector", "dflash:cut=0.5", "this DFlash 2 draft has no confidence head to cut by; leave cut out"),
        ("xpress", "dflash:cut=auto", "this XPress draft has no confidence head"),
        ("vanilla", "dflash:steps=2", "the head of a DSpark draft corrects a single pass; leave steps out"),
        ("vanilla", "dflash:block=auto,cut=0.5", "block=auto and cut both say how much is verified"),
        ("vanilla", "dflash:rule=rejection,cut=auto", "cut=auto looks at all drawn tokens.*give a threshold"),
        ("xpress", "dflash:8", "the head of this XPress draft drafts at most 7 tokens"),
        ("lilicorr", "dflash:block=9", "the head of this LiLiCorr draft drafts at most 7 tokens"),
        ("domino", "ddtree", "would leave out the Domino draft's head.*publisher grows no tree; use dflash"),
    ],
)
def test_options_that_a_kind_does_not_have_are_refused(kind: str, method: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(kind, method)


def test_options_that_a_kind_has_build_their_drafters() -> None:
    assert type(build("vanilla", "dflash:cut=0.5")) is CutDFlashDrafter
    assert type(build("vanilla", "dflash:cut=auto")) is AutoCutDFlashDrafter
    assert type(build("vanilla", "dflash:cut=off")) is DFlashDrafter
    assert build("domino", "dflash:12").num_drafts == 12
    assert build("shifted domino", "dflash").num_drafts == 7
    assert build("vanilla", "dflash").num_drafts == 8
