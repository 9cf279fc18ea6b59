"""`inspect`: what a draft is and what does not fit, from headers alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_bench.core.errors import DraftProblem, UserError
from dflash_bench.core.methods import METHODS
from dflash_bench.diagnose.golden_cases import CASES
from dflash_bench.models import weights
from dflash_bench.models.inspect import as_json, inspect, text
from dflash_bench.models.presets import NANO
from helpers.each import each


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_nanos_dflash_draft_is_described() -> None:
    lines = text(inspect(str(NANO / "dflash"), "nano")).splitlines()
    stored = load_file(NANO / "dflash" / "model.safetensors")
    count = sum(tensor.numel() for tensor in stored.values())
    assert lines == [
        "format         zlab (dflash)",
        "kind           dflash (DFlash)",
        f"used by        {', '.join(kind.name for kind in METHODS.values() if kind.weights == 'dflash')}",
        "block size     16, drafts 15 tokens per round",
        "tapped layers  outputs of 1 4 7 10 13 (inputs of 2 5 8 11 14)",
        "mask id        1000",
        "labels         infill: slot k predicts the token at slot k, slot 0 is idle",
        "vocabulary     1024, drafts from all of it",
        "embedding      the target's",
        "head           the target's",
        "layers         2 of 128/384, 4 heads on 2 of 64",
        "rotary         theta 10000",
        f"size           {count:,} parameters, {count * 4 / 2**20:,.1f} MiB, float32",
        "trained for    a target of 16 layers",
        "fits           nano",
    ]


TOLD = {
    "zlab-dflash2-sliding": (
        "attention      1 layer causal in the block, a window of 12; 1 layer both ways in the block, no window",
        "body           convolutions of 3 taps in groups of 8, output_multiplier 0.5, logit_softcap 5.0",
        "correction     DFlash 2: selector_rank 8, selector_top_k 8",
    ),
    "zlab-sliding-noncausal": (
        "attention      2 layers both ways in the block, a window of 5; 1 layer both ways in the block, no window",
    ),
    "jetspec-causal-head": ("attention      2 layers causal in the block, no window",),
    "angelslim-dflare": ("body           mixing by layer, own_context_weights",),
    "speculators-xpress": ("correction     XPress: rank 16, mlp_ratio 2, num_jacobi_passes 3",),
}


@each("case", TOLD)
def test_what_tells_a_draft_from_a_plain_dflash_is_told(case: str) -> None:
    lines = text(inspect(str(CASES / case / "draft"))).splitlines()
    assert tuple(line for line in lines if line.split()[0] in ("attention", "body", "correction")) == TOLD[case]


def test_nanos_eagle3_draft_is_described_as_json() -> None:
    seen = as_json(inspect(str(NANO / "eagle3"), "nano"))
    assert seen["format"] == "safeailab" and seen["method"] == "eagle3" and seen["problems"] == ()
    assert seen["tapped_outputs"] == (1, 7, 12) and seen["tapped_inputs"] == (2, 8, 13)
    assert seen["draft_vocab_size"] == 512 and seen["own_head"] and seen["labels"] is None
    assert seen["notes"] == (
        "eagle_aux_hidden_state_layer_ids [2, 8, 13]: starts with 2, so it is taken for inputs of layers",
    )
    json.dumps(seen, allow_nan=False)


def test_medusa_heads_are_described_too(copied: Path) -> None:
    seen = inspect(str(NANO / "medusa"), "nano")
    assert (seen.method, seen.num_drafts, seen.vocab_size, seen.problems) == ("medusa", 4, 1024, ())
    lines = text(seen).splitlines()
    assert "block size     drafts 4 tokens per round" in lines and lines[-1] == "fits           nano"
    assert not any(line.startswith(("tapped", "embedding", "rotary")) for line in lines)
    assert inspect(str(NANO / "medusa"), str(copied / "target")).problems == (
        DraftProblem("hidden_size", "hidden size 128, but the target's is 32", "use heads made for this target"),
    )


def test_a_language_model_is_a_draft_too(copied: Path) -> None:
    assert inspect(str(NANO / "draft-model"), "nano").used_by == ("draft-model",)
    blocks = inspect(str(NANO / "block-diffusion"), "nano")
    assert (blocks.method, blocks.block_size, blocks.mask_token_id) == ("block-diffusion", 8, 1000)
    tensors = load_file(copied / "target" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file(tensors | {name: tensors[name][:900].clone()}, copied / "target" / "model.safetensors")
    (problem,) = inspect(str(NANO / "draft-model"), str(copied / "target")).problems
    assert problem.what.startswith("vocabulary of 1024, the target's is ")


def test_layers_that_only_the_target_decides_are_a_formula_until_it_is_given(copied: Path) -> None:
    config = json.loads((copied / "eagle3" / "config.json").read_text())
    del config["eagle_config"]
    (copied / "eagle3" / "config.json").write_text(json.dumps(config))
    assert "outputs of 1, n//2 - 1, n - 4, where n is the target's depth" in text(inspect(str(copied / "eagle3")))
    assert inspect(str(copied / "eagle3")).tapped_outputs is None
    # tiny has 4 layers: the lowest default tap is the last but two, the highest the first.
    assert inspect(str(copied / "eagle3"), str(copied / "target")).tapped_outputs == (1, 1, 0)


def test_everything_that_does_not_fit_is_a_line_of_its_own(copied: Path) -> None:
    draft = copied / "dflash"
    edit(draft, vocab_size=6000, num_target_layers=9, dflash_config={"mask_token_id": 5000, "target_layer_ids": [0, 7]})
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"] = torch.ones(31)
    tensors["extra"] = tensors.pop("fc.weight")
    save_file(tensors, draft / "model.safetensors")
    problems = inspect(str(draft), str(copied / "target")).problems
    expected = (
        "vocabulary of 6000",
        "taps layer 7",
        "made for a target of 9",
        "mask id 5000",
        "missing tensor fc.we",
        "surplus tensor extra",
        "norm.weight is [31]",
    )
    assert len(problems) == len(expected)
    assert all(problem.what.startswith(start) for problem, start in zip(problems, expected, strict=True))
    assert all(problem.remedy for problem in problems) and len({problem.code for problem in problems}) == 7


def test_weights_are_not_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = weights._tensor
    monkeypatch.setattr(weights, "_tensor", lambda *given: seen.append(original(*given)) or seen[-1])
    inspect(str(copied / "eagle3"), str(copied / "target"))
    assert {tensor.ndim for tensor in seen if not tensor.is_meta} == {1} and any(tensor.is_meta for tensor in seen)


def test_the_command_exits_1_where_something_does_not_fit_and_2_where_nothing_can_be_said(
    copied: Path, main: Callable[..., tuple[int, str, str]]
) -> None:
    assert main("inspect", copied / "dflash", "--target", copied)[0] == 0
    status, said, _ = main("inspect", copied / "dflash", "--target", "nano", "--json")
    assert status == 1 and "hidden size 32, but the target's is 128" in json.loads(said)["problems"][0]["what"]
    edit(copied / "target", architectures=["SomethingElse"])
    # In a process of its own: what it loads says nothing of its own either.
    code = "from dflash_bench.cli import main; main()"
    words = [sys.executable, "-c", code, "inspect", str(copied / "target")]
    foreign = subprocess.run(words, capture_output=True, text=True, check=False)
    assert foreign.returncode == 2 and foreign.stdout == "" and len(foreign.stderr.splitlines()) == 1
    assert "looked for config.json with speculators_model_type" in foreign.stderr


def test_a_draft_with_another_tokenizer_does_not_fit(copied: Path) -> None:
    draft, target = copied / "dflash", copied / "target"
    shutil.copy(target / "tokenizer.json", draft)
    assert inspect(str(draft), str(target)).problems == ()
    content = json.loads((draft / "tokenizer.json").read_text())
    tokens = {index: token for token, index in content["model"]["vocab"].items()}
    content["model"]["vocab"] |= {tokens[300]: 301, tokens[301]: 300}
    (draft / "tokenizer.json").write_text(json.dumps(content))
    (problem,) = inspect(str(draft), str(target)).problems
    assert problem.what.startswith("made for another tokenizer: 2 of 1000 ids differ; 300 is ")
    assert inspect(str(draft)).problems == ()


def test_a_target_without_a_tokenizer_does_not_fit(copied: Path) -> None:
    for path in (copied / "target").glob("tokenizer*"):
        path.unlink()
    (problem,) = inspect(str(copied / "dflash"), str(copied / "target")).problems
    assert "has no tokenizer that reads text" in problem.what


def test_another_verifier_is_a_line(copied: Path) -> None:
    edit(copied / "eagle3", speculators_config={"verifier": {"name_or_path": "Org/Other-8B"}})
    told = "its config names Org/Other-8B as its target, but this one is "
    assert told + "nano" in inspect(str(copied / "eagle3"), "nano").notes
    assert told + "model" in text(inspect(str(copied / "eagle3"), str(copied)))
    edit(copied / "eagle3", speculators_config={"verifier": {"name_or_path": "Org/Model"}})
    assert "its config names" not in text(inspect(str(copied / "eagle3"), str(copied)))


def test_a_model_is_no_draft_and_its_drafts_are_named() -> None:
    with pytest.raises(UserError, match=r"nano is a model and not a draft; its drafts are nano/dflash, nano/eagle3, "):
        inspect("nano")
    assert inspect("nano/dflash") == inspect(str(NANO / "dflash"))
    with pytest.raises(UserError, match=r"qwen3-8b is a model and not a draft; its drafts are z-lab/Qwen3-8B-DFlash"):
        inspect("qwen3-8b")


@each(
    ("change", "message"),
    [
        ({"hidden_size": "abc"}, "cannot load a causal language model .*expected int, got str"),
        ({"num_hidden_layers": 5}, "cannot load a causal language model .*num_hidden_layers"),
        ({"num_attention_heads": 0}, r"is not a target: num_attention_heads in its config\.json cannot be 0"),
        ({"vocab_size": -1}, r"is not a target: vocab_size in its config\.json cannot be -1"),
    ],
)
def test_a_target_whose_config_is_damaged_is_refused(change: dict[str, Any], message: str, copied: Path) -> None:
    edit(copied / "target", **change)
    with pytest.raises(UserError, match=message) as told:
        inspect(str(copied / "dflash"), str(copied / "target"))
    assert "\n" not in str(told.value)


def test_a_target_that_is_none_is_refused(copied: Path) -> None:
    with pytest.raises(UserError, match="unknown model 'nowhere'"):
        inspect(str(copied / "dflash"), "nowhere")
