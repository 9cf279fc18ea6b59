"""The list of models: what of them is here, and what this machine can hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_bench.core import environment
from dflash_bench.engine.selection import expected_forward, name_of, target_of
from dflash_bench.models import catalogue, hub, loading, presets, random_weights
from dflash_bench.models.catalogue import Machine, fits
from dflash_bench.models.presets import Preset
from helpers.each import each
from helpers.fake_backend import main
from helpers.tiny_architectures import made

EIGHT = Preset("a/b", {}, billions=8.2)
GB = 10**9


@pytest.fixture(autouse=True)
def machine_(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "memory_bytes", lambda: (64 * GB, [24 * GB]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(presets.HOME, str(tmp_path / "home"))
    presets.table.cache_clear()


@each(
    ("memory", "gpus", "expected"),
    [
        (64, [24], (True, "needs about 16 GB, has 24 GB")),
        (64, [16], (False, "needs about 16 GB, has 16 GB: too large")),
        (64, [12, 12], (True, "needs about 16 GB, 2 GPUs have 24 GB: --device-map auto")),
        (64, [8, 8], (False, "needs about 16 GB, has 8 GB: too large")),
        (64, [], (True, "needs about 33 GB, has 64 GB")),
        (32, [], (False, "needs about 33 GB, has 32 GB: too large")),
        (None, [], (None, "needs about 33 GB")),
    ],
)
def test_weights_are_held_in_bfloat16_on_gpus_and_in_float32_beside_the_cpu(
    memory: int | None, gpus: list[int], expected: tuple[bool | None, str]
) -> None:
    machine = Machine(memory and memory * GB, tuple(gpu * GB for gpu in gpus))
    assert fits(EIGHT, machine) == expected


def test_of_a_target_of_unknown_size_nothing_is_said() -> None:
    assert fits(Preset("a/b", {}), Machine(GB, ())) == (None, "size unknown")


def test_gpus_that_hold_a_target_with_a_draft_and_a_judge() -> None:
    held = {(count, size): catalogue.copies_held(EIGHT, count, size) for count in (1, 2) for size in (16, 24, 48)}
    # 16.4 GB a copy; 4.5 GB of draft and caches on the first GPU, a tenth of which stays free.
    assert held == {(1, 16): 0, (1, 24): 1, (1, 48): 2, (2, 16): 1, (2, 24): 2, (2, 48): 2}
    assert catalogue.copies_held(Preset("a/b", {}), 8, 141) is None


def test_the_list_names_every_model_and_draft_in_100_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "models") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    blocks = out.split("\n\n")
    assert [block.partition(":")[0] for block in blocks[:-1]] == list(presets.table())
    assert blocks[0].splitlines()[1:] == [
        "  * target          in this package",
        "  * dflash          in this package",
        "  * eagle3          in this package, 7 tokens per round",
        "  * draft-model     in this package",
        "  * medusa          in this package",
        "  * block-diffusion in this package",
        "  * dflash@2        in this package, DFlash 2",
        "  * dflash@dspark   in this package, DSpark",
        "  * mtp             in this package",
    ]
    assert blocks[1].splitlines()[1] == "    target   'dflash-bench fetch smollm2' gets it (93 MB)"
    assert blocks[1].splitlines()[2].startswith("  * dflash   in this package")
    assert blocks[3].splitlines()[:3] == [
        "qwen3-8b: needs about 16 GB, has 24 GB",
        "    target             Qwen/Qwen3-8B",
        "    dflash             z-lab/Qwen3-8B-DFlash-b16, 15 tokens per round, trained with thinking off",
    ]
    assert "    dflash@2           RedHatAI/Qwen3-8B-speculator.dflash2, DFlash 2\n" in blocks[3]
    assert "    target  Qwen/Qwen3.5-9B, thinking on\n" in out
    assert "lightseekorg/kimi-k3-dflash2, DFlash 2, 7 tokens per round, not supported: MLA\n" in out
    assert "here (1 x GPU, bfloat16)" in blocks[-1]


def test_what_is_in_the_cache_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "models--Qwen--Qwen3-8B"
    snapshot = stored / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text("abc")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    assert main(monkeypatch, "models") == 0
    assert "  * target             Qwen/Qwen3-8B\n    dflash             z-lab/" in capsys.readouterr().out


def test_the_json_of_the_list_has_the_promised_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "models", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["model"] for one in listed] == list(presets.table())
    promised = (
        "model target drafts kinds revision num_drafts thinking trained_thinking unsupported max_new_tokens billions "
        "source cached fits needs"
    )
    assert {tuple(one) for one in listed} == {tuple(promised.split())}
    assert listed[3]["kinds"]["dflash@dspark"] == "dspark" and listed[3]["kinds"]["dflash"] == "dflash"
    assert [one["cached"] for one in listed[:3]] == [
        dict.fromkeys(("target", *presets.preset("nano").drafts), True),
        {"target": False} | dict.fromkeys(presets.preset("smollm2").drafts, True),
        dict.fromkeys(("target", *presets.preset("qwen3-4b").drafts), False),
    ]


def test_the_forward_of_a_model_is_what_loading_would_choose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name in ("nano", "qwen3-coder-next", "gemma-4-26b-a4b-it", "deepseek-v4-flash", "kimi-k3"):
        assert main(monkeypatch, "models", name, "--json") == 0
        (listed,) = json.loads(capsys.readouterr().out)
        found[name] = listed["forward"]
    assert found["nano"] == {"engine": "native", "files": ["native.py"], "reason": None, "kernels": True}
    assert found["qwen3-coder-next"]["files"] == ["native.py", "delta.py", "experts.py"]
    assert not found["qwen3-coder-next"]["kernels"]
    models = loading.load("nano", [], "cpu", torch.float32)
    assert name_of(target_of(models.target, kernels="torch")) == found["nano"]["engine"]
    engine, reason = (found["gemma-4-26b-a4b-it"][key] for key in ("engine", "reason"))
    target = target_of(made("gemma 4"))
    assert (name_of(target), target.fallback) == (engine, reason)
    assert found["deepseek-v4-flash"]["engine"] is None and "compressed" in found["deepseek-v4-flash"]["reason"]
    assert found["kimi-k3"]["engine"] is None and "kimi_k3" in found["kimi-k3"]["reason"]
    assert main(monkeypatch, "models", "gemma-4-26b-a4b-it") == 0
    assert f"the engine's own {reason}." in " ".join(capsys.readouterr().out.split())
    assert main(monkeypatch, "models", "nano", "--kind", "dflash") == 2
    assert main(monkeypatch, "models", "nan") == 2
    assert "unknown model 'nan' (did you mean 'nano'?)" in capsys.readouterr().err


def test_a_config_on_this_disk_says_what_its_architecture_does(tmp_path: Path) -> None:
    """Its text part alone could be computed, but transformers has no class for the whole."""
    known = random_weights.expected_config(presets.preset("kimi-k2.5"))
    known.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    here = replace(presets.preset("kimi-k2.5"), target=str(tmp_path))
    expected = expected_forward(random_weights.expected_config(here))
    assert expected == expected_forward(known) and expected.engine is None


def test_the_architecture_of_every_target_is_known() -> None:
    for preset in presets.table().values():
        known = hub.is_here(preset.target), preset.target in random_weights.table(), preset.architecture is not None
        assert sum(known) == 1, preset.target


def test_only_models_with_a_draft_of_a_kind_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "models", "--kind", "jetspec", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"qwen3-8b", "step-3.7-flash"} <= {one["model"] for one in listed} and len(listed) < len(presets.table())
    assert all("jetspec" in one["kinds"].values() for one in listed)
    assert main(monkeypatch, "models", "--kind", "dflash") == 0
    assert capsys.readouterr().out.startswith("nano: ")
    assert main(monkeypatch, "models", "--kind", "jetspeck") == 2
    assert (
        "unknown kind of draft 'jetspeck' (did you mean 'jetspec'?); known: block-diffusion, dflare, dflash, dflash2"
        in (capsys.readouterr().err)
    )


def test_the_machine_is_what_the_environment_says() -> None:
    assert catalogue.machine() == Machine(64 * GB, (24 * GB,))
