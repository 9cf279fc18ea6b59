"""Code as models write it down, right and wrong; every pair was written for this project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dflash_bench.core.types import Prompt
from dflash_bench.tasks import sandbox
from dflash_bench.tasks.sandbox import UNSAFE, ProgramLimits, strongest
from dflash_bench.tasks.scorers import code as code_scorers
from dflash_bench.tasks.scorers import score
from helpers import forked_supervisors
from helpers.each import each

CAGE = strongest() or UNSAFE
STUB = (
    "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(radius):\n"
    '    """The area of a circle.\n    >>> area(0)\n    0.0\n    """\n'
)
TEST = (
    "def check(candidate):\n    assert candidate(0) == 0\n"
    "    assert abs(candidate(2) - 4 * math.pi) < 1e-9\n    assert half(4) == 2\n"
)
BODY = "    return math.pi * radius**2\n"
RIGHT = "def area(radius):\n" + BODY
WRONG = "def area(radius):\n    return radius\n"
HUMANEVAL = {
    "upper case language": (f"```Python\n{RIGHT}```", True),
    "python3": (f"```python3\n{RIGHT}```", True),
    "language with a title": (f'```python title="area.py"\n{RIGHT}```', True),
    "tildes": (f"~~~python\n{RIGHT}~~~", True),
    "tildes without language": (f"~~~\n{RIGHT}~~~", True),
    "four backticks": (f"````python\n{RIGHT}````", True),
    "windows line ends": (f"```python\n{RIGHT}```".replace("\n", "\r\n"), True),
    "tabs": ("```python\ndef area(radius):\n\treturn math.pi * radius**2\n```", True),
    "annotated": ("```python\ndef area(radius: float) -> float:\n    return math.pi * radius**2\n```", True),
    "stub annotated in answer": (
        f'```python\nimport math\n\ndef area(radius: float) -> float:\n    """Doc."""\n{BODY}```',
        True,
    ),
    "async": ("```python\nasync def area(radius):\n    return math.pi * radius**2\n```", False),
    "lambda": ("```python\narea = lambda radius: math.pi * radius**2\n```", True),
    "assigned from another name": (
        "```python\ndef circle_area(r):\n    return math.pi * r * r\n\narea = circle_area\n```",
        True,
    ),
    "a class with call": (
        "```python\nclass area:\n    def __new__(cls, r):\n        return math.pi * r * r\n```",
        True,
    ),
    "decorated": (
        "```python\nfrom functools import lru_cache\n\n@lru_cache\n"
        "def area(radius):\n    return math.pi * radius**2\n```",
        True,
    ),
    "prose with backticks": (f"Use `math.pi`. Here:\n```python\n{RIGHT}```", True),
    "two blocks, helper in the first": (
        "```python\ndef square(x):\n    return x * x\n```\nand\n```python\n"
        "def area(radius):\n    return math.pi * square(radius)\n```",
        True,
    ),
    "import in the first block": (
        "```python\nfrom math import pi\n```\n```python\ndef area(radius):\n    return pi * radius**2\n```",
        True,
    ),
    "thinking, then answer": (f"<think>\n```python\n{WRONG}```\n</think>\n```python\n{RIGHT}```", True),
    "right in thinking, wrong at the end": (f"<think>\n```python\n{RIGHT}```\n</think>\n```python\n{WRONG}```", False),
    "test block after": (f"```python\n{RIGHT}```\nTest:\n```python\nassert area(0) == 0\nprint(area(1))\n```", True),
    "usage that redefines nothing": (
        f"```python\n{RIGHT}```\n```python\nfrom area import area\nprint(area(1))\n```",
        True,
    ),
    "block in a quote": ("> ```python\n> def area(radius):\n>     return math.pi * radius**2\n> ```", True),
    "bare, with prose before": (f"Here is the function:\n{RIGHT}", True),
    "bare, numbered prose after": (f"{RIGHT}\n1. It squares.\n2. It multiplies.\n", True),
    "bare, with Note": (f"{RIGHT}\nNote: this needs math.\n", True),
    "bare with heading": (f"### Solution\n{RIGHT}", True),
    "doctest echoes": (f"```python\n>>> area(0)\n0.0\n```\n```python\n{RIGHT}```", True),
    "nested function": (
        "```python\ndef area(radius):\n    def square(x):\n"
        "        return x * x\n    return math.pi * square(radius)\n```",
        True,
    ),
    "body after docstring": ('    """Doc."""\n' + BODY, True),
    "body, fenced and indented": (f"```python\n{BODY}```", True),
    "stub repeated, bare": (STUB + BODY, True),
    "stub without imports": (
        f"```python\n{STUB.partition('def area')[1]}{STUB.partition('def area')[2]}{BODY}```",
        True,
    ),
    "own half that is broken": (
        f"```python\ndef half(x):\n    return x + x\n\n{RIGHT}```",
        True,
    ),  # the tests have theirs
    "own half that is broken and used": (
        f"```python\ndef half(x):\n    return x\n\n{RIGHT}".replace("* radius", "* half(2 * radius)") + "```",
        False,
    ),
    "signature only": ("```python\ndef area(radius):\n```", False),
    "pass": ("```python\ndef area(radius):\n    pass\n```", False),
    "syntax error": ("```python\ndef area(radius)\n    return 1\n```", False),
    "wrong indentation": ("```python\ndef area(radius):\nreturn math.pi * radius**2\n```", False),
    "other arity": ("```python\ndef area():\n    return 0\n```", False),
    "prints instead": ("```python\ndef area(radius):\n    print(math.pi * radius**2)\n```", False),
    "returns text": ("```python\ndef area(radius):\n    return str(math.pi * radius**2)\n```", False),
    "diameter": ("```python\ndef area(radius):\n    return math.pi * radius\n```", False),
    "overwrites check": (f"```python\n{WRONG}\ndef check(f):\n    pass\n```", False),
    "raises SystemExit at import": (f"```python\n{RIGHT}\nraise SystemExit\n```", False),
    "exit in the function": ("```python\nimport sys\ndef area(radius):\n    sys.exit(0)\n```", False),
    "closes stdout": (f"```python\nimport sys\nsys.stdout.close()\n{RIGHT}```", True),
    "prints a lot": (f"```python\nprint('x' * 100000)\n{RIGHT}```", True),
    "javascript": ("```javascript\nfunction area(r) { return Math.PI * r * r }\n```", False),
    "json": ('```json\n{"area": 1}\n```', False),
    "main that calls input": (f"```python\n{RIGHT}\nr = float(input())\nprint(area(r))\n```", False),
    # where code begins and ends
    "closing fence at a line's end": (f"```python\n{RIGHT.rstrip()}```\nThat is all.", True),
    "closing tildes at a line's end": (f"~~~\n{RIGHT.rstrip()}~~~\nThat is all.", True),
    "closing fence behind broken code": ("```python\ndef area(radius) return 1```\nThat is all.", False),
    "fences in a docstring": (
        f'```python\ndef area(radius):\n    """Doc.\n\n    ```\n    area(1)\n    ```\n    """\n{BODY}```',
        True,
    ),
    "fences in a comment": (f"```python\n# use it as ```area(1)``` here\n{RIGHT}```", True),
    "marks of Python": (f"Here.\n[PYTHON]\n{RIGHT}[/PYTHON]\n[TESTS]\nassert area(0) == 1\n[/TESTS]", True),
    "marks of Python, unclosed": (f"[PYTHON]\n{RIGHT}", True),
    "marks of code": (f"So:\n[CODE]\n{RIGHT}[/CODE]\nThat is all.", True),
    "marks around wrong code": (f"[PYTHON]\n{WRONG}[/PYTHON]", False),
    "bare, prose in small letters after": (f"{RIGHT}\nwhich squares the radius first", True),
    "bare, Japanese after": (f"{RIGHT}\nこの関数は円の面積を返します。", True),
    "bare, Arabic before and after": (f"هذه دالة:\n\n{RIGHT}\nتحسب المساحة", True),
    "bare, a word after": (f"{RIGHT}\nDone", True),
    "bare, words that parse after": (f"{RIGHT}\nComplexity: O(n)\n", True),
    "bare, a word before": (f"Solution\n\n{RIGHT}", True),
    "bare, prose that begins as code does": (f"from the formula we get this\n\n{RIGHT}", True),
    "bare, a constant before": ("TWO = 2\n\ndef area(radius):\n    return math.pi * radius**TWO\n", True),
    "bare, an output in fences after": (f"{RIGHT}\nIt prints:\n```\n3.14\n```\n", True),
    "cut after the function": (f"```python\n{RIGHT}\nprint(area(1), [", True),
    "cut in the next function": (f"{RIGHT}\ndef volume(radius):\n    return (", True),
    "cut in a text": (f'{RIGHT}\nEXAMPLE = """area', True),
    "cut in the function": ("```python\ndef area(radius):\n    square = radius**2\n    return math.pi * (", False),
    "broken behind a return": ("def area(radius):\n    return math.pi * radius**2\n    else:\n", False),
    "body with tabs": ("\tsquare = radius**2\n\treturn math.pi * square\n", True),
    "body with tabs, nested": ("\tif radius:\n\t\treturn math.pi * radius**2\n\treturn 0\n", True),
    "body whose first line lost its indent": ("square = radius**2\n    return math.pi * square\n", True),
    "block whose first line lost its indent": (
        "if not radius:\n        return 0\n    return math.pi * radius**2\n",
        True,
    ),
    "body with tabs whose first line lost them": ("square = radius**2\n\treturn math.pi * square\n", True),
    "body, then prose": (f"{BODY}\nThis squares the radius.", True),
    "body, then a cut": (f"{BODY}\n\ndef volume(radius):\n    return area(", True),
    "body, cut": ("    square = radius**2\n    return math.pi * (", False),
    "a sketch after": (f"```python\n{RIGHT}```\nIn general:\n```python\ndef area(radius):\n    ...\n```", True),
    "a sketch of comments after": (
        f"```python\n{RIGHT}```\nSo:\n```python\ndef area(radius):\n    # square\n    # times pi\n```",
        True,
    ),
    "a sketch that raises after": (
        f'```python\n{RIGHT}```\nSo:\n```python\ndef area(radius):\n    """Doc."""\n    raise NotImplementedError\n```',
        True,
    ),
    "broken code after": (
        f"```python\n{RIGHT}```\nBetter:\n```python\ndef area(radius):\n    return math.pi *\n```",
        False,
    ),
}
MBPP_ROW = {
    "prompt": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_imports": ["import math"],
    "test_list": ["assert double(2) == 4", "assert set([double(math.pi)]) == {2 * math.pi}"],
}
DOUBLE = "def double(x):\n    return 2 * x\n"
MBPP = {
    "fenced": (f"```python\n{DOUBLE}```", True),
    "no language": (f"```\n{DOUBLE}```", True),
    "py": (f"```py\n{DOUBLE}```", True),
    "tildes": (f"~~~python\n{DOUBLE}~~~", True),
    "bare": (DOUBLE, True),
    "bare with prose": (f"Sure:\n\n{DOUBLE}\nIt doubles.", True),
    "bare, numbered": (f"{DOUBLE}\n1. It doubles.", True),
    "lambda": ("```python\ndouble = lambda x: x * 2\n```", True),
    "assigned": ("```python\ndef twice(x):\n    return x + x\ndouble = twice\n```", True),
    "annotated": ("```python\ndef double(x: float) -> float:\n    return x * 2\n```", True),
    "windows": (f"```python\n{DOUBLE}```".replace("\n", "\r\n"), True),
    "tabs": ("```python\ndef double(x):\n\treturn x * 2\n```", True),
    "with tests": (f"```python\n{DOUBLE}\nassert double(1) == 2\n```", True),
    "tests in another block": (f"```python\n{DOUBLE}```\n```python\nassert double(1) == 2\n```", True),
    "output block": (f"```python\n{DOUBLE}```\nOutput:\n```\n4\n```", True),
    "bash block": (f"```bash\npip install x\n```\n```python\n{DOUBLE}```", True),
    "helper block": (
        "```python\ndef add(a, b):\n    return a + b\n```\n```python\ndef double(x):\n    return add(x, x)\n```",
        True,
    ),
    "import block": (
        "```python\nfrom operator import add\n```\n```python\ndef double(x):\n    return add(x, x)\n```",
        True,
    ),
    "class": ("```python\nclass Doubler:\n    def double(self, x):\n        return 2 * x\n```", False),
    "instance method bound": (
        "```python\nclass Doubler:\n    def __call__(self, x):\n        return 2 * x\n\ndouble = Doubler()\n```",
        True,
    ),
    "decorator": ("```python\nimport functools\n@functools.cache\ndef double(x):\n    return 2 * x\n```", True),
    "thinking": (f"<think>\n```python\ndef double(x):\n    return x\n```\n</think>\n```python\n{DOUBLE}```", True),
    "list item": ("1. Code:\n\n   ```python\n   def double(x):\n       return 2 * x\n   ```", True),
    "docstring": ('```python\ndef double(x):\n    """Double x."""\n    return 2 * x\n```', True),
    "async def": ("```python\nasync def double(x):\n    return 2 * x\n```", False),
    "one-liner": ("```python\ndef double(x): return 2 * x\n```", True),
    "generator": ("```python\ndef double(x):\n    yield 2 * x\n```", False),
    "none": ("```python\ndef double(x):\n    2 * x\n```", False),
    "off by one": ("```python\ndef double(x):\n    return 2 * x + 1\n```", False),
    "constant": ("```python\ndef double(x):\n    return 4\n```", False),
    "truncates": ("```python\ndef double(x):\n    return int(2 * x)\n```", False),
    "string": ("```python\ndef double(x):\n    return str(2 * x)\n```", False),
    "other name": ("```python\ndef Double(x):\n    return 2 * x\n```", False),
    "syntax": ("```python\ndef double(x) return 2 * x\n```", False),
    "recursion": ("```python\ndef double(x):\n    return double(x)\n```", False),
    "raises": ("```python\ndef double(x):\n    raise ValueError\n```", False),
    "exit": ("```python\nimport os\nos._exit(0)\n```", False),
    "spoilt later": (f"```python\n{DOUBLE}```\nOr:\n```python\ndef double(x):\n    return x\n```", False),
    "corrected": (f"```python\ndef double(x):\n    return x\n```\nNo:\n```python\n{DOUBLE}```", True),
    "marks of a beginning": (f"[BEGIN]\n{DOUBLE}[DONE]", True),
    "marks around a fence": (f"[BEGIN]\n```python\n{DOUBLE}```\n[DONE]", True),
    "marks of an answer, in small letters": (f"So:\n[answer]\n{DOUBLE}[/answer]", True),
    "a mark before prose": (f"[ANSWER]\nIt doubles:\n```python\n{DOUBLE}```", True),
    "marks of an end": (f"[CODE]\n{DOUBLE}[END]\nIt doubles.", True),
    "lines of Windows": (f"```python\n{DOUBLE.rstrip()}```\nIt doubles.".replace("\n", "\r\n"), True),
    "byte-order mark": (f"\ufeff{DOUBLE}", True),
    "marks of a beginning, with prose": (f"Sure.\n[BEGIN]\n{DOUBLE}[DONE]\nIt doubles.", True),
    "bare, a question after": (f"{DOUBLE}\nQ: what of texts?", True),
    "bare, Russian after": (f"{DOUBLE}\nФункция удваивает число.", True),
    "cut": (f"```python\n{DOUBLE}\nassert double(", True),
    "pass after": (f"```python\n{DOUBLE}```\n```python\ndef double(x):\n    pass\n```", True),
    "prose only": ("Multiply by two.", False),
    "empty": ("", False),
    "empty block": ("```python\n```", False),
    "disables assert": (
        "```python\nimport builtins\nbuiltins.AssertionError = type('Quiet', (), {})\n"
        "def double(x):\n    return 5\n```",
        False,
    ),
}
HUMANEVAL_ROW = {"prompt": STUB, "entry_point": "area", "test": TEST}


@pytest.fixture(scope="module", autouse=True)
def short_limits() -> Iterator[None]:
    """Use warm supervisors: only the extracted code is scored here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_scorers, "LIMITS", ProgramLimits(cpu_s=2, wall_s=20.0))
        patch.setattr(sandbox, "subprocess", forked_supervisors.SUBPROCESS)
        yield


def passed(name: str, row: Mapping[str, Any], text: str) -> bool | None:
    return score(name, Prompt("suite", "0", ("question",), row=row), text, CAGE).passed


@each(("text", "right"), HUMANEVAL.values())
def test_humaneval_finds_the_code_in_every_shape_and_no_wrong_code_passes(text: str, right: bool) -> None:
    assert passed("humaneval", HUMANEVAL_ROW, text) is right


@each(("text", "right"), MBPP.values())
def test_mbpp_finds_the_code_in_every_shape_and_no_wrong_code_passes(text: str, right: bool) -> None:
    assert passed("mbpp", MBPP_ROW, text) is right
