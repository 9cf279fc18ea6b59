"""Conversations in common formats: OpenAI's messages with tool calls, ShareGPT's turns, and JSON text of either.

The last answer is generated again; everything before it is sent as it was recorded. A session is divided into its
answers, each with the messages before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import shortened, visible
from dflash_bench.core.types import SESSION, TOOLS, Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's roles, and their equivalents in chat templates."""
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
}
"""ShareGPT's names in `from`, and their roles."""
MESSAGES = f"a list of {{role, content}} with a message of the user; roles: {', '.join(ROLES)}"
AS_OPENAI = "write it as OpenAI's API has it"
TEXT_PARTS = ("text", "input_text", "output_text")
ANSWERING = tuple(name for names in (ROLES, SPEAKERS) for name, role in names.items() if role == "assistant")
_PLACEHOLDER = re.compile(
    r"^[ \t]*FULL BENCHMARK DATA SHOULD BE FETCHED.*|^[^\"'`\n]*\{(question|article)\}[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
"""Texts that publishers leave where they may not distribute the original, and unfilled templates (quoted: code)."""


@dataclass(frozen=True, slots=True)
class RecordedChat:
    """A conversation to send: the user's `turns`, with `opening` before and `closing` after them."""

    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    closing: tuple[Message, ...] = ()
    answer: str | None = None
    """The recorded answer: its text, or without text its tool calls as JSON."""


def of_messages(where: str, key: str, value: Any, tools: Any = None) -> RecordedChat | None:
    """Return the conversation in a list of messages; None without a user message.

    Raises UserError, which begins with `where`, for a list with other content.
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
    """Return the text of an answer, or without text its tool calls as JSON."""
    if message.content.strip():
        return message.content
    calls = json.loads(message.more).get("tool_calls") if message.more else None
    return json.dumps([call["function"] for call in calls], ensure_ascii=False) if calls else None


def in_text(text: str) -> tuple[Any, bool]:
    """Return the list or object encoded in a JSON text, or None; and whether it is a list of messages."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None, False
    try:
        value = files.parse_json("", text)
    except UserError:
        return None, False
    return value or None, is_talk(value)


def is_talk(value: Any) -> bool:
    """Return whether any item of a list looks like a message."""
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
    """Return the text of a message. Raises UserError for images and other content."""
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
    """Return the fields that a template reads besides role and content."""
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
    """Return a tool call as templates take it: with arguments as an object, if possible."""
    match value:
        case {"function": {"name": str(name), **rest}}:
            arguments = rest.get("arguments") or {}
        case _:
            raise UserError(f"{where}: a tool call must be {{id, function: {{name, arguments}}}}; {AS_OPENAI}")
    called = shortened(visible(name), 40)
    if not _is_id(value.get("id")):
        raise UserError(f"{where}: its call of {called} has no id, by which tools answer; {AS_OPENAI}")
    if isinstance(arguments, str):
        # A model's arguments may be invalid JSON, and are then sent unchanged.
        parsed, _ = in_text(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    if not isinstance(arguments, str | dict):
        raise UserError(f"{where}: the arguments of {called} must be an object, or its JSON")
    return {"id": value["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def tools_of(where: str, value: Any) -> tuple[Message, ...]:
    """Return the message that lists the available tools; empty without tools."""
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


def refuse_placeholder(where: str, text: str) -> None:
    """Raise UserError for a placeholder, which would be answered and measured like a prompt."""
    if match := _PLACEHOLDER.search(text):
        raise UserError(
            f"{where}: its text is a placeholder ('{shortened(visible(match[0].strip()), 60)}'), not a prompt; prepare "
            "the data set as its publisher describes, and use the result"
        )


def answers_in(session: str, messages: list[Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield each recorded answer to a user message: its columns, and the messages up to and including it.

    Its id is the session's and its number there.
    """
    number, has_asked = 0, False
    for end, message in enumerate(messages, start=1):
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        has_asked |= role in ("user", "human")
        if has_asked and role in ANSWERING:
            yield {"id": f"{session}-{number}", SESSION: session, "answer_number": number}, messages[:end]
            number += 1
