"""Algebra in LaTeX with worked steps (MATH-500 columns)."""

from __future__ import annotations

from math import gcd
from random import Random

from nano.corpus.task import Family, Task, boxed


def _task(problem: str, steps: list[str], answer: object, subject: str, level: int) -> Task:
    solution = "\n".join([*steps, boxed(answer)])
    row = {"problem": problem, "solution": solution, "answer": str(answer), "subject": subject, "level": level}
    return Task("math500", row, (solution,))


def linear(rng: Random) -> Task:
    a, b, x = rng.randint(2, 12), rng.randint(2, 40), rng.randint(2, 12)
    plus = rng.random() < 0.5
    c = a * x + b if plus else a * x - b
    if c < 1:
        return linear(rng)
    undo, sign, back = ("Subtract", "+", "-") if plus else ("Add", "-", "+")
    steps = [
        f"{undo} {b}: $ {a} x = {c} {back} {b} = {a * x} $.",
        f"Divide by {a}: $ x = {a * x} / {a} = {x} $.",
    ]
    return _task(f"Solve $ {a} x {sign} {b} = {c} $ for $ x $.", steps, x, "Algebra", 2)


def bracket(rng: Random) -> Task:
    a, b, x = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 10)
    c = a * (x + b)
    if x + b > 12:
        return bracket(rng)
    steps = [
        f"Divide by {a}: $ x + {b} = {c} / {a} = {x + b} $.",
        f"Subtract {b}: $ x = {x + b} - {b} = {x} $.",
    ]
    return _task(f"Solve $ {a} ( x + {b} ) = {c} $ for $ x $.", steps, x, "Algebra", 2)


def quadratic_value(rng: Random) -> Task:
    b, c, x = rng.randint(2, 9), rng.randint(1, 30), rng.randint(2, 10)
    square, linear_part = x * x, b * x
    total = square + linear_part
    steps = [
        f"The square is $ {x} * {x} = {square} $.",
        f"The linear part is $ {b} * {x} = {linear_part} $.",
        f"The sum is $ {square} + {linear_part} = {total} $.",
        f"Then $ {total} + {c} = {total + c} $.",
    ]
    problem = f"Let $ f(x) = x^2 + {b} x + {c} $. Find $ f({x}) $."
    return _task(problem, steps, total + c, "Algebra", 3)


def simplify_fraction(rng: Random) -> Task:
    p, q, g = rng.randint(1, 11), rng.randint(2, 12), rng.randint(2, 9)
    if gcd(p, q) != 1 or p >= q:
        return simplify_fraction(rng)
    steps = [
        f"Both numbers can be divided by {g}.",
        f"The top is $ {p * g} / {g} = {p} $.",
        f"The bottom is $ {q * g} / {g} = {q} $.",
    ]
    answer = f"\\frac{{{p}}}{{{q}}}"
    return _task(f"Simplify the fraction $ \\frac{{{p * g}}}{{{q * g}}} $.", steps, answer, "Prealgebra", 2)


def system(rng: Random) -> Task:
    x, y = rng.randint(3, 30), rng.randint(1, 20)
    if x <= y:
        return system(rng)
    s, d = x + y, x - y
    steps = [
        f"Add the equations: $ 2 x = {s} + {d} = {s + d} $.",
        f"Divide by 2: $ x = {s + d} / 2 = {x} $.",
    ]
    return _task(f"Given $ x + y = {s} $ and $ x - y = {d} $, find $ x $.", steps, x, "Algebra", 3)


def expand(rng: Random) -> Task:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    steps = [
        f"The middle part is $ {a} + {b} = {a + b} $.",
        f"The last part is $ {a} * {b} = {a * b} $.",
    ]
    return _task(f"Expand $ (x + {a})(x + {b}) $.", steps, f"x^2 + {a + b}x + {a * b}", "Algebra", 3)


def sequence(rng: Random) -> Task:
    a, d, n = rng.randint(1, 30), rng.randint(2, 9), rng.randint(4, 12)
    jump = (n - 1) * d
    steps = [
        f"There are $ {n} - 1 = {n - 1} $ steps.",
        f"The steps add $ {n - 1} * {d} = {jump} $.",
        f"The term is $ {a} + {jump} = {a + jump} $.",
    ]
    problem = f"A sequence starts at $ {a} $ and grows by $ {d} $ each time. What is term number $ {n} $?"
    return _task(problem, steps, a + jump, "Prealgebra", 3)


def rectangle(rng: Random) -> Task:
    a, b = rng.randint(3, 12), rng.randint(3, 12)
    if rng.random() < 0.5:
        steps = [f"The area is $ {a} * {b} = {a * b} $."]
        return _task(f"A rectangle has sides $ {a} $ and $ {b} $. Find its area.", steps, a * b, "Geometry", 1)
    steps = [
        f"Two sides together are $ {a} + {b} = {a + b} $.",
        f"All four are $ {a + b} * 2 = {2 * (a + b)} $.",
    ]
    problem = f"A rectangle has sides $ {a} $ and $ {b} $. Find its perimeter."
    return _task(problem, steps, 2 * (a + b), "Geometry", 1)


FAMILIES: tuple[Family, ...] = (
    linear,
    linear,
    bracket,
    quadratic_value,
    simplify_fraction,
    system,
    expand,
    sequence,
    rectangle,
)
