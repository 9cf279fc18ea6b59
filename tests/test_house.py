"""The linter that keeps the packages apart passes, and fails for an import against the grain."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "dflash_bench", folder / "dflash_bench", ignore=ignored)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code, "--no-logo"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_import_against_the_grain_is_caught(copy: Path) -> None:
    linted = lint(copy)
    assert linted.returncode == 0, linted.stdout
    with (copy / "dflash_bench/engine/loop.py").open("a", encoding="utf-8") as file:
        file.write("\nimport dflash_bench.results.store\n")
    linted = lint(copy)
    assert linted.returncode == 1
    assert "dflash_bench.engine.loop -> dflash_bench.results.store" in linted.stdout.replace("\n", "")


MODULES = {path.relative_to(ROOT / "dflash_bench"): path for path in (ROOT / "dflash_bench").rglob("*.py")}
PACKAGES = (
    "analysis cli core diagnose engine measurements models perf "
    "racing replay report reproduction results runner servers submissions tasks training"
).split()
PLUG_INS = {"base", "dflash", "eagle3", "medusa", "mtp"}
"""Stems of plug-ins: a method as a net, a format, a drafter and an objective; and what each kind of them shares."""


def test_a_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(name))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_a_stem_stands_in_two_packages_at_most_unless_it_is_a_plug_in() -> None:
    packages: dict[str, set[str]] = {}
    for name in MODULES:
        if len(name.parts) > 1 and not name.stem.startswith("__"):
            packages.setdefault(name.stem, set()).add(name.parts[0])
    assert not {stem: found for stem, found in packages.items() if len(found) > 2 and stem not in PLUG_INS}


def test_the_packages_are_named_and_the_api() -> None:
    packages = {name.parts[0] for name in MODULES if len(name.parts) > 1}
    assert packages == {*PACKAGES, "api"}


MOST_PARAMETERS = 12


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def too_long(text: str) -> list[str]:
    """Return the functions of a module's text that take more than `MOST_PARAMETERS`."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f"{node.lineno} {node.name}" for node in functions if len(parameters(node)) > MOST_PARAMETERS]


def test_no_function_takes_more_than_twelve_parameters() -> None:
    """Commands take groups of options, and all else a config, or options typed from its fields."""
    names = ", ".join(f"p{number}" for number in range(MOST_PARAMETERS + 1))
    assert too_long(f"def planted({names}): ...") == ["1 planted"]
    found = {str(name): too_long(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert not {name: functions for name, functions in found.items() if functions}


LARGE = 500
"""Lines from which two files are better apart, even if one of them has no other reader."""
OF_A_KIND = tuple(
    """
    analysis/findings analysis/peers cli engine/drafters models/formats models/nets report/plots servers/dialects
    tasks/scorers training
    """.split()
)
"""Folders of plug-ins, groups of commands, and objectives: one file each, whoever imports it."""
PROCESSES = {"servers/supervisor.py", *(f"tasks/isolation/{name}.py" for name in ("child", "supervisor", "testing"))}
"""Started as a process of their own, or loaded only in the sandbox, each on its side of it."""


def imported_by(text: str, folder: str) -> set[str]:
    """Return the modules that a module's text imports, by their dotted names in the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("dflash_bench.") for name in found if name.startswith("dflash_bench.")} - {folder}


def lone_readers(texts: dict[str, str]) -> set[str]:
    """Return the files with one importer, of the same package, which they could join within `LARGE` lines."""
    dotted = {name: name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in texts}
    imports = {name: imported_by(text, dotted[name]) for name, text in texts.items()}
    lone = set()
    for name, text in texts.items():
        readers = [other for other in texts if other != name and dotted[name] in imports[other]]
        if len(readers) != 1 or name.endswith("__init__.py") or "/" not in name:
            continue
        together = len(text.splitlines()) + len(texts[readers[0]].splitlines())
        if readers[0].split("/")[0] == name.split("/")[0] and together < LARGE:
            lone.add(name)
    return lone


def test_a_file_with_one_reader_joins_it_unless_it_is_a_plug_in() -> None:
    planted = {"core/one.py": "from dflash_bench.core import two\n", "core/two.py": "A = 1\n", "core/three.py": ""}
    assert lone_readers(planted) == {"core/two.py"}
    texts = {name.as_posix(): path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    found = {name for name in lone_readers(texts) if not name.startswith(tuple(f"{kind}/" for kind in OF_A_KIND))}
    assert found <= PROCESSES
