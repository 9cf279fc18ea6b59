"""`reproduce`: trains an item's drafts, measures its runs, and judges them; the same call goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import draft_of, parse
from dflash_bench.core.option import to_json
from dflash_bench.report import plots
from dflash_bench.report.document import read_document
from dflash_bench.reproduction import words
from dflash_bench.reproduction.items import Arm, Item
from dflash_bench.reproduction.options import OMIT, TrainingOptions
from dflash_bench.reproduction.parts import Part, parts
from dflash_bench.reproduction.verdict import ItemResult, judge
from dflash_bench.results.run_info import FILE, read_info
from dflash_bench.results.store import RUNS
from dflash_bench.runner import session
from dflash_bench.runner.config import RunRequest
from dflash_bench.training import session as trainings
from dflash_bench.training.config import TrainRequest

ANSWERS = Path("work") / "answers"
STATE = "reproduction.json"
"""The file that holds the item's name and the options."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """An item, what became of each of its runs, and where they are."""

    item: Item
    verdicts: tuple[ItemResult, ...]
    refused: tuple[tuple[Part, str], ...]
    """Runs that this machine cannot measure, and why."""
    folder: Path


def default_folder(item: Item, asked: RunRequest, options: TrainingOptions) -> Path:
    """Return the folder without `out`: the same for the same options, so that the same call goes on."""
    digest = hashlib.sha256(json.dumps([to_json(asked), to_json(options)], sort_keys=True).encode()).hexdigest()[:8]
    return RUNS / f"reproduce-{item.name}-{digest}"


def perform(
    item: Item, asked: RunRequest, options: TrainingOptions, out: Path | None, caller: session.Caller
) -> Reproduction:
    """Measure what is missing of an item's runs, judge all, and write the page.

    Raises UserError if not one run can be measured, and for a folder that holds something else.
    """
    folder = out or default_folder(item, asked, options)
    wanted = parts(item, asked)
    for part in wanted:
        check_training(item, part, options)
    folder.mkdir(parents=True, exist_ok=True)
    files.check_same_options(
        folder / STATE, {"item": item.name, "options": to_json(asked) | to_json(options)}, "a reproduction"
    )
    verdicts, refused = [], []
    for part in wanted:
        run = folder / part.folder_name
        try:
            if not _is_complete(run):
                caller.measures()
                ready = with_drafts(item, part, options, folder / "drafts" / part.folder_name, caller.tell)
                session.perform(ready.request, run, (run / FILE).exists(), caller)
        except UserError as error:
            if len(wanted) == 1:
                raise
            refused.append((part, str(error)))
            caller.tell(f"note: {part.target} is not measured: {error}")
            continue
        verdicts.append(judge(item, part, read_document(run)))
    if not verdicts:
        raise UserError(f"nothing of {item.name} can be measured here: {refused[0][1]}")
    made = Reproduction(item, tuple(verdicts), tuple(refused), folder)
    pictures = {one.part.folder_name: _drawn(one, folder) for one in made.verdicts}
    words.write(made.folder, words.page(made.item, made.verdicts, made.refused, pictures))
    return made


PICTURES = ("speedup", "load")
"""The plots that the page shows of each run: bars with the published figures as marks, and speed by load."""


def _drawn(verdict: ItemResult, folder: Path) -> list[str]:
    """Draw what a run has data for, and return the names of the files in `folder`."""
    material = plots.Material(verdict.document)
    names = []
    for name in PICTURES:
        if name in plots.names_for(material):
            with suppress(plots.NothingToPlotError):
                drawn = plots.write_plot(material, name, folder / "plots" / verdict.part.folder_name, "svg")
                names.append(drawn.relative_to(folder).as_posix())
    return names


def _is_complete(run: Path) -> bool:
    return (run / FILE).exists() and read_info(run).state == "complete"


# Drafts that an item trains before it measures them: one for each arm with options of `train`.


def check_training(item: Item, part: Part, options: TrainingOptions) -> None:
    """Raise UserError for options without effect, and for an item that trains with nothing to train on."""
    trains = any(arm.train for arm in item.arms)
    if not trains and options != TrainingOptions():
        raise UserError(f"{item.name} trains no draft: {OMIT}")
    if trains and part.target is not None and not options.train_prompts and options.written is None:
        raise UserError(
            f"{item.name} trains drafts, as published on 100,000 answers: name prompts with --train-prompts FILE, or "
            "say with --written N how many of ours to use"
        )


def with_drafts(item: Item, part: Part, options: TrainingOptions, folder: Path, tell: Callable[[str], object]) -> Part:
    """Train the drafts of an item that `folder` lacks, and return the run with all of them."""
    drafts = dict(_trained(item, part, options, folder, tell))
    added = tuple(f"{name}={path}" for name, path in drafts.items())
    return replace(part, request=replace(part.request, drafts=(*part.request.drafts, *added)))


def _trained(
    item: Item, part: Part, options: TrainingOptions, folder: Path, tell: Callable[[str], object]
) -> Iterator[tuple[str, Path]]:
    answered: dict[object, Path] = {}
    arms = {draft_of(parse(arm.method).label): arm for arm in item.arms if arm.train}
    for name, arm in arms.items():
        assert name is not None
        out = folder / name.replace("@", "-")
        request = _request(arm, part, options, out)
        if not (out / request.method / "README.md").exists():
            _share(answered.get(request.features), out)
            tell(f"{item.name}: training {name}")
            trainings.perform(request, lambda text, name=name: tell(f"{name}: {text}"))  # type: ignore[misc]
        answered.setdefault(request.features, out)
        yield name, out / request.method


def _request(arm: Arm, part: Part, options: TrainingOptions, out: Path) -> TrainRequest:
    of_run = part.request
    return TrainRequest(
        target=str(of_run.target or of_run.name),
        out=out,
        prompts=options.train_prompts,
        written=options.written,
        epochs=options.epochs,
        seed=options.train_seed or 0,
        device=of_run.device,
        threads=of_run.threads,
        **arm.train,
    )


def _share(answered: Path | None, out: Path) -> None:
    """Take the answers that another draft was trained on, which have the states of the same layers."""
    if answered is not None and not (out / ANSWERS).exists():
        shutil.copytree(answered / ANSWERS, out / ANSWERS, copy_function=os.link)
