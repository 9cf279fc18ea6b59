"""Scorers of answers: `SCORERS` maps names to a `Scorer`, one file each.

Numbers and formulas are compared by value, code by running its tests in the sandbox. Only this package handles the text
around an answer: prose, code fences, units, several boxes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_bench.core import plugins
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.plugins import Registry
from dflash_bench.core.thinking import answer_of
from dflash_bench.core.types import CODE_SCORERS, Prompt
from dflash_bench.tasks.sandbox import Isolation
from dflash_bench.tasks.scorers.base import (
    EVALUATED,
    Score,
    Scorer,
    is_evaluated,
    otherwise_right,
    reference,
    require_module,
)

if TYPE_CHECKING:
    from dflash_bench.tasks.scorers.evaluated import EvaluatedMetric

TEXT_SCORERS = {
    "aime_integer": "numbers:SCORER",
    "choice": "choices:SCORER",
    "gsm8k_number": "numbers:SCORER",
    "math": "formulas:SCORER",
}
"""Scorers that need only an answer and a reference."""
OTHERS = {
    "humaneval": "code:HUMANEVAL",
    "livecodebench": "contests:SCORER",
    "mbpp": "code:MBPP",
    "mrcr": "needles:SCORER",
    "json_schema": "schema:SCORER",
}
METRIC = str(Path(__file__).parent / "evaluate_metric.py")
"""The path for `evaluate.load`, along with the name of a text scorer."""


def _scorer(_: str, found: object) -> Scorer:
    """Return a scorer; those of plug-ins are functions. Raises TypeError for anything else."""
    if isinstance(found, Scorer):
        return found
    if not callable(found):
        raise TypeError("it must be a function of a prompt and a text, which returns a Score")
    return Scorer(found)


SCORERS: Registry[Scorer] = Registry(
    plugins.SCORERS,
    {
        **{name: EntryPoint(name, f"{__name__}.{at}", plugins.SCORERS) for name, at in (TEXT_SCORERS | OTHERS).items()},
        "none": Scorer(lambda _prompt, _text: Score(None, None)),
    },
    _scorer,
)


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither a scorer nor a metric of evaluate."""
    if name not in SCORERS and not is_evaluated(name):
        raise unknown("scorer", name, [*SCORERS, f"{EVALUATED}FOLDER"])


def require(names: Collection[str], is_trusted: bool = False) -> None:
    """Raise UserError if one of these scorers cannot work on this machine; called before the first answer.

    `is_trusted` allows metrics whose code is on the hub.
    """
    for name in names:
        check_name(name)
        if is_evaluated(name):
            _metric(name, is_trusted)
        elif (module := SCORERS[name].module) is not None:
            require_module(module)


def columns(name: str) -> Mapping[str, type]:
    """Return the columns of a prompt's row that a scorer reads besides the reference."""
    return SCORERS[name].columns if name in SCORERS else {}


def check_references(name: str, prompts: Iterable[Prompt]) -> None:
    """Raise UserError for a prompt without a reference, or whose reference no answer can equal."""
    check = reference if is_evaluated(name) else SCORERS[name].check
    for prompt in prompts:
        for column, kind in columns(name).items():
            if not isinstance(prompt.row.get(column), kind):
                where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
                raise UserError(f"{where} has no {column} (a {kind.__name__}), which the scorer {name} needs")
        if check is not None:
            check(prompt)


def unscored(name: str, prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return the reasons why answers to prompts cannot be scored, by prompt id."""
    why = None if is_evaluated(name) else SCORERS[name].unscored
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
    if is_evaluated(name):
        return _metric(name, True).score(prompt, text)
    scored = SCORERS[name].score
    if name in CODE_SCORERS:
        return scored(prompt, text, isolation)
    found = scored(prompt, text)
    others = otherwise_right(prompt) if found.passed is False else ()
    return next((again for other in others if (again := scored(other, text)).passed), found)


def require_text_scorer(name: str) -> None:
    """Raise UserError unless this scorer needs only an answer and a reference."""
    if name not in TEXT_SCORERS:
        raise unknown("metric", name, list(TEXT_SCORERS))


def origin(name: str) -> Mapping[str, str]:
    """Return what determines the scores of a metric of evaluate; empty for scorers of this package."""
    return _metric(name, True).origin if is_evaluated(name) else {}


def _metric(name: str, is_trusted: bool) -> EvaluatedMetric:
    from dflash_bench.tasks.scorers import evaluated

    return evaluated.metric(name, is_trusted)
