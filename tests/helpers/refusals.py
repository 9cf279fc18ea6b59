"""Assertions on refusals of the command line: one line that names the fault, exit status 2, empty stdout."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from dflash_bench.core.errors import UserError

SERVED: dict[str, Any] = {
    "model_id": "Qwen/Qwen3-8B",
    "completed": 80,
    "output_throughput": 412.5,
    "mean_tpot_ms": 7.2,
    "mean_ttft_ms": 31.0,
    "spec_decode_acceptance_rate": 36.4,
    "spec_decode_acceptance_length": 6.46,
    "spec_decode_num_drafts": 1000,
    "spec_decode_draft_tokens": 15000,
    "spec_decode_accepted_tokens": 5460,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.8],
}
"""A result file of `vllm bench serve`."""


def assert_refused(result: tuple[int, str, str], *named: str) -> None:
    """The names, flags, files and values are in the line, whatever its words."""
    status, out, err = result
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("dflash-bench: ")
    assert [name for name in named if name not in err] == [], err


def names(text: str) -> list[str]:
    """The words of a table's cell; what is between backticks is one."""
    return [phrase or word for phrase, word in re.findall(r"`([^`]+)`|(\S+)", text)]


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The one line of the error that a call ends with."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
