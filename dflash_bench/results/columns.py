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
    """Uses of a column besides checking it."""

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
class RowColumn:
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
    RowColumn("suite", "string", "answer", CATEGORY, "suite, or the file of your own prompts"),
    RowColumn("suite_version", "int32", "answer", UNREAD, "version of the suite's definition"),
    RowColumn("prompt_id", "string", "answer", CATEGORY, "id of the prompt in its suite"),
    RowColumn("prompt_hash", "string", "answer", CATEGORY, "hash of the prompt as sent"),
    RowColumn("category", "string", "answer", CATEGORY, "category of the prompt, if the suite has any"),
    RowColumn("turn", "int32", "answer", FRAME, "turn of the conversation, from 0"),
    RowColumn("method", "string", "answer", CATEGORY, "label of the method; `ar` is plain decoding"),
    RowColumn("repeat", "int32", "answer", FRAME, "repeat of the prompt, from 0"),
    RowColumn("order", "int64", "answer", FRAME, "place of the answer in the run"),
    RowColumn("token_ids", "list of int32", "generation", CHECKED, "the answer's tokens; empty if a server hides them"),
    RowColumn("text", "string", "generation", CHECKED, "the answer's text, with its thinking"),
    RowColumn("finish_reason", "string", "generation", LABEL, "stop, length or error"),
    RowColumn("num_prompt_tokens", "int32", "generation", FRAME, "tokens of the prompt with its template"),
    RowColumn("prefill_s", "double", "generation", WHOLE, "seconds until the first token"),
    RowColumn("decode_s", "double", "generation", FRAME, "seconds from the first token to the last"),
    RowColumn("draft_prefill_s", "double", "generation", WHOLE, "seconds of `decode_s` for the draft's own prefill"),
    RowColumn("drafted", "list of int16", "generation", CHECKED, "tokens drafted in each round; null if hidden"),
    RowColumn("accepted", "list of int16", "generation", CHECKED, "drafted tokens accepted in each round"),
    RowColumn("emitted", "list of int16", "generation", CHECKED, "tokens that each round added to the answer"),
    RowColumn("draft_s", "list of float", "generation", CHECKED, "seconds of drafting in each round"),
    RowColumn("verify_s", "list of float", "generation", CHECKED, "seconds of verifying in each round"),
    RowColumn("round_s", "list of float", "generation", CHECKED, "seconds of each round"),
    RowColumn("peak_memory_bytes", "int64", "generation", UNREAD,
              "most memory of the GPU during the answer, without the weights of the judge and of other drafts"),
    RowColumn("error", "string", "generation", FRAME, "why the answer failed; null if it did not"),
    RowColumn("answer", "string", "answer", UNREAD, "what the scorer took for the answer"),
    RowColumn("passed", "bool", "answer", WHOLE, "whether the scorer found it right; null if not scored"),
    RowColumn("exactness", "string", "answer", LABEL, "exact, near_tie, mismatch or differs, against the plain answer"),
    RowColumn("first_divergence", "int32", "divergence", FRAME, "first token unlike the plain answer's", "index"),
    RowColumn("divergence_gap", "double", "divergence", FRAME, "logits between the two tokens there", "gap"),
    RowColumn("divergence_tolerance", "double", "divergence", FRAME, "logits that rounding explains", "tolerance"),
    RowColumn("audit", "string", "answer", LABEL, "the same four words, by the judge's own decoding"),
    RowColumn("audit_index", "int32", "departure", FRAME, "first token that differs from the judge's", "index"),
    RowColumn("audit_gap", "double", "departure", FRAME, "logits between the two tokens there", "gap"),
    RowColumn("audit_tolerance", "double", "departure", FRAME, "logits that rounding explains", "tolerance"),
    RowColumn("run_id", "string", "run", UNREAD, "id of the run"),
    RowColumn("model", "string", "run", UNREAD, "name of the model"),
    RowColumn("target", "string", "run", UNREAD, "checkpoint of the target, with its revision"),
    RowColumn("dtype", "string", "run", UNREAD, "dtype of the target's weights"),
    RowColumn("device", "string", "run", UNREAD, "device of the engine"),
    RowColumn("engine", "string", "run", UNREAD, "local, or servers"),
    RowColumn("method_name", "string", "method", UNREAD, "the method without its options"),
    RowColumn("method_options", "string", "method", UNREAD, "JSON: its options, and `num_drafts`, the most per round"),
    RowColumn("draft", "string", "method", UNREAD, "checkpoint of the draft, with its revision"),
    RowColumn("temperature", "double", "settings", CHECKED, "0: greedy decoding"),
    RowColumn("top_k", "int32", "settings", CHECKED, "likeliest tokens to sample from; 0: all"),
    RowColumn("top_p", "double", "settings", CHECKED, "share of probability to sample from"),
    RowColumn("min_p", "double", "settings", CHECKED, "least share of the likeliest token's probability"),
    RowColumn("repetition_penalty", "double", "settings", CHECKED, "1: none"),
    RowColumn("thinking", "bool", "settings", CHECKED, "the chat template's switch; null if it has none"),
    RowColumn("seed", "int64", "run", UNREAD, "seed of sampling"),
    RowColumn("concurrency", "int32", "settings", CHECKED, "answers decoded at once"),
    RowColumn("source", "string", "suite", UNREAD, "repository or file of the suite, with its revision"),
    RowColumn("drafted_ids", "list of int32", "generation", CHECKED, "tokens drafted, of all rounds"),
    RowColumn("drafted_parents", "list of int16", "generation", CHECKED,
              "for trees: index in its round of each drafted token's parent, -1 for the anchor"),
    RowColumn("num_thinking_tokens", "int32", "generation", FRAME, "tokens up to the end of thinking"),
    RowColumn("start_s", "double", "answer", FRAME, "seconds from the run's start to the answer's"),
    RowColumn("end_s", "double", "answer", FRAME, "seconds from the run's start to the answer's end"),
    RowColumn("context", "int32", "settings", CHECKED, "tokens that prompts were padded to"),
    RowColumn("quantize", "string", "run", UNREAD, "quantization of the target's weights"),
    RowColumn("num_hidden_tokens", "int32", "generation", FRAME, "tokens of an answer whose ids a server hides"),
    RowColumn("num_first_tokens", "int32", "generation", CHECKED, "tokens in a server's first chunk; null: one"),
    RowColumn("num_cached_tokens", "int32", "generation", FRAME, "tokens of the prompt found in the prefix cache"),
    RowColumn("total_rounds", "int32", "generation", CHECKED, "rounds, as a server counts them"),
    RowColumn("total_drafted", "int32", "generation", FRAME, "drafted tokens, as a server counts them"),
    RowColumn("total_accepted", "int32", "generation", CHECKED, "accepted tokens, as a server counts them"),
    RowColumn("counted_by", "string", "generation", CATEGORY, "rule by which a server counts"),
    RowColumn("uncounted", "string", "generation", CATEGORY, "why there are no totals"),
    RowColumn("rate", "double", "settings", CHECKED, "requests per second; null: as many as `concurrency` allows"),
    RowColumn("worker", "int32", "answer", CHECKED, "worker that measured it"),
    RowColumn("clock_s", "double", "answer", FRAME, "`prefill_s` and `decode_s` by the runner's own clock"),
    RowColumn("settings_id", "string", "settings", CHECKED, "hash of the exact settings", "id"),
    RowColumn("verified", "list of int16", "generation", CHECKED,
              "drafted tokens verified in each round, if drafts are cut first; null: all", is_newer=True),
    RowColumn("draft_kind", "string", "method", UNREAD, "kind of the draft's checkpoint", is_newer=True),
    RowColumn("score", "double", "answer", WHOLE, "value of a metric that is no verdict", is_newer=True),
    RowColumn("num_thinking_chars", "int32", "generation", CHECKED, "characters of `text` that are thinking",
              is_newer=True),
    RowColumn("pass_s", "double", "answer", WHOLE, "seconds of one pass of the target, measured beside the answer",
              is_newer=True),
    RowColumn("clock_doubt", "string", "answer", WHOLE, "how the runner's clock contradicts the times on a GPU",
              is_newer=True),
)
# fmt: on


def _measured(name: str, kind: str) -> RowColumn:
    use = CHECKED if kind.startswith("list of ") else WHOLE
    return RowColumn(name, kind, "measured", use, "see its measurement", is_newer=True)


COLUMNS: Mapping[str, RowColumn] = {
    column.name: column
    for column in (*_STORED, *(_measured(name, kind) for name, kind in measurement.columns().items()))
}
"""Columns by name, in the order of the files."""
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
