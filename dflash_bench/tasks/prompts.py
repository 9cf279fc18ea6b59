"""A user's own prompts: whatever people have, from files of benchmarks to logs of requests (see docs/suites.md).

A row holds what is asked in one of the `FORMS`, and may hold an id, a category, a reference and tools; its other
columns become slices where they hold names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import MOST_NESTED, io_error, require_file
from dflash_bench.core.labels import shortened, visible
from dflash_bench.core.types import SESSION, TOOLS, Message, Prompt
from dflash_bench.tasks.suites import (
    LONGEST_LINE,
    Loaded,
    Row,
    Rows,
    Suite,
    draw,
    filled,
    is_texts,
    json_lines,
    name_of,
    parquet_rows,
    refuse_placeholder,
    text_of,
    with_slices,
)

# Conversations as others write them: OpenAI's messages with tool calls, ShareGPT's turns, and JSON text of either.
#
# The last answer is what will be generated again. Everything before it is sent as it was recorded.


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's roles, and those of chat templates."""
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bard": "assistant", "bing": "assistant", "bot": "assistant", "assistant": "assistant",
}  # fmt: skip
"""ShareGPT's names in `from`, and the roles that they stand for."""
MESSAGES = f"a list of {{role, content}} with a message of the user; roles: {', '.join(ROLES)}"
AS_OPENAI = "write it as OpenAI's API has it"
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class RecordedChat:
    """What is asked: the user's `turns`, with `opening` before and `closing` after them."""

    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    closing: tuple[Message, ...] = ()
    answer: str | None = None
    """The recorded answer: its text, or if it has none its tool calls as JSON."""


def of_messages(where: str, key: str, value: Any, tools: Any = None) -> RecordedChat | None:
    """Return the conversation in a list of messages; None if the user says nothing in it.

    Raises UserError, which begins with `where`, for a list that holds anything else.
    """
    if isinstance(value, str):
        value = files.parse_json(f"{where}: {key}", value)
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} must be {MESSAGES}")
    messages = [_message(f"{where}: message {number} of {key}", one) for number, one in enumerate(value, start=1)]
    answer = None
    if messages and messages[-1].role == "assistant":
        *messages, last = messages
        answer = said(last)
    said_by_user = [number for number, message in enumerate(messages) if message.role == "user"]
    if not said_by_user:
        return None
    at = said_by_user[-1]
    for message in (*messages[:at], *messages[at + 1 :]):
        refuse_placeholder(where, message.content)
    opening = (*tools_of(where, tools), *messages[:at])
    return RecordedChat((messages[at].content,), opening, tuple(messages[at + 1 :]), answer)


def said(message: Message) -> str | None:
    """Return the text of an answer, or if it has none its tool calls as JSON."""
    if message.content.strip():
        return message.content
    calls = json.loads(message.more).get("tool_calls") if message.more else None
    return json.dumps([call["function"] for call in calls], ensure_ascii=False) if calls else None


def in_text(text: str) -> tuple[Any, bool]:
    """Return the list or object that a text is as JSON, or None; and whether that is a list of messages."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None, False
    try:
        value = files.parse_json("", text)
    except UserError:
        return None, False
    return value or None, is_talk(value)


def is_talk(value: Any) -> bool:
    """Return True for a list in which something looks like a message."""
    return isinstance(value, list) and any(
        isinstance(one, Mapping) and ({"role", "content"} <= one.keys() or {"from", "value"} <= one.keys())
        for one in value
    )


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, Mapping) or not (isinstance(value.get("role", value.get("from")), str)):
        raise UserError(f"{where} must be an object with a role and content")
    known, name = (ROLES, value["role"]) if "role" in value else (SPEAKERS, value["from"])
    if name not in known:
        raise UserError(f"{where} has the role '{shortened(visible(name), 40)}'; roles: {', '.join(known)}")
    role = known[name]
    more = _more(where, role, value)
    text = _text(where, value.get("content", value.get("value")), "tool_calls" in more)
    return Message(role, text, json.dumps(more, ensure_ascii=False) if more else "")


def _text(where: str, content: Any, has_calls: bool) -> str:
    """Return the text of a message. Raises UserError for images and whatever else is no text."""
    match content:
        case str():
            return content
        case None if has_calls:
            return ""
        case list():
            return "\n".join(_part(where, part) for part in content)
    raise UserError(f"{where} has no content: a text, or a list of texts")


def _part(where: str, part: Any) -> str:
    match part:
        case str():
            return part
        case {"type": str(kind), "text": str(text)} if kind in TEXT_PARTS:
            return text
        case {"type": str(kind)} if kind not in TEXT_PARTS:
            raise UserError(f"{where} holds {shortened(visible(kind), 40)}, and only text can be asked here")
    raise UserError(f"{where}: a part of its content must be a text, or {{type: text, text}}")


def _more(where: str, role: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a template reads besides role and content."""
    more: dict[str, Any] = {}
    if role == "assistant":
        if calls := _calls(where, value.get("tool_calls") or value.get("tool_calls_json")):
            more["tool_calls"] = calls
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str) and reasoning.strip():
            more["reasoning_content"] = reasoning
    if role == "tool":
        if not _is_id(value.get("tool_call_id")):
            raise UserError(f"{where} has no tool_call_id, which says what call it answers; {AS_OPENAI}")
        more["tool_call_id"] = value["tool_call_id"]
        if isinstance(value.get("name"), str):
            more["name"] = value["name"]
    return more


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = files.parse_json(f"{where}: tool_calls", value)
    if not value:
        return []
    if not isinstance(value, list):
        raise UserError(f"{where}: tool_calls must be a list")
    return [_call(where, call) for call in value]


def _call(where: str, value: Any) -> dict[str, Any]:
    """Return a tool call as templates take it: with arguments as an object, where they are one."""
    match value:
        case {"function": {"name": str(name), **rest}}:
            arguments = rest.get("arguments") or {}
        case _:
            raise UserError(f"{where}: a tool call must be {{id, function: {{name, arguments}}}}; {AS_OPENAI}")
    called = shortened(visible(name), 40)
    if not _is_id(value.get("id")):
        raise UserError(f"{where}: its call of {called} has no id, by which tools answer; {AS_OPENAI}")
    if isinstance(arguments, str):
        # What a model wrote may be no JSON, and is then sent as it was written.
        parsed, _ = in_text(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    if not isinstance(arguments, str | dict):
        raise UserError(f"{where}: the arguments of {called} must be an object, or its JSON")
    return {"id": value["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def tools_of(where: str, value: Any) -> tuple[Message, ...]:
    """Return the message that says which tools there are; none if there are none."""
    if isinstance(value, str):
        value = files.parse_json(f"{where}: tools", value) if value.strip() else None
    if not value:
        return ()
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        raise UserError(f"{where}: tools must be a list of {{type: function, function: {{name, ...}}}}; {AS_OPENAI}")
    return (Message(TOOLS, json.dumps(value, ensure_ascii=False)),)


def _is_tool(value: Any) -> bool:
    match value:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False


# Rows of a user's own files: JSON lines, a JSON array, an agent trace, Parquet, and folders of them.


SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""The files that are read from a folder; a file that is named itself is recognised by its content."""
PARQUET = b"PAR1"
MOST_WHOLE = 1 << 30
"""Bytes of a JSON file that is not in lines, which is read as a whole."""


def rows_in(path: Path) -> Rows:
    """Read rows from a file, or from all files in a folder and below it, by name; of a trace, its requests.

    Raises UserError for a folder without such files, and for what cannot be read.
    """
    for file in _files_in(path) if os.path.isdir(path) else [path]:
        for where, row in _rows(file):
            yield from _requests(where, row) if _is_trace(row) else [(where, row)]


def _files_in(folder: Path) -> list[Path]:
    try:
        found = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    except OSError as error:
        raise io_error("read", folder, error) from error
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not shown:
        raise UserError(f"no prompts in the folder {folder}: it holds no file that ends in {', '.join(SUFFIXES)}")
    return shown


def _rows(path: Path) -> Rows:
    start = _start(path)
    if path.suffix == ".parquet" or start.startswith(PARQUET):
        return ((where, _without_nulls(where, row)) for where, row in parquet_rows(path))
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[" or (first == b"{" and path.suffix == ".json" and not _is_in_lines(path)):
        return _rows_of_whole(path)
    return json_lines(path)


def _start(path: Path) -> bytes:
    require_file(path)
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise io_error("read", path, error) from error


def _is_in_lines(path: Path) -> bool:
    """Return True if the first line that is not blank is an object by itself."""
    line = next((line for line in files.lines_of(path, LONGEST_LINE) if line.strip()), "")
    try:
        return isinstance(files.parse_json("", line), dict)
    except UserError:
        return False


def _rows_of_whole(path: Path) -> Rows:
    if path.stat().st_size > MOST_WHOLE:
        raise UserError(
            f"{path} has more than {MOST_WHOLE >> 30} GiB; write it as JSON lines or Parquet, which need less memory"
        )
    value = files.json_of(path)
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number}: a row must be a JSON object, not {type(row).__name__}")
        yield f"{path} row {number}", row


def _is_trace(row: Row) -> bool:
    """Return True for agents' sessions in one row: {"conversations": [[{"messages": [...]}, ...], ...]}."""
    conversations = row.get("conversations")
    return isinstance(conversations, list) and any(isinstance(one, list) for one in conversations)


def _requests(where: str, row: Row) -> Rows:
    for session, requests in enumerate(row["conversations"]):
        for number, request in enumerate(requests if isinstance(requests, list) else [requests]):
            if not isinstance(request, dict):
                raise UserError(f"{where}: request {number} of session {session} must be an object with messages")
            place = {"id": f"{session}-{number}", SESSION: session, REQUEST: number}
            yield f"{where} request {session}-{number}", place | request


def _without_nulls(where: str, value: Any, depth: int = 0) -> Any:
    """Return a value without the nulls inside its objects: Parquet gives all objects of a column the same keys."""
    if depth > MOST_NESTED:
        raise UserError(f"{where}: nested more than {MOST_NESTED} levels deep")
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if inner is not None or depth == 0}
        return {key: _without_nulls(where, inner, depth + 1) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_nulls(where, inner, depth + 1) for inner in value]
    return value


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
REQUEST = "request"
"""The column that numbers the requests of a session."""
ANSWERING = tuple(name for names in (ROLES, SPEAKERS) for name, role in names.items() if role == "assistant")


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
    *,
    every_answer: bool = False,
) -> Loaded:
    """Load the prompts of a file or folder; `columns` are those that its scorer reads besides the reference.

    With `every_answer`, each answer that was recorded in a conversation is a prompt, not only the last. `limit` and
    `balance` are for `suites.draw`. The notes name rows that are left out and keys that are ignored. Raises UserError
    for a row that holds no prompt.
    """
    suite = Suite(name="prompts", version=1, title="your prompts", source=str(path), scorer=scorer)
    remarks, is_scored = _Remarks(), scorer != "none"
    rows = _answers_of(rows_in(path)) if every_answer else rows_in(path)
    found = [_prompt(where, index, row, is_scored, remarks) for index, (where, row) in enumerate(rows)]
    prompts = with_slices([prompt for prompt in found if prompt is not None], {*KNOWN, *columns})
    notes = (*remarks.notes(), *_notes(path, prompts, columns))
    source = f"{'folder' if os.path.isdir(path) else 'file'} {path}"
    if every_answer and not prompts:
        raise UserError(f"{source}: --every-answer needs conversations with an answer after a message of the user")
    if found and not prompts:
        raise UserError(f"{source}: {notes[0]}")
    return draw(suite, prompts, source, limit, notes, balance)


def _answers_of(rows: Rows) -> Rows:
    """Yield a row for each recorded answer of each conversation: what stood before it, and the answer.

    Its id is that of the conversation, which is its `session`, and its number there. The requests of a trace are such
    rows already.
    """
    for index, (where, row) in enumerate(rows):
        if SESSION in row and REQUEST in row:
            yield where, row
            continue
        form, messages, tools = _messages_of(where, row)
        known = next((str(row[key]) for key in (SESSION, "session_id", *IDS) if _is_given(row, key)), str(index))
        of_row = {key: value for key, value in row.items() if key not in (form, *IDS, *REFERENCES)}
        number, has_asked = 0, False
        for end, message in enumerate(messages, start=1):
            role = message.get("role", message.get("from")) if isinstance(message, dict) else None
            has_asked |= role in ("user", "human")
            if has_asked and role in ANSWERING:
                place = {"id": f"{known}-{number}", SESSION: known, "answer_number": number}
                yield f"{where} answer {number}", of_row | place | {"messages": messages[:end], "tools": tools}
                number += 1


def _messages_of(where: str, row: Row) -> tuple[str, list[Any], Any]:
    """Return the form of a conversation, its messages and tools. Raises UserError for a row that is none."""
    form = next((form for form in FORMS if row.get(form) is not None), "")
    value: Any = row.get(form)
    tools = row.get("tools")
    if isinstance(value, str):
        value = in_text(value)[0]
    if form == "body" and isinstance(value, dict):
        value, tools = value.get("messages"), value.get("tools") or tools
    if not is_talk(value):
        raise UserError(f"{where}: --every-answer needs a conversation, {MESSAGES}")
    return form, value, tools


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
    talk = of_messages(where, form, value, tools)
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
