"""Answers that are code: extracted from prose and code fences, and run with the task's tests in the sandbox."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat, takewhile

from dflash_bench.core.types import Prompt
from dflash_bench.tasks.sandbox import Isolation, ProgramLimits, run_tests
from dflash_bench.tasks.scorers.base import Score, Scorer

_OPENING = re.compile(
    r"(?P<fence>```|~~~)[`~]*[ \t]*(?P<language>\w*)[^\n`]*\n"
    r"|^[ \t]*\[(?P<mark>(?i:PYTHON|BEGIN|CODE|ANSWER|SOLUTION))\][ \t]*\n?",
    re.MULTILINE,
)
_QUOTED = re.compile(r"^ {0,3}> ?(?!>)", re.MULTILINE)  # but >>> is a doctest
_FIRST_CODE = re.compile(
    r"\A|^(?=(?:import|from|def|async def|class|for|while|if|with|try|print)\b|@\w"
    r"|[A-Za-z_][\w, .\[\]]*(?::[^=\n]+)?=(?!=))",
    re.MULTILINE,
)
_TABS = re.compile(r"^\t+", re.MULTILINE)
_MOST_TRIES = 50
"""How many times a text is parsed to find where its code begins or ends."""
_MOST_CHARS = 200_000
"""The longest text that is parsed here; longer texts are run unchanged."""
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

LIMITS = ProgramLimits(cpu_s=20, wall_s=30.0)  # several times what the slowest correct solution takes


def humaneval(prompt: Prompt, text: str, isolation: Isolation | None) -> Score:
    """Run HumanEval's tests; definitions before the function are taken from the prompt."""
    stub, name = prompt.row["prompt"], prompt.row["entry_point"]
    code = code_in(text, {name})
    given = stub.partition(f"def {name}(")[0]
    solution = given + code if _defines(code, {name}) else _completed(stub, code)
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
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # running them reports these
        return set()
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return _used(top) - defined - vars(builtins).keys()


def _solution_names(prompt: Prompt) -> set[str]:
    """Return the functions of the task's own solution, whose names may be those of built-ins."""
    return set(re.findall(r"^def (\w+)", str(prompt.row.get("code")), re.MULTILINE))


def _used(table: symtable.SymbolTable) -> set[str]:
    """Return the global names read in a scope and its inner scopes."""
    used = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return used.union(*map(_used, table.get_children()))


def code_in(text: str, names: Collection[str]) -> str:
    """Return the last Python block that defines one of `names`, preceded by the blocks it may depend on.

    Without such a block, return the text that is most likely code.
    """
    text = _QUOTED.sub("", text.removeprefix("\ufeff").replace("\r\n", "\n"))
    blocks = [*_blocks(text)]
    python = [block for block in blocks if block.language in {"python", "py", "python3"}]
    for group in (python, blocks):
        likeliest = [block for block in group if _defines(block.code, names)]
        if likeliest:
            best = next((block for block in reversed(likeliest) if not _is_sketch(block.code, names)), likeliest[-1])
            earlier = (block.code for block in blocks[: blocks.index(best)])
            return "\n".join([*filter(_only_defines, earlier), best.code])
    if _defines(text, names) or not (names or blocks):
        return _without_prose(text, names)
    return (python or blocks)[-1].code if blocks else text


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    language: str
    code: str


def _blocks(text: str) -> Iterator[_Block]:
    """Yield the text between fences, or marks such as [PYTHON]; if never closed, as far as it parses.

    A fence closes at the beginning or the end of a line; of several, at the first with valid Python before it, as some
    are in docstrings. A mark around a fence, or before prose, is skipped.
    """
    end = 0
    for tries in chain(repeat(_MOST_TRIES, _MOST_TRIES), repeat(1)):
        opening = _OPENING.search(text, end)
        if opening is None:
            return
        fence, mark = opening["fence"], opening["mark"]
        closing = rf"^[ \t]*{fence}[`~]*|{fence}[`~]*[ \t]*$" if fence else rf"\[/{mark}\]|\[(?:DONE|END)\]"
        closings = [*islice(re.compile(closing, re.MULTILINE).finditer(text, opening.end()), tries)]
        bodies = (textwrap.dedent(text[opening.end() : one.start()]) for one in closings)
        found = next(((body, one.end()) for body, one in zip(bodies, closings, strict=True) if _parses(body)), None)
        if found is None and closings:
            found = textwrap.dedent(text[opening.end() : closings[0].start()]), closings[0].end()
        elif found is None:
            body = textwrap.dedent(text[opening.end() :])
            found = _longest_prefix(body) or body, len(text)
        body, end = found
        if mark and (_OPENING.search(body) or not _parses(body)):
            end = opening.end()
            continue
        yield _Block(opening.start(), opening["language"].lower() if fence else "python", body)


def _defines(code: str, names: Collection[str]) -> bool:
    any_name = "|".join(map(re.escape, names)) or "(?!)"
    by_statement = rf"^(?:(?:async )?(?:def|class) (?:{any_name})\b|(?:{any_name})\s*(?::[^=\n]+)?=(?!=))"
    return re.search(by_statement, code, re.MULTILINE) is not None


def _parsed(code: str) -> list[ast.stmt] | None:
    """Return the statements of a program without running it; None if it does not parse, or is too long or too deep."""
    if len(code) > _MOST_CHARS:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in the model's code
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parses(code: str) -> bool:
    return _parsed(code) is not None


def _only_defines(code: str) -> bool:
    """Return whether code only defines names, so that it can safely precede other code."""
    definitions = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    statements = _parsed(code)
    return statements is not None and all(isinstance(statement, definitions) for statement in statements)


def _is_sketch(code: str, names: Collection[str]) -> bool:
    """Return whether functions of these names contain only text, `...`, `pass`, a comment or NotImplementedError."""
    statements = _parsed(code) or _parsed(f"{code}\n    pass") or []
    functions = [one for one in statements if isinstance(one, ast.FunctionDef) and one.name in names]
    return bool(functions) and all(map(_does_nothing, (statement for one in functions for statement in one.body)))


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return "NotImplementedError" in ast.dump(statement)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _longest_prefix(code: str) -> str:
    """Return the longest prefix of whole statements that parses; empty without any."""
    lines = code.split("\n")
    for _ in range(_MOST_TRIES):
        wrong = _wrong_line(lines)
        if wrong is None:
            return "\n".join(lines)
        lines = lines[: max((at for at, line in enumerate(lines[:wrong]) if line[:1].strip()), default=0)]
    return ""


def _wrong_line(lines: list[str]) -> int | None:
    """Return the first line, from 1 on, that does not parse; None if all do."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse("\n".join(lines)[:_MOST_CHARS])
    except SyntaxError as error:
        return min(error.lineno or len(lines), len(lines))
    except (ValueError, RecursionError, MemoryError):
        return 1
    return None


def _without_prose(text: str, names: Collection[str]) -> str:
    """Return the code in a text without fences, from a line from which it parses and defines one of `names`."""
    for first in islice(_FIRST_CODE.finditer(text), _MOST_TRIES):
        code = _longest_prefix(text[first.start() :])
        if _defines(code, names) if names else code.strip():
            return _without_words(code)
    return text


def _without_words(code: str) -> str:
    """Drop statements at both ends that are prose and happen to parse: "Done", "Complexity: O(n)"."""
    statements = _parsed(code) or []
    before = [*takewhile(_is_prose, statements)]
    after = [*takewhile(_is_prose, reversed(statements[len(before) :]))]
    lines = code.split("\n")
    end = after[-1].lineno - 1 if after else len(lines)
    return "\n".join(lines[before[-1].end_lineno if before else 0 : end])


def _is_prose(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name | ast.Tuple | ast.Compare)


def _completed(stub: str, code: str) -> str:
    """Return a stub with its body, whose first line may have lost its indent, up to the end of the code."""
    code = _TABS.sub(lambda tabs: "    " * len(tabs[0]), code).lstrip("\n")
    indents = [len(line) - len(line.lstrip()) for line in code.split("\n")[1:] if line[:1].isspace() and line.strip()]
    indented = code if code[:1].isspace() else textwrap.indent(code, "    ")
    tries = [stub + indented, stub + " " * min(indents, default=4) + code.lstrip()]
    found = next(filter(_parses, tries), None)
    return found or next((one for one in map(_longest_prefix, tries) if len(one) > len(stub)), tries[0])


def _join(*parts: str) -> str:
    """Join parts to one program, with imports from `__future__` first, as Python requires."""
    program = "\n\n".join(parts)
    return "\n".join([*_FUTURE.findall(program), _FUTURE.sub("", program)])


HUMANEVAL = Scorer(humaneval, {"prompt": str, "entry_point": str, "test": str})
MBPP = Scorer(mbpp, {"test_list": list, "test_imports": list})
