"""Texts are for people: nothing is decided by what one says. A code, or a field, says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_bench.core.types import Settings

PACKAGE = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "dflash_bench"
APART = frozenset(
    ("startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split", "index", "find")
)
"""Methods that take a text apart. `split` and `splitlines` without words only make one line of several."""
WORDS = frozenset(("remedy", "reason", "heading", "setting", "one_line", "why", "evidence", "description"))
"""Attributes that hold words for people."""
ALLOWED = {
    ("cli/net.py", "_is_of_memory"): "torch and the system have no code for want of memory",
    ("servers/requests.py", "_refused"): "a server refuses an option it does not know in words of its own",
    ("models/formats/__init__.py", "read_checkpoint"): "only so that a line does not name the folder twice",
}
"""By file and function, why the text of an error of others must be read."""


def deciding(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The function and line of every place where a text decides."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
        errors = _errors(function)
        texts = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _is_text(node.value, errors, frozenset())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if _decides(node, errors, frozenset(texts)):
                yield function.name, node.lineno  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__doc__":
            yield "__doc__", node.lineno


def _errors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Names of exceptions in it."""
    caught = {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name}
    given = {
        one.arg
        for one in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if one.annotation is not None and any(word in ast.unparse(one.annotation) for word in ("Error", "Exception"))
    }
    return frozenset(caught | given)


def _is_text(node: ast.AST, errors: frozenset[str], texts: frozenset[str]) -> bool:
    """Is it what an error says, or words for people?"""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]):
            return name in errors
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip" | "casefold")):
            return _is_text(inner, errors, texts)
        case ast.Attribute(attr=name):
            return name in WORDS
        case ast.Name(id=name):
            return name in texts
    return False


def _decides(node: ast.AST, errors: frozenset[str], texts: frozenset[str]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=args) if name in APART:
            return bool(args) and _is_text(inner, errors, texts)
        case ast.Compare(left=left, ops=ops, comparators=right):
            sides = [left, *right]
            compared = any(isinstance(op, ast.In | ast.NotIn | ast.Eq | ast.NotEq) for op in ops)
            return compared and any(_is_text(side, errors, texts) for side in sides)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=args):
            return any(_is_text(one, errors, texts) for one in args)
    return False


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_no_text_decides_anything() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), function): line
        for path in MODULES
        for function, line in deciding(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found.keys() <= ALLOWED.keys(), {f"{file}:{line} {name}" for (file, name), line in found.items()}


PLANTED = [
    "def gate():\n    try:\n        go()\n    except UserError as error:\n        return str(error).startswith('x')",
    "def gate(error: UserError):\n    what, _, remedy = str(error).partition('; ')",
    "def gate(error: UserError):\n    text = str(error).lower()\n    return 'device' in text",
    "def group(findings):\n    return [one for one in findings if one.remedy == 'raise --limit']",
    "def column(columns):\n    return [one for one in columns if one.one_line in ('prompts', 'tokens')]",
    "def rule(convention):\n    return convention.__doc__",
]


@pytest.mark.parametrize("code", PLANTED)
def test_a_text_that_decides_is_found(code: str) -> None:
    assert list(deciding(ast.parse(code)))


def test_settings_have_no_words_of_their_own_that_could_be_a_key() -> None:
    assert "__str__" not in vars(Settings)
