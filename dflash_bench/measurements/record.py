"""Drafts at every position of an answer, for exact `replay`; and whether the draft's confidence can be trusted.

After each greedy answer, outside its timing, the draft is made once at each position (`engine/recording.py`). A draft
token counts only if all tokens before it are right, since only then does a round reach it. Positions of an answer are
not independent, so no interval is made from their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.measurement import Columns, Instrument, Measurement
from dflash_bench.core.methods import BASELINE, METHODS, Method
from dflash_bench.core.option import under
from dflash_bench.core.types import Answer, CellKey, Message
from dflash_bench.runner import rules

if TYPE_CHECKING:
    import numpy as np

    from dflash_bench.replay.stored_answers import ReplayCell
    from dflash_bench.report.document import Document
    from dflash_bench.report.plots.style import Material
    from dflash_bench.report.tables import Section, Value
    from dflash_bench.results.row_arrays import RowArrays
    from dflash_bench.results.table import RunTable


EVERY_POSITION = "every-position"


class DraftRecorder(Instrument):
    def identity(self) -> str:
        return EVERY_POSITION

    def judged(self, record: Answer, messages: Sequence[Message], backend: Any) -> Columns:
        if not record.settings.greedy or record.generation.error or record.method == BASELINE:
            return {}
        found = backend.positions(record.method, messages, record.settings, record.generation)
        if found is None:
            return {}
        columns = {
            "recorded_ids": found.ids,
            "recorded_accepted": found.accepted,
            "recorded_scores": found.scores,
            "recorded_draft_s": found.draft_s,
            "recorded_verify_s": found.verify_s,
        }
        return {name: value for name, value in columns.items() if value is not None}


def opened(options: Any, methods: Sequence[Method]) -> DraftRecorder:
    for method in methods:
        require_recorded(method)
    return DraftRecorder()


def require_recorded(method: Method) -> None:
    """Raise UserError for a method whose draft at a position depends on more than the text committed there."""
    known = ", ".join(kind.name for kind in METHODS.values() if kind.is_recorded)
    if not method.kind.is_recorded:
        why = "trees" if method.kind.shape == "tree" else "not the same number of tokens by the text alone"
        raise UserError(f"--record: {method.label} drafts {why}; methods that can be recorded: {known}")
    if "auto" in method.options.values():
        raise UserError(f"--record: {method.label} chooses by times of earlier rounds; give it a number")


def recorded_something_else(rows: RowArrays) -> Any:
    """Find recordings that are not one draft per token but the last, or that contradict the answer's own tokens."""
    import numpy as np

    broken = np.zeros(rows.num, dtype=bool)
    for row in np.flatnonzero(rows.is_known("recorded_accepted")).tolist():
        ids, accepted, tokens = (
            rows.batch.column(name)[row].values.to_numpy()
            for name in ("recorded_ids", "recorded_accepted", "token_ids")
        )
        broken[row] = not _follows(ids, accepted, tokens)
        for name, more in (("recorded_draft_s", 0), ("recorded_verify_s", 1)):
            if (cell := rows.batch.column(name)[row]).is_valid:
                seconds = cell.values.to_numpy()
                is_sound = len(seconds) * len(accepted) == len(ids) + more * len(accepted)
                broken[row] |= not (is_sound and np.isfinite(seconds).all() and seconds.min() >= 0)
    return broken


def _follows(ids: Any, accepted: Any, tokens: Any) -> bool:
    import numpy as np

    num = len(accepted)
    if num != len(tokens) - 1 or not num or len(ids) % num or not len(ids):
        return False
    drafts = ids.reshape(num, -1)
    width = drafts.shape[1]
    places = np.arange(num)[:, None] + 1 + np.arange(width)
    is_same = drafts == tokens[np.minimum(places, num)]
    is_inside, place = places <= num, np.arange(width)
    is_kept = place < accepted[:, None]
    ends = is_inside & (place == accepted[:, None]) & is_same
    return bool(((accepted >= 0) & (accepted <= width)).all() and is_same[is_inside & is_kept].all() and not ends.any())


# Whether a draft's confidence can be trusted, and what cutting drafts by it would save.

NUM_BINS = 10
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Drafted tokens whose confidence is from `low` to `high`."""

    low: float
    high: float
    num_tokens: int
    confidence: float
    """Mean confidence."""
    accepted: float
    """Share of the tokens that were right."""


@dataclass(frozen=True, slots=True)
class CutPoint:
    """Rounds that verify up to the first token below a threshold: exact counts."""

    threshold: float
    length: float
    """al.pooled"""
    verified: float
    """Draft tokens verified per round."""
    saved: float
    """Share of draft tokens that are verified only without the cut."""
    more_rounds: float
    """Additional rounds of the answers, as a share of those without a cut."""


@dataclass(frozen=True, slots=True)
class Calibration:
    cell: ReplayCell
    brier: float
    """The mean of (confidence - right)^2."""
    brier_of_share: float
    """Brier score of a constant confidence equal to the share that is right; a useful confidence scores lower."""
    bins: tuple[ReliabilityBin, ...]
    cuts: tuple[CutPoint, ...]


def calibrations(run: RunTable) -> list[Calibration]:
    """Return the calibration of each recorded draft with a confidence; empty for a run that recorded none."""
    from dflash_bench.replay.stored_answers import stored_cells

    if not MEASUREMENT.is_in(run.info):
        return []
    return [one for cell in stored_cells(run) if (one := calibration(cell)) is not None]


def calibration(cell: ReplayCell) -> Calibration | None:
    """Return the calibration of a cell; None if its run recorded no confidences."""
    import numpy as np

    if not cell.has_scores or not cell.is_recorded or not cell.answers:
        return None
    scores, right = (
        np.concatenate(both) for both in zip(*(_tested(one.scores, one.positions) for one in cell.answers), strict=True)
    )
    share = float(right.mean())
    return Calibration(
        cell,
        float(((scores - right) ** 2).mean()),
        share * (1 - share),
        tuple(_bins(scores, right)),
        tuple(_cuts(cell)),
    )


def _tested(scores: Any, positions: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the confidence of each token whose predecessors are all right, and whether the token itself is right."""
    import numpy as np

    places = np.arange(scores.shape[1])
    is_tested = places <= positions[:, None]
    return scores[is_tested].astype(np.float64), (places < positions[:, None])[is_tested]


def _bins(scores: np.ndarray, right: np.ndarray) -> Iterator[ReliabilityBin]:
    import numpy as np

    numbers = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    for number in np.unique(numbers).tolist():
        own = numbers == number
        low, high = number / NUM_BINS, (number + 1) / NUM_BINS
        yield ReliabilityBin(low, high, int(own.sum()), float(scores[own].mean()), float(right[own].mean()))


def _cuts(cell: ReplayCell) -> Iterator[CutPoint]:
    """Yield the point without a cut (threshold 0), then a point for each threshold."""
    import numpy as np

    from dflash_bench.replay.controllers import Cut
    from dflash_bench.replay.replay import walk

    all_rounds = all_verified = 0.0
    for threshold in (0.0, *THRESHOLDS):
        rounds, accepted, verified = np.sum([walk(answer, Cut(threshold)) for answer in cell.answers], axis=0).tolist()
        all_rounds, all_verified = all_rounds or rounds, all_verified or verified
        yield CutPoint(
            threshold,
            (accepted + rounds) / rounds,
            verified / rounds,
            1 - verified / all_verified,
            rounds / all_rounds - 1,
        )


# Reports.


SAID = "said = mean confidence of drafted tokens whose predecessors are right; right = the share of them accepted."
CUT = (
    "Rounds that verify up to the first token below the confidence, exact: verified = drafted tokens that the target "
    "reads in a round; saved = the share of all that it reads without a cut; more rounds = how many more than without "
    "a cut."
)


def sections(document: Document) -> list[Section]:
    """Return tables for recorded drafts with a confidence; empty for a run that recorded none."""
    from dflash_bench.report.tables import Column, ReportTable, Section, TableRow

    found = calibrations(document.results)
    if not found:
        return []
    columns = [
        Column("confidence", "confidence", "left"),
        Column("tokens", "tokens"),
        Column("said", "said"),
        Column("right", "right"),
    ]
    rows = [
        TableRow([f"{one.low:.1f} to {one.high:.1f}", one.num_tokens, one.confidence, one.accepted], *_place(of))
        for of in found
        for one in of.bins
    ]
    cut_columns = [
        Column("cut", "cut at", "left"),
        Column("al.pooled", "al.pooled"),
        Column("verified", "verified"),
        Column("saved", "saved"),
        Column("more_rounds", "more rounds"),
    ]
    cut_rows = [TableRow(_cut(one), *_place(of)) for of in found for one in of.cuts]
    briers = [
        f"{of.cell.method} on {of.cell.suite}: Brier score {of.brier:.3f}, where always saying the mean has "
        f"{of.brier_of_share:.3f}."
        for of in found
    ]
    return [
        Section("confidence", "Confidence", ReportTable(columns, rows, "suite · method"), [SAID], briers),
        Section("cuts", "Cut by confidence", ReportTable(cut_columns, cut_rows, "suite · method"), [CUT]),
    ]


def _cut(one: CutPoint) -> list[Value]:
    from dflash_bench.report.tables import Entry

    shares = (Entry(share, f"{share:.1%}") for share in (one.saved, one.more_rounds))
    return [f"{one.threshold:g}" if one.threshold else "none", one.length, one.verified, *shares]


def _place(of: Calibration) -> tuple[str, CellKey]:
    cell = of.cell
    return f"{cell.suite} · {cell.method}", CellKey(cell.suite, "", cell.settings.id, cell.method)


def plot(material: Material) -> Any:
    """Draw the share of draft tokens that were right by the draft's confidence, and the tokens of each point."""
    import numpy as np

    from dflash_bench.report.plots import style

    found = calibrations(material.document.results)
    if not found:
        raise style.NothingToPlotError("the run recorded no confidences: measure with --record every-position")
    of_group = [((one.cell.suite, one.cell.settings.id), one) for one in found]
    groups, look = [group for group in material.groups if group in dict(of_group)], style.looks(material.methods)
    figure, axes_of = style.panels(groups, 2.6, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        style.mark(axes, suite=group[0], settings=group[1])
        axes.plot([0, 100], [0, 100], color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for one in (one for place, one in of_group if place == group):
            own = look[one.cell.method]
            said, right = ([100 * getattr(point, name) for point in one.bins] for name in ("confidence", "accepted"))
            sizes = np.array([point.num_tokens for point in one.bins], dtype=float)
            line = axes.plot(said, right, color=own["color"], zorder=2)
            dots = axes.scatter(
                said,
                right,
                14 + 90 * sizes / sizes.sum(),
                color=own["color"],
                edgecolor=style.INK,
                marker=own["marker"],
                linewidth=0.5,
                zorder=3,
                label=one.cell.method,
            )
            style.mark([*line, dots], method=one.cell.method)
        axes.set_xlim(0, 105)
        axes.set_ylim(0, 105)
    style.name_axes(axes_of, "% said", "% right")
    note = "points: larger where more tokens are; dashed: said what was right"
    return style.finish(figure, axes_of, "How far a draft's confidence can be trusted", note, len(groups))


CAPTION = "Below the dashed line the draft is surer of itself than it should be, above it less sure."
MEASUREMENT = Measurement(
    name="record",
    option=(
        str | None,
        under("Measuring")(
            "every-position: after each answer, outside the clock, also draft once at each of its positions, for exact "
            "'replay' of other draft lengths, cuts and controllers. At temperature 0, with dflash, eagle3, mtp and "
            "draft-model.",
            metavar="WHAT",
            choices=lambda: (EVERY_POSITION,),
            needs=(rules.greedy("another draft length draws other tokens"),),
            conflicts=(rules.SERVED, rules.ENGINE_HERE),
            in_race=False,
        ),
    ),
    opens=opened,
    entry=str,
    # For an answer of T tokens, the N tokens that the draft proposes after each but the last, [(T - 1) * N]; how many
    # of them in a row match the target's own, [T - 1]; the draft's probability that each is accepted if its
    # predecessors are; seconds until 1, 2, ... N tokens of such a draft existed, and to verify 1, 2, ... N + 1 tokens.
    columns={
        "recorded_ids": "list of int32",
        "recorded_accepted": "list of int16",
        "recorded_scores": "list of float",
        "recorded_draft_s": "list of float",
        "recorded_verify_s": "list of float",
    },
    checks={"its recorded drafts are not those of its tokens": recorded_something_else},
    sections=sections,
    plots={"reliability": (CAPTION, plot)},
)
