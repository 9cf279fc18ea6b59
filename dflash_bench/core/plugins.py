"""Plug-ins: methods, server dialects, scorers and measurements that other packages declare as entry points.

A package declares, for instance, `[project.entry-points."dflash_bench.scorers"] longest = "my_package:longest"`. The
object is of the same type as the entries of our own tables. It is imported when its name is first looked up, so that a
broken plug-in affects only its users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from dflash_bench.core.errors import UserError

DRAFTERS, DIALECTS, SCORERS = "dflash_bench.drafters", "dflash_bench.dialects", "dflash_bench.scorers"
Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Our own entries first, then those of plug-ins, sorted by name. Listing names imports nothing."""

    def __init__(self, group: str, own: Mapping[str, Entry | EntryPoint], read: Callable[[str, object], Entry]) -> None:
        """`own` are entries, or entry points to load them from. `read` checks the object of an entry point, and raises
        TypeError if it is not a valid entry."""
        self.group, self.own, self._read = group, own, read
        self._loaded: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        """Return an entry. Raises KeyError for an unknown name, and UserError for a broken plug-in."""
        own = self.own.get(name)
        if own is not None and not isinstance(own, EntryPoint):
            return own
        if name not in self._loaded:
            loaded = self._load(found(self.group)[name]) if own is None else self._read(name, own.load())
            self._loaded[name] = loaded
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in found(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.own, *self.added])

    def __len__(self) -> int:
        return len(self.own) + len(self.added)

    @property
    def added(self) -> list[str]:
        """Return the names that plug-ins add. Raises UserError for a name that is taken."""
        names = sorted(found(self.group))
        for name in names:
            if name in self.own:
                raise _broken(found(self.group)[name], "dflash-bench has one of that name itself")
        return names

    def _load(self, entry: EntryPoint) -> Entry:
        try:
            loaded = self._read(entry.name, entry.load())
        # Third-party code may fail in any way.
        except Exception as error:
            raise _broken(entry, f"{type(error).__name__}: {error}") from error
        if entry.dist is not None:
            _used[entry.dist.name] = entry.dist.version
        return loaded


_used: dict[str, str] = {}


def used() -> dict[str, str]:
    """Return the version of each package whose plug-ins this process has loaded."""
    return dict(_used)


@cache
def found(group: str) -> dict[str, EntryPoint]:
    """Return the entry points by name. Raises UserError if two packages add the same name."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = entries.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise _broken(entry, f"{_package(other)} adds one of that name, too")
    return entries


def _broken(entry: EntryPoint, reason: str) -> UserError:
    reason = " ".join(reason.split())
    return UserError(
        f"the plug-in '{entry.name}' ({entry.group}) of {_package(entry)} cannot be used: {reason}; repair it, or "
        "uninstall its package"
    )


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
