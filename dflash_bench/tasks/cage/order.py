"""What the caller sends to a keeper: one program, and the cage and limits to run it under."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


class Order:
    """A plain class: importing `dataclasses` would make the keeper's start a third longer."""

    parent: int
    """Process id of the caller."""
    namespaces: bool
    landlock: bool
    seccomp: bool
    as_nobody: bool
    cpu_s: int
    wall_s: float
    memory_bytes: int
    file_bytes: int
    folder_bytes: int
    num_files: int
    num_open_files: int
    num_threads: int
    program: str
    asked: list[str] | None
    """The functions that the tests call; None in the order of the answer's program."""
    receiving: int
    sending: int
    """The ends of two pipes, whose others the keeper of the other program has."""

    def __init__(self, terms: Mapping[str, object]) -> None:
        vars(self).update(terms)


def readable() -> list[str]:
    """Folders that the program may read: the standard library, and the interpreter's and the system's libraries."""
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
    folders = (os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *libraries)
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]
