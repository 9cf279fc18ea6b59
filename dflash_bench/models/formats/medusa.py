"""Medusa heads as FasterDecoding publishes them: config.json, and medusa_lm_head.safetensors or .pt beside it.

Tensors are `HEAD.BLOCK.linear.weight` and `.bias` of the residual blocks, then `HEAD.N.weight` [V, H] without a bias.
In some checkpoints the config names fewer heads than the file holds; we read all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from dflash_bench.core.errors import DraftProblem, UserError
from dflash_bench.models import weights
from dflash_bench.models.formats import fit
from dflash_bench.models.formats.base import FLOATS, Json, TargetShape, Tensors
from dflash_bench.models.formats.known import MEDUSA_WEIGHTS
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads

MOST = 64
"""The most heads, or blocks of a head: a damaged number must not make us allocate huge memory."""


def load(folder: Path, target: TargetShape, dtype: torch.dtype, device: str) -> MedusaHeads:
    """Load Medusa heads. Raises UserError if there are none, for a damaged file, and for another target's heads."""
    config, tensors = read(folder)
    for problem in misfits(config, target):
        raise UserError(f"{folder}: {problem}")
    if config.vocab_size > target.vocab_size:
        config = replace(config, vocab_size=target.vocab_size)
        out = f".{config.num_layers}.weight"
        tensors = {name: t[: target.vocab_size] if name.endswith(out) else t for name, t in tensors.items()}
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads = heads.to(dtype).to_empty(device=device)
    heads.load_state_dict(dict(tensors))
    return heads.eval()


def misfits(config: MedusaConfig, target: TargetShape) -> Iterator[DraftProblem]:
    """Yield the sizes that show that the heads were made for another target."""
    if config.hidden_size != target.hidden_size:
        what = f"hidden size {config.hidden_size}, but the target's is {target.hidden_size}"
        yield DraftProblem("hidden_size", what, "use heads made for this target")
    yield from fit.other_vocabulary(config.vocab_size, target)


def read(folder: Path, headers_only: bool = False) -> tuple[MedusaConfig, Tensors]:
    """Read the heads' config and tensors. Raises UserError for anything that does not match the format."""
    config = read_config(folder)
    path = next((folder / name for name in MEDUSA_WEIGHTS if os.path.lexists(folder / name)), None)
    if path is None:
        raise UserError(f"{folder} holds no Medusa heads: {' or '.join(MEDUSA_WEIGHTS)} is missing")
    if str(config.get("version", "1")) != "1":
        raise UserError(f"{folder}: Medusa heads of version {config['version']} are not supported; use version 1")
    tensors = weights.read_file(path, (lambda _name: False) if headers_only else weights.everything)
    medusa_config = _described(path, config, tensors)
    _check_tensors(path, medusa_config, tensors)
    return medusa_config, tensors


def save(heads: MedusaHeads, folder: Path, base_model: str) -> None:
    config = {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base_model,
        "medusa_num_heads": heads.config.num_heads,
        "medusa_num_layers": heads.config.num_layers,
    }
    weights.write_checkpoint(folder, config, heads.state_dict(), MEDUSA_WEIGHTS[0])


def _described(path: Path, config: Json, tensors: Tensors) -> MedusaConfig:
    """Return the config: the number of layers is the file's, the number of heads and all sizes are the tensors'."""
    names = [match for name in tensors if (match := re.fullmatch(r"(\d+)\.\d+(\.linear)?\.(weight|bias)", name))]
    odd = sorted(tensors.keys() - {match[0] for match in names})
    if odd or not names:
        what = f"tensor {odd[0]}" if odd else "no tensors"
        raise UserError(f"{path} holds {what}, and Medusa heads are HEAD.BLOCK.linear.* and HEAD.N.weight; use those")
    num_heads = max(int(match[1]) for match in names) + 1
    named, num_layers = config.get("medusa_num_heads"), config.get("medusa_num_layers")
    for key, value in (
        ("medusa_num_heads", named),
        ("medusa_num_layers", num_layers),
        ("heads in the file", num_heads),
    ):
        if type(value) is not int or not 1 <= value <= MOST:
            raise UserError(f"{path}: {key} cannot be {value!r}; copy config.json and weights again")
    if named > num_heads:  # type: ignore[operator]
        raise UserError(f"{path} holds {num_heads} heads, but config.json says {named}; copy the checkpoint again")
    out = tensors.get(f"0.{num_layers}.weight")
    if out is None or out.ndim != 2:
        raise UserError(
            f"{path}: missing tensor 0.{num_layers}.weight; copy it again, or see if config.json belongs to it"
        )
    return MedusaConfig(out.shape[1], out.shape[0], num_heads, num_layers)  # type: ignore[arg-type]


def _check_tensors(path: Path, config: MedusaConfig, tensors: Tensors) -> None:
    with torch.device("meta"):
        expected = MedusaHeads(config).state_dict()
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "missing" if name in expected else "surplus"
        raise UserError(f"{path}: {what} tensor {name}; copy it again, or see if config.json belongs to it")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, but the other tensors need {list(expected[name].shape)}"
            raise UserError(f"{path}: {name} is {shapes}; copy it again")
        if tensor.dtype not in FLOATS:
            raise UserError(f"{path}: {name} holds {tensor.dtype}: quantised heads are not supported; use the original")
