"""Measurements: what a run can record beside tokens, rounds and times, each declared in one file.

A `Measurement` declares its option, the columns of its rows, what it does during a run (an `Instrument`), the row
checks, sums and metrics made from its columns, and what reports show of it. Ours are in `dflash_bench.measurements`,
others are entry points of the group `dflash_bench.measurements`. The packages that run, store, analyse and report know
them only by this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.metric import Metric
from dflash_bench.core.plugins import Registry
from dflash_bench.core.terminal import note

if TYPE_CHECKING:
    from dflash_bench.core.methods import Method
    from dflash_bench.core.types import Answer, Generation, Message

GROUP = "dflash_bench.measurements"
OWN = ("record", "headroom", "energy", "json_schema", "prefix_reuse", "text_kinds", "server_memory")
"""Our own, in the order of --help: modules of `dflash_bench.measurements`, which hold a `MEASUREMENT`."""
Columns = Mapping[str, Any]
"""Values by column, for one row."""


class Instrument:
    """Hooks of a measurement during a run; a subclass overrides only those that it needs.

    An instrument is opened once per run, before models are loaded. With workers, each job gets a copy.
    """

    def starts(self) -> Any:
        """Return the measurement's entry in `run.json`; None for none."""
        return None

    def identity(self) -> Any:
        """Return the part of the run's identity that decides its answers or rows; None for nothing."""
        return None

    def scored(self, suites: Sequence[Any]) -> Sequence[Any]:
        """Return the loaded suites of the run, with another scorer if this measurement has one."""
        return suites

    def connected(self, backend: Any) -> None:
        """Servers were reached, and nothing was asked yet."""

    def call_begins(self) -> None:
        """A backend is about to be called; this is not timed."""

    def call_ends(self, answers: Sequence[Generation]) -> None:
        """The call has ended, with its answers."""

    def answer(self, answer: Generation) -> Columns:
        """Return the columns of an answer of the last call."""
        return {}

    def judged(self, record: Answer, messages: Sequence[Message], backend: Any) -> Columns:
        """Return the columns of a judged answer to `messages`; nothing is timed any more."""
        return {}

    def ends(self, launched: Any) -> Any:
        """Return the entry in `run.json` once all is measured; None for none. `launched` are the run's own servers."""
        return None


@dataclass(frozen=True, slots=True)
class Stretches:
    """The stretches that an answer is divided into; a round belongs to the stretch in which it begins."""

    names: tuple[str, ...]
    of_rounds: Callable[[Any, Any, Any], Any]
    """Returns the index in `names` of each round, [rounds]. Its arguments: an Arrow batch of answers, the number of
    tokens of its answer before each round, and each round's row in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A measurement; whatever it lacks is empty. Functions import what is heavy when they are called."""

    name: str
    """Name of its option, and of its entry in `run.json`."""
    option: tuple[Any, Any] | None = None
    """Type and field of its option (`core.option.under`); without one it is part of every run."""
    opens: Callable[[Any, Sequence[Method]], Instrument]
    """Called with the options and drafting methods of a run that asks for it. Raises UserError if it cannot measure."""
    difference: tuple[str, str] | None = None
    """If runs whose identities differ in it are unlike: the kind of difference, and its words in `compare`."""
    entry: Any = None
    """Type of its entry in `run.json`, as pydantic checks it; None if it has none."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Arrow type by column of a row, such as "double" or "list of int16". Numbers are also columns of the frame."""
    checks: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Reason a row is invalid, and a function of `RowArrays` that returns the mask of invalid rows, [rows]."""
    of_rounds: Callable[[Any, Any], Mapping[str, Any]] | None = None
    """Returns values per round, [rounds], by column of the frame, which holds their sums; its arguments are an Arrow
    batch of answers and each round's row in it. NaN where a value is unknown."""
    stretches: Mapping[str, Stretches] = field(default_factory=dict)
    """Slices for `--by` that divide answers by their rounds."""
    frame: Callable[[Any, Any], Any] = lambda frame, info: frame
    """Returns the frame of a run with what only its `RunInfo` can add or take away."""
    sums: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Sums that metrics divide: a name, and a function of `AnswerColumns` of each answer's part, [answers]."""
    metrics: tuple[Metric, ...] = ()
    sections: Callable[[Any], Sequence[Any]] = lambda document: ()
    """Returns the sections of a run's report; empty if the run did not measure it."""
    plots: Mapping[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)
    """Plots: a name, with the caption and the function that draws it or raises NothingToPlotError."""
    findings: Mapping[str, tuple[Callable[[Any], Any], Any, Any]] = field(default_factory=dict)
    """Findings: a code, with the check (`CellContext` to `Observation` or None), the text and the remedy."""

    def is_asked(self, options: Any) -> bool:
        """Return whether a run with these options measures it."""
        return self.option is None or getattr(options, self.name) != self.option[1].default

    def is_in(self, info: Any) -> bool:
        """Return whether the run with this `RunInfo` has an entry of it."""
        return info.entry(self.name) is not None or info.identity.entry(self.name) is not None


def _measurement(name: str, entry: object) -> Measurement:
    if not isinstance(entry, Measurement) or entry.name != name:
        raise TypeError(f"it is no Measurement of the name {name}, but {entry!r:.60}")
    return entry


@cache
def measurements() -> tuple[Measurement, ...]:
    """Return all measurements, our own first. Without those of other packages if one is broken, which a note says."""
    own = {name: EntryPoint(name, f"{GROUP}.{name}:MEASUREMENT", GROUP) for name in OWN}
    registry = Registry(GROUP, own, _measurement)
    try:
        return (*registry.values(),)
    except UserError as error:
        note(f"note: {error}; measurements of other packages are left out")
        return tuple(registry[name] for name in OWN)


def opened(options: Any, methods: Sequence[Method]) -> dict[str, Instrument]:
    """Return the instruments of a run with these options, by name. Raises UserError if it cannot be measured."""
    return {one.name: one.opens(options, methods) for one in measurements() if one.is_asked(options)}


def entries(instruments: Mapping[str, Instrument], of: Callable[[Instrument], Any]) -> dict[str, Any]:
    """Return what a hook of the instruments gives, by name, without None."""
    return {name: entry for name, one in instruments.items() if (entry := of(one)) is not None}


@cache
def columns() -> dict[str, str]:
    """Return the Arrow type of each column of all measurements."""
    return {name: kind for one in measurements() for name, kind in one.columns.items()}


def number_columns() -> tuple[str, ...]:
    """Return the columns of all measurements that are numbers, not lists."""
    return tuple(name for name, kind in columns().items() if not kind.startswith("list"))
