"""Rows of the Berkeley Function Calling Leaderboard (BFCL): turns of messages, and callable functions.

Its parameter schemas have types of Python, Java and JavaScript. They are converted to JSON Schema, and its functions to
the tools of OpenAI's API and of chat templates, as its own code (model_handler/utils.py) does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import shortened, visible
from dflash_bench.tasks.conversations import RecordedChat, of_messages
from dflash_bench.tasks.rows import Row, json_lines

TURNS, FUNCTIONS, CLASSES = "question", "function", "involved_classes"
"""The columns of BFCL's rows; multi-turn rows have classes in place of functions."""
TYPES = {
    **dict.fromkeys(("string", "String", "char", "any", "Any", ""), "string"),
    **dict.fromkeys(("integer", "int", "long", "short", "byte", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool", "Boolean"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "Array", "ArrayList", "Queue", "Set", "Stack"), "array"),
    **dict.fromkeys(("object", "dict", "HashMap", "Hashtable"), "object"),
}
"""BFCL's parameter types, and those of JSON Schema."""
DOCUMENTS = "multi_turn_func_doc"
"""The folder beside its multi-turn files that holds the functions of each class."""
DOCUMENT_OF = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that OpenAI's API rejects in function names; BFCL has dots."""


def is_in_turns(row: Row) -> bool:
    """Return whether a row holds a conversation in BFCL's format."""
    return isinstance(row.get(TURNS), list)


def chat_of(where: str, turns: str, functions: str, row: Row) -> RecordedChat:
    """Return the conversation and the tools in these columns of a row; each turn after the first is one message.

    Raises UserError, which begins with `where`, for a row with other content.
    """
    value = _parsed(where, turns, row.get(turns))
    if not isinstance(value, list) or not value or not all(isinstance(turn, list) for turn in value):
        raise UserError(f"{where}: {turns} must be a list of turns, each a list of {{role, content}}")
    if row.get(functions) is None:
        told = f"; those of several turns are in {DOCUMENTS}, and 'dflash-bench suites prepare bfcl' adds them"
        raise UserError(f"{where}: it has no {functions}{told if CLASSES in row else ''}")
    first, *later = (
        _turn(
            f"{where}: turn {number} of {turns}",
            turn,
            tools_of(where, functions, row[functions]) if number == 1 else None,
        )
        for number, turn in enumerate(value, start=1)
    )
    for number, turn in enumerate(later, start=2):
        if turn.opening:
            raise UserError(f"{where}: turn {number} of {turns} must be one message of the user")
    return RecordedChat((*first.turns, *(turn.turns[0] for turn in later)), first.opening)


def _turn(where: str, value: list[Any], tools: Any) -> RecordedChat:
    if not value:
        raise UserError(f"{where} is empty: the tools change there, and all turns of a prompt have the same")
    turn = of_messages(where, "it", value, tools)
    if turn is None or turn.closing or turn.answer is not None:
        raise UserError(f"{where} must end with a message of the user")
    return turn


def _parsed(where: str, column: str, value: Any) -> Any:
    return files.parse_json(f"{where}: {column}", value) if isinstance(value, str) else value


def tools_of(where: str, column: str, value: Any) -> list[dict[str, Any]]:
    """Return functions as OpenAI's tools. Raises UserError for anything else, and for unknown types."""
    value = _parsed(where, column, value)
    if not isinstance(value, list):
        raise UserError(f"{where}: {column} must be a list of functions")
    return [_tool(f"{where}: {column} {number}", one) for number, one in enumerate(value, start=1)]


def _tool(where: str, value: Any) -> dict[str, Any]:
    match value:
        case {"name": str(name), "parameters": dict(parameters)} if name.strip():
            described = value.get("description") or ""
        case _:
            raise UserError(f"{where} must be {{name, description, parameters}}")
    function = {"name": _NO_NAME.sub("_", name), "description": described, "parameters": _schema(where, parameters)}
    return {"type": "function", "function": function}


def _schema(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: the schema of a parameter must be an object, not {type(value).__name__}")
    return {key: _keyword(where, key, inner) for key, inner in value.items()}


def _keyword(where: str, key: str, value: Any) -> Any:
    match key, value:
        case "type", str() if value in TYPES:
            return TYPES[value]
        case "type", _:
            raise UserError(f"{where}: unknown type {shortened(visible(str(value)), 40)!r}; known: {', '.join(TYPES)}")
        case "properties", dict():
            return {name: _schema(where, inner) for name, inner in value.items()}
        case (("items" | "additionalProperties"), dict()):
            return _schema(where, value)
    return value


def with_functions(where: str, row: Row, folder: Path) -> Row:
    """Add the functions of a row's classes, from the documents in its file's folder. Raises UserError for others."""
    classes = row.get(CLASSES)
    if row.get(FUNCTIONS) is not None or not isinstance(classes, list):
        return row
    found: list[Mapping[str, Any]] = []
    for name in classes:
        if name not in DOCUMENT_OF:
            raise UserError(f"{where}: unknown class {name!r} in {CLASSES}; known: {', '.join(DOCUMENT_OF)}")
        found += [function for _, function in json_lines(folder / DOCUMENTS / f"{DOCUMENT_OF[name]}.json")]
    return {**row, FUNCTIONS: found}
