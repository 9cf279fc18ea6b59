"""P-EAGLE drafts in files of SpecForge and of the speculators library: read, written, and refused by what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.models import convert, gguf_writer, loading
from dflash_bench.models.formats import TargetShape, load_draft, read_checkpoint, save_draft
from dflash_bench.models.inspect import inspect, text
from dflash_bench.models.memory import demand_of, round_of
from dflash_bench.models.nets.p_eagle import PEagleConfig, PEagleDraft
from helpers.each import each
from helpers.golden_drafts import CASES

TARGET = TargetShape(32, 97, 6)
CONFIG = PEagleConfig(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    num_target_layers=None,
    target_layer_ids=(0, 2, 4),
    draft_vocab_size=97,
    own_embedding=True,
    mask_token_id=96,
    num_layers=3,
)
GOLDEN = CASES / "specforge-p-eagle/draft"
SMALL = CASES / "_targets/small"


def made(**changes: Any) -> PEagleDraft:
    draft = PEagleDraft(replace(CONFIG, **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return draft


def load(folder: Path) -> PEagleDraft:
    draft: Any = load_draft(folder, TARGET, torch.float32, "cpu")
    assert isinstance(draft, PEagleDraft)
    return draft


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "SpecForge's": ("specforge", {}),
    "SpecForge's, normed residual": ("specforge", {"norm_before_residual": True}),
    "speculators'": ("speculators", {"trained_drafts": 7}),
    "speculators' EAGLE 3.1": ("speculators", {"trained_drafts": 4, "fc_norm": True, "norm_output": True}),
    "speculators' with a norm before fc": ("speculators", {"trained_drafts": 4, "norm_before_fc": True}),
    "speculators' windows": ("speculators", {"trained_drafts": 4, "window": 7}),
    "speculators' Qwen 3": ("speculators", {"trained_drafts": 2, "qk_norm": True, "num_layers": 1}),
}


@each("variant", VARIANTS)
def test_a_saved_draft_comes_back_bit_for_bit(variant: str, tmp_path: Path) -> None:
    form, changes = VARIANTS[variant]
    draft = made(**changes)
    save_draft(draft, tmp_path, form)
    again = load(tmp_path)
    assert again.config == draft.config
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in names and not any(name.startswith("midlayer") for name in names)


def test_the_layers_of_a_speculators_draft_are_counted_where_its_config_does_not(tmp_path: Path) -> None:
    save_draft(made(), tmp_path, "speculators")
    edit(tmp_path, lambda config: config["transformer_layer_config"].pop("num_hidden_layers"))
    assert load(tmp_path).config.num_layers == 3


def test_specforges_taps_name_inputs_even_if_they_begin_with_1() -> None:
    config = read_checkpoint(GOLDEN, None, headers_only=True)[1].config
    assert isinstance(config, PEagleConfig)
    assert (config.target_layer_ids, config.num_layers, config.mask_token_id) == ((0, 1, 2), 2, 3)


def test_specforges_angles_are_not_scaled_as_in_its_own_code(tmp_path: Path) -> None:
    save_draft(made(), tmp_path, "specforge")
    scaling = {"rope_type": "linear", "factor": 4.0}
    edit(tmp_path, lambda config: config.update(rope_theta=5e4, rope_scaling=scaling))
    config = load(tmp_path).config
    assert config.rope_scaling is None and config.rope_theta == 5e4
    assert "rotary scaling in config.json is left out" in text(inspect(str(tmp_path)))


def test_layers_with_and_without_a_window_are_not_read_as_one(tmp_path: Path) -> None:
    save_draft(made(window=7), tmp_path, "speculators")
    assert "a window of 7" in text(inspect(str(tmp_path)))
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    edit(tmp_path, lambda config: config["transformer_layer_config"].update(layer_types=kinds))
    with pytest.raises(UserError, match="sliding window"):
        load(tmp_path)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


WRONG_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no mask": (lambda c: c.pop("mask_token_id"), "without mask_token_id in config.json cannot be read"),
    "a mask that no token is": (lambda c: c.update(mask_token_id=97), "mask id 97 is outside its own embedding"),
    "a mask that is no number": (lambda c: c.update(mask_token_id="x"), "mask_token_id cannot be 'x'"),
    "fewer layers": (lambda c: c.update(num_hidden_layers=2), r"surplus tensor layers\.2"),
    "more layers": (lambda c: c.update(num_hidden_layers=4), r"missing tensor layers\.3"),
    "no layers": (lambda c: c.update(num_hidden_layers=0), "num_layers cannot be 0"),
    "the embedding tapped": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        "taps layer -1",
    ),
    "an unknown key": (lambda c: c["eagle_config"].update(twist=1), "with 'twist' in eagle_config"),
}


@each("what", WRONG_CONFIGS)
def test_a_config_that_cannot_be_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, message = WRONG_CONFIGS[what]
    save_draft(made(), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(UserError, match=message) as told:
        load(tmp_path)
    assert "\n" not in str(told.value)


def test_a_draft_without_its_masks_or_with_narrower_ones_is_refused(tmp_path: Path) -> None:
    save_draft(made(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(mask_hidden=torch.zeros(1, 1, 32)))
    with pytest.raises(UserError, match=r"mask_hidden is \[1, 1, 32\], config.json says \[1, 1, 96\]"):
        load(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("mask_hidden"))
    with pytest.raises(UserError, match="missing tensor mask_hidden"):
        load(tmp_path)


def test_it_is_no_draft_for_eagle3_and_says_what_it_is_for() -> None:
    with pytest.raises(UserError, match=r"a draft for p-eagle, .*--draft p-eagle="):
        loading.fetch("eagle3", str(GOLDEN))


def test_it_is_converted_between_both_forms_and_not_to_llama_cpps(tmp_path: Path) -> None:
    convert.convert(str(GOLDEN), tmp_path / "there", "speculators", str(SMALL))
    convert.convert(str(tmp_path / "there"), tmp_path / "back", "specforge", str(SMALL))
    first, last = (load_file(folder / "model.safetensors") for folder in (GOLDEN, tmp_path / "back"))
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    with pytest.raises(UserError, match=r"^llama\.cpp .*P-EAGLE"):
        gguf_writer.describe(read_checkpoint(GOLDEN, None)[1], 4)


def test_inspect_describes_it() -> None:
    seen = inspect(str(GOLDEN))
    assert (seen.method, seen.used_by, seen.mask_token_id, seen.problems) == ("p-eagle", ("p-eagle",), 3, ())
    assert (seen.tapped_inputs, seen.draft_vocab_size) == ((1, 2, 3), 288)
    assert "2 of 48/64, 4 heads on 2 of 12" in text(seen)


def test_a_round_is_the_users_the_checkpoints_or_five() -> None:
    unsaid, said = CONFIG, replace(CONFIG, trained_drafts=7)
    assert [round_of(parse("p-eagle"), config) for config in (unsaid, said)] == [(5, 10), (7, 14)]
    assert [round_of(parse("p-eagle:3"), config) for config in (unsaid, said)] == [(3, 6), (3, 6)]


def test_memory_counts_all_layers() -> None:
    demand = demand_of(SMALL, {"p-eagle": GOLDEN}, [parse("ar"), parse("p-eagle:5")], torch.float32)
    loaded = load_draft(GOLDEN, TargetShape(48, 320, 4), torch.float32, "cpu")
    assert demand.drafts["p-eagle"].weights_bytes == sum(tensor.nbytes for tensor in loaded.state_dict().values())
    assert demand.drafts["p-eagle"].place_bytes == 2 * 2 * 2 * 12 * 4
