"""Kinds of text: each token has that of the place where it begins, whatever the token is cut from."""

from __future__ import annotations

from dflash_bench.measurements.text_kinds import KINDS, kinds_of
from helpers.each import each

CALL = '{"name": "ls", "arguments": {"path": "."}}'
TEXTS = {
    "prose": [("It is 3.\n> `x` is code in a line.", "prose")],
    "code in prose": [("So:\n", "prose"), ("```python\nx = 1\n```", "code"), ("\nDone.", "prose")],
    "two blocks": [("```json\n{}\n```", "json"), ("\nand\n", "prose"), ("  ~~~\nx\n  ~~~", "code"), ("\n.", "prose")],
    "a block in a longer fence": [("````md\n```\nx\n```\n````", "code"), ("\nEnd", "prose")],
    "code whose end is missing": [("Yes.\n", "prose"), ("```c\nint x;", "code")],
    "JSON alone": [('\n{"a": [1, {"b": 2}]}\n', "json")],
    "JSON whose end is missing": [('[{"a": 1, "b"', "json")],
    "JSON and more": [('{"a": 1} is JSON.', "prose")],
    "a note in brackets": [("[1] A book.", "prose")],
    "a tool call": [("I look.\n", "prose"), (f"<tool_call>\n{CALL}\n</tool_call>", "tool-call"), ("\nSo.", "prose")],
    "a tool call whose end is missing": [("<tool_call>{", "tool-call")],
    "a tool call after a token that is not shown": [(CALL, "tool-call")],
    "several of them": [(f" [{CALL}, {CALL}]", "tool-call")],
    "in OpenAI's form": [('{"type": "function", "function": {"name": "f", "parameters": {}}}', "tool-call")],
    "JSON with a name": [('{"name": "f", "age": 3}', "json")],
    "thinking": [("<think>\n```x\n```\n</think>", "thinking"), ("\nSo.", "prose")],
    "thinking that the prompt opened": [("Hm.</think>", "thinking"), ('{"a": 1}', "json")],
    "thinking without an end": [("<think>Hm", "thinking")],
    "a mark that an answer mentions": [("A <think> opens it.", "prose")],
    "nothing": [],
}


@each("what", TEXTS)
@each("size", [1, 3])
def test_each_kind_of_text(what: str, size: int) -> None:
    pieces = [(text[at : at + size], kind) for text, kind in TEXTS[what] for at in range(0, len(text), size)]
    found = kinds_of([piece for piece, _ in pieces], None)
    assert [KINDS[kind] for kind in found] == [kind for _, kind in pieces]


def test_known_thinking_is_as_long_as_it_is_known_to_be() -> None:
    pieces = ["a", "b", "", "{", '"', "c"]
    assert [KINDS[kind] for kind in kinds_of(pieces, 2)] == ["thinking"] * 2 + ["json"] * 4
    assert [KINDS[kind] for kind in kinds_of(pieces, 0)] == ["prose"] * 6
    assert [KINDS[kind] for kind in kinds_of(["</think>", "x"], 0)] == ["prose"] * 2
    assert [KINDS[kind] for kind in kinds_of(["x"], 9)] == ["thinking"]


def test_a_stop_at_the_end_belongs_to_the_text_before_it() -> None:
    assert [KINDS[kind] for kind in kinds_of(["a\n", "```\nx\n```", ""], None)] == ["prose", "code", "code"]
    assert kinds_of([""], None) == (KINDS.index("prose"),)


def test_a_token_across_a_border_belongs_to_where_it_begins() -> None:
    found = kinds_of(["a\n``", "`\nx", "\n```\nb", "c"], None)
    assert [KINDS[kind] for kind in found] == ["prose", "code", "code", "prose"]
