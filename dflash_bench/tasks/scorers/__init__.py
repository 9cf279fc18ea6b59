"""Scorers of answers: `SCORERS` maps names to functions of prompt and text (and, for code, sandbox).

Numbers and formulas are compared by value, code by running its tests in the sandbox. Only this package handles the text
around an answer: prose, code fences, units, several boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from dflash_bench.core import plugins
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.plugins import Registry
from dflash_bench.core.thinking import answer_of
from dflash_bench.core.types import CODE_SCORERS, Prompt
from dflash_bench.tasks.sandbox import Isolation
from dflash_bench.tasks.scorers import (
    choices,
    code,
    contests,
    evaluated,
    formulas,
    needles,
    numbers,
    schema,
)
from dflash_bench.tasks.scorers.base import Score, reference, require_module

Scorer = Callable[[Prompt, str], Score]


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither a scorer nor a metric of evaluate."""
    if name not in SCORERS and not evaluated.is_evaluated(name):
        raise unknown("scorer", name, [*SCORERS, f"{evaluated.PREFIX}FOLDER"])


def require(names: Collection[str], is_trusted: bool = False) -> None:
    """Raise UserError if one of these scorers cannot work on this machine; called before the first answer.

    `is_trusted` allows metrics whose code is on the hub.
    """
    for name in names:
        check_name(name)
        if evaluated.is_evaluated(name):
            evaluated.metric(name, is_trusted)
    if schema.NAME in names:
        require_module("jsonschema")
    if "math" in names:
        require_module("math_verify")


def check_references(name: str, prompts: Iterable[Prompt]) -> None:
    """Raise UserError for a prompt without a reference, or whose reference no answer can equal."""
    for prompt in prompts:
        if name in NUMBER_SCORERS:
            for one in (prompt, *_otherwise_right(prompt)):
                numbers.right_number(one)
        elif name in (*_TEXT_SCORERS, "mrcr") or evaluated.is_evaluated(name):
            reference(prompt)
        for column, kind in COLUMNS.get(name, {}).items():
            if not isinstance(prompt.row.get(column), kind):
                where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
                raise UserError(f"{where} has no {column} (a {kind.__name__}), which the scorer {name} needs")
        if name in CHECKS:
            CHECKS[name](prompt)


def unscored(name: str, prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return the reasons why answers to prompts cannot be scored, by prompt id."""
    why = UNSCORED.get(name)
    return {prompt.prompt_id: text for prompt in prompts if (text := why(prompt))} if why else {}


def score(
    name: str, prompt: Prompt, text: str, isolation: Isolation | None = None, num_thinking: int | None = None
) -> Score:
    """Score an answer by its prompt's reference and alternatives; a match with any of them is correct.

    The first `num_thinking` characters of the text are not part of it; None: those up to the end of marked thinking.
    Code runs in `isolation`; without it, code is not run and stays unscored.
    """
    check_name(name)
    text = answer_of(text, num_thinking)
    if evaluated.is_evaluated(name):
        return evaluated.metric(name, True).score(prompt, text)
    if name in CODE_SCORERS:
        return SCORERS[name](prompt, text, isolation)
    found = SCORERS[name](prompt, text)
    others = _otherwise_right(prompt) if found.passed is False else ()
    return next((again for other in others if (again := SCORERS[name](other, text)).passed), found)


def _otherwise_right(prompt: Prompt) -> Iterator[Prompt]:
    """Return the prompt with each of its alternatives as its reference."""
    return (replace(prompt, reference=right, alternatives=()) for right in prompt.alternatives)


def _score_nothing(_prompt: Prompt, _text: str) -> Score:
    return Score(None, None)


_TEXT_SCORERS: dict[str, Scorer] = {
    "aime_integer": numbers.number,
    "choice": choices.choice,
    "gsm8k_number": numbers.number,
    "math": formulas.math,
}


def _of_plugin(name: str, found: object) -> Scorer:
    """Return a plug-in's scorer. Raises TypeError if it is not a function."""
    if not callable(found):
        raise TypeError("it must be a function of a prompt and a text, which returns a Score")
    return found


SCORERS: Registry[Callable[..., Score]] = Registry(
    plugins.SCORERS,
    {
        **_TEXT_SCORERS,
        "humaneval": code.humaneval,
        "livecodebench": contests.livecodebench,
        "mbpp": code.mbpp,
        "mrcr": needles.mrcr,
        schema.NAME: schema.json_schema,
        "none": _score_nothing,
    },
    _of_plugin,
)
COLUMNS: dict[str, dict[str, type]] = {
    "humaneval": {"prompt": str, "entry_point": str, "test": str},
    "livecodebench": dict.fromkeys((contests.PUBLIC, contests.PRIVATE, contests.ABOUT), str),
    "mbpp": {"test_list": list, "test_imports": list},
    "mrcr": {needles.PREFIX: str},
    schema.NAME: {schema.NAME: dict},
}
"""Columns of a prompt's row that scorers need."""
CHECKS: Mapping[str, Callable[[Prompt], object]] = {
    "choice": choices.right_letter, "livecodebench": contests.contest_of,
}  # fmt: skip
"""Functions that raise UserError if a scorer cannot use a prompt's columns or reference."""
UNSCORED: Mapping[str, Callable[[Prompt], str]] = {"livecodebench": contests.unscored}
"""Functions that return why the answers to a prompt cannot be scored; empty if they can."""
METRIC = str(Path(__file__).parent / "evaluate_metric.py")
"""The path for `evaluate.load`, along with the name of a text scorer."""
NUMBER_SCORERS = frozenset(("aime_integer", "gsm8k_number"))
"""Scorers whose reference must hold a number."""


def require_text_scorer(name: str) -> None:
    """Raise UserError unless this scorer needs only an answer and a reference."""
    if name not in _TEXT_SCORERS:
        raise unknown("metric", name, list(_TEXT_SCORERS))


def origin(name: str) -> Mapping[str, str]:
    """Return what determines the scores of a metric of evaluate; empty for scorers of this package."""
    return evaluated.metric(name, True).origin if evaluated.is_evaluated(name) else {}
