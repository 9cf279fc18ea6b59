"""Every option in the help of every command is read somewhere, by the command itself or by what its request reaches."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup, TyperOption
from typer.main import get_command

import dflash_bench
from dflash_bench.cli import app, train
from dflash_bench.core.option import options_of
from dflash_bench.runner.config import OutputOptions, RunRequest
from dflash_bench.training.config import TrainRequest

PACKAGE = Path(dflash_bench.__file__).parent
HOLDERS = {"request", "options", "of_run", "output", "shown", "self", "asked", "ours", "server"}
"""Names under which code holds a request. `self` counts in the module of the request alone."""
ROOMS = {
    RunRequest: ("runner", "api", "diagnose", "cli"),
    OutputOptions: ("runner", "cli"),
    TrainRequest: ("training", "cli"),
}
"""Where a request of this kind is read."""


def commands() -> Iterator[tuple[str, Any]]:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    yield from root.commands.items()


def own_reads(command: Any) -> set[str]:
    """The parameters that the function of a command reads."""
    function = inspect.unwrap(command.callback)
    tree = ast.parse(inspect.getsource(function))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def holder(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def reads_in(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """The holder, the field and the line of each read, also by `getattr(request, name)` with names in that function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield holder(node.value), node.attr, node.lineno
        if isinstance(node, ast.FunctionDef):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and holder(call.func) == "getattr"]
            names = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
            yield from ((holder(call.args[0]), name, call.lineno) for call in calls for name in map(str, names))


def reads_of(group: type) -> dict[str, str]:
    """The first place that reads each field of a group of options."""
    home = inspect.getsourcefile(group)
    found: dict[str, str] = {}
    for path in sorted(path for room in ROOMS[group] for path in (PACKAGE / room).rglob("*.py")):
        for name, field, line in reads_in(ast.parse(path.read_text(encoding="utf-8"))):
            if name in HOLDERS and (name != "self" or str(path) == home):
                found.setdefault(field, f"{path.relative_to(PACKAGE)}:{line}")
    return found


READS = {group: reads_of(group) for group in ROOMS}


@pytest.mark.parametrize(
    ("name", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_of_a_command_is_read(name: str, command: Any) -> None:
    own = own_reads(command)
    for param in command.params:
        if param.name == "config":  # `Command` reads it before the command itself is called
            continue
        places = [reads[param.name] for group, reads in READS.items() if param.name in options_of(group) & reads.keys()]
        assert param.name in own or places, f"{name}: nothing reads {param.opts[0]}"


def test_an_option_that_nothing_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(READS[TrainRequest], "patience")
    command = dict(commands())["train"]
    with pytest.raises(AssertionError, match="train: nothing reads --patience"):
        test_every_option_of_a_command_is_read("train", command)
    assert train.app.registered_commands


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_the_help_of_an_option_ends_as_a_sentence(name: str) -> None:
    params = dict(commands())[name].params
    texts = {param.opts[0]: getattr(param, "help", None) for param in params if isinstance(param, TyperOption)}
    assert not {flag: text for flag, text in texts.items() if not text or not text.endswith(".")}
