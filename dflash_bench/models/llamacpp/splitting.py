"""Which of llama.cpp's named rules splits text as a tokenizer does, before its merges?

A GGUF file names a rule and cannot spell one out, so a name is only right if every text gives the same tokens. That is
tried on odd texts and on random sequences of the vocabulary's own tokens, with the tokenizer's merges under each rule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_bench.errors import UserError

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns that split in turn. `whole_words`: a piece that is a token stays one, whatever the merges say."""

    patterns: tuple[str, ...]
    whole_words: bool = False


RULES: Mapping[str, Rule] = {
    "gpt-2": Rule((_ENGLISH,)),
    "qwen2": Rule((_SHORT_FORMS + _WORDS + r"\p{N}" + _SIGNS,)),
    "llama-bpe": Rule((_SHORT_FORMS + _WORDS + r"\p{N}{1,3}" + _SIGNS,), whole_words=True),
    "smollm": Rule((r"\p{N}", _ENGLISH)),
    "ufakzeka": Rule((_WORDS + r"\p{N}" + _SIGNS,)),
}
"""By the names that llama.cpp knows them under (`tokenizer.ggml.pre`), the most common first."""
ODD_TEXTS = (
    "Hello world! It's 12345.678 o'clock, they'LL say 'that' isn't THEIR'S; we've I'd rock'n'roll 'tis 'Twas",
    "'that 'there 'the 'said 'more 'reason 'very 'd 'LLama dog'dog harbor'selse 'Tis 'Melody",
    " leading, trailing  \t tabs\t\tand   spaces \n\n\nlines\r\n \r mixed \n \n  indented\n\tdef f(x):\n    return x",
    "f(x)=x**2+[1,2]{a:b}<tag/> (word)\"quoted\"'single'--dash__under $1,000.00 50% a@b.c http://x.y/z?q=1&r=#2",
    "naïve café Ünïcödé Straße ŒUVRE ǅ ﬁ 你好，世界。こんにちは 안녕하세요 Привет мир שלום مرحبا ١٢٣ ४५६ Ⅷ ½ ²",
    "emoji 😀👍🏽👨‍👩‍👧‍👦 ∑∫√≤ ™ ©\u00a0nbsp\u200bzero\u2028line\ufeff\u3000wide ...!!!???\n---\n***\n\n",
    "ALLCAPS camelCase snake_case x1y2z3 0x1F 1e-5 3rd 2nd ''' \"\"\" ``` '' ' \\n \\frac{1}{2} a'b'c 1's A'S",
)
NUM_RANDOM, TOKENS_EACH = 400, 40


def name_of(tokenizer: Any) -> str:
    """`tokenizer` is one of the library tokenizers. Raises UserError if no rule gives its tokens."""
    probes = (*ODD_TEXTS, *_random_texts(tokenizer))
    expected = _ids(tokenizer, probes)
    for name, rule in RULES.items():
        if _ids(under(tokenizer, rule), probes) == expected:
            return name
    raise UserError(
        "its tokenizer splits text by a rule that llama.cpp does not know (tried: "
        f"{', '.join(RULES)}), so its tokens would differ; no GGUF file can hold it"
    )


def under(tokenizer: Any, rule: Rule) -> Any:
    """The same vocabulary and merges, after another split."""
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.to_str())
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}
    content["model"]["ignore_merges"] = rule.whole_words
    return Tokenizer.from_str(json.dumps(content))


def _ids(tokenizer: Any, texts: tuple[str, ...]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _random_texts(tokenizer: Any) -> list[str]:
    """Tokens that real text would hardly put side by side show where a rule would cut, and merges would not."""
    draw, size = random.Random(0), tokenizer.get_vocab_size()
    drawn = [[draw.randrange(size) for _ in range(TOKENS_EACH)] for _ in range(NUM_RANDOM)]
    return [str(text) for text in tokenizer.decode_batch(drawn, skip_special_tokens=True)]
