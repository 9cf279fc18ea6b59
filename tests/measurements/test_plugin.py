"""A measurement of another package, one file: its run is checked, reported, drawn and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "data/waiting"
SCRIPT = """
import io
import json
import sys
from contextlib import redirect_stdout
from itertools import count
import my_waiting
import dflash_bench as db
from dflash_bench import cli
from dflash_bench.report.sections import of_document
from dflash_bench.runner import session

session.forwards_of = lambda _: None  # it takes most of the time of such a run
FEW = {"limit": 3, "max_new_tokens": 8, "audit": "none"}

def tool(*words):
    sys.argv, shown, status = ["dflash-bench", *words], io.StringIO(), 0
    with redirect_stdout(shown):
        try:
            cli.main()
        except SystemExit as stopped:
            status = stopped.code or 0
    return status, shown.getvalue()

def measured(out, step_s):
    ticks = count()
    my_waiting.waited_s = lambda: step_s * next(ticks)
    return db.run(suite="gsm8k", methods="dflash", **FEW, out=out, waiting=True)

quiet, busy = measured("quiet", 0.0), measured("busy", 10.0)
without = db.run(suite="gsm8k", methods="dflash", **FEW, out="without")
shares = {run.folder.name: [cell.value("on_core") for cell in run.document.cells] for run in (quiet, busy, without)}
refused = measured("impossible", -1.0).answers
change = db.compare("quiet", "busy").table
print(json.dumps({
    "refused": [refused["error"].tolist(), refused["waited_s"].notna().sum().item()],
    "waited_s": sorted({*busy.answers["waited_s"]}), "shares": shares,
    "entry": json.loads((quiet.folder / "run.json").read_text())["waiting"],
    "findings": {run.folder.name: [one.kind for one in run.findings] for run in (quiet, busy)},
    "sections": {
        run.folder.name: "waiting" in [one.id for one in of_document(run.document)] for run in (quiet, without)
    },
    "compared": sorted({*change["metric"]}),
    "baseline": tool("baseline", "quiet", "--out", "base.json"),
    "check": tool("check", "busy", "--baseline", "base.json", "--all"),
    "plot": tool("plot", "quiet", "--format", "svg"),
    "help": tool("run", "--help-all"),
}))
"""


def test_a_broken_one_is_named_and_left_out(tmp_path: Path) -> None:
    metadata = tmp_path / "my_broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[dflash_bench.measurements]\nbroken = my_broken:MEASUREMENT\n")
    done = ran(tmp_path, "-m", "dflash_bench", "methods", packages=tmp_path)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "my-broken 1.0" in done.stderr


def ran(folder: Path, *argv: str, packages: Path = PACKAGE) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not show waiting")
def test_a_run_with_it_is_checked_reported_drawn_and_compared(tmp_path: Path) -> None:
    done = ran(tmp_path, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    errors, num_measured = told["refused"]
    assert all("it waited before it began" in error for error in errors) and not num_measured
    assert told["waited_s"] == [10.0] and told["entry"] == "/proc/self/schedstat"
    assert told["shares"]["quiet"] == [1.0, 1.0] and told["shares"]["without"] == [None, None]
    assert "busy_machine" in told["findings"]["busy"] and "busy_machine" not in told["findings"]["quiet"]
    assert told["sections"] == {"quiet": True, "without": False} and "on_core" in told["compared"]
    assert [told[name][0] for name in ("baseline", "check", "plot", "help")] == [0] * 4
    assert "on_core" in told["check"][1] and "--waiting" in told["help"][1] and [*tmp_path.glob("**/waiting.*")]
