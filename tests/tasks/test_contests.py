"""LiveCodeBench: programs that read and print, functions that return, and test cases as they are packed; all ours."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks import scorers
from dflash_bench.tasks.sandbox import UNSAFE, strongest
from dflash_bench.tasks.scorers import contests
from helpers.each import each

CAGE = strongest() or UNSAFE


def packed(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


def problem(*cases: dict[str, str], public: str = "[]", about: str = "{}") -> Prompt:
    row = {"public_test_cases": public, "private_test_cases": packed(json.dumps(cases)), "metadata": about}
    return Prompt("livecodebench", "abc1_a", ("Solve.",), row=row)


SUM = problem(case("10 20\n", "30 "), public=json.dumps([case("2 3\n", "5\n")]))
READING = {
    "input": ("a, b = map(int, input().split())\nprint(a + b)", True),
    "bytes, in a function": (
        "import sys\ndef main():\n    numbers = sys.stdin.buffer.read().split()\n"
        "    sys.stdout.write(str(sum(map(int, numbers))))\nif __name__ == '__main__':\n    main()",
        True,
    ),
    "a file of number 0, and exit": ("print(float(sum(map(int, open(0).read().split()))))\nexit()", True),
    "a thread": (
        "import threading\ndef solve():\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=solve).start()",
        True,
    ),
    "names that contests import": ("print(reduce(lambda a, b: a + b, map(int, input().split())))", True),
    "by heart": ("print(5)", False),
    "more lines": ("print(sum(map(int, input().split())))\nprint()\nprint(1)", False),
    "endless lines": ("print('5\\n' * 10**7)", False),
    "an error": ("raise ValueError", False),
    "no code": ("five", False),
    "text in the tests' place": ("import sys\nsys.modules['solution'].said = lambda at: 5", False),
}


BARE = {
    "alone": "print(sum(map(int, input().split())))",
    "prose around": "It adds up:\n\na, b = map(int, input().split())\nprint(a + b)\n\n这样就可以了。",
    "cut": "for line in open(0):\n    print(sum(map(int, line.split())))\n\nprint('done",
}


@pytest.mark.parametrize("what", BARE)
def test_a_program_without_fences_is_found(what: str) -> None:
    assert scorers.score("livecodebench", SUM, BARE[what], CAGE).passed


@each("what", READING)
def test_a_program_is_held_to_what_it_prints(what: str) -> None:
    code, passed = READING[what]
    score = scorers.score("livecodebench", SUM, f"So:\n```python\n{code}\n```\n", CAGE)
    assert score.passed is passed, score.answer
    assert score.answer is not None and score.answer.startswith(code)


SCALE = problem(case("[1, 2]\n2", "[2, 4]", "functional"), about=json.dumps({"func_name": "scale"}))


@each(
    ("code", "passed"),
    [
        ("class Solution:\n    def scale(self, a: List[int], k: int):\n        return tuple(x * k for x in a)", True),
        ("def scale(a, k):\n    return [x * k for x in a]", True),
        ("class Solution:\n    def scale(self, a, k):\n        return a", False),
        ("def scale(a, k):\n    return {2, 4}", False),
        ("def stretch(a, k):\n    return [2, 4]", False),
    ],
)
def test_a_function_is_held_to_what_it_returns(code: str, passed: bool) -> None:
    assert scorers.score("livecodebench", SCALE, f"```python\n{code}\n```", CAGE).passed is passed


BUSY = "import time\nend = time.time() + 60\nwhile time.time() < end:\n    "
LATE = {
    "busy": f"{BUSY}pass",
    "swallowed": f"{BUSY}try:\n        for i in range(10**6): pass\n    except Exception: pass",
    "swallowed by everything": f"{BUSY}try:\n        for i in range(10**6): pass\n    except BaseException: pass",
    "asleep, signals ignored": "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(60)",
    "its own timer": f"import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\n{BUSY}signal.alarm(0)",
    "in a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "when asked for its result": (
        "import sys, time\nsys._getframe(1).f_globals['said'] = lambda at: time.sleep(60) or '5'"
    ),
}


@each("what", LATE)
def test_a_test_case_has_its_time(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "CASE_S", 0.2)
    score = scorers.score("livecodebench", SUM, f"```python\n{LATE[what]}\nprint(5)\n```", CAGE)
    assert score.passed is False and "took more than 0.2 s" in str(score.answer)


def test_large_test_cases_pass_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "MOST_AT_ONCE", 1 << 20)
    large = "é " * 300_000
    echo = "```python\nprint(input())\n```"
    assert scorers.score("livecodebench", problem(case(large, large), case(large, large)), echo, CAGE).passed
    assert not scorers.score("livecodebench", problem(case(large, large), case(large, f"{large}é")), echo, CAGE).passed


def test_without_a_cage_or_beyond_its_memory_nothing_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scorers.score("livecodebench", SUM, "```python\nprint(5)\n```").passed is None
    monkeypatch.setattr(contests, "MOST_IN_CASE", 4)
    assert scorers.score("livecodebench", SUM, "```python\nprint(5)\n```", CAGE).passed is None
    assert list(scorers.unscored("livecodebench", [SUM])) == ["abc1_a"]


# Packed test cases


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_packed_test_cases_are_read_whatever_the_protocol(protocol: int) -> None:
    cases = [case("é 1", "2")]
    row = {"public_test_cases": "", "private_test_cases": packed(json.dumps(cases), protocol), "metadata": "{}"}
    (found,) = contests.contest_of(Prompt("s", "1", (), row=row)).cases
    assert (found.given, found.expected) == ("é 1", "2")
    row["private_test_cases"] = json.dumps(cases)
    assert len(contests.contest_of(Prompt("s", "1", (), row=row)).cases) == 1


class Evil:
    def __reduce__(self) -> Any:
        return open, ("evil", "w")


PACKED: dict[str, tuple[str, str]] = {
    "a class": (packed(Evil()), "this pickle holds something else than a text"),
    "a class beside a text": (packed(["[]", Evil()]), "this pickle holds something else than a text"),
    "a list": (packed(["a"]), "something else than a text"),
    "a number": (packed(5), "something else than a text"),
    "no base64": ("!!", "(Only base64 data is allowed)"),
    "nothing compressed": (base64.b64encode(b"abc").decode(), "incorrect header check"),
    "more than there is": (base64.b64encode(zlib.compress(b"\x80\x04X\xff\xff\xff\x7fa")).decode(), "remain"),
    "no end": (base64.b64encode(zlib.compress(b"\x80\x04")[:-3]).decode(), "is cut short, or has more than 256 MiB"),
    "no JSON": (packed("[{"), "not valid JSON"),
    "no list of cases": (packed("{}"), "must be a list of {input, output, testtype}, all texts"),
    "numbers": (packed('[{"input": 1, "output": "", "testtype": "stdin"}]'), "must be a list of {input, output"),
    "no case": (packed("[]"), "has no test cases, in public_test_cases or private_test_cases"),
    "another kind": (packed(json.dumps([case("", "", "file")])), "must be stdin or functional, for all the same"),
    "no function": (packed(json.dumps([case("", "", "functional")])), "metadata has no func_name"),
}


@each("what", PACKED)
def test_test_cases_that_are_none_are_one_line_and_nothing_is_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, told = PACKED[what]
    row = {"public_test_cases": "", "private_test_cases": text, "metadata": "{}"}
    with pytest.raises(UserError) as caught:
        scorers.check_references("livecodebench", [Prompt("s", "1", (), row=row)])
    assert told in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 300
    assert not list(tmp_path.iterdir())


def test_a_small_unpacked_size_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="0 MiB"):
        contests.contest_of(problem(case("1" * 2000, "2")))
