"""Python functions to complete, for training a draft on a target's own code: written here, for any number of prompts.

Three origins. Tasks are composed of a source, a filter, a change and a result, each with its words and code, so that
the examples in a docstring and the tests are computed. Descriptions come from the functions of this Python's standard
library and of the packages installed in it: name, arguments and docstring. Others are made up by the target
(`_code_invented`). Rows have the columns of the suites humaneval and mbpp, and so their wording.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from dflash_bench.core import files
from dflash_bench.training import contamination

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a task: a part of the function's name, words for its description, and Python over x or values."""

    name: str
    words: str
    code: str

    def function(self, argument: str) -> Callable[[Any], Any]:
        made: Callable[[Any], Any] = eval(f"lambda {argument}: {self.code}")
        return made


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of argument: its name and type, words for its elements, Python that lists them, and how to draw one."""

    argument: str
    type: str
    words: str
    elements: str
    draw: Callable[[Random], Any]


def _pieces(*lines: str) -> tuple[Piece, ...]:
    """Return pieces from lines of "name | words | code"."""
    return tuple(Piece(*(part.strip() for part in line.split(" | "))) for line in lines)


def _numbers(rng: Random) -> list[int]:
    return [rng.randint(-9, 30) for _ in range(rng.randint(3, 7))]


VOCABULARY = (
    "apple level river stone Anna kayak light moon tree noon garden Otto paper eagle radio summer wave under idea civic"
).split()


def _words(rng: Random) -> list[str]:
    return [rng.choice(VOCABULARY) for _ in range(rng.randint(3, 6))]


INTEGERS = (
    Source("numbers", "List[int]", "a list of integers", "argument", _numbers),
    Source("values", "List[int]", "a list of whole numbers", "argument", _numbers),
    Source(
        "n",
        "int",
        "a positive integer n and its digits",
        "[int(digit) for digit in str(argument)]",
        lambda rng: rng.randint(10, 99_999),
    ),
    Source("n", "int", "the integers from 1 to n", "list(range(1, argument + 1))", lambda rng: rng.randint(4, 12)),
    Source(
        "n",
        "int",
        "the divisors of a positive integer n",
        "[d for d in range(1, argument + 1) if argument % d == 0]",
        lambda rng: rng.randint(6, 60),
    ),
    Source(
        "grid",
        "List[List[int]]",
        "all elements of a grid, row by row",
        "[x for row in argument for x in row]",
        lambda rng: [_numbers(rng)[:3] for _ in range(2)],
    ),
    Source(
        "text",
        "str",
        "the integers in a string, separated by spaces",
        "[int(part) for part in argument.split()]",
        lambda rng: " ".join(map(str, _numbers(rng))),
    ),
)
STRINGS = (
    Source("words", "List[str]", "a list of strings", "argument", _words),
    Source("sentence", "str", "the words of a sentence", "argument.split()", lambda rng: " ".join(_words(rng))),
    Source(
        "line",
        "str",
        "the fields of a line, separated by commas",
        "argument.split(',')",
        lambda rng: ",".join(_words(rng)),
    ),
    Source(
        "counts",
        "Dict[str, int]",
        "the keys of a dictionary",
        "list(argument)",
        lambda rng: {word: rng.randint(1, 9) for word in _words(rng)},
    ),
)
OF_INTEGERS = _pieces(
    "all |  | True",
    "even | only the even ones | x % 2 == 0",
    "odd | only the odd ones | x % 2 != 0",
    "positive | only those above zero | x > 0",
    "multiples_of_three | only multiples of 3 | x % 3 == 0",
    "large | only those of at least 5 | x >= 5",
    "small | only those below 10 | x < 10",
    "prime | only the primes | x > 1 and all(x % d for d in range(2, x))",
    "two_digit | only those of two digits | 10 <= abs(x) <= 99",
)
OF_STRINGS = _pieces(
    "all |  | True",
    "long | only those of more than four characters | len(x) > 4",
    "vowel | only those that begin with a vowel | x[:1].lower() in 'aeiou'",
    "palindrome | only those that read the same backwards, whatever their case | x.lower() == x.lower()[::-1]",
    "lowercase | only those in lower case | x.islower()",
    "double | only those with two equal letters side by side | any(a == b for a, b in zip(x, x[1:]))",
    "with_e | only those that contain the letter e | 'e' in x",
    "even_length | only those of even length | len(x) % 2 == 0",
)
TO_INTEGERS = _pieces(
    "values |  | x",
    "squares | squared | x * x",
    "absolutes | without their signs | abs(x)",
    "doubles | doubled | 2 * x",
    "remainders | replaced by their remainders on division by 4 | x % 4",
    "digit_sums | replaced by the sums of their digits | sum(map(int, str(abs(x))))",
    "halves | halved and rounded down | x // 2",
)
TO_STRINGS = _pieces(
    "words |  | x",
    "reversed_words | each reversed | x[::-1]",
    "capitals | in capitals | x.upper()",
    "initials | each cut to its first letter | x[:1]",
    "skeletons | without their vowels | ''.join(c for c in x if c.lower() not in 'aeiou')",
    "sorted_letters | each with its letters in alphabetical order | ''.join(sorted(x))",
)
LENGTHS = _pieces("lengths | replaced by their lengths | len(x)")
FROM_ANY = _pieces(
    "list_of | returns them in their order | values",
    "count | returns how many there are | len(values)",
    "distinct | returns them without repetitions, in order of first appearance | list(dict.fromkeys(values))",
    "ascending | returns them in ascending order | sorted(values)",
    "descending | returns them in descending order | sorted(values, reverse=True)",
    "frequency | returns a dictionary of how often each occurs | {x: values.count(x) for x in values}",
    "last_first | returns them from last to first | values[::-1]",
    "every_second | returns every second one, beginning with the first | values[::2]",
    "pairs | returns the list of neighbouring pairs | list(zip(values, values[1:]))",
    "repeated | returns the sorted list of those that occur more than once | "
    "sorted({x for x in values if values.count(x) > 1})",
    "is_sorted | returns True if they are in ascending order, and False otherwise | values == sorted(values)",
    "without_ends | returns them without the first and the last | values[1:-1]",
)
FROM_INTEGERS = FROM_ANY + _pieces(
    "sum_of | returns their sum, and 0 if there are none | sum(values)",
    "largest | returns the largest, or None if there are none | max(values, default=None)",
    "smallest | returns the smallest, or None if there are none | min(values, default=None)",
    "spread | returns the difference between the largest and the smallest, and 0 if there are none | "
    "max(values) - min(values) if values else 0",
    "mean | returns their average rounded to two decimals, and 0.0 if there are none | "
    "round(sum(values) / len(values), 2) if values else 0.0",
    "running_total | returns the list of running totals | [sum(values[:i + 1]) for i in range(len(values))]",
    "steps | returns the differences between neighbours | [b - a for a, b in zip(values, values[1:])]",
    "joined | returns them as one string, separated by dashes | '-'.join(map(str, values))",
    "second_largest | returns the second largest different value, or None if there is none | "
    "sorted(set(values))[-2] if len(set(values)) > 1 else None",
)
FROM_STRINGS = FROM_ANY + _pieces(
    "longest | returns the longest, the first one of equal length, or None if there are none | "
    "max(values, key=len, default=None)",
    "sentence_of | returns them joined by single spaces | ' '.join(values)",
    "acronym | returns the string of their first letters, in capitals | ''.join(x[:1].upper() for x in values)",
    "by_length | returns them sorted by length, and alphabetically where lengths are equal | "
    "sorted(values, key=lambda x: (len(x), x))",
    "index_of | returns a dictionary from each to its first position | {x: values.index(x) for x in values[::-1]}",
    "letters | returns the sorted list of different letters in them | sorted(set(''.join(values)))",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A function to write: its argument, and what is kept, changed and returned of its elements."""

    source: Source
    kept: Piece
    changed: Piece
    result: Piece

    @property
    def name(self) -> str:
        kept = "" if self.kept.name == "all" else f"{self.kept.name}_"
        return f"{self.result.name}_{kept}{self.changed.name}"

    @property
    def description(self) -> str:
        take = f"takes {self.source.words}" + (f", {self.kept.words}" if self.kept.words else "")
        return f"{take}{', ' + self.changed.words if self.changed.words else ''}, and {self.result.words}"

    def __call__(self, argument: Any) -> Any:
        elements = Piece("", "", self.source.elements).function("argument")(argument)
        kept, changed = self.kept.function("x"), self.changed.function("x")
        return self.result.function("values")([changed(x) for x in elements if kept(x)])

    def examples(self, count: int) -> list[tuple[str, str]]:
        """Return calls of the function and what they return, as Python."""
        rng = Random(zlib.crc32(self.description.encode()))
        drawn = [self.source.draw(rng) for _ in range(count)]
        return [(f"{self.name}({one!r})", repr(self(one))) for one in drawn]


def composed() -> list[Task]:
    of_integers = product(INTEGERS, OF_INTEGERS, TO_INTEGERS, FROM_INTEGERS)
    of_strings = product(STRINGS, OF_STRINGS, TO_STRINGS, FROM_STRINGS)
    of_lengths = product(STRINGS, OF_STRINGS, LENGTHS, FROM_INTEGERS)
    return [Task(*parts) for parts in (*of_integers, *of_strings, *of_lengths)]


def to_complete(task: Task) -> Row:
    """Return the task in humaneval's columns: a function without its body."""
    examples = "".join(f"    >>> {call}\n    {result}\n" for call, result in task.examples(2))
    words = f"{task.description[0].upper()}{task.description[1:]}."
    head = f"def {task.name}({task.source.argument}: {task.source.type}):"
    return row(task.name, f'from typing import Dict, List\n\n\n{head}\n    """{words}\n{examples}    """\n')


def to_write(task: Task) -> Row:
    """Return the task in mbpp's columns: a sentence and tests."""
    tests = [f"assert {call} == {result}" for call, result in task.examples(3)]
    text = f"Write a python function that {task.description}."
    return {"task_id": task.name, "prompt": text, "test_imports": [], "test_list": tests}


def _text(row: Row) -> str:
    return "\n".join([row["prompt"], *row.get("test_list", [])])


def row(name: str, prompt: str) -> Row:
    return {"task_id": name, "prompt": prompt, "entry_point": name, "test": "def check(candidate):\n    pass\n"}


LIBRARY, INSTALLED = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
NO_LIBRARY = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
SHORTEST, LONGEST, LONGEST_ARGUMENTS = 50, 800, 100
"""Characters of a docstring and of a list of arguments."""
MOST_OF_PACKAGE = 500


def described(folder: Path) -> Iterator[Row]:
    """Yield functions of the Python files in `folder` in humaneval's columns: arguments and docstring. No file runs."""
    paths = (path for path in sorted(folder.rglob("*.py")) if NO_LIBRARY.isdisjoint(path.relative_to(folder).parts))
    yield from {row["prompt"]: row for path in paths for row in _described_in(path)}.values()


def installed(folder: Path) -> Iterator[Row]:
    """Yield functions of the packages in `folder`: of each, up to MOST_OF_PACKAGE, drawn at random."""
    for package in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in NO_LIBRARY):
        rows = list(described(package))
        Random(0).shuffle(rows)
        yield from rows[:MOST_OF_PACKAGE]


def _described_in(path: Path) -> Iterator[Row]:
    try:
        tree = ast.parse(files.text_of(path))
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        words, arguments = ast.get_docstring(node) or "", ast.unparse(node.args)
        if SHORTEST <= len(words) <= LONGEST and len(arguments) <= LONGEST_ARGUMENTS and '"""' not in words:
            words = "\n    ".join(words.splitlines())
            yield row(node.name, f'def {node.name}({arguments}):\n    """{words}\n    """\n')


def write(
    folder: Path,
    num_tasks: int,
    num_described: int,
    functions: Iterable[Row],
    asked: Iterable[Row],
    against: Path,
    library: Path = LIBRARY,
    packages: Path = INSTALLED,
) -> tuple[Path, Path]:
    """Write files of prompts to `folder`, in the columns of humaneval and mbpp: functions to complete, and to write.

    A quarter of the composed tasks are to be written, and what the target asked for. The described functions, drawn at
    random from the library and the installed packages, and the target's `functions` are all to be completed. What
    occurs in a suite in the folder `against` is left out.
    """
    rng = Random(0)
    tasks = rng.sample(composed(), num_tasks)
    cut = num_tasks // 4
    known = list({row["prompt"]: row for row in (*described(library), *installed(packages))}.values())
    to_complete_rows = [*map(to_complete, tasks[cut:]), *rng.sample(known, min(num_described, len(known))), *functions]
    to_write_rows = [*map(to_write, tasks[:cut]), *asked]
    rng.shuffle(to_complete_rows)
    rng.shuffle(to_write_rows)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "functions.jsonl", folder / "tasks.jsonl"
    for path, rows in zip(paths, (to_complete_rows, to_write_rows), strict=True):
        _write(path, rows, against)
    return paths


def _write(path: Path, rows: Sequence[Row], against: Path) -> None:
    overlaps = contamination.found([_text(row) for row in rows], against)
    known = {text for overlap in overlaps for text in overlap.shared}
    text = "".join(json.dumps(row) + "\n" for row in rows if _text(row) not in known)
    files.write_whole(path, lambda file: file.write(text.encode()))
