"""The runs of a race: its candidates, a run per round, and one engine for all runs of this process.

Every round is an ordinary run in a separate folder, set up and measured by `session.perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.core.option import check_options, options_of
from dflash_bench.models.presets import MTP, Preset, parse_drafts
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.run_info import FILE, read_info
from dflash_bench.results.table import RunTable, read_run
from dflash_bench.runner import plan, session
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import Axis, RunPlan
from dflash_bench.runner.session import Progress
from dflash_bench.runner.setup import PreparedRun, check_fits, open_local
from dflash_bench.servers import launch as servers_launch

if TYPE_CHECKING:
    from dflash_bench.engine.backend import LocalBackend

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Draft lengths to try where the user sets none, as fractions of the method's default."""
CUTS = ("0.5", "auto")
NO_LIMIT = "999999s"
NOT_RACED = ("over", "rate", "workers", "record", "headroom", "skip", "one_at_a_time", "every_answer")
"""Options of a run that have no effect on a race; the command has no flags for them."""


# Candidates.


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
        found += [methods.parse(label) for label in (labels if kind.weights else [kind.name])]
    if found and _is_recurrent(model, request):
        found = [method for method in found if method.kind.shape != "tree"]
    yield from _varied(request, found, model)


def _has_heads(model: Preset) -> bool:
    from dflash_bench.models import mtp_heads, targets

    try:
        mtp_heads.read(targets.find_target(model.target), headers_only=True)
    except UserError:
        return False
    return True


def _is_recurrent(model: Preset, request: RunRequest) -> bool:
    """Return whether the target has layers that cannot verify trees."""
    from dflash_bench.models import architecture, targets

    config = targets.config_of(targets.find_target(model.target), request.trust_remote_code)
    return bool(architecture.recurrent_layers(config))


def _varied(request: RunRequest, found: Sequence[Method], model: Preset) -> Iterator[Method]:
    """Yield each method unchanged, and with each shorter length and cut that the user has not set."""
    from dflash_bench.models import formats, loading, memory, targets

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


# A run per round.


class SharedEngine:
    """The engine shared by several runs in this process; the first run opens it with the methods of all."""

    def __init__(self, chosen: Sequence[Method]) -> None:
        self.methods = tuple(chosen)
        self.backend: LocalBackend | None = None

    def open(self, resolved: RunPlan, begins: Callable[[str], object]) -> LocalBackend:
        if self.backend is None:
            everything = replace(resolved, methods=(methods.parse(BASELINE), *self.methods))
            self.backend = open_local(everything, begins)
        return self.backend.only([method.label for method in resolved.methods])


@dataclass(frozen=True, slots=True)
class Course:
    """The runs of a race: their folder, and how they are measured."""

    request: RunRequest
    methods: tuple[Method, ...]
    model: Preset
    folder: Path
    engine: SharedEngine
    tell: Callable[[str], object]
    progress: Callable[..., Progress] = Progress

    def num_prompts(self) -> list[int]:
        """Return the number of prompts of each suite. Raises UserError for prompts that cannot be measured."""
        resolved = plan.plan_run(self.request, self.methods, self.model)
        return [len(loaded.prompts) for loaded in resolved.suites]

    def fits(self, label: str) -> PreparedRun:
        """Return the memory that a run of this method would take (`setup.check_fits`)."""
        request = replace(self.request, methods=(label,), concurrency=())
        chosen = methods.chosen([label])
        return check_fits(plan.plan_run(request, chosen, self.model))

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
