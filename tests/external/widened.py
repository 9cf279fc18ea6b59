"""Golden cases with wider heads: a server whose attention has no heads so narrow computes the same functions of them.

Each head gets more places, which hold zero. Its rotation keeps its frequencies: pair i of RoPE's pairs becomes pair
`ratio * i` of the wider head. Norms divide by a mean over more places, and scores by the root of more: both are made up
for in the weights. So every draft stays what it was, but for float32's rounding.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INPUT = re.compile(r"\.self_attn\.([qkv])_proj\w*\.weight$")


def width_of(checkpoints: Sequence[Path], known: Sequence[int]) -> int:
    """The least of the known widths that all of them can have: a multiple of each one's own."""
    narrow = [_body(json.loads((one / "config.json").read_text(encoding="utf-8")))["head_dim"] for one in checkpoints]
    return next(width for width in sorted(known) if all(width % one == 0 for one in narrow))


def widen(checkpoint: Path, folder: Path, new: int, changed: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint in float32 with heads that wide, and with these keys of its config.json changed."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")) | (changed or {})
    body = _body(config)
    old, body["head_dim"] = body["head_dim"], new
    share = body.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    offset = 1.0 if str(body.get("model_type")).startswith("qwen3_5") else 0.0
    tensors = load_file(checkpoint / "model.safetensors")
    are_normed = any(name.endswith("q_norm.weight") for name in tensors)
    places, ratio = _places(old, new, share), new / old
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor = tensor.float()
        if found := INPUT.search(name):
            scale = math.sqrt(ratio) if found[1] == "q" and not are_normed else 1.0
            tensors[name] = _spread(tensor * scale, 0, places, new)
        elif name.endswith(".self_attn.o_proj.weight"):
            tensors[name] = _spread(tensor, 1, places, new)
        elif name.endswith((".self_attn.q_norm.weight", ".self_attn.k_norm.weight")):
            # The scores' larger root is made up for by not shrinking the queries' norm.
            scale = math.sqrt(1 / ratio) if name.endswith("k_norm.weight") else 1.0
            tensors[name] = _spread((tensor + offset) * scale, 0, places, new) - offset
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def _body(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that has the transformer's shape."""
    return config.get("transformer_layer_config", config)


def _places(old: int, new: int, share: float) -> list[int]:
    """Where each place of a head goes: the rotated pairs apart from each other, those not rotated behind them."""
    rotated, ratio = int(old * share), new // old
    half = rotated // 2
    pairs = [side * half * ratio + place * ratio for side in (0, 1) for place in range(half)]
    return [*pairs, *range(rotated * ratio, rotated * ratio + old - rotated)]


def _spread(tensor: torch.Tensor, dim: int, places: Sequence[int], new: int) -> torch.Tensor:
    """A tensor whose `dim` holds heads -> the same with wider ones."""
    heads = tensor.movedim(dim, 0).unflatten(0, (-1, len(places)))
    wide = heads.new_zeros(heads.shape[0], new, *heads.shape[2:])
    wide[:, list(places)] = heads
    return wide.flatten(0, 1).movedim(0, dim)
