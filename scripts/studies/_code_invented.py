"""Functions to complete that the target itself makes up: it writes the user's turn, and what it asks for is kept.

The turn begins with the wording of the suite humaneval and `def`; the body that the target writes as well is cut off.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
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
IMPORTS = (
    "from typing import List\n\n\n",
    "from typing import Any\n\n\n",
    "from collections import Counter\nfrom typing import List\n\n\n",
    "import re\n\n\n",
    "from typing import List, Optional, Tuple\n\n\n",
    "from typing import Dict, List\n\n\n",
    "import math\n\n\n",
)
MOST_TOKENS = 128
TEMPERATURE = 0.7
"""Low enough to make sense without cutting the distribution, which costs much over a large vocabulary."""
SHORTEST = 30
"""Minimum number of characters of a docstring."""
HEAD = re.compile(r'def .*?:\s*(?:"""|\'\'\').*?(?:"""|\'\'\')', re.DOTALL)


def heads(model: Path, count: int, batch_size: int, num_threads: int, report: Callable[[str], object]) -> Iterator[Row]:
    """Yield `count` different functions in humaneval's columns: what precedes their bodies."""
    torch.set_num_threads(num_threads)
    models = loading.load(presets.combine(None, str(model), {}), [], "cpu", torch.bfloat16)
    target, tokenizer = target_of(models.target, kernels="torch"), models.tokenizer
    limits = Limits(MOST_TOKENS, stop_ids(models.target, tokenizer))
    before, _, _ = suites.known_suites()["humaneval"].turns[0].partition("{prompt}")
    start = prompts.turn_start(tokenizer) + before
    known, tries = set[str](), 0
    while len(known) < count:
        report(f"functions made up by the target: {len(known)} of {count}")
        chosen = [f"{IMPORTS[number % len(IMPORTS)]}def" for number in range(tries, tries + batch_size)]
        ids = [tokenizer.encode(start + opening, add_special_tokens=False) for opening in chosen]
        seeds = list(range(tries, tries + batch_size))
        written = decode_all(target, NoDrafter(), ids, limits, Sampling(TEMPERATURE), seeds)
        tries += batch_size
        for opening, tokens in zip(chosen, written, strict=True):
            head = head_of(opening + tokenizer.decode(tokens, skip_special_tokens=True))
            if head is not None and head not in known and len(known) < count:
                known.add(head)
                yield _code_prompts.row(f"invented {len(known)}", head)


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
