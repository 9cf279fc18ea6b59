"""Result files of other benchmarks, to compare with a run's figures, each under the name of its own formula.

The meaning of fields is taken from the program's documentation or source; fields that neither explains are left out and
named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import float_info
from typing import Any, TypeGuard

from dflash_bench.core import files
from dflash_bench.core.errors import UserError

FORMULAS = {
    "tps.served": "output tokens / wall time, all requests together",
    "tpot.mean_ms": "mean over requests of (end-to-end - time to first token) / (T - 1)",
    "ttft.mean_ms": "mean over requests of the time to the first token",
    "al.sglang": "tokens from verifying / verify passes, by the server's own count since it started",
    "al.specforge": "sum(T) / sum(verify passes), so that the token from prefill counts, too",
    "al.specdec_bench": "mean over turns of the mean size of the stream's chunks; the token from prefill is a chunk",
    "al.specdec_bench.pooled": "mean size of all chunks of all streams; the token from prefill is a chunk",
}
"""Formulas besides al.pooled, al.request_mean, accept_rate and accept_at[k], where a program defines them as this
package does."""
UNSTATED = "model not stated"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Values by formula id, as far as the file holds them."""

    name: str
    kind: str
    """The program that wrote the file: one of `KINDS`."""
    model: str
    num_requests: int | None = None
    num_failed: int | None = None
    concurrency: int | None = None
    """None if it is not known, or unlimited."""
    is_unlimited: bool = field(default=False, kw_only=True)
    """Whether all requests were sent at once."""
    figures: Mapping[str, float] = field(kw_only=True)
    left_out: tuple[str, ...] = field(default=(), kw_only=True)
    """Fields with numbers that are not shown."""


def read_results(path: Path) -> list[BenchResult]:
    """Read a file. Raises UserError for an unknown kind, and for a value that is not a number, by its key."""
    found = [one for where, content in _objects(path) for one in _recognised(path, where, content)]
    if not found:
        raise _unknown(path)
    return found


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON value of a file, or the values of its lines, with their places."""
    if path.suffix == ".jsonl":
        lines = [line for line in files.lines_of(path) if line.strip()]
        for number, line in enumerate(lines, start=1):
            where = f"{path} line {number}" if len(lines) > 1 else str(path)
            yield where, files.parse_json(where, line)
    elif path.suffix in (".yaml", ".yml"):
        yield str(path), _yaml_of(path)
    else:
        yield str(path), files.json_of(path)


def _yaml_of(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(files.text_of(path))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())[:120]}") from error


def _recognised(path: Path, where: str, content: Any) -> list[BenchResult]:
    if isinstance(content, dict):
        for kind in KINDS.values():
            if kind.is_one(content):
                return list(kind.read(where, content))
    raise _unknown(path)


def _unknown(path: Path) -> UserError:
    known = "; ".join(f"{name} ({kind.file})" for name, kind in KINDS.items())
    return UserError(f"{path} is not a result of a known benchmark; known: {known}")


# vllm bench serve and SGLang's bench_serving, which began as the same program.


TIMES = {"tps.served": "output_throughput", "tpot.mean_ms": "mean_tpot_ms", "ttft.mean_ms": "mean_ttft_ms"}
POSITIONS = "spec_decode_per_position_acceptance_rates"
OF_SERVING = (
    "completed",
    "failed",
    "max_concurrency",
    "model_id",
    *TIMES.values(),
    "accept_length",
    POSITIONS,
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
    "spec_decode_acceptance_length",
    "spec_decode_acceptance_rate",
)


def _served(kind: str, figures_of: Callable[[str, Mapping[str, Any]], Mapping[str, float | None]]) -> Any:
    def read(where: str, result: Mapping[str, Any]) -> Iterator[BenchResult]:
        completed, failed, concurrency = (
            _count(where, result, key) for key in ("completed", "failed", "max_concurrency")
        )
        if not completed:
            raise UserError(f"{where}: no request was completed")
        model = str(result.get("model_id") or UNSTATED)
        times = {name: _number(where, result, key) for name, key in TIMES.items()}
        figures = _known({**figures_of(where, result), **times})
        left_out = _numbers_besides(result, OF_SERVING)
        is_unlimited = concurrency is None and "max_concurrency" in result
        yield BenchResult(
            where,
            kind,
            model,
            completed,
            failed,
            concurrency,
            is_unlimited=is_unlimited,
            figures=figures,
            left_out=left_out,
        )

    return read


def _vllm_figures(where: str, result: Mapping[str, Any]) -> dict[str, float | None]:
    drafts, accepted, length, percent = (
        _number(where, result, f"spec_decode_{key}")
        for key in ("num_drafts", "accepted_tokens", "acceptance_length", "acceptance_rate")
    )
    if drafts and accepted is not None and length is not None and abs(1 + accepted / drafts - length) > 0.01:
        # Before vllm#17908 the bonus token was left out.
        raise UserError(
            f"{where}: its acceptance length is not 1 + accepted / drafts, so it has another formula; use a newer vLLM"
        )
    positions = [] if result.get(POSITIONS) is None else result[POSITIONS]
    if not isinstance(positions, list):
        raise UserError(f"{where}: {POSITIONS} is not a list of numbers")
    rates = _by_position(where, POSITIONS, positions)
    return {"al.pooled": length, "accept_rate": None if percent is None else percent / 100, **rates}


def _sglang_figures(where: str, result: Mapping[str, Any]) -> dict[str, float | None]:
    return {"al.sglang": _number(where, result, "accept_length")}


# AIPerf's summary: a block with a unit and an average for each metric.


AIPERF = {
    "al.pooled": ("spec_decode_token_weighted_acceptance_length", "ratio", 1.0),
    "al.request_mean": ("spec_decode_acceptance_length", "ratio", 1.0),
    "accept_rate": ("spec_decode_overall_draft_acceptance_rate", "%", 100.0),
    "tps.served": ("output_token_throughput", "tokens/sec", 1.0),
    "ttft.mean_ms": ("time_to_first_token", "ms", 1.0),
    "tpot.mean_ms": ("inter_token_latency", "ms", 1.0),
}
"""The metric of each formula, its required unit, and the divisor of its average."""
HISTOGRAM = "pooled_spec_decode_acceptance_histogram"
REQUESTS, FAILED = "request_count", "error_request_count"


def _is_block(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and "unit" in value and "avg" in value


def _aiperf(where: str, result: Mapping[str, Any]) -> Iterator[BenchResult]:
    figures: dict[str, float | None] = {}
    for name, (metric, unit, divisor) in AIPERF.items():
        if _is_block(block := result.get(metric)) and block["unit"] == unit:
            value = _number(where, {metric: block["avg"]}, metric)
            figures[name] = None if value is None else value / divisor
    counts = {key: block["avg"] for key in (REQUESTS, FAILED) if _is_block(block := result.get(key))}
    shown = {metric for name, (metric, *_) in AIPERF.items() if name in figures}
    yield BenchResult(
        where,
        "AIPerf",
        _aiperf_model(result),
        _count(where, counts, REQUESTS),
        _count(where, counts, FAILED),
        figures=_known({**figures, **_reached(where, result.get(HISTOGRAM))}),
        left_out=tuple(key for key, value in result.items() if _is_block(value) and key not in {*shown, *counts}),
    )


def _aiperf_model(result: Mapping[str, Any]) -> str:
    match result:
        case {"input_config": {"models": {"items": [{"name": str(name)}, *_]}}}:
            return name
        case {"input_config": {"endpoint": {"model_names": [str(name), *_]}}}:
            return name
    return UNSTATED


def _reached(where: str, histogram: Any) -> dict[str, float]:
    """Return `accept_at` from the number of rounds by accepted draft tokens."""
    if not isinstance(histogram, dict) or not histogram:
        return {}
    if not all(key.isdecimal() for key in histogram):
        raise UserError(f"{where}: {HISTOGRAM} counts rounds by a number of tokens")
    counts = {int(key): _count(where, histogram, key) or 0 for key in histogram}
    total = sum(counts.values())
    ks = range(1, max(counts) + 1) if total else ()
    return {f"accept_at[{k}]": sum(number for length, number in counts.items() if length >= k) / total for k in ks}


# Model-Optimizer's specdec_bench, and profiles of drafts.


LENGTHS = "Acceptance_Length_Histogram"


def _specdec(where: str, result: Mapping[str, Any]) -> Iterator[BenchResult]:
    sizes = result[LENGTHS]
    if not isinstance(sizes, dict) or not all(size.isdecimal() for size in sizes):
        raise UserError(f"{where}: {LENGTHS} counts chunks by their size")
    counts = {int(size): _count(where, sizes, size) or 0 for size in sizes}
    total = sum(counts.values())
    mean = sum(size * number for size, number in counts.items()) / total if total else None
    figures = {"al.specdec_bench": _number(where, result, "Average_AL"), "al.specdec_bench.pooled": mean}
    requests = result.get("Request_AL")
    yield BenchResult(
        where,
        "specdec_bench",
        UNSTATED,
        len(requests) if isinstance(requests, dict) else None,
        figures=_known(figures),
        left_out=_numbers_besides(result, ("Average_AL",)),
    )


def _profile(where: str, result: Mapping[str, Any]) -> Iterator[BenchResult]:
    """Read a speculation profile: ours counts rounds, Model-Optimizer's chunks, including the first from prefill."""
    is_ours = str(result.get("schema", "")).startswith("dflash-bench.")
    pooled, by_request = (
        ("al.pooled", "al.request_mean") if is_ours else ("al.specdec_bench.pooled", "al.specdec_bench")
    )
    figures = {
        pooled: _number(where, result, "mean_accept_length"),
        by_request: _number(where, result, "mean_accept_length_per_request"),
    }
    rates = result.get("marginal_accept_rates")
    if is_ours and isinstance(rates, list):
        figures |= _by_position(where, "marginal_accept_rates", rates)
    target = result.get("target_model")
    model = target.get("name") if isinstance(target, dict) else target
    yield BenchResult(
        where,
        "profile",
        str(model or UNSTATED),
        _count(where, result, "num_prompts"),
        figures=_known(figures),
        left_out=() if is_ours else ("marginal_accept_rates", "conditional_accept_rates"),
    )


# SpecForge's bench_eagle3: a list of configurations for each data set.


OF_SPECFORGE = ("accept_length", "output_throughput", "num_questions")


def _is_specforge(result: Mapping[str, Any]) -> bool:
    lists = [value for value in result.values() if isinstance(value, list) and value]
    return bool(lists) and all(
        isinstance(one, dict) and isinstance(one.get("metrics"), list) and "batch_size" in one
        for several in lists
        for one in several
    )


def _specforge(where: str, result: Mapping[str, Any]) -> Iterator[BenchResult]:
    model = str(result.get("model") or UNSTATED)
    for data_set, several in result.items():
        for one in several if isinstance(several, list) else ():
            for metrics in one["metrics"]:
                if not isinstance(metrics, dict):
                    raise UserError(f"{where}: metrics of {data_set} are not objects")
                setting = [f"{key} {one[key]}" for key in ("steps", "topk", "num_draft_tokens") if one.get(key)]
                name = " ".join([where, ", ".join([data_set, *setting])])
                figures = {
                    "al.specforge": _number(name, metrics, "accept_length"),
                    "tps.served": _number(name, metrics, "output_throughput"),
                }
                yield BenchResult(
                    name,
                    "SpecForge",
                    model,
                    _count(name, metrics, "num_questions"),
                    concurrency=_count(name, one, "batch_size"),
                    figures=_known(figures),
                    left_out=_numbers_besides(metrics, OF_SPECFORGE),
                )


# InferenceX's golden acceptance lengths, and those of `card --curve`: by model, thinking mode and drafted tokens.


MODES = ("thinking_on", "thinking_off")


def _is_curve(result: Mapping[str, Any]) -> bool:
    return bool(result) and all(isinstance(modes, dict) and modes and {*modes} <= {*MODES} for modes in result.values())


def _curve(where: str, result: Mapping[str, Any]) -> Iterator[BenchResult]:
    for model, modes in result.items():
        for mode, lengths in modes.items():
            if not isinstance(lengths, dict):
                raise UserError(f"{where}: {mode} of {model} is not a list of lengths by drafted tokens")
            for drafted in lengths:
                name = f"{where} {mode}, {drafted} drafted"
                figures = {"al.pooled": _number(name, lengths, drafted)}
                yield BenchResult(name, "curve", str(model), figures=_known(figures))


@dataclass(frozen=True, slots=True)
class BenchKind:
    """A kind of result files: their program, how to recognise them, and how to read them."""

    file: str
    is_one: Callable[[Mapping[str, Any]], bool]
    read: Callable[[str, Mapping[str, Any]], Iterator[BenchResult]]


KINDS: dict[str, BenchKind] = {
    "SGLang": BenchKind(
        "the JSON lines of bench_serving",
        lambda result: {"output_throughput", "completed", "accept_length"} <= result.keys(),
        _served("SGLang", _sglang_figures),
    ),
    "vLLM": BenchKind(
        "the JSON of bench serve, with output_throughput and completed",
        lambda result: {"output_throughput", "completed"} <= result.keys(),
        _served("vLLM", _vllm_figures),
    ),
    "AIPerf": BenchKind("profile_export_aiperf.json", lambda result: any(map(_is_block, result.values())), _aiperf),
    "specdec_bench": BenchKind("its acceptance rates, with Average_AL", lambda result: LENGTHS in result, _specdec),
    "profile": BenchKind("speculation_profile.json", lambda result: "conditional_accept_rates" in result, _profile),
    "SpecForge": BenchKind("the JSON of bench_eagle3", _is_specforge, _specforge),
    "curve": BenchKind("the YAML of InferenceX's golden acceptance lengths, or of card --curve", _is_curve, _curve),
}


# Values.


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}


def _numbers_besides(result: Mapping[str, Any], shown: tuple[str, ...]) -> tuple[str, ...]:
    numbers = {key for key, value in result.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return tuple(key for key in result if key in numbers and key not in shown)


def _by_position(where: str, key: str, rates: list[Any]) -> dict[str, float | None]:
    """Return `accept_at` from the rates of a list, the first drafted token's first."""
    return {f"accept_at[{k}]": _number(where, {key: rate}, key) for k, rate in enumerate(rates, start=1)}


def _number(where: str, result: Mapping[str, Any], key: str) -> float | None:
    if (value := result.get(key)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= float_info.max:
        raise UserError(f"{where}: {key} is not a number: {json.dumps(value)[:40]}")
    return float(value)


def _count(where: str, result: Mapping[str, Any], key: str) -> int | None:
    value = _number(where, result, key)
    if value is not None and value != int(value):
        raise UserError(f"{where}: {key} is not a whole number: {value:g}")
    return None if value is None else int(value)
