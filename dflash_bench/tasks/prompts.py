"""A user's own prompts, from benchmark files to request logs (see docs/suites.md).

A row holds the question in one of the `FORMS`, and may hold an id, a category, a reference and tools; its other
columns become slices if they hold names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import SESSION, Prompt
from dflash_bench.tasks import functions, origins
from dflash_bench.tasks.conversations import MESSAGES, RecordedChat, answers_in, in_text, is_talk, of_messages, tools_of
from dflash_bench.tasks.prompt_columns import USUAL, Columns, found, listed
from dflash_bench.tasks.prompt_files import REQUEST, is_parquet, is_trace, rows_in
from dflash_bench.tasks.rows import Row, Rows, parquet_rows
from dflash_bench.tasks.suites import (
    Loaded,
    Suite,
    as_text,
    draw,
    filled,
    first_drawn,
    is_texts,
    known_suites,
    name_of,
    text_of,
)

LOGS = ("conversations", "conversation", "messages_json", "trajectory")
"""Other names of `messages`: ShareGPT, WildChat, agents' trajectories."""
FORMS = {
    "prompt": f"a string, a list of strings, one per turn, or {MESSAGES}",
    "turns": "a list of strings",
    "messages": MESSAGES,
    "body": f"a request with messages, {MESSAGES}",
    **dict.fromkeys(LOGS, MESSAGES),
    functions.TURNS: f"a list of turns, each {MESSAGES}, with {functions.FUNCTIONS} beside it, as in BFCL",
}
IDS = ("id", "question_id", "task_id", "prompt_id", "custom_id")
"""Keys that may hold a prompt's id; the first one present is used."""
REFERENCES = ("reference", "answer")
OPTIONAL = (*IDS, "category", *REFERENCES, "tools")
"""Keys that a row may have; without this list a mistyped key would go unnoticed."""
KNOWN = (*FORMS, *OPTIONAL)
ANY = Columns()
"""No column is named."""
LIKE_A_KNOWN_KEY = 0.85
"""Similarity (difflib's ratio) above which an unknown key is reported as mistyped."""
MOST_NAMED = 3


@dataclass(slots=True)
class _Remarks:
    """Rows mentioned in notes, by their places."""

    empty: list[str] = field(default_factory=list)
    """Logs without a user message."""
    as_json: list[str] = field(default_factory=list)
    """Prompts that are JSON, and are sent unchanged."""

    columns: dict[str, None] = field(default_factory=dict)
    """What prompts were made of that have none of the `FORMS`, in the order found."""

    def notes(self) -> list[str]:
        left_out = "conversations hold no message of the user, and are left out"
        said = {left_out: self.empty, "prompts are JSON, and are asked as they are": self.as_json}
        told = [f"{len(all_)} {what}, such as {', '.join(all_[:MOST_NAMED])}" for what, all_ in said.items() if all_]
        return [*(f"using {columns}" for columns in self.columns), *told]


def load(
    path: Path,
    limit: int | None = None,
    scorer: str = "none",
    columns: Sequence[str] = (),
    balance: str | None = None,
    *,
    chosen: Columns = ANY,
    every_answer: bool = False,
    padded: bool = True,
) -> Loaded:
    """Load the prompts of a file or folder; `columns` are those that the scorer reads besides the reference.

    `chosen` names the columns of prompt and answer; without names they are those of `FORMS` or `prompt_columns.USUAL`.

    With `every_answer`, each answer recorded in a conversation is a prompt, not only the last. `suites.draw` uses
    `limit` and `balance`; unless prompts are `padded` with others, only those drawn are made. The notes list rows left
    out and ignored keys. Raises UserError for a row without a prompt.
    """
    suite = Suite(name="prompts", version=1, title="your prompts", source=str(path), scorer=scorer)
    source = f"{'folder' if os.path.isdir(path) else 'file'} {path}"
    remarks, read = _Remarks(), {*KNOWN, *columns}
    made = partial(_prompt, is_scored=scorer != "none", remarks=remarks, chosen=chosen)
    rows = _answers_of(rows_in(path), chosen) if every_answer else rows_in(path)
    made = partial(made, chosen=ANY) if every_answer else made
    if padded or balance is not None or limit is None:
        found = (made(where, index, row) for index, (where, row) in enumerate(rows))
        prompts = [prompt for prompt in found if prompt is not None]
        num_rows = len(prompts)
    else:
        alone = None if every_answer or not is_parquet(path) else _of_parquet(suite, path, source, limit, made)
        if alone is None:
            remarks.empty.clear()
            remarks.as_json.clear()
        prompts, num_rows = alone or first_drawn(suite, rows, source, limit, _id, made)
    if every_answer and not prompts:
        raise UserError(f"{source}: --every-answer needs conversations with an answer after a message of the user")
    if remarks.empty and not prompts:
        raise UserError(f"{source}: {remarks.notes()[0]}")
    if not num_rows:
        raise UserError(f"{source} holds no prompts")
    loaded = draw(suite, prompts, source, limit, {*read, functions.FUNCTIONS}, balance)
    notes = (*remarks.notes(), *_notes(path, loaded.prompts, columns))
    return replace(loaded, num_rows=num_rows, notes=notes, revision=origins.in_cache([path]))


def _of_parquet(
    suite: Suite, path: Path, source: str, limit: int, made: Callable[[str, int, Row], Prompt | None]
) -> tuple[list[Prompt], int] | None:
    """Return the result of `first_drawn`, reading only ids first; None if rows may hold several prompts, or none."""
    numbers, num_rows = first_drawn(suite, parquet_rows(path, IDS), source, limit, _id, lambda _, index, row: index)
    rows = zip(numbers, parquet_rows(path, chosen=numbers), strict=True)
    prompts = [None if is_trace(row) else made(where, index, row) for index, (where, row) in rows]
    found = [prompt for prompt in prompts if prompt is not None]
    return (found, num_rows) if len(found) == len(numbers) else None


def _answers_of(rows: Rows, chosen: Columns) -> Rows:
    """Yield a row for each recorded answer of each conversation, with the messages up to and including it.

    Its id is the conversation's, which is its `session`, and its number there. The requests of a trace are such rows
    already.
    """
    for index, (where, row) in enumerate(rows):
        if SESSION in row and REQUEST in row:
            yield where, row
            continue
        row = _usual(where, row, chosen)
        form, messages, tools = _messages_of(where, row)
        known = next((str(row[key]) for key in (SESSION, "session_id", *IDS) if _is_given(row, key)), str(index))
        of_row = {key: value for key, value in row.items() if key not in (form, *IDS, *REFERENCES)}
        for place, until in answers_in(known, messages):
            yield f"{where} answer {place['answer_number']}", of_row | place | {"messages": until, "tools": tools}


def _messages_of(where: str, row: Row) -> tuple[str, list[Any], Any]:
    """Return the form of a conversation, its messages and tools. Raises UserError if the row holds none."""
    form = next(iter(_forms(row)), "")
    value: Any = row.get(form)
    tools = row.get("tools")
    if isinstance(value, str):
        value = in_text(value)[0]
    if form == "body" and isinstance(value, dict):
        value, tools = value.get("messages"), value.get("tools") or tools
    if not is_talk(value):
        raise UserError(f"{where}: --every-answer needs a conversation, {MESSAGES}")
    return form, value, tools


def _prompt(where: str, index: int, row: Row, is_scored: bool, remarks: _Remarks, chosen: Columns) -> Prompt | None:
    """Return the prompt of a row; None if it is left out."""
    if chosen.prompt is None and not _forms(row):
        columns, answer = found(row)
        and_answer = "" if answer is None else f", {answer} as the reference answer"
        remarks.columns |= {f"{' and '.join(columns)} as the prompt{and_answer}": None} if columns else {}
    row = _usual(where, row, chosen)
    forms = _forms(row)
    if not forms:
        raise UserError(f"{where}: no prompt: {_none(row)}")
    if len(forms) > 1:
        raise UserError(f"{where}: {' and '.join(forms)} hold a prompt each; name one with --prompt-column")
    talk = _conversation(where, forms[0], row, remarks)
    if talk is None:
        remarks.empty.append(where)
        return None
    right = _references(where, row, len(talk.turns), is_scored) or tuple(filter(None, [talk.answer]))
    return Prompt(
        suite="prompts",
        prompt_id=name_of(where, id_key, text_of(where, id_key, row)) if (id_key := _id_key(row)) else str(index),
        turns=filled(where, talk.turns),
        opening=talk.opening,
        closing=talk.closing,
        category=name_of(where, "category", text_of(where, "category", row)) if _is_given(row, "category") else None,
        reference=right[0] if right else None,
        alternatives=right[1:],
        row=row,
    )


def _id_key(row: Row) -> str | None:
    return next((key for key in IDS if key in row and _is_given(row, key)), None)


def _id(where: str, index: int, row: Row) -> str:
    key = _id_key(row)
    return text_of(where, key, row) if key else str(index)


def _forms(row: Row) -> list[str]:
    """Return the forms of a row; many data sets have a text column `question` that is part of a prompt."""
    given = [form for form in FORMS if row.get(form) is not None]
    return given if functions.is_in_turns(row) else [form for form in given if form != functions.TURNS]


def _usual(where: str, row: Row, chosen: Columns) -> Row:
    return chosen.applied(where, row, FORMS, bool(_forms(row)))


def _none(row: Row) -> str:
    """Return why no column counts as a prompt, and which suite the row may belong to."""
    empty = [column for column in (*FORMS, *(one for texts in USUAL for one in texts)) if column in row]
    if empty:
        return f"{' and '.join(dict.fromkeys(empty))}: empty, or not a text"
    return f"{listed(row)}; name one with --prompt-column{_suite_of(row)}"


def _suite_of(row: Row) -> str:
    """Return a hint at the suite whose columns these are, or ""."""
    names = (one.name for one in known_suites().values() if one.home == "folder" and row.keys() >= {*one.columns})
    name = next(names, None)
    return f" (rows of the suite {name}: dflash-bench suites prepare {name} --from FILE)" if name else ""


def _is_given(row: Row, key: str) -> bool:
    value = row.get(key)
    return value not in (None, "", []) and value == value  # NaN, the gap of a column of floats


def _conversation(where: str, form: str, row: Row, remarks: _Remarks) -> RecordedChat | None:
    """Return the conversation to send; None for a log without a user message. Raises UserError for anything else."""
    value, tools = row[form], row.get("tools")
    match form, value:
        case functions.TURNS, _:
            return functions.chat_of(where, form, functions.FUNCTIONS, row)
        case "body", _:
            value = files.parse_json(f"{where}: body", value) if isinstance(value, str) else value
            if not isinstance(value, dict) or "messages" not in value:
                raise UserError(f"{where}: body must be {FORMS['body']}")
            form, value, tools = "messages", value["messages"], value.get("tools") or tools
        case "prompt", str():
            parsed, is_conversation = in_text(value)
            if not is_conversation:
                remarks.as_json += [where] * (parsed is not None)
                return RecordedChat((value,), tools_of(where, tools))
            value = parsed
        case "prompt" | "turns", _ if is_texts(value):
            if any(in_text(turn)[1] for turn in value):
                raise UserError(f"{where}: a turn of {form} is a conversation as JSON; give it as messages")
            return RecordedChat(tuple(value), tools_of(where, tools))
        case "turns", _:
            raise UserError(f"{where}: turns must be {FORMS['turns']}")
        case "prompt", _ if not is_talk(value):
            raise UserError(f"{where}: prompt must be {FORMS['prompt']}")
    talk = of_messages(where, form, value, tools)
    if talk is None and form not in LOGS:
        raise UserError(f"{where}: {form} must be {MESSAGES}")
    return talk


def _references(where: str, row: Row, num_turns: int, is_scored: bool) -> tuple[str, ...]:
    """Return the correct answers to the last turn; empty for a value of another type, if answers are not scored.

    A text or a number is one answer, a list holds alternatives of one turn or one answer for each of several turns,
    which may itself be a list of alternatives. Raises UserError for anything else if answers are scored.
    """
    key = next((key for key in REFERENCES if _is_given(row, key)), None)
    if key is None:
        return ()
    value = row[key]
    values = value if isinstance(value, list) else [value]
    if num_turns > 1 or len(values) == 1:
        if len(values) not in (1, num_turns):
            return _refuse(
                f"{where}: '{key}' lists {len(values)} texts for {num_turns} turns; give one per turn", is_scored
            )
        values = values[-1] if isinstance(values[-1], list) else values[-1:]
    texts = [as_text(one) for one in values]
    known = tuple(text for text in texts if text is not None)
    if len(known) < len(texts):
        kind = type(values[texts.index(None)]).__name__
        expected = "must be a text or a number, or a list of them: alternatives, or one per turn"
        return _refuse(f"{where}: '{key}' {expected}, not {kind}; write it as a text, or omit --score", is_scored)
    return tuple(text for text in known if text.strip())


def _refuse(reason: str, is_scored: bool) -> tuple[str, ...]:
    if is_scored:
        raise UserError(reason)
    return ()


def _is_unread(row: Row, key: str) -> bool:
    return _is_given(row, key) and not (key == functions.FUNCTIONS and functions.is_in_turns(row))


def _notes(path: Path, prompts: Sequence[Prompt], columns: Sequence[str]) -> tuple[str, ...]:
    """Return one note on all ignored keys, and on those that look mistyped."""
    others = list(dict.fromkeys(key for prompt in prompts for key in prompt.row if key not in (*KNOWN, *columns)))
    sliced = {name for prompt in prompts for name in prompt.slices}
    unread = [key for key in others if key not in sliced and any(_is_unread(prompt.row, key) for prompt in prompts)]
    guesses = [(key, get_close_matches(key, OPTIONAL, 1, LIKE_A_KNOWN_KEY)) for key in others]
    told = [f"ignored {', '.join(unread)} (known: {', '.join(KNOWN)})"] if unread else []
    told += [f"{key}: did you mean {close[0]}?" for key, close in guesses if close]
    return (f"{path}: {' '.join(told)}",) if told else ()
