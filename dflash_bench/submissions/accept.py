"""Verify a submitted pack: plan the run again and recompute a random sample of its answers on this machine."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from dflash_bench import __version__
from dflash_bench.core import environment
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import whole_folder
from dflash_bench.core.types import CODE_SCORERS, SCHEMA_VERSION, Answer, Generation, Settings
from dflash_bench.models.chat import decoder_of
from dflash_bench.models.presets import parse_drafts
from dflash_bench.results import pack as packs
from dflash_bench.results import parts, recheck, row_checks, store
from dflash_bench.results import plan as plans
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.recheck import CheckedPart, Recheck
from dflash_bench.results.run_info import ForwardTimes, RunInfo, SettingsEntry, as_json, read_info
from dflash_bench.results.table import RunTable, read_run
from dflash_bench.runner import work
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan, methods_and_model, modes_of, plan_run, settings_of
from dflash_bench.runner.requests import request_of
from dflash_bench.runner.session import identity_of, work_plan
from dflash_bench.runner.setup import check_fits, forwards_of, open_local
from dflash_bench.runner.work import WorkItem, WorkPlan
from dflash_bench.submissions import checks
from dflash_bench.submissions.checks import Redone
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers.base import Score

if TYPE_CHECKING:
    from dflash_bench.engine.backend import LocalBackend

OF_THE_RUNNER = frozenset(
    """
    servers dialect served_model api_key_env timeout env_proxy launch launch_with launch_args rate clients concurrency
    slo shard unsafe_code record headroom energy device device_map engine kernels graph compile tensor_parallel threads
    workers ray_address
    """.split()
)
"""Options that do not decide the tokens: device, servers, concurrency. Answers are recomputed one at a time."""
LEAST_DRAWN = 20
"""The minimum sample size: 5 % of a short run would be a single answer."""


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """Options of `accept`."""

    pack: Path
    share: float = 0.05
    """The share of answers to sample."""
    seed: int | None = None
    """The seed of the sample; None: a random one, which the submitter cannot predict."""
    by: str | None = None
    target: str | None = None
    """The target on this machine; None: the reference in the submitted run."""
    drafts: tuple[str, ...] = ()
    data: str | None = None
    prompts: Path | None = None
    trust_remote_code: bool = False


Tell = Callable[[str], object]
"""Reports progress."""


def accept(request: AcceptRequest, out: Path, tell: Tell) -> Recheck:
    """Verify a pack. Unless a check is refuted, write the run and the record to the new folder `out`.

    Raises UserError if the file is not a pack, or if the target, a draft or the prompts are not available here.
    """
    store.check_new(out)
    tell("reading the pack")
    hash_ = packs.sha256_of(request.pack)
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        packs.unpack(request.pack, run)
        info, (table, arithmetic) = read_info(run), _read(run)
        answers = [] if table is None else store.load(run)[1]
        chosen = _drawn(answers, request.share, f"{seed} {hash_}")
        here = None if table is None else Here.of(request, info, tell)
        compared = () if here is None or table is None else _compared(here, table, run, answers, chosen, tell)
        content = {
            "schema": SCHEMA_VERSION,
            "pack": hash_,
            "seed": seed,
            "num_drawn": len(chosen),
            "num_answers": len(answers),
            "by": request.by,
            "machine": environment.kind(environment.describe()),
            "date": datetime.now(UTC).date().isoformat(),
            "version": __version__,
            "findings": [arithmetic, *compared],
        }
        record = Recheck.model_validate(content)
        if record.is_accepted:
            with whole_folder(out) as folder:
                shutil.copytree(run, folder, dirs_exist_ok=True)
                recheck.write(folder, record)
    return record


def _read(run: Path) -> tuple[RunTable | None, CheckedPart]:
    """Load the run with the integrity checks of every reader; None if it fails them."""
    try:
        table = read_run(run)
    except UserError as error:
        what = str(error).replace(str(run), "the run")
        return None, CheckedPart(check="arithmetic", state="refuted", what=what)
    return table, CheckedPart(check="arithmetic", state="confirmed", what="all rows and sums agree")


def _drawn(answers: Sequence[Answer], share: float, seed: str) -> list[Answer]:
    """Sample a share of the answers that did not fail, at least `LEAST_DRAWN`."""
    good = sorted((one for one in answers if one.generation.error is None), key=lambda one: one.order)
    return Random(seed).sample(good, min(len(good), max(LEAST_DRAWN, ceil(share * len(good)))))


def _compared(
    here: Here, table: RunTable, run: Path, answers: Sequence[Answer], chosen: Sequence[Answer], tell: Tell
) -> Iterator[CheckedPart]:
    info = table.info
    then, now = (comparable(one, here.is_served) for one in (info.identity.to_json(), here.identity))
    stored = plans.recorded(info, str(run)).methods
    planned = {**work.to_store(here.plan), **({"methods": [*stored]} if here.is_served else {})}
    yield checks.same_plan(then, now, info.plan.to_json() if info.plan is not None else {}, planned)
    yield checks.same_models(then, now, here.is_served)
    yield here.texts(run)
    first = stored[0]
    plain = {_place(one): one.generation for one in answers if one.method == first}
    redone = [here.redone(one, plain, tell, f"{number} of {len(chosen)}") for number, one in enumerate(chosen, 1)]
    yield checks.tokens(redone)
    kind = environment.kind(info.environment.to_json())
    own = environment.kind(environment.describe())
    yield checks.counts(redone, kind == own)
    tell("scoring")
    yield checks.scores(list(here.scored(answers)))
    tell("timing forward passes")
    yield checks.times(table, kind, here.forwards(), own)


def comparable(identity: Mapping[str, Any], is_served: bool) -> dict[str, Any]:
    """Normalise an identity for comparison: concurrency 1 and, for servers, only what the judge's target decides."""
    settings = [SettingsEntry.model_validate(one).to_settings() for one in identity["settings"]]
    found = {**identity, "settings": settings_to_json([*dict.fromkeys(map(_alone, settings))])}
    if is_served:
        found["revisions"] = {"target": (identity.get("revisions") or {}).get("target")}
        found["suites"] = {
            name: {about: value for about, value in suite.items() if about != "rendered"}
            for name, suite in identity["suites"].items()
        }
    return found


def _alone(settings: Settings) -> Settings:
    return replace(settings, concurrency=1, rate=None)


Place = tuple[str, str, int, str, int]


def _place(answer: Answer) -> Place:
    """Return the place of an answer without its method: suite, prompt, repeat, settings, turn."""
    return answer.suite, answer.prompt_id, answer.repeat, answer.settings.id, answer.turn


@dataclass(frozen=True, slots=True)
class Here:
    """The run as planned on this machine, with its models loaded."""

    resolved: RunPlan
    plan: WorkPlan
    backend: LocalBackend
    items: Mapping[tuple[str, str, int, str], WorkItem]
    is_served: bool
    """Whether servers measured the run; only the target is then loaded, as the judge."""

    @classmethod
    def of(cls, request: AcceptRequest, info: RunInfo, tell: Tell) -> Here:
        tell("reading prompts")
        asked, is_served = _asked(request, info)
        asked, methods, model = methods_and_model(asked)
        resolved = check_fits(plan_run(asked, methods, model))
        tell(f"loading {asked.name}")
        backend = open_local(resolved)
        settings = settings_of(asked, modes_of(asked, model, backend.has_thinking))
        plan = work_plan(resolved, settings)
        items = {(item.suite, item.prompt.prompt_id, item.repeat, item.settings.id): item for item in plan.items()}
        return cls(resolved, plan, backend, items, is_served)

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self.resolved, self.plan, self.backend)

    def item(self, answer: Answer) -> WorkItem | None:
        return self.items.get((answer.suite, answer.prompt_id, answer.repeat, _alone(answer.settings).id))

    def redone(self, stored: Answer, plain: Mapping[Place, Generation], tell: Tell, which: str) -> Redone:
        """Judge a stored answer and regenerate it at concurrency 1. Later turns continue stored plain answers."""
        item = self.item(stored)
        if item is None or stored.turn >= len(item.prompt.turns):
            return Redone(stored, None, is_judged=False)
        tell(f"recomputing answer {which}")
        place = _place(stored)
        messages = item.messages(stored.turn, lambda turn: plain.get((*place[:-1], turn)))
        alone, again = _alone(stored.settings), None
        if stored.method in self.plan.methods:
            again = self.backend.generate(stored.method, messages, alone, stored.repeat)
        if not checks.has_judge(stored):
            return Redone(stored, again, is_judged=False)
        departure = self.backend.audit(messages, stored.generation.token_ids, alone)
        return Redone(stored, again, is_judged=True, departure=departure)

    def texts(self, run: Path) -> CheckedPart:
        """Decode the tokens of all answers, and compare the result with the stored texts."""
        decode = decoder_of(self.resolved.model.target, self.resolved.request.trust_remote_code)
        batches = [batch for part in parts.of(run) for batch in parts.read(part).to_batches()]
        if decode is None:
            return checks.texts(0, 0)
        return checks.texts(sum(len(row_checks.other(one, decode)) for one in batches), sum(map(len, batches)))

    def scored(self, answers: Sequence[Answer]) -> Iterator[tuple[Answer, Score | None]]:
        """Yield each scored answer with its recomputed score; None if it cannot be scored here."""
        known: dict[tuple[str, str, str], Score] = {}
        for answer in answers:
            item = self.item(answer)
            if answer.passed is None and answer.score is None:
                continue
            scorer = "none" if item is None else item.loaded.suite.scorer
            if item is None or scorer == "none" or (scorer in CODE_SCORERS and self.plan.isolation is None):
                yield answer, None
                continue
            text = answer.generation.answer_text
            at = (answer.suite, answer.prompt_id, text)
            if at not in known:
                known[at] = scorers.score(scorer, item.prompt, text, self.plan.isolation, 0)
            yield answer, known[at]

    def forwards(self) -> ForwardTimes | None:
        measured = forwards_of(self.backend)
        return None if measured is None else ForwardTimes.model_validate(as_json(measured))


def _asked(request: AcceptRequest, info: RunInfo) -> tuple[RunRequest, bool]:
    """Rebuild the request from the stored options and the overrides; also return whether servers measured the run."""
    options = {name: value for name, value in info.options.to_json().items() if name not in OF_THE_RUNNER}
    is_served = bool(info.identity.servers)
    if is_served:
        options |= {"methods": (BASELINE,), "drafts": (), "block_size": None, "draft_steps": None, "over": ()}
    # Never read paths chosen by the submitter: on this machine they are other files, if they exist.
    if options.get("prompts") is not None and request.prompts is None:
        raise UserError(f"{request.pack} was measured on the submitter's own prompts: pass your copy with --prompts")
    if options.get("data") not in (None, "embedded", "hub") and request.data is None:
        raise UserError(
            f"{request.pack} was measured on a local folder of suites: pass yours with --data FOLDER, or --data hub"
        )
    named = {"target": request.target, "data": request.data, "prompts": request.prompts}
    options |= {name: value for name, value in named.items() if value is not None}
    if request.target is not None:
        options["model"] = None
    if request.drafts:
        drafts = parse_drafts(options["drafts"]) | parse_drafts(request.drafts)
        options["drafts"] = tuple(f"{name}={path}" for name, path in drafts.items())
    # Remote code runs only if the user of `accept` allows it, whatever the submitted options say.
    asked = request_of(**{**options, "trust_remote_code": request.trust_remote_code, "date": info.identity.date})
    if is_served and not asked.has_target:
        raise UserError(
            f"{request.pack} was measured on servers: pass their target with --target, to judge the answers"
        )
    return asked, is_served
