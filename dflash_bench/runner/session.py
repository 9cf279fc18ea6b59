"""A run from request to storage: plan, set up and measure it; and its progress display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dflash_bench.core import cluster, environment
from dflash_bench.core.errors import UserError
from dflash_bench.core.measurement import entries
from dflash_bench.core.methods import PLAIN
from dflash_bench.core.option import to_json
from dflash_bench.core.secrets import command
from dflash_bench.core.terminal import LINE_EVERY_S, Stages, progress_bar
from dflash_bench.core.types import Answer, Settings
from dflash_bench.models.chat import decoder_of
from dflash_bench.results import store
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.plan import BASELINE, DRAWN
from dflash_bench.results.run_info import FILE, read_info
from dflash_bench.runner import loop, work, workers
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan, methods_and_model, modes_of, plan_run, settings_of
from dflash_bench.runner.rules import is_concurrent, objectives
from dflash_bench.runner.setup import (
    add_judge,
    captured_of,
    check_fits,
    fallen_back,
    forwards_of,
    gpu_note,
    judge_report,
    kernels_note,
    late,
    model_note,
    open_local,
    open_servers,
    pass_of,
    reference,
)
from dflash_bench.runner.work import Backend, Described, JudgeReport, WorkPlan
from dflash_bench.runner.workers import WorkerPool
from dflash_bench.tasks import sandbox, scorers
from dflash_bench.tasks.suites import STYLES, Loaded, chats

if TYPE_CHECKING:
    from dflash_bench.servers.launch import LaunchedServers

# Progress: the cell, the share done, speed, acceptance, and the time left.
#
# It goes to stderr, so that stdout holds only the result.


@dataclass(slots=True)
class Tally:
    """Sums over the answers of a cell."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    num_accepted: int = 0

    def add(self, record: Answer) -> None:
        generation = record.generation
        if generation.error is not None:
            return
        self.seconds += generation.decode_s if generation.num_decoded else 0.0
        self.num_tokens += generation.num_decoded
        self.num_rounds += len(generation.accepted or ()) or generation.total_rounds or 0
        self.num_accepted += sum(generation.accepted or ()) or generation.total_accepted or 0

    @property
    def tokens_per_s(self) -> float:
        """0 while there is no answer."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        speed = f"{self.tokens_per_s:.1f} tok/s" if self.seconds else ""
        length = f"al {1 + self.num_accepted / self.num_rounds:.2f}" if self.num_rounds else ""
        return " ".join(filter(None, (speed, length)))


LONG_S = 1800.0
"""A run that is expected to take longer says so."""
SAMPLE_S = 30.0
"""The least time to expect that from."""
MOST_SHOWN = 4
"""Methods whose speed-ups fit in a line."""
BURST_S = 1.0
"""Answers that come this soon after the first, as do all that were decoded with it, tell nothing of the pace."""


class Progress(AbstractContextManager["Progress"]):
    """A bar in a terminal; elsewhere a line every few seconds. A note at the beginning of a long run."""

    def __init__(
        self,
        total: int,
        num_stored: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        left_s: Callable[[], float] | None = None,
        num_methods: int = 1,
        advice: str = "",
    ) -> None:
        """`left_s` returns the time left of a run with a time limit; `advice` tells how to shorten a long run."""
        self.num_methods, self.num_first, self.advice = num_methods, 0, advice
        self.total, self.num_stored, self.num_new = total, num_stored, 0
        self.stream, self.clock, self.left_s = stream or sys.stderr, clock, left_s
        self.begun = self.last_line = self.first = clock()
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.plain: dict[tuple[str, str], Tally] = {}
        """For each cell, the tally of plain decoding under its settings."""
        self.doing = ""
        self.bar = progress_bar(self.stream) if self.stream.isatty() else None
        if self.bar is not None:
            self.task = self.bar.add_task("", total=None if left_s else total, completed=num_stored, doing="", left="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begins(self, suite: str, doing: str) -> None:
        """Show the cell with its figures so far."""
        self.doing = f"{suite} · {doing} {self.tallies.get((suite, doing), '')}".rstrip()
        self._show()

    def measured(self, record: Answer, doing: str) -> None:
        self.num_new += 1
        self._announce()
        tally = self.tallies.setdefault((record.suite, doing), Tally())
        tally.add(record)
        if record.method != BASELINE and (record.suite, doing) not in self.plain:
            baseline = (record.suite, f"{PLAIN}{doing.removeprefix(record.method)}")
            if baseline in self.tallies:
                self.plain[record.suite, doing] = self.tallies[baseline]
        self.doing = f"{record.suite} · {doing} {tally}".rstrip()
        self._show()

    def _show(self) -> None:
        done = self.num_stored + self.num_new
        if self.bar is not None:
            doing = "\n".join([self.doing, *self._speedups()])
            self.bar.update(self.task, completed=done, doing=doing, left=f"answers {self._left()}", refresh=True)
        elif self.clock() - self.last_line >= LINE_EVERY_S:
            self.last_line = self.clock()
            of = "" if self.left_s else f"/{self.total}"
            lines = [f"{done}{of} answers, {self.doing}, {self._left() or 'time left unknown'}", *self._speedups()]
            self.stream.write("\n  ".join(lines) + "\n")
            self.stream.flush()

    def _announce(self) -> None:
        """Write once, early on, that the run will take long: by its pace after the first answer and the warm-up."""
        if self.num_new == 1:
            self.first = self.clock()
        sampled_s = self.clock() - self.first
        if sampled_s < BURST_S:
            self.num_first = self.num_new
        num_sampled = self.num_new - self.num_first
        if not self.advice or sampled_s < SAMPLE_S or num_sampled < self.num_methods:
            return
        left_s = sampled_s / num_sampled * (self.total - self.num_stored - self.num_new)
        if left_s > LONG_S:
            note = f"note: at the pace of its first answers, this run takes {_about(left_s)}; {self.advice}"
            self.advice = ""
            if self.bar is None:
                print(note, file=self.stream, flush=True)
            else:
                self.bar.console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _speedups(self) -> list[str]:
        """Return a line per suite with its speed-ups so far, without intervals: they still move."""
        by_suite: dict[str, list[tuple[float, str]]] = {}
        for (suite, doing), plain in self.plain.items():
            own = self.tallies[suite, doing]
            if plain.tokens_per_s and own.tokens_per_s and not plain.num_accepted:
                by_suite.setdefault(suite, []).append((own.tokens_per_s / plain.tokens_per_s, doing))
        return [f"{suite}: {_fastest(several)} so far" for suite, several in by_suite.items()]

    def _left(self) -> str:
        """Estimate the time left from this process's answers only: earlier processes may have had another speed."""
        if self.left_s is not None:
            return _in_words(max(self.left_s(), 0.0))
        if not self.num_new:
            return ""
        per_answer_s = (self.clock() - self.begun) / self.num_new
        return _in_words(per_answer_s * (self.total - self.num_stored - self.num_new))


def _fastest(speedups: Sequence[tuple[float, str]]) -> str:
    """Return the speed-ups in their order, of many methods the highest."""
    shown = speedups if len(speedups) <= MOST_SHOWN else sorted(speedups, reverse=True)[:MOST_SHOWN]
    left_out = len(speedups) - len(shown)
    return ", ".join(
        [*(f"{doing} {value:.2f}x" for value, doing in shown), *([f"{left_out} lower"] if left_out else [])]
    )


def _about(seconds: float) -> str:
    hours = seconds / 3600
    return f"about {hours:.0f} hours" if hours >= 1.5 else f"about {5 * round(seconds / 300)} minutes"


def _in_words(left_s: float) -> str:
    minutes, seconds = divmod(round(left_s), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"


# The command `run`: plan the run, open the backend, run, save.


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a run: where notes go, the progress display, and the command to record."""

    tell: Callable[[str], object]
    progress: Callable[..., Progress] = Progress
    words: str | None = None
    """The command to record; None: the command line."""
    stages: Stages | None = None
    opens: Callable[[RunPlan, Callable[[str], object]], Backend | WorkerPool] | None = None
    """Opens the engine, here or of workers, for callers that share it between runs."""

    def begins(self, doing: str) -> None:
        """Show a stage before the first answer."""
        if self.stages is not None:
            self.stages.begin(doing)

    def measures(self) -> None:
        """End the display of stages: a thread that draws would disturb what is timed."""
        if self.stages is not None:
            self.stages.end()


def perform(request: RunRequest, folder: Path, resume: bool, caller: Caller) -> None:
    """Run, or continue the run in `folder`. Raises UserError before anything is written."""
    try:
        _perform(request, folder, resume, caller)
    finally:
        caller.measures()


def _perform(request: RunRequest, folder: Path, resume: bool, caller: Caller) -> None:
    caller.begins("reading prompts")
    request, methods, model = methods_and_model(request)
    if request.workers is not None:
        cluster.require_ray("--workers")
    # Schedulers run the same command for the first attempt and for every retry.
    resume = resume and (request.shard is None or (folder / FILE).exists())
    # Check before anything slow, such as downloads and loading.
    started = None
    if resume:
        started = read_info(folder).identity.date
    else:
        store.check_new(folder)
    has_date = request.date is not None or started is not None
    if request.has_target or not request.asks_servers:
        request = replace(request, date=request.date or started or date.today().isoformat())
    resolved = replace(plan_run(request, methods, model), has_date=has_date)
    with ExitStack() as stack:
        if request.launch is None:
            _run(*_opened(resolved, stack, caller), folder, resume, caller)
        else:
            _run_launched(resolved, stack, folder, resume, caller)


def _run_launched(resolved: RunPlan, stack: ExitStack, folder: Path, resume: bool, caller: Caller) -> None:
    """Launch servers for the run, stop them with it, and note why a server died."""
    from dflash_bench.runner import launch

    launch.check(resolved.request, resolved.methods)
    resolved = launch.with_dtype(resolved)
    caller.measures()
    launched, addresses = launch.launch(resolved, folder, stack, caller.tell)
    backend = stack.enter_context(open_servers(resolved, addresses))
    resolved = check_fits(resolved)
    add_judge(backend, resolved)
    try:
        _run(resolved, backend, folder, resume, caller, launched)
    except UserError as error:
        if deaths := launched.died():
            raise UserError("; ".join([*deaths, str(error)])) from error
        raise
    for death in launched.died():
        caller.tell(f"note: {death}")


def _opened(resolved: RunPlan, stack: ExitStack, caller: Caller) -> tuple[RunPlan, Backend | WorkerPool]:
    """Open the backend after all checks that need no weights; the stack closes servers and workers."""
    if resolved.request.workers is not None:
        resolved = check_fits(resolved)
        if caller.opens is not None:
            return resolved, caller.opens(resolved, caller.begins)
        from dflash_bench.runner.ray_workers import opened_workers

        return resolved, stack.enter_context(opened_workers(resolved))
    if not resolved.request.asks_servers:
        resolved = check_fits(resolved)
        request = resolved.request
        for note in filter(None, (model_note(request), kernels_note(resolved), gpu_note(request))):
            caller.tell(f"note: {note}")
        caller.begins(f"loading {resolved.request.name}")
        return resolved, (caller.opens or open_local)(resolved, caller.begins)
    from dflash_bench.runner import served

    caller.begins("connecting")
    backend = stack.enter_context(open_servers(resolved, served.addresses_of(resolved.request)))
    if resolved.request.has_target:
        resolved = check_fits(resolved)
        caller.begins("loading the judge")
        add_judge(backend, resolved)
    return resolved, backend


def _run(
    resolved: RunPlan,
    backend: Backend | WorkerPool,
    folder: Path,
    resume: bool,
    caller: Caller,
    launched: LaunchedServers | None = None,
) -> None:
    """Run with an open backend; servers launched for the run leave their logs in its folder."""
    request, model, tell = resolved.request, resolved.model, caller.tell
    settings = settings_of(request, modes_of(request, model, backend.has_thinking))
    backend.check_chats([chat for loaded in resolved.suites for chat in chats(loaded)], settings)
    plan = work_plan(resolved, settings)
    if not request.asks_servers:
        caller.begins("timing forward passes")
    info = _info(resolved, plan, backend, caller)
    pins = [
        f"{part} is not pinned: it is {reference(resolved, part)} now, and another one when the hub's changes"
        for part in resolved.unpinned
    ]
    notes = [*(note for loaded in resolved.suites for note in loaded.notes), *resolved.contexts.notes, *pins]
    if not resolved.has_template:
        notes.append("the target has no chat template: prompts are asked as plain text, one message per line")
    for note in [*notes, *fallen_back(info["identity"])]:
        tell(f"note: {note}")
    if request.compile is not None:
        tell("note: passes are compiled before they are timed, which takes up to half a minute each the first time")
    if resume and request.budget is not None and read_info(folder).identity.order != DRAWN:
        raise UserError(f"{folder} was started without --for; leave it out to finish it, or choose another --out")
    with (store.resume if resume else store.create)(folder, info) as run:
        caller.measures()
        if launched is not None:
            launched.keep_logs(folder)
        run.keep_prompts(work.prompt_rows(plan))
        if not request.asks_servers:
            run.decode = decoder_of(model.target, request.trust_remote_code)
        at_end = _execute(plan, backend, run, caller, request, resume)
        judges = backend.judge_report() if isinstance(backend, WorkerPool) else judge_report(backend)
        at_end |= entries(plan.instruments, lambda one: one.ends(launched))
        run.mark_finished(at_end | _judges_report(judges, run, tell))
    for note in at_end.get("client_lag", ()):
        tell(f"note: {note}")


def work_plan(resolved: RunPlan, settings: Sequence[Settings]) -> WorkPlan:
    """Return what is to be measured under these settings."""
    labels = tuple(method.label for method in resolved.methods)
    repeats, paddings = resolved.request.repeats, resolved.contexts.paddings
    return WorkPlan(
        resolved.suites, labels, repeats, tuple(settings), resolved.audit, resolved.isolation, paddings,
        resolved.instruments, resolved.shard,
    )  # fmt: skip


def _execute(
    plan: WorkPlan,
    backend: Backend | WorkerPool,
    run: store.RunStore,
    caller: Caller,
    request: RunRequest,
    resume: bool,
) -> dict[str, Any]:
    """Run all prompts, or those there is time for. Return what `run.json` stores at the end."""
    from dflash_bench.runner import budget

    at_end: dict[str, Any] = {}
    budget_s = None if request.budget is None else budget.seconds(request.budget)
    chooser = None if budget_s is None else budget.PromptChooser(plan, run, budget_s)
    with _progress(plan, run, caller, request, resume, budget_s) as progress:
        if isinstance(backend, WorkerPool):
            at_end["captures"] = workers.execute(plan, backend, run, progress, chooser)
        else:
            loop.execute(plan, backend, run, progress, None if chooser is None else budget.items(chooser))
            at_end |= {"captures": captured_of(backend)} | pass_of(backend)
    if budget_s is not None:
        at_end["measured"] = budget.measured(plan, run)
        for suite in [suite for suite, number in at_end["measured"].items() if not number]:
            caller.tell(f"note: there was no time for {suite}; raise --for")
    if request.asks_servers and not isinstance(backend, WorkerPool):
        at_end["client_lag"] = late(backend)
    return at_end


def _progress(
    plan: WorkPlan, run: store.RunStore, caller: Caller, request: RunRequest, resume: bool, budget_s: float | None
) -> Progress:
    """Return the progress of a run, with a time limit or without."""
    if budget_s is not None:
        end_s = run.seconds() + budget_s - run.spent_s
        return caller.progress(plan.num_generations, len(run.stored), left_s=lambda: end_s - run.seconds())
    advice = "--for 30m measures what fits into 30 minutes"
    if is_concurrent(request) or request.rate or request.workers is not None:
        advice = "--limit N measures N prompts of each suite"
    return caller.progress(
        plan.num_generations, len(run.stored), num_methods=len(plan.methods), advice="" if resume else advice
    )


def _judges_report(judges: JudgeReport, run: store.RunStore, tell: Callable[[str], object]) -> dict[str, Any]:
    """Return the judges' reports as `run.json` stores them.

    Raises UserError, and marks the run as spoiled, if weights shared with the engine were changed.
    """
    if judges.changed is not None:
        run.mark_spoiled(f"{judges.changed}, which the judge shares with the engine, was changed while it was measured")
        raise UserError(
            f"{judges.changed} changed during the run, and the judge reads the same weights, so no answer "
            "can be verified; run again"
        )
    for what, number in judges.objections.items():
        tell(f"note: the judge objected {number} times: {what}")
    return {"objections": dict(judges.objections)}


def _info(resolved: RunPlan, plan: WorkPlan, backend: Backend | WorkerPool, caller: Caller) -> dict[str, Any]:
    """Return the content of `run.json`."""
    forwards: Mapping[str, Any] | None = None
    if isinstance(backend, WorkerPool):
        machine, forwards = backend.environment, backend.forwards
    else:
        machine = environment.describe()
        forwards = None if resolved.request.asks_servers else forwards_of(backend)
    return {
        "identity": identity_of(resolved, plan, backend),
        "options": to_json(resolved.request),
        "environment": machine,
        "command": caller.words or command(sys.argv[1:]),
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "plan": work.to_store(plan),
        "sandbox": sandbox.describe(resolved.isolation) if resolved.has_code else None,
        # Every process that works on the run measures these again, so they are not part of the identity.
        "forwards": forwards,
        "memory": resolved.memory,
        "contexts": resolved.contexts.about,
        **({"left_out": left_out} if (left_out := resolved.contexts.left_out) else {}),
        **({"boot": environment.boot_id()} if resolved.request.shard else {}),
        **entries(plan.instruments, lambda one: one.starts()),
    }


def identity_of(resolved: RunPlan, plan: WorkPlan, backend: Described) -> dict[str, Any]:
    """Return everything that decides the answers: a run is resumed only with the same identity."""
    return {
        "model": resolved.request.name,
        "suites": {loaded.suite.name: _identity_of_suite(loaded, resolved) for loaded in resolved.suites},
        "max_new_tokens": resolved.max_new_tokens,
        "settings": settings_to_json(plan.settings),
        "seed": resolved.request.seed or 0,
        "repeats": plan.repeats,
        "audit": plan.audit,
        "code": sandbox.how_run(resolved.isolation) if resolved.has_code else None,
        **({"date": resolved.date} if resolved.date else {}),
        **({"order": DRAWN} if resolved.request.budget else {}),
        **({"shard": work.shard_to_store(plan)} if resolved.request.shard else {}),
        **({"unpinned": list(resolved.unpinned)} if resolved.unpinned else {}),
        **entries(plan.instruments, lambda one: one.identity()),
        **({"slo": objectives(resolved.request.slo)} if resolved.request.slo else {}),
        **backend.describe(),
    }


def _identity_of_suite(loaded: Loaded, resolved: RunPlan) -> dict[str, Any]:
    suite = loaded.suite
    hashes = resolved.contexts.sha256.get(suite.name)
    return {
        "version": suite.version,
        "source": loaded.source,
        "sha256": loaded.sha256,
        **({"revision": loaded.revision} if loaded.revision else {}),
        "prompts": len(loaded.prompts),
        "scorer": suite.scorer,
        **({"style": suite.style} if suite.style != STYLES[0] else {}),
        **({"unscored": list(loaded.unscored)} if loaded.unscored else {}),
        **({"metric": metric} if (metric := scorers.origin(suite.scorer)) else {}),
        **({"contexts": hashes} if hashes else {}),
        **({"rendered": dict(resolved.rendered[suite.name])} if suite.name in resolved.rendered else {}),
    }
