"""The linter that keeps the rooms apart: it passes, and each of these imports, planted in a copy, makes it fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
ABSURD = [
    ("engine/decoding.py", "dflash_bench.results.store"),
    ("engine/decoding.py", "dflash_bench.analysis.metrics"),
    ("engine/judge.py", "dflash_bench.tasks.scoring"),
    ("engine/drafters/dflash.py", "dflash_bench.engine.local"),
    ("servers/backend.py", "dflash_bench.engine.local"),
    ("servers/client.py", "dflash_bench.servers.detection"),
    ("analysis/metrics.py", "dflash_bench.servers.client"),
    ("run/runner.py", "dflash_bench.report.plots"),
    ("run/runner.py", "dflash_bench.analysis.findings"),
    ("analysis/metrics.py", "dflash_bench.models.presets"),
    ("analysis/stats.py", "dflash_bench.analysis.metrics"),
    ("models/common.py", "dflash_bench.models.loading"),
    ("results/parts.py", "dflash_bench.results.frame"),
    ("tasks/scoring/numbers.py", "dflash_bench.tasks.scoring.code"),
    ("train/loop.py", "nano"),
    ("doctor/probes.py", "dflash_bench.doctor.diagnosis"),
    ("train/loop.py", "dflash_bench.doctor.probes"),
    ("report/tables.py", "dflash_bench.report.html"),
    ("doctor/probes.py", "dflash_bench.crosscheck.causes"),
    ("crosscheck/causes.py", "dflash_bench.report.tables"),
    ("run/session.py", "dflash_bench.api.reading"),
    ("plugins.py", "dflash_bench.methods"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "dflash_bench", folder / "dflash_bench", ignore=ignored)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code, "--no-logo"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_no_room_imports_what_it_should_not_know(copy: Path) -> None:
    linted = lint(copy)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(("module", "imported"), ABSURD)
def test_an_import_against_the_grain_is_caught(copy: Path, module: str, imported: str) -> None:
    path = copy / "dflash_bench" / module
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\nimport {imported}\n", encoding="utf-8")
    linted = lint(copy)
    path.write_text(text, encoding="utf-8")
    importer = "dflash_bench." + module.removesuffix(".py").replace("/", ".")
    assert linted.returncode == 1
    assert f"{importer} -> {imported}" in linted.stdout.replace("\n", "")
