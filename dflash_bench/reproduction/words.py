"""Items and verdicts in words: the list, the end of a reproduction in a terminal, and its page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dflash_bench.analysis.peers.paper import TOLERANCE, PaperComparison, PaperFigure, unlike_conditions
from dflash_bench.analysis.stats import MIN_PROMPTS
from dflash_bench.core.files import write_text
from dflash_bench.core.labels import wrapped
from dflash_bench.core.methods import shown
from dflash_bench.models import catalogue, presets
from dflash_bench.models.catalogue import Machine
from dflash_bench.report.tables import ABSENT, aligned, markdown, number, with_interval
from dflash_bench.reproduction.estimate import GPUS, OVERHEAD, SHORTEST, ItemEstimate
from dflash_bench.reproduction.items import Item
from dflash_bench.reproduction.parts import Part
from dflash_bench.reproduction.verdict import ClaimResult, FigureResult, ItemResult

PAGE = "reproduction.md"
ENGINES = {"own": "this package's engine, as the paper's Transformers", "sglang": "SGLang", "vllm": "vLLM"}
Refused = Sequence[tuple[Part, str]]


def listed(items: Sequence[Item], machine: Machine, width: int) -> str:
    """Return all items: figures, models and engine, and which models do not fit here."""
    blocks = []
    for item in items:
        too_large = [name for name, preset in item.models.items() if not _fits(preset, machine)]
        here = f"too large here: {', '.join(too_large)}" if too_large else "fits here"
        gpu = "" if item.gpu == "not stated" else f" on {item.gpu}"
        count = len(item.figures) or sum(arm.draft_ms is not None for arm in item.arms)
        what = f"{count} figures" if count else f"{len(item.claims)} claim"
        lines = [
            f"{item.name}: {item.title}",
            f"  {what} of {', '.join(item.models)}; {ENGINES[item.engine]}{gpu}; {here}",
        ]
        blocks += [wrapped(line, width, others="  ") for line in lines]
    end = "To reproduce one: dflash-bench reproduce ITEM. To try one with the included small model: --model nano"
    return "\n".join([*blocks, "", wrapped(end, width)])


def estimated(item: Item, estimates: Sequence[ItemEstimate], width: int) -> str:
    """Return what each run of an item takes, on one line each, and how that is reckoned."""
    rows = [
        [
            one.target,
            f"{one.num_answers:,}",
            f"{one.weights_bytes / 1e9:.0f} GB",
            str(one.num_gpus),
            *(f"{low:.1f} to {high:.1f}" for low, high in one.hours.values()),
        ]
        for one in estimates
    ]
    heads = ["model", "answers", "weights", "80 GB GPUs", *(f"{name}, hours" for name in GPUS)]
    how = (
        f"In bfloat16, and a fifth more for draft and cache. Hours are those of reading the weights once a pass, times "
        f"{OVERHEAD:g}, with the published speed-ups, and answers of {SHORTEST:g} to 1 of the most tokens."
    )
    return "\n".join([wrapped(f"{item.name}: {item.title}", width), aligned(heads, rows), wrapped(how, width)])


def _fits(preset: str, machine: Machine) -> bool:
    return catalogue.fits(presets.table()[preset], machine)[0] is not False


def ended(item: Item, verdicts: Sequence[ItemResult], refused: Refused, folder: Path, width: int) -> str:
    """Return the end of a reproduction in a terminal: a sentence for each target, and each claim."""
    lines = [*map(_sentence, verdicts), *(f"{part.target}: not measured: {why}" for part, why in refused)]
    for verdict in verdicts:
        lines += [f"  {one.judgement}: {_claim(one)}" for one in verdict.claims]
    blocks = [wrapped(f"{item.name}: {item.title}", width), *(wrapped(line, width, others="    ") for line in lines)]
    return "\n".join([*blocks, f"every figure: {folder / PAGE}"]) + "\n"


def _sentence(verdict: ItemResult) -> str:
    if verdict.part.target is None:
        name = verdict.part.request.name
        return f"{name} stands in for the published models, so that no figure is compared with a published one"
    counts = verdict.counts
    others = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count and outcome != "reproduced")
    total = len(verdict.figures)
    return (
        f"{verdict.part.target}: {counts['reproduced']} of {total} figures reproduced{', ' if others else ''}{others}"
    )


def _claim(one: ClaimResult) -> str:
    if not one.num_pairs:
        return f"{one.claim.says} (no pair of figures)"
    against = f"; surely not on {', '.join(dict.fromkeys(one.against))}" if one.against else ""
    return f"{one.claim.says} ({one.num_held} of {one.num_pairs} pairs surely{against})"


def page(
    item: Item,
    verdicts: Sequence[ItemResult],
    refused: Refused,
    pictures: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return the page: the verdict, the claims, each figure as published and here, and `pictures` of each run."""
    parts = [f"# {item.title}", f"{item.source}.", *map(_sentence, verdicts)]
    parts += [f"{part.target} was not measured: {why}" for part, why in refused]
    parts.append(
        f"A figure is reproduced if the published value lies in the 95 % interval of ours, or ours within "
        f"{100 * TOLERANCE:.0f} % of it; over fewer than {MIN_PROMPTS} prompts, none is."
    )
    if item.open:
        parts.append("Not stated in the publication:\n\n" + "\n".join(f"- {one}" for one in item.open))
    for verdict in verdicts:
        parts += _of_verdict(item, verdict)
        parts += [f"![{Path(name).stem}]({name})" for name in pictures.get(verdict.part.folder_name, ())]
    return "\n\n".join(parts) + "\n"


def _of_verdict(item: Item, verdict: ItemResult) -> Iterator[str]:
    info = verdict.document.results.info
    yield f"## {verdict.part.target or f'{verdict.part.request.name}, which stands in'}"
    yield f"Here: {info.environment.one_line()}. As published: {ENGINES[item.engine]}, GPU: {item.gpu}."
    if verdict.part.left_out:
        yield f"Without prompts of {', '.join(verdict.part.left_out)}."
    limit, loads = verdict.part.request.limit, item.run.get("concurrency", [])
    if limit is not None and (above := [str(load) for load in loads if load > limit]):
        yield f"Without loads of {', '.join(above)} answers at a time, which need as many prompts."
    if verdict.claims:
        rows = [[one.claim.says, one.judgement, f"{one.num_held} of {one.num_pairs}"] for one in verdict.claims]
        yield markdown(["claim", "here", "pairs that surely hold"], rows, 2)
    if verdict.figures:
        yield markdown(HEADS, [_row(one) for one in verdict.figures], 3)
        ran = [one.published for one in verdict.figures if one.own is not None]
        beside = [PaperComparison(one, one.dataset, "", one.method, None, None) for one in ran]
        if notes := [f"- {note}" for note in unlike_conditions(beside, info.identity)]:
            yield "Conditions that differ:\n\n" + "\n".join(notes)
    else:
        yield markdown(OWN_HEADS, list(_own_rows(verdict)), 3)


HEADS = ["suite", "method", "formula", "temperature", "at a time", "published", "here [95 %]", ""]
OWN_HEADS = ["suite", "method", "setting", "al.pooled [95 %]", "speedup.decode [95 %]"]


def _row(one: FigureResult) -> list[str]:
    figure: PaperFigure = one.published
    beside = ABSENT if figure.concurrency is None else str(figure.concurrency)
    return [
        figure.dataset,
        f"{shown(figure.method)}, {figure.config}",
        figure.formula,
        f"{figure.temperature:g}",
        beside,
        number(figure.value),
        with_interval(one.own) if one.own else ABSENT,
        one.outcome,
    ]


def _own_rows(verdict: ItemResult) -> Iterator[list[str]]:
    for cell in verdict.document.cells:
        if not cell.slice:
            figures = [cell.figures.get(name) for name in ("al.pooled", "speedup.decode")]
            yield [cell.label, shown(cell.method), cell.setting, *(with_interval(one) for one in figures)]


def write(folder: Path, text: str) -> None:
    write_text(folder / PAGE, text)
