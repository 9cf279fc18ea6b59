"""Drafts that leave their head to the target: they draft as if they had it, and can be written in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.backend import open_backend
from dflash_bench.models import inspect, loading
from dflash_bench.models.convert import convert
from dflash_bench.models.formats import TargetShape, load_draft, save_draft
from dflash_bench.models.presets import Preset
from dflash_bench.models.targets import load as load_target
from dflash_bench.training import drafts
from helpers import tiny

SHAPE = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
KINDS = ["dflash", "eagle3"]
FORMATS = {"dflash": "zlab", "eagle3": "safeailab"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model")) / "target"


def made(kind: str, target: Path) -> Any:
    """A draft of every tenth token."""
    model: Any = load_target(target, "cpu", torch.float32)
    counts = torch.zeros(tiny.VOCABULARY, dtype=torch.long)
    counts[::10] = 1
    ids = counts.nonzero().flatten()
    if kind == "dflash":
        return drafts.new_dflash(model, (0, 2), 1, 4, 3, 0, ids)
    return drafts.new_eagle3(model, (1, 0, 2), counts, len(ids), 0, trains_head=False)


@pytest.fixture(params=KINDS)
def slim(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> tuple[str, Path]:
    save_draft(made(request.param, target), tmp_path / "slim", slim=True)
    return request.param, tmp_path / "slim"


def test_it_comes_back_with_the_rows_of_the_targets_head(slim: tuple[str, Path], target: Path) -> None:
    kind, folder = slim
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    models = loading.load(Preset(str(target), {kind: str(folder)}), [kind], "cpu", torch.float32)
    wanted, got = made(kind, target).state_dict(), models.drafts[kind].state_dict()
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, got[name]), name
    assert torch.equal(got["lm_head.weight"], models.target.get_output_embeddings().weight[::10])


def test_it_drafts_only_what_it_may_say_and_answers_stay_exact(slim: tuple[str, Path], target: Path) -> None:
    kind, folder = slim
    models = loading.load(Preset(str(target), {kind: str(folder)}), [kind], "cpu", torch.float32)
    backend = open_backend(models, Preset(str(target), {}), [parse("ar"), parse(kind)], 24)
    prompt = models.tokenizer.encode("Tell me a story.")
    plain, drafted = (backend.generate_ids(label, [prompt])[0] for label in ("ar", kind))
    assert drafted.token_ids == plain.token_ids
    assert drafted.drafted_ids and all(token % 10 == 0 for token in drafted.drafted_ids)


def test_inspect_says_whose_the_head_is(slim: tuple[str, Path], target: Path) -> None:
    _, folder = slim
    shown = inspect.inspect(str(folder), str(target))
    assert not shown.own_head and not shown.problems and shown.draft_vocab_size == 103
    assert "head           the target's" in inspect.text(shown)


GOALS = [("dflash", "speculators"), ("eagle3", "speculators"), ("eagle3", "safeailab")]


@pytest.mark.parametrize(("kind", "goal"), GOALS)
def test_it_is_written_in_full_with_the_target(kind: str, goal: str, target: Path, tmp_path: Path) -> None:
    draft = made(kind, target)
    save_draft(draft, tmp_path / "slim", slim=True)
    with pytest.raises(UserError, match="--target"):
        convert(str(tmp_path / "slim"), tmp_path / "full", goal, None)
    convert(str(tmp_path / "slim"), tmp_path / "full", goal, str(target))
    assert "target_head" not in json.loads((tmp_path / "full" / "config.json").read_text())
    full = load_draft(tmp_path / "full", SHAPE, torch.float32, "cpu").state_dict()
    assert all(torch.equal(tensor, full[name]) for name, tensor in draft.state_dict().items())


def test_in_eight_bits_its_head_stays_the_targets(slim: tuple[str, Path], target: Path, tmp_path: Path) -> None:
    kind, folder = slim
    convert(str(folder), tmp_path / "small", FORMATS[kind], None, "int8")
    names = load_file(tmp_path / "small" / "model.safetensors").keys()
    assert not any(name.startswith("lm_head") for name in names) and any(name.endswith("packed") for name in names)
    models = loading.load(Preset(str(target), {kind: str(tmp_path / "small")}), [kind], "cpu", torch.float32)
    assert torch.equal(models.drafts[kind].lm_head.weight, models.target.get_output_embeddings().weight[::10])
    backend = open_backend(models, Preset(str(target), {}), [parse("ar"), parse(kind)], 24)
    plain, drafted = (backend.generate_ids(label, [[5, 6, 7, 8]])[0] for label in ("ar", kind))
    assert drafted.token_ids == plain.token_ids and drafted.drafted_ids


def test_without_the_mark_a_missing_head_is_a_missing_tensor(target: Path, tmp_path: Path) -> None:
    save_draft(made("eagle3", target), tmp_path / "slim", slim=True)
    path = tmp_path / "slim" / "config.json"
    config = json.loads(path.read_text())
    del config["target_head"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"missing tensor lm_head\.weight"):
        load_draft(tmp_path / "slim", SHAPE, torch.float32, "cpu")


def test_a_head_that_is_left_out_needs_its_map(slim: tuple[str, Path], target: Path) -> None:
    kind, folder = slim
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="tensor d2t, its tokens, is missing"):
        loading.load(Preset(str(target), {kind: str(folder)}), [kind], "cpu", torch.float32)
