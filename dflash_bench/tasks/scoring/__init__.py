"""Whether an answer is right: `SCORERS` maps a suite's scorer name to a function of prompt and text (and cage).

Numbers and formulas are compared by value, code by running its tests in the sandbox. What a model may write
around its answer (prose, fences, units, several boxes) is dealt with here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from dflash_bench.errors import UserError, unknown
from dflash_bench.records import CODE_SCORERS, Prompt
from dflash_bench.tasks.sandbox import Cage
from dflash_bench.tasks.scoring import code, formulas, numbers
from dflash_bench.tasks.scoring.answers import Score, reference, require_module

Scorer = Callable[[Prompt, str], Score]


def require(names: Collection[str]) -> None:
    """Raises UserError if one of these scorers cannot work here: better before the first answer than after it."""
    for name in names:
        if name not in SCORERS:
            raise unknown("scorer", name, list(SCORERS))
    if "math" in names:
        require_module("math_verify")


def check_references(name: str, prompts: Iterable[Prompt]) -> None:
    """Raises UserError for a prompt without what its answers are held against, or with what none could equal."""
    for prompt in prompts:
        if name in NUMBER_SCORERS:
            numbers.right_number(prompt)
        elif name in _TEXT_SCORERS:
            reference(prompt)
        for column, kind in COLUMNS.get(name, {}).items():
            if not isinstance(prompt.row.get(column), kind):
                where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
                raise UserError(f"{where} has no {column} (a {kind.__name__}), which the scorer {name} runs")


def score(name: str, prompt: Prompt, text: str, cage: Cage | None = None) -> Score:
    """Code is run in `cage`; without one it is not run, and stays unscored."""
    if name not in SCORERS:
        raise unknown("scorer", name, list(SCORERS))
    return SCORERS[name](prompt, text, cage) if name in CODE_SCORERS else SCORERS[name](prompt, text)


def _score_nothing(_prompt: Prompt, _text: str) -> Score:
    return Score(None, None)


_TEXT_SCORERS: dict[str, Scorer] = {
    "aime_integer": numbers.number,
    "gsm8k_number": numbers.number,
    "math": formulas.math,
}
SCORERS: dict[str, Callable[..., Score]] = {
    **_TEXT_SCORERS,
    "humaneval": code.humaneval,
    "mbpp": code.mbpp,
    "none": _score_nothing,
}
COLUMNS: dict[str, dict[str, type]] = {
    "humaneval": {"prompt": str, "entry_point": str, "test": str},
    "mbpp": {"test_list": list, "test_imports": list},
}
"""What they read of a prompt's row."""
METRIC = str(Path(__file__).parent / "metric.py")
"""For `evaluate.load`, with the name of a scorer of text."""
NUMBER_SCORERS = frozenset(("aime_integer", "gsm8k_number"))
"""They compare by value."""


def require_text_scorer(name: str) -> None:
    """Raises UserError for a scorer that needs more than an answer and a reference."""
    if name not in _TEXT_SCORERS:
        raise unknown("metric", name, list(_TEXT_SCORERS))
