"""Metrics of the evaluate library as scorers with graded results: `--score evaluate:FOLDER`.

Each answer is scored alone, and figures are means over answers, so corpus metrics such as BLEU differ from their value
over all answers at once. A metric is code: metrics from the hub need --trust-remote-code.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import EVALUATED, Score, reference, require_module

SEPARATOR = "#"
"""Separates the name of a figure, for metrics that compute several."""
HUB_FOLDER = "evaluate-metric"
"""The owner on the hub of metrics named without an owner."""
FAILURES = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError)
"""Exceptions that a metric's own code may raise; they are reported as errors of the user's metric."""


@dataclass(frozen=True, slots=True)
class EvaluatedMetric:
    """A loaded metric, by the name that a user types; `figure` is the figure to use, None if it has only one."""

    name: str
    figure: str | None
    module: Any
    takes_lists: bool
    """Whether it takes all alternatives of an answer; otherwise it gets one at a time, and the best result counts."""
    origin: Mapping[str, str]
    """Identifies its code: the hash, or the revision on the hub."""

    def score(self, prompt: Prompt, text: str) -> Score:
        """Score an answer. Raises UserError if the metric fails, returns no number, or several without a `figure`."""
        right = [reference(prompt), *prompt.alternatives]
        tries: Sequence[Any] = [right] if self.takes_lists else right
        return Score(None, None, max(self._value(text, one) for one in tries))

    def _value(self, text: str, right: Any) -> float:
        try:
            found = self.module.compute(predictions=[text], references=[right])
        except FAILURES as error:
            raise UserError(f"--score {self.name}: the metric failed: {type(error).__name__}: {error}") from error
        numbers = {key: float(value) for key, value in (found or {}).items() if _is_number(value)}
        if self.figure is None and len(numbers) != 1:
            several = " or ".join(f"{self.name}{SEPARATOR}{key}" for key in numbers) or "another metric"
            raise UserError(f"--score {self.name}: it computes {len(numbers)} figures of an answer; give {several}")
        if self.figure is not None and self.figure not in numbers:
            raise unknown(f"figure of {self.name}", self.figure, list(numbers))
        return numbers[self.figure or next(iter(numbers))]


def _is_number(value: Any) -> bool:
    # Figures are Python or NumPy numbers.
    return isinstance(value, int | float | _numpy_number()) and math.isfinite(value)


@cache
def _numpy_number() -> Any:
    import numpy as np

    return np.integer | np.floating


@cache
def metric(name: str, is_trusted: bool = False) -> EvaluatedMetric:
    """Load `evaluate:FOLDER`, `evaluate:FILE.py` or, if trusted, `evaluate:NAME` from the hub, each with `#FIGURE`.

    Raises UserError for a missing metric, for code that is not trusted, and for missing packages.
    """
    require_module("evaluate")
    import evaluate

    place, _, figure = name.removeprefix(EVALUATED).partition(SEPARATOR)
    code = _code(place)
    if code is None and not is_trusted:
        raise UserError(
            f"--score {name}: there is no metric {place}/{Path(place).name}.py here; a metric of the hub is code that "
            "runs on this machine, and needs --trust-remote-code"
        )
    revision = None if code is not None else _commit(name, place)
    try:
        module = evaluate.load(str(code or place), revision=revision)
    except ImportError as error:
        told = str(error).splitlines()[0]
        raise UserError(f"--score {name}: a package is missing: {told}") from error
    except FAILURES as error:
        raise UserError(f"--score {name}: cannot load it: {type(error).__name__}: {error}") from error
    features = module.features if isinstance(module.features, list) else [module.features]
    if not all({"predictions", "references"} <= set(one) for one in features):
        raise UserError(f"--score {name}: it must take predictions and references; it takes {', '.join(features[0])}")
    takes_lists = any(
        not hasattr(one["references"], "dtype") or isinstance(one["references"], list) for one in features
    )
    origin = {"revision": str(revision)} if code is None else {"sha256": _sha256(code)}
    return EvaluatedMetric(name, figure or None, module, takes_lists, origin)


def _code(place: str) -> Path | None:
    """Return the file of a local metric: the file itself, or NAME.py in the folder NAME."""
    path = Path(place)
    for one in (path, path / f"{path.absolute().name}.py"):
        if one.suffix == ".py" and os.path.isfile(one):
            return one
    return None


def _sha256(code: Path) -> str:
    files.require_file(code)
    return hashlib.sha256(code.read_bytes()).hexdigest()


def _commit(name: str, place: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return str(HfApi().space_info(place if "/" in place else f"{HUB_FOLDER}/{place}").sha)
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(f"--score {name}: the hub does not give it: {str(error).splitlines()[0]}") from error
