"""GGUF files as targets: their weights taken out of their quantised form, once, into a folder of safetensors.

What is measured then is the model as the file's numbers say it is, in float32, without llama.cpp's own arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.models import folders
from dflash_bench.models.presets import HOME, cache_folder
from dflash_bench.models.unreadable import cannot_load, is_unreadable


def is_file(reference: str) -> bool:
    return reference.endswith(".gguf") and Path(reference).expanduser().is_file()


def converted(path: Path) -> Path:
    """The folder in the cache that holds this file's model, made if it is not there. Raises UserError."""
    path = path.expanduser()
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{path.stem}-{sha256[:12]}"
    if not folder.exists():
        convert(path, folder)
    return folder


def require_readers() -> None:
    """Raises UserError if a package is missing without which transformers reads no GGUF."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(f"GGUF files need {' and '.join(missing)}; run: pip install {' '.join(missing)}")


def convert(path: Path, folder: Path) -> None:
    """Write the model into a new folder: config, weights in float32, tokenizer. Raises UserError for what is none."""
    require_readers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home, name = path.parent, path.name
    try:
        model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=name)
    except Exception as error:
        if not is_unreadable(error):
            raise
        raise cannot_load(path, error) from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(model, tokenizer, made)
            made.chmod(0o755)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error}); set {HOME} to a folder with room") from error


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """By hand: transformers refuses to save what it dequantised."""
    from safetensors.torch import save_file

    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):  # of a file that is gone
        config.pop(name, None)
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name.startswith("lm_head."))
    }
    save_file(tensors, folder / folders.WHOLE, metadata={"format": "pt"})
    (folder / folders.WHOLE).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
