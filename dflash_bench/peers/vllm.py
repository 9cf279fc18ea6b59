"""Result JSON of `vllm bench serve`, so that a server's own figures can stand beside a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError

FORMULAS = {
    "tps.served": "output tokens / wall time, all requests together",
    "tpot.mean_ms": "mean over requests of (end-to-end - time to first token) / (T - 1)",
    "ttft.mean_ms": "mean over requests of the time to the first token",
}
"""Beside al.pooled, accept_rate and accept_at[k], which vLLM means as we do."""


@dataclass(frozen=True, slots=True)
class Served:
    """Figures by formula id; what the file does not hold is absent."""

    name: str
    model: str
    num_requests: int
    concurrency: int | None
    figures: Mapping[str, float]


def read(path: Path) -> Served:
    """Raises UserError for a file that is no such result."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, dict) or "output_throughput" not in found or "completed" not in found:
        raise UserError(f"{path} is no result of vllm bench serve (no output_throughput, no completed)")
    if not found["completed"]:
        raise UserError(f"{path}: no request was completed")
    concurrency = found.get("max_concurrency")
    return Served(str(path), str(found.get("model_id")), int(found["completed"]), concurrency, _figures(path, found))


def _figures(path: Path, found: Mapping[str, Any]) -> dict[str, float]:
    drafts, accepted = found.get("spec_decode_num_drafts"), found.get("spec_decode_accepted_tokens")
    length = found.get("spec_decode_acceptance_length")
    if drafts and accepted is not None and length is not None and abs(1 + accepted / drafts - length) > 0.01:
        # Before vllm#17908 the bonus token was left out.
        raise UserError(f"{path}: its acceptance length is not 1 + accepted / drafts; it is of another formula")
    values = {
        "al.pooled": length,
        "accept_rate": _share(found.get("spec_decode_acceptance_rate")),
        "tps.served": found["output_throughput"],
        "tpot.mean_ms": found.get("mean_tpot_ms"),
        "ttft.mean_ms": found.get("mean_ttft_ms"),
    }
    positions = found.get("spec_decode_per_position_acceptance_rates") or []
    values |= {f"accept_at[{k}]": value for k, value in enumerate(positions, start=1)}
    return {name: float(value) for name, value in values.items() if value is not None}


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
