"""Objectives make every tensor where their draft is, as a GPU needs it; told here from the calls that make tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dflash_bench.core.errors import UserError
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.training.data import Batch
from dflash_bench.training.dflash import DFlashObjective
from dflash_bench.training.drafts import DraftVocab, new_medusa
from dflash_bench.training.eagle3 import Eagle3Objective
from dflash_bench.training.medusa import MedusaObjective
from dflash_bench.training.prepare import device_of
from dflash_bench.training.trainer import Objective
from helpers import tiny
from helpers.each import each

FACTORIES = (torch.arange, torch.full, torch.zeros, torch.ones, torch.empty, torch.tensor, torch.eye)
LENGTH = 24
EMBEDDING = torch.randn(tiny.VOCABULARY, tiny.HIDDEN, generator=torch.Generator().manual_seed(0))


class Made(TorchFunctionMode):
    """Raises where a tensor is made without saying where: it would be on the host."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert call not in FACTORIES or (kwargs or {}).get("device") is not None, f"{call.__name__} without a device"
        return call(*args, **(kwargs or {}))


class Ready:
    """Rows that are on their device already."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 64, (2, LENGTH), generator=generator)
        self.answer = (torch.arange(LENGTH) >= 6).repeat(2, 1)
        self.num_held_out = 1
        position = torch.arange(LENGTH).repeat(2, 1)
        self.batch = Batch(self.ids, self.answer.float(), torch.zeros_like(self.ids), position)
        self.states = torch.randn(2, LENGTH, 3 * tiny.HIDDEN, generator=generator)

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        return self.batch, self.states[..., : len(layers) * tiny.HIDDEN]

    def final(self, index: Sequence[int]) -> Tensor:
        return self.states[..., : tiny.HIDDEN]


def dflash() -> Objective:
    draft = DFlashDraft(
        DFlashConfig(head_dim=16, num_layers=1, block_size=4, mask_token_id=3, target_layer_ids=(0, 2), **tiny.BODY)  # type: ignore[arg-type]
    )
    initialise(draft, 0)
    return DFlashObjective(draft, Ready(), DraftVocab.of(EMBEDDING, EMBEDDING), 4, 4.0, distil=0.5)


def eagle3() -> Objective:
    draft = Eagle3Draft(Eagle3Config(head_dim=16, draft_vocab_size=64, target_layer_ids=(1, 0, 2), **tiny.BODY))  # type: ignore[arg-type]
    initialise(draft, 0)
    return Eagle3Objective(draft, Ready(), DraftVocab.of(EMBEDDING, EMBEDDING), 3)


def medusa() -> Objective:
    return MedusaObjective(new_medusa(EMBEDDING, 2), Ready())


@pytest.mark.parametrize("make", [dflash, eagle3, medusa])
def test_nothing_is_made_on_the_host(make: Callable[[], Objective]) -> None:
    objective = make()
    with Made():
        objective.loss([0, 1], 1).backward()
        objective.accepted([0, 1])


def test_the_check_finds_what_is_made_on_the_host() -> None:
    with pytest.raises(AssertionError, match="arange without a device"), Made():
        torch.arange(3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [dflash, eagle3, medusa])
def test_a_step_on_a_gpu(make: Callable[[], Objective]) -> None:
    torch.set_default_device("cuda")
    try:
        objective = make()
    finally:
        torch.set_default_device("cpu")
    assert objective.loss([0, 1], 1).isfinite()


@each("device", ["gpu", "cpu:1", "cuda:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=r"device|GPUs"):
        device_of(device)
