"""Answers that are formulas: equal as text, or by math-verify, which runs in a killable process."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from typing import Any

from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import MENTION, Score, Scorer, last_box, reference, require_module

_CPU_S = 10
"""Seconds of a processor that comparing two formulas may take: a busy machine must not make answers wrong."""
_MEMORY_BYTES = 4 * 2**30


_SPACING = re.compile(r"\\(?:left|right)(?![a-z])|\\[!,; ]|[\s$~]")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf)?|math(?:bf|it|rm|tt|sf)|mbox)\s*\{([^{}]*)\}")
_BASE = re.compile(r"\d_\{?(\d+)")
_EMPHASIS = " \t\n.!*_\"'"
_DOTS = re.compile(r"(?<=[-+,<=(\[{])(\s*)(?:\\[lc]?dots[bcm]?(?![A-Za-z])|…|\.\.\.)")
_REPEATING = re.compile(
    r"(?P<whole>\d{1,20})?\.(?P<fixed>\d{0,20})\\(?:overline|bar)\s*(?:\{(?P<again>\d{1,20})\}|(?P<digit>\d))"
)
_HALF_OF_DAY = re.compile(r"(?<![A-Za-z\\])[ap]\.?\s?m\b\.?|\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}")
_LAST_RATIO = re.compile(r"\d[\d.]*(?:\s*:\s*\d[\d.]*)+(?=\W*(?:[ap]\.?\s?m)?\W*$)")
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_IN_BRACES = re.compile(r"(?:.*(?:=|\\in(?![a-z])))?\\(?:\{|lbrace).*\\(?:\}|rbrace)")
_IN_BRACKETS = re.compile(r"(?:.*(?:=|\\in(?![a-z])))?[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_TOLERANCE = 1e-4
"""Relative tolerance of decimal fractions: four digits, besides the six decimals that math-verify compares."""
_DIGITS = 1000
"""Number of digits computed to distinguish two formulas without decimal fractions."""


def math(prompt: Prompt, text: str) -> Score:
    """Compare the last box, or else the last paragraph, with the reference."""
    require_module("math_verify")
    box, right = last_box(text), reference(prompt)
    if box is None:
        paragraph = re.split(r"\n\s*\n", MENTION.sub("", text).strip())[-1]
        return Score(paragraph or None, bool(paragraph) and _same_in_prose(right, paragraph))
    return Score(box, bool(box) and (_plain_formula(box) == _plain_formula(right) or _may_equal(right, box)))


def _same_in_prose(right: str, paragraph: str) -> bool:
    """Compare a paragraph: its last word with a one-word reference; anything else by math-verify."""
    word = _TEXT.sub(r"\1", right).strip()
    if word.isalpha() and len(word) > 1:
        return re.search(rf"(?<!\w){word}$", paragraph.rstrip(_EMPHASIS), re.IGNORECASE) is not None
    ratio = _LAST_RATIO.search(paragraph)
    if ratio is not None or ":" in right:
        return _may_equal(right, ratio[0] if ratio else "")
    return _have_same_bases(right, paragraph) and _same_formula(right, paragraph)


def _may_equal(right: str, answer: str) -> bool:
    """Compare by math-verify, except what it misreads: ratios as quotients, sets as intervals."""
    ratios = _ratio(right), _ratio(answer)
    if any(ratios):
        return all(ratios) and _same_ratio(*ratios)
    shapes = {_shape(right), _shape(answer)}
    if {_IN_BRACES, _IN_BRACKETS} <= shapes or not _have_same_bases(right, answer):
        return False
    return _same_formula(_readable(right), rf"\boxed{{{_readable(answer)}}}")


def _have_same_bases(right: str, answer: str) -> bool:
    bases = [set(_BASE.findall(formula)) for formula in (right, answer)]
    return not all(bases) or bases[0] == bases[1]


def _shape(formula: str) -> re.Pattern[str] | None:
    bare = _SPACING.sub("", formula)
    return next((shape for shape in (_IN_BRACES, _IN_BRACKETS) if shape.fullmatch(bare)), None)


def _ratio(formula: str) -> list[str]:
    """Return the parts of a ratio or a time; empty for anything else, such as a set's condition after a colon."""
    bare = _SPACING.sub("", _TEXT.sub(r"\1", _HALF_OF_DAY.sub("", formula))).replace(r"\colon", ":")
    parts = bare.rpartition("=")[2].strip(".").split(":")
    is_whole = all(re.search(r"[\d\\]", part) and _is_balanced(part) for part in parts)
    return parts if len(parts) > 1 and is_whole else []


def _is_balanced(part: str) -> bool:
    return all(part.count(opening) == part.count(closing) for opening, closing in ("()", "[]", "{}"))


def _same_ratio(right: list[str], answer: list[str]) -> bool:
    """Compare ratios by value and, if one may be a time, part by part."""
    if len(right) != len(answer):
        return False
    if any(_TIME.fullmatch(":".join(parts)) for parts in (right, answer)):
        pairs = [*zip(right, answer, strict=True)]
    else:
        pairs = [
            (rf"\frac{{{a}}}{{{right[0]}}}", rf"\frac{{{b}}}{{{answer[0]}}}")
            for a, b in zip(right[1:], answer[1:], strict=True)
        ]
    return all(_same_formula(one, rf"\boxed{{{other}}}") for one, other in pairs)


def _readable(formula: str) -> str:
    """Rewrite what math-verify would drop into a form that it reads: dots in lists, repeating decimals."""
    return _REPEATING.sub(_as_fraction, _DOTS.sub(r"\1\\Xi ", formula))


def _as_fraction(repeating: re.Match[str]) -> str:
    again = repeating["again"] or repeating["digit"]
    fixed = Fraction(int(f"{repeating['whole'] or 0}{repeating['fixed']}"))
    value = (fixed + Fraction(int(again), 10 ** len(again) - 1)) / 10 ** len(repeating["fixed"])
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _plain_formula(formula: str) -> str:
    bare = _TEXT.sub(r"\1", _SPACING.sub("", formula)).replace("varnothing", "emptyset")
    return bare.replace("dfrac", "frac").rstrip(".")


def _same_formula(right: str, answer: str) -> bool:
    """Ask the worker process: comparing formulas may never end, and importing math-verify takes a second."""
    with _math_lock:
        worker = _math_worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps([_CPU_S, f"${right}$", answer]).encode() + b"\n")
        reply = worker.stdout.read(1)
        if not reply:  # it ran out of time or memory; the next formula gets a new one
            worker.communicate()
            _math_worker.cache_clear()
        return reply == b"1"


_math_lock = threading.Lock()


@functools.cache
def _math_worker() -> subprocess.Popen[bytes]:
    serve = "from dflash_bench.tasks.scorers.formulas import serve_math; serve_math()"
    start = f"import sys; sys.path[:] = {sys.path}; {serve}"
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-c", start], stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
    assert worker.stdout is not None
    if worker.stdout.read(1) != b"!":
        raise RuntimeError("the process that compares formulas did not start; its error is above")
    return worker


def serve_math() -> None:
    """Run the worker: read JSON lists, one per line, and write a byte for each. SIGPROF ends it if one is too slow."""
    import logging

    from math_verify import grader, parse, verify

    in_absolute_terms = grader.sympy_numeric_eq
    grader.sympy_numeric_eq = lambda a, b, *digits: in_absolute_terms(a, b, *digits) and _is_close(a, b)
    logging.disable()  # math-verify warns that its own timeout is off; ours is SIGPROF
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write("!")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a formula that crashes it must not spoil the progress display
    for line in sys.stdin:
        cpu_s, *formulas = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        right, answer = (parse(formula, parsing_timeout=None) for formula in formulas)
        is_same = verify(right, answer, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write("1" if is_same else "0")
        sys.stdout.flush()


def _is_close(a: Any, b: Any) -> bool:
    """Distinguish two sympy expressions that math-verify considers equal because both are small, or both large.

    Decimal fractions must agree within a relative tolerance, other numbers in all digits; variables are replaced by
    values.
    """
    from math_verify.grader import get_pct_val, safe_sympy_doit
    from sympy import Expr, Float, Integer, Rational

    is_percentage = all(isinstance(get_pct_val(one, one), Integer) for one in (a, b))
    if is_percentage or not (isinstance(a, Expr) and isinstance(b, Expr)):
        return True
    variables = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {variable: Rational(7 + 3 * place, 5 + place) for place, variable in enumerate(variables)}
    a, b = (safe_sympy_doit(one).subs(point) for one in (a, b))
    parts = (a - b).evalf(15, maxn=_DIGITS).as_real_imag()
    if a.has(Float) or b.has(Float):
        sizes = [abs(one.evalf(15)) for one in (a, b)]
        return not all(size.is_Float for size in sizes) or abs(sizes[0] - sizes[1]) <= _TOLERANCE * max(sizes)
    return not any(part.is_Float and part._prec > 1 for part in parts)


SCORER = Scorer(math, check=reference, module="math_verify")
