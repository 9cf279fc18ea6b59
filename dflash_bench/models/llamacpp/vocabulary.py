"""A tokenizer and its chat template as a GGUF file holds them. Only byte-level BPE, as Llama 3, Qwen and SmolLM use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.models import targets
from dflash_bench.models.llamacpp import splitting

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens (gguf.TokenType): text, never shown, added by the user, and rows of the embedding without a token."""
ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id", "unknown": "unk_token_id"}
"""What GGUF calls a special token, and transformers."""
PREFIX = "tokenizer.ggml."
Settings = dict[str, Any]


def read(folder: Path, num_rows: int, with_template: bool = True) -> tuple[Settings, list[str]]:
    """The file's `tokenizer.*` settings and remarks. `num_rows` is the number of rows of the target's embedding.

    Raises UserError for a tokenizer from which llama.cpp would read other tokens.
    """
    tokenizer = targets.tokenizer_of(folder)
    try:
        settings = _settings(tokenizer, num_rows)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    if with_template and isinstance(tokenizer.chat_template, str):
        settings["tokenizer.chat_template"] = tokenizer.chat_template
    return settings, _remarks(tokenizer)


def _settings(tokenizer: Any, num_rows: int) -> Settings:
    content = _content(tokenizer)
    tokens, types = _tokens(content, num_rows)
    prefix, suffix = _around(tokenizer)
    special = {f"{PREFIX}{name}_token_id": getattr(tokenizer, role) for name, role in ROLES.items()}
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}pre": splitting.name_of(tokenizer.backend_tokenizer),
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": types,
        f"{PREFIX}merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
        ],
        **{key: index for key, index in special.items() if index is not None},
        f"{PREFIX}add_bos_token": prefix,
        f"{PREFIX}add_eos_token": suffix,
        f"{PREFIX}add_space_prefix": False,
    }


def _content(tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json as it is in use. Raises UserError where it is not byte-level BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("its tokenizer has no tokenizer.json, and only such tokenizers are written as GGUF")
    content: dict[str, Any] = json.loads(backend.to_str())
    model = content["model"]
    kind = model["type"]
    if kind != "BPE" or model.get("byte_fallback") or (content["decoder"] or {}).get("type") != "ByteLevel":
        what = "SentencePiece's BPE" if kind == "BPE" else kind
        raise UserError(f"its tokenizer is {what}, and only byte-level BPE is written as GGUF")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UserError(f"its tokenizer has {name} = {model[name]!r}, which no GGUF file can hold")
    if (normalizer := content["normalizer"]) and normalizer["type"] != "NFC":
        raise UserError(f"its tokenizer rewrites text ({normalizer['type']}), which no GGUF file can hold")
    for added in content["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise UserError(f"its token {added['content']!r} takes spaces with it, which no GGUF file can hold")
    return content


def _tokens(content: dict[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    tokens = {index: (token, NORMAL) for token, index in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        tokens[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if max(tokens) >= num_rows:
        raise UserError(f"its tokenizer has token {max(tokens)}, but its embedding only {num_rows} rows")
    both = [tokens.get(index, (f"[PAD{index}]", UNUSED)) for index in range(num_rows)]
    return [token for token, _ in both], [kind for _, kind in both]


def _around(tokenizer: Any) -> tuple[bool, bool]:
    """Does it put its bos token before a text, and its eos token after it?"""
    text = "a"
    bare = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text)
    prefix, suffix = whole[:1] == [tokenizer.bos_token_id], whole[-1:] == [tokenizer.eos_token_id]
    expected = [tokenizer.bos_token_id] * prefix + bare + [tokenizer.eos_token_id] * suffix
    if whole != expected:
        raise UserError(f"its tokenizer turns {text!r} into {whole}: more than a bos and an eos token around it")
    return prefix, suffix


def _remarks(tokenizer: Any) -> list[str]:
    remarks = []
    if tokenizer.backend_tokenizer.normalizer is not None:
        remarks.append("llama.cpp does not compose characters (NFC): text in decomposed form gives other tokens there")
    if tokenizer.chat_template is not None and not isinstance(tokenizer.chat_template, str):
        remarks.append("the tokenizer has several chat templates, and none is written")
    return remarks
