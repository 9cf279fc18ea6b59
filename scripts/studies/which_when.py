"""MTP, DFlash, DFlash 2, DSpark: which, when? With nano, at concurrency 1 and 4.

Keep the machine quiet meanwhile.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_bench.analysis.metrics import COLUMN, FORMULAS
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.draft_kinds import name_of_kind
from dflash_bench.measurements.headroom import headroom_of
from dflash_bench.measurements.record import Calibration, CutPoint, calibration
from dflash_bench.replay.stored_answers import stored_cells
from dflash_bench.report import document
from dflash_bench.report.document import Document, MethodLine, over_all
from dflash_bench.report.tables import markdown, number, with_interval
from studies._reported import doubts
from studies._study import Made, Work

TAKES = "five minutes of one core"
PAGES = (
    "speed/which-when-nano-cpu.md",
    "speed/which-when-nano-cpu-headroom.svg",
    "speed/which-when-nano-cpu-reliability.svg",
)
CUT = "dflash@dspark:cut=0.5"
METHODS = {
    "mtp": name_of_kind("mtp"),
    "dflash": name_of_kind("dflash"),
    "dflash@2": name_of_kind("dflash2"),
    "dflash@dspark": name_of_kind("dspark"),
    CUT: f"{name_of_kind('dspark')}, cut at 0.5",
}
SUITES = "--suite gsm8k --suite humaneval --suite mt_bench --audit divergent --threads 1"
TOGETHER = 4
LITTLE, MUCH = 0.02, 0.05
"""The largest share of additional rounds of a cut, and the least saving worth a sentence."""
PAGE = """# MTP, DFlash, DFlash 2, DSpark: which, when

```
{command}
```

{machine}.

nano on embedded prompts of three suites, {limit} each, in float32 on one thread, greedy. They come from the generator
of texts that nano and its drafts were trained on, and a pass of nano over 16 tokens costs several times one over 1:
**which method wins depends on both**. Where wide passes are nearly free, as on a GPU at concurrency 1, width
is worth more than here.
{doubts}
## Advice, for this model and machine

{advice}

## Figures

{figures}

Speed-ups are `speedup.decode`, the geometric mean over suites, at concurrency 1 and {together}, each over
plain decoding at the same concurrency; intervals are 95 % over prompts. Verified: the tokens that the target reads in a
round, the anchor among them. \u2265: a draft made token by token, known up to its first wrong token. `headroom.K`:
{headroom}.

![what acceptance would be with a perfect choice](which-when-nano-cpu-headroom.svg)

By suite, speed-up at concurrency 1 and, in brackets, `al.pooled`:

{by_suite}

## How far their confidence can be trusted

{confidence}

DSpark's confidence is that of a head trained for it; the others' is the probability that they give to their own token.
Brier score: the mean of (confidence - right)\u00b2 over drafted tokens whose predecessors are right; a draft that
always says the share that is right has the score in the next column.

![what drafts said, and what was right](which-when-nano-cpu-reliability.svg)

What each threshold would have saved, replayed exactly from drafts recorded at every position: verification stops before
the first token below it. Saved: of all drafted tokens that the target reads without a cut; in brackets, how many more
rounds that takes.

{cuts}
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """A method's figures over all suites."""

    name: str
    length: float
    """al.pooled"""
    width: float
    """Tokens that the target reads in a round."""
    limit: float
    round_ms: float
    """Time of draft and verification."""
    four: float
    sixteen: float
    """headroom.4 and headroom.16"""
    is_least: bool
    alone: Interval
    together: Interval
    exact: str


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=32, help="number of prompts of each suite")


def make(work: Work, options: Namespace) -> Made:
    asked = [*SUITES.split(), "--method", ",".join(METHODS), "--limit", options.limit]
    folder = work.run("alone", *asked, "--record", "every-position", "--headroom", 16)
    beside = document.read_document(work.run("together", *asked, "--concurrency", TOGETHER))
    alone, plots = document.read_document(folder), work.plots(folder)
    found = [_figures(alone, line, beside) for line in alone.lines]
    page = PAGE.format(
        doubts=doubts([alone, beside]),
        command=work.command,
        machine=alone.results.info.environment.one_line(),
        limit=options.limit,
        together=TOGETHER,
        headroom=FORMULAS["headroom.4"].replace("the 4 likeliest", "the K likeliest"),
        advice=advice(found, calibrated := _calibrations(alone)),
        figures=_table(found),
        by_suite=_by_suite(alone),
        confidence=_confidence(calibrated),
        cuts=_cuts(calibrated),
    )
    drawings = {PAGES[1]: plots / "headroom.svg", PAGES[2]: plots / "reliability.svg"}
    return Made({PAGES[0]: page, **drawings})


def _figures(run: Document, line: MethodLine, beside: Document) -> Figures:
    cells = line.cells_of(run.cells)
    sums = sum(cell.sums.sum(axis=0) for cell in cells)

    def ratio(top: str, bottom: str) -> float:
        return float(sums[COLUMN[top]] / sums[COLUMN[bottom]])

    (other,) = (one for one in beside.lines if one.method == line.method)
    is_least = any(one.is_least for one in headroom_of(run.results, cells))
    alone, length = over_all(run.cells, line)
    together, _ = over_all(beside.cells, other)
    is_cut = sums[COLUMN["cut_rounds"]] > 0
    assert alone is not None and together is not None and length is not None
    return Figures(
        METHODS[line.method],
        length,
        1 + (ratio("checked", "cut_rounds") if is_cut else ratio("drafted", "rounds")),
        max(cell.widest for cell in cells),
        1000 * (ratio("draft_s", "draft_rounds") + ratio("verify_s", "verify_rounds")),
        ratio("right_of_4", "ranked_4"),
        ratio("right_of_16", "ranked_16"),
        is_least,
        alone,
        together,
        f"{sum(cell.exact[0] for cell in cells if cell.exact)}/{sum(cell.exact[1] for cell in cells if cell.exact)}",
    )


def _table(found: Sequence[Figures]) -> str:
    heads = [
        "method",
        "al.pooled",
        "verified",
        "headroom.4",
        "headroom.16",
        "round ms",
        "concurrency 1 [95 %]",
        f"concurrency {TOGETHER} [95 %]",
        "exact",
    ]
    rows = [
        [
            one.name,
            number(one.length),
            number(one.width, 1),
            *(f"{'≥ ' if one.is_least else ''}{number(value)}" for value in (one.four, one.sixteen)),
            number(one.round_ms),
            with_interval(one.alone),
            with_interval(one.together),
            one.exact,
        ]
        for one in found
    ]
    return markdown(heads, rows)


def _by_suite(run: Document) -> str:
    rows = [
        [
            METHODS[line.method],
            *(
                f"{number(cell.value('speedup.decode'))} ({number(cell.value('al.pooled'))})"
                for cell in line.cells_of(run.cells)
            ),
        ]
        for line in run.lines
    ]
    return markdown(["method", *run.suites], rows)


# Confidence, over all suites.


def _calibrations(run: Document) -> dict[str, Calibration]:
    """Return calibrations by method, without the method that is already cut."""
    cells = [cell for cell in stored_cells(run.results) if cell.method in METHODS and cell.method != CUT]
    found = {}
    for method in dict.fromkeys(cell.method for cell in cells):
        first, *others = (cell for cell in cells if cell.method == method)
        of = calibration(replace(first, answers=sum((cell.answers for cell in others), first.answers)))
        if of is not None:
            found[METHODS[method]] = of
    return found


def _confidence(found: dict[str, Calibration]) -> str:
    bins = sorted({one.low for of in found.values() for one in of.bins})
    heads = ["method", "Brier", "always the mean", *(f"{low:.1f} to {low + 0.1:.1f}" for low in bins)]
    rows = [
        [
            name,
            number(of.brier, 3),
            number(of.brier_of_share, 3),
            *({one.low: f"{one.accepted:.0%}" for one in of.bins}.get(low, "") for low in bins),
        ]
        for name, of in found.items()
    ]
    return f"The share of drafted tokens that were right, by how sure the draft was:\n\n{markdown(heads, rows)}"


def _cuts(found: dict[str, Calibration]) -> str:
    thresholds = [one.threshold for one in next(iter(found.values())).cuts if one.threshold]
    rows = [
        [name, *(f"{one.saved:.0%} (+{one.more_rounds:.0%})" for one in of.cuts if one.threshold)]
        for name, of in found.items()
    ]
    return markdown(["method", *(f"{one:g}" for one in thresholds)], rows)


# Advice, from the figures alone.


def advice(found: Sequence[Figures], calibrated: dict[str, Calibration]) -> str:
    """Return a paragraph of template sentences, chosen and filled by the measurements."""
    return "\n".join(
        [
            _fastest("At concurrency 1", [(one.name, one.alone) for one in found]),
            _fastest(f"At concurrency {TOGETHER}", [(one.name, one.together) for one in found]),
            _cheapest(found),
            _room(found),
            *_cutting(found, calibrated),
        ]
    )


def _fastest(when: str, speeds: Sequence[tuple[str, Interval]]) -> str:
    name, best = max(speeds, key=lambda one: one[1].value)
    if best.low is None:
        return (
            f"{when}, **{name}** is the fastest, {with_interval(best)} times plain decoding: too few prompts to tell."
        )
    rivals = [other for other, one in speeds if other != name and one.high is not None and one.high >= best.low]
    losing = [other for other, one in speeds if one.high is not None and one.high < 1]
    parts = [f"{when}, **{name}** is the fastest, {with_interval(best)} times plain decoding"]
    parts += [f"the intervals of {_and(rivals)} overlap with it"] if rivals else []
    parts += [f"{_and(losing)} {'is' if len(losing) == 1 else 'are'} slower than no draft"] if losing else []
    return f"{'; '.join(parts)}."


def _cheapest(found: Sequence[Figures]) -> str:
    each = ", ".join(f"{one.name} {number(one.length)} for {number(one.round_ms)} ms" for one in found)
    kept = ", ".join(f"{one.name} {one.together.value / one.alone.value:.0%}" for one in found)
    return (
        f"What a round gives and costs, at concurrency 1: {each}. At concurrency {TOGETHER}, where wide passes cost "
        f"more, each keeps of its speed-up: {kept}."
    )


def _room(found: Sequence[Figures]) -> str:
    most = max(found, key=lambda one: one.sixteen - one.length)
    share = (most.sixteen - most.length) / (most.limit - most.length)
    what = "choose better among what it has (rerank)" if share > 0.5 else "train it more"
    least = "at least " if most.is_least else ""
    return (
        f"{most.name} has most to gain from a better choice: the right one of its best 16 would bring {least}"
        f"{number(most.sixteen - most.length)} tokens per round, {share:.0%} of what is left to its block's limit, so "
        f"{what} first."
    )


def _cutting(found: Sequence[Figures], calibrated: dict[str, Calibration]) -> list[str]:
    by_name, plain = {one.name: one for one in found}, METHODS["dflash@dspark"]
    lines = []
    if calibrated:
        best = min(calibrated, key=lambda name: calibrated[name].brier / calibrated[name].brier_of_share)
        of = calibrated[best]
        lines.append(
            f"{best}'s confidence says most (Brier {of.brier:.3f}, where its mean alone has {of.brier_of_share:.3f})."
        )
    free = [
        f"{name} {cut.saved:.0%} (at {cut.threshold:g})"
        for name, of in calibrated.items()
        if (cut := _free(of)) is not None
    ]
    if free:
        lines.append(f"With at most {LITTLE:.0%} more rounds a cut saves, of what is verified: {', '.join(free)}.")
    if plain in by_name and METHODS[CUT] in by_name:
        whole, cut_at = by_name[plain], by_name[METHODS[CUT]]
        pairs = {"1": (cut_at.alone, whole.alone), str(TOGETHER): (cut_at.together, whole.together)}
        verdicts = (
            f"is {'' if now.value > before.value else 'not '}faster at concurrency {num} ({number(now.value)} against "
            f"{number(before.value)})"
            for num, (now, before) in pairs.items()
        )
        saved = number(whole.width - cut_at.width, 1)
        lines.append(f"{plain} cut at 0.5 verifies {saved} tokens per round less, and {' and '.join(verdicts)}.")
    return lines


def _free(of: Calibration) -> CutPoint | None:
    """Return the threshold with the largest saving for hardly more rounds, if any."""
    cuts = (one for one in of.cuts if one.threshold and one.saved >= MUCH and one.more_rounds <= LITTLE)
    return max(cuts, key=lambda one: one.saved, default=None)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
