"""Files that are either complete or absent, no matter when the process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from dflash_bench.errors import UserError
from dflash_bench.reading import require_output


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a temporary file beside `path`, sync it and rename it to `path`. Raises UserError if that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    require_output(path)
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:  # also after an interrupt
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Write a folder's entries to disk: only then does a rename in it survive a crash."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def cannot(do: str, path: Path, error: BaseException) -> UserError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"cannot {do} {path}: {reason}")
