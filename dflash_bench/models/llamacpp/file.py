"""Writing a GGUF file: complete or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench import atomic, bars
from dflash_bench.models.llamacpp.networks import Network, in_gguf_types
from dflash_bench.models.llamacpp.vocabulary import PREFIX

FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""`general.file_type`, by the type of the most common matrices (llama.cpp's enum llama_ftype)."""


def write(path: Path, network: Network, name: str, vocabulary: Mapping[str, Any]) -> None:
    """Raises UserError if the file cannot be written."""
    tensors = dict(in_gguf_types(network.tensors))
    settings = {
        "general.name": name,
        "general.file_type": FILE_TYPES[_main_type(tensors)],
        **{f"{network.architecture}.{key}": value for key, value in network.settings.items()},
        **vocabulary,
        **{f"{PREFIX}{token}_token_id": index for token, index in network.special_tokens.items()},
    }
    # The package opens the file itself; what `write_whole` syncs and renames is the same file.
    atomic.write_whole(path, lambda file: _fill(Path(file.name), network.architecture, settings, tensors))


def _main_type(tensors: Mapping[str, Tensor]) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in FILE_TYPES and tensor.ndim > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _fill(path: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    scalars = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING
    }  # fmt: skip
    types = {
        torch.float32: GGMLQuantizationType.F32, torch.float16: GGMLQuantizationType.F16,
        torch.bfloat16: GGMLQuantizationType.BF16, torch.int64: GGMLQuantizationType.I64,
    }  # fmt: skip
    writer = GGUFWriter(path, architecture)
    try:
        for key, value in settings.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, scalars[type(value)])
        arrays = {name: _bytes(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            # As if it were plain numbers of this size: numpy has no bfloat16.
            writer.add_tensor_info(name, tensor.shape, arrays[name].dtype, arrays[name].nbytes, types[tensor.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in bars.with_bar(list(tensors), "tensors written"):
            writer.write_tensor_data(arrays[name])
    finally:
        writer.close()


def _bytes(tensor: Tensor) -> Any:
    """The numbers as numpy sees them; bfloat16 as 16-bit integers."""
    tensor = tensor.contiguous().cpu()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
