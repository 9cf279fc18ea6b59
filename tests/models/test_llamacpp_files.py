"""`convert --to gguf`: read back by the package that defines the format, and targets by transformers too."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import dflash_bench
from dflash_bench.core.errors import UserError
from dflash_bench.models import gguf_tokenizer, gguf_writer, targets
from dflash_bench.models.convert import convert
from dflash_bench.models.formats import TargetShape, load_draft, save_draft
from dflash_bench.models.hub import WHOLE
from dflash_bench.models.nets.bodies import PLAIN, BlockView, DraftBody
from dflash_bench.models.nets.bodies import WHOLE as WHOLE_BLOCK
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.presets import NANO
from helpers import tiny
from helpers.each import each

CASES_OF_KINDS = Path(dflash_bench.__file__).parent / "conformance"
KINDS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = torch.arange(5, 45)[None]


def build(folder: Path, kind: str = "llama", dtype: str = "float32", **settings: Any) -> Path:
    """A target of random weights with nano's tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": tiny.VOCABULARY, "num_hidden_layers": 2, "initializer_range": 0.3, **SIZES}
    config = KINDS[kind](eos_token_id=2, pad_token_id=0, **{**sizes, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # otherwise all zeros or ones
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    for name in tiny.TOKENIZER:
        shutil.copy(NANO / "target" / name, folder / name)
    return folder


def changed(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def with_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def values(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def tensors(path: Path) -> dict[str, Tensor]:
    """In float32, as torch sees them; integers as they are."""
    out = {}
    for tensor in GGUFReader(path).tensors:
        data = torch.from_numpy(tensor.data.copy())
        out[tensor.name] = data.view(torch.bfloat16) if tensor.tensor_type == GGMLQuantizationType.BF16 else data
    return out


CASES = [
    ("llama", "float32", {"tie_word_embeddings": True}),
    ("llama", "bfloat16", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("llama", "float16", {"num_key_value_heads": 4, "head_dim": 16}),
    ("qwen2", "float32", {"tie_word_embeddings": False}),
    ("qwen2", "bfloat16", {"tie_word_embeddings": True}),
    ("qwen3", "float32", {"tie_word_embeddings": True, "head_dim": 16}),
    ("qwen3", "float16", {"tie_word_embeddings": False, "head_dim": 8}),
]


@each(("kind", "dtype", "settings"), CASES)
def test_transformers_reads_the_same_weights_and_computes_the_same(
    kind: str, dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = build(tmp_path / "model", kind, dtype, **settings)
    convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    # The config is given, as transformers takes the size of a Qwen3 head for 128, whatever the file says.
    after = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype="float32", config=before.config
    )
    expected, got = before.state_dict(), after.state_dict()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    with torch.inference_mode():
        assert torch.equal(before(PROMPT).logits, after(PROMPT).logits)


# Qwen3.5: layers of linear attention, whose value heads stand in another order, and MTP heads.

HYBRID = CASES_OF_KINDS / "mtp-qwen3.5-hybrid/target"


def hybrid(folder: Path, **settings: Any) -> Path:
    """A copy of the golden target."""
    shutil.copytree(HYBRID, folder)
    return changed(folder, **settings)


def test_a_hybrid_target_has_what_llama_cpps_graph_asks_for(tmp_path: Path) -> None:
    folder = hybrid(tmp_path / "model")
    network, stored = gguf_writer.read(folder), load_file(folder / WHOLE)
    layer, mtp, norm = "model.layers.2.linear_attn.", "mtp.", "self_attn.q_norm.weight"
    got = {name: tensor.float() for name, tensor in network.tensors.items()}
    known = {TENSOR_NAMES[one] for one in MODEL_TENSORS[MODEL_ARCH.QWEN35]}
    ours = {re.sub(r"blk\.\d+", "blk.{bid}", name) for name in got if "nextn" not in name}
    assert {re.sub(r"(ssm_dt|[a-z_0-9]+)\.(weight|bias)$", r"\1", name) for name in ours} == known
    # Two key heads, each with two value heads of 12 rows: group by group in files, and here the first of each first.
    rows = stored[f"{layer}in_proj_z.weight"].float().unflatten(0, (4, 12))
    assert torch.equal(got["blk.2.attn_gate.weight"], rows[[0, 2, 1, 3]].flatten(0, 1))
    columns = stored[f"{layer}out_proj.weight"].float().unflatten(1, (4, 12))
    assert torch.equal(got["blk.2.ssm_out.weight"], columns[:, [0, 2, 1, 3]].flatten(1, 2))
    assert torch.equal(got["blk.2.ssm_a"], -stored[f"{layer}A_log"].float()[[0, 2, 1, 3]].exp())
    assert torch.equal(got["blk.2.attn_qkv.weight"][:48], stored[f"{layer}in_proj_qkv.weight"].float()[:48])
    assert got["blk.2.ssm_conv1d.weight"].shape == (96, 4)
    assert torch.equal(got["blk.1.attn_q_norm.weight"], stored[f"model.layers.1.{norm}"].float() + 1)
    assert torch.equal(got["blk.2.ssm_norm.weight"], stored[f"{layer}norm.weight"].float())
    # The heads' block stands behind the last layer.
    assert torch.equal(got["blk.4.nextn.eh_proj.weight"], stored[f"{mtp}fc.weight"].float())
    assert torch.equal(got["blk.4.nextn.shared_head_norm.weight"], stored[f"{mtp}norm.weight"].float() + 1)
    assert torch.equal(got["blk.4.attn_q.weight"], stored[f"{mtp}layers.0.self_attn.q_proj.weight"].float())
    expected = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "full_attention_interval": 2,
        "rope.dimension_count": 4,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 48,
    }
    assert expected.items() <= network.settings.items()


def test_a_hybrid_target_without_heads_has_no_block_for_them(tmp_path: Path) -> None:
    folder = hybrid(tmp_path / "model")
    save_file({name: t for name, t in load_file(folder / WHOLE).items() if "mtp." not in name}, folder / WHOLE)
    network = gguf_writer.read(folder)
    assert network.settings["block_count"] == 4 and "nextn_predict_layers" not in network.settings
    assert not [name for name in network.tensors if "blk.4" in name]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layers are in another order"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "it is quantised; convert the original"),
    ],
)
def test_a_hybrid_target_that_it_cannot_compute_is_refused(settings: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        gguf_writer.read(hybrid(tmp_path / "model", **settings))


def test_half_a_head_is_refused(tmp_path: Path) -> None:
    folder = hybrid(tmp_path / "model")
    save_file({name: t for name, t in load_file(folder / WHOLE).items() if name != "mtp.fc.weight"}, folder / WHOLE)
    with pytest.raises(UserError, match=r"missing tensor mtp\.fc\.weight"):
        gguf_writer.read(folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_keep_their_type_and_norms_are_float32(dtype: str, tmp_path: Path) -> None:
    convert(str(build(tmp_path / "model", dtype=dtype)), tmp_path / "model.gguf", "gguf", None)
    expected = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        assert tensor.tensor_type.name == ("F32" if "norm" in tensor.name else expected), tensor.name


def test_what_llama_cpp_needs_to_know_of_a_target_is_there(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3", head_dim=16, rms_norm_eps=1e-5, rope_theta=5e5)
    convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    got = values(tmp_path / "model.gguf")
    expected = {
        "general.architecture": "qwen3",
        "qwen3.context_length": 32768,
        "qwen3.embedding_length": 48,
        "qwen3.block_count": 2,
        "qwen3.feed_forward_length": 64,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 16,
        "qwen3.attention.value_length": 16,
        "qwen3.rope.dimension_count": 16,
        "qwen3.rope.freq_base": 5e5,
        "qwen3.vocab_size": tiny.VOCABULARY,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    assert {name: got[name] for name in expected} == expected
    assert got["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


def test_llama_3s_rotary_positions_are_divided_as_transformers_divides_them(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = build(tmp_path / "model", rope_parameters=scaling, max_position_embeddings=512)
    convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    inverse = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    plain = 5e5 ** -(torch.arange(0, 12, 2) / 12)
    divided = plain / tensors(tmp_path / "model.gguf")["rope_freqs.weight"]
    torch.testing.assert_close(divided, inverse)
    assert not torch.allclose(plain, inverse)


# Tokenizers.


def test_the_vocabulary_is_nanos_with_a_name_for_every_row(tmp_path: Path) -> None:
    convert("nano", tmp_path / "nano.gguf", "gguf", None)
    content = json.loads((NANO / "target" / "tokenizer.json").read_text())
    got = values(tmp_path / "nano.gguf")
    assert got["tokenizer.ggml.model"] == "gpt2"
    tokens, types = got["tokenizer.ggml.tokens"], got["tokenizer.ggml.token_type"]
    for token, index in content["model"]["vocab"].items():
        assert tokens[index] == token
    assert [types[added["id"]] for added in content["added_tokens"]] == [3] * len(content["added_tokens"])
    assert tokens[1000:] == [f"[PAD{i}]" for i in range(1000, 1024)] and set(types[1000:]) == {5}
    assert got["tokenizer.ggml.merges"] == [" ".join(merge) for merge in content["model"]["merges"]]
    assert got["tokenizer.ggml.pre"] == "ufakzeka"


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

QWEN35 = QWEN.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SPLITTERS = {
    "gpt-2": {**BYTES, "use_regex": True},
    "qwen2": {"type": "Sequence", "pretokenizers": [split(QWEN), BYTES]},
    "qwen35": {"type": "Sequence", "pretokenizers": [split(QWEN35), BYTES]},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
    },
}


def every_pair_of_bytes(content: dict[str, Any]) -> None:
    """A vocabulary in which wherever text is cut shows: most neighbours merge."""
    vocab = {token: index for index, token in enumerate(sorted(content["model"]["vocab"], key=len)) if len(token) == 1}
    letters = [token for token in vocab if token.isascii() or token in "ĠĊĉčÌģ"]
    pairs = [(a, b) for a in letters for b in letters][:16384]
    content["added_tokens"] = []
    content["model"]["vocab"] = {**vocab, **{a + b: len(vocab) + i for i, (a, b) in enumerate(pairs)}}
    content["model"]["merges"] = [list(pair) for pair in pairs]


@pytest.mark.parametrize("name", SPLITTERS)
def test_the_rule_for_splitting_text_is_found_by_what_it_does(name: str, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        every_pair_of_bytes(content)
        content["pre_tokenizer"] = SPLITTERS[name]

    folder = with_tokenizer(build(tmp_path / "model"), change)
    assert gguf_tokenizer.read(folder, 20000)[0]["tokenizer.ggml.pre"] == name


def test_normalisation_is_told(tmp_path: Path) -> None:
    folder = with_tokenizer(build(tmp_path / "model"), lambda content: content.update(normalizer={"type": "NFC"}))
    told = convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    assert told == ["llama.cpp does not compose characters (NFC): text in decomposed form gives other tokens there"]


def template(content: dict[str, Any]) -> None:
    content["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}})
    content["post_processor"]["special_tokens"] = {
        "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}
    }


def test_a_bos_token_before_every_text_is_declared(tmp_path: Path) -> None:
    folder = with_tokenizer(build(tmp_path / "model"), template)
    with pytest.raises(UserError, match="more than a bos and an eos token around it"):
        convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<|im_end|>"}))
    convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    got = values(tmp_path / "model.gguf")
    assert (got["tokenizer.ggml.bos_token_id"], got["tokenizer.ggml.add_bos_token"]) == (2, True)


def unknown_rule(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split(r"\p{L}"), BYTES]}


TOKENIZERS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (unknown_rule, "splits text by a rule that llama.cpp does not know"),
    (lambda content: content.update(normalizer={"type": "Lowercase"}), r"rewrites text \(Lowercase\)"),
    (lambda content: content["model"].update(byte_fallback=True), "is SentencePiece's BPE, and only byte-level BPE"),
    (lambda content: content["added_tokens"][3].update(lstrip=True), "'<think>' takes spaces with it"),
]


@each(("change", "message"), TOKENIZERS)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    folder = with_tokenizer(build(tmp_path / "model"), change)
    with pytest.raises(UserError, match=message):
        convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    assert not [*tmp_path.glob("*.gguf*"), *tmp_path.glob(".*")]


# Targets that are refused.

TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, "unknown .*architecture for GGUF 'mistral'; known: llama, qwen2, qwen3"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rotary positions of type 'yarn'"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "it is quantised; convert the original"),
    ({"attention_bias": True}, r"missing tensor layers\.0\.self_attn\.\w_proj\.bias"),
    ({"intermediate_size": 72}, r"mlp\.\w+_proj\.weight is .*, but config\.json says"),
    ({"num_hidden_layers": 1}, r"surplus tensor layers\.1\."),
]


@each(("settings", "message"), TARGETS)
def test_a_target_that_llama_cpp_would_compute_otherwise_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed(build(tmp_path / "model"), **settings)
    with pytest.raises(UserError, match=message):
        convert(str(folder), tmp_path / "model.gguf", "gguf", None)
    assert not (tmp_path / "model.gguf").exists()


def test_sliding_windows_and_biases_of_qwen3_are_refused(tmp_path: Path) -> None:
    sliding = build(tmp_path / "a", "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(UserError, match="sliding-window attention"):
        convert(str(sliding), tmp_path / "model.gguf", "gguf", None)
    with pytest.raises(UserError, match=r"qwen3 has no place for tensor blk\.0\.attn_\w+\.bias"):
        convert(
            str(build(tmp_path / "b", "qwen3", head_dim=16, attention_bias=True)), tmp_path / "b.gguf", "gguf", None
        )


def test_other_types_of_weights_are_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "model")
    stored = {name: tensor.double() for name, tensor in load_file(folder / WHOLE).items()}
    save_file(stored, folder / WHOLE)
    with pytest.raises(UserError, match=r"holds torch\.float64; only float32, float16 and bfloat16"):
        convert(str(folder), tmp_path / "model.gguf", "gguf", None)


def test_no_file_is_overwritten_and_no_target_has_a_target(tmp_path: Path) -> None:
    (tmp_path / "here.gguf").write_text("mine")
    refusals = [
        (str(tmp_path / "here.gguf"), tmp_path / "nano.gguf", None, "is a GGUF file already"),
        ("nano", tmp_path / "here.gguf", None, "exists already; name a new file"),
        ("nano", tmp_path / "nano", None, r"one that ends in \.gguf"),
        ("nano", tmp_path / "no" / "nano.gguf", None, "is not a folder"),
        ("nano", tmp_path / "nano.gguf", "nano", "is a target, and --target is for drafts"),
        (str(NANO / "dflash"), tmp_path / "draft.gguf", None, "is a draft, .*; give --target"),
        (str(NANO / "medusa"), tmp_path / "draft.gguf", None, "no weights"),
    ]
    for source, destination, target, message in refusals:
        with pytest.raises(UserError, match=message):
            convert(source, destination, "gguf", target)
    assert [path.name for path in tmp_path.iterdir()] == ["here.gguf"]
    assert (tmp_path / "here.gguf").read_text() == "mine"


# Drafts.


def test_a_dflash_draft_is_written_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    convert(str(NANO / "dflash"), tmp_path / "draft.gguf", "gguf", "nano")
    got = values(tmp_path / "draft.gguf")
    convert("nano/dflash", tmp_path / "named.gguf", "gguf", "nano")
    assert (tmp_path / "named.gguf").read_bytes() == (tmp_path / "draft.gguf").read_bytes()
    expected = {
        "general.architecture": "dflash",
        "dflash.block_size": 16,
        "dflash.target_layers": [2, 5, 8, 11, 14],
        "dflash.target_hidden_size": 128,
        "dflash.attention.causal": False,
        "dflash.sample_from_anchor": False,
        "dflash.block_count": 2,
        "dflash.attention.head_count": 4,
        "tokenizer.ggml.mask_token_id": 1000,
    }
    assert {name: got[name] for name in expected} == expected
    assert len(got["tokenizer.ggml.tokens"]) == 1024 and "tokenizer.chat_template" not in got
    stored, written = load_file(NANO / "dflash" / WHOLE), tensors(tmp_path / "draft.gguf")
    assert len(stored) == len(written)
    for ours, theirs in (
        ("fc", "fc"),
        ("hidden_norm", "enc.output_norm"),
        ("norm", "output_norm"),
        ("layers.1.self_attn.k_proj", "blk.1.attn_k"),
        ("layers.0.self_attn.q_norm", "blk.0.attn_q_norm"),
        ("layers.0.post_attention_layernorm", "blk.0.ffn_norm"),
        ("layers.1.mlp.down_proj", "blk.1.ffn_down"),
    ):
        assert torch.equal(stored[f"{ours}.weight"].float(), written[f"{theirs}.weight"].float()), ours


NARROW = BlockView(24)


def nano_draft(folder: Path, form: str | None = None, **changes: Any) -> Path:
    """nano's draft with another body or head of random weights; an embedding and a head of its own are the target's."""
    shape, home = TargetShape(128, 1024, 16), targets.find_target("nano")
    draft: Any = load_draft(NANO / "dflash", shape, torch.float32, "cpu")
    config = replace(draft.config, **changes)
    other = type(draft)(config)
    other.load_state_dict(
        {
            **{name: torch.randn_like(tensor) for name, tensor in other.state_dict().items()},
            **(targets.vocabulary_of(home) if config.own_head else {}),
            **draft.state_dict(),
        }
    )
    save_draft(other, folder, form)
    return folder


def body(**changes: Any) -> DraftBody:
    return replace(PLAIN, **changes)


SECOND = body(conv_kernel_size=2, conv_group_size=16, output_multiplier=0.5, logit_softcap=6.0)
OWN = {"shifted_labels": True, "own_embedding": True, "own_head": True}


def test_a_selector_and_its_convolutions_are_written_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    folder = nano_draft(tmp_path / "a", body=SECOND, correction=SelectorConfig(selector_rank=4, selector_top_k=8))
    convert(str(folder), tmp_path / "a.gguf", "gguf", "nano")
    got, stored, written = values(tmp_path / "a.gguf"), load_file(folder / WHOLE), tensors(tmp_path / "a.gguf")
    expected = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 4,
        "selector_top_k": 8,
        "logit_scale": 0.5,
        "final_logit_softcapping": 6.0,
        "sample_from_anchor": False,
    }
    assert {name: got[f"dflash.{name}"] for name in expected} == expected
    assert len(stored) == len(written)
    for ours, theirs in (
        ("layers.1.attention_conv.base_kernel", "blk.1.attn_conv_base"),
        ("layers.0.mlp_conv.kernel_projection.weight", "blk.0.ffn_conv_proj.weight"),
        ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
        ("candidate_selector.predecessor_codebook", "selector_predecessor.weight"),
        ("candidate_selector.successor_codebook", "selector_successor.weight"),
    ):
        assert torch.equal(stored[ours].float(), written[theirs].float()), ours


def test_a_markov_head_is_written_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    head = MarkovConfig(markov_rank=4, enable_confidence_head=True)
    folder = nano_draft(tmp_path / "a", "deepspec", correction=head, **OWN)
    convert(str(folder), tmp_path / "a.gguf", "gguf", "nano")
    stored, written = load_file(folder / WHOLE), tensors(tmp_path / "a.gguf")
    assert values(tmp_path / "a.gguf")["dflash.sample_from_anchor"] is True
    for ours, theirs in (
        ("markov_head.markov_w1", "markov_w1"),
        ("markov_head.markov_w2", "markov_w2"),
        ("confidence_head.proj", "conf_proj"),
    ):
        assert torch.equal(stored[f"{ours}.weight"].float(), written[f"{theirs}.weight"].float()), ours
    assert torch.equal(stored["confidence_head.proj.bias"].float(), written["conf_proj.bias"])


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ((NARROW, WHOLE_BLOCK), (False, 24, [True, False])),
        ((BlockView(24, True), BlockView(None, True)), (True, 24, [True, False])),
        ((BlockView(None, True),) * 2, (True, None, None)),
    ],
)
def test_windows_and_causality_are_declared(views: Any, expected: tuple[Any, ...], tmp_path: Path) -> None:
    convert(str(nano_draft(tmp_path / "a", body=body(views=views))), tmp_path / "a.gguf", "gguf", "nano")
    got = values(tmp_path / "a.gguf")
    names = ("attention.causal", "attention.sliding_window", "attention.sliding_window_pattern")
    assert tuple(got.get(f"dflash.{name}") for name in names) == expected


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"body": body(views=(BlockView(24, True), WHOLE_BLOCK))}, None, "layers of which only some are causal"),
    ({"body": body(views=(BlockView(8), WHOLE_BLOCK))}, None, "narrower than the block = 8"),
    ({"body": body(embedding_scale=2.0)}, None, "or its scales"),
    ({"correction": SelectorConfig(selector_rank=4, selector_top_k=11), "body": SECOND}, None, r"11 .* needs 132"),
    ({"correction": SelectorConfig(selector_rank=4, selector_top_k=8)}, None, "a selector and no convolutions"),
    ({"correction": MarkovConfig(markov_rank=4, markov_head_type="rnn"), **OWN}, "deepspec", "of type = rnn"),
]


@each(("changes", "form", "message"), REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused_by_name(
    changes: dict[str, Any], form: str | None, message: str, tmp_path: Path
) -> None:
    folder = nano_draft(tmp_path / "a", form, **changes)
    with pytest.raises(UserError, match=message):
        convert(str(folder), tmp_path / "a.gguf", "gguf", "nano")
    assert not (tmp_path / "a.gguf").exists()


def test_an_eagle3_draft_is_written_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    convert(str(NANO / "eagle3"), tmp_path / "draft.gguf", "gguf", "nano")
    got = values(tmp_path / "draft.gguf")
    expected = {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.target_layers": [2, 8, 13],
        "eagle3.target_hidden_size": 128,
        "eagle3.norm_before_residual": False,
    }
    assert {name: got[name] for name in expected} == expected
    stored, written = load_file(NANO / "eagle3" / WHOLE), tensors(tmp_path / "draft.gguf")
    assert written["d2t"].dtype == torch.int64
    assert written["d2t"].tolist() == stored["t2d"].nonzero().flatten().tolist()
    assert torch.equal(stored["midlayer.hidden_norm.weight"].float(), written["blk.0.attn_norm_2.weight"])
    # Row i of a head's first half stands before row i of its second half.
    for part, heads in (("q", 4), ("k", 2)):
        rows = stored[f"midlayer.self_attn.{part}_proj.weight"].unflatten(0, (heads, 2, 32))
        alternating = written[f"blk.0.attn_{part}.weight"].unflatten(0, (heads, 32, 2))
        assert torch.equal(rows[:, 0].float(), alternating[:, :, 0].float())
        assert torch.equal(rows[:, 1].float(), alternating[:, :, 1].float())
    assert torch.equal(stored["midlayer.self_attn.v_proj.weight"].float(), written["blk.0.attn_v.weight"].float())


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_head_that_is_left_to_the_target_is_written_out(kind: str, model: Path, tmp_path: Path) -> None:
    shape = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
    draft: Any = load_draft(model / kind, shape, torch.float32, "cpu")
    ids = torch.arange(0, tiny.VOCABULARY, 16)
    covered = torch.zeros(tiny.VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
    head = load_file(model / "target" / WHOLE)["model.embed_tokens.weight"][ids]
    own = {"draft_vocab_size": 64, **({"own_head": True} if kind == "dflash" else {})}
    slim = type(draft)(replace(draft.config, **own))
    parts = {"d2t": ids - torch.arange(64), "t2d": covered, "lm_head.weight": head}
    slim.load_state_dict({**draft.state_dict(), **parts})
    save_draft(slim, tmp_path / "slim", slim=True)
    convert(str(tmp_path / "slim"), tmp_path / "draft.gguf", "gguf", str(model / "target"))
    written = tensors(tmp_path / "draft.gguf")
    assert written["d2t"].tolist() == ids.tolist()
    assert torch.equal(written["output.weight"], head)


DRAFTS: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"attention_bias": True}, "a draft with attention_bias"),
    ("dflash", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "a draft with rotary scaling = linear"),
    ("eagle3", {"qk_norm": True}, "a draft with qk_norm"),
    ("eagle3", {"fc_norm": True}, "a draft with fc_norm"),
    ("eagle3", {"norm_before_fc": True}, "a draft with norm_before_fc"),
    ("eagle3", {"norm_output": True}, "a draft with norm_output"),
    ("eagle3", {"target_layer_ids": (2, 1)}, "it taps 2 layers, and llama.cpp only takes 3"),
]


@each(("kind", "variant", "message"), DRAFTS)
def test_a_draft_that_llama_cpp_cannot_run_is_refused(
    kind: str, variant: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    shape = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
    draft: Any = load_draft(model / kind, shape, torch.float32, "cpu")
    vocabulary = {"own_embedding": True} | ({"own_head": True} if kind == "dflash" else {})
    odd = type(draft)(replace(draft.config, **vocabulary, **variant))
    save_draft(odd, tmp_path / "draft", "speculators")
    with pytest.raises(UserError, match=message):
        convert(str(tmp_path / "draft"), tmp_path / "draft.gguf", "gguf", str(model / "target"))
    assert not (tmp_path / "draft.gguf").exists()


def test_a_draft_for_another_target_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hidden size 32, but the target's is 128"):
        convert(str(model / "dflash"), tmp_path / "draft.gguf", "gguf", "nano")


def test_a_draft_that_llama_cpp_feeds_nothing_is_written_with_a_remark(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = targets.config_of(model / "target").model_type
    for kinds, expected in (((), []), ((kind,), [kind])):
        monkeypatch.setattr(gguf_writer, "WITHOUT_FEATURES", kinds)
        path = tmp_path / f"{len(kinds)}.gguf"
        told = convert(str(model / "dflash"), path, "gguf", str(model / "target"))
        assert path.exists() and [kind for remark in told if kind in remark and "aborts" in remark] == expected
