"""Prompts about Python that the target itself makes up: it writes the user's turn, and what it asks for is kept.

For the suite humaneval, the turn begins with the suite's wording and `def`; the body that the target writes as well is
cut off. For mbpp, it begins with a verb, and once more with what was asked for, the suite's wording and `assert`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dflash_bench.engine.backend import stop_ids
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.selection import target_of
from dflash_bench.models import loading, presets
from dflash_bench.tasks import suites
from dflash_bench.training import prompts
from dflash_bench.training.answers import decode_all
from studies import _code_prompts

Row = dict[str, Any]
Report = Callable[[str], object]
IMPORTS = (
    "from typing import List\n\n\n",
    "from typing import Any\n\n\n",
    "from collections import Counter\nfrom typing import List\n\n\n",
    "import re\n\n\n",
    "from typing import List, Optional, Tuple\n\n\n",
    "from typing import Dict, List\n\n\n",
    "import math\n\n\n",
)
VERBS = (
    "find calculate check count return sort convert remove reverse merge compute generate extract determine split "
    "replace filter group rotate flatten multiply add swap print validate identify maximize minimize rearrange get"
).split()
ASKED = tuple(f"{ask} {verb}" for verb, ask in product(VERBS, ("Write a function to", "Write a python function to")))
HEAD_TOKENS, SENTENCE_TOKENS, TESTS_TOKENS = 128, 48, 112
TEMPERATURE = 0.7
"""Low enough to make sense without cutting the distribution, which costs much over a large vocabulary."""
SHORTEST = 30
"""Minimum number of characters of a docstring."""
NUM_TESTS = 3
HEAD = re.compile(r'def .*?:\s*(?:"""|\'\'\').*?(?:"""|\'\'\')', re.DOTALL)
SENTENCE = re.compile(r"[^\n.:]{30,200}(?=\.\s|\.?\n|\.?$)")


class Author:
    """A target that goes on with a user's turn."""

    def __init__(self, model: Path, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        models = loading.load(presets.combine(None, str(model), {}), [], "cpu", torch.bfloat16)
        self.target, self.tokenizer = target_of(models.target, kernels="torch"), models.tokenizer
        self.stop_ids = stop_ids(models.target, models.tokenizer)
        self.num_written = 0

    def go_on(self, openings: Sequence[str], most_tokens: int) -> list[str]:
        """Return each opening with what the target writes after it, which differs from call to call."""
        start = prompts.turn_start(self.tokenizer)
        ids = [self.tokenizer.encode(start + opening, add_special_tokens=False) for opening in openings]
        seeds = range(self.num_written, self.num_written + len(openings))
        self.num_written += len(openings)
        limits = Limits(most_tokens, self.stop_ids)
        written = decode_all(self.target, NoDrafter(), ids, limits, Sampling(TEMPERATURE), list(seeds))
        decoded = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]
        return [opening + text for opening, text in zip(openings, decoded, strict=True)]


def heads(author: Author, count: int, batch_size: int, report: Report) -> Iterator[Row]:
    """Yield `count` different functions in humaneval's columns: what precedes their bodies."""
    before, _, _ = suites.known_suites()["humaneval"].turns[0].partition("{prompt}")
    known = set[str]()
    while len(known) < count:
        report(f"functions made up by the target: {len(known)} of {count}")
        at = author.num_written
        openings = [f"{before}{IMPORTS[number % len(IMPORTS)]}def" for number in range(at, at + batch_size)]
        for text in author.go_on(openings, HEAD_TOKENS):
            head = head_of(text.removeprefix(before))
            if head is not None and head not in known and len(known) < count:
                known.add(head)
                yield _code_prompts.row(f"invented {len(known)}", head)


def tasks(author: Author, count: int, batch_size: int, report: Report) -> Iterator[Row]:
    """Yield `count` different tasks in mbpp's columns: a sentence and tests, which need not be right."""
    _, _, wording = suites.known_suites()["mbpp"].turns[0].partition("{prompt}")
    wording, _, _ = wording.partition("{test_list}")
    known = set[str]()
    while len(known) < count:
        report(f"tasks made up by the target: {len(known)} of {count}")
        at = author.num_written
        asked = author.go_on([ASKED[n % len(ASKED)] for n in range(at, at + batch_size)], SENTENCE_TOKENS)
        sentences = dict.fromkeys(f"{found[0]}." for text in asked if (found := SENTENCE.match(text)))
        openings = {f"{sentence}{wording}assert": sentence for sentence in sentences if sentence not in known}
        for text, (opening, sentence) in zip(author.go_on(list(openings), TESTS_TOKENS), openings.items(), strict=True):
            tests = tests_of(text.removeprefix(opening.removesuffix("assert")))
            if tests and len(known) < count:
                known.add(sentence)
                task = {"task_id": f"invented {len(known)}", "prompt": sentence}
                yield task | {"test_imports": [], "test_list": tests}


def head_of(text: str) -> str | None:
    """Return Python up to the end of its first function's docstring; None if there is no such function."""
    found = HEAD.search(text)
    if found is None:
        return None
    head = f"{text[: found.end()]}\n"
    try:
        function = ast.parse(f"{head}    pass\n").body[-1]
    except SyntaxError:
        return None
    if not isinstance(function, ast.FunctionDef) or not function.name.isascii():
        return None
    return head if len(ast.get_docstring(function) or "") >= SHORTEST else None


def tests_of(text: str) -> list[str]:
    """Return the first tests of a text, if its first lines are NUM_TESTS tests; otherwise none."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][:NUM_TESTS]
    return lines if len(lines) == NUM_TESTS and all(map(_is_test, lines)) else []


def _is_test(line: str) -> bool:
    try:
        (statement,) = ast.parse(line).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(statement, ast.Assert) and any(isinstance(node, ast.Call) for node in ast.walk(statement))
