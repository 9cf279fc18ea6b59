"""The names that `import dflash_bench` promises, and what they cost."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_bench
from dflash_bench import api
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.requests import request_of
from helpers.forked import forked

PACKAGE = Path(dflash_bench.__file__).parent
EVERYTHING = """
import importlib, pkgutil, dflash_bench
for module in pkgutil.walk_packages(dflash_bench.__path__, "dflash_bench."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*[name for name in dflash_bench.__all__ if not callable(getattr(dflash_bench, name))])
"""


def test_the_names_are_the_same_in_all_three_places() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    typed = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(dflash_bench.__all__) == sorted(api.__all__) == sorted(filter(None, typed))
    assert set(dflash_bench.__all__) <= set(dir(dflash_bench))
    assert (PACKAGE / "py.typed").exists()


def test_each_is_there_and_described() -> None:
    for name in api.__all__:
        thing = getattr(api, name)
        assert callable(thing) and inspect.getdoc(thing), name
        if inspect.isclass(thing):
            own = [member for key, member in vars(thing).items() if not key.startswith("_")]
            described = [one for one in own if inspect.isfunction(one) or isinstance(one, property)]
            assert all(inspect.getdoc(one) for one in described if one not in (thing.__init__,)), name


def test_no_module_takes_a_public_names_place() -> None:
    done = forked(lambda: exec(EVERYTHING, {}))  # noqa: S102 - as a process of its own runs it
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dflash_bench.nothing  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = api.nothing


def test_importing_it_imports_nothing_else() -> None:
    code = "import dflash_bench, sys; print(*(name for name in sys.modules if name.startswith('dflash_bench')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dflash_bench"]


def test_it_is_a_command_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_bench", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"dflash-bench {dflash_bench.__version__}\n"


def test_options_become_what_the_command_makes_of_them(tmp_path: Path) -> None:
    asked = request_of(
        suite="gsm8k",
        methods=["dflash", "eagle3"],
        temperature=[0, 1],
        concurrency=4,
        block_size=8,
        drafts={"dflash": tmp_path},
        servers={"plain": "http://localhost:1"},
        over={"block": [8, 16]},
        prompts=str(tmp_path),
        model=tmp_path,
        context=(None, 512),
    )
    assert asked == RunRequest(
        suites=("gsm8k",),
        methods=("dflash", "eagle3"),
        temperature=(0.0, 1.0),
        concurrency=(4,),
        block_size="8",
        drafts=(f"dflash={tmp_path}",),
        servers=("plain=http://localhost:1",),
        over=("block=8,16",),
        prompts=tmp_path,
        model=str(tmp_path),
        context=(None, 512),
    )


def test_an_unknown_option_is_one_line() -> None:
    told = r"unknown option 'temprature' \(did you mean 'temperature'\?\); known: .*temperature"
    with pytest.raises(api.UserError, match=told):
        request_of(temprature=1)


def test_every_module_can_be_imported_alone() -> None:
    names = [module.name for module in pkgutil.iter_modules(api.__path__, "dflash_bench.api.")]
    assert names
    for name in names:
        importlib.import_module(name)
