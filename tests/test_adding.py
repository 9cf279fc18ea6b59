"""What it takes to add a drafter, a scorer, a dialect of servers and a metric: four files at most, shown by a run."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tiny
from fake_server import FakeServer
from test_plugins import DIALECT, DRAFTER, DRAFTING, SCORER, Install, install  # noqa: F401 (a fixture)

from dflash_bench import api as db

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PATCH = ROOT / "tests/data/adding/metric.toml"
MOST_FILES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("adding") / "model")


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """A prompt, few tokens, and the folder of the run."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in (3, 4)))
    return {"prompts": prompts, "max_new_tokens": 8, "out": tmp_path / "run"}


def add(install: Install, package: str, group: str, point: str, files: dict[str, str]) -> None:  # noqa: F811
    """A package of these files; one more declares it."""
    assert len(files) + len(["pyproject.toml"]) <= MOST_FILES
    install(package, f"[dflash_bench.{group}]\n{point}\n", files)


def test_a_drafter(install: Install, model: Path, asked: dict[str, Any]) -> None:  # noqa: F811
    files = {"__init__.py": DRAFTER, "drafting.py": DRAFTING}
    add(install, "my_echo", "drafters", "echo = my_echo:echo", files)
    run = db.run(model=model, methods="echo:2", **asked)
    compared = db.compare(run).data["changes"]
    assert {(change["before"], change["after"]) for change in compared} == {("ar", "echo:2")}
    assert set(run.rounds[run.rounds["method"] == "echo:2"]["drafted"]) == {2}


def test_a_scorer(install: Install, model: Path, asked: dict[str, Any]) -> None:  # noqa: F811
    add(install, "my_scorer", "scorers", "shouting = my_scorer:shouting", {"__init__.py": SCORER})
    run = db.run(model=model, methods="dflash", score="shouting", **asked)
    assert run.answers["passed"].notna().all()
    (change,) = db.compare(run).data["changes"]
    assert change["num_scored"] == 2


def test_a_dialect_of_servers(install: Install, asked: dict[str, Any]) -> None:  # noqa: F811
    add(install, "my_dialect", "dialects", "mine = my_dialect:mine", {"__init__.py": DIALECT})
    with FakeServer(dialect="vllm", round_s=0.002) as plain, FakeServer(dialect="vllm", round_s=0.001) as drafting:
        run = db.run(servers={"plain": plain.url, "dflash": drafting.url}, **asked)
    servers = run.document.results.info.identity.servers
    assert {server.dialect for server in servers.values()} == {"mine"}
    assert {(change["before"], change["after"]) for change in db.compare(run).data["changes"]} == {("ar", "dflash")}


def patched(folder: Path) -> set[str]:
    """Copies the package with the metric added, and returns the files that this took."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "dflash_bench", folder / "dflash_bench", ignore=ignored)
    shutil.copytree(ROOT / "suites", folder / "suites")
    inserts = tomllib.loads(PATCH.read_text(encoding="utf-8"))["insert"]
    for insert in inserts:
        path = folder / "dflash_bench" / insert["file"]
        text, line = path.read_text(encoding="utf-8"), f"{insert['behind']}\n"
        assert text.count(line) == 1, f"{insert['file']} has not once the line {insert['behind']!r}"
        path.write_text(text.replace(line, f"{line}{insert['lines'].strip(chr(10))}\n"), encoding="utf-8")
    return {insert["file"] for insert in inserts}


SHOWN = """
import json, shutil, sys
sys.modules["numba"] = None  # for a package at another place, all kernels would be compiled anew
import dflash_bench as db
from dflash_bench.report import FORMATS

model, prompts = sys.argv[1:]
run = db.run(model=model, prompts=prompts, methods=["dflash"], max_new_tokens=8, out="run")
again = shutil.copytree("run", "again")
first = run.rounds.query("round == 0").groupby("method")["round_s"].mean()
metrics = run.metrics().query("metric == 'first_round_ms'").set_index("method")["value"]
print(json.dumps({
    "measured": first.to_dict(), "metrics": metrics.to_dict(), "between": db.compare(run, again).data["changes"],
    "by": db.compare(run, by="output-position").data["cells"],
    "compared": str(db.compare(run)), **{name: FORMATS[name](run.document) for name in ("table", "markdown", "csv")},
}))
"""


def test_a_metric_of_each_row(model: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    """It is measured, stored, compared, shown in every format, and given to Python."""
    assert len(patched(tmp_path)) <= MOST_FILES
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, str(model), str(asked["prompts"])], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["metrics"] == {
        method: pytest.approx(1000 * seconds, rel=1e-5) for method, seconds in told["measured"].items()
    }
    (row, _) = csv.DictReader(io.StringIO(told["csv"]))
    assert float(row["first_round_ms"]) == pytest.approx(told["metrics"]["ar"], rel=1e-5)
    assert "first round ms" in told["markdown"] and "mean milliseconds of an answer's first round" in told["markdown"]
    assert "first" in told["table"] and "first_round_ms" in told["compared"]
    assert told["between"][-1]["method"] == "dflash"
    assert told["between"][-1]["ratios"]["first_round_ms"]["ratio"][0] == 1
    assert not any("first_round_ms" in cell["timings"] for cell in told["by"]), "it is of whole answers"
