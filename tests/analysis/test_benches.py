"""Result files of other benchmarks, with numbers of ours in the published shapes: each figure by its own formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis import speculation
from dflash_bench.analysis.peers import benches
from dflash_bench.core.errors import UserError
from dflash_bench.results.table import read_run
from helpers.each import each
from helpers.rows import pair
from helpers.runs import stored

Main = Callable[..., tuple[int, str, str]]


def block(unit: str, avg: float, **more: float) -> dict[str, Any]:
    return {"unit": unit, "avg": avg, **more}


AIPERF = {
    "schema_version": "1.0", "aiperf_version": "0.13.0",
    "input_config": {"models": {"items": [{"name": "org/model"}]}, "datasets": [{"name": "main", "type": "public"}]},
    "request_throughput": block("requests/sec", 2.0), "request_count": block("requests", 40.0),
    "error_request_count": block("requests", 1.0), "output_token_throughput": block("tokens/sec", 412.5),
    "time_to_first_token": block("ms", 31.0, p50=30.0), "inter_token_latency": block("ms", 7.25, p50=7.0),
    "spec_decode_acceptance_length": block("ratio", 3.25, p50=3.0),
    "spec_decode_token_weighted_acceptance_length": block("ratio", 3.2),
    "spec_decode_overall_draft_acceptance_rate": block("%", 46.0), "spec_decode_steps": block("count", 10.0),
    "pooled_spec_decode_acceptance_histogram": {"0": 100, "1": 50, "3": 50}
}  # fmt: skip
SGLANG = {
    "backend": "sglang", "dataset_name": "sharegpt", "request_rate": "trace", "max_concurrency": 8, "completed": 80,
    "total_output_tokens": 8000, "output_throughput": 500.0, "mean_e2e_latency_ms": 900.0, "mean_ttft_ms": 20.0,
    "mean_tpot_ms": 5.0, "concurrency": 7.5, "accept_length": 3.5
}  # fmt: skip
SPECDEC = {
    "Request_AL": {"0": {"0": 2.0}, "1": {"0": 3.0, "1": 4.0}}, "Average_AL": 3.0,
    "Acceptance_Length_Histogram": {"1": 5, "3": 10, "4": 5}, "Conditional_Acceptance_Rate": {"1": 1.0, "3": 0.75}
}  # fmt: skip
SPECFORGE = {
    "model": "org/model",
    "gsm8k": [{
        "batch_size": 1, "steps": 3, "topk": 1, "num_draft_tokens": 4, "num_samples": 100,
        "metrics": [{
            "latency": 37.5, "output_throughput": 373.5, "accept_length": 2.5, "accuracy": 0.96,
            "num_questions": 100, "num_valid_predictions": 100, "categorical_performance": None,
        }],
    }],
    "mtbench": [{
        "batch_size": 4, "steps": None, "topk": None, "num_draft_tokens": None, "num_samples": 5,
        "metrics": [{"latency": 12.25, "output_throughput": 319.5, "accept_length": 2.0, "accuracy": None,
                     "num_questions": 5}],
    }],
}  # fmt: skip
PROFILE = {
    "schema_version": "1.0", "measured": True, "method": "dflash", "target_model": {"name": "org/model"},
    "num_speculative_tokens": 2, "conditional_accept_rates": [0.8, 0.5], "marginal_accept_rates": [0.8, 0.4],
    "mean_accept_length": 2.2, "mean_accept_length_per_request": 2.25
}  # fmt: skip
EXPECTED: dict[str, tuple[Any, list[tuple[str, str, int | None, int | None, dict[str, float]]]]] = {
    "AIPerf": (AIPERF, [("AIPerf", "org/model", 40, None, {
        "al.pooled": 3.2, "al.request_mean": 3.25, "accept_rate": 0.46, "tps.served": 412.5, "ttft.mean_ms": 31.0,
        "tpot.mean_ms": 7.25, "accept_at[1]": 0.5, "accept_at[2]": 0.25, "accept_at[3]": 0.25,
    })]),
    "SGLang": (SGLANG, [("SGLang", benches.UNSTATED, 80, 8, {
        "al.sglang": 3.5, "tps.served": 500.0, "tpot.mean_ms": 5.0, "ttft.mean_ms": 20.0})]),
    "specdec_bench": (SPECDEC, [("specdec_bench", benches.UNSTATED, 2, None, {
        "al.specdec_bench": 3.0, "al.specdec_bench.pooled": 2.75})]),
    "SpecForge": (SPECFORGE, [
        ("SpecForge", "org/model", 100, 1, {"al.specforge": 2.5, "tps.served": 373.5}),
        ("SpecForge", "org/model", 5, 4, {"al.specforge": 2.0, "tps.served": 319.5}),
    ]),
    "profile": (PROFILE, [("profile", "org/model", None, None, {
        "al.specdec_bench.pooled": 2.2, "al.specdec_bench": 2.25})]),
}  # fmt: skip


@each("kind", EXPECTED)
def test_each_figure_has_the_name_of_its_formula(kind: str, tmp_path: Path) -> None:
    content, expected = EXPECTED[kind]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    found = benches.read_results(path)
    assert [(one.kind, one.model, one.num_requests, one.concurrency) for one in found] == [row[:4] for row in expected]
    for one, (*_, figures) in zip(found, expected, strict=True):
        assert one.figures == pytest.approx(figures)


def test_what_is_not_shown_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(AIPERF))
    (tmp_path / "s.jsonl").write_text(f"{json.dumps(SGLANG)}\n{json.dumps(SGLANG | {'accept_length': None})}\n")
    (aiperf,), (first, second) = (benches.read_results(tmp_path / name) for name in ("a.json", "s.jsonl"))
    assert aiperf.left_out == ("request_throughput", "spec_decode_steps")
    assert first.left_out == ("total_output_tokens", "mean_e2e_latency_ms", "concurrency")
    assert second.name.endswith("s.jsonl line 2") and "al.sglang" not in second.figures


def test_a_metric_in_another_unit_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(AIPERF | {"time_to_first_token": block("s", 0.031)}))
    (found,) = benches.read_results(tmp_path / "a.json")
    assert "ttft.mean_ms" not in found.figures and "time_to_first_token" in found.left_out


def test_our_own_profile_counts_rounds(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", [row for name in "ab" for row in pair(name, [4, 4, 0, 1])])
    (tmp_path / "p.json").write_text(json.dumps(speculation.as_json(read_run(run), "dflash")))
    (found,) = benches.read_results(tmp_path / "p.json")
    assert found.figures == pytest.approx(
        {
            "al.pooled": 3.25,
            "al.request_mean": 3.25,
            "accept_at[1]": 0.75,
            **{f"accept_at[{k}]": 0.5 for k in (2, 3, 4)},
        }
    )


def test_other_benchmarks_stand_beside_a_run(main: Main, tmp_path: Path) -> None:
    stored(tmp_path / "run", [row for name in "ab" for row in pair(name, [4, 4, 0, 1])])
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(AIPERF))
    (tmp_path / "acceptance_rate.json").write_text(json.dumps(SPECDEC))
    files = ("profile_export_aiperf.json", "acceptance_rate.json")
    code, out, _ = main("import", *files)
    assert code == 0 and "al.specdec_bench.pooled = " in out
    assert "(AIPerf): request_throughput, spec_decode_steps" in out
    assert [one["kind"] for one in json.loads(main("import", *files, "--json")[1])] == ["AIPerf", "specdec_bench"]
    compared = json.loads(main("compare", "run", *files, "--json")[1])
    assert [cell["method"] for cell in compared["cells"]] == ["ar", "dflash"]
    assert [one["figures"].get("al.pooled") for one in compared["served"]] == [3.2, None]
    assert all(name in compared["notes"][0] for name in ("run", "nano", "profile_export_aiperf.json", "org/model"))


@each(
    "text, told",
    [
        ("{}", "known: SGLang"),
        ("[]", "known: SGLang"),
        (json.dumps(AIPERF | {"output_token_throughput": block("tokens/sec", True)}), "output_token_throughput"),
        (
            json.dumps(AIPERF | {"pooled_spec_decode_acceptance_histogram": {"a": 1}}),
            "pooled_spec_decode_acceptance_histogram",
        ),
        (json.dumps(AIPERF | {"request_count": block("requests", 1.5)}), "request_count"),
        (json.dumps(SPECDEC | {"Acceptance_Length_Histogram": [1]}), "Acceptance_Length_Histogram"),
        (json.dumps(SGLANG | {"completed": 0}), "completed"),
        (json.dumps(SPECFORGE | {"gsm8k": [{"batch_size": 1, "metrics": [1]}]}), "gsm8k"),
    ],
)
def test_other_files_are_refused_in_a_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError) as caught:
        benches.read_results(tmp_path / "result.json")
    assert told in str(caught.value) and "\n" not in str(caught.value)
