"""Controllers: how many drafted tokens to verify in each round. Ours, a moving average, a fixed number and a cut, and
anybody's own from a file.

A file holds a class `Controller` with three methods, which see one answer at a time:

    start(self, most): a new answer begins, in which rounds can draft up to `most` tokens
    choose(self, scores): return how many tokens to verify, from 0 to `most`; `scores` are the draft's probabilities
        of this round's tokens, or None where the run holds none
    learn(self, verified, accepted): what became of them
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.pace import STEP, WIDTHS, best_width, expected_tokens

Scores = Sequence[float] | None
TOO_LONG_S = 5.0
"""Seconds that one call of a controller may take."""


class Controller(Protocol):
    needs_scores: bool

    def start(self, most: int) -> None: ...

    def choose(self, scores: Scores) -> int: ...

    def learn(self, verified: int, accepted: int) -> None: ...


class Fixed:
    """Always the same number."""

    needs_scores = False

    def __init__(self, number: int) -> None:
        self.number = number

    def start(self, most: int) -> None:
        self.most = most

    def choose(self, scores: Scores) -> int:
        return min(self.number, self.most)

    def learn(self, verified: int, accepted: int) -> None:
        pass


class Cut(Fixed):
    """Up to the first token below a threshold, as `dflash:cut=` does."""

    needs_scores = True

    def __init__(self, threshold: float) -> None:
        self.threshold = np.float32(threshold)

    def choose(self, scores: Scores) -> int:
        assert scores is not None
        below = np.flatnonzero(np.asarray(scores, dtype=np.float32) < self.threshold)
        return int(below[0]) if len(below) else self.most


class MovingAverage(Fixed):
    """One more than the moving average of what was accepted; a draft accepted whole counts as one token longer."""

    SHARE = 0.2

    def __init__(self) -> None:
        self.average = 0.0

    def start(self, most: int) -> None:
        self.most, self.average = most, float(most)

    def choose(self, scores: Scores) -> int:
        return max(1, min(self.most, round(self.average) + 1))

    def learn(self, verified: int, accepted: int) -> None:
        reached = accepted + (accepted == verified)
        self.average += self.SHARE * (reached - self.average)


class ExpectedSpeed(Fixed):
    """Ours: the width with the most expected tokens per second (`engine/adaptive.py`), at the run's own costs."""

    needs_scores = True

    def __init__(self) -> None:
        self.seconds: Callable[[int], float] = float
        """Of a round that verifies so many drafted tokens; whoever replays sets it."""
        self.calibration = 1.0

    def start(self, most: int) -> None:
        self.most = most
        self.widths = [0, *(width for width in WIDTHS if width < most), most]
        self.costs = np.array([self.seconds(width) for width in self.widths])

    def choose(self, scores: Scores) -> int:
        logs = np.log(np.maximum(np.asarray(scores, dtype=np.float64), 1e-30)).cumsum()[None]
        self.expected = expected_tokens(logs, self.widths, self.calibration)
        self.index = best_width(self.expected, self.costs)
        return self.widths[self.index]

    def learn(self, verified: int, accepted: int) -> None:
        corrected = self.calibration * (1 + STEP * (1 - (accepted + 1) / self.expected[self.index]))
        self.calibration = min(8.0, max(0.125, float(corrected)))


NAMES = ("ours", "average", "fixed:N")


def controller_of(text: str) -> Controller:
    """Return a controller by its name, or from a file. Raises UserError, also for whatever the file raises."""
    if text == "ours":
        return ExpectedSpeed()
    if text == "average":
        return MovingAverage()
    name, _, number = text.partition(":")
    if name == "fixed" and number.isascii() and number.isdigit() and len(number) < 4:
        return Fixed(int(number))
    if not text.endswith(".py"):
        raise unknown("controller", text, [*NAMES, "FILE.py"])
    return _loaded(Path(text))


def _loaded(path: Path) -> Controller:
    import runpy

    if not path.is_file():
        raise UserError(f"--controller: there is no file {path}")
    with _guarded(str(path)):
        made: Any = runpy.run_path(str(path)).get("Controller")
        found = made() if isinstance(made, type) else None
    if found is None or not all(callable(getattr(found, name, None)) for name in ("start", "choose", "learn")):
        raise UserError(f"--controller {path}: it needs a class Controller with start(), choose() and learn()")
    return Limited(found, str(path))


class Limited:
    """Calls a controller that may raise, loop, or return what is no length: each is a UserError that says so."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name
        self.needs_scores, self.most = False, 0

    def start(self, most: int) -> None:
        self.most = most
        self._call("start", most)

    def choose(self, scores: Scores) -> int:
        length = self._call("choose", scores)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.most:
            raise UserError(
                f"--controller {self.name}: choose() returned {str(length)[:40]!r}, "
                f"and not a length from 0 to {self.most}"
            )
        return length

    def learn(self, verified: int, accepted: int) -> None:
        self._call("learn", verified, accepted)

    def _call(self, method: str, *values: Any) -> Any:
        with _guarded(self.name):
            return getattr(self.inner, method)(*values)


class _TooLongError(BaseException):
    """Not an Exception, so that a controller's own handlers let it pass."""


@contextmanager
def _guarded(name: str) -> Iterator[None]:
    """Turn whatever somebody's code raises, or its taking too long, into a UserError."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError(f"--controller {name}: only the main thread can stop a controller that loops; replay there")

    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TOO_LONG_S)
    try:
        yield
    except _TooLongError:
        raise UserError(f"--controller {name}: it did not return within {TOO_LONG_S:g} s") from None
    # The code is someone else's, and may fail in any way.
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UserError(f"--controller {name}: it raised {why}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
