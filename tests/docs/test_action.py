"""The GitHub action, played step by step as a runner does: its own commands, with the inputs of a workflow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]


class Runner:
    """Runs the steps that are commands in a workspace; `gh` and pip write down what they are given."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.inputs = {name: str(one["default"]) for name, one in ACTION["inputs"].items()} | inputs
        assert set(inputs) <= set(ACTION["inputs"])
        self.workspace, self.temporary, programs = folder / "workspace", folder / "temporary", folder / "programs"
        for path in (self.workspace, self.temporary, programs):
            path.mkdir()
        self.told = folder / "told"
        for name in ("gh", "python"):
            (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{self.told}"\n')
            (programs / name).chmod(0o755)
        self.summary, self.output = folder / "summary", folder / "output"
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {
            "PATH": path,
            "RUNNER_TEMP": str(self.temporary),
            "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_ACTION_PATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def value(self, text: str) -> str:
        known = {f"inputs.{name}": value for name, value in self.inputs.items()}
        known |= {"github.token": "token", "github.event.pull_request.number": "7", "runner.temp": str(self.temporary)}
        return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda match: known[match[1]], str(text))

    def play(self) -> int:
        """Return the exit status of the job: that of the first step that failed."""
        failed = 0
        for step in STEPS:
            always = "always()" in step.get("if", "")
            wanted = "inputs.comment" not in step.get("if", "") or self.inputs["comment"] == "true"
            if "run" not in step or not wanted or (failed and not always):
                continue
            env = self.environment | {name: self.value(text) for name, text in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.workspace,
                env=env,
                capture_output=True,
                text=True,
            )
            failed = failed or done.returncode
        return failed


QUICK = "--suite gsm8k --method ngram --limit 1 --max-new-tokens 8"


@pytest.mark.in_full
def test_a_good_run_passes_and_leaves_page_summary_and_answers(tmp_path: Path) -> None:
    runner = Runner(tmp_path, options=QUICK)
    assert runner.play() == 0
    folder = runner.temporary / "dflash-bench"
    assert "### dflash-bench check ✅" in runner.summary.read_text()
    assert {path.name for path in folder.iterdir()} >= {"run1", "page.html", "check.xml"}
    assert runner.output.read_text() == f"page={folder / 'page.html'}\n"
    assert runner.told.read_text() == f"python -m pip install --quiet {ROOT}\n"


def fake(runner: Runner, folder: Path, check: str) -> None:
    """Put a program in place of `dflash-bench`, which writes down its words and checks as this text of a shell says."""
    program = folder / "programs" / "dflash-bench"
    program.write_text(f'''#!/bin/sh
echo dflash-bench "$@" >> "{runner.told}"
if [ "$1" = run ]; then mkdir "$RUNNER_TEMP/dflash-bench/run1"; fi
if [ "$1" = check ]; then {check}; fi
''')
    program.chmod(0o755)


def test_what_falls_short_fails_the_job_and_is_commented_on(tmp_path: Path) -> None:
    inputs = {"comment": "true", "baseline": "ci/base.json", "install": "dflash-bench==1.0.0", "require-speed": "true"}
    runner = Runner(tmp_path, **inputs)
    fake(runner, tmp_path, 'echo "### failed" > summary.md; exit 1')
    assert runner.play() == 1
    assert runner.summary.read_text() == "### failed\n"
    folder = runner.temporary / "dflash-bench"
    assert runner.told.read_text().splitlines() == [
        "python -m pip install --quiet dflash-bench==1.0.0",
        f"dflash-bench run --suite gsm8k --method dflash --limit 16 --out {folder}/run1",
        f"dflash-bench report {folder}/run1 --out {folder}/page.html",
        f"dflash-bench check run1/ --baseline {runner.workspace}/ci/base.json --require-speed --summary summary.md "
        "--junit check.xml",
        f"gh pr comment 7 --body-file {folder}/summary.md",
    ]


def test_what_cannot_be_checked_fails_the_job_without_a_comment(tmp_path: Path) -> None:
    runner = Runner(tmp_path, baseline="none.json", comment="true")
    fake(runner, tmp_path, "exit 2")
    assert runner.play() == 2
    assert "gh" not in runner.told.read_text() and not runner.summary.exists()


def test_inputs_reach_commands_by_the_environment_alone() -> None:
    """Text in a command would be run: a title of a pull request, say."""
    commands = [step["run"] for step in STEPS if "run" in step]
    assert len(commands) == 4 and not any("${{" in command for command in commands)
    used = {
        name
        for step in STEPS
        for text in [*step.get("env", {}).values(), step.get("if", "")]
        for name in re.findall(r"inputs\.([\w-]+)", text)
    }
    assert used == set(ACTION["inputs"]), "no input does nothing"
