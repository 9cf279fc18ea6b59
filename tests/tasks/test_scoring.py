"""Right and wrong answers in the shapes models give them, per scorer."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks import sandbox, scorers
from dflash_bench.tasks.sandbox import UNSAFE, ProgramLimits, strongest
from dflash_bench.tasks.scorers import check_references, code, formulas, score
from dflash_bench.tasks.scorers.base import Score
from helpers import forked_supervisors
from helpers.each import each


def prompt(reference: str | None = None, row: Mapping[str, Any] | None = None) -> Prompt:
    return Prompt("suite", "0", ("question",), reference=reference, row=row or {})


def passed(name: str, reference: str, text: str) -> bool | None:
    return score(name, prompt(reference), text).passed


needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


# ---- numbers and formulas ------------------------------------------------------------------------------


def test_the_number_taken_is_recorded() -> None:
    assert score("gsm8k_number", prompt("#### 8"), r"\boxed{\$1,007}") == Score("1007", False)
    assert score("gsm8k_number", prompt("#### 8"), "no idea") == Score(None, False)


@needs_math_verify
def test_a_formula_that_cannot_be_evaluated_in_time_fails_and_the_next_one_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(formulas, "_CPU_S", 1)
        assert passed("math", "1", r"\boxed{9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 1}") is False
    assert passed("math", "0.5", r"\boxed{\frac{1}{2}}") is True


def test_without_math_verify_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install math-verify"):
        score("math", prompt("5"), r"\boxed{5}")


# ---- code ------------------------------------------------------------------------------------------------

CAGE = strongest() or UNSAFE
"""The code below is ours."""

HUMANEVAL = prompt(
    row={
        "task_id": "Own/0",
        "prompt": (
            "import math\n\n\ndef half(x):\n    return x / 2\n\n\n"
            'def area(radius):\n    """The area of a circle.\n    >>> area(0)\n    0.0\n    """\n'
        ),
        "entry_point": "area",
        "canonical_solution": "    return math.pi * radius**2\n",
        "test": (
            "def check(candidate):\n    assert candidate(0) == 0\n"
            "    assert abs(candidate(2) - 4 * math.pi) < 1e-9\n    assert half(4) == 2\n"
        ),
    }
)
BODY = "    return math.pi * radius**2\n"
RIGHT = f"def area(radius):\n{BODY}"
WRONG = "def area(radius):\n    return radius\n"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "LIMITS", ProgramLimits(cpu_s=2, wall_s=4.0))


ANSWERS = {
    "fenced": (f"Here you are:\n```python\n{RIGHT}```\nIt works.", True),
    "fenced at the end of a line": (f"Here you are: ```python\n{RIGHT}```", True),
    "fenced, no language": (f"```\n{RIGHT}\n```", True),
    "fenced, cut off": (f"```python\n{RIGHT}", True),
    "fenced, within a list": (
        "1. Code:\n\n   ```py\n   def area(radius):\n       return math.pi * radius**2\n   ```",
        True,
    ),
    "with the stub": (f"```python\n{HUMANEVAL.row['prompt']}{BODY}```", True),
    "bare": (RIGHT, True),
    "bare, within prose": (f"Sure, here it is:\n\n{RIGHT}\nThis uses pi.", True),
    "continuation": (BODY, True),
    "continuation with more code": (f"{BODY}\n\nprint(area(1))\n", True),
    "continuation, not indented": ("return math.pi * radius**2", True),
    "continuation, fenced": ("```python\nsquare = radius * radius\nreturn math.pi * square\n```", True),
    "with a helper": (f"```python\ndef square(x):\n    return x * x\n\n{RIGHT}```", True),
    "with an example after": (f"```python\n{RIGHT}```\nUse it:\n```python\nprint(area(2))\n```", True),
    "with a shell block after": (f"```python\n{RIGHT}```\n```bash\npython area.py\n```", True),
    "corrected": (f"```python\n{WRONG}```\nNo:\n```python\n{RIGHT}```", True),
    "spoilt": (f"```python\n{RIGHT}```\nBetter:\n```python\n{WRONG}```", False),
    "with a main guard": (
        f"```python\n{RIGHT}\nif __name__ == '__main__':\n    print(area(float(input())))\n```",
        True,
    ),
    "with an import from the future": (f"```python\nfrom __future__ import annotations\n\n{RIGHT}```", True),
    "wrong": (f"```python\n{WRONG}```", False),
    "endless": ("```python\ndef area(radius):\n    while True: pass\n```", False),
    "leaving": ("```python\ndef area(radius):\n    raise SystemExit(0)\n```", False),
    "leaving at once": (f"```python\nimport os\n{WRONG}os._exit(0)\n```", False),
    "another function": ("```python\ndef volume(radius):\n    return 0\n```", False),
    "no code": ("I cannot help with that.", False),
    "nothing": ("", False),
}


@each(("text", "right"), ANSWERS.values())
def test_humaneval_answers_are_run_against_their_tests(text: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "subprocess", forked_supervisors.SUBPROCESS)
    assert score("humaneval", HUMANEVAL, text, CAGE).passed is right


def test_the_code_taken_is_recorded() -> None:
    assert score("humaneval", HUMANEVAL, f"So:\n```python\n{RIGHT}```", CAGE) == Score(RIGHT, True)


MBPP = prompt(
    row={
        "prompt": "Write a function to double a number.",
        "code": "def double(x):\n    return 2 * x",
        "test_imports": ["import math"],
        "test_list": ["assert double(2) == 4", "assert set([double(math.pi)]) == {2 * math.pi}"],
    }
)


@each(
    ("text", "right"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", True),
        ("def double(x):\n    return 2 * x", True),
        ("```python\ndef double(x):\n    return x + x\n```\n```python\nassert double(3) == 6\n```", True),
        ("```python\ndef double(x):\n    return 4\n```", False),
        ("```python\ndef twice(x):\n    return 2 * x\n```", False),
        ("It is easy.", False),
    ],
)
def test_mbpp_answers_are_run_against_their_tests(text: str, right: bool) -> None:
    assert score("mbpp", MBPP, text, CAGE).passed is right


@pytest.mark.parametrize(("name", "asked"), [("humaneval", HUMANEVAL), ("mbpp", MBPP)])
def test_without_a_cage_code_is_not_run(name: str, asked: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert score(name, asked, f"```python\n{RIGHT}```") == Score(RIGHT, None)


def test_a_supervisor_that_breaks_down_is_a_failed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dflash_bench.tasks.sandbox._SUPERVISOR", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    )
    assert score("humaneval", HUMANEVAL, f"```python\n{RIGHT}```", CAGE) == Score(RIGHT, False)


# ---- the table -------------------------------------------------------------------------------------------


def test_an_unscored_suite_has_neither_answer_nor_verdict() -> None:
    assert score("none", prompt(), "anything") == Score(None, None)


def test_an_unknown_scorer_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="'gsm9k'; known: aime_integer, choice, evaluate:FOLDER, gsm8k_number"):
        score("gsm9k", prompt(), "7")


def test_a_missing_reference_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(UserError, match=r"prompt 0 of suite suite .*reference"):
        score("gsm8k_number", prompt(), "7")


@pytest.mark.parametrize("name", ["gsm8k_number", "aime_integer"])
def test_a_reference_without_a_number_is_found_before_the_first_answer(name: str) -> None:
    check_references(name, [prompt(reference="#### 7")])
    with pytest.raises(UserError, match=r"prompt 0 of suite suite: .*'seven'"):
        check_references(name, [prompt(reference="7"), prompt(reference="seven")])
    check_references("none", [prompt()])


def test_a_scorer_without_what_it_reads_is_found_before_the_first_answer() -> None:
    with pytest.raises(UserError, match=r"prompt 0 of suite suite .*reference"):
        check_references("math", [prompt()])
    with pytest.raises(UserError, match=r"prompt 0 of suite suite .* test .*humaneval"):
        check_references("humaneval", [prompt(row={"prompt": "def f():", "entry_point": "f", "test": 1})])


# ---- the benchmarks' own solutions, where their data is at hand ------------------------------------------


def rows(path: str) -> list[dict[str, Any]]:
    folder = os.environ.get("DFLASH_BENCH_DATA")
    if folder is None:
        pytest.skip("DFLASH_BENCH_DATA does not name a folder with the benchmarks' data")
    return [json.loads(line) for line in (Path(folder) / path).read_text().splitlines()]


def test_every_solution_of_gsm8k_is_right() -> None:
    assert all(passed("gsm8k_number", row["answer"], row["answer"]) for row in rows("gsm8k/test.jsonl"))


@needs_math_verify
def test_every_solution_of_math500_is_right() -> None:
    assert all(passed("math", row["answer"], row["solution"]) for row in rows("math500/test.jsonl"))


def test_every_solution_of_humaneval_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real limits
    for row in rows("humaneval/test.jsonl"):
        text = f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
        assert score("humaneval", prompt(row=row), text, CAGE).passed, row["task_id"]


def test_every_solution_of_mbpp_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for row in rows("mbpp/test.jsonl"):
        assert score("mbpp", prompt(row=row), f"```python\n{row['code']}\n```", CAGE).passed, row["task_id"]


@each(
    ("text", "letter"),
    [
        ("So it is B", "B"),
        ("A lion is no fish. The answer is (c).\nThe correct answer is **C**, as option A is wrong.", "C"),
        ("A or B? I think the choice: D", "D"),
        ("Answer: D. Option A is wrong, as the answer A leaves out the mass.", "D"),
        ("The answer is not A but D", "D"),
        ("**Answer** (D)", "D"),
        ("The answer — D. It is no answer B.", "D"),
        ("B.\nA text says so.", "B"),
        ("\\boxed{\\text{B}} no, \\boxed{(B)}, not D", "B"),
        ("Answer: A", "A"),
        ("甲错。答案：A？不对，正确答案是B。", "B"),
        ("选项A不符合题意，故选D", "D"),
        ("**答案**：**B**", "B"),
        ("Dogs", None),
        ("", None),
    ],
)
def test_the_last_letter_that_is_said_to_be_the_answer_counts(text: str, letter: str | None) -> None:
    score = scorers.score("choice", Prompt("s", "1", (), reference="b"), text)
    assert (score.answer, score.passed) == (letter, letter == "B")


def test_a_reference_that_is_no_choice_is_refused() -> None:
    with pytest.raises(UserError, match=r"prompt 1 of suite s: .*'E'"):
        scorers.check_references("choice", [Prompt("s", "1", (), reference="E")])


# ---- thinking --------------------------------------------------------------------------------------------

THOUGHTS = [
    # scorer, prompt, thinking, answer, right
    ("gsm8k_number", prompt("42"), "41", "42", True),
    ("gsm8k_number", prompt("42"), "42", "41", False),
    ("choice", prompt("B"), "The answer is A?", "B", True),
    ("choice", prompt("B"), "The answer is B", "The answer is C", False),
    ("json_schema", prompt(row={"json_schema": {"type": "object"}}), "{", '{"a": 1}', True),
]


@each(("name", "asked", "thinking", "answer", "right"), THOUGHTS)
def test_the_answer_alone_is_scored(name: str, asked: Prompt, thinking: str, answer: str, right: bool) -> None:
    assert score(name, asked, f"<think>{thinking}</think>\n\n{answer}").passed is right
    # Where marks are not in the text, it is known how much of it is thinking.
    assert score(name, asked, thinking + answer, num_thinking=len(thinking)).passed is right
    assert not score(name, asked, f"<think>{answer}").passed


@needs_math_verify
def test_a_box_in_thoughts_is_no_answer() -> None:
    assert passed("math", "42", "<think>Maybe \\boxed{41}? No.</think>The answer is $42$.")
    assert not passed("math", "42", "<think>So \\boxed{42} perhaps, but")


def test_code_is_taken_from_the_answer() -> None:
    row = {"test_list": ["assert add(1, 2) == 3"], "test_imports": []}
    wrong, good = (f"def add(a, b):\n    return a {sign} b" for sign in "-+")
    for text, right in (
        (f"<think>\n```python\n{wrong}\n```\n</think>\n{good}", True),
        (f"<think>{good}</think>No.", False),
    ):
        assert score("mbpp", prompt(row=row), text, strongest()).passed is right
