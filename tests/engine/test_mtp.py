"""MTP: the published case token for token, each kind of head against a loop without cache, answers as plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.mtp import MTPDrafter
from dflash_bench.engine.forward.choice import has_numba
from dflash_bench.engine.forward.compiled_drafts import CompiledMTP
from dflash_bench.engine.forward.native_drafts import NativeMTP, PublishedMTP
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.selection import compile_like, target_of
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from helpers.drafts.mtp import Formula, drafter, heads
from helpers.drafts.tiny import PROMPTS
from helpers.each import each
from helpers.golden_drafts import CASES, assert_drafts_as_published
from helpers.tiny_architectures import made
from helpers.toy import Scripted, Watching, follows, native, plain, run, sometimes_wrong, tiny

TARGETS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tiny("qwen3", head_dim=8),
    "llama": lambda: tiny("llama"),
    "qwen3, experts": lambda: made("mixture of experts"),
    "qwen3.5": lambda: made("qwen3.5"),
    "qwen3.5, experts": lambda: made("qwen3.5, experts"),
    "qwen3-next": lambda: made("qwen3-next"),
}
OURS = {"qwen3", "llama", "qwen3, experts"}
"""Targets whose heads are computed by our own code."""
SHORT = [prompt[:25] for prompt in PROMPTS]


# Published heads.


@pytest.mark.parametrize("settings", [{}, {"engine": "transformers"}], ids=str)
def test_the_golden_case_is_drafted_token_for_token(settings: dict[str, Any]) -> None:
    assert_drafts_as_published("mtp-qwen3.5-hybrid", "mtp:3", **settings)


def test_three_tokens_are_drafted_where_nobody_says_how_many() -> None:
    with db.Engine(target=CASES / "mtp-qwen3.5-hybrid/target") as engine:
        drafted = [
            {len(step.drafted) for step in engine.generate([40, 129, 288], method=method, max_new_tokens=12).rounds}
            for method in ("mtp", "mtp:1", "mtp:6")
        ]
    assert drafted == [{3}, {1}, {6}]


# Each kind of layer, written out from its weights, read anew for every token.


class Proposing(Watching):
    """Keeps what is drafted behind which text, and hands on what a scripted drafter makes of the right text."""

    def __init__(self, inner: MTPDrafter, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(inner)
        self.scripted = Scripted(texts, inner.num_drafts, sometimes_wrong(0.5, 97))
        self.kept: list[tuple[list[list[int]], list[int], Tensor]] = []

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.scripted.observe(committed)
        self.texts, self.counts = [list(text) for text in committed.texts], committed.counts

    def propose(self) -> Draft:
        draft = super().propose()
        assert draft is not None
        self.kept.append((self.texts, self.counts, draft.tokens.clone()))
        return self.scripted.propose()


def compared(kind: str, rows: Sequence[int]) -> tuple[int, int]:
    """How many tokens are drafted as by the formula, up to a draft's first other one, and how many drafts have one."""
    model = TARGETS[kind]()
    target, prompts = Target(model), [SHORT[row] for row in rows]
    tested = drafter(target, 4)
    assert isinstance(tested.network, NativeMTP if kind in OURS else PublishedMTP)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain(target, prompts, 16), strict=True)]
    watched = Proposing(tested, texts)
    run(target, watched, prompts, 16)
    formula, num_same, num_different = Formula(tested.draft, model), 0, 0
    for written, counts, tokens in watched.kept:
        for row, (text, count) in enumerate(zip(written, counts, strict=True)):
            expected, logits = formula.drafts(text, 4) if count else ([], torch.zeros(0))
            for drafted, best, scores in zip(tokens[row].tolist(), expected, logits, strict=False):
                if drafted != best:
                    # Two tokens within rounding of each other are no disagreement.
                    num_different += bool(scores[best] - scores[drafted] >= 1e-3)
                    break
                num_same += 1
    assert len({tuple(tokens[0].tolist()) for _, _, tokens in watched.kept}) > 2
    return num_same, num_different


@each(("kind", "rows"), [*((kind, [0, 1, 2]) for kind in TARGETS), ("qwen3", [1]), ("qwen3.5", [1])])
def test_cached_drafts_are_those_of_a_loop_without_a_cache(kind: str, rows: list[int]) -> None:
    num_same, num_different = compared(kind, rows)
    assert num_different == 0 and num_same > 12 * len(rows)


# Mistakes that leave every answer as it is, and drafts worse.


def _not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """Rejected draft tokens stay in the heads' cache, and the next tokens are written after them."""
    begin, observe = MTPDrafter.begin, MTPDrafter.observe

    def faulty_begin(self: Any, num_rows: int, capacity: int) -> None:
        begin(self, num_rows, capacity + 24 * self.num_drafts)
        self.left = [0] * num_rows

    def faulty(self: Any, committed: Committed) -> None:
        if not committed.is_prompt:
            for row, count in zip(committed.rows, committed.counts, strict=True):
                self.left[row] += max(0, self.num_drafts - count)
        starts = [start + self.left[row] for row, start in zip(committed.rows, committed.starts, strict=True)]
        observe(self, replace(committed, starts=starts))

    patch.setattr(MTPDrafter, "begin", faulty_begin)
    patch.setattr(MTPDrafter, "observe", faulty)


def _own_states_kept(patch: pytest.MonkeyPatch) -> None:
    """Accepted tokens keep what the heads made of their own states, in place of the target's."""
    observe = MTPDrafter.observe

    def faulty(self: Any, committed: Committed) -> None:
        kept = [buffer.clone() for pair in self.cache._layers.values() for buffer in pair]
        observe(self, committed)
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            for buffer, old in zip((b for pair in self.cache._layers.values() for b in pair), kept, strict=False):
                if not committed.is_prompt:
                    at = slice(start + 1, start + count)
                    buffer[row, :, at] = old[row, :, at]

    patch.setattr(MTPDrafter, "observe", faulty)


def _one_place_late(patch: pytest.MonkeyPatch) -> None:
    """The heads' own steps are placed at the position of the token, which is one behind that of its state."""
    step, propose = MTPDrafter.step, MTPDrafter.propose

    def faulty(self: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(
                self, "step", lambda tokens, hidden, starts: step(self, tokens, hidden, [one + 1 for one in starts])
            )
            return propose(self)

    patch.setattr(MTPDrafter, "propose", faulty)


def _embedding_of_the_state(patch: pytest.MonkeyPatch) -> None:
    """A state is paired with its own token, and not with the one behind it."""
    step = MTPDrafter.step

    def faulty(self: Any, tokens: Tensor, *rest: Any, **options: Any) -> Tensor:
        return step(self, tokens.roll(1, dims=1), *rest, **options)

    patch.setattr(MTPDrafter, "step", faulty)


def _state_of_another_row(patch: pytest.MonkeyPatch) -> None:
    propose = MTPDrafter.propose

    def faulty(self: Any) -> Any:
        self.hidden = self.hidden.roll(1, dims=0)
        return propose(self)

    patch.setattr(MTPDrafter, "propose", faulty)


@each("kind", ["qwen3", "qwen3.5"])
@each(
    "plant",
    [_not_rolled_back, _own_states_kept, _one_place_late, _embedding_of_the_state, _state_of_another_row],
)
def test_a_planted_fault_changes_what_is_drafted(
    kind: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert compared(kind, [0, 1, 2] if plant is _state_of_another_row else [1])[1]


@each(("kind", "num_rows"), [*((kind, 3) for kind in TARGETS), ("qwen3.5", 1)])
def test_answers_are_the_plain_ones_to_limits_and_stops(kind: str, num_rows: int) -> None:
    target, prompts = Target(TARGETS[kind]()), SHORT[:num_rows]
    expected = plain(target, prompts, 10)
    assert run(target, drafter(target, 6), prompts, 10).tokens == expected
    assert run(target, drafter(target), prompts, 2).tokens == [answer[:2] for answer in expected]
    stops = frozenset({expected[-1][6]})
    assert run(target, drafter(target, 1), prompts, 10, stops).tokens == plain(target, prompts, 10, stops)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5", "qwen3-next"])
def test_slots_that_are_filled_again_draft_as_alone(kind: str) -> None:
    target = Target(TARGETS[kind]())
    prompts = [*SHORT, [9, 8, 7], [50] * 5, [*range(2, 20)]]
    alone = [run(target, drafter(target), [prompt], 10) for prompt in prompts]
    backend = LocalBackend(target, None, {"mtp": drafter(target)}, Limits(10, frozenset()))
    backend.decode = lambda _ids: ""  # type: ignore[method-assign]
    for answer, one in zip(backend.generate_ids("mtp", prompts, num_rows=2), alone, strict=True):
        assert list(answer.token_ids) == one.tokens[0]
        assert list(answer.accepted) == [step.accepted[0] for step in one.rounds]


def test_it_runs_beside_other_drafts_on_one_target() -> None:
    """Each asks the target for other layers' outputs; what one asked for does not stay for the next."""
    from helpers.drafts.tiny import dflash_drafter

    target = native(tiny("llama"))
    alone = run(target, drafter(target), SHORT, 12)
    assert run(target, dflash_drafter(target), SHORT, 12).tokens == alone.tokens
    again = run(target, drafter(target), SHORT, 12)
    assert [step.accepted for step in again.rounds] == [step.accepted for step in alone.rounds]


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_transformers_our_own_and_compiled_code_draft_the_same(kind: str) -> None:
    model = copy.deepcopy(TARGETS[kind]())
    draft = heads(model)
    drafted, states = [], []
    for engine, kernels in (("transformers", None), ("native", "torch"), ("native", "numba")):
        target = target_of(model, engine, kernels)
        tested = drafter(target, 4, draft=draft)
        if engine == "transformers":
            tested.network = PublishedMTP(draft)
        compile_like(target, [tested])
        assert isinstance(tested.network, CompiledMTP) == (kernels == "numba")
        watched = Proposing(tested, [[*prompt, *range(60, 90)] for prompt in SHORT])
        run(target, watched, SHORT, 12)
        drafted.append([tokens.tolist() for _, _, tokens in watched.kept])
        states.append(tested.hidden.float())
    assert drafted[0] == drafted[1] == drafted[2]
    for other in states[1:]:
        torch.testing.assert_close(other, states[0], rtol=1e-3, atol=1e-3)


def test_heads_of_a_bfloat16_hybrid_are_read_in_its_type() -> None:
    model = copy.deepcopy(made("qwen3.5")).to(torch.bfloat16)
    target = Target(model)
    tested = drafter(target, 3, draft=heads(model).to(torch.bfloat16))
    out = run(target, tested, SHORT[:2], 8)
    assert tested.hidden.dtype == torch.bfloat16 and all(len(tokens) == 8 for tokens in out.tokens)


def test_the_states_are_taken_behind_the_targets_final_norm() -> None:
    target = Target(made("qwen3.5"))
    target.tap(drafter(target).taps)
    target.begin(1, 8)
    read = target.prefill([[5, 6, 7, 8]]).hidden
    with torch.inference_mode():
        torch.testing.assert_close(read, target.model.get_decoder()(torch.tensor([[5, 6, 7, 8]])).last_hidden_state)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_drawn_answers_follow_the_targets_distribution(rule: str) -> None:
    """The first two tokens behind a prompt, drawn often: as plain decoding draws them."""
    target, prompts = native(tiny("llama")), [[5, 6, 7]] * 400
    sampling, seeds = Sampling(1.0, seed=3), list(range(400))
    drawn = run(target, drafter(target, 2, rule), prompts, 3, sampling=sampling, seeds=seeds)
    first, second = (torch.tensor([tokens[place] for tokens in drawn.tokens]) for place in (0, 1))
    with torch.inference_mode():
        logits = target.model(torch.tensor([[5, 6, 7, token] for token in range(97)])).logits
        p = logits[0, 2].softmax(-1)
        assert follows(first, p) and follows(second, (p[:, None] * logits[:, 3].softmax(-1)).sum(0))
    assert any(step.accepted[row] for step in drawn.rounds for row in range(len(prompts)))


def test_broken_heads_cost_speed_and_not_exactness() -> None:
    target = native(tiny("qwen3", head_dim=8))
    draft = heads(target.model)
    with torch.no_grad():
        draft.fc.weight.fill_(torch.nan)
    assert run(target, drafter(target, draft=draft), SHORT, 12).tokens == plain(target, SHORT, 12)


def test_a_target_without_heads_says_what_was_expected() -> None:
    with (
        db.Engine(target=CASES / "_targets/small") as engine,
        pytest.raises(UserError, match=r"small has no MTP heads: expected tensors mtp\.\* .*--draft mtp=PATH$"),
    ):
        engine.generate([4, 5], method="mtp")
