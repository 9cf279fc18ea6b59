"""The Parquet parts of a run: one row per answer, in files that are either complete or absent.

A part is numbered. A merged part covers a range of numbers, and as soon as it exists it replaces the parts of these
numbers. Each part carries the identity of its run, so that rows can neither be moved to another run nor be passed off
as made under other settings; and its checksum was recorded when it was written. The columns are those of
`schema.COLUMNS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, require_file, write_whole
from dflash_bench.core.types import Answer
from dflash_bench.results import checksums
from dflash_bench.results.identity import Identity
from dflash_bench.results.run_info import MEASURE_AGAIN, SCHEMA, UNRELEASED, differences, refuse_other_schema
from dflash_bench.results.schema import COLUMNS, is_of_run, leaf, record_of, with_added

PARTS = "part-*.parquet"
NAME = re.compile(r"part-([0-9]{6,})(?:-([0-9]{6,}))?\.parquet")


class DamagedError(UserError):
    """A part that cannot be read; a reader may go on without it."""


def of(folder: Path) -> list[Path]:
    """Return the parts in the order they were stored, without those that a merged part replaces.

    Raises UserError for a file with a part's suffix but not a part's name.
    """
    current: list[Path] = []
    last = -1
    for part in sorted(folder.glob(PARTS), key=lambda part: (span(part)[0], -span(part)[1])):
        if span(part)[1] > last:
            current.append(part)
            last = span(part)[1]
    return current


def write(table: Any, part: Path, identity: Identity) -> None:
    """Write a table, completely or not at all, and record its checksum."""
    import pyarrow as pa
    from pyarrow import parquet

    # Times hardly repeat: stored byte by byte they take three quarters of a dictionary's space, and half the time to
    # read.
    times = [leaf(name) for name, kind in COLUMNS.items() if kind.removeprefix("list of ") in ("float", "double")]
    options = {
        "compression": "zstd",
        "write_page_checksum": True,
        "use_dictionary": [name for name in map(leaf, COLUMNS) if name not in times],
        "column_encoding": dict.fromkeys(times, "BYTE_STREAM_SPLIT"),
    }
    marked = table.replace_schema_metadata(table.schema.metadata | {"identity": json.dumps(identity, sort_keys=True)})
    sink = pa.BufferOutputStream()
    parquet.write_table(marked, sink, **options)
    content = memoryview(sink.getvalue())
    checksums.add(part, content)
    write_whole(part, lambda file: file.write(content))


def batches(
    part: Path, columns: Sequence[str], identity: Identity | None = None, left_out: Any | None = None
) -> Iterator[Any]:
    """Yield Arrow record batches of these columns, one per row group, without the rows of the mask `left_out`, [rows].

    Raises DamagedError; and UserError for another schema, or a part whose run has another `identity`.

    Arrow's own threads are switched off: all readers would share them, and two readers are faster with one each.
    """
    before = 0
    with _opened(part, identity) as file:
        for group in range(file.num_row_groups):
            stored = [name for name in columns if name in file.schema_arrow.names]
            table = file.read_row_group(group, stored, use_threads=False)
            for batch in with_added(table, columns).combine_chunks().to_batches():
                yield batch if left_out is None else without(batch, left_out[before : before + len(batch)])
                before += len(batch)


def without(batch: Any, left_out: Any) -> Any:
    """Return a batch or table without the rows of the mask `left_out`, [rows]."""
    import pyarrow as pa

    return batch.filter(pa.array(~left_out)) if left_out.any() else batch


def span(part: Path) -> tuple[int, int]:
    """Return the first and last number that a part covers; raises UserError for a name that no part has."""
    match = NAME.fullmatch(part.name)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first or part.name != name(first, last):
        raise UserError(f"{part} does not have the name of a part of the run; move it out of the folder")
    return first, last


def name(first: int, last: int) -> str:
    return f"part-{first:06}.parquet" if first == last else f"part-{first:06}-{last:06}.parquet"


@contextmanager
def _opened(path: Path, identity: Identity | None = None, as_written: bool = True) -> Iterator[Any]:
    """Open a part; errors while it is read become DamagedError. `as_written` refuses one whose checksum differs."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        require_file(path)
    except UserError as error:
        raise DamagedError(str(error)) from error
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            metadata = file.schema_arrow.metadata or {}
            if versions := _versions(metadata):
                refuse_other_schema(path, versions, MEASURE_AGAIN)
            if not versions or not is_of_run(file.schema_arrow):
                raise DamagedError(f"cannot read {path}: its columns are not those of a run")
            if not file.metadata.num_rows:
                raise DamagedError(f"cannot read {path}: it holds no answers")
            if identity is not None:
                _refuse_other(path, json.loads(metadata.get(b"identity", b"{}")), identity)
            if as_written and (why := checksums.why_other(path)):
                raise DamagedError(f"cannot read {path}: {why}")
            yield file
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise DamagedError(str(io_error("read", path, error))) from error


def _versions(metadata: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return the schema versions in a part's metadata; empty for Parquet of another kind."""
    return {name: int(metadata[name.encode()]) for name in (SCHEMA, UNRELEASED) if name.encode() in metadata}


def _refuse_other(path: Path, then: Any, now: Identity) -> None:
    changed = "; ".join(differences(then, now))
    if changed:
        raise UserError(
            f"{path} was not measured as {path.parent}/run.json says: {changed}; one of the two was edited or belongs "
            "to another run: restore the original file"
        )


def read(part: Path, identity: Identity | None = None, as_written: bool = True) -> Any:
    with _opened(part, identity, as_written) as file:
        return with_added(file.read(), list(COLUMNS))


def records(stored: Sequence[Path], identity: Identity) -> list[Answer]:
    return [record_of(row) for part in stored for row in read(part, identity).to_pylist()]
