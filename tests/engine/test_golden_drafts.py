"""Bodies of drafts in publishers' formats: what is drafted and accepted is what the publishers' own code drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.forward.compiled_drafts import CompiledDFlash
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.target import Target
from dflash_bench.models import loading
from dflash_bench.models.formats import read_checkpoint
from dflash_bench.models.nets.bodies import PLAIN
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.presets import Preset
from dflash_bench.models.weights import write_checkpoint
from helpers.each import each
from helpers.golden_drafts import CASES as FOLDER
from helpers.golden_drafts import assert_drafts_as_published, golden
from helpers.pretended_gpu.traced import traced
from helpers.toy import run

CASES = (
    "zlab-sliding-default",
    "zlab-sliding-noncausal",
    "zlab-causal-full",
    "zlab-embedding-scale",
    "jetspec-causal-head",
    "angelslim-dflare",
    "zlab-dflash2",
    "zlab-dflash2-sliding",
)


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        *((name, forward) for name in CASES for forward in ({}, {"kernels": "torch"})),
        # The draft is that of torch, and what it reads of a target does not depend on its kind.
        ("zlab-embedding-scale", {"engine": "transformers"}),
    ],
    ids=str,
)
def test_drafts_are_those_of_the_publishers_code(name: str, forward: dict[str, str]) -> None:
    assert_drafts_as_published(name, "dflash", **forward)


@each("name", CASES)
def test_rows_of_a_batch_draft_what_they_draft_alone(name: str) -> None:
    """Rows of different lengths, beside each other: no window, convolution or context reaches into another row."""
    case = golden(name)
    models, target = opened(name)
    drafter = DFlashDrafter(models.drafts["dflash"], target.embedding, target.head)
    drafter.compile()
    # Kernels need heads of whole vectors, and otherwise compute every body.
    assert isinstance(drafter.network, CompiledDFlash) == (drafter.config.head_dim % 8 == 0)
    cases = [one for one in case["cases"] if not one.get("stop_token_ids")]
    prompts, most = [one["prompt"] for one in cases], min(one["max_new_tokens"] for one in cases)
    several = run(target, drafter, prompts, most)
    alone = [run(target, drafter, [prompt], most) for prompt in prompts]
    assert several.tokens == [out.tokens[0] for out in alone]
    for row, out in enumerate(alone):
        drafted = [step.drafted_ids[row] for step in several.rounds if step.emitted[row] is not None]
        assert drafted == [step.drafted_ids[0] for step in out.rounds]


@each("num_rows", [1, 3])
@each("name", CASES)
def test_captured_passes_draft_the_same(name: str, num_rows: int) -> None:
    models, target = opened(name)
    drafter = DFlashDrafter(models.drafts["dflash"], target.embedding, target.head)
    prompts = [one["prompt"] for one in golden(name)["cases"]][:num_rows]
    usual = run(target, drafter, prompts, 16)
    drafter.graph_cache = GraphCache(traced)
    for _ in range(3):
        captured = run(target, drafter, prompts, 16)
    assert drafter.graph_cache.num_replayed > 0 and drafter.graph_cache.why_not is None
    assert [step.drafted_ids for step in captured.rounds] == [step.drafted_ids for step in usual.rounds]
    assert captured.tokens == usual.tokens


def opened(name: str) -> tuple[loading.Models, Target]:
    place = (FOLDER / name / golden(name)["target"]).resolve()
    preset = Preset(str(place), {"dflash": str(FOLDER / name / "draft")})
    models = loading.load(preset, ["dflash"], "cpu", torch.float32, needs_tokenizer=False)
    return models, Target(models.target, network=NativeForward(models.target))


def test_identity_convolutions_and_a_zero_selector_draft_as_dflash() -> None:
    models, target = opened("zlab-dflash2")
    second = models.drafts["dflash"]
    config = replace(second.config, body=PLAIN, correction=None)
    plain = DFlashDraft(config)
    plain.load_state_dict({name: tensor for name, tensor in second.state_dict().items() if name in plain.state_dict()})
    with torch.no_grad():
        second.candidate_selector.hidden_projection.weight.zero_()
        for layer in second.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                conv.base_kernel.zero_()[:, 0] = 1
                conv.kernel_projection.weight.zero_()
    prompts = [one["prompt"] for one in golden("zlab-dflash2")["cases"]][:3]
    first, again = (
        run(target, DFlashDrafter(draft, target.embedding, target.head), prompts, 20).rounds
        for draft in (plain.eval(), second)
    )
    assert [step.drafted_ids for step in first] == [step.drafted_ids for step in again]


@each("name", CASES)
def test_written_and_read_again_it_is_the_same(name: str, tmp_path: Path) -> None:
    folder = FOLDER / name / "draft"
    form, stored = read_checkpoint(folder, None)
    config, tensors = form.write(stored)
    write_checkpoint(tmp_path / "again", config, tensors)
    again = read_checkpoint(tmp_path / "again", None)[1]
    assert again.config == stored.config
    assert {*again.tensors} == {*stored.tensors}
