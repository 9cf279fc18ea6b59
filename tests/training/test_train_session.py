"""`train` from a request to a draft: it can be loaded and run, goes on where it was, and refuses what cannot be."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from dflash_bench.cli import main
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.core.types import Message
from dflash_bench.engine import loop
from dflash_bench.engine.backend import open_backend
from dflash_bench.engine.selection import target_of
from dflash_bench.models import chat, loading
from dflash_bench.models.presets import NANO, Preset
from dflash_bench.training import answers, contamination, drafts, estimate, prepare, session, trainer
from dflash_bench.training.answers import ComputedStates
from dflash_bench.training.cards import Acceptance, acceptance_of
from dflash_bench.training.config import BLOCKS, TrainRequest, check
from dflash_bench.training.data import stored
from dflash_bench.training.dflash import slot_weights
from helpers import tiny
from helpers.each import each


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model")) / "target"


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "MEASURED_TOKENS", 16)
        yield


@pytest.fixture(scope="module")
def trained_once(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return performed(request(target, tmp_path_factory.mktemp("trained"))).parent


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """The output folder of `request(target, trained)`, which has been performed."""
    return shutil.copytree(trained_once, tmp_path / "trained")


def request(target: Path, out: Path, **changes: Any) -> TrainRequest:
    block_size = 4 if changes.get("method", "dflash") in BLOCKS and not changes.get("init") else None
    small = TrainRequest(
        target=str(target),
        method="dflash",
        out=out,
        written=8,
        sampled=0.25,
        max_new_tokens=12,
        batch_size=16,
        block_size=block_size,
        steps=4,
        rate=0.02,
        threads=1,
    )
    return replace(small, **changes)


def performed(asked: TrainRequest) -> Path:
    folder = session.perform(asked, lambda _: None)
    assert folder is not None
    return folder


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark", "eagle3", "medusa", "mtp"])
def test_a_trained_draft_runs_and_is_exact(method: str, target: Path, tmp_path: Path) -> None:
    asked = request(target, tmp_path, method=method, draft_vocab=None if method in ("medusa", "mtp") else 64)
    folder, used = performed(asked), asked.drafter
    models = loading.load(Preset(str(target), {used: str(folder)}), [used], "cpu", torch.float32)
    if method in KINDS:
        assert models.drafts[used].config.kind == KINDS[method]
    backend = open_backend(models, Preset(str(target), {}), [parse("ar"), parse(used)], 24)
    prompt = models.tokenizer.encode("Tell me a story.")
    plain, drafted = (backend.generate_ids(label, [prompt])[0] for label in ("ar", used))
    assert plain.error is None and drafted.token_ids == plain.token_ids and drafted.accepted
    card = (folder / "README.md").read_text()
    assert "written for dflash-bench: chat: 8" in card and "| mt_bench (embedded) | 32 | 0 |" in card
    history = torch.load(tmp_path / "work" / f"{method}.pt", weights_only=True)["history"]
    assert history[-1]["step"] == 4 and history[-1]["al_pooled"] >= 1.0
    assert json.loads((folder / "history.json").read_text()) == history


KINDS = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark", "eagle3"])
def test_a_slim_draft_trains_no_head_and_leaves_it_out(method: str, target: Path, tmp_path: Path) -> None:
    folder = performed(request(target, tmp_path, method=method, draft_vocab=64, slim=True, intermediate_size=24))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    used = "dflash" if method in BLOCKS else method
    models = loading.load(Preset(str(target), {used: str(folder)}), [used], "cpu", torch.bfloat16)
    draft, head = models.drafts[used], models.target.get_output_embeddings().weight
    assert draft.config.intermediate_size == 24
    assert torch.equal(draft.lm_head.weight, head[draft.target_ids(torch.arange(64))])
    trained = torch.load(tmp_path / "work" / f"{method}.pt", weights_only=True)
    assert torch.equal(trained["model"]["lm_head.weight"].bfloat16(), draft.lm_head.weight)
    assert trained["history"][-1]["al_pooled"] >= 1.0 and "slim True" in (folder / "README.md").read_text()


def test_dflash2_begins_as_the_draft_that_it_is_given(target: Path, tmp_path: Path) -> None:
    """The first step's rate is a hair: so its block, and its tokens, are the other draft's."""
    first = performed(request(target, tmp_path / "first", draft_vocab=64, slim=True))
    asked = request(
        target, tmp_path / "second", method="dflash2", init=str(first), slim=True, steps=1, rate=1e-9, rank=8
    )
    folders = {"dflash": str(first), "dflash@2": str(performed(asked))}
    models = loading.load(Preset(str(target), folders), list(folders), "cpu", torch.float32)
    assert models.drafts["dflash@2"].candidate_selector.successor_codebook.shape == (64, 8)
    backend = open_backend(models, Preset(str(target), {}), [*map(parse, folders)], 24)
    one, two = (backend.generate_ids(name, [[5, 6, 7, 8]])[0] for name in folders)
    assert one.accepted == two.accepted and one.token_ids == two.token_ids
    with pytest.raises(UserError, match="plain DFlash"):
        performed(request(target, tmp_path / "third", init=folders["dflash@2"], slim=True))


def test_training_goes_on_with_the_weights_as_they_are_stored(target: Path, trained: Path, tmp_path: Path) -> None:
    """Also those that float16 or bfloat16, in which training reads the target, cannot hold."""
    first = trained / "dflash"
    stored = load_file(first / "model.safetensors")
    finer = {name: tensor.float() * (1 + 1e-4) for name, tensor in stored.items()}
    save_file(finer, first / "model.safetensors")
    performed(request(target, tmp_path / "second", init=str(first), steps=1, rate=1e-9))
    weights = torch.load(tmp_path / "second/work/dflash.pt", weights_only=True)["model"]
    for name, tensor in finer.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)


def test_what_is_measured_in_training_is_what_a_run_says() -> None:
    """nano's own draft, which accepts much."""
    models = loading.load("nano", ["dflash"], "cpu", torch.float32)
    backend = open_backend(models, Preset("nano", {}), [parse("dflash")], 40)
    texts = ("What is 3 + 4?", "Write a Python function that returns the sum of a list.")
    prompts = [backend.encode([Message("user", text)]) for text in texts]
    given = backend.generate_ids("dflash", prompts)
    accepted = [count for answer in given for count in answer.accepted or ()]
    measured = session.answered(backend.target, "dflash", models.drafts["dflash"], prompts, backend.limits)
    al = loop.al_pooled(measured)
    assert al == pytest.approx(1 + sum(accepted) / len(accepted)) and al > 1.2


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_an_interrupted_training_goes_on_and_ends_as_an_unbroken_one(
    method: str, target: Path, trained_once: Path, tmp_path: Path
) -> None:
    whole = trained_once / method
    if not whole.exists():
        whole = performed(request(target, tmp_path / "whole", method=method))

    def interrupt(text: str) -> None:
        if "step 3 " in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.perform(request(target, tmp_path / "broken", method=method), interrupt)
    begun = tmp_path / "broken" / "work" / f"{method}.json"
    by_one = json.loads(begun.read_text())
    begun.write_text(json.dumps(by_one | {"processes": 2}))
    with pytest.raises(UserError, match="a training with processes 2, not 1"):
        performed(request(target, tmp_path / "broken", method=method))
    begun.write_text(json.dumps(by_one))
    broken = performed(request(target, tmp_path / "broken", method=method))
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


def test_a_rate_is_searched_for_among_those_that_were_tried(target: Path, tmp_path: Path) -> None:
    folder = performed(request(target, tmp_path, rate=None, steps=4))
    tried = json.loads((tmp_path / "work" / "dflash-rates.json").read_text())
    assert [float(rate) for rate in tried] == list(session.RATES)
    assert f"learning rate of matrices: {max(tried, key=tried.get)}" in (folder / "README.md").read_text()


def test_two_drafts_share_their_answers(target: Path, trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (trained / "work" / "answers").iterdir()}
    performed(request(target, trained, method="eagle3"))
    assert before == {path: path.stat().st_mtime_ns for path in (trained / "work" / "answers").iterdir()}


@each(
    ("changes", "said"),
    [
        ({"slim": True}, "--slim needs --draft-vocab"),
        ({"slim": True, "draft_vocab": 64, "format": "speculators"}, r"--slim .*--to speculators"),
        ({"method": "ar"}, "unknown method to train 'ar'"),
        ({"allow": ("all",)}, "overlap"),
        ({"written": 0}, "no prompts to train on"),
        ({"openings": ("Write",)}, r"--opening .*--invented"),
        ({"method": "eagle3", "layers": 3}, r"--layers .*eagle3"),
        ({"method": "medusa", "mask_token": "x"}, r"--mask-token .*medusa"),
        ({"method": "eagle3", "init": "mine"}, r"--init .*eagle3"),
        ({"method": "dflash", "rank": 8}, r"--rank .*dflash"),
        ({"method": "dspark", "depth": 2}, r"--depth .*dspark"),
        ({"method": "dflash2", "init": "mine", "block_size": 8}, r"--block-size .*--init"),
        ({"method": "dflash2", "slim": True, "draft_vocab": 64, "rank": 65}, "--rank is at most 64 with --slim"),
        ({"method": "eagle3", "distil": 0.5}, r"--distil .*eagle3"),
        ({"method": "medusa", "draft_vocab": 64}, r"--draft-vocab .*medusa"),
        ({"epochs": 2.0}, "--steps and --epochs"),
        ({"method": "eagle3", "features": 3}, r"--features .*eagle3"),
        ({"init": "mine", "features": 3}, r"--features .*--init"),
        ({"method": "mtp", "anchors": "uniform"}, r"--anchors .*mtp"),
        ({"anchors": "none"}, "unknown kind of anchors 'none'"),
        ({"decay": "0"}, "--decay is a number above 0, or off, not 0"),
        ({"decay": "slow"}, "--decay is a number above 0, or off, not slow"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(request(Path("nowhere"), Path("out"), **changes))


def test_the_loss_decays_as_asked_and_features_are_as_many_as_asked(target: Path, tmp_path: Path) -> None:
    asked = request(target, tmp_path)
    gammas = [replace(asked, decay=decay).gamma(16) for decay in (None, "2.5", "off")]
    assert gammas == [7.0, 2.5, math.inf] and asked.gamma(20) == 9.0
    assert slot_weights(4, gammas[2]).tolist() == [0.0, 1.0, 1.0, 1.0]
    assert [drafts.taps(36, count) for count in (1, 3, None)] == [(18, 35), (1, 17, 33, 35), (1, 9, 17, 25, 33, 35)]
    with pytest.raises(UserError, match="--features is at most 1 "):
        performed(replace(asked, features=2))


def test_uniform_anchors_train_another_draft_that_is_measured_alike(target: Path, tmp_path: Path) -> None:
    made = {}
    for anchors in ("random", "uniform"):
        folder = performed(request(target, tmp_path / anchors, anchors=anchors, decay="off", features=1))
        made[anchors] = load_file(folder / "model.safetensors")
        assert json.loads((folder / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [2]
    assert any(not torch.equal(made["random"][name], weight) for name, weight in made["uniform"].items())


def test_folders_may_be_text_and_every_range_holds_in_python_too() -> None:
    asked = TrainRequest(target="nano", out="mine", against="rows", written=1)  # type: ignore[arg-type]
    assert (asked.out, asked.against) == (Path("mine"), Path("rows"))
    for changes, said in (
        ({"layers": 0}, "--layers takes at least 1, not 0"),
        ({"max_new_tokens": 449}, "--max-new-tokens takes at most 448, not 449"),
        ({"sampled": 1.5}, "--sampled is a share from 0 to 1, not 1.5"),
        ({"epochs": float("nan")}, "--epochs takes at least 0.01, not nan"),
    ):
        with pytest.raises(UserError, match=said):
            check(replace(asked, **changes))


def test_a_draft_that_cannot_be_continued_leaves_nothing_behind_that_another_must_match(
    target: Path, tmp_path: Path
) -> None:
    for init, said in (
        (NANO / "eagle3", "is a draft for eagle3, and dflash needs one for dflash; give a plain DFlash draft of this"),
        (tmp_path / "none", "--init .*none"),
    ):
        with pytest.raises(UserError, match=said):
            performed(request(target, tmp_path / "out", method="dflash2", init=str(init)))
    assert not (tmp_path / "out/work/dflash2.json").exists()


def test_other_options_are_not_continued(target: Path, trained: Path) -> None:
    with pytest.raises(UserError, match="holds a draft already"):
        performed(request(target, trained))
    (trained / "dflash" / "README.md").unlink()
    with pytest.raises(UserError, match="a training with steps 4, not 5"):
        performed(request(target, trained, steps=5))
    with pytest.raises(UserError, match="max_new_tokens 12, not 13"):
        performed(request(target, trained, max_new_tokens=13))


def test_a_draft_that_was_cut_off_while_it_was_written_is_written_again(target: Path, trained: Path) -> None:
    folder = trained / "dflash"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "README.md").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    assert performed(request(target, trained)) == folder
    assert (folder / "model.safetensors").read_bytes() == weights


def test_other_prompts_of_the_targets_own_are_not_taken_for_those_that_are_there(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        prepare.prompts, "invent", lambda *given: [f"What is {n} + {n}?" for n in range(given[3].invented)]
    )
    performed(request(target, tmp_path, written=0, invented=8))
    with pytest.raises(UserError, match="prompts of the target's own with invented 8, not 9"):
        performed(request(target, tmp_path, method="eagle3", draft_vocab=64, written=0, invented=9))


def test_prompts_of_a_test_suite_are_refused_unless_allowed(target: Path, tmp_path: Path) -> None:
    rows = (NANO.parent.parent / "suites" / "embedded" / "gsm8k" / "test.jsonl").read_text().splitlines()[:4]
    (tmp_path / "leaked.jsonl").write_text("\n".join(rows))
    asked = request(target, tmp_path / "out", prompts=(f"gsm8k={tmp_path / 'leaked.jsonl'}",))
    with pytest.raises(UserError, match=r"4 prompts .* 13 words .*gsm8k"):
        performed(asked)
    folder = performed(replace(asked, allow=("overlap",)))
    assert "| gsm8k (embedded) | 32 | 4 |" in (folder / "README.md").read_text()


def test_a_prompt_of_a_suite_that_the_target_made_up_is_left_out(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = (NANO.parent.parent / "suites" / "embedded" / "gsm8k" / "test.jsonl").read_text().splitlines()[0]
    made_up = [json.loads(row)["question"], *(f"What is {n} + {n}?" for n in range(6))]
    monkeypatch.setattr(prepare.prompts, "invent", lambda *given: made_up)
    told: list[str] = []
    folder = session.perform(request(target, tmp_path, written=0, invented=7), told.append)
    assert "left out 1 prompts, our own or made up by the target, that occur in a test suite" in told
    assert folder is not None and "made up by the target: 6" in (folder / "README.md").read_text()


def test_a_suites_template_is_no_leak() -> None:
    template = "Please reason step by step, and put your final answer within \\boxed{}."
    texts = [f"How many legs have {count} spiders and one cat?\n{template}" for count in range(5)]
    assert not any(one.num_shared for one in contamination.found(texts, None))


def test_a_test_set_in_a_folder_is_looked_at_too(tmp_path: Path) -> None:
    question = "Nine owls sat on a fence and four of them flew away to hunt mice in the field"
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps({"question": question, "answer": "5 #### 5"}))
    (one,) = [one for one in contamination.found([f"Listen: {question}."], tmp_path) if one.num_shared]
    assert (one.suite, one.num_rows) == ("gsm8k", 1) and one.source.startswith("folder")


def test_later_turns_follow_the_targets_own_answers(target: Path, tmp_path: Path) -> None:
    turns = [["What is 2 + 2?", "And half of it?", "Why?"], ["Name a bird.", "And a fish?"], ["Who are you?"]]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"turns": one}) for one in turns))
    asked = request(target, tmp_path / "out", prompts=(str(tmp_path / "chats.jsonl"),), written=0, sampled=1.0)
    folder = performed(asked)
    work = tmp_path / "out" / "work"
    assert sorted(path.name for path in work.glob("answers*")) == ["answers", "answers-2", "answers-3"]
    models = loading.load(Preset(str(target), {}), [], "cpu", torch.float32)
    first, second, third = (stored([work / name]) for name in ("answers", "answers-2", "answers-3"))
    assert [len(items) for items in (first, second, third)] == [6, 2, 1]
    greedy = {item.prompt_number: item for item in first if item.prompt_number < 3}
    for item in second:
        before = greedy[item.prompt_number]
        answer = models.tokenizer.decode(before.ids[before.prompt_length :], skip_special_tokens=True)
        messages = [
            *map(
                Message,
                ("user", "assistant", "user"),
                (turns[item.prompt_number][0], answer, turns[item.prompt_number][1]),
            )
        ]
        text = chat.render(models.tokenizer, messages, thinking=False)
        assert item.ids[: item.prompt_length].tolist() == models.tokenizer.encode(text, add_special_tokens=False)
        assert item.chat == before.chat and item.is_later_turn and not before.is_later_turn
    assert third[0].chat == greedy[0].chat
    assert "each after the target's own answers: 3" in (folder / "README.md").read_text()
    for seed in range(5):
        kept, apart = session.split([*first, *second, *third], seed)
        assert len(kept) + len(apart) == 9 and not {item.chat for item in kept} & {item.chat for item in apart}
    assert estimate.estimate(replace(asked, out=tmp_path / "new"), lambda _: None).num_answers == 9


def test_what_is_the_same_but_for_numbers_is_counted_apart(tmp_path: Path) -> None:
    asked = "A farmer sells {} eggs a day at {} dollars and gives {} to her sister, so what is left"
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": asked.format(3, 4, 5), "answer": "5 #### 5"}, {"question": "1 " * 30, "answer": "5 #### 5"}]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [asked.format(3, 4, 5), asked.format(6, 70, 8), "2 " * 30, "An entirely different question " * 5]
    (one,) = [one for one in contamination.found(texts, tmp_path) if one.source.startswith("folder")]
    assert (one.num_shared, one.num_alike) == (1, 2)


def test_states_that_are_computed_are_those_that_are_stored(target: Path, trained_once: Path, tmp_path: Path) -> None:
    """Up to bfloat16: decoding reads a token at a time, and here all are read at once."""
    performed(request(target, tmp_path / "fly", on_the_fly=True))
    assert not (tmp_path / "fly" / "work" / "answers").exists()
    models = loading.load(Preset(str(target), {}), [], "cpu", torch.bfloat16)
    items = stored([trained_once / "work" / "answers"])
    again = stored([tmp_path / "fly" / "work" / "tokens"])
    assert [item.ids.tolist() for item in items] == [item.ids.tolist() for item in again]
    computed = ComputedStates(target_of(models.target), drafts.taps(4))([item.ids.tolist() for item in again])
    for item, states in zip(items, computed, strict=True):
        near = torch.nn.functional.cosine_similarity(item.states.float(), states.float(), dim=-1)
        assert states.shape == item.states.shape and near.min() > 0.999
    histories = [
        torch.load(out / "work" / "dflash.pt", weights_only=True)["history"] for out in (trained_once, tmp_path / "fly")
    ]
    assert histories[0][-1]["loss"] == pytest.approx(histories[1][-1]["loss"], rel=0.02)


def test_too_little_disk_says_how_much(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"take up to 0\.0 GB; give --max-disk"):
        performed(request(target, tmp_path, max_disk_gb=0.0))
    monkeypatch.setattr(prepare, "disk_bytes", lambda _: 10**15)
    with pytest.raises(UserError, match="has room for"):
        performed(request(target, tmp_path, max_disk_gb=1e6))


def test_without_a_chat_template_or_a_spare_id_the_remedy_is_named(target: Path, tmp_path: Path) -> None:
    tokenizer = loading.load("nano", [], "cpu", torch.float32).tokenizer
    assert drafts.mask_token(tokenizer, 1024, None) == 1000
    assert drafts.unused_token(tokenizer, 1024) is None
    with pytest.raises(UserError, match="--mask-token"):
        drafts.unused_token(tokenizer, 1000)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|a|>", "<|its_pad|>"]})
    assert drafts.unused_token(tokenizer, 1000) == "<|its_pad|>"
    assert drafts.mask_token(tokenizer, 1000, "<|endoftext|>") == tokenizer.get_vocab()["<|endoftext|>"]
    with pytest.raises(UserError, match="no such token"):
        drafts.mask_token(tokenizer, 1000, "nothing")


def test_a_loss_that_is_no_number_stops_at_the_last_checkpoint(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = session.DFlashObjective.loss
    monkeypatch.setattr(
        session.DFlashObjective,
        "loss",
        lambda self, index, step: original(self, index, step) * (torch.nan if step == 4 else 1.0),
    )
    with pytest.raises(UserError, match=r"the loss is nan at step 4; the last checkpoint before it is .*dflash\.pt"):
        performed(request(target, tmp_path, steps=20))
    weights = torch.load(tmp_path / "work" / "dflash.pt", weights_only=True)["model"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_training_ends_where_nothing_is_gained_for_long() -> None:
    recipe = trainer.DraftRecipe(steps=9, matrix_lr=0.1, other_lr=0.1, patience=2)
    for gains, ended in (([1.0, 1.2], False), ([1.0, 1.2, 1.1, 1.2], True), ([1.0, 1.2, 1.1, 1.3], False)):
        history = [{"accepted": 1.0, "al_pooled": gain} for gain in gains]
        assert trainer._has_ended(history, recipe) is ended


def test_an_estimate_tries_a_little_and_keeps_nothing(target: Path, tmp_path: Path) -> None:
    told = estimate.estimate(request(target, tmp_path / "out", steps=None, epochs=2.0), lambda _: None)
    assert told.num_answers == 30 and told.num_tokens == round(30 * 12 * estimate.LIKELY_SHARE)
    assert told.answers_s > 0 and told.training_s > 0 and told.num_steps >= 1 and told.memory_bytes > 10**7
    assert told.disk_bytes > told.num_tokens * 32 * 3 * 2
    few = request(target, tmp_path / "out", steps=None, epochs=2.0, answer_tokens=12, batch_size=2)
    assert estimate.estimate(few, lambda _: None).disk_bytes < told.disk_bytes
    assert [line.split()[0] for line in str(told).splitlines()] == ["answers", "training", "disk", "memory"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("after", "is_useful"), [(1.31, True), (1.02, False)])
def test_the_command_trains_and_says_how_to_use_it(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after: float,
    is_useful: bool,
) -> None:
    words = f"train --target {target} --out {tmp_path} --written 3 --steps 2 --rate 0.01 --max-new-tokens 6 --sampled 0"
    monkeypatch.setattr("sys.argv", ["dflash-bench", *words.split()])
    measured = iter([1.0, *[after] * 9])
    monkeypatch.setattr(session, "acceptance", lambda *_: Acceptance(next(measured), (), 3, 96))
    transformers_logging.enable_progress_bar()
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert f"tokens per round on 3 held-out prompts: 1.00 before training, {after:.2f} after\n" in out
    assert (f"use it with --target {target} --draft dflash={tmp_path}/dflash\n" in out) == is_useful
    assert ("not worth using" in out) != is_useful
    assert f"how its acceptance grew: {tmp_path}/dflash/training.svg\n" in out
    assert "Loading weights" not in err


def test_what_a_draft_is_worth_is_measured_before_and_after(trained_once: Path) -> None:
    measured = acceptance_of(trained_once / "dflash")
    assert measured is not None and measured.al_before is not None and 1 <= measured.al_before < 1.5
    assert measured.num_prompts >= 1 and measured.al_pooled >= 1


def test_an_estimate_needs_no_other_option_than_its_help_names(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train --target {target} --out {tmp_path / 'out'} --estimate"
    monkeypatch.setattr("sys.argv", ["dflash-bench", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and capsys.readouterr().out.startswith("answers")
    assert not (tmp_path / "out").exists()


def test_answering_ends_once_there_are_enough_tokens_and_goes_on_for_more(target: Path, tmp_path: Path) -> None:
    few = request(target, tmp_path, batch_size=2, sampled=0.0, answer_tokens=30)
    card = (performed(few) / "README.md").read_text()
    parts = sorted((tmp_path / "work" / "answers").glob("answers-*.safetensors"))
    num_tokens = [answers.num_answer_tokens(path) for path in parts]
    assert sum(num_tokens[:-1]) < 30 <= sum(num_tokens) and len(parts) < 12
    num_prompts = sum(int(count) for count in re.findall(r"^  - .*: (\d+)$", card, re.MULTILINE))
    assert num_prompts == 2 * len(parts)
    performed(replace(few, method="eagle3", block_size=None, answer_tokens=60))
    assert len(list((tmp_path / "work" / "answers").glob("answers-*"))) > len(parts)
    # The first draft is trained on as many as before.
    first, again = stored([tmp_path / "work" / "answers"], 30), stored([tmp_path / "work" / "answers"])
    assert len(first) == 2 * len(parts) < len(again)
