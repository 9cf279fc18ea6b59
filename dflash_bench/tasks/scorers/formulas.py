"""Answers that are formulas: equal as text, or equal by math-verify, which runs in a process that can be killed."""

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

from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score, last_box, reference, require_module

_WALL_S = 10
_MEMORY_BYTES = 4 * 2**30


_SPACING = re.compile(r"\\(?:left|right)(?![a-z])|\\[!,; ]|[\s$~]")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf)?|math(?:bf|it|rm|tt|sf)|mbox)\s*\{([^{}]*)\}")
_BASE = re.compile(r"\d_\{?(\d+)")
_EMPHASIS = " \t\n.!*_\"'"


def math(prompt: Prompt, text: str) -> Score:
    """Compare the last box, or else the last paragraph, with the reference."""
    require_module("math_verify")
    box, right = last_box(text), reference(prompt)
    if box is None:
        paragraph = re.split(r"\n\s*\n", text.strip())[-1]
        return Score(paragraph or None, bool(paragraph) and _same_in_prose(right, paragraph))
    return Score(box, _plain_formula(box) == _plain_formula(right) or _may_equal(right, box, rf"\boxed{{{box}}}"))


def _same_in_prose(right: str, paragraph: str) -> bool:
    """Compare a paragraph: a reference of one word must be its last word; anything else is left to math-verify."""
    word = _TEXT.sub(r"\1", right).strip()
    if word.isalpha() and len(word) > 1:
        return re.search(rf"(?<!\w){word}$", paragraph.rstrip(_EMPHASIS), re.IGNORECASE) is not None
    return _may_equal(right, paragraph, paragraph)


def _may_equal(right: str, answer: str, whole: str) -> bool:
    """Compare by math-verify, except where it confuses ratios with quotients, or numbers of different bases."""
    bases = [set(_BASE.findall(formula)) for formula in (right, answer)]
    if all(bases) and bases[0] != bases[1]:
        return False
    if ":" in right and ":" not in answer:
        return False
    return _same_formula(right, whole)


def _plain_formula(formula: str) -> str:
    bare = _TEXT.sub(r"\1", _SPACING.sub("", formula)).replace("varnothing", "emptyset")
    return bare.replace("dfrac", "frac").rstrip(".")


def _same_formula(right: str, answer: str) -> bool:
    """Ask the worker process: comparing formulas can take forever, and importing math-verify takes a second."""
    with _math_lock:
        worker = _math_worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps([_WALL_S, f"${right}$", answer]).encode() + b"\n")
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
    """Run the worker: read JSON lists, one per line, and write a byte for each. SIGALRM ends it if one takes long."""
    import logging

    from math_verify import parse, verify

    logging.disable()  # math-verify warns that its own timeout is off; ours is SIGALRM
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write("!")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a formula that crashes it must not spoil the progress display
    for line in sys.stdin:
        wall_s, *formulas = json.loads(line)
        signal.alarm(wall_s)
        right, answer = (parse(formula, parsing_timeout=None) for formula in formulas)
        is_same = verify(right, answer, timeout_seconds=None)
        signal.alarm(0)
        sys.stdout.write("1" if is_same else "0")
        sys.stdout.flush()
