"""The result of a scorer, and helpers that several scorers share."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Score:
    """The part of a text that was taken as the answer, and whether it is right; `passed` is None if not scored."""

    answer: str | None
    passed: bool | None
    value: float | None = None
    """How good the answer is, by a metric that finds none right or wrong."""


def last_box(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{}, which may contain braces."""
    content = None
    for box in _BOX.finditer(text):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                content = text[box.end() : brace.start()].strip()
                break
    return content


def reference(prompt: Prompt) -> str:
    """Return a prompt's reference. Raises UserError if it has none."""
    if prompt.reference is None:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where} has no reference to compare with; add one, or omit --score")
    return prompt.reference


def require_module(module: str) -> None:
    """Raise UserError if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{module} is not installed; run: pip install {module.replace('_', '-')}")
