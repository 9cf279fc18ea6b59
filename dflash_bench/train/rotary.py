"""Rotary tables of a draft for rows of a given length."""

from __future__ import annotations

import torch

from dflash_bench.models.common import Rotary
from dflash_bench.models.dflash import DFlashConfig
from dflash_bench.models.eagle3 import Eagle3Config
from dflash_bench.train.batch import Data

BEYOND = 64
"""Places behind the end of a row that a block or a chain may reach."""


def tables(config: DFlashConfig | Eagle3Config, rows: Data, device: torch.device) -> Rotary:
    length = rows.ids.shape[1] + BEYOND
    return Rotary(config.head_dim, config.rope_theta, length, device, torch.float32, config.rope_scaling)
