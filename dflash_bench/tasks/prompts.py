"""A user's own prompts as JSON lines; files of Spec-Bench and EAGLE can be used unchanged.

A line holds the text in one of the `FORMS`, and may hold an id, a category and a reference (see docs/suites.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message, Prompt
from dflash_bench.tasks import suites
from dflash_bench.tasks.suites import Loaded, Row, Suite, draw, filled, is_texts, name_of, refuse_placeholder, text_of

FORMS = {
    "prompt": "a string, or a list of strings, one per turn",
    "turns": "a list of strings",
    "messages": "a list of {role, content} that ends with role user; roles: system, user, assistant",
}
IDS = ("id", "question_id", "task_id", "prompt_id")
"""Keys that may hold a prompt's id; the first one present counts."""
KNOWN = (*FORMS, *IDS, "category", "reference")
LIKE_A_KNOWN_KEY = 0.8
"""Similarity (difflib's ratio) from which on an unknown key is taken for a mistyped known one."""


def load(path: Path, limit: int | None = None, scorer: str = "none", columns: Sequence[str] = ()) -> Loaded:
    """Load the prompts of a file; `columns` are those that its scorer reads besides the reference.

    The notes name keys that are ignored. Raises UserError for a line that holds no prompt.
    """
    suite = Suite(name="prompts", version=1, title="your prompts", source=str(path), scorer=scorer)
    lines = list(suites.json_lines(path))
    prompts = [_prompt(where, index, row, scorer != "none") for index, (where, row) in enumerate(lines)]
    notes = _notes(path, [row for _, row in lines], columns)
    return draw(suite, prompts, f"file {path}", limit, notes)


def _prompt(where: str, index: int, row: Row, is_scored: bool) -> Prompt:
    forms = [form for form in FORMS if form in row]
    if len(forms) != 1:
        raise UserError(f"{where}: needs one of {', '.join(FORMS)}; has {' and '.join(forms) or 'none'}")
    turns, opening = _conversation(where, forms[0], row[forms[0]])
    id_key = next((key for key in IDS if _is_given(row, key)), None)
    return Prompt(
        suite="prompts",
        prompt_id=name_of(where, id_key, text_of(where, id_key, row)) if id_key else str(index),
        turns=filled(where, turns),
        opening=opening,
        category=name_of(where, "category", text_of(where, "category", row)) if _is_given(row, "category") else None,
        reference=_reference(where, row, len(turns), is_scored) if _is_given(row, "reference") else None,
        row=row,
    )


def _is_given(row: Row, key: str) -> bool:
    return row.get(key) not in (None, "", [])


def _conversation(where: str, form: str, value: Any) -> tuple[Sequence[str], tuple[Message, ...]]:
    """Return the user's turns and the messages before them. Raises UserError for anything else."""
    match form, value:
        case "prompt", str():
            return [value], ()
        case "prompt" | "turns", _ if is_texts(value):
            return value, ()
        case "messages", [*_, {"role": "user"}] if all(map(_is_message, value)):
            *opening, last = (Message(message["role"], message["content"]) for message in value)
            for message in opening:
                refuse_placeholder(where, message.content)
            return [last.content], tuple(opening)
    raise UserError(f"{where}: {form} must be {FORMS[form]}")


def _is_message(value: object) -> bool:
    match value:
        case {"role": "system" | "user" | "assistant", "content": str()}:
            return True
    return False


def _reference(where: str, row: Row, num_turns: int, is_scored: bool) -> str | None:
    """Return the reference of the last turn: the last of a list with one per turn, or the only one.

    It may itself be a list of equally right answers, but a scorer accepts only one. Raises UserError otherwise.
    """
    value = row["reference"]
    if not isinstance(value, list):
        return text_of(where, "reference", row)
    if len(value) not in (1, num_turns):
        if is_scored:
            raise UserError(f"{where}: 'reference' lists {len(value)} texts for {num_turns} turns; give one per turn")
        return None
    last = value[-1]
    if not is_texts(last):
        return text_of(where, "reference", {"reference": last})
    if is_scored and len(last) != 1:
        raise UserError(
            f"{where}: 'reference' lists {len(last)} answers for one turn, and --score compares with one; give one"
        )
    return last[0] if len(last) == 1 else None


def _notes(path: Path, file_rows: Sequence[Row], columns: Sequence[str]) -> tuple[str, ...]:
    """Return one note on all ignored keys: they may be the author's remarks, or mistyped."""
    unread = list(dict.fromkeys(key for row in file_rows for key in row if key not in (*KNOWN, *columns)))
    if not unread:
        return ()
    guesses = [(key, get_close_matches(key, KNOWN, 1, LIKE_A_KNOWN_KEY)) for key in unread]
    questions = [f"{key}: did you mean {close[0]}?" for key, close in guesses if close]
    return (" ".join([f"{path}: ignored {', '.join(unread)} (known: {', '.join(KNOWN)})", *questions]),)
