"""Which options of a run have an effect, and which values they take."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import date
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.option import (
    Condition,
    condition,
)
from dflash_bench.core.types import is_greedy

DTYPES = ("float32", "bfloat16", "float16", "auto")
ATTENTION = ("sdpa", "eager")
"""Attention implementations that accept the engine's masks, which ragged batches and trees need."""
ENGINES = ("native", "transformers")
KERNELS = ("numba", "torch")
THINKING: dict[str, tuple[bool, ...]] = {"on": (True,), "off": (False,), "both": (False, True)}


def is_served(options: Any) -> bool:
    """Return whether running servers (not launched here) answer."""
    return bool(options.servers) and options.launch is None


def is_alone(options: Any) -> bool:
    return is_served(options) and not options.has_target


def is_concurrent(options: Any) -> bool:
    return max(options.concurrency, default=1) > 1


LAUNCH = condition(lambda options: options.launch is not None, "without --launch")
SERVERS = condition(lambda options: options.asks_servers, "without --server")
SAMPLES = "at temperature 0"
TRUNCATES = condition(lambda options: options.samples, f"{SAMPLES}, where the best token is taken", is_of_sweep=True)
LAUNCHED = condition(LAUNCH.holds, "with --launch, which starts servers and knows them")
ENGINE_HERE = condition(LAUNCH.holds, "with --launch: it is for the engine here")
SERVED = condition(
    is_served,
    "with --server: how a server drafts is said where it is started, and its method is the NAME of NAME=URL",
)
SERVED_ALONE = condition(
    is_alone,
    "with --server alone: give --model or --target too, the same weights as the server's, to make its prompts and "
    "judge its answers here",
)
"""Options that servers decide themselves, so they apply only to a target in this process."""


def greedy(why: str) -> Condition:
    """Return the need of a temperature of 0, with the reason."""
    return condition(lambda options: any(map(is_greedy, options.temperature)), f"above temperature 0: {why}", True)


def all_together(flag: str, is_so: Any) -> Condition:
    error = f"--for measures prompt by prompt, and {flag} all prompts of a suite together; use --limit instead"
    return Condition(is_so, error, is_of_sweep=True)


def one_process(flag: str, is_so: Any) -> Condition:
    error = f"--workers measure one prompt each, and {flag} is for one process; leave one out"
    return Condition(is_so, error, is_of_sweep=True)


def unsharded(flag: str, is_so: Any) -> Condition:
    error = f"--shard measures some prompts of each suite, and {flag} needs all of them; leave one out"
    return Condition(is_so, error, is_of_sweep=True)


def served_work(flag: str, is_so: Any) -> Condition:
    why = "a server does the work; --concurrency asks it for several answers at once"
    return condition(is_so, f"with {flag}: {why}")


# How values are checked


def check_scorer(name: str) -> None:
    from dflash_bench.tasks import scorers

    scorers.check_name(name)


def prompt_styles() -> Sequence[str]:
    from dflash_bench.tasks import suites

    return suites.STYLES


def quantizations() -> Sequence[str]:
    from dflash_bench.models import quantization

    return list(quantization.PACKAGES)


def check_budget(text: str) -> None:
    from dflash_bench.runner import budget

    budget.seconds(text)


def check_date(text: str) -> None:
    try:
        is_date = date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise UserError(f"--date is a day such as 2026-11-26, not {text!r}")


def check_attention(name: str) -> None:
    if name.startswith("flash"):
        raise UserError(
            f"--attention {name} takes no mask, and this engine needs one for ragged rows and trees; "
            f"use {' or '.join(ATTENTION)}"
        )


def objectives(text: str) -> dict[str, float]:
    """Parse `ttft=500ms,tpot=0.05s`, or either part, into seconds by `ttft_s` and `tpot_s`. Raises UserError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot)=([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|s)", part)
        if match is None or float(match[2]) == 0 or f"{match[1]}_s" in limits:
            raise UserError(f"--slo takes times with their units, such as ttft=500ms,tpot=50ms, not '{text[:40]}'")
        limits[f"{match[1]}_s"] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return limits


def above_zero(value: float) -> bool:
    return math.isfinite(value) and value > 0
