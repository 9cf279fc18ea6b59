"""Answers that are formulas: equal as text, or found equal by math-verify in a process that may be ended."""

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

from dflash_bench.records import Prompt
from dflash_bench.scoring.answers import Score, last_box, reference, require_module

_WALL_S = 10
_MEMORY_BYTES = 4 * 2**30


def math(prompt: Prompt, text: str) -> Score:
    require_module("math_verify")
    box, right = last_box(text), reference(prompt)
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
        worker.stdin.write(json.dumps([_WALL_S, f"${right}$", answer]).encode() + b"\n")
        reply = worker.stdout.read(1)
        if not reply:  # it ran out of time or memory; the next formula gets a new one
            worker.communicate()
            _math_worker.cache_clear()
        return reply == b"1"


_math_lock = threading.Lock()


@functools.cache
def _math_worker() -> subprocess.Popen[bytes]:
    start = f"import sys; sys.path[:] = {sys.path}; from dflash_bench.scoring.formulas import serve_math; serve_math()"
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
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
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
