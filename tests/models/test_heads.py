"""Files of drafts with a head that corrects them: read whole, written again, and refused where they do not add up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash_bench
from dflash_bench.core.errors import UserError
from dflash_bench.models import formats, gguf_writer
from dflash_bench.models.convert import convert
from dflash_bench.models.formats import TargetShape, load_draft, read_checkpoint, save_draft
from dflash_bench.models.inspect import inspect
from dflash_bench.models.presets import NANO
from helpers.each import each

CASES = Path(dflash_bench.__file__).parent / "conformance"
KINDS = {
    "zlab-dflash2": ("zlab", "DFlash 2", 7),
    "deepspec-dspark-rnn-cut": ("deepspec", "DSpark", 6),
    "deepspec-dspark-vanilla": ("deepspec", "DSpark", 7),
    "specforge-dspark-gated": ("specforge", "DSpark", 7),
    "speculators-dspark": ("speculators", "DSpark", 6),
    "specforge-domino-in-place": ("specforge", "Domino", 6),
    "specforge-domino-shifted": ("specforge", "Domino", 7),
    "speculators-xpress": ("speculators", "XPress", 7),
    "nvidia-lilicorr": ("nvidia", "LiLiCorr", 6),
}


@pytest.fixture
def draft_of(tmp_path: Path) -> Callable[[str], Path]:
    numbers = count()
    return lambda name: Path(shutil.copytree(CASES / name / "draft", tmp_path / f"{next(numbers)}" / name))


def edit(folder: Path, **changes: Any) -> None:
    """Change keys where they stand, in `dflash_config` or beside it; those that are `...` are removed."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        inner = config.get("dflash_config", {})
        for place in ([inner] if key in inner else []) + ([config] if key in config or key not in inner else []):
            if value is ...:
                place.pop(key, None)
            else:
                place[key] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def target_of(folder: Path) -> TargetShape:
    """The shape of the target that a draft was made for."""
    config = json.loads((folder / "config.json").read_text())
    body = config.get("transformer_layer_config", config)
    return TargetShape(body["hidden_size"], body["vocab_size"], 4)


def load(folder: Path) -> Any:
    return load_draft(folder, target_of(folder), torch.float32, "cpu")


@each("name", KINDS)
def test_the_kind_and_the_number_of_drafts_are_read_from_the_file(name: str) -> None:
    form, checkpoint = read_checkpoint(CASES / name / "draft", target_of(CASES / name / "draft"))
    config: Any = checkpoint.config
    assert (form.name, config.kind, config.num_drafts(config.block_size)) == KINDS[name]
    shown = inspect(str(CASES / name / "draft"))
    assert not shown.problems and (shown.format, shown.num_drafts) == (KINDS[name][0], KINDS[name][2])


@each("name", KINDS)
def test_a_draft_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    draft = load(CASES / name / "draft")
    save_draft(draft, tmp_path / "again")
    form, checkpoint = read_checkpoint(tmp_path / "again", target_of(CASES / name / "draft"))
    assert form.name == KINDS[name][0] and checkpoint.config == draft.config
    again = load(tmp_path / "again").state_dict()
    assert again.keys() == draft.state_dict().keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in draft.state_dict().items())


@pytest.mark.parametrize(
    ("name", "to"), [("deepspec-dspark-rnn-cut", "speculators"), ("specforge-dspark-gated", "deepspec")]
)
def test_dspark_changes_its_format_and_stays_what_it_is(name: str, to: str, tmp_path: Path) -> None:
    target = CASES / json.loads((CASES / name / "golden.json").read_text())["target"].removeprefix("../")
    notes = convert(str(CASES / name / "draft"), tmp_path / "out", to, str(target))
    assert not any("correction" in note or "shifted" in note for note in notes)
    form, checkpoint = read_checkpoint(tmp_path / "out", None)
    was = read_checkpoint(CASES / name / "draft", target_of(CASES / name / "draft"))[1].config
    assert form.name == to and checkpoint.config.correction == was.correction  # type: ignore[union-attr]


@each(
    ("name", "to", "message"),
    [
        ("specforge-dspark-gated", "zlab", "the zlab format"),
        ("speculators-xpress", "deepspec", "the deepspec format"),
        ("speculators-dspark", "specforge", r"zlab .*draft_vocab_size = 288"),
        ("specforge-domino-shifted", "nvidia", r"nvidia .*Domino"),
        ("nvidia-lilicorr", "specforge", r"specforge .*LiLiCorr"),
        ("specforge-domino-in-place", "speculators", r"speculators .*Domino"),
    ],
)
def test_a_format_that_has_no_place_for_a_head_says_so(name: str, to: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        convert(str(CASES / name / "draft"), tmp_path / "out", to, None)


def test_llamacpp_is_given_no_draft_whose_head_it_would_leave_out() -> None:
    _, checkpoint = read_checkpoint(CASES / "nvidia-lilicorr" / "draft", None)
    with pytest.raises(UserError, match=r"llama\.cpp .*LiLiCorr"):
        gguf_writer.describe(checkpoint, 4)


def test_a_format_for_heads_refuses_a_draft_without_one(tmp_path: Path) -> None:
    message = "the nvidia format holds drafts with the head of LiLiCorr, and this one has none; use zlab"
    with pytest.raises(UserError, match=message):
        convert(str(NANO / "dflash"), tmp_path / "out", "nvidia", None)


# Older names, and keys that a file leaves out.


@pytest.mark.parametrize("name", ["specforge-domino-shifted", "specforge-dspark-gated", "specforge-domino-in-place"])
def test_older_files_of_specforge_are_read_too(name: str, draft_of: Callable[[str], Path]) -> None:
    folder = draft_of(name)
    edit(folder, architectures=["DFlashDraftModel"])
    own = [
        key for key in load_file(folder / "model.safetensors") if key.split(".")[0].endswith(("head", "gru", "proj"))
    ]
    assert own
    edit_tensors(folder, lambda tensors: [tensors.update({f"logit_head.{key}": tensors.pop(key)}) for key in own])
    old, new = load(folder), load(CASES / name / "draft")
    assert old.config == new.config
    assert all(torch.equal(tensor, old.state_dict()[key]) for key, tensor in new.state_dict().items())


def test_xpress_without_its_modules_name_is_read_too(draft_of: Callable[[str], Path]) -> None:
    folder = draft_of("speculators-xpress")
    edit_tensors(
        folder,
        lambda tensors: [
            tensors.update({key.removeprefix("refiner_head."): tensors.pop(key)})
            for key in list(tensors)
            if key.startswith("refiner_head.")
        ],
    )
    edit(folder, num_jacobi_passes=..., xpress_num_passes=3, xpress_mlp_ratio=2.0)
    assert load(folder).config == load(CASES / "speculators-xpress" / "draft").config
    edit(folder, xpress_num_passes=...)
    assert load(folder).config.correction.num_jacobi_passes == 6


def test_what_a_config_does_not_say_of_a_confidence_head_its_tensors_do(draft_of: Callable[[str], Path]) -> None:
    folder = draft_of("deepspec-dspark-rnn-cut")
    edit(folder, enable_confidence_head=..., confidence_head_with_markov=...)
    assert load(folder).config == load(CASES / "deepspec-dspark-rnn-cut" / "draft").config


def test_a_lilicorr_head_without_a_width_is_as_wide_as_its_body(draft_of: Callable[[str], Path]) -> None:
    folder = draft_of("nvidia-lilicorr")
    edit(folder, lilicorr_hidden_size=0, lilicorr_enabled=True)
    config = read_checkpoint(folder, None)[1].config
    assert config.correction.lilicorr_hidden_size == 48  # type: ignore[union-attr]


# Inconsistent files.


@each(
    ("name", "changes", "message"),
    [
        (
            "deepspec-dspark-vanilla",
            {"markov_rank": 8},
            r"confidence_head\.proj\.weight is \[1, 64\], config.json says \[1, 56\]",
        ),
        ("deepspec-dspark-vanilla", {"markov_rank": "16"}, "markov_rank cannot be '16'"),
        ("deepspec-dspark-vanilla", {"markov_rank": -1}, "markov_rank cannot be -1"),
        ("deepspec-dspark-vanilla", {"markov_rank": 0}, "enable_confidence_head = True"),
        ("deepspec-dspark-vanilla", {"markov_head_type": "lstm"}, "markov_head_type cannot be 'lstm'"),
        ("deepspec-dspark-vanilla", {"markov_head_type": "gated"}, r"missing tensor markov_head\.gate_proj"),
        ("deepspec-dspark-rnn-cut", {"markov_head_type": "vanilla"}, r"surplus tensor markov_head\.joint_proj"),
        ("deepspec-dspark-vanilla", {"enable_confidence_head": False}, r"surplus tensor confidence_head\.proj"),
        (
            "deepspec-dspark-vanilla",
            {"confidence_head_with_markov": False},
            r"confidence_head\.proj\.weight is \[1, 64\]",
        ),
        ("specforge-dspark-gated", {"projector_type": "domino"}, "DSparkDraftModel and projector_type 'domino'"),
        ("specforge-dspark-gated", {"projector_type": "other"}, "DSparkDraftModel and projector_type 'other'"),
        ("specforge-dspark-gated", {"attention_mode": "mla"}, "attention_mode = 'mla'"),
        ("specforge-dspark-gated", {"a_new_key": 1}, None),
        ("speculators-dspark", {"sample_from_anchor": False}, "sample_from_anchor = False is not supported"),
        ("specforge-domino-shifted", {"shift_label": ...}, "lacks 'shift_label'"),
        ("specforge-domino-shifted", {"shift_label": "yes"}, "shifted_labels cannot be 'yes'"),
        ("specforge-domino-shifted", {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len cannot be -1"),
        (
            "specforge-domino-shifted",
            {"gru_hidden_dim": 32},
            r"embed_proj\.0\.weight is \[24, 88\], config.json says \[24, 80\]",
        ),
        ("specforge-domino-shifted", {"emb_dim": ...}, "lacks 'emb_dim'"),
        (
            "speculators-xpress",
            {"xpress_rank": 8},
            r"refiner_head\.down_g\.weight is \[16, 48\]",
        ),
        (
            "speculators-xpress",
            {"block_size": 6},
            r"refiner_head\.mix_l is \[16, 8, 8\], config.json says \[16, 6, 6\]",
        ),
        ("speculators-xpress", {"xpress_mlp_ratio": 1.5}, "xpress_mlp_ratio cannot be 1.5"),
        ("speculators-xpress", {"num_jacobi_passes": 0}, "num_jacobi_passes cannot be 0"),
        ("speculators-xpress", {"block_size": 10**7}, "block_size cannot be 10000000"),
        ("speculators-xpress", {"xpress_rank": 10**7}, "xpress_rank cannot be 10000000"),
        ("nvidia-lilicorr", {"lilicorr_num_layers": 10**7}, "lilicorr_num_layers cannot be 10000000"),
        ("nvidia-lilicorr", {"lilicorr_num_layers": 10**4}, "lilicorr_num_layers cannot be 10000"),
        ("nvidia-lilicorr", {"lilicorr_mlp_ratio": 1e9}, r"lilicorr_mlp_ratio cannot be 1000000000\.0"),
        ("nvidia-lilicorr", {"lilicorr_mlp_ratio": float("nan")}, "lilicorr_mlp_ratio cannot be nan"),
        ("deepspec-dspark-vanilla", {"markov_rank": 10**7}, "markov_rank cannot be 10000000"),
        ("zlab-dflash2", {"selector_rank": 8}, r"candidate_selector\.hidden_projection\.weight is \[16, 64\]"),
        ("zlab-dflash2", {"selector_top_k": 0}, "selector_top_k cannot be 0"),
        ("zlab-dflash2", {"vocab_size": 256}, r"candidate_selector\.predecessor_codebook is \[512, 16\]"),
        ("nvidia-lilicorr", {"lilicorr_logit_scale": ...}, "lacks 'lilicorr_logit_scale'"),
        ("nvidia-lilicorr", {"lilicorr_vector_eps": ...}, "lacks 'lilicorr_vector_eps'"),
        ("nvidia-lilicorr", {"lilicorr_candidate_topk": 8}, r"lilicorr\.rank_embedding is \[1, 1, 1, 4, 32\]"),
        ("nvidia-lilicorr", {"lilicorr_candidate_topk": 1}, "lilicorr_candidate_topk cannot be 1"),
        ("nvidia-lilicorr", {"lilicorr_num_heads": 5}, "lilicorr_num_heads cannot be 5"),
        ("nvidia-lilicorr", {"lilicorr_enabled": False}, "lilicorr_enabled = False is not supported"),
    ],
)
def test_a_head_whose_parts_do_not_belong_together_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str | None, draft_of: Callable[[str], Path]
) -> None:
    folder = draft_of(name)
    edit(folder, **changes)
    if message is None:  # beside `dflash_config` publishers leave keys of all kinds
        load(folder)
        return
    with pytest.raises(UserError, match=message) as told:
        load(folder)
    assert "\n" not in str(told.value)


@each("name", KINDS)
def test_half_a_head_is_refused_by_the_name_of_what_is_missing(name: str, draft_of: Callable[[str], Path]) -> None:
    body = {"layers", "fc", "hidden_norm", "norm", "embed_tokens", "lm_head", "d2t", "t2d"}
    own = sorted(
        key for key in load_file(CASES / name / "draft" / "model.safetensors") if key.split(".")[0] not in body
    )
    missing = own[len(own) // 2]
    folder = draft_of(name)
    edit_tensors(folder, lambda tensors: tensors.pop(missing))
    with pytest.raises(UserError, match=f"missing tensor {missing}"):
        load(folder)


def test_every_format_of_a_head_is_in_the_table() -> None:
    assert {form for form, _, _ in KINDS.values()} <= {name for name, kind in formats.FORMATS if kind == "dflash"}


@each("value", [float("nan"), float("inf")])
@each("name", KINDS)
def test_weights_that_are_no_numbers_are_refused(name: str, value: float, draft_of: Callable[[str], Path]) -> None:
    folder = draft_of(name)
    edit_tensors(folder, lambda tensors: tensors["fc.weight"].view(-1)[7:8].fill_(value))
    with pytest.raises(UserError, match=r"fc\.weight holds NaN"):
        load(folder)
