"""Answers that are wrong and try to pass, in every sandbox; none may, and the reason says what became of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dflash_bench.core.types import Prompt
from dflash_bench.tasks import sandbox
from dflash_bench.tasks.sandbox import ProgramLimits, ProgramOutcome
from dflash_bench.tasks.scorers import score
from helpers.each import each
from helpers.sandboxes import ASKED_BY_US, BOXES, Box

LIMITS = ProgramLimits(cpu_s=3, wall_s=5.0)
ENDLESS = ProgramLimits(cpu_s=1, wall_s=0.5)
"""For cheats that take as much time as there is."""
TESTS = """
def check(candidate):
    assert candidate(2) == 4
    assert abs(candidate(0.25) - 0.5) < 1e-6
    assert candidate('ab') == 'abab'
    assert set(candidate([1, 2, 3])) == {1, 2, 3}
    for number, twice in (20, 40), (30, 60): assert candidate(number) == twice
    assert candidate(True) == 2
    assert True, 'as in some tests of HumanEval'

check(double)
"""
RIGHT = "def double(x):\n    return x * 2\n"
SEND = """
import os, struct
def value(x):
    if x is None or x is True: return struct.pack('<cI', b'T' if x else b'N', 0)
    if isinstance(x, str): return struct.pack('<cI', b's', len(x.encode())) + x.encode()
    if isinstance(x, int): return struct.pack('<cI', b'i', 8) + x.to_bytes(8, 'little', signed=True)
    return struct.pack('<cI', b't', len(x)) + b''.join(map(value, x))
def frame(x): return struct.pack('<I', len(value(x))) + value(x)
def everywhere(data):
    for fd in range(2, 4096):  # beyond all that a test run holds open
        try: os.write(fd, data)
        except OSError: pass
"""
WRONG = "def double(x):\n    return x\n"
CHEATS = dict(
    re.findall(
        r"^=== (.+)\n((?:(?!===).*\n)+)", (Path(__file__).parents[1] / "data" / "cheats.txt").read_text(), re.MULTILINE
    )
)
"""Programs by name."""
ONCE_PASSED = [*CHEATS][:6]


FARTHEST = [param for param in BOXES if param.values[0] in (*ASKED_BY_US[:1], *ASKED_BY_US[-1:])]
"""The cage with the most walls, and that with the fewest, in which a program is its keeper's own user."""
in_the_farthest = pytest.mark.parametrize("box", FARTHEST, indirect=True)


@pytest.mark.usefixtures("cold")
def test_a_right_answer_passes(box: Box) -> None:
    assert box.run(RIGHT, LIMITS, TESTS, ["double"]) == ProgramOutcome(True, "passed")
    assert box.fails(WRONG, LIMITS, TESTS, ["double"]) == "exit status 1: AssertionError"


@in_the_farthest
@each("cheat", CHEATS)
def test_no_cheat_passes(box: Box, cheat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if box in ASKED_BY_US[:1] and cheat in ONCE_PASSED:
        monkeypatch.setattr(sandbox, "subprocess", subprocess)  # They start as in a run.
    limits = ENDLESS if cheat in ("recursion without limit", "hashes that collide", "half an answer") else LIMITS
    assert box.fails(SEND + CHEATS[cheat], limits, TESTS, ["double"])


@each(
    ("returned", "said"),
    [
        ("object()", "a object"),
        ("lambda: 1", "a function"),
        ("type('A\\x1b[31m\\nB', (), {})()", "a A31mB"),
        ("[[object()]]", "a object"),
        ("__import__('unittest.mock').mock.ANY", "a _ANY"),
        ("memoryview(b'')", "a memoryview"),
        ("'x' * 2**20", "more than 1048576 bytes"),
        ("(x := [], x.append(x))", "values nested deeper than 64"),
    ],
)
def test_what_is_no_plain_value_is_refused_by_name(box: Box, returned: str, said: str) -> None:
    outcome = box.run(f"def f(): return {returned}", LIMITS, "assert f()", ["f"])
    expected = f"f() returned {said}" + (", which is not a plain value" if said.startswith("a ") else "")
    assert outcome == ProgramOutcome(False, expected, by_value=False)


@in_the_farthest
@each(
    ("program", "tests", "reason"),
    [
        ("def f(): raise ValueError('no')", "f()", "exit status 1: ValueError: no"),
        ("class Odd(ValueError): pass\ndef f(): raise Odd('no')", "f()", "exit status 1: RuntimeError: Odd: no"),
        ("def f(): b'\\xff'.decode()", "f()", r"exit status 1: RuntimeError: UnicodeDecodeError: .*invalid start byte"),
        ("x = 1", "f()", "exit status 1: NameError: name 'f' is not defined"),
        ("def f(): 1 / 0", "f()", "exit status 1: ZeroDivisionError: division by zero"),
        ("def f(x): pass", "f()", r"exit status 1: TypeError: f\(\) missing 1 required positional argument: 'x'"),
        ("def f(): raise StopIteration", "assert [*map(lambda _: f(), [1])] == []", ".*Error: StopIteration: ?"),
        ("raise SystemExit", "f()", "did not finish"),
        ("import os\ndef f(): os._exit(3)", "f()", "exit status 3: ?"),
        ("import os\ndef f(): os.abort()", "try: f()\nexcept: pass", "killed by SIG(ABRT|SEGV)"),
        ("def f(): raise SystemExit", "try: f()\nexcept BaseException: pass", "did not finish"),
        ("import time\ndef f(): time.sleep(100)", "try: f()\nfinally: pass", "timed out"),
        ("def f(): pass", "while True: pass", "timed out"),
        ("def f(): pass", "this is no code", "did not start: SyntaxError: invalid syntax"),
        ("def f(:", "f()", "did not start: SyntaxError: .*"),
    ],
)
def test_why_it_did_not_pass(box: Box, program: str, tests: str, reason: str) -> None:
    said = box.fails(program, ENDLESS, tests, ["f"])
    assert re.fullmatch(reason, said), said


def test_a_forged_reason_is_one_line_that_can_be_shown(box: Box) -> None:
    forged = r"def f(): everywhere(frame(('refused', 'it\n\u2028is \x1b[31mred'))); return 1"
    outcome = box.run(SEND + forged, LIMITS, "f()", ["f"])
    assert outcome == ProgramOutcome(False, "it is ?[31mred", by_value=False)


def test_errors_that_tests_expect_arrive(box: Box) -> None:
    program = "def f(x):\n    if x < 0: raise ValueError(f'{x} is negative')\n    return x"
    tests = "try: f(-1)\nexcept ValueError as error: assert str(error) == '-1 is negative'\nelse: raise AssertionError"
    assert box.run(program, LIMITS, f"{tests}\nassert f(1) == 1", ["f"]).passed


@each("given", ["len", "object()", "[type]", "__import__('collections').Counter()"])
def test_tests_that_give_what_is_no_plain_value_say_so_and_nothing_is_scored(box: Box, given: str) -> None:
    outcome = box.run("def f(x): return 1", LIMITS, f"assert f({given}) == 1", ["f"])
    assert (outcome.passed, outcome.by_value) == (None, False)
    assert re.fullmatch(r"the tests give f\(\) a \w+, which is not a plain value", outcome.reason)


def test_arguments_are_copies_and_state_is_kept(box: Box) -> None:
    program = "seen = []\ndef f(x):\n    x.append(1)\n    seen.append(x)\n    return len(seen)"
    assert box.run(program, LIMITS, "x = []\nassert f(x) == 1 and f(x) == 2 and x == []", ["f"]).passed


SEARCH = """
import ctypes, gc, os, re
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
out, into = os.pipe()
def pages():
    end = libc.sbrk(ctypes.c_long(0)) & ~4095
    starts = {id(thing) >> 20 << 20 for thing in gc.get_objects()} | set(range(end - 2**24, end, 2**20))
    for start in starts: yield from range(start, start + 2**20, 4096)
def found():
    readable = (os.read(out, 4096) for page in pages() if libc.write(into, ctypes.c_void_p(page), 4096) == 4096)
    return sum(bool(re.search(b'q{40}', page)) for page in readable)
"""


def test_the_tests_are_nowhere_in_the_memory_of_the_answer(box: Box) -> None:
    """A pipe tells which addresses can be read; its own text a program finds."""
    word = f"# {'q' * 40}\n" * 9
    assert box.run(SEARCH + word, LIMITS, "assert found() > 0", ["found"]).passed
    assert box.run(SEARCH, LIMITS, word + "assert found() == 0", ["found"]).passed


@pytest.mark.parametrize(
    "cheat", ["def poly(xs, x): return 0\n\ndef root(xs): return 0.0", "def root(xs):\n    return float('nan')"]
)
def test_what_the_prompt_defines_is_not_the_answers_to_define(cheat: str) -> None:
    isolation = sandbox.strongest() or sandbox.UNSAFE
    row = {
        "prompt": "def poly(xs, x):\n    return sum(c * x**n for n, c in enumerate(xs))\n\n\ndef root(xs):\n"
        '    """A zero of poly."""\n',
        "entry_point": "root",
        "test": "def check(candidate):\n    xs = [-6.0, 2.0]\n    assert abs(poly(xs, candidate(xs))) < 1e-6\n",
    }
    right = "def root(xs):\n    return -xs[0] / xs[1]"
    asked = Prompt("suite", "0", ("question",), row=row)
    assert score("humaneval", asked, f"```python\n{right}\n```", isolation).passed is True
    assert score("humaneval", asked, f"```python\n{cheat}\n```", isolation).passed is False


def test_a_set_of_the_answers_is_not_the_set_of_the_tests() -> None:
    isolation = sandbox.strongest() or sandbox.UNSAFE
    row = {"test_imports": [], "test_list": ["assert set(both([1], [1, 2])) == set([1])"]}
    asked = Prompt("suite", "0", ("question",), row=row)
    assert (
        score("mbpp", asked, "```python\ndef set(x): return 1\n\ndef both(a, b): return a + b\n```", isolation).passed
        is False
    )
    assert (
        score("mbpp", asked, "```python\ndef both(a, b): return (x for x in a if x in b)\n```", isolation).passed
        is True
    )


def test_a_refusal_stands_below_the_answer() -> None:
    isolation = sandbox.strongest() or sandbox.UNSAFE
    row = {"test_imports": [], "test_list": ["assert f() == 1"]}
    code = "from unittest.mock import ANY\ndef f(): return ANY\n"
    scored = score("mbpp", Prompt("suite", "0", ("question",), row=row), f"```python\n{code}```", isolation)
    assert scored.passed is False
    assert scored.answer == f"{code}\n# f() returned a _ANY, which is not a plain value"


def test_a_task_may_ask_for_a_function_with_the_name_of_a_built_in_one() -> None:
    isolation = sandbox.strongest() or sandbox.UNSAFE
    row = {"test_imports": [], "test_list": ["assert max(1, 2) == 3"], "code": "def max(a, b):\n    return 3"}
    asked = Prompt("suite", "0", ("question",), row=row)
    assert score("mbpp", asked, "```python\ndef max(a, b): return a + b\n```", isolation).passed is True
