"""From a model's name to its weights: what is damaged, missing or unknown is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from toy import tiny
from transformers import PreTrainedTokenizerFast

from dflash_bench.errors import UserError
from dflash_bench.models import loading
from dflash_bench.models.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.formats import save_draft


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `preset` wants it: target/ and dflash/."""
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3").save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "target")
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=97,
        block_size=4, mask_token_id=96, target_layer_ids=(1, 2), num_target_layers=6,
    )  # fmt: skip
    draft = DFlashDraft(config)
    initialise(draft, 0)
    save_draft(draft, folder / "dflash")
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for path in whole.rglob("*"):
        if path.is_file():
            copied = tmp_path / path.relative_to(whole)
            copied.parent.mkdir(exist_ok=True)
            copied.write_bytes(path.read_bytes())
    return tmp_path


def load(folder: Path | str, *methods: str) -> loading.Models:
    return loading.load(str(folder), list(methods), "cpu", torch.float32)


def test_a_folder_is_a_model_with_the_drafts_beside_its_target(whole: Path) -> None:
    chosen = loading.preset(str(whole))
    assert set(chosen.drafts) == {"dflash"}
    models = load(whole, "dflash")
    weights = tiny("qwen3").state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in models.target.state_dict().items())
    assert isinstance(models.drafts["dflash"], DFlashDraft)
    assert models.tokenizer.encode("a") == [2]


def test_only_the_drafts_that_are_asked_for_are_loaded(whole: Path) -> None:
    assert load(whole).drafts == {}


def test_revisions_say_which_weights_these_were(model: Path) -> None:
    before = load(model, "dflash").revisions
    assert set(before) == {"target", "dflash"}
    path = model / "dflash" / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"] += 1
    save_file(tensors, path)
    after = load(model, "dflash").revisions
    assert after["target"] == before["target"] and after["dflash"] != before["dflash"]


def test_an_unknown_model_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"unknown model 'qwen9'; known: a folder with .*, nano, qwen3-4b, qwen3-8b"):
        load("qwen9")


def test_a_folder_that_is_no_model_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no model: it needs target/config\.json"):
        load(tmp_path)


def test_an_unknown_draft_lists_the_known(whole: Path) -> None:
    with pytest.raises(UserError, match=r"'eagle3'; known: dflash$"):
        load(whole, "eagle3")


def test_a_preset_without_a_draft_for_the_method_lists_what_it_has() -> None:
    with pytest.raises(UserError, match="unknown draft of model qwen3-4b: 'eagle3'; known: dflash"):
        load("qwen3-4b", "eagle3")


def test_a_package_without_its_weights_says_so(whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = loading.Preset(str(whole / "target"), {"dflash": str(tmp_path / "dflash")})
    monkeypatch.setitem(loading.MODELS, "nano", gone)
    with pytest.raises(UserError, match=r"dflash is missing"):
        load("nano", "dflash")


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_preset_without_a_network_says_what_to_do(
    offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    original = huggingface_hub.snapshot_download

    def cut_off(reference: str, **options: Any) -> str:
        # Nothing listens on this port; an empty cache has nothing to fall back to.
        endpoint = "http://127.0.0.1:9"
        return str(original(reference, cache_dir=tmp_path, endpoint=endpoint, etag_timeout=1, **options))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cut_off)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(
        UserError, match=r"cannot get Qwen/Qwen3-4B from the hub .*; without a network use --model nano"
    ):
        load("qwen3-4b")


def halve(name: str) -> Callable[[Path], None]:
    def damage(target: Path) -> None:
        content = (target / name).read_bytes()
        (target / name).write_bytes(content[: len(content) // 2])

    return damage


def foreign(name: str) -> Callable[[Path], None]:
    return lambda target: (target / name).write_bytes(b"\x80\x04\x95 this is something else") and None


def without(name: str) -> Callable[[Path], None]:
    return lambda target: (target / name).unlink()


def configured(**changes: Any) -> Callable[[Path], None]:
    def damage(target: Path) -> None:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def without_a_tensor(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (halve("model.safetensors"), "weights are truncated or not safetensors"),
    "foreign weights": (foreign("model.safetensors"), "weights are truncated or not safetensors"),
    "no weights": (without("model.safetensors"), "cannot load a causal language model"),
    "a missing tensor": (without_a_tensor, r"model\.layers\.3\.mlp\.up_proj\.weight is missing or not as config"),
    "another size": (configured(intermediate_size=40), r"mlp\.\w+\.weight is missing or not as config\.json says"),
    "another depth": (configured(num_hidden_layers=7), "cannot load a causal language model"),
    "a size that is no number": (configured(num_attention_heads="four"), "cannot load a causal language model"),
    "an unknown architecture": (configured(model_type="foo"), "cannot load a causal language model"),
    "an encoder-decoder": (configured(model_type="t5"), "cannot load a causal language model"),
    "a truncated config": (halve("config.json"), "config.json is not valid JSON"),
    "a foreign config": (foreign("config.json"), "config.json is not text"),
    "a config that is a list": (lambda target: (target / "config.json").write_text("[]") and None, "no JSON object"),
    "a truncated tokenizer": (halve("tokenizer.json"), "cannot load a causal language model"),
    "a foreign tokenizer": (foreign("tokenizer.json"), "cannot load a causal language model"),
    "no tokenizer": (without("tokenizer.json"), "cannot load a causal language model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_target_is_refused_in_one_line(damage: str, model: Path) -> None:
    change, message = DAMAGES[damage]
    change(model / "target")
    with pytest.raises(UserError, match=message) as caught:
        load(model)
    assert "\n" not in str(caught.value)


def test_a_damaged_draft_is_refused(model: Path) -> None:
    halve("model.safetensors")(model / "dflash")
    with pytest.raises(UserError, match="truncated or not a safetensors file"):
        load(model, "dflash")


def test_a_draft_for_another_target_is_refused(model: Path) -> None:
    config = json.loads((model / "dflash" / "config.json").read_text())
    (model / "dflash" / "config.json").write_text(json.dumps({**config, "vocab_size": 96}))
    with pytest.raises(UserError, match="vocabulary of 96, the target's is 97"):
        load(model, "dflash")


def test_every_preset_names_folders_that_are_packaged_or_ids_of_the_hub() -> None:
    for preset in loading.MODELS.values():
        for reference in (preset.target, *preset.drafts.values()):
            assert Path(reference).parent == loading.NANO or reference.count("/") == 1
