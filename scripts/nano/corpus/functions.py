"""Small Python functions with docstring and tests (HumanEval and MBPP columns).

A function is combined from parts (which elements, what is computed from them, how the results are joined). So there are
many different functions, whose name, description and code follow from the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from nano.corpus.task import Family, Task


@dataclass(frozen=True, slots=True)
class Function:
    """A specification that yields the columns of both suites."""

    name: str
    argument: str
    text: str
    body: str
    examples: tuple[Any, ...]

    @property
    def code(self) -> str:
        return f"def {self.name}({self.argument}):\n{self.body}\n"

    def results(self) -> list[tuple[Any, Any]]:
        scope: dict[str, Any] = {}
        exec(self.code, scope)  # our own generated text, never a model's
        return [(x, scope[self.name](x)) for x in self.examples]


def _filters(k: int) -> list[tuple[str, str, str]]:
    """Return tuples (name part, words, condition on x)."""
    return [
        ("even", "the even numbers", "x % 2 == 0"),
        ("odd", "the odd numbers", "x % 2 == 1"),
        ("positive", "the positive numbers", "x > 0"),
        ("negative", "the negative numbers", "x < 0"),
        (f"above_{k}", f"the numbers greater than {k}", f"x > {k}"),
        (f"below_{k}", f"the numbers less than {k}", f"x < {k}"),
        (f"by_{k}", f"the numbers divisible by {k}", f"x % {k} == 0"),
    ]


def _maps(k: int) -> list[tuple[str, str, str]]:
    """Return tuples (name part, words, value of x)."""
    return [
        ("", "", "x"),
        ("", "", "x"),
        ("_squares", "the squares of ", "x * x"),
        ("_doubles", "the doubles of ", "2 * x"),
        (f"_plus_{k}", f"{k} plus each of ", f"x + {k}"),
        (f"_times_{k}", f"{k} times each of ", f"{k} * x"),
    ]


def _numbers(rng: Random) -> list[int]:
    return [rng.randint(-9, 20) for _ in range(rng.randint(3, 6))]


def over_list(rng: Random) -> Function:
    k, j = rng.randint(2, 9), rng.randint(2, 9)
    part, which, condition = rng.choice(_filters(k))
    suffix, what, value = rng.choice(_maps(j))
    kind = rng.choice(["sum", "list", "count"])
    loop = f"    for x in xs:\n        if {condition}:\n"
    if kind == "sum":
        body = f"    total = 0\n{loop}            total += {value}\n    return total"
        name, text = f"sum_{part}{suffix}", f"Return the sum of {what}{which} in xs."
    elif kind == "list":
        body = f"    result = []\n{loop}            result.append({value})\n    return result"
        name, text = f"list_{part}{suffix}", f"Return a list of {what}{which} in xs."
    else:
        body = f"    count = 0\n{loop}            count += 1\n    return count"
        name, text = f"count_{part}", f"Return how many of {which} are in xs."
    return Function(name, "xs", text, body, tuple(_numbers(rng) for _ in range(3)))


def over_number(rng: Random) -> Function:
    k, j = rng.randint(2, 12), rng.randint(1, 20)
    name, text, value = rng.choice(
        [
            (f"times_{k}_plus_{j}", f"Return {k} times n plus {j}.", f"{k} * n + {j}"),
            (f"times_{k}_minus_{j}", f"Return {k} times n minus {j}.", f"{k} * n - {j}"),
            (f"square_plus_{j}", f"Return the square of n plus {j}.", f"n * n + {j}"),
            (f"mod_{k}_plus_{j}", f"Return the remainder of n divided by {k}, plus {j}.", f"n % {k} + {j}"),
            (f"is_multiple_of_{k}", f"Return True if n is divisible by {k}.", f"n % {k} == 0"),
            (f"is_above_{k}_below_{k + j}", f"Return True if n is between {k} and {k + j}.", f"{k} < n < {k + j}"),
        ]
    )
    return Function(name, "n", text, f"    return {value}", tuple(rng.sample(range(1, 40), 3)))


def over_range(rng: Random) -> Function:
    k, j = rng.randint(2, 9), rng.randint(2, 9)
    part, which, condition = rng.choice(_filters(k)[:2] + _filters(k)[4:])
    suffix, what, value = rng.choice(_maps(j))
    body = (
        f"    total = 0\n    for x in range(1, n + 1):\n        if {condition}:\n"
        f"            total += {value}\n    return total"
    )
    text = f"Return the sum of {what}{which} from 1 to n."
    return Function(f"sum_range_{part}{suffix}", "n", text, body, tuple(rng.sample(range(3, 30), 3)))


WORDS = "apple banana garden yellow window silver letter orange summer rabbit island pepper carrot button".split()


def over_text(rng: Random) -> Function:
    k, c = rng.randint(2, 5), rng.choice("abceilnorst")
    name, text, value = rng.choice(
        [
            (f"count_letter_{c}", f"Return how many times the letter {c} is in s.", f"s.count('{c}')"),
            (f"remove_letter_{c}", f"Return s without the letter {c}.", f"s.replace('{c}', '')"),
            (f"first_{k}", f"Return the first {k} letters of s.", f"s[:{k}]"),
            (f"last_{k}", f"Return the last {k} letters of s.", f"s[-{k}:]"),
            (f"repeat_{k}", f"Return s repeated {k} times.", f"s * {k}"),
            (f"reverse_first_{k}", f"Return the first {k} letters of s in reverse order.", f"s[:{k}][::-1]"),
            (f"upper_first_{k}", f"Return the first {k} letters of s in upper case.", f"s[:{k}].upper()"),
            (f"starts_with_{c}", f"Return True if s starts with the letter {c}.", f"s.startswith('{c}')"),
            (f"length_plus_{k}", f"Return the length of s plus {k}.", f"len(s) + {k}"),
        ]
    )
    return Function(name, "s", text, f"    return {value}", tuple(rng.sample(WORDS, 3)))


PARTS = (over_list, over_list, over_list, over_range, over_number, over_text)


def _answer(function: Function) -> str:
    return f"```python\n{function.code}```"


def humaneval(rng: Random) -> Task:
    f = rng.choice(PARTS)(rng)
    (x, y), *_ = results = f.results()
    prompt = f'def {f.name}({f.argument}):\n    """{f.text}\n    >>> {f.name}({x!r})\n    {y!r}\n    """\n'
    tests = "".join(f"    assert candidate({x!r}) == {y!r}\n" for x, y in results)
    row = {
        "prompt": prompt,
        "entry_point": f.name,
        "canonical_solution": f"{f.body}\n",
        "test": f"def check(candidate):\n{tests}",
    }
    return Task("humaneval", row, (_answer(f),))


def mbpp(rng: Random) -> Task:
    f = rng.choice(PARTS)(rng)
    text = f.text.replace("Return", "Write a function that returns", 1).removesuffix(".")
    row = {
        "source_file": "synthetic",
        "prompt": f"{text}. Its argument is {f.argument}.",
        "code": f.code,
        "test_imports": [],
        "test_list": [f"assert {f.name}({x!r}) == {y!r}" for x, y in f.results()[:2]],
    }
    return Task("mbpp", row, (_answer(f),))


FAMILIES: tuple[Family, ...] = (humaneval, humaneval, mbpp)
