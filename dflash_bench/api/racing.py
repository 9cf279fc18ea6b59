"""`recommend`: races methods under a user's loads, and recommends which to serve with.

The races' runs lie in one folder, beside `race.json`, which holds the request and the time spent. The same call resumes
an earlier call that was stopped: stored rounds are read, and an unfinished round is completed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dflash_bench.analysis.concurrency import own_s
from dflash_bench.analysis.findings import forbidding
from dflash_bench.analysis.gate.checks import FORBIDDEN
from dflash_bench.analysis.metrics import summarise
from dflash_bench.analysis.race import (
    Decision,
    Load,
    Race,
    Recommendation,
    Room,
    decisions,
    drifted,
    server_rooms,
    slices,
)
from dflash_bench.api.measuring import Options, Words, progress_display, request_of
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import json_of, write_json, write_text
from dflash_bench.core.option import to_json
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.run_info import read_info
from dflash_bench.results.store import RUNS
from dflash_bench.results.table import RunTable, read_run

if TYPE_CHECKING:
    from dflash_bench.runner.config import RunRequest
    from dflash_bench.runner.race import Course

STATE = "race.json"
"""File in the folder of a recommendation: its request, and the seconds spent by the processes that worked on it."""


def default_folder(request: RunRequest) -> Path:
    """Return the folder of a recommendation without `out`: the same for the same request, so that it resumes."""
    from dflash_bench.models import presets

    digest = hashlib.sha256(_canonical(request).encode()).hexdigest()[:8]
    return RUNS / f"recommend-{presets.name(request.name).rpartition('/')[2]}-{digest}"


def _canonical(request: RunRequest) -> str:
    """Return the request as text, without its time limit: with more time the same race continues."""
    return json.dumps(to_json(replace(request, budget=None)), sort_keys=True)


@dataclass(frozen=True)
class Recommended:
    """Methods to serve a model with, load by load. `str` is the text of `dflash-bench recommend`, `data` its JSON."""

    found: Recommendation = field(repr=False)
    """For the command line; not part of the public API."""

    @property
    def folder(self) -> Path:
        """The races' runs, with recommendation.md, recommendation.json and frontier.svg."""
        return self.found.folder

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """A decision per load, each with `load` (concurrency, context), `choice` (a method, or "ar"), `speedup`
        (value, low, high) and `verdict`: faster, plain, unclear, too_few, drifted or no_time."""
        return self.found.decisions

    @property
    def flags(self) -> dict[str, dict[str, list[str]]]:
        """The server arguments by chosen method and by program."""
        return dict(self.data["flags"])

    @cached_property
    def data(self) -> dict[str, Any]:
        """The recommendation as codes and numbers, as `--json` prints it; intervals are [value, low, high]."""
        from dflash_bench.report import recommend as shown

        return shown.as_json(self.found)

    @cached_property
    def table(self) -> Any:
        """A tidy pandas DataFrame with a row per load and measured method, plain decoding ("ar") first.

        Columns: concurrency, context (tokens; 0: prompts as they are), method, verdict (leads, level, slower, ...),
        prompts, speedup, low, high (its 95 % interval, or NaN), al_pooled, tokens_per_s (of all answers together),
        ms_per_token (of a single answer).
        """
        import pandas as pd

        rows = [
            (
                one.load.concurrency, one.load.context, tried.method, tried.verdict, tried.num_prompts,
                *(getattr(tried.speedup, name, None) for name in ("value", "low", "high")),
                getattr(tried.length, "value", None), tried.tokens_per_s, tried.ms_per_token,
            ) for one in self.decisions for tried in one.standings
        ]  # fmt: skip
        numbers = ["speedup", "low", "high", "al_pooled", "tokens_per_s", "ms_per_token"]
        columns = ["concurrency", "context", "method", "verdict", "prompts", *numbers]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))

    def __str__(self) -> str:
        from dflash_bench.report import recommend as shown

        return shown.text(self.found)

    def _repr_html_(self) -> str:
        from dflash_bench.report.html import escape

        return f"<pre>{escape(str(self))}</pre>"


def recommend(
    *,
    suite: Words = (),
    methods: Words = (),
    model: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    tell: Callable[[str], object] = lambda _: None,
    **options: Unpack[Options],
) -> Recommended:
    """Race methods under your loads, and recommend which to serve with.

    The loads are `concurrency` and `context`, each a number or several; `budget` limits the time, such as "30m".
    `methods` are tried with several lengths unless they name one (default: all whose requirements are met). Other
    options are those of `dflash-bench recommend`. `out` is the folder (default: a folder in results/runs, the same for
    the same options); called again, it resumes where it was stopped. `tell` is called with notes and at each round's
    end.

    Raises UserError for options that a race does not support, for another request's folder, and if plain decoding
    fails. A method with wrong answers raises nothing: its verdict is wrong.
    """
    given = {"suite": suite, "methods": methods, "model": model, "limit": limit, **options}
    request = request_of(**{name: value for name, value in given.items() if value not in (None, ())})
    return decide(request, None if out is None else Path(out), tell, progress_display())


def decide(
    request: RunRequest,
    out: Path | None,
    tell: Callable[[str], object],
    progress: Callable[..., Any] | None = None,
) -> Recommended:
    """Recommend for a request, for `db.recommend` and the command, and write the result beside the runs."""
    from dflash_bench.report import plots
    from dflash_bench.report import recommend as shown

    folder = out or default_folder(request)
    made = Recommended(_race(request, folder, tell, progress))
    picture: str | None = "frontier.svg"
    try:
        plots.write_frontier(shown.points(made.decisions), folder / "frontier.svg")
    except plots.NothingToPlotError:
        picture = None
    write_json(folder / "recommendation.json", made.data)
    write_text(folder / "recommendation.md", shown.page(made.found, picture))
    return made


def _race(
    request: RunRequest,
    out: Path,
    tell: Callable[[str], object],
    progress: Callable[..., Any] | None = None,
) -> Recommendation:
    """Race the methods of a request under each of its loads, and decide."""
    from dflash_bench.runner import budget, launch, race
    from dflash_bench.runner.session import Progress

    budget_s = None if request.budget is None else budget.seconds(request.budget)
    asked, chosen, model = race.checked(request)
    engine = race.SharedEngine(chosen)
    course = race.Course(asked, tuple(chosen), model, out, engine, tell, progress or Progress)
    sizes = course.num_prompts()
    labels = tuple(method.label for method in chosen)
    with _clock(out, request, budget_s) as clock:
        races = [Race(load, labels) for load in _loads(asked)]
        held = _hold(course, races, sizes, clock)
    made = tuple(decisions(races))
    best = [method for method in chosen if method.label in {one.choice for one in made if one.verdict == "faster"}]
    flags, rooms = {}, {}
    for method in [] if asked.servers else best:
        flags[method.label] = [(one.program, one.words, one.first) for one in launch.server_flags(asked, model, method)]
        rooms[method.label] = _room(course, method.label)
    return Recommendation(
        _model_of(asked, held[0]), held[0].info.environment.one_line(), made, out,
        tuple(Path(table.name) for table in held),
        clock.spent_s(), flags, rooms, server_rooms(held, [BASELINE, *flags]), labels if asked.servers else (),
    )  # fmt: skip


def _model_of(request: RunRequest, table: RunTable) -> str:
    """Return the model's name for people: for servers that run already, the name they report."""
    names = [entry.model for entry in table.info.identity.servers.values() if entry.model]
    return Path(names[0]).name if request.name == "server" and names else request.name


def _loads(request: RunRequest) -> list[Load]:
    contexts = request.context or (None,)
    return sorted(Load(context or 0, beside) for context in contexts for beside in request.concurrency or (1,))


@dataclass(slots=True)
class _Clock:
    """The time spent, and the time left."""

    path: Path
    request: str
    earlier_s: float
    budget_s: float | None
    begun_s: float

    def spent_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.begun_s

    def left_s(self) -> float:
        return float("inf") if self.budget_s is None else self.budget_s - self.spent_s()

    def store(self) -> None:
        write_json(self.path, {"request": self.request, "spent_s": round(self.spent_s(), 1)})


@contextmanager
def _clock(out: Path, request: RunRequest, budget_s: float | None) -> Iterator[_Clock]:
    """Yield the clock, and store its time. Raises UserError for a folder that holds something else."""
    path, wanted = out / STATE, _canonical(request)
    known = json_of(path) if path.exists() else None
    if known is None and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} holds something else; choose another --out")
    if known is not None and (not isinstance(known, dict) or known.get("request") != wanted):
        raise UserError(f"{out} holds a recommendation for other options; repeat those, or choose another --out")
    spent_s = known.get("spent_s") if known else 0.0
    out.mkdir(parents=True, exist_ok=True)
    clock = _Clock(path, wanted, float(spent_s or 0.0), budget_s, time.monotonic())
    clock.store()
    try:
        yield clock
    finally:
        clock.store()


def _hold(course: Course, races: Sequence[Race], sizes: Sequence[int], clock: _Clock) -> list[RunTable]:
    """Measure the rounds of all races, each round under every load before the next, and return the runs.

    `sizes` are the numbers of prompts per suite.
    """
    num_prompts, num_suites = max(sizes), len(sizes)
    held: list[RunTable] = []
    costs: dict[Load, float] = {}
    rounds = {race.load: slices(num_prompts, race.load.concurrency) for race in races}
    for number in range(max(map(len, rounds.values()))):
        waiting = [race for race in races if number < len(rounds[race.load]) and race.has_time and not race.is_decided]
        for at, race in enumerate(waiting):
            begin, end = rounds[race.load][number]
            name = f"{race.load.id}-{number + 1}"
            begun = course.begun(name)
            left_s = clock.left_s() / (len(waiting) - at)
            expected_s = _expected_s(costs, race.load) * (end - begin) * num_suites
            if not begun and not _makes_room(race, expected_s, left_s, bool(held)):
                continue
            clock.earlier_s += _earlier_s(course.folder / name) if begun else 0.0
            begun_s, before = clock.spent_s(), race.num_prompts
            labels = [label for label in race.racing if label in begun] if begun else race.racing
            race.leave([label for label in race.racing if label not in labels])
            where = {"skip": begin or None, "limit": end, **_under(race.load, left_s)}
            tables, failed = _round(course, name, labels, where)
            race.add(tables, failed)
            held += tables
            # Answers measured by an earlier process took at least their own time.
            took_s = max(clock.spent_s() - begun_s, sum(own_s(table.rows, is_open=False) for table in tables))
            costs[race.load] = took_s / max(race.num_prompts - before, 1) / (1 + len(labels))
            clock.store()
            course.tell(_line(race, name))
    return held


def _expected_s(costs: Mapping[Load, float], load: Load) -> float:
    """Return the last seconds per method and prompt, or those at a lower concurrency (never less); 0 if unknown."""
    return next(
        (costs[known] for known in sorted(costs, reverse=True) if known <= load and known.context == load.context), 0.0
    )


def _under(load: Load, left_s: float) -> dict[str, Any]:
    """Return the options of a run under a load. At a concurrency of 1 the run itself ends when the time is up."""
    where: dict[str, Any] = {"concurrency": (load.concurrency,), "context": (load.context,) if load.context else ()}
    if load.concurrency == 1 and left_s < float("inf"):
        where["budget"] = f"{max(left_s, 0.001):.3f}s"
    return where


def _earlier_s(folder: Path) -> float:
    """Return the seconds of answers in a run that was stopped; a round's time is only stored when it has ended."""
    if read_info(folder).state == "complete":
        return 0.0
    try:
        return own_s(read_run(folder, allow=("unfinished",)).rows, is_open=False)
    except UserError:  # not one answer yet
        return 0.0


def _makes_room(race: Race, per_method_s: float, left_s: float, is_any_held: bool) -> bool:
    """Drop the slowest methods that no time is left for; return whether there is time for a round at all.

    `per_method_s` is the expected time of one method, 0 if unknown. The very first round is always measured.
    """
    if left_s <= 0 and is_any_held:
        race.has_time = False
    elif per_method_s and left_s < per_method_s * (1 + len(race.racing)):
        fitting = int(left_s / per_method_s) - 1
        race.has_time = fitting > 0
        if race.has_time:
            race.leave(race.fastest_first()[fitting:])
    return race.has_time


def _round(
    course: Course, name: str, labels: Sequence[str], where: Mapping[str, Any]
) -> tuple[list[RunTable], dict[str, str]]:
    """Measure a round and return the failures; methods whose servers do not fit together are measured one by one."""
    if not course.request.asks_servers:
        return [_steady(course, name, labels, where)], {}
    tables, failed = [], {}
    groups = [list(labels)]
    while groups:
        group = groups.pop(0)
        alone = name if len(group) == len(labels) else f"{name}-{labels.index(group[0]) + 1}"
        try:
            tables.append(_steady(course, alone, group, where))
        except UserError as error:
            if len(group) > 1:
                course.tell(f"note: {error}; each method is now measured by itself")
                groups = [[label] for label in group]
            else:
                failed[group[0]] = str(error)
    if not tables:
        raise UserError(next(iter(failed.values())))
    return tables, failed


def _steady(course: Course, name: str, labels: Sequence[str], where: Mapping[str, Any]) -> RunTable:
    """Measure a run, and repeat it if a speed-up is impossible because the machine's speed drifted."""
    table = _sound(course.run(name, labels, where))
    if found := drifted(table):
        course.tell(
            f"note: {name}: {found[0]} was sped up by more than its tokens per round, which is impossible: the "
            "machine's speed drifted. It is measured again"
        )
        table = _sound(course.run(f"{name}-again", labels, where))
    return table


def _sound(table: RunTable) -> RunTable:
    """Return the table. Raises UserError if plain decoding failed in every answer or is no baseline."""
    plain = table.rows[table.rows["method"] == BASELINE]
    if not len(plain) or plain["error"].notna().all():
        errors = plain["error"].dropna()
        raise UserError(f"plain decoding failed in {table.name}: {errors.iloc[0] if len(errors) else 'no answer'}")
    for seen in forbidding(table, summarise(table.rows, table.info.identity)):
        if seen.cell.method == BASELINE:
            raise UserError(f"{table.name}: {FORBIDDEN[seen.kind]}", "see the findings of 'dflash-bench report'")
    return table


def _room(course: Course, label: str) -> Room:
    prepared = course.fits(label)
    found = prepared.memory or {}
    with_draft, without = (found.get(name) or 0 for name in ("largest_context", "largest_context_without_drafts"))
    return Room(with_draft, without, prepared.limit)


def _line(race: Race, name: str) -> str:
    first = next(iter(race.fastest_first()), None)
    speedup = race.speedup(first) if first else None
    is_ahead = speedup is not None and speedup.value > 1
    leads = f"{first} {speedup.value:.2f}x so far" if speedup and is_ahead else "none faster than plain decoding so far"
    return f"{name}: {race.num_prompts} prompts, {leads}; {len(race.measured)} of {len(race.methods)} methods still in"
