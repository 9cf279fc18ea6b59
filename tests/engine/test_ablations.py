"""Drafts of the paper's ablations (tables 9 and 10): exact, the same from file to file, and refused elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.drafters import ddtree, dflash, dflash_ngram
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.models.formats import TargetShape, load_draft, save_draft
from dflash_bench.models.nets.bodies import FUSIONS, Mixing
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.training.drafts import body_of
from helpers.drafts.tiny import DFLASH, PROMPTS, enlarged
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny

BODIES = [(fusion, way) for fusion in FUSIONS for way in (False, True) if (fusion, way) != ("kv", False)]


def made(fusion: str, is_autoregressive: bool) -> DFlashDraft:
    body = body_of(fusion, is_autoregressive, DFLASH.num_layers)
    draft: DFlashDraft = enlarged(DFlashDraft(replace(DFLASH, body=body, shifted_labels=is_autoregressive)))
    return draft


def drafter(target: Any, draft: DFlashDraft, method: str = "dflash", module: Any = dflash) -> DFlashDrafter:
    models: Any = SimpleNamespace(draft_of=lambda _method: draft)
    built: DFlashDrafter = module.build(models, target, parse(method))
    return built


@each(("fusion", "is_autoregressive"), BODIES)
def test_a_batch_drafts_as_each_row_alone_and_is_exact(fusion: str, is_autoregressive: bool) -> None:
    target, draft = native(tiny("llama")), made(fusion, is_autoregressive)
    out = run(target, drafter(target, draft), PROMPTS, 14)
    assert out.tokens == plain_answers(target, PROMPTS, 14)
    alone = [run(target, drafter(target, draft), [prompt], 14) for prompt in PROMPTS]
    for row, one in enumerate(alone):
        assert [step.accepted[row] for step in out.own(row)] == [step.accepted[0] for step in one.own(0)]


@each(("fusion", "is_autoregressive"), BODIES)
def test_a_file_holds_what_was_drafted_with(fusion: str, is_autoregressive: bool, tmp_path: Path) -> None:
    draft = made(fusion, is_autoregressive)
    save_draft(draft, tmp_path)
    config = draft.config
    shape = TargetShape(config.hidden_size, config.vocab_size, config.num_target_layers or 0)
    again = load_draft(tmp_path, shape, torch.float32, "cpu")
    assert again.config == config and again.state_dict().keys() == draft.state_dict().keys()
    for form in ("speculators", "deepspec"):
        with pytest.raises(UserError):
            save_draft(draft, tmp_path / form, form)


def test_only_what_such_a_draft_can_do_is_built() -> None:
    target, single = native(tiny("llama")), made("kv", True)
    for method, module in (("dflash:steps=2", dflash), ("dflash:block=auto", dflash), ("dflash:shift=no", dflash)):
        with pytest.raises(UserError):
            drafter(target, single, method, module)
    for method, other in (("ddtree", ddtree), ("dflash+ngram", dflash_ngram)):
        with pytest.raises(UserError, match="drafts no block"):
            drafter(target, single, method, other)
    blind = drafter(target, made("none", False))
    assert blind.taps == () and blind.config.body.mixing is Mixing.ABSENT
