"""One `run` command from its options to its rows: resolve the request, open the backend, run, save."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_bench import environment
from dflash_bench.errors import UserError
from dflash_bench.models.reading_texts import decoder_of
from dflash_bench.records import Generation, Settings
from dflash_bench.results import store
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.run_json import read_info
from dflash_bench.run import budget, items, pooling, remote, runner
from dflash_bench.run.canaries import Canaries, Canary, silent, together
from dflash_bench.run.contexts import Contexts
from dflash_bench.run.items import Backend, Described, Plan, Witnessed
from dflash_bench.run.opening import (
    add_judge,
    captured_of,
    fallen_back,
    forwards_of,
    late,
    open_local,
    open_servers,
    pass_of,
    witnessed,
)
from dflash_bench.run.option import to_json
from dflash_bench.run.pooling import Pool
from dflash_bench.run.preparing import Prepared, prepare
from dflash_bench.run.progress import Progress
from dflash_bench.run.ray_pool import opened_workers, require_ray
from dflash_bench.run.request import Request, objectives
from dflash_bench.run.resolving import Resolved, methods_and_model, modes_of, resolve, settings_of
from dflash_bench.secrets import command
from dflash_bench.tasks import sandbox
from dflash_bench.tasks.suites import Loaded, chats


@dataclass(frozen=True, slots=True)
class Caller:
    """Who wants a run: where notes go, what shows how far it is, and what it was asked for with, in words."""

    tell: Callable[[str], object]
    progress: Callable[..., Progress] = Progress
    words: str | None = None
    """None: the command line."""


def perform(
    request: Request,
    folder: Path,
    resume: bool,
    tell: Callable[[str], object],
    progress: Callable[..., Progress] = Progress,
    words: str | None = None,
) -> None:
    """Run or continue, into `folder`, for a `Caller` of these parts. Raises UserError before anything is written."""
    caller = Caller(tell, progress, words)
    request, methods, model = methods_and_model(request)
    if request.workers is not None:
        require_ray()
    # Before what is slow: a download, and the models.
    (store.check_resumable if resume else store.check_new)(folder)
    resolved = resolve(request, methods, model)
    with ExitStack() as stack:
        if request.launch is None:
            prepared, backend = _opened(resolved, stack)
            _run(resolved, prepared, backend, folder, resume, caller)
        else:
            _run_launched(resolved, stack, folder, resume, caller)


def _run_launched(resolved: Resolved, stack: ExitStack, folder: Path, resume: bool, caller: Caller) -> None:
    """Servers of this run are stopped with it, and one that dies says why."""
    from dflash_bench.run import launching

    launching.check(resolved.request, resolved.methods)
    resolved = launching.with_dtype(resolved)
    launched, addresses = launching.launch(resolved, folder, stack, caller.tell)
    backend = stack.enter_context(open_servers(resolved, addresses))
    prepared = prepare(resolved.judging)
    add_judge(backend, prepared.pinned(resolved))
    try:
        _run(resolved, prepared, backend, folder, resume, caller, lambda: launching.keep_logs(launched, folder))
    except UserError as error:
        if deaths := launched.died():
            raise UserError("; ".join([*deaths, str(error)])) from error
        raise
    for death in launched.died():
        caller.tell(f"note: {death}")


def _opened(resolved: Resolved, stack: ExitStack) -> tuple[Prepared, Backend | Pool]:
    """What can be found out cheaply comes before weights are loaded; servers and workers are left with the stack."""
    if resolved.request.workers is not None:
        prepared = prepare(resolved)
        return prepared, stack.enter_context(opened_workers(prepared.pinned(resolved)))
    if not resolved.request.asks_servers:
        prepared = prepare(resolved)
        return prepared, open_local(prepared.pinned(resolved))
    backend = stack.enter_context(open_servers(resolved, remote.addresses_of(resolved.request)))
    if not resolved.request.has_target:
        return Prepared(Contexts(0, 0), None), backend
    prepared = prepare(resolved.judging)
    add_judge(backend, prepared.pinned(resolved))
    return prepared, backend


def _run(
    resolved: Resolved,
    prepared: Prepared,
    backend: Backend | Pool,
    folder: Path,
    resume: bool,
    caller: Caller,
    begun: Callable[[], object] = lambda: None,
) -> None:
    """`begun` is called when the run's folder is there."""
    request, model, tell = resolved.request, resolved.model, caller.tell
    settings = settings_of(request, modes_of(request, model, backend.has_thinking))
    backend.check_chats([chat for loaded in resolved.suites for chat in chats(loaded)], settings)
    plan = _plan(resolved, settings, prepared)
    info = _info(resolved, plan, backend, prepared, caller)
    pins = [
        f"{part} is not pinned: it is {prepared.commits[part]} now, and another one when the hub's changes"
        for part in prepared.unpinned(resolved)
    ]
    notes = [*(note for loaded in resolved.suites for note in loaded.notes), *prepared.contexts.notes, *pins]
    for note in [*notes, *fallen_back(info["identity"])]:
        tell(f"note: {note}")
    if request.compile is not None:
        tell("note: passes are compiled before they are timed, which takes up to half a minute each the first time")
    if resume and request.budget is not None:
        _refuse_other_order(read_info(folder), info["plan"], folder)
    with (store.resume if resume else store.create)(folder, info) as run:
        begun()
        run.keep_prompts(items.asked_of(plan))
        if not request.asks_servers:
            run.decode = decoder_of(model.target, request.trust_remote_code)
        if isinstance(backend, Pool):
            with caller.progress(plan.num_generations, len(run.stored)) as progress:
                captured, tried = pooling.execute(plan, backend, run, progress)
            heard = _heard(backend.witnessed(), run, tell)
            run.mark_finished({"captures": captured, **heard, **_tried(run, Canaries(), tell, tried)})
            return
        canaries = Canaries()
        if request.budget is None:
            with caller.progress(plan.num_generations, len(run.stored)) as progress:
                runner.execute(plan, backend, run, progress, canaries=canaries)
            heard = _heard(witnessed(backend), run, tell)
            at_end = {"client_lag": late(backend)} if request.asks_servers else _at_end(backend)
            run.mark_finished(at_end | heard | _tried(run, canaries, tell))
        else:
            _execute_within(budget.seconds(request.budget), plan, backend, run, canaries, caller)
    for note in late(backend) if request.asks_servers else ():
        tell(f"note: {note}")


def _plan(resolved: Resolved, settings: Sequence[Settings], prepared: Prepared) -> Plan:
    labels = tuple(method.label for method in resolved.methods)
    repeats, paddings = resolved.request.repeats, prepared.contexts.paddings
    return Plan(resolved.suites, labels, repeats, tuple(settings), resolved.audit, resolved.cage, paddings)


def _refuse_other_order(stored: Mapping[str, Any], plan: Mapping[str, Any], folder: Path) -> None:
    """What was measured without --for is in the order of the rows, of which the first ones are no fair draw."""
    then, now = stored.get("plan", {}).get("prompts", {}), plan["prompts"]
    if any(
        then[suite] != now[suite] and sorted(then[suite]) == sorted(now[suite]) for suite in then.keys() & now.keys()
    ):
        raise UserError(f"{folder} was started without --for; leave it out to finish it, or choose another --out")


def _execute_within(
    budget_s: float,
    plan: Plan,
    backend: Backend,
    run: store.Run,
    canaries: Canaries,
    caller: Caller,
) -> None:
    """What there is time for; the run then holds just that."""
    end_s = run.seconds() + budget_s - run.spent_s
    with caller.progress(plan.num_generations, len(run.stored), left_s=lambda: end_s - run.seconds()) as progress:
        runner.execute(plan, backend, run, progress, budget.items(plan, run, budget_s), canaries=canaries)
    counts = budget.measured(plan, run)
    for suite in [suite for suite, number in counts.items() if not number]:
        caller.tell(f"note: there was no time for {suite}; raise --for")
    heard = _heard(witnessed(backend), run, caller.tell)
    run.mark_finished({"measured": counts, **_at_end(backend), **heard, **_tried(run, canaries, caller.tell)})


def _heard(said: Witnessed, run: store.Run, tell: Callable[[str], object]) -> dict[str, Any]:
    """What `run.json` keeps of what judges said. Raises UserError, after which nobody reads the run, where the weights
    that they shared with the engine were changed."""
    if said.changed is not None:
        run.mark_spoiled(f"{said.changed}, which the judge shares with the engine, was changed while it was measured")
        raise UserError(
            f"{said.changed} was changed while the run went on, and the judge reads the same weights; so nothing "
            "says what the answers are worth; run again"
        )
    for what, number in said.objections.items():
        tell(f"note: the judge objected {number} times: {what}")
    return {"objections": dict(said.objections)}


def _tried(
    run: store.Run, canaries: Canaries, tell: Callable[[str], object], of_workers: Sequence[Sequence[Canary]] = ()
) -> dict[str, Any]:
    """What `run.json` keeps of spoiled answers, with what it holds of earlier processes."""
    denied = None if run.decode is None else run.why_wrong
    readable = (record for record in run.stored.values() if _has_an_order(record.generation))
    canaries.read(next(readable, None), denied)
    outcomes = together(read_info(run.folder).get("canaries", ()), [*of_workers, canaries.outcomes()])
    if witnesses := silent(outcomes):
        tell(
            f"note: this run proves nothing: spoiled copies of its answers passed the {' and the '.join(witnesses)}, "
            "so sound ones would, too"
        )
    return {"canaries": outcomes}


def _has_an_order(said: Generation) -> bool:
    return said.error is None and bool(said.token_ids) and said.text != said.text[::-1]


def _at_end(backend: Backend) -> dict[str, Any]:
    return {"captures": captured_of(backend), **pass_of(backend)}


def _info(
    resolved: Resolved, plan: Plan, backend: Backend | Pool, prepared: Prepared, caller: Caller
) -> dict[str, Any]:
    """What `run.json` holds."""
    forwards: Mapping[str, Any] | None = None
    if isinstance(backend, Pool):
        machine, forwards = backend.environment, backend.forwards
    else:
        machine = environment.describe()
        forwards = None if resolved.request.asks_servers else forwards_of(backend)
    return {
        "identity": _identity(resolved, plan, backend, prepared),
        "options": to_json(resolved.request),
        "environment": machine,
        "command": caller.words or command(sys.argv[1:]),
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "plan": items.to_store(plan),
        "sandbox": sandbox.describe(resolved.cage) if resolved.has_code else None,
        # Measured anew by each process that works on the run, and so no part of what they must have in common.
        "forwards": forwards,
        "memory": prepared.memory,
        "contexts": prepared.contexts.about,
    }


def _identity(resolved: Resolved, plan: Plan, backend: Described, prepared: Prepared) -> dict[str, Any]:
    """What decides the answers: a run is continued only under the same."""
    return {
        "model": resolved.request.name,
        "suites": {loaded.suite.name: _identity_of_suite(loaded, prepared) for loaded in resolved.suites},
        "max_new_tokens": resolved.max_new_tokens,
        "settings": settings_to_json(plan.settings),
        "seed": resolved.request.seed or 0,
        "repeats": plan.repeats,
        "audit": plan.audit,
        "code": sandbox.how_run(resolved.cage) if resolved.has_code else None,
        **({"unpinned": unpinned} if (unpinned := prepared.unpinned(resolved)) else {}),
        **({"slo": objectives(resolved.request.slo)} if resolved.request.slo else {}),
        **backend.describe(),
    }


def _identity_of_suite(loaded: Loaded, prepared: Prepared) -> dict[str, Any]:
    suite = loaded.suite
    hashes = prepared.contexts.sha256.get(suite.name)
    return {
        "version": suite.version,
        "source": loaded.source,
        "sha256": loaded.sha256,
        "prompts": len(loaded.prompts),
        "scorer": suite.scorer,
        **({"contexts": hashes} if hashes else {}),
    }
