"""`db.compare` and `db.check`: runs against each other and against a baseline. Loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_bench.api.reading import Run
from dflash_bench.core.errors import UserError

if TYPE_CHECKING:
    from dflash_bench.analysis.gate.checks import Check, GateResult
    from dflash_bench.report.compare import ComparisonText


@dataclass(frozen=True)
class Compared:
    """Changes between runs on shared prompts. `str` is the text of `dflash-bench compare`, `data` its JSON."""

    text: str
    data: dict[str, Any]
    found: ComparisonText = field(repr=False)
    """For the page; not part of the public API."""

    def report(self, path: str | Path) -> Path:
        """Write the comparison as an HTML page, all in one file, and return its path.

        Raises UserError if the file cannot be written.
        """
        from dflash_bench.report.compare import write_comparison

        write_comparison(self.found, Path(path))
        return Path(path)

    @property
    def notes(self) -> list[str]:
        """Caveats on the numbers, one sentence each."""
        return list(self.data["notes"])

    @cached_property
    def table(self) -> Any:
        """A tidy pandas DataFrame with a row per metric that was compared, as the ratio after / before.

        Columns: suite, method (None if methods are compared), settings, before, after (runs, or methods of the one
        run), metric, value (a ratio: 1 is no change), low, high (95 % interval, or NaN), p (adjusted for their number,
        or NaN), n (prompts that both answered).
        """
        import pandas as pd

        columns = ["suite", "method", "settings", "before", "after", "metric", "value", "low", "high", "p", "n"]
        names = ("suite", "method", "setting", "before", "after")
        rows = [
            (*(change[name] for name in names), metric, *ratio["ratio"], ratio["p"], change["num_prompts"])
            for change in self.data.get("changes", ())
            for metric, ratio in change["ratios"].items()
        ]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(["value", "low", "high", "p"], float))

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from dflash_bench.report.html import escape

        return f"<pre>{escape(self.text)}</pre>"


def compare(*runs: Run | str | Path, by: str = "suite", allow: Sequence[str] = ()) -> Compared:
    """Compare the first run with each other run, or the methods of a single run.

    Runs are `Run`s or folders. `by` splits metrics by suite, category, turn, prompt-length, output-position,
    context-position, part, text-kind, or a column of the prompts. Raises UserError for runs that differ in model,
    settings, machine or other properties that metrics depend on, unless `allow` names the difference, as `dflash-bench
    compare --allow` does.
    """
    return comparison(runs, by=by, allow=allow)


def comparison(
    runs: Sequence[Run | str | Path],
    *,
    by: str = "suite",
    against: str | None = None,
    compat: str | None = None,
    allow: Sequence[str] = (),
    width: int | None = None,
) -> Compared:
    """Compare as `compare`; only the command line has `against` (published figures), `compat` and `width`."""
    from dflash_bench.report.compare import compared

    folders = [folder_of(run) for run in runs]
    found = compared(folders, by=by, against=against, compat=compat, allow=tuple(allow), width=width)
    return Compared(found.text, found.json, found)


@dataclass(frozen=True)
class CheckResult:
    """Result of `check`. `str` is the text of `dflash-bench check`."""

    found: GateResult
    """For the command line; not part of the public API."""

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Check]:
        """The failed checks, each with `suite`, `method`, `kind`, `found`, `expected`, `p` and `reason`."""
        return self.found.outcome.failures

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was allowed, could not be checked, or limits the result, one sentence each."""
        return self.found.outcome.notes

    @cached_property
    def table(self) -> Any:
        """A pandas DataFrame with a row per check.

        Columns: suite, method, setting, kind (the id of a metric, or of a flaw), run, found, expected, tolerance (a
        share of expected), p (NaN where nothing is random), failed, reason.
        """
        import pandas as pd

        names = tuple(
            """
            suite method setting kind run found expected tolerance p failed reason
            """.split()
        )
        rows = [[getattr(check, name) for name in names] for check in self.found.outcome.checks]
        return pd.DataFrame(rows, columns=list(names)).astype(dict.fromkeys(["found", "expected", "p"], float))

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        from dflash_bench.report import gate

        return gate.text(self.found.outcome)


def check(
    runs: Sequence[Run | str | Path] | Run | str | Path,
    baseline: str | Path | None = None,
    limits: str | Path | None = None,
    allow: Sequence[str] = (),
    rescore: bool | None = None,
    require_speed: bool = False,
) -> CheckResult:
    """Check runs against a baseline, or against the minimum that every run must reach.

    `baseline` is a file of `dflash-bench baseline`; without one only the checks of every run are made. `limits` is a
    TOML file of limits, `rescore` as `--rescore` and `--no-rescore`, `require_speed` as `--require-speed`.

    Raises UserError for a run that cannot be read, a baseline of other prompts, and if nothing can be judged. A failed
    check raises nothing: `passed` is False.
    """
    from dflash_bench.analysis.gate.checks import check_runs
    from dflash_bench.diagnose.reread import reread

    several = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    if not several:
        raise UserError("nothing to check: give at least one run")
    before, least = (None if path is None else Path(path) for path in (baseline, limits))
    folders = [folder_of(run) for run in several]
    return CheckResult(
        check_runs(folders, before, least, tuple(allow), lambda results: reread(results, rescore), require_speed)
    )


def folder_of(run: Run | str | Path) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)
