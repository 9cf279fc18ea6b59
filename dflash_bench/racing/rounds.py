"""`recommend`: races methods under a user's loads, a run per round, and recommends which to serve with.

Every round is an ordinary run in a separate folder, set up and measured by `session.perform`; those of this process
share an engine. Their folders lie in one, beside `race.json`, which holds the request and the time spent. The same call
resumes an earlier call that was stopped: stored rounds are read, and an unfinished round is completed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.concurrency import own_s
from dflash_bench.analysis.findings import forbidding
from dflash_bench.analysis.gate.checks import FORBIDDEN
from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import json_of, write_json, write_text
from dflash_bench.core.methods import Method
from dflash_bench.core.option import check_options, options_of, to_json
from dflash_bench.measurements.server_memory import measured_memory
from dflash_bench.models import architecture, formats, loading, memory, mtp_heads, presets, targets
from dflash_bench.models.presets import MTP, Preset, parse_drafts
from dflash_bench.racing import recommendation as shown
from dflash_bench.racing.race import ContextFit, Load, Race, decisions, drifted, slices
from dflash_bench.racing.recommendation import Recommended
from dflash_bench.report import plots
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.run_info import FILE, read_info
from dflash_bench.results.store import RUNS
from dflash_bench.results.table import RunTable, read_run
from dflash_bench.runner import budget, launch, plan, session
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import Axis, RunPlan
from dflash_bench.runner.session import Progress
from dflash_bench.runner.setup import check_fits, model_note, open_local
from dflash_bench.servers import launch as servers_launch

if TYPE_CHECKING:
    from dflash_bench.engine.backend import LocalBackend
    from dflash_bench.runner.ray_workers import RayPool

NO_LIMIT = "999999s"
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Draft lengths to try where the user sets none, as fractions of the method's default."""
CUTS = ("0.5", "auto")
NOT_RACED = ("over", "rate", "record", "headroom", "skip", "one_at_a_time", "every_answer")
"""Options of a run that have no effect on a race; the command has no flags for them."""
STATE = "race.json"
"""File in the folder of a recommendation: its request, and the seconds spent by the processes that worked on it."""


def default_folder(request: RunRequest) -> Path:
    """Return the folder of a recommendation without `out`: the same for the same request, so that it resumes."""
    digest = hashlib.sha256(_canonical(request).encode()).hexdigest()[:8]
    return RUNS / f"recommend-{presets.name(request.name).rpartition('/')[2]}-{digest}"


def _canonical(request: RunRequest) -> str:
    """Return the request as text, without its time limit: with more time the same race continues."""
    return json.dumps(to_json(replace(request, budget=None)), sort_keys=True)


def decide(
    request: RunRequest,
    out: Path | None,
    tell: Callable[[str], object],
    progress: Callable[..., Any] | None = None,
) -> Recommended:
    """Recommend for a request, for `db.recommend` and the command, and write the result beside the runs."""
    folder = out or default_folder(request)
    made = _race(request, folder, tell, progress or Progress)
    picture: str | None = "frontier.svg"
    try:
        plots.write_frontier(shown.points(made.decisions), folder / "frontier.svg")
    except plots.NothingToPlotError:
        picture = None
    write_json(folder / "recommendation.json", made.data)
    write_text(folder / "recommendation.md", shown.page(made, picture))
    return made


def _race(
    request: RunRequest, out: Path, tell: Callable[[str], object], progress: Callable[..., Progress]
) -> Recommended:
    """Race the methods of a request under each of its loads, and decide."""
    budget_s = None if request.budget is None else budget.seconds(request.budget)
    asked, chosen, model = checked(request)
    labels = tuple(method.label for method in chosen)
    races = [Race(load, labels) for load in _loads(asked)]
    with ExitStack() as stack:
        race_runs = RaceRuns(asked, tuple(chosen), model, out, SharedEngine(chosen, stack), tell, progress)
        sizes = race_runs.num_prompts()
        if note := model_note(asked):
            tell(f"note: {note}")
            race_runs = replace(race_runs, request=replace(asked, model=asked.name))  # told once, not in each round
        clock = stack.enter_context(_clock(out, request, budget_s))
        held = race_runs.hold(races, sizes, clock)
    made = tuple(decisions(races))
    best = [method for method in chosen if method.label in {one.choice for one in made if one.verdict == "faster"}]
    programs, context_fits = {}, {}
    for method in [] if asked.servers else best:
        served = launch.server_flags(asked, model, method)
        programs[method.label] = [(one.program, one.words, one.first) for one in served]
        context_fits[method.label] = race_runs.context_fit(method.label)
    return Recommended(
        _model_of(asked, held[0]),
        _machine(held[0]),
        made,
        out,
        tuple(Path(table.name) for table in held),
        clock.spent_s(),
        programs,
        context_fits,
        measured_memory(held, [BASELINE, *programs]),
        labels if asked.servers else (),
    )


def _model_of(request: RunRequest, table: RunTable) -> str:
    """Return the model's name for people: for servers that run already, the name they report."""
    names = [entry.model for entry in table.info.identity.servers.values() if entry.model]
    return Path(names[0]).name if request.name == "server" and names else request.name


def _machine(table: RunTable) -> str:
    """Return the machine in a line, with the number of workers: those on one machine slow each other down."""
    machine, workers = table.info.environment.one_line(), table.info.identity.workers
    if workers is None:
        return machine
    return f"{machine}; {workers.number} workers, at most {workers.on_one_machine} on one machine"


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


def _frees_time(race: Race, per_method_s: float, left_s: float, is_any_held: bool) -> bool:
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


def _line(race: Race, name: str) -> str:
    first = next(iter(race.fastest_first()), None)
    speedup = race.speedup(first) if first else None
    is_ahead = speedup is not None and speedup.value > 1
    leads = f"{first} {speedup.value:.2f}x so far" if speedup and is_ahead else "none faster than plain decoding so far"
    return f"{name}: {race.num_prompts} prompts, {leads}; {len(race.measured)} of {len(race.methods)} methods still in"


# A run per round.


class SharedEngine:
    """The engine shared by several runs, of this process or of workers; the first run opens it with all methods."""

    def __init__(self, chosen: Sequence[Method], stack: ExitStack) -> None:
        self.methods, self.stack = tuple(chosen), stack
        self.backend: LocalBackend | RayPool | None = None

    def open(self, resolved: RunPlan, begins: Callable[[str], object]) -> LocalBackend | RayPool:
        if self.backend is None:
            everything = replace(resolved, methods=(methods.parse(BASELINE), *self.methods))
            self.backend = self._opened(everything, begins)
        return self.backend.only([method.label for method in resolved.methods])

    def _opened(self, everything: RunPlan, begins: Callable[[str], object]) -> LocalBackend | RayPool:
        if everything.request.workers is None:
            return open_local(everything, begins)
        from dflash_bench.runner.ray_workers import opened_workers

        return self.stack.enter_context(opened_workers(everything))


@dataclass(frozen=True, slots=True)
class RaceRuns:
    """The rounds of a request's races: their folder, and how they are measured."""

    request: RunRequest
    methods: tuple[Method, ...]
    model: Preset
    folder: Path
    engine: SharedEngine
    tell: Callable[[str], object]
    progress: Callable[..., Progress]

    def num_prompts(self) -> list[int]:
        """Return the number of prompts of each suite. Raises UserError for prompts that cannot be measured."""
        resolved = plan.plan_run(self.request, self.methods, self.model)
        return [len(loaded.prompts) for loaded in resolved.suites]

    def hold(self, races: Sequence[Race], sizes: Sequence[int], clock: _Clock) -> list[RunTable]:
        """Measure the rounds of all races, each round under every load before the next, and return the runs.

        `sizes` are the numbers of prompts per suite.
        """
        num_prompts, num_suites = max(sizes), len(sizes)
        held: list[RunTable] = []
        costs: dict[Load, float] = {}
        rounds = {race.load: slices(num_prompts, race.load.concurrency) for race in races}
        for number in range(max(map(len, rounds.values()))):
            going = [race for race in races if race.has_time and not race.is_decided]
            waiting = [race for race in going if number < len(rounds[race.load])]
            for at, race in enumerate(waiting):
                begin, end = rounds[race.load][number]
                name = f"{race.load.id}-{number + 1}"
                begun = self.begun(name)
                left_s = clock.left_s() / (len(waiting) - at)
                expected_s = _expected_s(costs, race.load) * (end - begin) * num_suites
                if not begun and not _frees_time(race, expected_s, left_s, bool(held)):
                    continue
                clock.earlier_s += _earlier_s(self.folder / name) if begun else 0.0
                begun_s, before = clock.spent_s(), race.num_prompts
                labels = [label for label in race.racing if label in begun] if begun else race.racing
                race.leave([label for label in race.racing if label not in labels])
                where = {"skip": begin or None, "limit": end, **_under(race.load, left_s)}
                tables, failed = self._round(name, labels, where)
                race.add(tables, failed)
                held += tables
                # Answers measured by an earlier process took at least their own time.
                took_s = max(clock.spent_s() - begun_s, sum(own_s(table.rows, is_open=False) for table in tables))
                costs[race.load] = took_s / max(race.num_prompts - before, 1) / (1 + len(labels))
                clock.store()
                self.tell(_line(race, name))
        return held

    def _round(
        self, name: str, labels: Sequence[str], where: Mapping[str, Any]
    ) -> tuple[list[RunTable], dict[str, str]]:
        """Measure a round and return the failures; methods whose servers do not fit together are measured singly."""
        if not self.request.asks_servers:
            return [self._steady(name, labels, where)], {}
        tables, failed = [], {}
        groups = [list(labels)]
        while groups:
            group = groups.pop(0)
            alone = name if len(group) == len(labels) else f"{name}-{labels.index(group[0]) + 1}"
            try:
                tables.append(self._steady(alone, group, where))
            except UserError as error:
                if len(group) > 1:
                    self.tell(f"note: {error}; each method is now measured by itself")
                    groups = [[label] for label in group]
                else:
                    failed[group[0]] = str(error)
        if not tables:
            raise UserError(next(iter(failed.values())))
        return tables, failed

    def _steady(self, name: str, labels: Sequence[str], where: Mapping[str, Any]) -> RunTable:
        """Measure a run, and repeat it if a speed-up is impossible because the machine's speed drifted."""
        table = _sound(self.run(name, labels, where))
        if found := drifted(table):
            self.tell(
                f"note: {name}: {found[0]} was sped up by more than its tokens per round, which is impossible: the "
                "machine's speed drifted. It is measured again"
            )
            table = _sound(self.run(f"{name}-again", labels, where))
        return table

    def context_fit(self, label: str) -> ContextFit:
        """Return the context lengths that fit with a method's draft, and without."""
        request = replace(self.request, methods=(label,), concurrency=())
        checked = check_fits(plan.plan_run(request, methods.chosen([label]), self.model))
        found = checked.memory or {}
        with_draft, without = (found.get(name) or 0 for name in ("largest_context", "largest_context_without_drafts"))
        return ContextFit(with_draft, without, checked.limit)

    def begun(self, name: str) -> tuple[str, ...]:
        """Return the methods of a run that an earlier process began; empty if there is none."""
        if not (self.folder / name / FILE).exists():
            return ()
        found = read_info(self.folder / name).plan
        return tuple(label for label in (found.methods if found else ()) if label != BASELINE)

    def run(self, name: str, labels: Sequence[str], where: Mapping[str, Any]) -> RunTable:
        """Measure these methods and plain decoding, or resume the run, and read it; `where` updates the request."""
        folder = self.folder / name
        begun = read_info(folder) if (folder / FILE).exists() else None
        if begun is None or begun.state != "complete":
            if begun is not None:
                # A time limit keeps prompts in the order in which they were drawn, so a resumed run keeps its limit.
                limit_s = where.get("budget", NO_LIMIT) if begun.to_json().get("options", {}).get("budget") else None
                where = {**where, "budget": limit_s}
            request = replace(self.request, methods=() if self.request.servers else tuple(labels), **where)
            known = ("plain", BASELINE, *labels)
            request = replace(request, servers=tuple(one for one in request.servers if one.partition("=")[0] in known))
            caller = session.Caller(self.tell, self.progress, opens=self.engine.open)
            session.perform(request, folder, begun is not None, caller)
        return read_run(folder, judging=True)


# Candidates: the methods that a request names or can use, each with shorter lengths and cuts.


def checked(request: RunRequest) -> tuple[RunRequest, list[Method], Preset]:
    """Return the request shared by all runs, without its time limit, with the methods to race and their model.

    Raises UserError for contradictions, and if no method is usable.
    """
    for name in NOT_RACED:
        if (spec := options_of(RunRequest)[name]).is_given(request):
            raise UserError(f"{spec.flag} has no effect on a race, which varies methods and loads; leave it out")
    settings = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    several = next((name for name in settings if len(getattr(request, name)) > 1), None)
    if several is not None or request.thinking == "both":
        flag = "--thinking" if several is None else options_of(RunRequest)[several].flag
        raise UserError(f"{flag}: a race is for one way of decoding; give one value")
    request = replace(request, budget=None)
    found = list(_named(request) if request.methods or request.servers else _usable(request))
    if not found:
        raise UserError(
            f"no method is usable: the model comes with no draft, and {request.launch} drafts by nothing else; give "
            "--method with --draft, or another --model"
        )
    of_all = request if request.servers else replace(request, methods=tuple(method.label for method in found))
    _, chosen, model = plan.methods_and_model(of_all)
    check_options(of_all)
    return of_all, [method for method in chosen if method.name != BASELINE], model


def _named(request: RunRequest) -> Iterator[Method]:
    """Yield the user's methods, with several lengths and cuts where they are not set."""
    chosen = plan.methods_of(request)
    model = plan.model_of(request, chosen)
    drafting = [method for method in chosen if method.name != BASELINE]
    for method in drafting:
        if method.kind.is_probe or not method.kind.lossless:
            why = "measures the engine" if method.kind.is_probe else "gives other answers than the model"
            raise UserError(f"--method {method.label} {why}, so it cannot be recommended; leave it out")
    yield from drafting if request.servers else _varied(request, drafting, model)


def _usable(request: RunRequest) -> Iterator[Method]:
    """Yield every method whose draft comes with the model or from the user, or that needs none."""
    own = parse_drafts(request.drafts)
    model = plan.model_of(replace(request, methods=(), drafts=()), [])
    drafts = [name for name in (*model.drafts, *own) if "@" not in name or name in own]
    model = replace(model, drafts={**model.drafts, **own})
    program = None if request.launch is None else servers_launch.program_named(request.launch)
    found = []
    for kind in methods.METHODS.values():
        needs_a_file = any(option.is_file for option in kind.options)
        if kind.name == BASELINE or kind.is_probe or not kind.lossless or needs_a_file:
            continue
        if program is not None and kind.name not in program.methods:
            continue
        keys = [name for name in drafts if name.partition("@")[0] == kind.weights]
        if kind.weights == MTP and not keys and _has_heads(model):
            keys = [MTP]
        labels = [kind.name + key.removeprefix(str(kind.weights)) for key in dict.fromkeys(keys)]
        labels = labels if kind.weights else [kind.name]
        if kind.name == "suffix" and request.workers is not None:
            labels = ["suffix:earlier=no"]  # a worker has only a part of the earlier answers
        found += [methods.parse(label) for label in labels]
    if found and _is_recurrent(model, request):
        found = [method for method in found if method.kind.shape != "tree"]
    yield from _varied(request, found, model)


def _has_heads(model: Preset) -> bool:
    try:
        mtp_heads.read(targets.find_target(model.target), headers_only=True)
    except UserError:
        return False
    return True


def _is_recurrent(model: Preset, request: RunRequest) -> bool:
    """Return whether the target has layers that cannot verify trees."""
    config = targets.config_of(targets.find_target(model.target), request.trust_remote_code)
    return bool(architecture.recurrent_layers(config))


def _varied(request: RunRequest, found: Sequence[Method], model: Preset) -> Iterator[Method]:
    """Yield each method unchanged, and with each shorter length and cut that the user has not set."""
    is_launched, counts = request.launch is not None, model.num_drafts or {}
    shape = targets.shape_of(targets.find_target(model.target))
    for method in found:
        config: Any = None
        if method.draft is not None and method.kind.weights in ("dflash", "eagle3", "p-eagle"):
            folder = loading.fetch(method.draft, model.reference(method.draft)).folder
            config = formats.read_checkpoint(folder, shape, headers_only=True)[1].config
        known = method if method.tag else method.with_count(counts.get(method.name))
        yield from _lengths(method, memory.round_of(known, config)[0])
        has_confidence = getattr(getattr(config, "correction", None), "has_confidence", False)
        if has_confidence and not is_launched and method.name == "dflash" and method.leaves_open("cut"):
            yield from plan.laid_out([method], [Axis("cut", CUTS, method.name)], False)[1:]


def _lengths(method: Method, longest: int) -> Iterator[Method]:
    yield method
    named = method.kind.count or ("nodes" if any(one.name == "nodes" for one in method.kind.options) else None)
    if named is None or not method.leaves_open(named):
        return
    numbers = dict.fromkeys(max(1, int(share * longest + 0.5)) for share in SHARES[1:])
    yield from (method.with_option(named, number) for number in numbers if number < longest)
