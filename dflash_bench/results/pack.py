"""A pack is a finished run in a single file for submission, with rows, plan and environment, but no prompts.

It is a zip file with `pack.json`, which lists the SHA-256 of every other member. Packs are untrusted: names, sizes and
hashes are checked before the run is read.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, require_file, whole_folder, write_whole
from dflash_bench.core.types import SCHEMA_VERSION
from dflash_bench.results import parts, run_info
from dflash_bench.results.run_info import SCHEMA, read_info, refuse_other_schema
from dflash_bench.results.table import read_run

LIST = "pack.json"
MEMBER = re.compile(r"run\.json|parts\.sha256|part-[0-9]+(-[0-9]+)?\.parquet")
MOST_MEMBERS, MOST_BYTES, MOST_JSON_BYTES = 10_000, 4 << 30, 64 << 20
"""Limits far above any real run, against zip bombs: of members, of all bytes, also unpacked by Parquet, and of a JSON
file's bytes."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_CHUNK = 1 << 20
_OLDEST = (1980, 1, 1, 0, 0, 0)
"""A fixed timestamp, so that packs are reproducible."""


def write(run: Path, out: Path) -> int:
    """Write a finished run as a pack. Return its size in bytes.

    Raises UserError for a run that fails its checks, and for a shard, of which `accept` knows no plan.
    """
    info = read_info(run)
    if (shard := info.identity.shard) is not None:
        raise UserError(f"{run} is shard {shard.number}/{shard.of} of a run; merge all shards, and submit the whole")
    if info.state != "complete":
        raise UserError(f"{run} is not finished; finish it with --resume")
    read_run(run)
    members = [run / run_info.FILE, run / parts.CHECKSUMS, *parts.of(run)]
    listed = {path.name: files.sha256_of(path) for path in members}
    try:
        write_whole(out, lambda file: _write(file, members, {SCHEMA: SCHEMA_VERSION, "files": listed}))
        return out.stat().st_size
    except OSError as error:
        raise io_error("write", out, error) from error


def _write(file: IO[bytes], members: list[Path], about: dict[str, Any]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(LIST, _OLDEST), files.json_text(about), zipfile.ZIP_DEFLATED)
        for path in members:
            archive.writestr(zipfile.ZipInfo(path.name, _OLDEST), path.read_bytes(), zipfile.ZIP_DEFLATED)


def sha256_of(pack: Path) -> str:
    """Return the hash that identifies a pack. Raises UserError if it cannot be read."""
    require_file(pack)
    try:
        return files.sha256_of(pack)
    except OSError as error:
        raise io_error("read", pack, error) from error


def unpack(pack: Path, into: Path) -> None:
    """Extract the run to the new folder `into`. Raises UserError if the file is not a complete pack."""
    require_file(pack)
    try:
        with zipfile.ZipFile(pack) as archive, whole_folder(into) as folder:
            listed = _listed(pack, archive)
            for name, hash_ in listed.items():
                _extract(pack, archive, name, hash_, folder / name)
            _refuse_bombs(pack, parts.of(folder))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {pack}: not a pack of 'dflash-bench submit' ({error})") from error
    except OSError as error:
        raise io_error("read", pack, error) from error


def _refuse_bombs(pack: Path, paths: Sequence[Path]) -> None:
    """Raise UserError if the parts would unpack to more than `MOST_BYTES` in memory."""
    if sum(parts.num_bytes(path, MOST_BYTES) for path in paths) > MOST_BYTES:
        raise UserError(f"the rows of {pack} would unpack to more than {MOST_BYTES >> 30} GiB")


def _listed(pack: Path, archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the hashes of the members, by name. Raises UserError for unexpected members."""
    members = archive.infolist()
    names = [member.filename for member in members]
    if LIST not in names:
        raise UserError(f"cannot read {pack}: not a pack of 'dflash-bench submit' (no {LIST})")
    if len(members) > MOST_MEMBERS or sum(member.file_size for member in members) > MOST_BYTES:
        raise UserError(f"{pack} would unpack to more than {MOST_BYTES >> 30} GiB or {MOST_MEMBERS:,} files")
    if any(member.file_size > MOST_JSON_BYTES for member in members if member.filename in (LIST, run_info.FILE)):
        raise UserError(f"{pack} has a JSON file of more than {MOST_JSON_BYTES >> 20} MiB")
    if any(member.compress_type not in METHODS for member in members):
        raise UserError(f"cannot read {pack}: not packed by 'dflash-bench submit' (another compression)")
    if odd := next((name for name in names if name != LIST and not MEMBER.fullmatch(name)), None):
        raise UserError(f"{pack} has an unexpected member {odd!r}")
    about: Any = files.parse_json(f"{pack}: {LIST}", archive.read(LIST).decode("utf-8", "replace"))
    listed = about.get("files") if isinstance(about, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(one, str) for one in listed.values()):
        raise UserError(f"{pack}: {LIST} is not as 'dflash-bench submit' writes it")
    refuse_other_schema(pack, about.get(SCHEMA))
    if sorted(names) != sorted([LIST, *listed]):
        raise UserError(f"{pack} does not hold the members that its {LIST} lists; pack the run again")
    return dict(listed)


def _extract(pack: Path, archive: zipfile.ZipFile, name: str, expected: str, path: Path) -> None:
    """Extract a member to a file. Raises UserError if its hash or size does not match."""
    found, size = sha256(), 0
    with archive.open(name) as member, path.open("wb") as file:
        while chunk := member.read(_CHUNK):
            size += len(chunk)
            if size > archive.getinfo(name).file_size:
                raise UserError(f"{pack}: {name} is longer than the pack says")
            found.update(chunk)
            file.write(chunk)
    if found.hexdigest() != expected:
        raise UserError(f"{pack}: {name} is not the file that was packed; pack the run again")
