"""Controllers, which choose how many draft tokens to verify per round: ours, a moving average, fixed, a cut, or a file.

A file holds a class `Controller` with three methods, called for one answer at a time:

    start(self, most): begin an answer whose rounds can draft up to `most` tokens
    choose(self, scores): return how many tokens to verify, from 0 to `most`; `scores` are the draft's probabilities
        of this round's tokens, or None where the run holds none
    learn(self, verified, accepted): take the round's outcome
"""

from __future__ import annotations

import json
import operator
import os
import runpy
import select
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.forwards import STEP, WIDTHS, best_width, expected_tokens

Scores = Sequence[float] | None
TOO_LONG_S = 5.0
"""Seconds that one call of a controller from a file may take."""
LONGEST_ANSWER = 1024
"""Bytes of a line that its process may send."""


class Controller(Protocol):
    needs_scores: bool

    def start(self, most: int) -> None: ...

    def choose(self, scores: Scores) -> int: ...

    def learn(self, verified: int, accepted: int) -> None: ...


class Fixed:
    """Verify a fixed number of tokens."""

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
    """Verify up to the first token below a threshold, as `dflash:cut=` does."""

    needs_scores = True

    def __init__(self, threshold: float) -> None:
        self.threshold = np.float32(threshold)

    def choose(self, scores: Scores) -> int:
        assert scores is not None
        below = np.flatnonzero(np.asarray(scores, dtype=np.float32) < self.threshold)
        return int(below[0]) if len(below) else self.most


class MovingAverage(Fixed):
    """Verify one more than the moving average of accepted tokens; a fully accepted draft counts as one token longer."""

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
    """Our controller: the width with most expected tokens per second (`engine/adaptive.py`), at the run's own costs."""

    needs_scores = True

    def __init__(self) -> None:
        self.seconds: Callable[[int], float] = float
        """Seconds of a round by the number of tokens it verifies; set by the replay."""
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
    """Return a controller by name or from a file. Raises UserError, also for any exception of the file's code."""
    if text == "ours":
        return ExpectedSpeed()
    if text == "average":
        return MovingAverage()
    name, _, number = text.partition(":")
    if name == "fixed" and number.isascii() and number.isdigit() and len(number) < 4:
        return Fixed(int(number))
    if not text.endswith(".py"):
        raise unknown("controller", text, [*NAMES, "FILE.py"])
    if not Path(text).is_file():
        raise UserError(f"--controller: there is no file {text}")
    return ForeignController(Path(text))


class ForeignController:
    """A user's controller in a separate process, so that any misbehaviour becomes a UserError.

    It may raise, exit, return an invalid length, write into the pipe of its answers, or exceed the time of a call where
    no signal and no other thread of this process could stop it.
    """

    needs_scores = False

    def __init__(self, path: Path) -> None:
        self.name, self.most = f"--controller {path}", 0
        command = [sys.executable, "-P", "-c", _START, str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        weakref.finalize(self, _end, self._process)
        self._held, self._num_calls = b"", 0
        self._read(START_S)
        if self._call("load", str(path), limit_s=START_S) is not True:
            raise UserError(f"{self.name}: it needs a class Controller with start(), choose() and learn()")

    def start(self, most: int) -> None:
        self.most = most
        self._call("start", most)

    def choose(self, scores: Scores) -> int:
        length = self._call("choose", scores)
        if type(length) is not int or not 0 <= length <= self.most:
            raise UserError(f"{self.name}: choose() returned {length}, and not a length from 0 to {self.most}")
        return length

    def learn(self, verified: int, accepted: int) -> None:
        self._call("learn", verified, accepted)

    def _call(self, method: str, *values: Any, limit_s: float | None = None) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is nothing to read either
            self._process.stdin.write(json.dumps([method, *values]).encode() + b"\n")
            self._process.stdin.flush()
        self._num_calls += 1
        match self._read(limit_s or TOO_LONG_S):
            case [self._num_calls, None, said]:
                return said
            case [self._num_calls, str(why), _]:
                raise UserError(f"{self.name}: it raised {why}")
        raise self._wrote()

    def _read(self, limit_s: float) -> Any:
        """Return the expected line. Raises UserError for anything else, or if none arrives within `limit_s`."""
        assert self._process.stdout is not None
        pipe, end_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._held:
            if not select.select([pipe], [], [], max(end_s - time.monotonic(), 0.0))[0]:
                raise UserError(f"{self.name}: it did not return within {limit_s:g} s")
            if not (part := os.read(pipe, LONGEST_ANSWER)):
                raise UserError(f"{self.name}: it ended its process")
            self._held += part
            if len(self._held) > LONGEST_ANSWER:
                raise self._wrote()
        line, _, self._held = self._held.partition(b"\n")
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            raise self._wrote() from None
        if self._held:
            raise self._wrote()
        return read

    def _wrote(self) -> UserError:
        return UserError(f"{self.name}: it wrote into the pipe of its answers")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:
        pass


_START = "import sys; sys.path.insert(0, sys.argv[1]); from dflash_bench.replay.controllers import serve; serve()"
START_S = 60.0
"""Seconds that the process may take to start on a busy machine."""


def serve() -> None:
    """Run the controller's process: an input line is a call, an output line its number, its error and its result."""
    # Keep the controller's own input and output out of the protocol.
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    print("[]", file=answers, flush=True)
    controller: Any = None
    answer: list[Any]
    for number, line in enumerate(calls, start=1):
        method, *values = json.loads(line)
        try:
            if method == "load":
                made = runpy.run_path(*values).get("Controller")
                controller = made() if isinstance(made, type) else None
                answer = [None, all(callable(getattr(controller, name, None)) for name in ("start", "choose", "learn"))]
            else:
                answer = [None, _plain(getattr(controller, method)(*values))]
        except BaseException as error:  # noqa: BLE001 (users' code may raise anything)
            answer = [" ".join(traceback.format_exception_only(error)[-1].split())[:160], None]
        # A line that the controller wrote itself has no number, or that of another call.
        print(json.dumps([number, *answer]), file=answers, flush=True)


def _plain(said: Any) -> int | str:
    """Return a valid length of any integer type as an int, and anything else as a short text for the error."""
    number = operator.index(said) if hasattr(type(said), "__index__") and not isinstance(said, bool) else -1
    return number if 0 <= number < 1000 else repr(said)[:40]
