"""Checks on answers made by hand: what rounding may change elsewhere, and which times cannot be."""

from __future__ import annotations

from dataclasses import replace

from dflash_bench.core.types import Divergence
from dflash_bench.results.run_info import RunInfo
from dflash_bench.results.table import RunTable
from dflash_bench.submissions import checks
from dflash_bench.submissions.checks import Redone
from helpers import runs
from helpers.each import each


def redone(num: int, num_other: int) -> list[Redone]:
    """Answers drafted again, of which the first so many drafted another token here."""
    rows = [row for row in runs.answers(num) if row.method == "dflash"]
    again = [row.generation for row in rows]
    again[:num_other] = [replace(one, drafted_ids=(5, *(one.drafted_ids or ())[1:])) for one in again[:num_other]]
    return [Redone(row, one, is_judged=True) for row, one in zip(rows, again, strict=True)]


@each(
    "num_other, is_same_kind, state",
    [
        (0, True, "confirmed"),
        (0, False, "confirmed"),
        (1, True, "refuted"),
        (1, False, "doubtful"),
        (4, False, "doubtful"),
        (5, False, "refuted"),
    ],
)
def test_another_processor_may_draft_otherwise_now_and_then(num_other: int, is_same_kind: bool, state: str) -> None:
    assert checks.counts(redone(8, num_other), is_same_kind).state == state


@each(
    "stored, found, state",
    [
        ("exact", None, "confirmed"),
        ("exact", Divergence(3, 0.0005, 0.001), "confirmed"),
        ("near_tie", None, "confirmed"),
        ("exact", Divergence(3, 1.0, 0.001), "refuted"),
        ("mismatch", Divergence(3, 1.0, 0.001), "confirmed"),
        ("mismatch", None, "refuted"),
    ],
)
def test_tokens_are_what_they_are_stored_as(stored: str, found: Divergence | None, state: str) -> None:
    judged = [
        replace(one, stored=replace(one.stored, audit=stored), departure=found)  # type: ignore[arg-type]
        for one in redone(2, 0)
    ]
    assert checks.tokens(judged).state == state


def info(weight_bytes: float, least_s: float, *gpus: str) -> RunInfo:
    size = {"weight_bytes": weight_bytes, "matrix_elements": 1, "attention": []}
    forwards = {"rows": 1, "context": 128, "seconds": {"1": least_s}, "bandwidth": 3e12, "products": 1e14, "size": size}
    environment = runs.ENVIRONMENT | {"gpus": [{"name": name} for name in gpus]}
    identity = {"device": "cuda" if gpus else "cpu"}
    return runs.about(forwards=forwards | {"least_s": least_s}, identity=identity).model_copy(
        update={"environment": RunInfo.model_fields["environment"].annotation.model_validate(environment)}  # type: ignore[union-attr]
    )


@each(
    "weight_bytes, least_s, gpus, state",
    [
        (16e9, 0.008, ("NVIDIA H100 80GB HBM3",), "unchecked"),  # 2.0 TB/s
        (16e9, 0.0045, ("NVIDIA H100 80GB HBM3",), "doubtful"),  # 3.6 TB/s
        (16e9, 0.0045, ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), "unchecked"),
        (16e9, 0.0025, (), "doubtful"),  # 6.4 TB/s, where 3 were measured
        (14e6, 0.000001, (), "unchecked"),  # in a cache
    ],
)
def test_passes_that_read_faster_than_memory_are_doubtful(
    weight_bytes: float, least_s: float, gpus: tuple[str, ...], state: str
) -> None:
    drafted = [row for row in runs.answers(2) if row.method == "dflash"]
    table = RunTable("run", info(weight_bytes, least_s, *gpus), runs.frame_of(drafted))
    assert checks.times(table, "theirs", None, "ours").state == state
