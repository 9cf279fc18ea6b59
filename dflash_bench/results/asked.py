"""The prompts of a run, stored once beside its parts: what was asked, and the expected answer.

Rows refer to their prompt by suite and id. In a later turn the model was asked all turns so far, with the plain answers
of the same settings and repeat between them; those answers are in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_bench.atomic import cannot, write_whole
from dflash_bench.errors import UserError
from dflash_bench.reading import require_file

FILE = "prompts.parquet"
COLUMNS = ("suite", "prompt_id", "prompt_hash", "category", "opening", "turns", "reference", "paddings", "row")
"""`opening` holds the messages before the first turn, with their roles; `turns` what the user says; `row` what a scorer
reads besides the reference, such as tests, as JSON.

`paddings` holds, for each context that the prompt was padded to, the text that stood before its first turn.
"""


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    padding = pa.struct([("context", pa.int32()), ("text", pa.string())])
    kinds = {"opening": pa.list_(message), "turns": pa.list_(pa.string()), "paddings": pa.list_(padding)}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    table = pa.Table.from_pylist([dict(row) for row in rows], schema)
    write_whole(folder / FILE, lambda file: parquet.write_table(table, file, compression="zstd"))


def read(folder: Path) -> list[dict[str, Any]]:
    """Empty for a run that stored no prompts. Raises UserError for a file that cannot be read."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / FILE
    if not path.exists():
        return []
    require_file(path)
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path, columns=list(COLUMNS)).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(str(cannot("read", path, error))) from error
    return rows
