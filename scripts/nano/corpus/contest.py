"""Modular arithmetic and counting with integer answers (AIME columns)."""

from __future__ import annotations

from math import factorial
from random import Random

from nano.corpus.task import ITEMS, NAMES, Family, Task, boxed


def _task(problem: str, steps: list[str], answer: int) -> Task:
    solution = "\n".join([*steps, boxed(answer)])
    return Task("aime", {"problem": problem, "solution": solution, "answer": str(answer)}, (solution,))


def power_remainder(rng: Random) -> Task:
    base, exponent, m = rng.randint(2, 9), rng.randint(2, 5), rng.choice([5, 7, 9, 10, 11])
    value, steps = base % m, [f"Start with $ {base} $, which leaves {base % m}."]
    for _ in range(exponent - 1):
        product = value * base
        steps.append(f"Then $ {value} * {base} = {product} $ leaves {product % m}.")
        value = product % m
    problem = f"Find the remainder when $ {base}^{exponent} $ is divided by $ {m} $."
    return _task(problem, steps, value)


def multiples(rng: Random) -> Task:
    a, n = rng.randint(3, 12), rng.randint(20, 120)
    k = n // a
    steps = [
        f"The largest multiple is $ {a} * {k} = {a * k} $.",
        f"The next one, $ {a} * {k + 1} = {a * (k + 1)} $, is too large.",
    ]
    return _task(f"How many positive multiples of $ {a} $ are at most $ {n} $?", steps, k)


def handshakes(rng: Random) -> Task:
    n = rng.randint(4, 13)
    pairs = n * (n - 1)
    what, verb = rng.choice([("people", "shake hands"), ("teams", "play a game"), ("players", "trade cards")])
    steps = [
        f"Each of the {n} meets $ {n} - 1 = {n - 1} $ others.",
        f"That counts $ {n} * {n - 1} = {pairs} $.",
        f"Every pair is counted twice, so $ {pairs} / 2 = {pairs // 2} $.",
    ]
    name = rng.choice(NAMES)
    problem = f"At the party of {name}, $ {n} $ {what} each {verb} once with every other. Find the number of pairs."
    return _task(problem, steps, pairs // 2)


def choices(rng: Random) -> Task:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 6)
    x, y, z = rng.sample(ITEMS, 3)
    steps = [f"The first two give $ {a} * {b} = {a * b} $.", f"All three give $ {a * b} * {c} = {a * b * c} $."]
    problem = (
        f"{rng.choice(NAMES)} picks one of $ {a} $ {x}, one of $ {b} $ {y} and one of $ {c} $ {z}. "
        "In how many ways can this be done?"
    )
    return _task(problem, steps, a * b * c)


def arrangements(rng: Random) -> Task:
    n = rng.randint(3, 6)
    steps, value = [], 1
    for k in range(2, n + 1):
        steps.append(f"With {k} there are $ {value} * {k} = {value * k} $.")
        value *= k
    items = rng.choice(ITEMS)
    problem = f"In how many ways can {rng.choice(NAMES)} put $ {n} $ different {items} in a row?"
    return _task(problem, steps, factorial(n))


def first_sum(rng: Random) -> Task:
    n = rng.randint(4, 14)
    product = n * (n + 1)
    steps = [
        f"Twice the sum is $ {n} * {n + 1} = {product} $.",
        f"The sum is $ {product} / 2 = {product // 2} $.",
    ]
    return _task(f"Find the sum of the whole numbers from $ 1 $ to $ {n} $.", steps, product // 2)


def digit_sum(rng: Random) -> Task:
    digits = [rng.randint(1, 9) for _ in range(rng.randint(3, 5))]
    number, total = "".join(map(str, digits)), digits[0]
    steps = [f"The first digit is {total}."]
    for d in digits[1:]:
        steps.append(f"Next is {d}: $ {total} + {d} = {total + d} $.")
        total += d
    return _task(f"Find the sum of the digits of $ {number} $.", steps, total)


def clock(rng: Random) -> Task:
    start, hours = rng.randint(0, 11), rng.randint(13, 60)
    total = start + hours
    steps = [
        f"The hours add to $ {start} + {hours} = {total} $.",
        f"Full turns take away $ 12 * {total // 12} = {12 * (total // 12)} $.",
        f"This leaves $ {total} - {12 * (total // 12)} = {total % 12} $.",
    ]
    problem = f"A clock with hours $ 0 $ to $ 11 $ shows $ {start} $. What does it show after $ {hours} $ hours?"
    return _task(problem, steps, total % 12)


FAMILIES: tuple[Family, ...] = (
    power_remainder,
    power_remainder,
    multiples,
    handshakes,
    choices,
    arrangements,
    first_sum,
    digit_sum,
    digit_sum,
    clock,
    choices,
)
