"""Checks whether compiled kernels support given layers, and keeps their code. Imports numba only if it is needed."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_bench import __version__
from dflash_bench.core.labels import dtype_name
from dflash_bench.engine.forward.experts import Experts
from dflash_bench.engine.forward.layers import Layer
from dflash_bench.engine.forward.native import COVERED, NativeForward, rotary_size
from dflash_bench.models.architecture import decoder_layers, recurrent_layers
from dflash_bench.models.configs import Heads, optional
from dflash_bench.models.presets import cache_folder
from dflash_bench.models.quantization import Int8Linear

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
SOURCES = ("arrays.py", "attention.py", "kernels.py", "tiles.py")
MOST_FOLDERS = 3
"""Number of kept folders of compiled code, one per version."""


def why_not_compiled(native: NativeForward) -> str | None:
    """Return why compiled kernels cannot compute a target that our own code supports, or None if they can."""
    head: Any = native.head
    if type(head) not in (nn.Linear, Int8Linear):
        return "its head is not a plain linear layer"
    if native.recurrent:
        return "it has recurrent layers"
    return why_not_layers(native.layers)


def why_not_layers(layers: Sequence[Layer]) -> str | None:
    """Return why compiled kernels cannot compute these layers, or None if they can."""
    if not has_numba():
        return "numba cannot be loaded"
    weight, shape = layers[0].attention.qkv.weight, layers[0].attention
    if weight.device.type != "cpu":
        return "it is not on the CPU"
    if weight.dtype not in DTYPES:
        return f"its weights are {dtype_name(weight.dtype)}"
    if any(isinstance(layer.feed, Experts) for layer in layers):
        return "it has experts"
    if shape.is_gated or shape.rotary_size is not None:
        return "its attention is gated, or rotates a part of each head"
    if shape.head_dim % 8 or shape.num_heads * shape.head_dim % 16:
        return f"its heads are of size {shape.head_dim}"
    return None


def expects_kernels(config: Any, dtype: torch.dtype) -> bool:
    """Predict, from its config alone, whether compiled kernels will compute a target on a CPU."""
    heads = Heads.of_first(config)
    fits = heads.key_size % 8 == 0 and heads.num_heads * heads.key_size % 16 == 0
    others = optional(config, "num_experts", "num_local_experts") or recurrent_layers(config) or rotary_size(config)
    return config.model_type in COVERED and dtype in DTYPES and fits and not others and has_numba()


@cache
def has_numba() -> bool:
    """Return True if numba can be loaded, and have it cache its compiled code in our folder from now on."""
    if find_spec("numba") is None:
        return False
    try:
        config: Any = import_module("numba").config
    except (ImportError, OSError, MemoryError):  # such as too little memory for LLVM
        return False
    folder = code_folder()
    if folder is not None:
        config.CACHE_DIR = str(folder)
    return True


@cache
def code_folder() -> Path | None:
    """Return the folder of this version's compiled code, or None if it is not writable: then nothing is cached."""
    versions = [__version__, metadata.version("numba"), platform.python_version(), platform.machine(), _sources()]
    folder = cache_folder() / "kernels" / "-".join(versions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return None
    for old in others[MOST_FOLDERS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder if os.access(folder, os.W_OK) else None


def _sources() -> str:
    """Return a hash of the kernels' sources: numba itself misses changes in a file that another file imports."""
    texts = [Path(__file__).with_name(name).read_bytes() for name in SOURCES]
    return sha256(b"".join(texts)).hexdigest()[:8]


def compile_note() -> str | None:
    """Return a note if the kernels must be compiled before they can be used, or None."""
    if not has_numba():
        return None
    folder = code_folder()
    if folder is None:
        return f"kernels are compiled anew, about ten seconds, because {cache_folder()} cannot be written"
    if any(folder.rglob("kernels.run_layers*.nbi")):
        return None
    return "kernels are compiled for this processor before anything is timed, once: about ten seconds"


def let_go(model: Any) -> None:
    """Drop the weights of a model's decoder layers, which the kernels hold; reading them afterwards is an error."""
    for layer in decoder_layers(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear | Int8Linear):
                meta = torch.empty_like(module.weight, device="meta")
                module.weight = nn.Parameter(meta, requires_grad=False)
