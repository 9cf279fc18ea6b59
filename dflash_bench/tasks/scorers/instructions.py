"""IFEval: whether an answer follows all of a prompt's checkable instructions (the strict metric).

The kinds, parameters and rules are those of google/IFEval, reimplemented without its dependencies. So sentences are
split by their marks (there: NLTK's Punkt), and text required to be English capitals or lower case may be in any
language. The language of an answer is not detected: prompts that require one are not scored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score

NAME, IDS, PARAMETERS = "ifeval", "instruction_id_list", "kwargs"
"""The scorer, and its columns: a prompt's kinds of instructions, and the parameters of each."""
RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": lambda number, bound: number >= bound,
    "less than": lambda number, bound: number < bound,
}
VERDICTS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATED = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|[A-HJ-Z])\.$")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]*_]*(?=\s+[\"'“‘(\[*_]*[^\Wa-z_]|\s*$)|\n\s*\n")
_FENCE = re.compile(r"\A```(?:json)?(.*?)(?:```)?\Z", re.DOTALL | re.IGNORECASE)


def ifeval(prompt: Prompt, text: str) -> Score:
    """Score whether the answer follows every instruction; otherwise `answer` lists the violations."""
    if unscored(prompt):
        return Score(None, None)
    broken = [
        kind for kind, parameters in _instructions(prompt) if not (text.strip() and _follows(kind, text, parameters))
    ]
    return Score(", ".join(broken) or None, not broken)


def unscored(prompt: Prompt) -> str:
    """Return why a prompt's answers are not scored: the instructions that are not implemented here."""
    kinds = [kind for kind in prompt.row[IDS] if kind in UNCHECKED]
    return f"{', '.join(kinds)} is not checked here" if kinds else ""


def check(prompt: Prompt) -> None:
    """Raise UserError for instructions of an unknown kind, or with wrong parameters."""
    where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
    if len(prompt.row[IDS]) != len(prompt.row[PARAMETERS]):
        raise UserError(f"{where} has {len(prompt.row[IDS])} {IDS} and {len(prompt.row[PARAMETERS])} {PARAMETERS}")
    for kind, given in zip(prompt.row[IDS], prompt.row[PARAMETERS], strict=True):
        if kind not in CHECKS and kind not in UNCHECKED:
            raise unknown(f"instruction of {where}:", str(kind), [*CHECKS, *UNCHECKED])
        for name, kinds in CHECKS[kind][1].items() if kind in CHECKS else ():
            value = given.get(name) if isinstance(given, Mapping) else None
            is_right = value in RELATIONS if kinds is RELATIONS else _is_of(kinds, value)
            if not is_right:
                raise UserError(f"{where}: {kind} has no {name} that fits, in {PARAMETERS}")


def _is_of(kind: Any, value: Any) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    # JSON made from tables has 3.0 for 3.
    return isinstance(value, int | float) and value == int(value) if kind is int else isinstance(value, kind)


def _instructions(prompt: Prompt) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind, given in zip(prompt.row[IDS], prompt.row[PARAMETERS], strict=True):
        yield kind, {name: given[name] for name in CHECKS[kind][1]}


def _follows(kind: str, text: str, parameters: Mapping[str, Any]) -> bool:
    return CHECKS[kind][0](text, **parameters)


def _holds(number: int, relation: str, bound: float) -> bool:
    return RELATIONS[relation](number, int(bound))


def _times(keyword: str, text: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def _has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _num_sentences(text: str) -> int:
    """Count sentences by their marks, except after an abbreviation or within a number."""
    number, start = 0, 0
    for end in _SENTENCE_END.finditer(text):
        sentence = text[start : end.end()]
        if (
            end[0].startswith(".")
            and _ABBREVIATED.search(sentence.rstrip("\"'”’)]*_ "))
            and end.end() < len(text.rstrip())
        ):
            continue
        number += any(letter.isalnum() for letter in sentence)
        start = end.end()
    return number + any(letter.isalnum() for letter in text[start:])


def _pieces(text: str, mark: str) -> list[str] | None:
    """Return the texts between marks, of which the first and last may be empty; None if another is."""
    pieces = [piece.strip() for piece in re.split(mark, text)]
    inner = pieces[1:-1]
    return [piece for piece in pieces if piece] if all(inner) else None


def _paragraphs(text: str, num_paragraphs: float) -> bool:
    pieces = _pieces(text, r"\*\*\*")
    return pieces is not None and len(pieces) == num_paragraphs


def _two_responses(text: str) -> bool:
    pieces = _pieces(text, r"\*{6}")
    return pieces is not None and len(pieces) == 2 and pieces[0] != pieces[1]


def _first_word(text: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    number = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if number != num_paragraphs or not 1 <= nth_paragraph <= number:
        return False
    words = paragraphs[int(nth_paragraph) - 1].split()
    letters = re.match(r"[^.,?!'\"]*", words[0].lstrip("'\"")) if words else None
    return letters is not None and letters[0].lower() == first_word.lower()


def _bullets(text: str, num_bullets: float) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*\n]|-).*$", text, re.MULTILINE)) == num_bullets


def _highlights(text: str, num_highlights: float) -> bool:
    bold = re.findall(r"\*\*([^\n*]*)\*\*", text)
    slanted = re.findall(r"\*([^\n*]*)\*", text)
    return sum(bool(piece.strip()) for piece in (*bold, *slanted)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: float) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _postscript(text: str, postscript_marker: str) -> bool:
    marks = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(marks.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def _is_json(text: str) -> bool:
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _letters(text: str, letter: str, let_frequency: float, let_relation: str) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def _capitals(text: str, capital_frequency: float, capital_relation: str) -> bool:
    return _holds(sum(map(str.isupper, text.split())), capital_relation, capital_frequency)


def _ends(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


CHECKS: Mapping[str, tuple[Callable[..., bool], Mapping[str, Any]]] = {
    "keywords:existence": (lambda text, keywords: all(_times(word, text) for word in keywords), {"keywords": list}),
    "keywords:frequency": (
        lambda text, keyword, frequency, relation: _holds(_times(keyword, text), relation, frequency),
        {"keyword": str, "frequency": int, "relation": RELATIONS},
    ),
    "keywords:forbidden_words": (
        lambda text, forbidden_words: not any(_has_word(word, text) for word in forbidden_words),
        {"forbidden_words": list},
    ),
    "keywords:letter_frequency": (_letters, {"letter": str, "let_frequency": int, "let_relation": RELATIONS}),
    "length_constraints:number_sentences": (
        lambda text, num_sentences, relation: _holds(_num_sentences(text), relation, num_sentences),
        {"num_sentences": int, "relation": RELATIONS},
    ),
    "length_constraints:number_paragraphs": (_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": (
        lambda text, num_words, relation: _holds(len(re.findall(r"\w+", text)), relation, num_words),
        {"num_words": int, "relation": RELATIONS},
    ),
    "length_constraints:nth_paragraph_first_word": (
        _first_word,
        {"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    ),
    "detectable_content:number_placeholders": (
        lambda text, num_placeholders: len(re.findall(r"\[.*?\]", text)) >= num_placeholders,
        {"num_placeholders": int},
    ),
    "detectable_content:postscript": (_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": (_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": (lambda text: any(one in text for one in VERDICTS), {}),
    "detectable_format:number_highlighted_sections": (_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": (_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": (_is_json, {}),
    "detectable_format:title": (lambda text: any(title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", text)), {}),
    "combination:two_responses": (_two_responses, {}),
    "combination:repeat_prompt": (
        lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
        {"prompt_to_repeat": str},
    ),
    "startend:end_checker": (_ends, {"end_phrase": str}),
    "startend:quotation": (lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None, {}),
    "change_case:capital_word_frequency": (_capitals, {"capital_frequency": int, "capital_relation": RELATIONS}),
    "change_case:english_capital": (lambda text: text.isupper(), {}),
    "change_case:english_lowercase": (lambda text: text.islower(), {}),
    "punctuation:no_comma": (lambda text: "," not in text, {}),
}
"""For each kind of instruction, its check of a text, and its parameters with their types."""
UNCHECKED = ("language:response_language",)
