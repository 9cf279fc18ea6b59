"""GGUF files with matrices in llama.cpp's k-quants: random blocks, as the format's package only reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

COARSE, FINE = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
SCALES = {COARSE: slice(0, 4), FINE: slice(208, 210)}
"""Of a block's bytes, those of its float16 scales."""
IN_FINE = ("token_embd", "ffn_down", "attn_v")
"""Parts of the names of tensors that Q4_K_M stores as Q6_K."""


def quantised(source: Path, destination: Path, seed: int = 0) -> Path:
    """Write the file anew, mixed as Q4_K_M: matrices with whole blocks are random, all else as it is."""
    file, rng = GGUFReader(source), np.random.default_rng(seed)
    writer = GGUFWriter(destination, file.fields["general.architecture"].contents())
    for name, field in file.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in file.tensors:
        kind = FINE if any(part in tensor.name for part in IN_FINE) else COARSE
        if len(tensor.shape) == 2 and tensor.shape[0] % GGML_QUANT_SIZES[kind][0] == 0:
            width, rows = map(int, tensor.shape)
            writer.add_tensor(tensor.name, random_blocks(kind, rows, width, rng), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return destination


def random_blocks(
    kind: GGMLQuantizationType, rows: int, width: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the bytes of a random matrix, [rows, bytes a row], whose weights are mostly below 1."""
    numbers, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * width // numbers, num_bytes), dtype=np.uint8)
    scales = blocks[:, SCALES[kind]]
    few = rng.uniform(1e-4, 4e-4, scales.shape[1] // 2 * len(blocks)).astype(np.float16)
    blocks[:, SCALES[kind]] = few.view(np.uint8).reshape(scales.shape)
    return blocks.reshape(rows, -1)
