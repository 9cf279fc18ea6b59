"""DFlash and EAGLE-3 with nano on the suites of mathematics: the headline, as a report and as an example of one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from studies import _reported
from studies._study import Made, StudyError, Work, bench

TAKES = "ten minutes of one core"
PAGES = ("speed/math-nano-cpu.md", "speed/math-nano-cpu-xeon.md", "example/*")
"""The second page is the same study on another machine."""
MOST_BYTES = 700_000
"""Size limit of the example, which is committed."""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, help="number of prompts of each suite (all that are embedded)")
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="make the example of this run; no page, no other run"
    )


def make(work: Work, options: Namespace) -> Made:
    limit = () if options.limit is None else ("--limit", options.limit)
    run = options.run or work.run("run", "--suite", "math", "--method", "dflash", "--method", "eagle3", *limit)
    page = {} if options.run else {PAGES[0]: _reported.page(work, run)}
    return Made({**page, **example(run, work.folder / "example")})


def example(run: Path, folder: Path) -> dict[str, Path]:
    """Return the page, report, card, plots and film of a run. Raises StudyError if they are too large to commit."""
    folder.mkdir(exist_ok=True)
    bench("report", run, "--out", folder / "report.html", "--answers", 32, shown=True)
    (folder / "report.md").write_text(bench("report", run, "--format", "markdown"), encoding="utf-8")
    (folder / "card.txt").write_text(bench("card", run), encoding="utf-8")
    bench("plot", run, "--out", folder, "--format", "svg", shown=True)
    bench("movie", run, "--out", folder / "movie.svg", shown=True)
    files = sorted(folder.iterdir())
    if (size := sum(path.stat().st_size for path in files)) > MOST_BYTES:
        raise StudyError(f"{size} bytes are too much to commit ({MOST_BYTES} at most): use fewer prompts or suites")
    return {f"example/{path.name}": path for path in files}
