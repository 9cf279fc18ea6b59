"""A user's own prompts: whatever people have, from files of benchmarks to logs of requests (see docs/suites.md).

A row holds what is asked in one of the `FORMS`, and may hold an id, a category, a reference and tools; its other
columns become slices where they hold names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks import conversations
from dflash_bench.tasks.conversations import MESSAGES, RecordedChat, in_text, is_talk, tools_of
from dflash_bench.tasks.sources import rows_in
from dflash_bench.tasks.suites import Loaded, Row, Suite, draw, filled, is_texts, name_of, text_of, with_slices

LOGS = ("conversations", "conversation", "messages_json", "trajectory")
"""Other names of `messages`: ShareGPT, WildChat, agents' trajectories."""
FORMS = {
    "prompt": f"a string, a list of strings, one per turn, or {MESSAGES}",
    "turns": "a list of strings",
    "messages": MESSAGES,
    "body": f"a request with messages, {MESSAGES}",
    **dict.fromkeys(LOGS, MESSAGES),
}
IDS = ("id", "question_id", "task_id", "prompt_id", "custom_id")
"""Keys that may hold a prompt's id; the first one present counts."""
REFERENCES = ("reference", "answer")
OPTIONAL = (*IDS, "category", *REFERENCES, "tools")
"""Keys that a row may have; a mistyped one would go unnoticed."""
KNOWN = (*FORMS, *OPTIONAL)
LIKE_A_KNOWN_KEY = 0.85
"""Similarity (difflib's ratio) from which on an unknown key is taken for a mistyped one."""
MOST_NAMED = 3


@dataclass(slots=True)
class _Remarks:
    """Rows that a note names, by their places."""

    empty: list[str] = field(default_factory=list)
    """Logs in which the user says nothing."""
    as_json: list[str] = field(default_factory=list)
    """Prompts that are JSON, and asked as they are."""

    def notes(self) -> list[str]:
        left_out = "conversations hold no message of the user, and are left out"
        said = {left_out: self.empty, "prompts are JSON, and are asked as they are": self.as_json}
        return [
            f"{len(places)} {what}, such as {', '.join(places[:MOST_NAMED])}" for what, places in said.items() if places
        ]


def load(
    path: Path,
    limit: int | None = None,
    scorer: str = "none",
    columns: Sequence[str] = (),
    balance: str | None = None,
) -> Loaded:
    """Load the prompts of a file or folder; `columns` are those that its scorer reads besides the reference.

    `limit` and `balance` are for `suites.draw`. The notes name rows that are left out and keys that are ignored. Raises
    UserError for a row that holds no prompt.
    """
    suite = Suite(name="prompts", version=1, title="your prompts", source=str(path), scorer=scorer)
    remarks, is_scored = _Remarks(), scorer != "none"
    found = [_prompt(where, index, row, is_scored, remarks) for index, (where, row) in enumerate(rows_in(path))]
    prompts = with_slices([prompt for prompt in found if prompt is not None], {*KNOWN, *columns})
    notes = (*remarks.notes(), *_notes(path, prompts, columns))
    source = f"{'folder' if os.path.isdir(path) else 'file'} {path}"
    if found and not prompts:
        raise UserError(f"{source}: {notes[0]}")
    return draw(suite, prompts, source, limit, notes, balance)


def _prompt(where: str, index: int, row: Row, is_scored: bool, remarks: _Remarks) -> Prompt | None:
    """Make a prompt of a row; None for one that is left out."""
    forms = [form for form in FORMS if row.get(form) is not None]
    if len(forms) != 1:
        raise UserError(f"{where}: needs one of {', '.join(FORMS)}; has {' and '.join(forms) or 'none'}")
    talk = _conversation(where, forms[0], row, remarks)
    if talk is None:
        remarks.empty.append(where)
        return None
    id_key = next((key for key in IDS if _is_given(row, key)), None)
    right = _references(where, row, len(talk.turns), is_scored) or tuple(filter(None, [talk.answer]))
    return Prompt(
        suite="prompts",
        prompt_id=name_of(where, id_key, text_of(where, id_key, row)) if id_key else str(index),
        turns=filled(where, talk.turns),
        opening=talk.opening,
        closing=talk.closing,
        category=name_of(where, "category", text_of(where, "category", row)) if _is_given(row, "category") else None,
        reference=right[0] if right else None,
        alternatives=right[1:],
        row=row,
    )


def _is_given(row: Row, key: str) -> bool:
    return row.get(key) not in (None, "", [])


def _conversation(where: str, form: str, row: Row, remarks: _Remarks) -> RecordedChat | None:
    """Return what is asked; None for a log in which the user says nothing. Raises UserError for anything else."""
    value, tools = row[form], row.get("tools")
    match form, value:
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
    talk = conversations.of_messages(where, form, value, tools)
    if talk is None and form not in LOGS:
        raise UserError(f"{where}: {form} must be {MESSAGES}")
    return talk


def _references(where: str, row: Row, num_turns: int, is_scored: bool) -> tuple[str, ...]:
    """Return the right answers to the last turn, of a text, a list with one per turn, or a list of alternatives.

    One per turn may be a list of alternatives itself. Raises UserError otherwise.
    """
    key = next((key for key in REFERENCES if _is_given(row, key)), None)
    value = row[key] if key else None
    if key is None or (key != "reference" and not (isinstance(value, str | int) or is_texts(value))):
        return ()
    if not isinstance(value, list):
        return (text_of(where, key, row),)
    if is_texts(value) and num_turns == 1:
        return _not_blank(value)
    if len(value) not in (1, num_turns):
        if is_scored:
            raise UserError(f"{where}: '{key}' lists {len(value)} texts for {num_turns} turns; give one per turn")
        return ()
    last = value[-1]
    return _not_blank(last) if is_texts(last) else (text_of(where, key, {key: last}),)


def _not_blank(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in texts if text.strip())


def _notes(path: Path, prompts: Sequence[Prompt], columns: Sequence[str]) -> tuple[str, ...]:
    """Return one note on all ignored keys, and on those that look mistyped."""
    others = list(dict.fromkeys(key for prompt in prompts for key in prompt.row if key not in (*KNOWN, *columns)))
    sliced = {name for prompt in prompts for name in prompt.slices}
    unread = [key for key in others if key not in sliced and any(_is_given(prompt.row, key) for prompt in prompts)]
    guesses = [(key, get_close_matches(key, OPTIONAL, 1, LIKE_A_KNOWN_KEY)) for key in others]
    told = [f"ignored {', '.join(unread)} (known: {', '.join(KNOWN)})"] if unread else []
    told += [f"{key}: did you mean {close[0]}?" for key, close in guesses if close]
    return (f"{path}: {' '.join(told)}",) if told else ()
