"""Configs and tensors that describe no draft, or another: one line that names the fault, and no memory for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models import formats
from dflash_bench.models.formats import TargetShape, load_draft
from dflash_bench.models.inspect import inspect, text
from helpers import tiny
from helpers.each import each

TARGET = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Callable[[str, Change], Path]:
    """A copy of one of the drafts with its config and tensors changed."""

    def change(kind: str, damage: Change) -> Path:
        folder = Path(shutil.copytree(model / kind, mkdtemp(dir=tmp_path), dirs_exist_ok=True))
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        damage(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder

    return change


def config(**values: Any) -> Change:
    return lambda config, _tensors: config.update(values)


def without_half_a_map(**values: Any) -> Change:
    """The other half is then made, which takes memory."""
    return lambda config, tensors: (config.update(values), tensors.pop("t2d"))


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda _config, tensors: tensors.update({name: change(tensors.get(name, torch.empty(0)))})


def scaled(**settings: Any) -> Change:
    return config(rope_scaling={"rope_type": "yarn", "factor": 4.0, **settings})


DAMAGES: dict[str, tuple[str, Change, str]] = {
    "no draft vocabulary": ("eagle3", config(draft_vocab_size=None), "draft_vocab_size cannot be None"),
    "a map that is a number": ("eagle3", tensor("d2t", lambda _: torch.tensor(3)), r"d2t is int64 \[\], not one"),
    "a map of two columns": ("eagle3", tensor("d2t", lambda d2t: d2t[:, None]), r"d2t is int64 \[64, 1\], not one"),
    "an unsigned map": ("eagle3", tensor("d2t", lambda d2t: d2t.to(torch.uint32)), r"d2t is uint32 \[64\], not one"),
    "a map of fractions": ("eagle3", tensor("d2t", lambda d2t: d2t.float()), r"d2t is float32 \[64\], not one"),
    "a negative vocabulary": ("eagle3", without_half_a_map(vocab_size=-5), "vocab_size cannot be -5"),
    "a vocabulary of terabytes": ("eagle3", without_half_a_map(vocab_size=10**14), "vocab_size cannot be 10{14}"),
    "a draft vocabulary of terabytes": ("eagle3", config(draft_vocab_size=10**14), "draft_vocab_size cannot be 10{14}"),
    "a width that overflows": ("dflash", config(hidden_size=2**50), f"hidden_size cannot be {2**50}"),
    "a width beyond integers": ("dflash", config(hidden_size=2**63), f"hidden_size cannot be {2**63}"),
    "layers without end": ("dflash", config(num_hidden_layers=10**9, layer_types=None), "num_layers cannot be 10{9}"),
    "a base beyond floats": ("dflash", config(rope_theta=10**400), "wrong type"),
    "an infinite base": ("dflash", config(rope_theta=1e999), "rope_theta cannot be inf"),
    "a factor that is text": ("dflash", scaled(factor="4"), "factor of its rotary scaling cannot be '4'"),
    "a speed that is text": ("dflash", scaled(beta_fast="x"), "beta_fast of its rotary scaling cannot be 'x'"),
    "a factor of nothing": ("dflash", scaled(factor=0), r"rotary scaling .* gives no valid angles"),
    "a type for too few layers": (
        "dflash",
        config(layer_types=["full_attention"] * 2),
        "layer_types names 2 layers, num_hidden_layers 1",
    ),
    "fused beside single projections": (
        "dflash",
        tensor("layers.0.self_attn.qkv_proj.weight", lambda _: torch.ones(64, 32)),
        "surplus tensor .*qkv",
    ),
    "fp8 without its scales": (
        "dflash",
        tensor("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn)),
        "holds torch.float8_e4m3fn: quantised",
    ),
    "complex weights": ("dflash", tensor("norm.weight", lambda w: w.to(torch.complex64)), "holds torch.complex64"),
}


@each("what", DAMAGES)
def test_damage_is_refused_in_one_line_whoever_reads_it(what: str, changed: Callable[[str, Change], Path]) -> None:
    kind, damage, message = DAMAGES[what]
    folder = changed(kind, damage)
    with pytest.raises(UserError, match=message) as told:
        load_draft(folder, TARGET, torch.float32, "cpu")
    assert "\n" not in str(told.value)
    try:
        problems = inspect(str(folder)).problems
    except UserError:
        return
    assert problems


HARMLESS: dict[str, Change] = {
    "a window by the older keys": config(
        layer_types=None, use_sliding_window=True, sliding_window=64, max_window_layers=0
    ),
    "no share of rotary positions": config(partial_rotary_factor=None),
    "a window that nothing uses": config(layer_types=None, use_sliding_window=True, sliding_window=64),
    "a window that is off": config(layer_types=None, use_sliding_window=False, sliding_window=64, max_window_layers=0),
}


@each("what", HARMLESS)
def test_what_only_looks_odd_is_read(what: str, changed: Callable[[str, Change], Path]) -> None:
    load_draft(changed("dflash", HARMLESS[what]), TARGET, torch.float32, "cpu")


def test_only_scalings_that_start_from_a_length_are_given_one(changed: Callable[[str, Change], Path]) -> None:
    folder = changed("dflash", config(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    _, checkpoint = formats.read_checkpoint(folder, None, headers_only=True)
    assert checkpoint.config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


# The depth of the target: declared by the file, or given.


def nameless(**values: Any) -> Change:
    return lambda config, _tensors: (config["dflash_config"].pop("target_layer_ids"), config.update(values))


def test_a_depth_that_is_null_is_not_declared(changed: Callable[[str, Change], Path]) -> None:
    """Layers that are not named are derived from the depth of the target that is given, as z-lab's own reader does."""
    folder = changed("dflash", nameless(num_target_layers=None))
    _, unknown = formats.read_checkpoint(folder, None, headers_only=True)
    assert unknown.derived_taps is not None and inspect(str(folder)).tapped_outputs is None
    _, known = formats.read_checkpoint(folder, TARGET)
    assert known.derived_taps is None and known.config.target_layer_ids == (1, 1)
    assert load_draft(folder, TARGET, torch.float32, "cpu").config.target_layer_ids == (1, 1)


def test_a_depth_that_is_given_is_not_told_as_the_drafts_own(model: Path) -> None:
    seen = inspect(str(model / "eagle3"), str(model))
    assert seen.trained_for is None and "trained for" not in text(seen)
    _, checkpoint = formats.read_checkpoint(model / "eagle3", TARGET)
    assert checkpoint.config.num_target_layers is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c, _: c["dflash_config"].update(target_layer_ids=[0, 4]), "taps layer 4, but the target has layers 0"),
        (lambda c, _: c["dflash_config"].update(target_layer_ids=[-1, 2]), "taps layer -1"),
    ],
)
def test_without_a_target_a_file_is_held_to_what_it_says_itself(
    damage: Change, message: str, changed: Callable[[str, Change], Path]
) -> None:
    problems = inspect(str(changed("dflash", damage))).problems
    assert len(problems) == 1 and problems[0].what.startswith(message)
