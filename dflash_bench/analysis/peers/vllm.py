"""Result JSON of `vllm bench serve`, to compare a server's own metrics with a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import float_info
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError

FORMULAS = {
    "tps.served": "output tokens / wall time, all requests together",
    "tpot.mean_ms": "mean over requests of (end-to-end - time to first token) / (T - 1)",
    "ttft.mean_ms": "mean over requests of the time to the first token",
}
"""Formulas besides al.pooled, accept_rate and accept_at[k], which vLLM defines as this package does."""
TIMES = {"tps.served": "output_throughput", "tpot.mean_ms": "mean_tpot_ms", "ttft.mean_ms": "mean_ttft_ms"}
POSITIONS = "spec_decode_per_position_acceptance_rates"


@dataclass(frozen=True, slots=True)
class VllmBenchResult:
    """Values by formula id, without those that the file does not hold."""

    name: str
    model: str
    num_requests: int
    num_failed: int | None
    concurrency: int | None
    """None if all requests were sent at once."""
    figures: Mapping[str, float]


def read_result(path: Path) -> VllmBenchResult:
    """Read a result. Raises UserError for other files, and for a value that is not a number, by its key."""
    result = files.json_of(path)
    if not isinstance(result, dict) or "output_throughput" not in result or "completed" not in result:
        raise UserError(f"{path} is not a result of vllm bench serve (it needs output_throughput and completed)")
    completed, failed, concurrency = (_count(path, result, key) for key in ("completed", "failed", "max_concurrency"))
    if not completed:
        raise UserError(f"{path}: no request was completed")
    model = str(result.get("model_id") or "model not stated")
    return VllmBenchResult(str(path), model, completed, failed, concurrency, _figures(path, result))


def _figures(path: Path, result: Mapping[str, Any]) -> dict[str, float]:
    drafts, accepted, length, percent = (
        _number(path, f"spec_decode_{key}", result.get(f"spec_decode_{key}"))
        for key in ("num_drafts", "accepted_tokens", "acceptance_length", "acceptance_rate")
    )
    if drafts and accepted is not None and length is not None and abs(1 + accepted / drafts - length) > 0.01:
        # Before vllm#17908 the bonus token was left out.
        raise UserError(
            f"{path}: its acceptance length is not 1 + accepted / drafts, so it has another formula; use a newer vLLM"
        )
    values = {"al.pooled": length, "accept_rate": None if percent is None else percent / 100}
    for name, key in TIMES.items():
        values[name] = _number(path, key, result.get(key))
    positions = [] if result.get(POSITIONS) is None else result[POSITIONS]
    if not isinstance(positions, list):
        raise UserError(f"{path}: {POSITIONS} is not a list of numbers")
    values |= {f"accept_at[{k}]": _number(path, POSITIONS, value) for k, value in enumerate(positions, start=1)}
    return {name: value for name, value in values.items() if value is not None}


def _number(path: Path, key: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= float_info.max:
        raise UserError(f"{path}: {key} is not a number: {json.dumps(value)[:40]}")
    return float(value)


def _count(path: Path, result: Mapping[str, Any], key: str) -> int | None:
    value = _number(path, key, result.get(key))
    if value is not None and value != int(value):
        raise UserError(f"{path}: {key} is not a whole number: {value:g}")
    return None if value is None else int(value)
