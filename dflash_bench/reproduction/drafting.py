"""Items about draft latency, measured by repeated profiles with random weights; a claim needs all repeats to agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from dflash_bench.core.errors import UserError
from dflash_bench.core.files import write_text
from dflash_bench.core.labels import wrapped
from dflash_bench.core.option import options_of
from dflash_bench.core.terminal import Stages
from dflash_bench.diagnose import profile
from dflash_bench.report.tables import markdown, number
from dflash_bench.reproduction.items import Claim, Item
from dflash_bench.reproduction.options import OMIT, TrainingOptions
from dflash_bench.reproduction.words import PAGE
from dflash_bench.runner.config import RunRequest

REPEATS = 5
"""Number of profiles, each by itself."""
TAKEN = ("model", "device", "dtype", "attention", "engine", "kernels", "threads")
"""The options of a run that a profile has, too."""


@dataclass(frozen=True, slots=True)
class DraftingTimes:
    """Draft latency of each arm in each profile."""

    item: Item
    model: str
    is_published: bool
    device: str
    times_ms: dict[str, list[float]]
    """Milliseconds, by the method's label."""

    def judgement(self, claim: Claim) -> str:
        """Return whether all profiles of one arm are above all profiles of the other."""
        above, below = self.times_ms[claim.above], self.times_ms[str(claim.below)]
        if min(above) > max(below):
            return "holds"
        return "fails" if max(above) < min(below) else "cannot be told"


def measure(item: Item, asked: RunRequest, training: TrainingOptions, stages: Stages) -> DraftingTimes:
    """Profile an item's drafts several times. Raises UserError for options without effect."""
    usual = RunRequest()
    given = {one.name for one in fields(RunRequest) if getattr(asked, one.name) != getattr(usual, one.name)}
    if training != TrainingOptions():
        raise UserError(f"{item.name} trains no draft: {OMIT}")
    if unused := [spec.flag for name, spec in options_of(RunRequest).items() if name in given - {*TAKEN}]:
        raise UserError(f"{item.name} decodes no prompts: leave {', '.join(unused)} out")
    model = asked.model or next(iter(item.models.values()))
    request = profile.ProfileRequest(
        replace(asked, model=model, methods=tuple(item.profile["methods"])),
        random_weights=True,
        widths=(1,),
        contexts=tuple(item.profile["context"]),
        draft_layers=tuple(item.profile["draft_layers"]),
    )
    found: dict[str, list[float]] = {}
    for repeat in range(REPEATS):
        stages.begin(f"profile {repeat + 1} of {REPEATS}")
        profiled = profile.profile(request, stages.detail)
        for batch in profiled.judged:
            widest = {cost.method: cost for cost in sorted(batch.rounds, key=lambda cost: cost.width)}
            for method, cost in widest.items():
                found.setdefault(method, []).append(1000 * cost.draft_s)
    return DraftingTimes(item, model, model in item.models.values(), str(profiled.about["device"]), found)


def ended(made: DraftingTimes, folder: Path, width: int) -> str:
    """Return what a terminal shows: each arm, beside the published time if there is one, and each claim."""
    lines = [f"{made.item.name}: {made.item.title}", _about(made)]
    lines += [f"  {': '.join(row[:2])} ms{f' (published: {row[2]})' if row[2:] else ''}" for row in _rows(made)]
    lines += [f"  {made.judgement(claim)}: {claim.says}" for claim in made.item.claims]
    return "\n".join([*(wrapped(line, width, others="    ") for line in lines), f"as a page: {folder / PAGE}"]) + "\n"


def write_page(made: DraftingTimes, folder: Path) -> None:
    item = made.item
    folder.mkdir(parents=True, exist_ok=True)
    heads = ["draft", "here, ms [least, most]", *(["published, ms"] if made.is_published else [])]
    parts = [
        f"# {item.title}",
        f"{item.source}, on {item.gpu}.",
        _about(made),
        "Not stated in the publication:\n\n" + "\n".join(f"- {one}" for one in item.open),
        markdown(heads, _rows(made), left=1),
        markdown(["claim", "here"], [[one.says, made.judgement(one)] for one in item.claims], left=2),
    ]
    write_text(folder / PAGE, "\n\n".join(parts) + "\n")


def _about(made: DraftingTimes) -> str:
    about = f"{made.model} with random weights on {made.device}, {REPEATS} profiles."
    return about if made.is_published else f"{about} It stands in for {', '.join(made.item.models)}."


def _rows(made: DraftingTimes) -> Sequence[list[str]]:
    return [
        [arm.config, _spread(made.times_ms[arm.method]), *([number(arm.draft_ms, 1)] if made.is_published else [])]
        for arm in made.item.arms
    ]


def _spread(times_ms: Sequence[float]) -> str:
    return f"{median(times_ms):.2f} [{min(times_ms):.2f}, {max(times_ms):.2f}]"
