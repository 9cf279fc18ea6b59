"""GGUF files as targets: weights are dequantised once, into a folder of safetensors.

The model is then measured with the file's weights in float32, without llama.cpp's own arithmetic.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, first_line
from dflash_bench.core.terminal import with_bar
from dflash_bench.models import hub
from dflash_bench.models.hub import cannot_load, is_unreadable
from dflash_bench.models.presets import HOME, cache_folder
from dflash_bench.models.quiet import silence_transformers

LARGEST = 1 << 24
"""The largest plausible size in a header."""


def is_file(reference: str) -> bool:
    return reference.endswith(".gguf") and Path(reference).expanduser().is_file()


def converted_folder(path: Path) -> Path:
    """Return the cached folder of this file's model, created if it is missing. Raises UserError.

    The models used longest ago make room for a new one.
    """
    path = path.expanduser()
    about = path.stat()
    folder = cache_folder() / "gguf" / f"{path.stem}-{files.sha256_of(path)[:12]}"
    if not folder.exists():
        _make_room(folder.parent, about.st_size)
        convert(path, folder)
    os.utime(folder)
    return folder


KEPT_BYTES = 32e9
"""Largest size of all converted models; of one, eight times its file's, as weights of 4 bits become floats."""
GROWTH = 8


def _make_room(cache: Path, size: int) -> None:
    """Delete the converted models that were used longest ago until one of a file of `size` bytes fits."""
    kept = sorted(cache.glob("*/"), key=lambda folder: folder.stat().st_mtime)
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in kept}
    while kept and sum(sizes[folder] for folder in kept) + GROWTH * size > KEPT_BYTES:
        shutil.rmtree(kept.pop(0), ignore_errors=True)


def require_readers() -> None:
    """Raise UserError if a package is missing that transformers needs to read GGUF."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(f"GGUF files need {' and '.join(missing)}; run: pip install {' '.join(missing)}")


def check(path: Path) -> None:
    """Raise UserError for a file without a complete model: transformers would make up the missing weights.

    They would be meaningless, and of sizes that only the header determines.
    """
    from gguf import GGUFReader

    files.require_file(path)
    try:
        file = GGUFReader(path)
        fields = {name: field.contents() for name, field in file.fields.items()}
        shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in file.tensors}
    except Exception as error:
        if not is_unreadable(error):
            raise
        raise UserError(f"{path} is truncated or not a GGUF file ({first_line(error)}); copy it again") from error
    for problem in _missing(fields, shapes):
        raise UserError(f"{path} is not a complete model: {problem}; copy it again")


def _missing(fields: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield parts of a language model that the file lacks, or that differ from its header."""
    kind = fields.get("general.architecture")
    if not isinstance(kind, str):
        yield "it does not say its architecture"
        return
    hidden, num_layers = (fields.get(f"{kind}.{name}") for name in ("embedding_length", "block_count"))
    for name, size in (("embedding_length", hidden), ("block_count", num_layers)):
        if type(size) is not int or not 1 <= size <= LARGEST:
            yield f"{kind}.{name} cannot be {size!r}"
            return
    assert isinstance(num_layers, int)
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[0] != hidden:
        yield f"token_embd.weight is {embedding}, and {kind}.embedding_length {hidden}"
        return
    # For example blk.0.ffn_up.weight: layers of different kinds have different tensors.
    layers = {name.partition("_")[0] for name in shapes if name.startswith("blk.")}
    if num_layers > len(shapes) or any(f"blk.{layer}.ffn" not in layers for layer in range(num_layers)):
        yield f"not all of its {num_layers} layers are there"
    up, wide = shapes.get("blk.0.ffn_up.weight"), fields.get(f"{kind}.feed_forward_length")
    if up is not None and list(up) != [hidden, wide]:
        yield f"blk.0.ffn_up.weight is {list(up)}, and {kind}.feed_forward_length {wide}"


def convert(path: Path, folder: Path) -> None:
    """Write the model to a new folder: config, float32 weights, tokenizer. Raises UserError if it cannot be read."""
    require_readers()
    check(path)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    home, name = path.parent, path.name
    silence_transformers()
    try:
        # Its own bar is drawn even where none may be.
        modeling_gguf_pytorch_utils.tqdm = lambda items, **_: with_bar(items, f"converting {name}, once: tensors")
        model, report = AutoModelForCausalLM.from_pretrained(
            home, gguf_file=name, dtype="float32", output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=name)
    except Exception as error:
        if not is_unreadable(error):
            raise
        raise cannot_load(path, error) from error
    if missing := [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]:
        raise UserError(f"{path}: {min(missing)} is missing or not as its header says; copy it again")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(model, tokenizer, made)
            made.chmod(0o755)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {folder} ({error}); set {HOME} to a folder with room") from error


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model without `save_pretrained`, which refuses dequantised models."""
    from safetensors.torch import save_file

    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):  # these refer to a file that no longer exists
        config.pop(name, None)
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name.startswith("lm_head."))
    }
    save_file(tensors, folder / hub.WHOLE, metadata={"format": "pt"})
    (folder / hub.WHOLE).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
