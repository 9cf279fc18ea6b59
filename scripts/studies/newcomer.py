"""A newcomer's path: how long it takes from a bare clone to the first answer, and to its page.

Nothing is there before but Python, git and the machine's own network; pip's cache is not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from dflash_bench.core.environment import describe, one_line
from dflash_bench.report.tables import markdown
from studies._study import ROOT, Made, StudyError, Work, tell

TAKES = "three minutes"
PAGES = ("speed/newcomer.md",)

STEPS = (
    ("the clone", "git clone --quiet {root} checkout"),
    ("the set-up, by pip", ". checkout/scripts/_setup; set_up"),
    ("the first answer", "checkout/scripts/run --suite math --method dflash,eagle3 --limit 4"),
    ("its page", "checkout/.venv/bin/dflash-bench report -o page.html"),
    ("the README's first command, whole", "checkout/scripts/run --suite math --method dflash,eagle3"),
)
HEAD = """# From a bare clone to the first answer

`{command}` makes this page. {machine}.

{table}

The first answer came {first:.0f} seconds after the clone began. With the first run, kernels are compiled for the
processor, once.

{source}
"""
LOCAL = (
    "On this machine, pip finds most packages on its own disk; elsewhere they are downloaded, about 400 MB on a CPU."
)
REMOTE = "The set-up downloads the packages, about 400 MB on a CPU."


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="then the README's first command, whole")


def make(work: Work, options: Namespace) -> Made:
    folder = work.folder / "newcomer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = [(what, timed(folder, command)) for what, command in STEPS[: None if options.full else -1]]
    first = sum(seconds for _, seconds in rows[:3])
    table = markdown(("step", "seconds"), [(what, f"{seconds:.1f}") for what, seconds in rows])
    shutil.rmtree(folder)
    configured = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    source = LOCAL if "find-links" in configured or "PIP_FIND_LINKS" in os.environ else REMOTE
    machine = one_line(describe())
    text = HEAD.format(command=work.command, machine=machine, table=table, first=first, source=source)
    return Made({PAGES[0]: text})


def timed(folder: Path, command: str) -> float:
    """Return the seconds of a command typed by a newcomer. Raises StudyError if it fails."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG") or name.startswith("PIP_")}
    # Hide the set-up of the user who runs this study.
    kept["PATH"] = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if not part.startswith(str(ROOT)))
    env = {**kept, "HOME": str(folder), "PIP_NO_CACHE_DIR": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.format(root=ROOT)], cwd=folder, env=env, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise StudyError(f"{command} ended with exit status {done.returncode}")
    tell(f"{seconds:.1f} s: {command}")
    return seconds
