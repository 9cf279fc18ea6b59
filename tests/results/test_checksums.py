"""The checksums of a run's parts: recorded before a part is there, whatever interrupts that."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.results import parts, store
from helpers.rows import pair
from helpers.runs import bare


def test_a_line_that_a_crash_cut_short_is_passed_over_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    part = tmp_path / "part-000000.parquet"
    parts.add_checksum(part, b"one")
    ledger = tmp_path / parts.CHECKSUMS
    ledger.write_bytes(ledger.read_bytes() + b"0123abc")
    parts.add_checksum(part.with_name("part-000001.parquet"), b"two")
    assert parts.checksums(tmp_path) == {
        "part-000000.parquet": [sha256(b"one").hexdigest()],
        "part-000001.parquet": [sha256(b"two").hexdigest()],
    }


def test_a_part_that_was_begun_and_then_written_anew_is_known_by_either_content(tmp_path: Path) -> None:
    """The process was killed between the two: what stands under the name may still be the former part."""
    part = tmp_path / "part-000000.parquet"
    for content in (b"one", b"two"):
        parts.add_checksum(part, content)
    for content, is_known in ((b"one", True), (b"two", True), (b"three", False)):
        part.write_bytes(content)
        assert (parts.why_other(part) is None) == is_known


def test_parts_that_were_merged_are_forgotten_and_the_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MERGED_WHILE_RUNNING", 3)
    with store.create(tmp_path / "run", bare()) as run:
        for number in range(4):
            run.append(pair(f"p{number}", [1]))
        run.mark_finished({})
    names = {part.name for part in parts.of(run.folder)}
    assert names == set(parts.checksums(run.folder)) == {"part-000000-000002.parquet", "part-000003.parquet"}


def test_a_run_whose_checksums_are_gone_is_neither_read_nor_mended(tmp_path: Path) -> None:
    """Nothing of it could be trusted, and all of it would be measured again."""
    with store.create(tmp_path / "run", bare()) as run:
        run.append(pair("p0", [1]))
    (run.folder / parts.CHECKSUMS).unlink()
    for call in (lambda: store.load(run.folder), lambda: store.resume(run.folder, bare())):
        with pytest.raises(UserError, match=r"run has no parts\.sha256"):
            call()
    assert [part.name for part in parts.of(run.folder)] == ["part-000000.parquet"]
