"""The Parquet parts of a run: one row per answer, in files that are either complete or absent.

A part is numbered. A merged part covers a range of numbers, and replaces the parts of these numbers as soon as it
exists. Each part carries the identity of its run, so that rows can be neither moved to another run nor presented as
made under other settings, and its checksum is recorded when it is written. The columns are `COLUMNS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, require_file, write_text, write_whole
from dflash_bench.core.types import SCHEMA_VERSION, Answer, Divergence, Generation, Settings
from dflash_bench.results.columns import COLUMNS, STORED, of_source, values_at
from dflash_bench.results.identity import Identity, columns_of_method, columns_of_run, columns_of_suite
from dflash_bench.results.run_info import SCHEMA, differences, refuse_other_schema

# Records as rows of Arrow tables, and back.


def schema() -> Any:
    """Return the Arrow schema of a part; its lists contain no nulls."""
    import pyarrow as pa

    types = {name: pa.type_for_alias(column.item) for name, column in COLUMNS.items()}
    for name, column in COLUMNS.items():
        if column.is_list:
            types[name] = pa.list_(pa.field("element", types[name], nullable=False))
    return pa.schema(types, metadata={SCHEMA: str(SCHEMA_VERSION)})


def is_of_run(stored: Any) -> bool:
    """Return whether a part with this Arrow schema has the columns of a run, of this version or an older one."""
    fields, wanted = {field.name: field for field in stored}, schema()
    lacking = {name for name, column in COLUMNS.items() if not column.is_newer} - {*fields}
    is_single = len(fields) == len(stored)
    known = [field for field in wanted if field.name in fields]
    return is_single and not lacking and all(fields[field.name].equals(field) for field in known)


def with_added(table: Any, columns: Sequence[str]) -> Any:
    """Return a table with these columns, null where an older part lacks one."""
    import pyarrow as pa

    if lacking := {*columns} - {*table.column_names}:
        for field in filter(lambda field: field.name in lacking, schema()):
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(columns)


def to_table(records: Sequence[Answer], identity: Identity) -> Any:
    """Return records as an Arrow table; `identity` includes the run's id, as in the run's parts."""
    import pyarrow as pa

    return pa.Table.from_pylist([_row(record, identity) for record in records], schema())


def _row(record: Answer, identity: Identity) -> dict[str, Any]:
    row = columns_of_run(identity) | columns_of_method(identity, record.method)
    row |= columns_of_suite(identity, record.suite)
    row |= record.measured
    for source in STORED:
        row |= values_at(record if source == "answer" else getattr(record, source), of_source(source))
    return row


def record_of(row: dict[str, Any]) -> Answer:
    row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    given = {source: {name: row[column] for column, name in of_source(source).items()} for source in STORED}
    del given["settings"]["id"]
    return Answer(
        **given["answer"],
        generation=Generation(**given["generation"]),
        settings=Settings(**given["settings"]),
        divergence=_divergence(given["divergence"]),
        departure=_divergence(given["departure"]),
        measured={name: row[name] for name in of_source("measured") if row[name] is not None},
    )


def _divergence(values: dict[str, Any]) -> Divergence | None:
    return None if values["index"] is None else Divergence(**values)


# The SHA-256 of each part of a run, in `parts.sha256` beside them, in the format of `sha256sum --check`.
#
# The line of a part is added before the part gets its name, so that a process killed at any moment leaves no part
# without a line. A line without its part is harmless: missing answers are found by the plan.


CHECKSUMS = "parts.sha256"
LINE = re.compile(r"([0-9a-f]{64})  (part-[^\n]+)")


def add_checksum(part: Path, content: bytes | memoryview) -> None:
    """Record the checksum of a part about to be written. Raises UserError, naming the part, if that fails."""
    line = f"{hashlib.sha256(content).hexdigest()}  {part.name}\n".encode()
    ledger = part.with_name(CHECKSUMS)
    files.require_output(ledger)
    try:
        with ledger.open("a+b") as file:
            is_torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            file.write(b"\n" * is_torn + line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise io_error("write", part, error) from error


def keep_checksums(folder: Path, parts: Collection[Path]) -> None:
    """Drop the lines of all parts but these."""
    names = {part.name for part in parts}
    lines = [f"{digest}  {name}\n" for name, known in checksums(folder).items() if name in names for digest in known]
    if (folder / CHECKSUMS).exists():
        write_text(folder / CHECKSUMS, "".join(lines))


def checksums(folder: Path) -> dict[str, list[str]]:
    """Return all checksums recorded for each part's name. Raises UserError if the file cannot be read."""
    path = folder / CHECKSUMS
    return _checksums(path, *files.state_of(path)) if path.exists() else {}


@lru_cache(8)
def _checksums(path: Path, *_state: int) -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}
    for line in files.text_of(path).split("\n"):
        if match := LINE.fullmatch(line):
            known.setdefault(match[2], []).append(match[1])
    return known


def lost(folder: Path, current: Sequence[Path]) -> list[Path]:
    """Return the parts in a finished run's checksums that neither exist nor were merged into another part."""
    spans = [span(part) for part in current]
    listed = [folder / name for name in checksums(folder) if NAME.fullmatch(name)]
    return [
        part for part in listed if not any(first <= span(part)[0] and span(part)[1] <= last for first, last in spans)
    ]


def why_other(part: Path) -> str | None:
    """Return how a part differs from what the run wrote; None if it does not. Raises UserError without checksums."""
    if not part.with_name(CHECKSUMS).exists():
        raise UserError(f"{part.parent} has no {CHECKSUMS}, by which its parts are known; restore the original file")
    known = checksums(part.parent).get(part.name)
    if known is None:
        return f"{CHECKSUMS} does not list it, so this run did not write it"
    if files.sha256_of(part) not in known:
        return f"it was changed after it was written, as {CHECKSUMS} shows"
    return None


COMPRESSED_BYTES = 1 << 16
"""Smaller tables are not compressed: it would dominate the time to write them and save next to nothing."""
TOGETHER = 1 << 22
"""Bytes of parts that are checked together: the checks of one answer take as long as those of a hundred."""
PARTS = "part-*.parquet"
NAME = re.compile(r"part-([0-9]{6,})(?:-([0-9]{6,}))?\.parquet")


class DamagedError(UserError):
    """A part that cannot be read; readers may continue without it."""


def of(folder: Path) -> list[Path]:
    """Return the parts in the order they were stored, without parts that a merged part replaces.

    Raises UserError for a file that has a part's suffix but not a part's name.
    """
    current: list[Path] = []
    last = -1
    for part in sorted(folder.glob(PARTS), key=lambda part: (span(part)[0], -span(part)[1])):
        if span(part)[1] > last:
            current.append(part)
            last = span(part)[1]
    return current


def together(stored: Sequence[Path]) -> list[list[Path]]:
    """Return consecutive parts in groups of up to `TOGETHER` bytes, to be checked as one; a larger part is alone."""
    groups: list[list[Path]] = []
    room = 0
    for part in stored:
        size = part.stat().st_size if part.exists() else 0
        if size > room or not groups:
            groups.append([])
            room = TOGETHER
        groups[-1].append(part)
        room -= size
    return groups


def joined(batches: Sequence[Any]) -> list[Any]:
    """Return batches of the same columns as one batch."""
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks().to_batches() if len(batches) > 1 else [*batches]


def write(table: Any, part: Path, identity: Identity) -> None:
    """Write a table, completely or not at all, and record its checksum."""
    import pyarrow as pa
    from pyarrow import parquet

    # Times rarely repeat: byte stream split takes three quarters of a dictionary's space, and half the time to read.
    times = [column.leaf for column in COLUMNS.values() if column.item in ("float", "double")]
    options = {
        "compression": "zstd" if table.nbytes >= COMPRESSED_BYTES else "none",
        "write_page_checksum": True,
        "use_dictionary": [column.leaf for column in COLUMNS.values() if column.leaf not in times],
        "column_encoding": dict.fromkeys(times, "BYTE_STREAM_SPLIT"),
    }
    marked = table.replace_schema_metadata(table.schema.metadata | {"identity": json.dumps(identity, sort_keys=True)})
    sink = pa.BufferOutputStream()
    parquet.write_table(marked, sink, **options)
    content = memoryview(sink.getvalue())
    add_checksum(part, content)
    write_whole(part, lambda file: file.write(content))


def batches(
    part: Path, columns: Sequence[str], identity: Identity | None = None, left_out: Any | None = None
) -> Iterator[Any]:
    """Yield Arrow record batches of these columns, one per row group, without the rows of the mask `left_out`, [rows].

    Raises DamagedError, and UserError for another schema or if the part's run has another `identity`.

    Arrow's own threads are disabled: all readers would share them, and two readers are faster with one thread each.
    """
    before = 0
    with _opened(part, identity) as file:
        names = {*file.schema_arrow.names}
        stored = [name for name in columns if name in names]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, stored, use_threads=False)
            for batch in with_added(table, columns).combine_chunks().to_batches():
                yield batch if left_out is None else without(batch, left_out[before : before + len(batch)])
                before += len(batch)


def without(batch: Any, left_out: Any) -> Any:
    """Return a batch or table without the rows of the mask `left_out`, [rows]."""
    import pyarrow as pa

    return batch.filter(pa.array(~left_out)) if left_out.any() else batch


def span(part: Path) -> tuple[int, int]:
    """Return the first and last number that a part covers. Raises UserError for a name that is not a part's."""
    match = NAME.fullmatch(part.name)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first or part.name != name(first, last):
        raise UserError(f"{part} does not have the name of a part of the run; move it out of the folder")
    return first, last


def name(first: int, last: int) -> str:
    return f"part-{first:06}.parquet" if first == last else f"part-{first:06}-{last:06}.parquet"


@contextmanager
def _opened(path: Path, identity: Identity | None = None, as_written: bool = True) -> Iterator[Any]:
    """Open a part; read errors become DamagedError. `as_written` also requires its recorded checksum."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        require_file(path)
    except UserError as error:
        raise DamagedError(str(error)) from error
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            stored = file.schema_arrow
            metadata = stored.metadata or {}
            if (version := metadata.get(SCHEMA.encode())) is not None:
                refuse_other_schema(path, int(version))
            if version is None or not is_of_run(stored):
                raise DamagedError(f"cannot read {path}: its columns are not those of a run")
            if not file.metadata.num_rows:
                raise DamagedError(f"cannot read {path}: it holds no answers")
            if identity is not None:
                _refuse_other(path, json.loads(metadata.get(b"identity", b"{}")), identity)
            if as_written and (why := why_other(path)):
                raise DamagedError(f"cannot read {path}: {why}")
            yield file
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise DamagedError(str(io_error("read", path, error))) from error


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


VALUE_BYTES = 8
"""The most that a value takes in memory that is no text."""


def num_bytes(part: Path, most: int) -> int:
    """Return about how many bytes a part takes in memory, or a number above `most`; 0 for a part that cannot be read.

    Texts are measured by their dictionaries: a few bytes of a file can repeat a long text in every row.
    """
    from pyarrow import parquet

    texts = [name for name, column in COLUMNS.items() if column.kind == "string"]
    found = 0
    try:
        with _opened(part, as_written=False), parquet.ParquetFile(part, read_dictionary=texts) as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                columns = [group.column(index) for index in range(group.num_columns)]
                found += sum(max(one.total_uncompressed_size, VALUE_BYTES * one.num_values) for one in columns)
                if found <= most:
                    found += _bytes_of_texts(file.read_row_group(number, columns=texts))
    except UserError:
        return 0
    return found


def _bytes_of_texts(table: Any) -> int:
    from pyarrow import compute

    chunks = [chunk for column in table.columns for chunk in column.chunks]
    lengths = [compute.binary_length(chunk.dictionary).take(chunk.indices) for chunk in chunks]
    return sum(int(compute.sum(one).as_py() or 0) for one in lengths)


def records(stored: Sequence[Path], identity: Identity) -> list[Answer]:
    return [record_of(row) for part in stored for row in read(part, identity).to_pylist()]
