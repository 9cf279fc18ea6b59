"""From a model's name to its weights: what is damaged, missing or unknown is refused in one line."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message
from dflash_bench.models import chat, loading, presets, targets
from dflash_bench.models.formats import save_draft
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from helpers.each import each
from helpers.toy import tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `preset` wants it: target/ and dflash/."""
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3").save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "target")
    config = DFlashConfig(
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        block_size=4,
        mask_token_id=96,
        target_layer_ids=(1, 2),
        num_target_layers=4,
    )
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


def load(folder: Path | str, *methods: str, **placement: Any) -> loading.Models:
    return loading.load(str(folder), list(methods), "cpu", torch.float32, targets.Placement(**placement))


def test_a_folder_is_a_model_with_the_drafts_beside_its_target(whole: Path) -> None:
    chosen = presets.preset(str(whole))
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
    known = "unknown model 'qwen9'; known: a folder with .*, nano, .*qwen3-4b, .*qwen3-8b,"
    with pytest.raises(UserError, match=known):
        load("qwen9")


def test_a_folder_that_is_no_model_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target/config\.json"):
        load(tmp_path)


def test_a_method_without_a_draft_says_what_to_give(whole: Path) -> None:
    with pytest.raises(UserError, match=r"eagle3 .*dflash.*--draft eagle3=PATH"):
        load(whole, "eagle3")


def test_a_package_without_its_weights_says_so(whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = presets.Preset(str(whole / "target"), {"dflash": str(tmp_path / "dflash")})
    monkeypatch.setitem(presets.table(), "nano", gone)
    with pytest.raises(UserError, match=r"no such folder: .*dflash"):
        load("nano", "dflash")


def test_dtype_auto_is_the_checkpoints_own_for_the_drafts_too(model: Path) -> None:
    copy.deepcopy(tiny("qwen3")).to(torch.bfloat16).save_pretrained(model / "target")
    models = loading.load(str(model), ["dflash"], "cpu", "auto")
    assert {models.target.dtype, models.drafts["dflash"].fc.weight.dtype} == {torch.bfloat16}


@pytest.mark.parametrize(("asked", "used"), [("eager", "eager"), ("sdpa", "sdpa"), (None, "sdpa")])
def test_attention_is_what_was_asked_for_or_what_transformers_takes(asked: str | None, used: str, whole: Path) -> None:
    assert load(whole, attention=asked).target.config._attn_implementation == used


def test_shards_are_weights_like_any_other(model: Path) -> None:
    (model / "target/model.safetensors").unlink()
    tiny("qwen3").save_pretrained(model / "target", max_shard_size="20KB")
    assert len(list((model / "target").glob("*.safetensors"))) > 1
    weights = tiny("qwen3").state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load(model).target.state_dict().items())


CODE = """
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
(Path(__file__).parent / "it_ran").touch()
class MineConfig(Qwen3Config):
    model_type = "mine"
class Mine(Qwen3ForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def own_code(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target that no library knows, with the code for it beside its weights."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(model / "modules"))
    monkeypatch.syspath_prepend(str(model / "modules"))
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    configured(model_type="mine", architectures=["Mine"], auto_map=classes)(model / "target")
    (model / "target/mine.py").write_text(CODE)
    return model


def test_code_in_a_checkpoint_never_runs_unless_it_is_trusted(own_code: Path) -> None:
    with pytest.raises(UserError, match=r"--trust-remote-code$"):
        load(own_code)
    assert not list(own_code.rglob("it_ran"))
    assert type(load(own_code, trust_remote_code=True).target).__name__ == "Mine"
    assert list(own_code.rglob("it_ran"))


def test_trust_in_code_that_is_not_there_has_no_effect(whole: Path) -> None:
    with pytest.raises(UserError, match=r"--trust-remote-code .*target"):
        load(whole, trust_remote_code=True)


def test_a_target_is_spread_by_accelerate_or_the_user_is_told_to_install_it(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"--device-map .*pip install accelerate"):
        load(whole, spread=True)
    monkeypatch.undo()
    pytest.importorskip("accelerate")
    models = load(whole, "dflash", spread=True)
    embedding, head = models.target.get_input_embeddings(), models.target.get_output_embeddings()
    assert {p.device.type for p in models.target.parameters()} == {"cuda" if torch.cuda.is_available() else "cpu"}
    assert models.drafts["dflash"].fc.weight.device == embedding.weight.device
    assert head(embedding(torch.tensor([[2]], device=embedding.weight.device))).device == embedding.weight.device


def test_a_target_that_overflows_its_gpus_is_not_measured_over_the_bus(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "hf_device_map", {"model.layers.0": 0, "model.layers.1": "cpu"}, raising=False)
    with pytest.raises(UserError, match="does not fit on the GPUs here"):
        targets.spread(whole, model)


# Draft and target


def test_a_draft_with_the_targets_tokenizer_fits(model: Path) -> None:
    (model / "dflash/tokenizer.json").write_bytes((model / "target/tokenizer.json").read_bytes())
    assert set(load(model, "dflash").drafts) == {"dflash"}


def test_a_draft_with_another_tokenizer_is_refused(model: Path) -> None:
    content = json.loads((model / "target/tokenizer.json").read_text())
    content["model"]["vocab"] |= {"a": 3, "b": 2}
    (model / "dflash/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"2 of 4 ids differ; 2 is 'b' .*'a'"):
        load(model, "dflash")


def test_the_target_that_a_draft_names_is_remembered(model: Path) -> None:
    assert load(model, "dflash").verifiers == {}
    config = json.loads((model / "dflash/config.json").read_text())
    config["speculators_config"] = {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}
    (model / "dflash/config.json").write_text(json.dumps(config))
    assert load(model, "dflash").verifiers == {"dflash": "Qwen/Qwen3-8B"}


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


def with_a_bias(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.bias"] = torch.ones(48)
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
    "an encoder-decoder": (configured(model_type="t5"), "transformers has no causal language model"),
    "a truncated config": (halve("config.json"), r"config\.json: not valid JSON \("),
    "a foreign config": (foreign("config.json"), r"cannot read .*config\.json: not UTF-8"),
    "a config that is a list": (
        lambda target: (target / "config.json").write_text("[]") and None,
        "hold a JSON object",
    ),
    "a truncated tokenizer": (halve("tokenizer.json"), r"tokenizer\.json: not valid JSON \("),
    "a foreign tokenizer": (foreign("tokenizer.json"), r"cannot read .*tokenizer\.json: not UTF-8"),
    "an empty tokenizer": (lambda target: (target / "tokenizer.json").write_text("{}") and None, "not a vocabulary"),
    "no tokenizer": (without("tokenizer.json"), "cannot load a causal language model"),
    "no file of a tokenizer": (
        lambda target: [path.unlink() for path in target.glob("tokenizer*")] and None,
        "has no tokenizer that reads text",
    ),
    "fewer layers than its weights": (
        configured(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        r"config\.json has no place for model\.layers\.3\.input_layernorm\.weight \(11 such tensors\)",
    ),
    "a bias that no layer has": (with_a_bias, r"has no place for model\.layers\.3\.mlp\.up_proj\.bias \(1 such"),
    "no heads": (configured(num_attention_heads=0), "num_attention_heads in its config.json cannot be 0"),
}


@each("damage", DAMAGES)
def test_a_damaged_target_is_refused_in_one_line(damage: str, model: Path) -> None:
    change, message = DAMAGES[damage]
    change(model / "target")
    with pytest.raises(UserError, match=message) as caught:
        load(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["String", "Regex"])
def test_a_tokenizer_that_crashes_is_refused_in_one_line(pattern: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(presets.NANO / "target" / name, tmp_path / name)
    content = json.loads((presets.NANO / "target/tokenizer.json").read_text())
    normaliser = {"type": "Replace", "pattern": {pattern: ""}, "content": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": normaliser}))
    with pytest.raises(UserError, match="index out of bounds") as caught:
        targets.tokenizer_of(tmp_path)
    assert "\n" not in str(caught.value)


class Crashing:
    """A tokenizer that crashes on some texts, or gives ids that the target does not have."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        if "crash" in text:
            raise type("PanicException", (BaseException,), {})("index out of bounds")
        return [len(text)]


def test_a_prompt_that_no_token_ids_are_found_for_ends_in_one_line() -> None:
    assert chat.encode(Crashing(), [Message("user", "abc")], False, 4) == [3]
    with pytest.raises(UserError, match="the tokenizer crashes on a prompt: index out of bounds"):
        chat.encode(Crashing(), [Message("user", "crash")], False)
    with pytest.raises(UserError, match="the token id 4, and the target has only 4 tokens"):
        chat.encode(Crashing(), [Message("user", "abcd")], False, 4)


def test_a_damaged_draft_is_refused(model: Path) -> None:
    halve("model.safetensors")(model / "dflash")
    with pytest.raises(UserError, match="truncated"):
        load(model, "dflash")


def test_a_draft_for_another_target_is_refused(model: Path) -> None:
    config = json.loads((model / "dflash" / "config.json").read_text())
    (model / "dflash" / "config.json").write_text(json.dumps({**config, "vocab_size": 5000}))
    with pytest.raises(UserError, match=r"vocabulary of 5000, .* 97"):
        load(model, "dflash")


@pytest.fixture
def with_eagle3(model: Path) -> Path:
    config = Eagle3Config(
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        draft_vocab_size=40,
        target_layer_ids=(1, 2),
        num_target_layers=4,
    )
    draft = Eagle3Draft(config)
    initialise(draft, 0)
    save_draft(draft, model / "eagle3")
    return model


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (
            "dflash",
            "eagle3",
            r"a draft for eagle3, .*--draft eagle3=",
        ),
        (
            "eagle3",
            "dflash",
            r"a draft for dflash, .*--draft dflash=",
        ),
    ],
)
def test_a_draft_of_another_kind_is_told_where_it_belongs(
    method: str, given: str, message: str, with_eagle3: Path
) -> None:
    chosen = presets.combine(str(with_eagle3), None, {method: str(with_eagle3 / given)})
    assert set(load(with_eagle3, "dflash", "eagle3").drafts) == {"dflash", "eagle3"}
    with pytest.raises(UserError, match=message):
        loading.load(chosen, [method], "cpu", torch.float32)


def test_drafts_are_checked_before_the_target_is_fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((model / "dflash" / "config.json").read_text())
    fetched: list[str] = []
    fetch = loading.hub.fetch
    monkeypatch.setattr(loading.hub, "fetch", lambda ref, **how: fetched.append(Path(ref).name) or fetch(ref, **how))
    for change, message in (
        ({"layer_types": ["chunked_attention"]}, "layers of 'chunked_attention'"),
        ({"intermediate_size": 40}, "config.json says"),
        ({"architectures": ["DFlash2DraftModel"]}, "says DFlash2DraftModel, but has no selector_rank"),
    ):
        (model / "dflash" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            load(model, "dflash")
    assert fetched == ["dflash"] * 3
