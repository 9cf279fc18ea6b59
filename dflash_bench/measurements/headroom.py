"""Headroom: acceptance if the right token were always chosen among the draft's likeliest. Train more, or rerank?

After each greedy answer, outside its timing, the same rounds are decoded again, and each drafted place records the rank
of the right token among the draft's candidates. A draft token counts only if all tokens before it are right, since only
then does a round reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from dflash_bench.core.errors import UserError
from dflash_bench.core.measurement import Columns, Instrument, Measurement
from dflash_bench.core.methods import BASELINE, METHODS, Method
from dflash_bench.core.metric import Metric
from dflash_bench.core.option import under
from dflash_bench.core.types import Answer, CellKey, Message
from dflash_bench.runner import rules

if TYPE_CHECKING:
    import numpy as np

    from dflash_bench.analysis.cells import Cell
    from dflash_bench.analysis.metrics import AnswerColumns
    from dflash_bench.report.document import Document
    from dflash_bench.report.plots.style import Material
    from dflash_bench.report.tables import Section, Value
    from dflash_bench.results.rounds import StoredRows
    from dflash_bench.results.row_arrays import RowArrays
    from dflash_bench.results.run_info import RunInfo
    from dflash_bench.results.table import RunTable

MOST = 1024
"""Most candidates recorded per place."""
LEVELS = (1, 4, 16)
"""The numbers of the draft's likeliest tokens among which an ideal choice is simulated."""


@dataclass(slots=True)
class RankRecorder(Instrument):
    num_candidates: int

    def identity(self) -> int:
        return self.num_candidates

    def judged(self, record: Answer, messages: Sequence[Message], backend: Any) -> Columns:
        if not record.settings.greedy or record.generation.error or record.method == BASELINE:
            return {}
        ranks = backend.ranks(record.method, messages, record.settings, record.generation, self.num_candidates)
        return {} if ranks is None else {"ranks": ranks}


def opened(options: Any, methods: Sequence[Method]) -> RankRecorder:
    for method in methods:
        require_ranked(method)
    return RankRecorder(options.headroom)


def require_ranked(method: Method) -> None:
    """Raise UserError for a method whose rounds are not chains of tokens chosen by logits."""
    kind, known = method.kind, ", ".join(kind.name for kind in METHODS.values() if kind.is_ranked)
    is_tree = kind.weights is not None and kind.shape == "tree" and method.options.get("top_k") != 1
    if is_tree or not kind.is_ranked:
        why = "drafts trees, whose nodes are alternatives already" if is_tree else "drafts tokens without logits"
        remedy = "; medusa:top_k=1 drafts a chain" if kind.name == "medusa" else f"; methods that have them: {known}"
        raise UserError(f"--headroom: {method.label} {why}{remedy}")
    if "auto" in method.options.values():
        raise UserError(f"--headroom: {method.label} chooses by times of earlier rounds; give it a number")


# From ranks to what a better choice would accept.


def leads(ranks: Any, drafted: Any, most: Any, num: int) -> Any:
    """Return the accepted tokens per round if the right one of the best `num` were always chosen, [rounds].

    `ranks` [drafted] are 1 for the draft's likeliest token, 0 if the right one is not among those kept, -1 if unknown,
    as after a wrong token of an autoregressive draft; at most `most` [rounds] tokens per round are verified. Where
    ranks are unknown from a position on, the result is a lower bound.
    """
    import numpy as np

    from dflash_bench.results.row_arrays import places_of

    of_token, place = places_of(drafted.astype(np.int32))
    ends = np.where((ranks >= 1) & (ranks <= num), drafted[of_token], place)
    found = np.zeros(len(drafted), dtype=np.int64)
    has_some = drafted > 0
    if has_some.any():
        found[has_some] = np.minimum.reduceat(ends, (np.cumsum(drafted) - drafted)[has_some])
    return np.minimum(found, most)


def per_round(batch: Any, owners: Any) -> dict[str, Any]:
    """Return as `headroom_K` the tokens each round would accept from the draft's best K, [rounds]; NaN if unknown."""
    import numpy as np

    from dflash_bench.results.rounds import flat_as
    from dflash_bench.results.row_arrays import lengths_of

    has_ranks = batch.column("ranks").is_valid().to_numpy(zero_copy_only=False)
    found = {f"headroom_{num}": np.full(len(owners), np.nan) for num in LEVELS}
    if has_ranks.any():
        own = batch.take(np.flatnonzero(has_ranks))
        drafted = own.column("drafted").flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        verified = flat_as(own.column("verified"), lengths_of(own.column("drafted"), 0))
        most = np.where(np.isnan(verified), drafted, verified)
        ranks = own.column("ranks").flatten().to_numpy(zero_copy_only=False)
        for num in LEVELS:
            found[f"headroom_{num}"][has_ranks[owners]] = leads(ranks, drafted, most, num)
    return found


def without_unknown(frame: Any, info: RunInfo | None) -> Any:
    """Leave out sums over more candidates than the run kept: a rank beyond them is unknown."""
    most = None if info is None else info.identity.entry("headroom") or 0
    unknown = {f"headroom_{num}": float("nan") for num in LEVELS if most is not None and most < num}
    return frame.assign(**unknown)


def ranked_otherwise(rows: RowArrays) -> Any:
    """Find ranks that are 1 anywhere but where a draft was accepted, or would have been had a round reached it."""
    known = rows.lengths("ranks") >= 0
    other = known & (~rows.has_ids | rows.ids_off_count | rows.is_known("drafted_parents"))
    other |= known & (rows.lengths("ranks") != rows.lengths("drafted_ids"))
    return other | rows.among(known & ~other, _ranked_off_the_drafts)


def _ranked_off_the_drafts(rows: RowArrays) -> Any:
    import numpy as np

    drafts, ranks, drafted = rows.drafts, rows.flat("ranks"), rows.flat("drafted").astype(np.int64)
    right, accepted = leads(ranks, drafted, drafted, 1), rows.flat("accepted")
    wrong = rows.per_row(np.minimum(right, drafts.verified) != accepted, drafts.owner)
    # After a round's first wrong token a rank may be unknown, and after the answer's end the right token is.
    ends = np.cumsum(rows.lengths("token_ids"))[drafts.owner][drafts.round]
    is_inside = drafts.begins[drafts.round] + drafts.place < ends
    is_right = drafts.ids == drafts.emitted(drafts.round, drafts.place)
    off = (ranks < -1) | ((ranks == -1) & (drafts.place <= right[drafts.round]))
    off |= is_inside & (ranks >= 0) & ((ranks == 1) != is_right)
    return wrong | rows.per_row(off, drafts.owner[drafts.round])


def _sums() -> Iterator[tuple[str, Any]]:
    for num in LEVELS:

        def right_of(rows: AnswerColumns, name: str = f"headroom_{num}") -> Any:
            return rows[name] + rows["num_rounds"]

        def ranked(rows: AnswerColumns, name: str = f"headroom_{num}") -> Any:
            return rows.where_known(name, "num_rounds")

        yield from ((f"right_of_{num}", right_of), (f"ranked_{num}", ranked))


# The rank of the right token where a draft was wrong. Rounds of an answer are not independent: no intervals.


@dataclass(frozen=True, slots=True)
class Headroom:
    cell: Cell
    num_candidates: int
    found: tuple[tuple[int, float], ...]
    """The share of first wrong tokens whose right token is among the draft's likeliest, by number of candidates up to
    `num_candidates`; empty if no round of the cell was wrong."""
    num_absent: int
    """Answers that drafted differently when decoded again, so that their ranks are unknown."""
    is_least: bool
    """Whether the draft is made token by token, so that ranks stop at the first wrong token and acceptance is a lower
    bound."""

    def at_least(self, text: str) -> str:
        return f"≥ {text}" if self.is_least else text


def headroom_of(run: RunTable, cells: Sequence[Cell]) -> list[Headroom]:
    """Return the headroom of each cell with recorded ranks; empty for a run that recorded none."""
    import numpy as np

    num = run.info.identity.entry("headroom")
    if num is None:
        return []
    ranks = _ranks(run.stored)
    levels = sorted({*(level for level in LEVELS if 1 < level < num), num})
    found = []
    for cell in cells:
        if (own := ranks.get(cell.key)) is not None and "headroom.1" in cell.figures:
            wrong = np.concatenate(own.wrong)
            shares = [(level, float(((wrong > 0) & (wrong <= level)).mean())) for level in levels if len(wrong)]
            found.append(Headroom(cell, num, tuple(shares), own.num_absent, own.is_least))
    return found


@dataclass(slots=True)
class _CellRanks:
    wrong: list[np.ndarray]
    """Ranks at the first wrong verified token of each round that has one."""
    num_absent: int = 0
    is_least: bool = False


def _ranks(stored: StoredRows) -> dict[CellKey, _CellRanks]:
    import numpy as np

    cells: dict[CellKey, _CellRanks] = {}
    for key, drafted, verified, accepted, ranks in _answers(stored):
        cell = cells.setdefault(key, _CellRanks([np.zeros(0)]))
        if ranks is None:
            cell.num_absent += 1
            continue
        cell.wrong.append(ranks[(np.cumsum(drafted) - drafted + accepted)[accepted < verified]])
        cell.is_least |= bool((ranks == -1).any())
    return cells


def _answers(stored: StoredRows) -> Iterator[tuple[CellKey, Any, Any, Any, Any]]:
    """Yield the tokens per round that were drafted, verified and accepted, and the ranks, of greedy drafted answers."""
    names = ("suite", "method", "error", "drafted", "verified", "accepted", "ranks")
    for batch, numbers in stored.batches(names):
        for row, number in enumerate(numbers.tolist()):
            suite, method, error, *lists = (batch.column(name)[row] for name in names)
            settings = stored.settings[number]
            if error.is_valid or not settings.greedy or method.as_py() == BASELINE or not lists[0].is_valid:
                continue
            drafted, verified, accepted, ranks = (
                one.values.to_numpy(zero_copy_only=False).astype("int64") if one.is_valid else None for one in lists
            )
            key = CellKey(suite.as_py(), "", settings.id, method.as_py())
            yield key, drafted, drafted if verified is None else verified, accepted, ranks


# Reports.


LEGEND = (
    "headroom.K = al.pooled if in each place the right token were chosen from the draft's best K, in the rounds that "
    "there were; limit = the widest round; in best K = of the first wrong tokens of rounds, those in whose place the "
    "right one was among the draft's best K."
)
LEAST = "≥: a draft made token by token is known up to its first wrong token; what would follow is not counted."


def sections(document: Document) -> list[Section]:
    """Return tables on whether to train more or to rerank; empty for a run that recorded no ranks."""
    from dflash_bench.report.tables import Column, Entry, ReportTable, Section, TableRow, number

    found = headroom_of(document.results, document.cells)
    if not found:
        return []

    def bound(one: Headroom, metric: str) -> Value:
        value = one.cell.value(metric)
        return value if value is None or not one.is_least else Entry(value, one.at_least(number(value)))

    levels = [level for level, _ in max((one.found for one in found), key=len)]
    columns = [
        Column("method", "method", "left"),
        Column("al.pooled", "al.pooled"),
        Column("headroom.4", "headroom.4"),
        Column("headroom.16", "headroom.16"),
        Column("limit", "limit", digits=0),
        *(Column(f"best_{level}", f"in best {level}") for level in levels),
    ]
    rows = [
        TableRow(
            [
                one.cell.method,
                one.cell.value("al.pooled"),
                *(bound(one, f"headroom.{num}") for num in (4, 16)),
                one.cell.widest,
                *(Entry(share, f"{share:.0%}") for _, share in one.found),
                *(None for _ in levels[len(one.found) :]),
            ],
            one.cell.heading,
            one.cell.key,
        )
        for one in found
    ]
    legend = [LEGEND, *([LEAST] if any(one.is_least for one in found) else [])]
    sentences = [text for one in found for text in _gains(one)]
    return [Section("headroom", "Train more, or rerank?", ReportTable(columns, rows, "suite"), legend, sentences)]


def _gains(one: Headroom) -> Iterator[str]:
    where = f"{one.cell.method} on {one.cell.heading}"
    known = [(num, one.cell.value(f"headroom.{num}")) for num in (16, 4)]
    now, best = one.cell.value("al.pooled"), next(((num, value) for num, value in known if value is not None), None)
    if best is not None and now is not None:
        least, most = ("at least ", "at most ") if one.is_least else ("", "")
        yield (
            f"{where}: a perfect choice among its best {best[0]} would bring {least}{best[1] - now:.2f} tokens per "
            f"round; {most}{one.cell.widest - best[1]:.2f} more, up to the limit, only another draft can."
        )
    if one.num_absent:
        yield f"{where}: {one.num_absent} answers were drafted otherwise when decoded again, and are left out."


PARTS = {"al.pooled": ("", 1.0), "headroom.4": ("///", 0.6), "headroom.16": ("\\\\\\", 0.35)}
"""Stacked parts of a bar, with their hatches and shades."""


def plot(material: Material) -> Any:
    """Draw al.pooled, and its value with the right token of the best 4 and 16, up to the limit of the block."""
    from matplotlib.patches import Patch

    from dflash_bench.report.plots import style

    several = headroom_of(material.document.results, material.cells)
    if not several:
        raise style.NothingToPlotError("the run recorded no ranks: measure with --headroom 16")
    found = {(*style.group_of(one.cell), one.cell.method): one for one in several}
    groups = [group for group in material.groups if any(group == key[:2] for key in found)]
    methods = [method for method in material.drafting if any(key[2] == method for key in found)]
    look = style.looks(material.methods)
    figure, axes_of = style.panels(groups, 0.7 + 0.3 * len(methods), material.label, sharex=True)
    for group, axes in axes_of.items():
        style.mark(axes, suite=group[0], settings=group[1])
        shown = [method for method in methods if (*group, method) in found]
        for place, method in enumerate(shown):
            one = found[*group, method]
            style.mark(
                axes.barh(place, one.cell.widest, 0.72, color=style.GRID, label="up to the limit"), method=method
            )
            _stack(axes, place, one, look[method]["color"])
        axes.set_yticks(range(len(shown)), shown)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    style.name_axes(axes_of, "tokens per round", "")
    # Neutral shades, which hold for all methods' colours.
    handles = [Patch(color=style.MUTED, alpha=shade, hatch=hatch, label=name) for name, (hatch, shade) in PARTS.items()]
    handles.append(Patch(color=style.GRID, label="up to the limit"))
    least = "≥: known up to the first wrong token" if any(one.is_least for one in several) else ""
    return style.finish(figure, axes_of, "Train more, or rerank?", least, len(groups), handles)


def _stack(axes: Any, place: int, one: Headroom, color: str) -> None:
    from dflash_bench.report.plots import style

    left = 0.0
    for name, (hatch, shade) in PARTS.items():
        if (value := one.cell.value(name)) is not None:
            bar = axes.barh(place, value - left, 0.72, left=left, color=color, alpha=shade, hatch=hatch, label=name)
            style.mark(bar, method=one.cell.method)
            left = value
    text, size = one.at_least(f"{left:.3g}"), style.type_size(10)
    axes.annotate(text, (left, place), (4, 0), textcoords="offset points", va="center", fontsize=size)


CAPTION = (
    "Hatched: the right token was among the draft's best, and a better choice among them would pay. What is left up to "
    "the limit only another draft can bring."
)
_SUMS: Mapping[str, Any] = dict(_sums())
MEASUREMENT = Measurement(
    name="headroom",
    option=(
        int | None,
        under("Measuring")(
            "After each answer, outside the clock, also record whether the right token was among the N likeliest of "
            "the draft in each drafted place; 16 is usual. The report then says what acceptance would be if it were "
            "always chosen from the best 4 or 16. At temperature 0, with dflash, eagle3, p-eagle, mtp, draft-model and "
            "medusa:top_k=1.",
            metavar="N",
            minimum=2,
            most=MOST,
            needs=(rules.greedy("no single token is then the right one"),),
            conflicts=(rules.SERVED, rules.ENGINE_HERE),
            in_race=False,
        ),
    ),
    opens=opened,
    entry=Annotated[int, Interval(ge=2, le=MOST)],
    columns={"ranks": "list of int16"},
    checks={"its ranks are not those of its drafts and tokens": ranked_otherwise},
    of_rounds=per_round,
    frame=without_unknown,
    sums=_SUMS,
    metrics=tuple(
        Metric(
            id=f"headroom.{num}",
            formula=f"al.pooled if in each drafted place the right token were chosen among the {num} likeliest of the "
            "draft, in the rounds that there were; for drafts made token by token up to the first wrong one",
            unit="tokens/round",
            at_least=1.0,
            is_length=True,
            needs_draft=True,
            top=(f"right_of_{num}",),
            bottom=(f"ranked_{num}",),
        )
        for num in LEVELS
    ),
    sections=sections,
    plots={"headroom": (CAPTION, plot)},
)
