"""LiveCodeBench: programs that read input and print, or complete a class, run against public and private test cases.

Inputs and outputs are texts, which pass between the answer's process and the tests in chunks. Private test cases are
published as a pickle, of which only the contained text is read: nothing is unpickled.
"""

from __future__ import annotations

import base64
import pickletools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.sandbox import Isolation, ProgramLimits, run_tests
from dflash_bench.tasks.scorers.base import Score, Scorer
from dflash_bench.tasks.scorers.code import code_in

PUBLIC, PRIVATE, ABOUT = "public_test_cases", "private_test_cases", "metadata"
"""The columns: two lists of test cases, as JSON, and an object that may name the function to call."""
FUNCTION, STDIN, CALLED = "func_name", "stdin", "functional"
KEYS = ("input", "output", "testtype")
MOST_BYTES = 256 << 20
"""Largest unpacked size of one problem's private test cases."""
MOST_AT_ONCE = 8 << 20
"""Characters of test cases that run in one process; larger sets are divided."""
MOST_IN_CASE = 48 << 20
"""Characters of the largest test case that fits the sandbox's memory."""
FRAMING = frozenset(("PROTO", "FRAME", "MEMOIZE", "BINPUT", "PUT", "STOP"))
TEXTS = frozenset(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"))
PIECE = 1 << 17
CASE_S = 6.0
"""Seconds per test case, as in LiveCodeBench; enforced in the tests' process, which the answer cannot change."""
LIMITS = ProgramLimits(memory_bytes=1 << 30)
MOST_S = 120


@dataclass(frozen=True, slots=True)
class ContestCase:
    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class Contest:
    """The test cases of a problem; `function` is the function they call, None for a program that reads and prints."""

    cases: tuple[ContestCase, ...]
    function: str | None

    @property
    def is_too_large(self) -> bool:
        return any(len(case.given) + len(case.expected) > MOST_IN_CASE for case in self.cases)


def unscored(prompt: Prompt) -> str:
    """Return why a prompt's answers are not scored: a test case too large for a sandbox."""
    return f"a test case has more than {MOST_IN_CASE >> 20} MiB" if contest_of(prompt).is_too_large else ""


def contest_of(prompt: Prompt) -> Contest:
    """Return the test cases of a prompt. Raises UserError if the columns do not hold test cases."""
    where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
    cases = [*_cases(f"{where}: {PUBLIC}", prompt.row[PUBLIC]), *_cases(f"{where}: {PRIVATE}", prompt.row[PRIVATE])]
    if not cases:
        raise UserError(f"{where} has no test cases, in {PUBLIC} or {PRIVATE}")
    kinds = {case["testtype"] for case in cases}
    if kinds not in ({STDIN}, {CALLED}):
        raise UserError(f"{where}: the testtype of its test cases must be {STDIN} or {CALLED}, for all the same")
    about = files.parse_json(f"{where}: {ABOUT}", prompt.row[ABOUT] or "{}")
    function = about.get(FUNCTION) if kinds == {CALLED} and isinstance(about, dict) else None
    if kinds == {CALLED} and not (isinstance(function, str) and function.isidentifier()):
        raise UserError(f"{where}: {ABOUT} has no {FUNCTION}, the function that its test cases call")
    return Contest(tuple(ContestCase(case["input"], case["output"]) for case in cases), function)


def _cases(where: str, text: str) -> list[Mapping[str, str]]:
    if not text.strip():
        return []
    cases = files.parse_json(where, text if text.lstrip().startswith("[") else _unpacked(where, text))
    if not isinstance(cases, list) or not all(map(_is_case, cases)):
        raise UserError(f"{where} must be a list of {{{', '.join(KEYS)}}}, all texts")
    return cases


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and all(isinstance(case.get(key), str) for key in KEYS)


def _unpacked(where: str, text: str) -> str:
    """Return the one text in a base64, zlib-compressed pickle. Other pickles are rejected, and none is executed."""
    what = f"{where} is not a text as LiveCodeBench packs it: base64 of zlib of a pickle"
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        if not unpacking.eof:
            raise UserError(f"{where} is cut short, or has more than {MOST_BYTES >> 20} MiB")
        steps = [(step.name, value) for step, value, _ in pickletools.genops(data)]
    except (ValueError, zlib.error) as error:
        raise UserError(f"{what} ({error})") from error
    found = [value for name, value in steps if name in TEXTS]
    if len(found) != 1 or not {name for name, _ in steps} <= FRAMING | TEXTS:
        raise UserError(f"{what}; this pickle holds something else than a text")
    return str(found[0])


def livecodebench(prompt: Prompt, text: str, isolation: Isolation | None) -> Score:
    """Run all test cases, public ones first, until one fails; one too large for a sandbox leaves it unscored."""
    contest = contest_of(prompt)
    code = code_in(text, {"Solution", contest.function} if contest.function else set())
    if isolation is None or contest.is_too_large:
        return Score(code, None)
    program = _PROGRAM.format(code=code, function=contest.function, piece=PIECE)
    for cases in _divided(contest.cases):
        seconds = min(MOST_S, int(CASE_S * len(cases)) + 4)
        pairs = [(case.given, case.expected) for case in cases]
        tests = _TESTS.format(cases=pairs, piece=PIECE, seconds=CASE_S, is_json=contest.function is not None)
        limits = replace(LIMITS, cpu_s=seconds, wall_s=2.0 * seconds)
        outcome = run_tests(program, isolation, limits, tests, ["feed", "run", "said"])
        if not outcome.passed:
            return Score(f"{code.rstrip()}\n\n# {outcome.reason}", outcome.passed)
    return Score(code, True)


SCORER = Scorer(livecodebench, dict.fromkeys((PUBLIC, PRIVATE, ABOUT), str), contest_of, unscored)


def _divided(cases: Sequence[ContestCase]) -> Iterator[list[ContestCase]]:
    """Yield the cases in groups small enough for one process."""
    group: list[ContestCase] = []
    size = 0
    for case in cases:
        length = len(case.given) + len(case.expected)
        if group and size + length > MOST_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(case)
        size += length
    yield group


_PROGRAM = '''
import builtins, io, json, sys, threading

_COMMON = """
import array, bisect, collections, copy, datetime, fractions, functools, heapq, io, itertools, json, math, operator
import os, random, re, statistics, string, sys, time, typing
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
_code, _function, _parts = compile({code!r}, "<answer>", "exec"), {function!r}, []
_result = ""
_open = builtins.open


def feed(part):
    _parts.append(part)


def _call(names, given):
    owner = names.get("Solution")
    function = getattr(owner(), _function) if hasattr(owner, _function) else names[_function]
    return json.dumps(function(*map(json.loads, given.split("\\n"))))


def run():
    """Run the answer on what was fed, and keep what it prints or returns."""
    global _result
    given, bare = "".join(_parts), io.BytesIO()
    _parts.clear()
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    sys.stdout = out = io.TextIOWrapper(bare, "utf-8", write_through=True)
    builtins.open = lambda file, *more, **named: sys.stdin if file == 0 else _open(file, *more, **named)
    sys.setrecursionlimit(50_000)
    names = {{"__name__": "solution" if _function else "__main__", "exit": sys.exit, "quit": sys.exit}}
    exec(_COMMON, names)
    try:
        exec(_code, names)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        _result = _call(names, given.strip()) if _function else None
    except SystemExit:
        _result = None
    if _result is None:
        out.flush()
        _result = bare.getvalue().decode(errors="replace")


def said(at):
    return _result[at : at + {piece}]
'''
_TESTS = """
import json, signal
from decimal import Decimal, InvalidOperation


def _late(*_):
    assert False, "a test case took more than {seconds} s"


def _numbers(line):
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def _alike(line, right):
    return line == right or ((numbers := _numbers(line)) is not None and numbers == _numbers(right))


def _lines(text):
    return [line.strip() for line in text.strip().split("\\n")]


signal.signal(signal.SIGALRM, _late)
for given, expected in {cases!r}:
    for at in range(0, len(given), {piece}):
        feed(given[at : at + {piece}])
    signal.setitimer(signal.ITIMER_REAL, {seconds})
    run()
    signal.setitimer(signal.ITIMER_REAL, {seconds})  # for the result, which may be long
    text = ""
    while part := said(len(text)):
        text += part
        assert len(text) <= 2 * len(expected) + {piece}, "it prints more than is expected"
    signal.setitimer(signal.ITIMER_REAL, 0)
    if {is_json}:
        assert json.loads(text) == json.loads(expected), f"it returns {{text[:60]}}, and not {{expected[:60]}}"
    else:
        lines, right = _lines(text), _lines(expected)
        assert len(lines) == len(right), f"it prints {{len(lines)}} lines, and not {{len(right)}}"
        for line, other in zip(lines, right):
            assert _alike(line, other), f"it prints {{line[:60]}}, and not {{other[:60]}}"
"""
