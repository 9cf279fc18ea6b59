"""`db.load`: a finished run with tables of answers, rounds and metrics, findings, plots and pages.

Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.measurement import number_columns
from dflash_bench.core.types import Settings

if TYPE_CHECKING:
    from dflash_bench.analysis.cells import Cell
    from dflash_bench.analysis.stats import Interval
    from dflash_bench.replay.replay import Replayed
    from dflash_bench.report.document import Document, MethodLine
    from dflash_bench.report.findings import Finding

OF_ANSWERS = (
    *"""
        suite prompt_id category turn repeat method settings order text token_ids finish_reason error answer passed
        score exactness audit num_prompt_tokens prefill_s decode_s draft_prefill_s peak_memory_bytes prompt_hash
        """.split(),
    *number_columns(),
)
"""The columns of `Run.answers`."""
OF_ROUNDS = tuple(
    """
    suite prompt_id turn repeat method settings round position drafted drafted_ids ranks verified accepted emitted
    draft_s verify_s round_s
    """.split()
)
"""The columns of `Run.rounds`."""
_PLACE = ("suite", "prompt_id", "turn", "repeat", "method")
_OF_TOKENS = ("drafted_ids", "ranks")
_LISTS = ("drafted", "verified", "accepted", "emitted", "draft_s", "verify_s", "round_s")


class Run:
    """A finished run, as `db.run` and `db.load` return it.

    It is stored in `folder`; `notes` are the messages of its measurement (empty if it was loaded). `print(run)` shows
    what `dflash-bench report --full` does; a notebook shows its main table as HTML.
    """

    def __init__(self, folder: str | Path, allow: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        """Read the run. Raises UserError as `load` does."""
        from dflash_bench.report import read_document

        self.folder = Path(folder)
        self.notes = tuple(notes)
        self.document: Document = read_document(self.folder, tuple(allow))
        """For the command line and for reports; not part of the public API."""

    def __repr__(self) -> str:
        return f"<dflash_bench.Run {self.folder.name!r}>"

    def __str__(self) -> str:
        from dflash_bench.report import FORMATS

        return FORMATS["table"](self.document)

    def _repr_html_(self) -> str:
        from dflash_bench.report import html

        return html.excerpt(self.document)

    @property
    def methods(self) -> list[str]:
        """The labels of the drafting methods, in the order of the run, without the baseline `ar`."""
        return self.document.methods

    @property
    def suites(self) -> list[str]:
        """The names of the suites, in the order of the run."""
        return self.document.suites

    @cached_property
    def answers(self) -> Any:
        """A pandas DataFrame with a row per answer, in the order of measurement.

        Columns: suite, prompt_id, category, turn (from 0), repeat (from 0), method, settings (in words), order, text,
        token_ids (an array [T]; empty if a server reports none), finish_reason (stop, length or error), error (why it
        failed, else None), answer (as the scorer extracted it), passed (True, False, or None if it was not scored),
        exactness (against the baseline: exact, near_tie, mismatch or differs), audit (against the published model),
        num_prompt_tokens, prefill_s, decode_s, draft_prefill_s (seconds), peak_memory_bytes, prompt_hash, and the
        numbers of measurements, such as energy_j (joules of the machine).

        It includes failed answers, which no metric counts.
        """
        import pandas as pd

        stored = (name for name in OF_ANSWERS if name != "settings")
        tables = [
            batch.to_pandas().assign(settings=words)[list(OF_ANSWERS)] for batch, words in self._batches(tuple(stored))
        ]
        return pd.concat(tables, ignore_index=True).sort_values("order", ignore_index=True)

    @cached_property
    def rounds(self) -> Any:
        """A pandas DataFrame with a row per round, in order within each answer, without rounds of failed answers.

        Columns: suite, prompt_id, turn, repeat, method, settings (as in `answers`), round (from 0), position (tokens of
        the answer before this round; the first token comes from prefill), drafted (number of draft tokens, for a tree
        all its nodes), drafted_ids (an array, or None if they were not stored), ranks (an array: for each position the
        right token's rank among the draft's likeliest, from 1 on, 0 if not among those recorded, -1 if unknown; or
        None), verified (number of draft tokens up to where a draft is cut), accepted (number of draft tokens accepted),
        emitted (tokens that the round added), draft_s, verify_s, round_s (seconds). Empty for servers, which hide their
        rounds.
        """
        import pandas as pd

        columns = (*_PLACE, "error", *_OF_TOKENS, *_LISTS)
        tables = [_rounds_of(batch, words) for batch, words in self._batches(columns)]
        shown = [table for table in tables if len(table)]
        if not shown:
            return pd.DataFrame({name: pd.Series(dtype=object) for name in OF_ROUNDS})
        return pd.concat(shown, ignore_index=True)[list(OF_ROUNDS)]

    def metrics(self) -> Any:
        """Return all metrics as a tidy pandas DataFrame with a row per value.

        Columns: suite, method, settings (in words), metric (an id such as al.pooled or speedup.decode, a key of
        `dflash_bench.analysis.metrics.METRICS`, which has its formula and unit), value, low, high (the 95 % interval
        over prompts, NaN for too few prompts), n (prompts). Ids that end in _ms are in milliseconds. A metric that
        cannot be computed has no row.
        """
        import pandas as pd

        rows = [
            (cell.suite, cell.method, self._in_words[cell.settings], name, value.value, value.low, value.high, n)
            for cell, n in ((cell, cell.num_prompts) for cell in self.document.cells)
            for name, value in cell.figures.items()
        ]
        table = pd.DataFrame(rows, columns=["suite", "method", "settings", "metric", "value", "low", "high", "n"])
        return table.astype({"value": float, "low": float, "high": float})

    def speedup(self, method: str, suite: str | None = None, settings: str | None = None) -> Interval:
        """Return the speed-up over plain decoding: `value`, and `low` and `high` of the 95 % interval (or None).

        It is speedup.decode (seconds per token of plain decoding over the method's), as the geometric mean over suites,
        or of one `suite`. In a run of several settings, `settings` selects one, in the words of `metrics()`. Raises
        UserError for a method, suite or settings that the run does not have, and if it has no baseline answers or a
        finding forbids the speed-up.
        """
        from dflash_bench.report.document import over_all

        line = self._line(method, settings)
        cells = line.cells_of(self.document.cells)
        if suite is None:
            found, _ = over_all(cells, line)
        else:
            found = _of_suite(cells, suite).figures.get("speedup.decode")
        if found is None:
            raise UserError(f"{self.folder} has no speed-up of {method}: {self.document.why_no_speedup(line)}")
        return found

    @property
    def findings(self) -> Sequence[Finding]:
        """Faults and weaknesses of the run, the worst first, each with `kind`, `text`, `remedy`, `places` and
        `forbids` (whether it takes their speed-ups away)."""
        return self.document.findings

    def replay(
        self,
        method: str | None = None,
        *,
        n: Sequence[int] = (),
        block: Sequence[int] = (),
        cut: Sequence[float] = (),
        nodes: Sequence[int] = (),
        controller: Sequence[str] = (),
        concurrency: Sequence[int] = (1,),
    ) -> list[Replayed]:
        """Replay the run with other draft lengths, blocks, cuts, trees, controllers or loads, without a model.

        For one method or all, the run as measured first. `controller` holds "ours", "average", "fixed:N" or the path of
        a Python file. Each result has change, is_exact (whether its counts are those that a measured run would have),
        length (al.pooled), verified, speedup and tokens_per_s; times are always estimates. Raises UserError for a
        change that the run's rounds cannot answer, and for a controller that raises, loops or returns no length.
        """
        from dflash_bench.replay.replay import changes_of, replay_all
        from dflash_bench.report import require_answers

        changes = changes_of(n, block, cut, nodes, controller)
        forbidden = {cell.key for cell in self.document.cells if cell.forbidden}
        return list(replay_all(require_answers(self.document).results, changes, concurrency, method, forbidden))

    def plot(self, name: str = "speedup", ax: Any = None) -> Any:
        """Return a matplotlib Figure of one of the plots: speedup, acceptance, positions, output, rounds, prompts, ...

        With `ax`, axes of a grid (`plt.subplots`), it is drawn in their place and a SubFigure is returned. Raises
        UserError for an unknown plot, a plot that this run has no rows for, and axes outside of a grid.
        """
        from dflash_bench.report import plots

        try:
            figure = plots.drawn(plots.Material(self.document), name, None if ax is None else _part_of_figure(ax))
        except plots.NothingToPlotError as error:
            raise UserError(f"{self.folder} has nothing to plot as '{name}': {error}") from error
        if ax is None:
            # A figure made without pyplot, which would keep it for ever, has no picture for a notebook.
            figure._repr_png_ = lambda: plots.style.with_style(plots.style.encoded, figure, "png")
        return figure

    def report(self, path: str | Path, answers: int | None = None, tokenizer: str | Path | None = None) -> Path:
        """Write an HTML page with tables, plots and answers, all in one file, and return its path.

        It shows at most `answers` answers (default 10,000). `tokenizer` is the target's tokenizer.json or its folder,
        to colour tokens (default: where the run found it). Raises UserError if the file cannot be written.
        """
        from dflash_bench.report import MOST_ANSWERS, write_page

        write_page(self.document, Path(path), answers or MOST_ANSWERS, None if tokenizer is None else Path(tokenizer))
        return Path(path)

    @cached_property
    def _in_words(self) -> dict[Settings, str]:
        from dflash_bench.results.identity import full_names, settings_of

        return full_names(settings_of(self.document.results.info.identity))

    def _line(self, method: str, settings: str | None) -> MethodLine:
        lines = [line for line in self.document.lines if line.method == method]
        if not lines:
            raise unknown("method of this run", method, self.methods)
        words = [self._in_words[line.settings] for line in lines]
        if settings is None and len(lines) > 1:
            raise UserError(f"this run has several settings; say which: settings='{words[0]}' or {words[1:]}")
        if settings is not None and settings not in words:
            raise unknown("settings of this run", settings, words)
        return lines[0] if settings is None else lines[words.index(settings)]

    def _batches(self, columns: tuple[str, ...]) -> Iterator[tuple[Any, list[str]]]:
        """Yield Arrow batches of the rows that the tables show, with the settings of each row in words."""
        stored = self.document.results.stored
        words = [self._in_words[settings] for settings in stored.settings]
        for batch, numbers in stored.batches(columns):
            yield batch.select(columns), [words[at] for at in numbers]


def load(path: str | Path, allow: Sequence[str] = ()) -> Run:
    """Load the finished run in a folder that `db.run` or `dflash-bench run` wrote.

    Raises UserError for a folder without a run, and for a run that is unfinished, damaged or edited, unless `allow`
    names that (`unfinished`, `damaged`, ..., as `dflash-bench report --allow`).
    """
    return Run(path, allow)


def _rounds_of(batch: Any, words: list[str]) -> Any:
    """Return a row per round, for answers that did not fail and that report their rounds."""
    import numpy as np

    answers = batch.to_pandas().assign(settings=words)
    answers = answers[answers["error"].isna() & answers["accepted"].notna()]
    if not len(answers):
        return answers
    answers = answers.assign(
        **{
            name: [
                [None] * len(counts) if values is None else np.split(values, np.cumsum(counts)[:-1])[: len(counts)]
                for values, counts in zip(answers[name], answers["drafted"], strict=True)
            ]
            for name in _OF_TOKENS
        },
        verified=[
            drafted if verified is None else verified
            for drafted, verified in zip(answers["drafted"], answers["verified"], strict=True)
        ],
        position=[1 + np.cumsum(emitted) - emitted for emitted in answers["emitted"]],
        round=[np.arange(len(emitted)) for emitted in answers["emitted"]],
    )
    lists = [*_OF_TOKENS, "position", "round", *_LISTS]
    table = answers[[*_PLACE, "settings", *lists]].explode(lists, ignore_index=True).dropna(subset=["round"])
    whole = ("round", "position", "drafted", "verified", "accepted", "emitted")
    real = ("draft_s", "verify_s", "round_s")
    return table.astype(dict.fromkeys(whole, "int64") | dict.fromkeys(real, "float64"))


def _of_suite(cells: Sequence[Cell], suite: str) -> Cell:
    for cell in cells:
        if cell.suite == suite:
            return cell
    raise unknown("suite of this run", suite, [cell.suite for cell in cells])


def _part_of_figure(ax: Any) -> Any:
    """Replace these axes by a figure of its own, since plots have legends and titles."""
    place, figure = ax.get_subplotspec(), ax.figure
    if place is None:
        raise UserError("ax stands in no grid; make it with plt.subplots() or figure.add_subplot()")
    ax.remove()
    return figure.add_subfigure(place)
