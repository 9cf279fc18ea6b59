"""Targets beyond plain attention: experts, windows and recurrent states are exact under drafts of every kind."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.backend import open_backend
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.forward import hf
from dflash_bench.engine.forward.delta import CHUNK, DeltaSizes, DeltaStates, Written, read_all
from dflash_bench.engine.forward.hf import HFForward, KeptTokens, advance
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models
from dflash_bench.models.presets import Preset
from helpers.each import each
from helpers.tiny_architectures import ATTENTION, HYBRID, OURS, made, opened
from helpers.toy import Scripted, Tree, Watching, changes, generated, run, sometimes_wrong

KINDS = [*ATTENTION, *HYBRID, *OURS]
VOCAB, NEW = 97, 12
PROMPTS = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11], list(range(2, 24)), [90, 1, 90], [8] * 7]
"""Some longer than the window, some that reach it while they answer, some that hardly do."""


@cache
def answers(kind: str) -> list[list[int]]:
    """Answers of transformers with its own cache, each prompt alone."""
    if kind in OURS:
        return answers(OURS[kind])
    return [generated(made(kind), prompt, NEW) for prompt in PROMPTS]


def texts(kind: str) -> list[list[int]]:
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers(kind), strict=True)]


@each("kind", KINDS)
def test_plain_decoding_in_our_loop_is_what_transformers_generates(kind: str) -> None:
    expected = answers(kind)
    assert len({token for answer in expected for token in answer}) > 10
    target = opened(kind)
    assert run(target, NoDrafter(), PROMPTS[2:3], NEW).tokens == expected[2:3]
    assert run(target, NoDrafter(), PROMPTS, NEW).tokens == expected


SIZES = [(1, 5), (5, 1), (16, 3), (2, 3), (5, 5), (16, 1)]
"""Numbers of drafts and of rows."""


@each(
    ("kind", "num_drafts", "num_rows"),
    [(kind, *SIZES[(number + half) % 6]) for number, kind in enumerate(KINDS) for half in (0, 3)],
)
def test_drafts_right_and_wrong_give_the_plain_tokens(kind: str, num_drafts: int, num_rows: int) -> None:
    target, expected = opened(kind), answers(kind)[-num_rows:]
    drafter = Scripted(texts(kind)[-num_rows:], num_drafts, sometimes_wrong(0.75, VOCAB, seed=num_drafts))
    assert run(target, drafter, PROMPTS[-num_rows:], NEW).tokens == expected


CHANGES = [*changes(VOCAB, 1)]


@each(
    ("kind", "change"),
    [(kind, CHANGES[number]) for at, kind in enumerate(KINDS) for number in (0, 1 + at % 6)],
)
def test_whatever_is_drafted_the_tokens_are_the_plain_ones(kind: str, change: str) -> None:
    stop = answers(kind)[1][6]
    expected = [cut(answer, stop) for answer in answers(kind)[:3]]
    drafter = Scripted(texts(kind)[:3], 5, changes(VOCAB, stop)[change]())
    out = run(opened(kind), drafter, PROMPTS[:3], NEW, stop_ids=frozenset({stop}))
    assert out.tokens == expected
    if change == "right":
        assert max(count for step in out.rounds for count in step.accepted) == 5


def cut(answer: list[int], stop: int) -> list[int]:
    return answer[: answer.index(stop) + 1] if stop in answer else answer


@each("shape", ["chain", "branching"])
@each("kind", [*ATTENTION, *(kind for kind in OURS if OURS[kind] in ATTENTION)])
def test_trees_deeper_than_the_window_give_the_plain_tokens(kind: str, shape: str) -> None:
    num_rows = 1 if shape == "chain" else 3
    out = run(opened(kind), Tree(texts(kind)[:num_rows], 10, shape, VOCAB), PROMPTS[:num_rows], NEW)
    assert out.tokens == answers(kind)[:num_rows]
    assert max(count for step in out.rounds for count in step.accepted) == 10


@each("kind", HYBRID)
def test_a_tree_on_a_recurrent_target_is_refused_by_name(kind: str) -> None:
    models = Models(made(kind), None, {}, {})
    with pytest.raises(
        UserError, match=r"--method eagle3-tree:nodes=3: a \w+ target has recurrent layers, which cannot verify trees"
    ):
        open_backend(models, Preset("", {}), [parse("eagle3-tree:nodes=3")], NEW)


@each("kind", KINDS)
def test_taps_give_the_hidden_states_of_what_was_read(kind: str) -> None:
    watching = Watching(Scripted(texts(kind)[:2], 3, sometimes_wrong(0.6, VOCAB)))
    watching.taps = (2, 0)
    run(opened(kind), watching, PROMPTS[:2], NEW)
    for row, (prompt, following) in enumerate(zip(PROMPTS, watching.following, strict=False)):
        read = [*prompt[:1], *following][: len(watching.read[row])]
        with torch.inference_mode():
            states = made(kind)(torch.tensor([read]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[3], states[1]], dim=-1)[0]
        assert torch.allclose(torch.stack(watching.read[row]), expected, atol=1e-3, rtol=1e-3)


# Recurrent states.

NAMES = vars(sys.modules[type(made("qwen3.5").model.layers[0]).__module__])
RULES = {name: rule for name, rule in NAMES.items() if name.endswith("gated_delta_rule")}


@pytest.fixture(autouse=True)
def the_rules_are_left_alone() -> Iterator[None]:
    yield
    assert len(RULES) == 2 and all(NAMES[name] is rule for name, rule in RULES.items())


RECURRENT = [*HYBRID, *(kind for kind in OURS if OURS[kind] in HYBRID)]


def states(target: Target) -> list[tuple[Tensor, Tensor]]:
    if isinstance(target.network, NativeForward):
        assert target.network.states is not None
        return [*zip(target.network.states.inputs, target.network.states.memory, strict=True)]
    assert isinstance(target.network, HFForward) and target.network._recurrence is not None
    return [(state.conv_states[0], state.recurrent_states[0]) for state in target.network._recurrence.states.values()]


@each("kind", RECURRENT)
def test_what_was_not_kept_leaves_no_trace_in_any_state(kind: str) -> None:
    prompts, blocks, counts = PROMPTS[:3], torch.arange(60, 75).view(3, 5), [2, 5, 1]
    target = opened(kind)
    target.begin(3, 40)
    target.prefill(prompts)
    target.forward(blocks, [len(prompt) for prompt in prompts])
    target.commit(counts)
    for row, prompt in enumerate(prompts):
        alone = opened(kind)
        alone.begin(1, 40)
        alone.prefill([[*prompt, *blocks[row, : counts[row]].tolist()]])
        for ours, expected in zip(states(target), states(alone), strict=True):
            for a, b in zip(ours, expected, strict=True):
                assert torch.allclose(a[row], b[0], atol=1e-4, rtol=1e-3)


def test_a_state_is_made_again_only_where_a_draft_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(hf, "advance", lambda *args: (calls.append(args[1].shape[1]), advance(*args))[1])
    kind, num_layers = "qwen3.5", 3
    target = opened(kind)
    run(target, NoDrafter(), PROMPTS[:3], NEW)
    run(target, Scripted(texts(kind)[1:2], 3), PROMPTS[1:2], 1 + 4 * 3)
    assert calls == []
    run(target, Scripted(texts(kind)[1:2], 3, lambda token: (token + 1) % VOCAB), PROMPTS[1:2], 1 + 5)
    assert calls == [1] * num_layers * 5


@each("normalised", [True, False])
@each("fresh", [True, False])
def test_a_state_advances_as_the_published_rule_says_token_by_token(normalised: bool, fresh: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, g, beta = drawn(2, 7, 2, 8), drawn(2, 7, 2, 8), drawn(2, 7, 4, 6), -drawn(2, 7, 4).exp(), drawn(2, 7, 4)
    k, beta = k / 3, beta.sigmoid()
    before = None if fresh else drawn(2, 4, 8, 6)
    _, expected = RULES["torch_recurrent_gated_delta_rule"](
        q, k, v, g=g, beta=beta, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=normalised
    )
    assert torch.allclose(advance(before, k, v, g, beta, normalised), expected, atol=1e-5, rtol=1e-4)


def test_a_pass_that_breaks_off_leaves_the_rules_as_they_were() -> None:
    target = Target(made("qwen3.5"))
    target.begin(1, 8)
    assert isinstance(target.network, HFForward)
    target.network.model = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        target.forward(torch.tensor([[1, 2]]), [0])


@each(
    ("num_tokens", "begins"), [(1, [0]), (CHUNK, [0]), (CHUNK + 5, [0]), (9, [0, 4]), (CHUNK * 2 + 3, [0, CHUNK + 1])]
)
def test_our_rule_reads_and_writes_as_the_published_rule_in_one_pass_or_more(
    num_tokens: int, begins: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = drawn(2, num_tokens, 4, 8), drawn(2, num_tokens, 4, 8), drawn(2, num_tokens, 4, 6)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g, beta = -drawn(2, num_tokens, 4).exp() / 9, drawn(2, num_tokens, 4).sigmoid()
    sizes = DeltaSizes(num_layers=1, num_keys=4, num_values=4, key_size=8, value_size=6, kernel=1)
    states = DeltaStates(sizes, 2, torch.float32, torch.device("cpu"))
    states.memory.copy_(drawn(1, 2, 4, 8, 6))
    expected, after = RULES["torch_recurrent_gated_delta_rule"](
        q, k, v, g=g, beta=beta, initial_state=states.memory[0].clone(), output_final_state=True
    )
    said = []
    for begin, end in pairwise([*begins, num_tokens]):
        parts = [x[:, begin:end].transpose(1, 2) for x in (q * 8**-0.5, k, v, g, beta)]
        out, *written = read_all(states.memory[0], *parts)
        said.append(out)
        states.keep(0, Written(parts[1], *written, torch.zeros(2, end - begin, sum(sizes.split))))
        states.commit([end - begin] * 2, end - begin)
    assert torch.allclose(torch.cat(said, dim=2).transpose(1, 2), expected, atol=1e-5, rtol=1e-4)
    assert torch.allclose(states.memory[0], after, atol=1e-5, rtol=1e-4)


def test_two_recurrent_targets_of_one_class_take_turns() -> None:
    kind = "qwen3.5"
    first, second = opened(kind), Target(copy.deepcopy(made(kind)))
    for target in (first, second, first):
        drafter = Scripted(texts(kind)[:2], 4, sometimes_wrong(0.5, VOCAB))
        assert run(target, drafter, PROMPTS[:2], NEW).tokens == answers(kind)[:2]


@each("kind", ["qwen3.5", "ours: qwen3.5"])
def test_nan_in_a_state_does_not_outlive_its_generation(kind: str) -> None:
    target = opened(kind)
    expected = run(target, NoDrafter(), PROMPTS[:2], NEW).tokens
    with torch.inference_mode():
        for state in (state for pair in states(target) for state in pair):
            state.fill_(torch.nan)
    assert run(target, NoDrafter(), PROMPTS[:2], NEW).tokens == expected


def test_gates_are_closed_behind_each_rows_last_token() -> None:
    gate = torch.ones(3, 4, 2)
    kept = KeptTokens.of([4, 0, 2], torch.device("cpu"))
    assert kept.longest == 4
    assert kept.close(gate)[:, :, 0].tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert KeptTokens.of([3, 3, 3], torch.device("cpu")).close(gate) is gate


def test_the_last_inputs_of_each_row_are_its_window() -> None:
    inputs = torch.arange(6).repeat(2, 1, 1)
    assert KeptTokens.of([1, 3], torch.device("cpu")).window(inputs, 2).tolist() == [[[1, 2]], [[3, 4]]]
    assert KeptTokens.of([4, 4], torch.device("cpu")).window(inputs, 2).tolist() == [[[4, 5]]] * 2
