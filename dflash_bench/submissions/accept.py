"""Verify a submitted pack: plan the run again and recompute a random sample of its answers on this machine."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from dflash_bench.core.types import CODE_SCORERS, SCHEMA_VERSION, Answer, Generation, Message, Settings
from dflash_bench.models.chat import decoder_of
from dflash_bench.results import pack as packs
from dflash_bench.results import parts, recheck, row_checks, store
from dflash_bench.results import plan as plans
from dflash_bench.results.columns import COLUMNS
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.recheck import CheckedPart, Recheck
from dflash_bench.results.row_checks import THINKING
from dflash_bench.results.run_info import ForwardTimes, RunIdentity, RunInfo, SettingsEntry, as_json, read_info
from dflash_bench.results.table import RunTable, read_run
from dflash_bench.runner import work
from dflash_bench.runner.plan import RunPlan, modes_of, plan_run, settings_of
from dflash_bench.runner.session import identity_of, work_plan
from dflash_bench.runner.setup import check_fits, forwards_of, open_local
from dflash_bench.runner.work import WorkItem, WorkPlan
from dflash_bench.submissions import checks
from dflash_bench.submissions.checks import Redone
from dflash_bench.submissions.request import AcceptRequest, rebuild
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers.base import Score

if TYPE_CHECKING:
    from dflash_bench.engine.backend import LocalBackend

LEAST_DRAWN = 20
"""The minimum sample size: 5 % of a short run would be a single answer."""

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
        here = None if table is None else Here.of(request, info, answers, tell)
        compared = () if here is None or table is None else _compared(here, table, run, answers, chosen, tell)
        content = {
            "schema": SCHEMA_VERSION,
            "pack": hash_,
            "seed": seed,
            "share": request.share,
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
    plan = info.plan.to_json() if info.plan is not None else {}
    yield checks.same_plan(then, now, plan, planned, here.other_categories(answers))
    yield checks.same_models(then, now, here.is_served, here.own_parts)
    yield checks.failures(sum(one.generation.error is not None for one in answers), len(answers))
    yield here.texts(run, answers)
    unlike = checks.unlike(info, RunIdentity.model_validate(as_json(here.identity)), environment.describe())
    redone, cells = here.all_redone(chosen, tell), {checks.cell_of(one) for one in answers}
    yield checks.tokens(redone, not unlike)
    yield checks.counts(redone, cells, not unlike)
    yield checks.measurements(redone, {name for one in answers for name in one.measured}, not unlike)
    tell("scoring")
    yield checks.scores(list(here.scored(answers)), here.suites_of_code)
    tell("timing forward passes")
    yield checks.times(table, here.forwards(), unlike, redone, cells)


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
    own_parts: Collection[str]
    """The parts of the model that are the user's copies."""
    plain: Mapping[Place, Generation]
    """The stored answers that later turns continue."""

    @classmethod
    def of(cls, request: AcceptRequest, info: RunInfo, answers: Sequence[Answer], tell: Tell) -> Here:
        tell("reading prompts")
        found = rebuild(request, info)
        asked, model = found.request, found.model
        resolved = check_fits(plan_run(asked, found.methods, model))
        tell(f"loading {asked.name}")
        backend = open_local(resolved)
        settings = settings_of(asked, modes_of(asked, model, backend.has_thinking))
        plan = work_plan(resolved, settings)
        items = {(item.suite, item.prompt.prompt_id, item.repeat, item.settings.id): item for item in plan.items()}
        first = plans.recorded(info, str(request.pack)).methods[0]
        plain = {_place(one): one.generation for one in answers if one.method == first}
        return cls(resolved, plan, backend, items, found.is_served, request.own_parts, plain)

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self.resolved, self.plan, self.backend)

    def item(self, answer: Answer) -> WorkItem | None:
        return self.items.get((answer.suite, answer.prompt_id, answer.repeat, _alone(answer.settings).id))

    def messages(self, answer: Answer) -> tuple[Message, ...] | None:
        """Return the chat before an answer, with the stored plain answers to earlier turns; None outside the plan."""
        item, place = self.item(answer), _place(answer)
        if item is None or answer.turn >= len(item.prompt.turns):
            return None
        return item.messages(answer.turn, lambda turn: self.plain.get((*place[:-1], turn)))

    def all_redone(self, chosen: Sequence[Answer], tell: Tell) -> list[Redone]:
        """Judge and regenerate answers. One of each method is regenerated before, to warm up."""
        tell("warming up")
        for one in {one.method: one for one in chosen}.values():
            self._regenerated(one, self.messages(one))
        found = []
        for number, one in enumerate(chosen, 1):
            tell(f"recomputing answer {number} of {len(chosen)}")
            found.append(self._redone(one))
        return found

    def _redone(self, stored: Answer) -> Redone:
        """Judge a stored answer and regenerate it at concurrency 1."""
        messages = self.messages(stored)
        if messages is None:
            return Redone(stored, None, is_judged=False)
        regenerated = self._regenerated(stored, messages)
        measured = {} if regenerated is None else self._measured(stored, messages)
        if not checks.has_judge(stored):
            return Redone(stored, regenerated, is_judged=False, measured=measured)
        departure = self.backend.audit(messages, stored.generation.token_ids, _alone(stored.settings))
        return Redone(stored, regenerated, is_judged=True, departure=departure, measured=measured)

    def _regenerated(self, stored: Answer, messages: Sequence[Message] | None) -> Generation | None:
        """Return the answer generated here; None for servers' answers, and outside the plan."""
        if messages is None or self.is_served or stored.method not in self.plan.methods:
            return None
        return self.backend.generate(stored.method, messages, _alone(stored.settings), stored.repeat)

    def _measured(self, stored: Answer, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the lists of integers that measurements derive from an answer; others hold times or are rounded."""
        columns = [one.judged(stored, messages, self.backend) for one in self.plan.instruments.values()]
        return {name: value for own in columns for name, value in own.items() if "list of int" in COLUMNS[name].kind}

    def other_categories(self, answers: Sequence[Answer]) -> list[str]:
        """Return the ids of prompts whose answers are stored under another category."""
        items = [(answer, self.item(answer)) for answer in answers]
        other = (one.prompt_id for one, item in items if item is not None and one.category != item.prompt.category)
        return list(dict.fromkeys(other))

    def texts(self, run: Path, answers: Sequence[Answer]) -> CheckedPart:
        """Decode the tokens of all answers, and compare the result with the stored texts and their thinking."""
        decode = decoder_of(self.resolved.model.target, self.resolved.request.trust_remote_code)
        batches = [batch for part in parts.of(run) for batch in parts.read(part).to_batches()]
        if decode is None:
            return checks.texts(0, 0, len(answers))
        wrong = sum(len(row_checks.other(one, decode)) for one in batches)
        num = sum(len(row_checks.decodable(one)) for one in batches)
        num_hidden = sum(one.generation.hides_tokens for one in answers)
        return checks.texts(wrong, num, num_hidden, sum(map(self._is_split_otherwise, answers)))

    def _is_split_otherwise(self, answer: Answer) -> bool:
        """Return whether an answer's tokens have another amount of thinking than is stored."""
        stored, messages = answer.generation, self.messages(answer)
        if messages is None or stored.error is not None or not stored.token_ids:
            return False
        bare = replace(stored, num_thinking_tokens=None, num_thinking_chars=None)
        again = self.backend.with_thinking(bare, self.backend.encode(messages, answer.settings))
        return any((getattr(again, name) or 0) != (getattr(stored, name) or 0) for name in THINKING)

    @property
    def suites_of_code(self) -> set[str]:
        return {one.suite.name for one in self.plan.suites if one.suite.scorer in CODE_SCORERS}

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
