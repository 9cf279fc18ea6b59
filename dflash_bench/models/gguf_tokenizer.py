"""A tokenizer in GGUF: vocabulary, merges, and the pre-tokenization rule."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.models import targets

# Finds which of llama.cpp's named rules splits text as a tokenizer does, before its merges.
#
# A GGUF file can only name a rule, so a name is only right if every text yields the same tokens. That is checked on
# unusual texts and on random sequences of the vocabulary's own tokens, with the tokenizer's merges under each rule.


_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UNMARKED = r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns that split in turn. `whole_words`: a piece that is a token is kept, whatever the merges."""

    patterns: tuple[str, ...]
    whole_words: bool = False


RULES: Mapping[str, Rule] = {
    "gpt-2": Rule((_ENGLISH,)),
    "qwen2": Rule((_SHORT_FORMS + _WORDS + r"\p{N}" + _SIGNS,)),
    "qwen35": Rule((_SHORT_FORMS + _MARKED + r"\p{N}" + _UNMARKED,)),
    "llama-bpe": Rule((_SHORT_FORMS + _WORDS + r"\p{N}{1,3}" + _SIGNS,), whole_words=True),
    "smollm": Rule((r"\p{N}", _ENGLISH)),
    "ufakzeka": Rule((_WORDS + r"\p{N}" + _SIGNS,)),
}
"""Rules by llama.cpp's names (`tokenizer.ggml.pre`), the most common first."""
ODD_TEXTS = (
    "Hello world! It's 12345.678 o'clock, they'LL say 'that' isn't THEIR'S; we've I'd rock'n'roll 'tis 'Twas",
    "'that 'there 'the 'said 'more 'reason 'very 'd 'LLama dog'dog harbor'selse 'Tis 'Melody",
    " leading, trailing  \t tabs\t\tand   spaces \n\n\nlines\r\n \r mixed \n \n  indented\n\tdef f(x):\n    return x",
    "f(x)=x**2+[1,2]{a:b}<tag/> (word)\"quoted\"'single'--dash__under $1,000.00 50% a@b.c http://x.y/z?q=1&r=#2",
    "naïve café Ünïcödé Straße ŒUVRE ǅ ﬁ 你好，世界。こんにちは 안녕하세요 Привет мир שלום مرحبا ١٢٣ ४५६ Ⅷ ½ ²",
    "marks apart: e\u0301tude, man\u0303ana, 1\u0301, .\u0301; हिन्दी ที่นี่",
    "emoji 😀👍🏽👨‍👩‍👧‍👦 ∑∫√≤ ™ ©\u00a0nbsp\u200bzero\u2028line\ufeff\u3000wide ...!!!???\n---\n***\n\n",
    "ALLCAPS camelCase snake_case x1y2z3 0x1F 1e-5 3rd 2nd ''' \"\"\" ``` '' ' \\n \\frac{1}{2} a'b'c 1's A'S",
)
NUM_RANDOM, TOKENS_EACH = 400, 40


def name_of(tokenizer: Any) -> str:
    """Return the rule that yields a tokenizer's tokens (of the library tokenizers). Raises UserError if none does."""
    # The few odd texts rule out most rules.
    probes = [(texts, _ids(tokenizer, texts)) for texts in (ODD_TEXTS, _random_texts(tokenizer))]
    content = json.loads(tokenizer.to_str())
    for name, rule in RULES.items():
        other = under(content, rule)
        if all(_ids(other, texts) == expected for texts, expected in probes):
            return name
    raise UserError(
        "its tokenizer splits text by a rule that llama.cpp does not know (tried: "
        f"{', '.join(RULES)}), so its tokens would differ; no GGUF file can hold it"
    )


def under(content: Mapping[str, Any], rule: Rule) -> Any:
    """Return a tokenizer with the vocabulary and merges of this tokenizer.json, but another pre-tokenization."""
    from tokenizers import Tokenizer

    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splitter = {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}
    model = {**content["model"], "ignore_merges": rule.whole_words}
    return Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": splitter, "model": model}))


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _random_texts(tokenizer: Any) -> list[str]:
    """Return texts of random tokens: unusual neighbours show where a rule would split, and merges would not."""
    draw, size = random.Random(0), tokenizer.get_vocab_size()
    drawn = [[draw.randrange(size) for _ in range(TOKENS_EACH)] for _ in range(NUM_RANDOM)]
    return [str(text) for text in tokenizer.decode_batch(drawn, skip_special_tokens=True)]


# A tokenizer and its chat template in GGUF. Only byte-level BPE, as in Llama 3, Qwen and SmolLM.


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types (gguf.TokenType): text, never shown, added by the user, and embedding rows without a token."""
ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id", "unknown": "unk_token_id"}
"""Special tokens: their names in GGUF, and their attributes in transformers."""
PREFIX = "tokenizer.ggml."
Settings = dict[str, Any]


def read(folder: Path, num_rows: int, with_template: bool = True) -> tuple[Settings, list[str]]:
    """Return the file's `tokenizer.*` settings, and remarks. `num_rows` is the rows of the target's embedding.

    Raises UserError for a tokenizer that llama.cpp would read differently.
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
        f"{PREFIX}pre": name_of(tokenizer.backend_tokenizer),
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
    """Return the effective tokenizer.json. Raises UserError unless it is byte-level BPE."""
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
    """Return whether it adds its bos token before a text, and its eos token after it. Raises UserError otherwise."""
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
