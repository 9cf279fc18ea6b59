"""The columns of a run's rows, each declared once: type, where its value comes from, its use in the frame, its meaning.

Each row repeats what distinguishes its run from others, so that the rows of many runs can form one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag
from typing import Any, Literal

from dflash_bench.core import measurement

Source = Literal["run", "method", "suite", "settings", "answer", "generation", "divergence", "departure", "measured"]
"""Where a value comes from: what `run.json` says of the run, the method or the suite; the answer's settings; the
`Answer` itself, its generation or one of its two divergences; a measurement."""
STORED: tuple[Source, ...] = ("answer", "generation", "settings", "divergence", "departure")
"""The sources that a record has, beside its measurements."""


class Use(Flag):
    """What readers do with a column beside checking it."""

    CHECKED = 0
    FRAME = 1
    """It is a column of the frame, as stored."""
    CATEGORY = 2 | FRAME
    """It has few distinct values: a category of the frame."""
    WHOLE = 4 | FRAME
    """It describes only whole answers: null in the frame of their stretches."""
    LABEL = CATEGORY | WHOLE
    UNREAD = 8
    """It repeats `run.json`, or is read only by those who ask for it."""


CHECKED, FRAME, CATEGORY, WHOLE, LABEL, UNREAD = (
    Use.CHECKED, Use.FRAME, Use.CATEGORY, Use.WHOLE, Use.LABEL, Use.UNREAD,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: str
    """Arrow type, such as "double" or "list of int16"."""
    source: Source
    use: Use
    meaning: str
    field: str = ""
    """Name of the value at its source, if it is not the column's."""
    is_newer: bool = False
    """Whether runs of schema 1 may lack it: it is null there."""

    @property
    def is_list(self) -> bool:
        return self.kind.startswith("list of ")

    @property
    def item(self) -> str:
        """Return the Arrow type of the column's values, or of the items of its lists."""
        return self.kind.removeprefix("list of ")

    @property
    def leaf(self) -> str:
        """Return the name that Parquet uses for the values."""
        return f"{self.name}.list.element" if self.is_list else self.name

    @property
    def is_read(self) -> bool:
        """Return whether it is read from the rows of every run."""
        return Use.UNREAD not in self.use


# fmt: off
_STORED = (
    Column("suite", "string", "answer", CATEGORY, "suite, or the file of your own prompts"),
    Column("suite_version", "int32", "answer", UNREAD, "version of the suite's definition"),
    Column("prompt_id", "string", "answer", CATEGORY, "id of the prompt in its suite"),
    Column("prompt_hash", "string", "answer", CATEGORY, "hash of the prompt as sent"),
    Column("category", "string", "answer", CATEGORY, "category of the prompt, if the suite has any"),
    Column("turn", "int32", "answer", FRAME, "turn of the conversation, from 0"),
    Column("method", "string", "answer", CATEGORY, "label of the method; `ar` is plain decoding"),
    Column("repeat", "int32", "answer", FRAME, "repeat of the prompt, from 0"),
    Column("order", "int64", "answer", FRAME, "place of the answer in the run"),
    Column("token_ids", "list of int32", "generation", CHECKED, "the answer's tokens; empty if a server hides them"),
    Column("text", "string", "generation", CHECKED, "the answer's text, with its thinking"),
    Column("finish_reason", "string", "generation", LABEL, "stop, length or error"),
    Column("num_prompt_tokens", "int32", "generation", FRAME, "tokens of the prompt with its template"),
    Column("prefill_s", "double", "generation", WHOLE, "seconds until the first token"),
    Column("decode_s", "double", "generation", FRAME, "seconds from the first token to the last"),
    Column("draft_prefill_s", "double", "generation", WHOLE, "seconds of `decode_s` for the draft's own prefill"),
    Column("drafted", "list of int16", "generation", CHECKED, "tokens drafted in each round; null if hidden"),
    Column("accepted", "list of int16", "generation", CHECKED, "drafted tokens accepted in each round"),
    Column("emitted", "list of int16", "generation", CHECKED, "tokens that each round added to the answer"),
    Column("draft_s", "list of float", "generation", CHECKED, "seconds of drafting in each round"),
    Column("verify_s", "list of float", "generation", CHECKED, "seconds of verifying in each round"),
    Column("round_s", "list of float", "generation", CHECKED, "seconds of each round"),
    Column("peak_memory_bytes", "int64", "generation", UNREAD, "most memory of the GPU during the answer"),
    Column("error", "string", "generation", FRAME, "why the answer failed; null if it did not"),
    Column("answer", "string", "answer", UNREAD, "what the scorer took for the answer"),
    Column("passed", "bool", "answer", WHOLE, "whether the scorer found it right; null if not scored"),
    Column("exactness", "string", "answer", LABEL, "exact, near_tie, mismatch or differs, against the plain answer"),
    Column("first_divergence", "int32", "divergence", FRAME, "first token that differs from the plain answer", "index"),
    Column("divergence_gap", "double", "divergence", FRAME, "logits between the two tokens there", "gap"),
    Column("divergence_tolerance", "double", "divergence", FRAME, "logits that rounding explains there", "tolerance"),
    Column("audit", "string", "answer", LABEL, "the same four words, by the judge's own decoding"),
    Column("audit_index", "int32", "departure", FRAME, "first token that differs from the judge's", "index"),
    Column("audit_gap", "double", "departure", FRAME, "logits between the two tokens there", "gap"),
    Column("audit_tolerance", "double", "departure", FRAME, "logits that rounding explains there", "tolerance"),
    Column("run_id", "string", "run", UNREAD, "id of the run"),
    Column("model", "string", "run", UNREAD, "name of the model"),
    Column("target", "string", "run", UNREAD, "checkpoint of the target, with its revision"),
    Column("dtype", "string", "run", UNREAD, "dtype of the target's weights"),
    Column("device", "string", "run", UNREAD, "device of the engine"),
    Column("engine", "string", "run", UNREAD, "local, or servers"),
    Column("method_name", "string", "method", UNREAD, "the method without its options"),
    Column("method_options", "string", "method", UNREAD, "JSON: its options, and `num_drafts`, the most per round"),
    Column("draft", "string", "method", UNREAD, "checkpoint of the draft, with its revision"),
    Column("temperature", "double", "settings", CHECKED, "0: greedy decoding"),
    Column("top_k", "int32", "settings", CHECKED, "likeliest tokens to sample from; 0: all"),
    Column("top_p", "double", "settings", CHECKED, "share of probability to sample from"),
    Column("min_p", "double", "settings", CHECKED, "least share of the likeliest token's probability"),
    Column("repetition_penalty", "double", "settings", CHECKED, "1: none"),
    Column("thinking", "bool", "settings", CHECKED, "the chat template's switch; null if it has none"),
    Column("seed", "int64", "run", UNREAD, "seed of sampling"),
    Column("concurrency", "int32", "settings", CHECKED, "answers decoded at once"),
    Column("source", "string", "suite", UNREAD, "repository or file of the suite, with its revision"),
    Column("drafted_ids", "list of int32", "generation", CHECKED, "tokens drafted, of all rounds"),
    Column("drafted_parents", "list of int16", "generation", CHECKED,
           "for trees: index in its round of each drafted token's parent, -1 for the anchor"),
    Column("num_thinking_tokens", "int32", "generation", FRAME, "tokens up to the end of thinking"),
    Column("start_s", "double", "answer", FRAME, "seconds from the run's start to the answer's"),
    Column("end_s", "double", "answer", FRAME, "seconds from the run's start to the answer's end"),
    Column("context", "int32", "settings", CHECKED, "tokens that prompts were padded to"),
    Column("quantize", "string", "run", UNREAD, "quantization of the target's weights"),
    Column("num_hidden_tokens", "int32", "generation", FRAME, "tokens of an answer whose ids a server does not return"),
    Column("num_first_tokens", "int32", "generation", CHECKED, "tokens in a server's first chunk; null: one"),
    Column("num_cached_tokens", "int32", "generation", FRAME, "tokens of the prompt found in the prefix cache"),
    Column("total_rounds", "int32", "generation", CHECKED, "rounds, as a server counts them"),
    Column("total_drafted", "int32", "generation", FRAME, "drafted tokens, as a server counts them"),
    Column("total_accepted", "int32", "generation", CHECKED, "accepted tokens, as a server counts them"),
    Column("counted_by", "string", "generation", CATEGORY, "rule by which a server counts"),
    Column("uncounted", "string", "generation", CATEGORY, "why there are no totals"),
    Column("rate", "double", "settings", CHECKED, "requests per second; null: as many as `concurrency` allows"),
    Column("worker", "int32", "answer", CHECKED, "worker that measured it"),
    Column("clock_s", "double", "answer", FRAME, "`prefill_s` and `decode_s` by the runner's own clock"),
    Column("settings_id", "string", "settings", CHECKED, "hash of the exact settings", "id"),
    Column("verified", "list of int16", "generation", CHECKED,
           "drafted tokens verified in each round, if drafts are cut first; null: all", is_newer=True),
    Column("draft_kind", "string", "method", UNREAD, "kind of the draft's checkpoint", is_newer=True),
    Column("score", "double", "answer", WHOLE, "value of a metric that is no verdict", is_newer=True),
    Column("num_thinking_chars", "int32", "generation", CHECKED, "characters of `text` that are thinking",
           is_newer=True),
    Column("pass_s", "double", "answer", WHOLE, "seconds of one pass of the target, measured beside the answer",
           is_newer=True),
)
# fmt: on


def _measured(name: str, kind: str) -> Column:
    use = CHECKED if kind.startswith("list of ") else WHOLE
    return Column(name, kind, "measured", use, "see its measurement", is_newer=True)


COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (*_STORED, *(_measured(name, kind) for name, kind in measurement.columns().items()))
}
"""By name, in the order of the files."""
READ = tuple(name for name, column in COLUMNS.items() if column.is_read)
"""Columns that reading and checking a run needs."""


def using(use: Use) -> tuple[str, ...]:
    """Return the columns with this use."""
    return tuple(name for name, column in COLUMNS.items() if use in column.use)


def of_source(source: Source) -> Mapping[str, str]:
    """Return the columns of a source: a column to the name of its value there."""
    return {name: column.field or name for name, column in COLUMNS.items() if column.source == source}


def markdown() -> str:
    """Return a table of all columns."""
    lines = [f"| `{column.name}` | {column.kind} | {column.meaning} |" for column in _STORED]
    return "\n".join(["| column | type | |", "|---|---|---|", *lines])


def values_at(source: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of columns at a source, `None` for a source that is None."""
    return {column: getattr(source, name, None) for column, name in columns.items()}
