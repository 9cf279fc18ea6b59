"""The reference backend: chats in, generations out, errors as rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import GpuMemoryError, UserError
from dflash_bench.core.methods import METHODS, Method, parse
from dflash_bench.core.types import Message, Settings
from dflash_bench.engine.backend import LocalBackend, open_backend, stop_ids
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.judge_weights import ChatJudge, Words
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.presets import Preset
from helpers.each import each
from helpers.pretended_gpu.pretend import Device, moved
from helpers.toy import Letters, Scripted, native, plain, sometimes_wrong, tiny

PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [i * 7 % 97 for i in range(40)]]


def backend(
    model: Any = None, num_drafts: int = 4, max_new_tokens: int = 12, stops: frozenset[int] = frozenset()
) -> LocalBackend:
    target = Target(model or tiny("qwen3"))
    answers = plain(target, PROMPTS, 30)
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    drafters = {"ar": NoDrafter(), "good": Scripted(known, num_drafts, sometimes_wrong(0.7, 97))}
    return LocalBackend(target, Letters(), drafters, Limits(max_new_tokens, stops))


def text_of(ids: Sequence[int]) -> str:
    return Letters().decode(ids)


def test_a_generation_adds_up() -> None:
    local = backend()
    expected = plain(local.target, PROMPTS, 12)
    for given, expected_ids, prompt in zip(local.generate_ids("good", PROMPTS), expected, PROMPTS, strict=True):
        assert given.error is None and given.finish_reason == "length"
        assert list(given.token_ids) == expected_ids and given.text == text_of(expected_ids)
        assert given.num_prompt_tokens == len(prompt)
        assert given.drafted and given.accepted and given.emitted
        assert sum(given.emitted) + 1 == len(given.token_ids) == 12
        assert all(e == a + 1 for e, a in zip(given.emitted[:-1], given.accepted[:-1], strict=True))
        assert set(given.drafted) == {4} and max(given.accepted) > 0
        assert given.draft_s and given.verify_s and given.round_s
        assert len(given.draft_s) == len(given.verify_s) == len(given.round_s) == len(given.emitted)
        for draft, verify, whole in zip(given.draft_s, given.verify_s, given.round_s, strict=True):
            assert draft >= 0 and verify >= 0 and draft + verify <= whole + 1e-9
        assert given.draft_prefill_s is not None
        assert given.prefill_s > 0 and given.decode_s >= sum(given.round_s) + given.draft_prefill_s - 1e-9


def test_the_memory_of_an_answer_is_without_what_its_method_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator holds the target, two drafts, 1,000 bytes and later the judge's copy; a draft shares a weight."""
    target, own, alone = *map(copy.deepcopy, [tiny("qwen3")] * 2), torch.nn.Linear(10, 5, bias=False)
    beside = torch.nn.ModuleList([torch.nn.Linear(10, 7, bias=False), target.get_input_embeddings()])
    with Device().entered(), torch.inference_mode():
        chat_judge = ChatJudge(lambda: moved(own), lambda: Words(None, frozenset()), 3)
        drafts = {"alone": moved(alone), "beside": moved(beside)}
        drafters = dict.fromkeys(["ar", *drafts], NoDrafter())
        local = LocalBackend(
            Target(moved(target)), Letters(), drafters, Limits(3), chat_judge=chat_judge, drafts=drafts
        )
        local.clock = HostClock()
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        for judges in ([], [moved(own)]):
            allocated = sum(one.nbytes for model in judges for one in (*model.parameters(), *model.buffers())) + 1480
            monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, allocated=allocated: allocated)
            found = {name: local.generate_ids(name, [[1, 2]])[0].peak_memory_bytes for name in drafters}
            assert found == {"ar": 1000, "alone": 1200, "beside": 1280}
            chat_judge.read()


FULL: dict[str, Exception] = {
    "torch's allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "a library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "the driver": RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
}


@each("kind", FULL)
def test_a_full_gpu_fails_an_answer_or_its_judgement_and_what_follows_is_sound(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = backend()
    sound, calls = local.target.forward, list[int]()

    def full(*_args: Any, **_options: Any) -> Any:
        calls.append(0)
        if len(calls) > 3:
            raise FULL[kind]
        return sound(*_args, **_options)

    for name in ("ar", "good"):
        with monkeypatch.context() as patched:
            patched.setattr(local.target, "forward", full)
            (given,) = local.generate_ids(name, PROMPTS[:1])
        assert (given.error, given.finish_reason, given.decode_s) == ("out of GPU memory", "error", 0)
        assert local.generate_ids(name, PROMPTS[:1])[0].error is None
    monkeypatch.setattr(local.chat_judge, "_own", full)
    with pytest.raises(GpuMemoryError):
        local.audit([Message("user", "a")], [1])
    monkeypatch.setitem(FULL, kind, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        local.audit([Message("user", "a")], [1])


class Steps:
    """A clock that goes on where somebody says so."""

    runs_ahead, now = False, 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class Slow(Scripted):
    """Takes 1000 s to begin, 100 to take in a prompt, 10 to propose and 1 to take in what a round kept."""

    clock: Steps

    def begin(self, num_rows: int, capacity: int) -> None:
        self.clock.now += 1000
        super().begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.clock.now += 100 if committed.is_prompt else 1
        super().observe(committed)

    def propose(self) -> Draft | None:
        self.clock.now += 10
        return super().propose()


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_what_a_draft_does_is_in_its_own_figures(num_rows: int) -> None:
    local = backend()
    good: Any = local.drafters["good"]
    slow = Slow(good.texts, good.num_drafts, good.change)
    slow.clock = local.clock = Steps()  # type: ignore[assignment]
    local.drafters = {"slow": slow}
    for given in local.generate_ids("slow", PROMPTS, num_rows=num_rows):
        rounds, others = len(given.accepted or ()), 100 * (len(PROMPTS) - num_rows)
        assert given.error is None and rounds > 2
        assert given.prefill_s in {0, 100} if num_rows < len(PROMPTS) else given.prefill_s == 0
        assert given.draft_prefill_s == 100
        # The last round of all has nothing after it.
        assert given.draft_s in [(11,) * rounds, (*(11,) * (rounds - 1), 10)]
        assert set(given.verify_s or ()) == {0}
        assert 0 <= given.decode_s - 100 - sum(given.draft_s or ()) <= others
        assert given.decode_s == 100 + sum(given.round_s or ())


def test_a_stop_token_ends_a_row_and_is_kept() -> None:
    free = plain(native(tiny("qwen3")), PROMPTS, 12)
    stop = free[1][4]
    given = backend(stops=frozenset({stop})).generate_ids("good", PROMPTS)
    assert given[1].finish_reason == "stop"
    assert list(given[1].token_ids) == free[1][: free[1].index(stop) + 1]
    assert "length" in {generation.finish_reason for generation in given}


def test_a_first_token_that_stops_is_a_generation_without_rounds() -> None:
    free = plain(native(tiny("qwen3")), PROMPTS, 12)
    (given,) = backend(stops=frozenset({free[0][0]})).generate_ids("good", PROMPTS[:1])
    assert given.finish_reason == "stop" and list(given.token_ids) == free[0][:1]
    assert given.drafted == given.accepted == given.emitted == given.round_s == ()
    assert given.decode_s == given.draft_prefill_s == 0.0 < given.prefill_s


def test_a_row_that_ends_at_once_pays_for_no_draft_prefill_beside_others() -> None:
    free = plain(native(tiny("qwen3")), PROMPTS, 12)
    assert free[0][0] not in free[1]
    given = backend(stops=frozenset({free[0][0]})).generate_ids("good", PROMPTS)
    assert given[0].decode_s == given[0].draft_prefill_s == 0.0
    assert given[1].decode_s > 0


@pytest.mark.parametrize("length", [96, 97, 300])
def test_a_prompt_that_fills_the_context_is_an_error_row(length: int) -> None:
    local = backend()
    (given,) = local.generate_ids("ar", [[1] * length])
    assert given.finish_reason == "error" and given.token_ids == () and given.text == ""
    assert given.error == f"a prompt of {length} tokens leaves no room in a context of 96"
    assert given.num_prompt_tokens == length and given.drafted is None
    assert local.generate_ids("ar", [[1] * 95])[0].error is None


def test_an_empty_prompt_is_an_error_row() -> None:
    given = backend().generate("good", [Message("user", "")])
    assert given.error == "an empty prompt" and given.finish_reason == "error"


def test_nan_logits_are_error_rows_and_the_next_generation_is_sound() -> None:
    local = backend(copy.deepcopy(tiny("llama")))
    sound = [local.generate_ids(method, PROMPTS)[1].token_ids for method in ("ar", "good")]
    steps = []

    def break_second_row(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        steps.append(1)
        if len(steps) == 3:
            logits[1] = torch.nan

    hook = local.target.head.register_forward_hook(break_second_row)
    given = local.generate_ids("ar", PROMPTS)
    hook.remove()
    assert [generation.error for generation in given] == ["NaN or infinite logits after 2 tokens (row 1)"] * 3
    assert {generation.finish_reason for generation in given} == {"error"}
    assert given[1].token_ids == sound[0][:2]
    again = [local.generate_ids(method, PROMPTS)[1].token_ids for method in ("ar", "good")]
    assert again == sound


def test_a_weight_of_nan_is_an_error_row_for_every_prompt() -> None:
    local = backend(copy.deepcopy(tiny("llama")))
    with torch.no_grad():
        # The engine computes with modules of its own.
        local.target.network.model.model.layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    for prompt in PROMPTS:
        (given,) = local.generate_ids("good", [prompt])
        assert given.error == "NaN or infinite logits after 0 tokens (row 0)"


SAMPLED = Settings(1.0)


def test_sampling_with_a_seed_is_the_same_for_every_drafter() -> None:
    target = native(tiny("qwen3"))
    drafters = {"ar": NoDrafter(), "wrong": Scripted([[7] * 90] * 3, 4)}
    local = LocalBackend(target, Letters(), drafters, Limits(12), 3)
    first, second = (local.generate_ids(method, PROMPTS, Sampling(1.0, 3)) for method in ("ar", "wrong"))
    assert [g.token_ids for g in first] == [g.token_ids for g in second]
    assert [list(g.token_ids) for g in first] != plain(target, PROMPTS, 12)


def test_every_prompt_and_repeat_draws_numbers_of_its_own_and_every_method_the_same() -> None:
    drafters = {"ar": NoDrafter(), "wrong": Scripted([[7] * 90], 4)}
    local = LocalBackend(native(tiny("qwen3")), Letters(), drafters, Limits(12), 3)
    chat = [Message("user", text_of(PROMPTS[1]))]
    first = local.generate("ar", chat, SAMPLED)
    assert local.generate("ar", chat, SAMPLED).token_ids == first.token_ids
    assert local.generate("wrong", chat, SAMPLED).token_ids == first.token_ids
    assert local.generate("ar", chat, SAMPLED, repeat=1).token_ids != first.token_ids


@pytest.mark.parametrize("method", ["ar", "wrong"])
def test_another_prompt_draws_other_numbers_where_the_model_likes_all_tokens_alike(method: str) -> None:
    """At such a temperature the random numbers alone decide: the same ones would draw nearly the same tokens."""
    drafters = {"ar": NoDrafter(), "wrong": Scripted([[7] * 90], 4)}
    local = LocalBackend(native(tiny("qwen3")), Letters(), drafters, Limits(40), 3)
    one, other = (
        local.generate(method, [Message("user", text_of(prompt))], Settings(100.0)).token_ids for prompt in PROMPTS[1:3]
    )
    assert len(one) == len(other) == 40
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 8


# Chats.


def test_without_a_template_a_chat_is_its_messages_in_lines() -> None:
    local = backend()
    messages = [Message("user", "ab"), Message("assistant", "c")]
    assert local.encode(messages) == Letters().encode("ab\nc")


@pytest.mark.parametrize("thinking", [False, True])
def test_a_template_is_rendered_with_its_mode_and_room_for_the_answer(thinking: bool) -> None:
    seen: dict[str, Any] = {}

    class Templated(Letters):
        chat_template = "a template"

        def apply_chat_template(self, chat: Any, **options: Any) -> str:
            seen.update(options, chat=chat)
            return "rendered"

    local = backend()
    local.tokenizer = Templated()
    assert local.encode([Message("user", "hi")], Settings(thinking=thinking)) == Letters().encode("rendered")
    assert seen["chat"] == [{"role": "user", "content": "hi"}]
    assert seen["enable_thinking"] is thinking and seen["add_generation_prompt"] is True and seen["tokenize"] is False


@each(("configured", "expected"), [(7, {7, 1}), ([7, 8], {7, 8, 1}), (None, {1}), ([], {1}), (1, {1})])
def test_every_id_that_ends_an_answer_is_a_stop_id(configured: Any, expected: set[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert stop_ids(model, Letters()) == expected


# From methods to drafters.


def opened(*texts: str | Method, preset: Preset | None = None, shifted_labels: bool = False) -> LocalBackend:
    body: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "num_target_layers": 4,
        "target_layer_ids": (0, 1, 2),
    }
    drafts: Any = {
        "dflash": DFlashDraft(
            DFlashConfig(**body, num_layers=1, block_size=8, mask_token_id=96, shifted_labels=shifted_labels)
        ),
        "eagle3": Eagle3Draft(Eagle3Config(**body, draft_vocab_size=97)),
    }
    drafts["eagle3@b"] = drafts["eagle3"]
    models = Models(tiny("qwen3"), Letters(), drafts, {})
    methods = [parse(method) if isinstance(method, str) else method for method in texts]
    return open_backend(models, preset or Preset("", {}), methods, 12)


def test_a_method_drafts_as_many_tokens_as_the_user_the_preset_or_the_draft_says() -> None:
    tuned = Preset("", {}, num_drafts={"eagle3": 4})
    drafters = opened("ar", "dflash", "dflash:3", "eagle3", "eagle3:2", "eagle3@b", preset=tuned).drafters
    assert {label: drafter.num_drafts for label, drafter in drafters.items()} == {
        "ar": 0,
        "dflash": 7,
        "dflash:3": 3,
        "eagle3": 4,
        "eagle3:2": 2,
        "eagle3@b": 7,
    }
    assert opened("eagle3").drafters["eagle3"].num_drafts == METHODS["eagle3"].option("n").default


@pytest.mark.parametrize(("shifted_labels", "num_drafts"), [(False, 15), (True, 16)])
def test_a_block_size_is_the_width_of_the_block_whatever_its_slots_predict(
    shifted_labels: bool, num_drafts: int
) -> None:
    """Where the anchor's own slot predicts the token after it, as many tokens are drafted as the block is wide."""
    asked = parse("dflash:block=16")
    tuned = Preset("", {}, num_drafts={"dflash": 5})
    drafter: Any = opened("ar", asked, preset=tuned, shifted_labels=shifted_labels).drafters["dflash:block=16"]
    assert (drafter.block_size, drafter.num_drafts) == (16, num_drafts)


def test_the_trees_of_the_paper_verify_16_and_60_tokens() -> None:
    drafters: dict[str, Any] = dict(opened("eagle3-tree", "eagle3-tree:nodes=15").drafters)
    assert [drafter.num_drafts + 1 for drafter in drafters.values()] == [60, 16]
    assert [(drafter.top_k, drafter.steps) for drafter in drafters.values()] == [(10, 7)] * 2


def test_more_nodes_than_a_tree_can_have_are_refused() -> None:
    with pytest.raises(UserError, match="with top_k 4 and depth 5 the tree has at most 68 nodes; give fewer nodes, or"):
        opened("eagle3-tree:nodes=69,top_k=4,depth=5")


def test_a_ddtree_has_as_many_nodes_as_asked_for_or_chooses_among_many() -> None:
    drafters: dict[str, Any] = dict(
        opened("ddtree", "ddtree:12", "ddtree:nodes=auto", "ddtree:nodes=5,top_k=2,block=4", "ddtree:top_k=1").drafters
    )
    assert [(d.num_drafts, d.top_k, d.block_size) for d in drafters.values()] == [
        (32, 32, 8),
        (12, 12, 8),
        (63, 63, 8),
        (5, 2, 4),
        (7, 1, 8),
    ]
    assert [hasattr(drafter, "adaptive") for drafter in drafters.values()] == [False, False, True, False, False]
    with pytest.raises(UserError, match="with top_k 1 and block 8 the tree has at most 7 nodes; give fewer nodes, or"):
        opened("ddtree:nodes=8,top_k=1")


def test_every_method_of_a_backend_gives_the_plain_tokens() -> None:
    trees = ("eagle3-tree:nodes=11", "eagle3-tree:nodes=68,top_k=4,depth=5", "eagle3-tree:top_k=1,depth=3")
    adaptive = ("dflash:block=auto", "ddtree:nodes=auto", "ddtree", "dflash:steps=3")
    local = opened("ar", "dflash", "dflash:15", "eagle3:5", *trees, *adaptive)
    assert [local.drafters[tree].num_drafts for tree in trees] == [11, 68, 3]
    expected = [g.token_ids for g in local.generate_ids("ar", PROMPTS)]
    for label in local.drafters:
        assert [g.token_ids for g in local.generate_ids(label, PROMPTS)] == expected
        assert [local.generate_ids(label, [prompt])[0].token_ids for prompt in PROMPTS] == expected
