"""A fixture of pytest, `dflash_bench`: an engine's own tests measure, judge and gate its speculative decoding.

    def test_drafting_pays(dflash_bench):
        run = dflash_bench.run(suite="gsm8k", servers={"plain": PLAIN_URL, "dflash": DFLASH_URL}, limit=16)
        dflash_bench.check(run, baseline="base.json")

pytest loads this module by itself; it loads nothing else before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dflash_bench.api.judging import CheckResult
    from dflash_bench.api.reading import Run

REPORTED = "dflash_bench_runs"
"""The attribute of a test that holds the folders of its runs, for the line below a failure."""


class Bench:
    """Measures and checks for one test; runs are kept in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Path] = []

    def run(self, **options: Any) -> Run:
        """Measure as `dflash_bench.run` does and return the run.

        Fails the test if an answer failed or differs from the target's own by more than rounding explains, or if
        another finding forbids a speed-up; raises UserError as `dflash_bench.run`.
        """
        import dflash_bench as db

        out = Path(options.pop("out", None) or self.folder / f"run{len(self.runs) + 1}")
        self.runs.append(out)
        run = db.run(out=out, **options)
        faults = [finding.text for finding in run.findings if finding.forbids or finding.kind == "failed"]
        if faults:
            pytest.fail(f"{out}: {'; '.join(faults)}", pytrace=False)
        return run

    def check(
        self,
        *runs: Run | str | Path,
        baseline: str | Path | None = None,
        limits: str | Path | None = None,
        allow: Sequence[str] = (),
        require_speed: bool = False,
    ) -> CheckResult:
        """Fail the test with the failed checks, as `dflash-bench check` lists them; return the result otherwise."""
        import dflash_bench as db

        result = db.check(runs or self.runs, baseline=baseline, limits=limits, allow=allow, require_speed=require_speed)
        if not result:
            pytest.fail(str(result), pytrace=False)
        return result


@pytest.fixture
def dflash_bench(tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    """Measure, judge and gate: `run(**options)` as `dflash_bench.run`, and `check(*runs, baseline=...)`."""
    bench = Bench(tmp_path)
    setattr(request.node, REPORTED, bench.runs)
    return bench


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Report below a failure the command that shows the run."""
    outcome = yield
    report, runs = outcome.get_result(), getattr(item, REPORTED, [])
    if report.when == "call" and report.failed and runs:
        lines = "\n".join(f"dflash-bench report {run}" for run in runs)
        report.sections.append(("dflash-bench", f"to see what was measured:\n{lines}"))
