"""Answers that are code: extracted from prose and code fences, and run with the task's tests in the sandbox."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
import warnings
from collections.abc import Collection

from dflash_bench.core.types import Prompt
from dflash_bench.tasks.sandbox import Isolation, ProgramLimits, run_tests
from dflash_bench.tasks.scorers.base import Score

_FENCED = re.compile(r"(```|~~~)[ \t]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"^ {0,3}> ?(?!>)", re.MULTILINE)  # but >>> is a doctest
_FIRST_CODE = re.compile(r"^(?:import|from|def|async def|class|@\w+)\b", re.MULTILINE)
_PROSE = re.compile(r"^(?:[A-Z][\w']*(?:,? [a-z]|: [A-Za-z])|\*\*|- |\d+[.)] |#{2,} )", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

LIMITS = ProgramLimits(cpu_s=20, wall_s=30.0)  # several times what the slowest correct solution takes


def humaneval(prompt: Prompt, text: str, isolation: Isolation | None) -> Score:
    """Run HumanEval's tests, with whatever the prompt defines before the function taken from the prompt."""
    stub, name = prompt.row["prompt"], prompt.row["entry_point"]
    code = code_in(text, {name})
    given = stub.partition(f"def {name}(")[0]
    if _defines(code, {name}):
        solution = given + code
    else:  # only the body, or what follows the stub
        solution = stub + (code if code.lstrip("\n")[:1].isspace() else textwrap.indent(code, "    "))
    tests = _join(given, prompt.row["test"], f"check({name})")
    return _score(code, _join(solution), tests, {name} | _undefined_names(tests), isolation)


def mbpp(prompt: Prompt, text: str, isolation: Isolation | None) -> Score:
    """Run MBPP's tests, which name the functions that the answer has to define."""
    imports, tests = prompt.row["test_imports"], prompt.row["test_list"]
    code = code_in(text, set(re.findall(r"([A-Za-z_]\w*)\s*\(", "\n".join(tests))))
    program = _join(*imports, *tests)
    return _score(code, _join(*imports, code), program, _undefined_names(program) or _solution_names(prompt), isolation)


def _score(code: str, program: str, tests: str, functions: Collection[str], isolation: Isolation | None) -> Score:
    if isolation is None:
        return Score(code, None)
    outcome = run_tests(program, isolation, LIMITS, tests, sorted(functions))
    return Score(code if outcome.by_value else f"{code.rstrip()}\n\n# {outcome.reason}", outcome.passed)


def _undefined_names(tests: str) -> set[str]:
    """Return the names that tests use but neither they nor Python define: functions of the answer."""
    try:
        top = symtable.symtable(tests, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # which running them will report
        return set()
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return _used(top) - defined - vars(builtins).keys()


def _solution_names(prompt: Prompt) -> set[str]:
    """Return the functions of the task's own solution, which may have the name of a built-in one."""
    return set(re.findall(r"^def (\w+)", str(prompt.row.get("code")), re.MULTILINE))


def _used(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that are read in a scope and the scopes within it."""
    used = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return used.union(*map(_used, table.get_children()))


def code_in(text: str, names: Collection[str]) -> str:
    """Return the last Python block that defines one of `names`, preceded by the blocks it may depend on.

    Without such a block, return the text that is most likely code.
    """
    text = _QUOTED.sub("", text)
    fenced = [(language.lower(), textwrap.dedent(body)) for _, language, body in _FENCED.findall(text)]
    blocks = [body for _, body in fenced]
    python = [body for language, body in fenced if language in {"python", "py", "python3"}]
    likeliest = [b for b in python if _defines(b, names)] or [b for b in blocks if _defines(b, names)]
    if likeliest:
        earlier = blocks[: len(blocks) - 1 - blocks[::-1].index(likeliest[-1])]
        return "\n".join([*(block for block in earlier if _only_defines(block)), likeliest[-1]])
    if blocks:
        return (python or blocks)[-1]
    return _without_prose(text) if _defines(text, names) else text


def _defines(code: str, names: Collection[str]) -> bool:
    any_name = "|".join(map(re.escape, names)) or "(?!)"
    by_statement = rf"^(?:(?:async )?(?:def|class) (?:{any_name})\b|(?:{any_name})\s*(?::[^=\n]+)?=(?!=))"
    return re.search(by_statement, code, re.MULTILINE) is not None


def _only_defines(code: str) -> bool:
    """Does this code only define names, so that it can safely be put before other code?"""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that the model wrote
            statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    definitions = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return all(isinstance(statement, definitions) for statement in statements)


def _without_prose(text: str) -> str:
    first = _FIRST_CODE.search(text)
    start = first.start() if first else 0
    end = _PROSE.search(text, start)
    return text[start : end.start() if end else None]


def _join(*parts: str) -> str:
    """Join parts to one program, with imports from `__future__` first, as Python requires."""
    program = "\n\n".join(parts)
    return "\n".join([*_FUTURE.findall(program), _FUTURE.sub("", program)])
