"""The machine record: complete, writable as JSON, free of names, and printed on one line."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import __version__
from dflash_bench.core import environment
from helpers.each import each
from helpers.runs import ENVIRONMENT as ENV

H200 = {"name": "NVIDIA H200", "driver": "570.1", "memory_bytes": 1}


@each(
    ("changes", "line"),
    [
        ({}, "Intel Xeon E5-2670 v3, 2 cores, Linux; Python 3.11.7, torch 2.13.0"),
        ({"cpu": "Intel(R) Xeon(R) Processor"}, "Intel Xeon, 2 cores, Linux; Python 3.11.7, torch 2.13.0"),
        ({"cpu": None, "num_usable_cores": 1}, "x86_64, 1 core, Linux; Python 3.11.7, torch 2.13.0"),
        ({"num_usable_cores": None}, "Intel Xeon E5-2670 v3, 8 cores, Linux; Python 3.11.7, torch 2.13.0"),
        (
            {"gpus": [H200, H200], "packages": {"torch": None}},
            "2 x NVIDIA H200, Intel Xeon E5-2670 v3, 2 cores, Linux; Python 3.11.7, no torch",
        ),
    ],
)
def test_one_line_says_what_ran(changes: dict[str, Any], line: str) -> None:
    assert environment.one_line(ENV | changes) == line


def test_this_machine_can_be_described_as_json() -> None:
    env = environment.describe()
    assert json.loads(json.dumps(env)) == env
    assert env["packages"]["dflash-bench"] == __version__
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["num_cores"] >= 1


def test_the_record_names_no_user_host_or_folder() -> None:
    text = json.dumps(environment.describe())
    words = set(text.replace('"', " ").replace(",", " ").split())
    assert not words & {getpass.getuser(), socket.gethostname()}
    assert str(Path.home()) not in text
    assert str(Path(environment.__file__).parents[2]) not in text


def test_describing_never_loads_torch() -> None:
    code = "import sys; from dflash_bench.core import environment as e; e.describe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_package_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package-here",))
    assert environment.describe()["packages"] == {"dflash-bench": __version__, "no-such-package-here": None}


def test_only_the_variables_that_change_results_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("A_SECRET", "hidden")
    variables = environment.describe()["variables"]
    assert tuple(variables) == environment.VARIABLES
    assert (variables["OMP_NUM_THREADS"], variables["CUDA_VISIBLE_DEVICES"]) == ("2", None)


def test_the_cpu_model_is_read_from_cpuinfo_where_there_is_one(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU 9\n\nprocessor\t: 1\nmodel name\t: Some CPU 9\n")
    assert environment._cpu_model(cpuinfo) == "Some CPU 9"
    fallback = environment._cpu_model(tmp_path / "nothing")
    assert fallback is None or fallback


@each(
    ("table", "gpus"),
    [
        (None, []),
        ("", []),
        ("No devices were found", []),
        (
            "NVIDIA H200, 570.1, 2 MiB",
            [{"name": "NVIDIA H200", "driver": "570.1", "memory_bytes": 2 * 2**20}],
        ),
        ("A, B, 1.2, [N/A]", [{"name": "A, B", "driver": "1.2", "memory_bytes": None}]),
    ],
)
def test_gpus_are_what_the_driver_lists(
    monkeypatch: pytest.MonkeyPatch, table: str | None, gpus: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(environment, "_output", lambda *_: table)
    assert environment.gpus() == gpus


def test_a_command_that_is_absent_fails_or_hangs_has_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "COMMAND_TIMEOUT_S", 0.2)
    assert environment._output("no-such-command-here") is None
    assert environment._output(sys.executable, "-c", "raise SystemExit(3)") is None
    assert environment._output(sys.executable, "-c", "import time; time.sleep(9)") is None


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return package


def test_a_clean_checkout_has_a_commit(package: Path) -> None:
    found = environment._git(package)
    assert found is not None
    assert (len(found["commit"]), found["dirty"]) == (40, False)


@pytest.mark.parametrize("changed", ["package/code.py", "package/new.py", "suites/new.toml"])
def test_changed_code_or_suites_make_a_checkout_dirty_but_results_do_not(package: Path, changed: str) -> None:
    (package.parent / "results.csv").write_text("1\n")
    assert (environment._git(package) or {})["dirty"] is False
    path = package.parent / changed
    path.parent.mkdir(exist_ok=True)
    path.write_text("x = 2\n")
    assert (environment._git(package) or {})["dirty"] is True


def test_a_package_inside_someone_elses_repository_has_no_commit(package: Path, tmp_path: Path) -> None:
    installed = tmp_path / "venv" / "package"
    installed.mkdir(parents=True)
    assert environment._git(installed) is None


def test_the_commit_is_that_of_the_code_that_runs_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"commit": "first", "dirty": False}, {"commit": "second", "dirty": True}])
    monkeypatch.setattr(environment, "_git", lambda: next(answers))
    environment._running_code.cache_clear()
    try:
        environment.describe()["git"]["commit"] = "changed by a caller"
        assert environment.describe()["git"] == {"commit": "first", "dirty": False}
    finally:
        environment._running_code.cache_clear()


def test_a_repository_without_commits_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "package").mkdir()
    assert environment._git(tmp_path / "package") is None


def test_memory_is_the_machines_and_that_of_every_gpu_that_says(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"name": "a", "driver": "1", "memory_bytes": 5}, {"name": "b", "driver": "1", "memory_bytes": None}]
    monkeypatch.setattr(environment, "gpus", lambda: gpus)
    monkeypatch.setattr(environment, "_memory_bytes", lambda: 7)
    assert environment.memory_bytes() == (7, [5])
