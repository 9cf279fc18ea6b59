"""Vocabularies padded to different sizes: drafts draft what they did with equal ones, and nothing that is padding."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import dflash_bench as db
from dflash_bench.models import presets, targets
from dflash_bench.models.convert import convert
from dflash_bench.models.formats import TargetShape, fit, load_draft, medusa
from dflash_bench.models.inspect import inspect
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import main
from helpers.golden_drafts import CASES, assert_drafts_as_published, golden

NANO = presets.NANO
PROMPTS = [[5, 7, 100], list(range(200, 224)), [31, 4, 60, 6, 77, 8, 90]]
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
LOUD = 100.0
"""Beside any other row of a head, one of the rows that are this large has the highest logit."""


def repadded(folder: Path, to: Path, extra: int, quiet: int = 0) -> Path:
    """Copy a checkpoint with `extra` rows more, or fewer, in each table of the vocabulary: zeros, then loud ones."""
    shutil.copytree(folder, to)
    raw = (folder / "config.json").read_text()
    sizes = {int(size) for size in re.findall(r'vocab_size": (\d+)', raw)} or {tiny.VOCABULARY}
    sizes = {max(sizes)} if extra < 0 else sizes
    (weights,) = to.glob("*.safetensors")
    tensors = load_file(weights)
    if extra < 0:
        tensors.pop("t2d", None)
    for name, tensor in tensors.items():
        if tensor.ndim and len(tensor) in sizes and "mlp" not in name:
            rows = LOUD * torch.randn(max(extra, 0), *tensor.shape[1:], generator=torch.Generator().manual_seed(0))
            rows[:quiet] = 0
            if name in ("d2t", "t2d"):
                # New ids of the draft are the new ones of the target.
                rows.fill_(max(sizes) - min(sizes) if name == "d2t" else 1)
            tensors[name] = torch.cat([tensor, rows.to(tensor.dtype)])[: len(tensor) + extra].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    changed = re.sub(
        r'(vocab_size": )(\d+)', lambda found: f"{found[1]}{int(found[2]) + extra * (int(found[2]) in sizes)}", raw
    )
    (to / "config.json").write_text(changed)
    return to


def with_words(folder: Path, num_tokens: int) -> Path:
    words = Tokenizer(WordLevel({"?": 0, "a": 1, **{f"w{i}": i for i in range(2, num_tokens)}}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


METHODS = {
    "deepspec-dspark-vanilla": "dflash",
    "specforge-dspark-gated": "dflash",
    "speculators-dspark": "dflash",
    "speculators-xpress": "dflash",
    "specforge-domino-shifted": "dflash",
    "zlab-dflash2": "dflash",
    "specforge-p-eagle": "p-eagle:5",
    "mtp-qwen3.5-hybrid": "mtp:3",
}


@each(
    ("name", "of_draft", "of_target"),
    [
        *((name, 64, 31) for name in METHODS),
        ("deepspec-dspark-vanilla", 0, 31),
        ("deepspec-dspark-vanilla", 64, 0),
        ("nvidia-lilicorr", 64, 0),
    ],
)
def test_padding_that_no_text_uses_changes_no_round(name: str, of_draft: int, of_target: int, tmp_path: Path) -> None:
    """The padding of a draft is the likeliest token everywhere, if it is not left out."""
    case = CASES / name
    home = (case / golden(name)["target"]).resolve()
    num_tokens = targets.shape_of(home).vocab_size
    target = with_words(repadded(home, tmp_path / "target", of_target, quiet=of_target), num_tokens)
    draft = None
    if (case / "draft").exists():
        draft = repadded(case / "draft", tmp_path / "draft", of_draft, quiet=of_target)
        seen = inspect(str(draft), str(target))
        assert seen.problems == () and f"for {num_tokens} tokens:" in seen.notes[-1]
    assert_drafts_as_published(name, METHODS.get(name, "dflash"), draft, target)


# On nano, whose 1000 tokens lie in 1024 rows, with the kinds of drafts that no golden case has.


@cache
def rounds_of(target: Path, method: str, draft: Path) -> list[Any]:
    with db.Engine(target=target, drafts={method: draft}, dtype="float32") as engine:
        answer = engine.generate(QUESTION, method=method, max_new_tokens=40)
        assert answer.token_ids == engine.generate(QUESTION, method="ar", max_new_tokens=40).token_ids
    return [(step.drafted, step.accepted) for step in answer.rounds]


@each(("of_draft", "of_target"), [(-24, 0), (0, 40), (64, 0)])
@each("method", ["eagle3", "medusa"])
def test_nanos_drafts_draft_the_same(method: str, of_draft: int, of_target: int, tmp_path: Path) -> None:
    target = repadded(NANO / "target", tmp_path / "target", of_target, quiet=of_target)
    draft = repadded(NANO / method, tmp_path / "draft", of_draft, quiet=of_target)
    expected = rounds_of(NANO / "target", method, NANO / method)
    assert rounds_of(target, method, draft) == expected
    assert sum(accepted for _, accepted in expected) > 5


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose target says what is no token, as often as not."""
    folder = tiny.build(tmp_path_factory.mktemp("model"))
    tensors = load_file(folder / "target/model.safetensors")
    tensors["model.embed_tokens.weight"][1000:] *= 3
    save_file(tensors, folder / "target/model.safetensors", metadata={"format": "pt"})
    for name in ("dflash", "eagle3"):
        convert(str(folder / name), folder / f"{name}-own", "speculators", str(folder / "target"))
    heads = MedusaHeads(MedusaConfig(tiny.HIDDEN, tiny.VOCABULARY, 2)).eval()
    medusa.save(heads, folder / "medusa-own", "x")
    return folder


@each("of_draft", [-24, 64])
@each("method", ["dflash", "eagle3", "medusa", "dflash:rule=rejection"])
def test_a_text_of_padding_is_the_plain_one(method: str, of_draft: int, wordy: Path, tmp_path: Path) -> None:
    kind = method.partition(":")[0]
    draft = repadded(wordy / f"{kind}-own", tmp_path / "draft", of_draft)
    with db.Engine(target=wordy / "target", drafts={kind: draft}, dtype="float32") as engine:
        for prompt in PROMPTS:
            settings: dict[str, Any] = {"temperature": 1.0, "seed": 1} if "rejection" in method else {}
            answer = engine.generate(prompt, method=method, max_new_tokens=32, **settings)
            if not settings:
                assert answer.token_ids == engine.generate(prompt, method="ar", max_new_tokens=32).token_ids
                assert max(answer.token_ids) >= 1000
            drafted = [token for step in answer.rounds for token in step.drafted]
            assert drafted and max(drafted) < (1000 if of_draft < 0 else tiny.VOCABULARY)


# Refusals and remarks.


def test_a_vocabulary_that_lacks_tokens_is_refused_and_ends_a_run(
    wordy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = repadded(wordy / "dflash-own", tmp_path / "draft", -25)
    (problem,) = inspect(str(draft), str(wordy / "target")).problems
    assert problem.code == "vocabulary" and "1000 are tokens" in problem.what and problem.remedy
    words = ["--suite", "gsm8k", "--limit", 1, "--method", "dflash", "--draft", f"dflash={draft}"]
    assert main(monkeypatch, "run", "--model", wordy, *words, "--out", tmp_path / "run") == 2
    assert "vocabulary of 999, but the target's is 1024" in capsys.readouterr().err


@each(("num_rows", "fits"), [(999, False), (1000, True), (1024, True), (5096, True), (5121, False)])
def test_rows_of_its_own_must_hold_all_tokens(num_rows: int, fits: bool) -> None:
    known = TargetShape(32, 1024, 4, num_tokens=1000)
    assert ([*fit.other_vocabulary(num_rows, known)] == []) == fits


def test_without_a_tokenizer_only_equal_sizes_are_sound() -> None:
    unknown = TargetShape(32, 1024, 4)
    assert [*fit.other_vocabulary(1024, unknown)] == []
    (problem,) = fit.other_vocabulary(1088, unknown)
    assert "no tokenizer" in problem.what and "tokenizer" in problem.remedy


def test_a_draft_without_rows_only_states_a_size(wordy: Path, tmp_path: Path) -> None:
    """Its mask may be a row of the target's padding, behind what it states."""
    draft = repadded(wordy / "dflash", tmp_path / "draft", -24)
    config = json.loads((draft / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 1001
    (draft / "config.json").write_text(json.dumps(config))
    assert inspect(str(draft)).problems == inspect(str(draft), str(wordy / "target")).problems == ()
    with db.Engine(target=wordy / "target", drafts={"dflash": draft}, dtype="float32") as engine:
        assert engine.generate(PROMPTS[0], method="dflash", max_new_tokens=8).rounds


def test_what_is_converted_has_the_targets_padding(wordy: Path, tmp_path: Path) -> None:
    draft = repadded(wordy / "eagle3-own", tmp_path / "draft", 64)
    convert(str(draft), tmp_path / "out", "safeailab", str(wordy / "target"))
    assert inspect(str(tmp_path / "out"), str(wordy / "target")).problems == ()
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == tiny.VOCABULARY


@pytest.mark.parametrize(("of_draft", "num_ids"), [(-24, 1000), (64, 1024)])
def test_a_head_has_no_rows_but_those_that_both_have(of_draft: int, num_ids: int, wordy: Path, tmp_path: Path) -> None:
    known = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS, num_tokens=1000)
    folder = repadded(wordy / "dflash-own", tmp_path / "draft", of_draft)
    draft: Any = load_draft(folder, known, torch.float32, "cpu")
    assert len(draft.lm_head.weight) == num_ids
    assert torch.equal(draft.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"][:num_ids])
    assert len(draft.embed_tokens.weight) == 1024 and not draft.embed_tokens.weight[1000 + max(of_draft, 24) :].any()
