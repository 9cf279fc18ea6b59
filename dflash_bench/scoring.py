"""Whether an answer is right: `SCORERS` maps a suite's scorer name to a function of prompt and text.

Numbers and formulas are compared by value, code by running its tests in the sandbox. What a model may write
around its answer (prose, fences, units, several boxes) is dealt with here and nowhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dflash_bench.errors import UserError, unknown
from dflash_bench.records import Prompt
from dflash_bench.sandbox import CageError, Limits, isolation, run_tests

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MINUS = r"(?:(?<![\w)}])-)?"  # not the minus of a difference
_INTEGER = re.compile(rf"(?<![\d.]){_MINUS}\d+(?!\.?\d)", re.ASCII)
_NUMBER = re.compile(rf"{_MINUS}(?:\d+/0*[1-9]\d*|\d+(?:\.\d+)?|\.\d+)", re.ASCII)
_MAX_NUMBER_CHARS = 100  # no answer is longer, and Python refuses to convert thousands of digits

_FENCED = re.compile(r"```[ \t]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_FIRST_CODE = re.compile(r"^(?:import|from|def|async def|class|@\w+)\b", re.MULTILINE)
_PROSE = re.compile(r"^(?:[A-Z][\w']*,? [a-z]|\*\*|- )", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

_CODE_LIMITS = Limits(cpu_s=20, wall_s=30.0)  # several times what the slowest right solution takes
_MATH_WALL_S = 10
_MATH_MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Score:
    """What was taken as the answer, and whether it is right; `passed` is None where nothing is scored."""

    answer: str | None
    passed: bool | None


Scorer = Callable[[Prompt, str], Score]


def require(names: Collection[str]) -> None:
    """Raises UserError if one of these scorers cannot work here: better before the first answer than after it."""
    for name in names:
        if name not in SCORERS:
            raise unknown("scorer", name, list(SCORERS))
    if "math" in names:
        _require("math_verify")
    if CODE_SCORERS & set(names):
        try:
            isolation()
        except CageError as error:
            raise UserError(f"{error}; leave out the suites humaneval and mbpp") from error


def check_references(name: str, prompts: Iterable[Prompt]) -> None:
    """Raises UserError for a reference that no answer could equal."""
    if name in NUMBER_SCORERS:
        for prompt in prompts:
            _right_number(prompt)


def score(name: str, prompt: Prompt, text: str) -> Score:
    if name not in SCORERS:
        raise unknown("scorer", name, list(SCORERS))
    return SCORERS[name](prompt, text)


def _score_gsm8k_number(prompt: Prompt, text: str) -> Score:
    answer = _final_number(text)
    return Score(answer, _same_number(answer, _right_number(prompt)))


def _score_aime_integer(prompt: Prompt, text: str) -> Score:
    box = _last_box(text)
    integers = _INTEGER.findall(_plain_number(text if box is None else box))
    answer = integers[-1] if integers else None
    return Score(answer, _same_number(answer, _right_number(prompt)))


def _final_number(text: str) -> str | None:
    """From the last box, else from behind the last `####`, else the last of the text."""
    box = _last_box(text)
    plain = _plain_number(text if box is None else box)
    marked = re.findall(rf"####\s*({_NUMBER.pattern})", plain, re.ASCII)
    numbers = marked or _NUMBER.findall(plain)
    return numbers[-1] if numbers else None


def _plain_number(text: str) -> str:
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = re.sub(r"\\[!,;$ ]|[$%]", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    return re.sub(r"(?<=[A-Za-z}])\^\{?\d\}?", "", text)  # the power of a unit


def _same_number(answer: str | None, right: str) -> bool:
    if answer is None or len(answer) > _MAX_NUMBER_CHARS:
        return False
    return Fraction(answer) == Fraction(right)


def _last_box(text: str) -> str | None:
    r"""The content of the last closed \boxed{}, which may hold braces itself."""
    content = None
    for box in _BOX.finditer(text):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                content = text[box.end() : brace.start()].strip()
                break
    return content


def _reference(prompt: Prompt) -> str:
    if prompt.reference is None:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where} has no reference to compare with; set `reference` in the suite's file")
    return prompt.reference


def _right_number(prompt: Prompt) -> str:
    reference = _reference(prompt)
    number = _final_number(reference)
    if number is None or len(number) > _MAX_NUMBER_CHARS:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where}: its reference {reference[:40]!r} holds no number; correct that row")
    return number


def _score_math(prompt: Prompt, text: str) -> Score:
    _require("math_verify")
    box, right = _last_box(text), _reference(prompt)
    if box is None:
        paragraph = re.split(r"\n\s*\n", text.strip())[-1]
        return Score(paragraph or None, bool(paragraph) and _same_formula(right, paragraph))
    is_same_text = _plain_formula(box) == _plain_formula(right)
    return Score(box, is_same_text or _same_formula(right, rf"\boxed{{{box}}}"))


def _plain_formula(formula: str) -> str:
    bare = re.sub(r"\\(?:left|right)(?![a-z])|\\[!,; ]|[\s$]", "", formula)
    return bare.replace("dfrac", "frac").rstrip(".")


def _same_formula(right: str, answer: str) -> bool:
    """Ask the worker: comparing formulas can take forever, and importing what does it takes a second."""
    with _math_lock:
        worker = _math_worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps([_MATH_WALL_S, f"${right}$", answer]).encode() + b"\n")
        reply = worker.stdout.read(1)
        if not reply:  # it ran out of time or memory; the next formula gets a new one
            worker.communicate()
            _math_worker.cache_clear()
        return reply == b"1"


_math_lock = threading.Lock()


@functools.cache
def _math_worker() -> subprocess.Popen[bytes]:
    start = f"import sys; sys.path[:] = {sys.path}; from dflash_bench.scoring import serve_math; serve_math()"
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-c", start], stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
    assert worker.stdout is not None
    if worker.stdout.read(1) != b"!":
        raise RuntimeError("the process that compares formulas did not start; its error is above")
    return worker


def serve_math() -> None:
    """The worker: a JSON list per line in, one byte out. SIGALRM ends it when a pair takes too long."""
    import logging

    from math_verify import parse, verify

    logging.disable()  # math-verify warns that we keep time ourselves
    resource.setrlimit(resource.RLIMIT_AS, (_MATH_MEMORY_BYTES, _MATH_MEMORY_BYTES))
    sys.stdout.write("!")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a formula that breaks it must not break the progress display
    for line in sys.stdin:
        wall_s, *formulas = json.loads(line)
        signal.alarm(wall_s)
        right, answer = (parse(formula, parsing_timeout=None) for formula in formulas)
        is_same = verify(right, answer, timeout_seconds=None)
        signal.alarm(0)
        sys.stdout.write("1" if is_same else "0")
        sys.stdout.flush()


def _score_humaneval(prompt: Prompt, text: str) -> Score:
    stub, name = prompt.row["prompt"], prompt.row["entry_point"]
    code = _code(text, {name})
    if _defines(code, {name}):
        solution = stub.partition(f"def {name}(")[0] + code
    else:  # only the body, or what follows the stub
        solution = stub + (code if code.lstrip("\n")[:1].isspace() else textwrap.indent(code, "    "))
    program = _join(solution, prompt.row["test"], f"check({name})")
    return Score(code, run_tests(program, _CODE_LIMITS).passed)


def _score_mbpp(prompt: Prompt, text: str) -> Score:
    tests = prompt.row["test_list"]
    code = _code(text, set(re.findall(r"([A-Za-z_]\w*)\s*\(", "\n".join(tests))))
    return Score(code, run_tests(_join(*prompt.row["test_imports"], code, *tests), _CODE_LIMITS).passed)


def _code(text: str, names: Collection[str]) -> str:
    """The last Python block that defines one of `names`; failing that, the likeliest code there is."""
    fenced = [(language.lower(), textwrap.dedent(body)) for language, body in _FENCED.findall(text)]
    blocks = [body for _, body in fenced]
    python = [body for language, body in fenced if language in {"python", "py", "python3"}]
    likeliest = [b for b in python if _defines(b, names)] or [b for b in blocks if _defines(b, names)]
    if blocks:
        return (likeliest or python or blocks)[-1]
    return _without_prose(text) if _defines(text, names) else text


def _defines(code: str, names: Collection[str]) -> bool:
    any_name = "|".join(map(re.escape, names))
    return re.search(rf"^(?:async )?(?:def|class) (?:{any_name})\b", code, re.MULTILINE) is not None


def _without_prose(text: str) -> str:
    first = _FIRST_CODE.search(text)
    start = first.start() if first else 0
    end = _PROSE.search(text, start)
    return text[start : end.start() if end else None]


def _join(*parts: str) -> str:
    """One program; Python wants imports from the future first."""
    program = "\n\n".join(parts)
    return "\n".join([*_FUTURE.findall(program), _FUTURE.sub("", program)])


def _score_nothing(_prompt: Prompt, _text: str) -> Score:
    return Score(None, None)


_TEXT_SCORERS: dict[str, Scorer] = {
    "aime_integer": _score_aime_integer,
    "gsm8k_number": _score_gsm8k_number,
    "math": _score_math,
}
SCORERS: dict[str, Scorer] = {
    **_TEXT_SCORERS,
    "humaneval": _score_humaneval,
    "mbpp": _score_mbpp,
    "none": _score_nothing,
}
CODE_SCORERS = frozenset(("humaneval", "mbpp"))
"""They run what the model wrote."""
NUMBER_SCORERS = frozenset(("aime_integer", "gsm8k_number"))
"""They compare by value."""


def as_metric(name: str) -> Any:
    """A scorer of text as an `evaluate.Metric`: compute(predictions, references) gives its accuracy."""
    if name not in _TEXT_SCORERS:
        raise unknown("metric", name, list(_TEXT_SCORERS))
    _require("evaluate")
    import datasets
    import evaluate

    string = datasets.Value("string")
    info = evaluate.MetricInfo(
        description=f"Fraction of answers that dflash-bench's scorer {name} finds right.",
        citation="",
        features=datasets.Features({"predictions": string, "references": string}),
    )

    class Accuracy(evaluate.Metric):  # type: ignore[misc]
        def _info(self) -> Any:
            return info

        def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
            pairs = zip(predictions, references, strict=True)
            scores = [score(name, Prompt(name, "", (), reference=right), text) for text, right in pairs]
            return {"accuracy": sum(one.passed is True for one in scores) / len(scores)}

    return Accuracy(keep_in_memory=True)


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{module} is not installed; run: pip install 'dflash-bench[eval]'")
