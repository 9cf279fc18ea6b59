"""MTP heads in files: in the target's own checkpoint or apart, complete or refused by name, counted and described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench import api as db
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.models import hub, loading, mtp_heads, presets, targets
from dflash_bench.models.formats import TargetShape
from dflash_bench.models.inspect import inspect, text
from dflash_bench.models.memory import demand_of
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import main
from helpers.golden_drafts import CASES
from helpers.tiny_architectures import made

GOLDEN = CASES / "mtp-qwen3.5-hybrid/target"
SHAPE = TargetShape(48, 320, 4)


def random_heads(config: Any, dtype: torch.dtype = torch.float32) -> MTPDraft:
    draft = MTPDraft(MTPConfig.of(config)).to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return draft


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "target")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# Readable files.


def test_heads_in_the_targets_checkpoint_are_its_tensors() -> None:
    draft = mtp_heads.load(GOLDEN, SHAPE, torch.float32, "cpu")
    stored = {name: tensor for name, tensor in load_file(GOLDEN / "model.safetensors").items() if "mtp." in name}
    assert {f"mtp.{name}" for name in draft.state_dict()} == stored.keys() and len(stored) == 15
    assert all(torch.equal(tensor, stored[f"mtp.{name}"].float()) for name, tensor in draft.state_dict().items())
    assert draft.config.target_layer_ids == (3,)


@each("kind", ["qwen3.5", "qwen3.5, experts", "qwen3-next", "mixture of experts"])
def test_heads_apart_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config = made(kind).config
    draft = random_heads(config)
    mtp_heads.save(draft, tmp_path / "heads", config.to_dict())
    again = mtp_heads.load(tmp_path / "heads", TargetShape(32, 97, 4), torch.float32, "cpu")
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.has_experts == draft.has_experts == (kind != "qwen3.5")


@pytest.mark.parametrize("kind", ["qwen3.5, experts", "qwen3-next"])
def test_experts_that_are_stored_one_by_one_are_joined(kind: str, tmp_path: Path) -> None:
    config = made(kind).config
    draft = random_heads(config)
    mtp_heads.save(draft, tmp_path, config.to_dict())

    def split(tensors: dict[str, Tensor]) -> None:
        name = "mtp.layers.0.mlp.experts"
        wide, down = tensors.pop(f"{name}.gate_up_proj"), tensors.pop(f"{name}.down_proj")
        for number, (both, narrow) in enumerate(zip(wide, down, strict=True)):
            gate, up = both.chunk(2)
            for part, tensor in (("gate", gate), ("up", up), ("down", narrow)):
                tensors[f"{name}.{number}.{part}_proj.weight"] = tensor.clone()

    edit(tmp_path, split)
    again = mtp_heads.load(tmp_path, TargetShape(32, 97, 4), torch.float32, "cpu")
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    edit(tmp_path, lambda tensors: tensors.pop("mtp.layers.0.mlp.experts.2.up_proj.weight"))
    with pytest.raises(UserError, match=r"mtp\.layers\.0\.mlp\.experts\.\* lacks a part of some expert"):
        mtp_heads.read(tmp_path)


def test_a_dense_layer_in_a_model_of_experts_is_read_as_one(tmp_path: Path) -> None:
    config = made("qwen3-next").config
    draft = MTPDraft(MTPConfig.of(config, is_dense=True)).to_empty(device="cpu")
    mtp_heads.save(draft, tmp_path, config.to_dict())
    assert not MTPDraft(mtp_heads.read(tmp_path, headers_only=True)[0]).has_experts


def test_a_target_that_transformers_knows_without_heads_may_bring_some(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path) / "target"
    draft = random_heads(targets.config_of(folder))
    edit(folder, lambda tensors: tensors.update({f"mtp.{name}": t for name, t in draft.state_dict().items()}))
    models = loading.load(presets.combine(None, str(folder), {}), ["mtp"], "cpu", torch.float32)
    assert torch.equal(models.drafts["mtp"].fc.weight, draft.fc.weight)
    assert models.revisions["mtp"] == models.revisions["target"]


def test_heads_are_looked_for_in_the_target_unless_they_are_given() -> None:
    chosen = presets.combine(None, "org/name", {"dflash": "org/draft"})
    assert (chosen.reference("mtp"), chosen.reference("dflash")) == ("org/name", "org/draft")
    assert presets.combine(None, "org/name", {"mtp": "org/heads"}).reference("mtp") == "org/heads"
    with pytest.raises(UserError, match="comes with no draft for mtp@a"):
        presets.require_drafts(chosen, ["mtp@a"])


def test_heads_of_a_target_from_the_hub_are_in_its_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_snapshot", lambda name, revision, patterns: GOLDEN)
    assert loading.fetch("mtp", "org/name").folder == GOLDEN


# Unreadable files.


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no heads": (
        lambda f: edit(f, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")]),
        r"has no MTP heads: expected tensors mtp\.\* .* or model\.layers\.4\.eh_proj\.weight; .*--draft mtp=PATH",
    ),
    "half a head": (
        lambda f: edit(f, lambda t: t.pop("mtp.norm.weight")),
        r"missing tensor mtp\.norm\.weight; copy the checkpoint",
    ),
    "a tensor too many": (
        lambda f: edit(f, lambda t: t.update({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(64, 48)})),
        r"surplus tensor mtp\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "another shape": (
        lambda f: edit(f, lambda t: t.update({"mtp.fc.weight": torch.zeros(48, 48)})),
        r"mtp\.fc\.weight is \[48, 48\], config\.json says \[48, 96\]",
    ),
    "integers": (
        lambda f: edit(f, lambda t: t.update({"mtp.fc.weight": torch.zeros(48, 96, dtype=torch.int8)})),
        "quantised heads are not supported",
    ),
    "NaN": (lambda f: edit(f, lambda t: t["mtp.fc.weight"].fill_(torch.nan)), r"mtp\.fc\.weight holds NaN or"),
    "two layers": (lambda f: edit_config(f, mtp_num_hidden_layers=2), "MTP heads of 2 layers are not supported"),
    "an embedding of its own": (
        lambda f: edit_config(f, mtp_use_dedicated_embeddings=True),
        "with an embedding of their own are not supported",
    ),
    "another kind": (lambda f: edit_config(f, model_type="gemma2"), "of a gemma2 target are not supported; only those"),
    "another width": (lambda f: edit_config(f, num_attention_heads=2), r"o_proj\.weight is \[48, 64\], config"),
}


@each("what", WRONG)
def test_heads_that_cannot_be_are_refused_in_one_line(what: str, golden: Path) -> None:
    change, message = WRONG[what]
    change(golden)
    with pytest.raises(UserError, match=message) as told:
        mtp_heads.load(golden, SHAPE, torch.float32, "cpu")
    assert "\n" not in str(told.value) and str(golden) in str(told.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TargetShape(64, 320, 4), "hidden size 48, but the target's is 64; use a draft made for this target"),
        (TargetShape(48, 5000, 4), "vocabulary of 320, but the target's is 5000"),
        (TargetShape(48, 320, 5), "number of target layers 4, but the target's is 5"),
    ],
)
def test_heads_for_another_target_are_refused(target: TargetShape, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mtp_heads.load(GOLDEN, target, torch.float32, "cpu")


def test_they_are_no_draft_of_another_kind(tmp_path: Path) -> None:
    mtp_heads.save(random_heads(targets.config_of(GOLDEN)), tmp_path, json.loads((GOLDEN / "config.json").read_text()))
    with pytest.raises(UserError, match=r"holds MTP heads \(tensor mtp\..*\); give it as --draft mtp=PATH"):
        loading.fetch("dflash", str(tmp_path))


def test_a_target_without_heads_ends_a_run_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/target").symlink_to(presets.NANO / "target")
    words = ["--suite", "gsm8k", "--limit", 1, "--method", "mtp", "--out", tmp_path / "run"]
    assert main(monkeypatch, "run", "--model", tmp_path / "model", *words) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has no MTP heads: expected tensors mtp.*" in told and told.endswith("--draft mtp=PATH")
    assert not (tmp_path / "run").exists()


# Reports about heads, and their memory.


def test_inspect_says_whether_a_target_has_heads(golden: Path) -> None:
    assert "note           it has MTP heads of its own, tensors mtp.*: --method mtp" in text(inspect(str(golden)))
    WRONG["no heads"][0](golden)
    assert "its config.json names MTP heads, but there are no tensors mtp.*" in text(inspect(str(golden)))
    assert "MTP" not in text(inspect(str(CASES / "_targets/small")))


def test_inspect_describes_heads_that_are_apart(tmp_path: Path) -> None:
    mtp_heads.save(random_heads(targets.config_of(GOLDEN)), tmp_path, json.loads((GOLDEN / "config.json").read_text()))
    seen = inspect(str(tmp_path), str(CASES / "_targets/small"))
    assert (seen.format, seen.method, seen.used_by) == ("MTP heads (qwen3_5_text)", "mtp", ("mtp",))
    assert (seen.own_embedding, seen.own_head) == (False, False)
    assert [problem.code for problem in seen.problems] == ["unreadable_tokenizer"]
    assert seen.layers == "1 of 48/64, 4 heads on 2 of 16" and "trained for" in text(seen)


def test_memory_counts_heads_where_a_method_drafts_with_them(golden: Path) -> None:
    plain = demand_of(golden, {}, [parse("ar")], torch.float32)
    drafting = demand_of(golden, {"mtp": golden}, [parse("ar"), parse("mtp:2")], torch.float32)
    model = targets.load(golden, "cpu", torch.float32)
    assert plain.target.weights_bytes == sum(weight.nbytes for weight in model.parameters())
    assert drafting.target == plain.target
    draft = mtp_heads.load(golden, SHAPE, torch.float32, "cpu")
    assert drafting.drafts["mtp"].weights_bytes == sum(weight.nbytes for weight in draft.parameters())
    held = drafting.held(50)
    # The token after the last, two that are drafted, and two places to draft in; keys and values of two heads of 16.
    assert held.draft_cache_bytes == (50 + 1 + 2 + 2) * 2 * 2 * 16 * 4


def test_a_run_measures_it_beside_other_drafts(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "model")
    config = json.loads((model / "target/config.json").read_text())
    mtp_heads.save(random_heads(targets.config_of(model / "target")), model / "mtp", config)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(4)))
    run = db.run(
        model=model,
        prompts=prompts,
        methods=["dflash", "mtp", "mtp:5", "eagle3"],
        max_new_tokens=12,
        concurrency=(1, 3),
        out=tmp_path / "run",
    )
    assert set(run.answers["method"]) == {"ar", "dflash", "mtp", "mtp:5", "eagle3"}
    assert set(run.answers["exactness"].dropna()) <= {"exact", "near_tie"}
    assert set(run.answers["audit"]) <= {"exact", "near_tie"}
    identity = run.document.results.info.to_json()["identity"]
    assert identity["methods"]["mtp"]["num_drafts"] == 3 and identity["drafts"]["mtp"]["name"] == "mtp"
