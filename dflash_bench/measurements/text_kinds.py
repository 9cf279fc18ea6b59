"""The kind of text that each token of an answer belongs to: thinking, prose, code, JSON, or a tool call.

Derived from marks in the text: Markdown fences, marks of tool calls, and JSON that is a whole answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dflash_bench.core.measurement import Columns, Instrument, Measurement, Stretches
from dflash_bench.core.thinking import answer_start
from dflash_bench.core.types import Answer, Message

if TYPE_CHECKING:
    from dflash_bench.results.row_arrays import RowArrays

UNKNOWN = "unknown"
"""Stretches of answers whose tokens have no kind."""

KINDS = ("prose", "code", "json", "tool-call", "thinking")
"""Kinds by the index that tokens store."""
PROSE, CODE, JSON, TOOL_CALL, THINKING = range(len(KINDS))
_MARKED = re.compile(
    r"<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>|\Z)|(?:<\|python_tag\|>|\[TOOL_CALLS\]).*"
    r"|<｜tool▁calls▁begin｜>.*?(?:<｜tool▁calls▁end｜>|\Z)"
    r"|^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>\w*).*?(?:^[ \t]*(?P=fence)`*[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_OBJECT = re.compile(r"\s*(?:\{\s*\"|\[\s*\{\s*\")")
_CALL = re.compile(
    r"[\s\[{]*(?:\"type\"\s*:\s*\"function\"\s*,\s*(?:\"function\"\s*:\s*\{\s*)?)?"
    r"\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:arguments|parameters)\""
)
"""The JSON of a tool call whose mark is a special token, which is not in the text."""


def kinds_of(pieces: Sequence[str], num_thinking: int | None) -> tuple[int, ...]:
    """Return the kind of each token of an answer, given each token's text and the number of thinking tokens, if known.

    A token has the kind of the place where its text begins; at the very end, where stops have no text, the last kind.
    """
    starts = [0, *accumulate(map(len, pieces))]
    text = "".join(pieces)
    begin = answer_start(text) if num_thinking is None else starts[min(num_thinking, len(pieces))]
    marked = [(0, begin, THINKING), *_marked(text, begin)]
    kinds, at = list[int](), 0
    for start in starts[:-1]:
        if start == len(text) and kinds:
            kinds.append(kinds[-1])
            continue
        while at < len(marked) and marked[at][1] <= start:
            at += 1
        kinds.append(marked[at][2] if at < len(marked) and marked[at][0] <= start else PROSE)
    return tuple(kinds)


def _marked(text: str, begin: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and kind of everything but prose, in order."""
    if _is_json(text[begin:]):
        yield begin, len(text), TOOL_CALL if _CALL.match(text, begin) else JSON
        return
    for match in _MARKED.finditer(text, begin):
        language = match["language"]
        kind = TOOL_CALL if language is None else JSON if language.lower().startswith("json") else CODE
        yield match.start(), match.end(), kind


def _is_json(text: str) -> bool:
    """Return whether a text is only JSON, or begins as an object that is cut off."""
    if not _OBJECT.match(text):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return True
    return not text.lstrip()[end:].strip()


class TextReader(Instrument):
    """Reads answers token by token with the target's own tokenizer; servers' answers have none here."""

    def __init__(self) -> None:
        self.pieces: dict[int, str] = {}
        """Texts of tokens."""

    def judged(self, record: Answer, messages: Sequence[Message], backend: Any) -> Columns:
        from dflash_bench.runner.work import DecodesAgain

        answer = record.generation
        if answer.error is not None or not answer.token_ids or not isinstance(backend, DecodesAgain):
            return {}
        for token in {*answer.token_ids} - self.pieces.keys():
            self.pieces[token] = backend.decode([token])
        num = answer.num_thinking_tokens if answer.num_thinking_chars else 0
        return {"text_kinds": kinds_of([self.pieces[token] for token in answer.token_ids], num)}


def unknown_kinds(rows: RowArrays) -> Any:
    import numpy as np

    lengths, kinds = rows.lengths("text_kinds"), rows.flat("text_kinds").astype(np.int64)
    owners = np.repeat(np.arange(rows.num), np.maximum(lengths, 0))
    other = (lengths >= 0) & (lengths != rows.lengths("token_ids"))
    other[owners[(kinds < 0) | (kinds >= len(KINDS))]] = True
    return other


def of_rounds(batch: Any, out: Any, owners: Any) -> Any:
    """Return the kind of text of the first token of rounds that begin after `out` tokens, [rounds]."""
    import numpy as np

    from dflash_bench.results.row_arrays import lengths_of

    column = batch.column("text_kinds")
    lengths = lengths_of(column)
    kinds, starts = column.flatten().to_numpy(zero_copy_only=False), np.cumsum(lengths) - lengths
    is_known = out < lengths[owners]
    found = np.full(len(owners), len(KINDS), dtype=np.int64)
    found[is_known] = kinds[(starts[owners] + out)[is_known]]
    return found


MEASUREMENT = Measurement(
    name="text_kinds",
    opens=lambda options, methods: TextReader(),
    columns={"text_kinds": "list of int8"},
    checks={"its tokens have other kinds of text than there are, or not one each": unknown_kinds},
    stretches={"text-kind": Stretches((*KINDS, UNKNOWN), of_rounds)},
)
