"""Files that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from dflash_bench.errors import UserError


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Written beside its place, synced, and renamed into it. Raises UserError where that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:  # after an interrupt, too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def cannot(do: str, path: Path, error: BaseException) -> UserError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"cannot {do} {path}: {reason}")
