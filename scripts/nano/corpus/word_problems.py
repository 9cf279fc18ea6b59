"""Word problems with worked steps: one to four operations on small whole numbers (gsm8k columns)."""

from __future__ import annotations

from random import Random

from nano.corpus.task import BOXES, ITEMS, NAMES, PLACES, Family, Task, boxed


def _task(question: str, steps: list[str], answer: int) -> Task:
    row = {"question": question, "answer": "\n".join([*steps, f"#### {answer}"])}
    return Task("gsm8k", row, ("\n".join([*steps, boxed(answer)]),))


def story(rng: Random) -> Task:
    """Someone owns a number of things; two or three events change it."""
    name, items, place = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    have = rng.randint(5, 60)
    question, steps = [f"{name} has {have} {items}."], [f"{name} starts with {have} {items}."]
    for _ in range(rng.randint(2, 3)):
        clause, step, have = _event(rng, name, items, place, have)
        question.append(clause)
        steps.append(step)
    question.append(rng.choice((f"How many {items} does {name} have now?", f"How many {items} are left with {name}?")))
    return _task(" ".join(question), steps, have)


def _event(rng: Random, name: str, items: str, place: str, have: int) -> tuple[str, str, int]:
    kind = rng.choice("gain gain lose lose double share".split())
    if kind == "double" and have <= 40:
        clause = f"At the {place}, {name} doubles the number of {items}."
        return clause, f"Doubling gives {have} * 2 = {have * 2} {items}.", have * 2
    if kind == "share" and have % 2 == 0 and have > 4:
        clause = f"{name} gives half of the {items} to {rng.choice(NAMES)}."
        return clause, f"Giving away half leaves {have} / 2 = {have // 2} {items}.", have // 2
    if kind == "lose" and have > 6:
        n = rng.randint(2, have - 2)
        clause = rng.choice((f"{name} loses {n} of them.", f"{name} sells {n} of them at the {place}."))
        return clause, f"Taking away {n} leaves {have} - {n} = {have - n} {items}.", have - n
    n = rng.randint(3, 39)
    clause = rng.choice((f"{name} buys {n} more at the {place}.", f"{name} finds {n} more."))
    return clause, f"Adding {n} gives {have} + {n} = {have + n} {items}.", have + n


def shopping(rng: Random) -> Task:
    """Two kinds of things at two prices, then the total or the change."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    a, b = rng.sample(ITEMS, 2)
    n, m, p, q = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    x, y = n * p, m * q
    total = x + y
    question = f"{name} buys {n} {a} for {p} dollars each and {m} {b} for {q} dollars each at the {place}."
    steps = [
        f"The {a} cost {n} * {p} = {x} dollars.",
        f"The {b} cost {m} * {q} = {y} dollars.",
        f"Together they cost {x} + {y} = {total} dollars.",
    ]
    if rng.random() < 0.5:
        return _task(f"{question} How many dollars does {name} pay in total?", steps, total)
    paid = (total // 50 + 1) * 50
    steps.append(f"The change is {paid} - {total} = {paid - total} dollars.")
    return _task(f"{question} {name} pays with {paid} dollars. How many dollars is the change?", steps, paid - total)


def containers(rng: Random) -> Task:
    """Equal groups, then some added or removed."""
    name, items, box = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(BOXES)
    n, per_box = rng.randint(3, 12), rng.randint(3, 12)
    total = n * per_box
    k = rng.randint(2, min(40, total - 1))
    first = f"{name} has {n} {box} with {per_box} {items} in each."
    steps = [f"The {box} hold {n} * {per_box} = {total} {items}."]
    if rng.random() < 0.5:
        steps.append(f"Without the broken ones there are {total} - {k} = {total - k} {items}.")
        return _task(f"{first} Then {k} of the {items} break. How many {items} are still good?", steps, total - k)
    steps.append(f"With the new ones there are {total} + {k} = {total + k} {items}.")
    return _task(f"{first} {name} gets {k} more {items}. How many {items} are there in total?", steps, total + k)


def sharing(rng: Random) -> Task:
    """Two piles put together and shared out equally."""
    name, other, items = *rng.sample(NAMES, 2), rng.choice(ITEMS)
    people, share = rng.randint(2, 10), rng.randint(3, 12)
    total = people * share
    a = rng.randint(2, total - 2)
    question = (
        f"{name} has {a} {items} and {other} has {total - a} {items}. They put them together and share them "
        f"equally among {people} friends. How many {items} does each friend get?"
    )
    steps = [
        f"Together they have {a} + {total - a} = {total} {items}.",
        f"Each friend gets {total} / {people} = {share} {items}.",
    ]
    return _task(question, steps, share)


def comparison(rng: Random) -> Task:
    """Two people, of whom one has k times or k more than the other; how many together."""
    name, other, items = *rng.sample(NAMES, 2), rng.choice(ITEMS)
    a, k = rng.randint(3, 12), rng.randint(2, 8)
    if rng.random() < 0.5:
        b = a * k
        question = f"{name} has {a} {items}. {other} has {k} times as many {items} as {name}."
        step = f"{other} has {a} * {k} = {b} {items}."
    else:
        a, k = rng.randint(5, 50), rng.randint(3, 40)
        b = a + k
        question = f"{name} has {a} {items}. {other} has {k} more {items} than {name}."
        step = f"{other} has {a} + {k} = {b} {items}."
    steps = [step, f"Together they have {a} + {b} = {a + b} {items}."]
    return _task(f"{question} How many {items} do they have together?", steps, a + b)


def daily(rng: Random) -> Task:
    """A number per day for some days, towards a goal."""
    name = rng.choice(NAMES)
    verb, items = rng.choice([("reads", "pages"), ("writes", "letters"), ("bakes", "cakes"), ("plants", "trees")])
    per_day, days = rng.randint(3, 12), rng.randint(3, 12)
    done = per_day * days
    goal = done + rng.randint(5, 60)
    question = f"{name} {verb} {per_day} {items} a day for {days} days. The goal is {goal} {items}."
    steps = [
        f"In {days} days {name} {verb} {per_day} * {days} = {done} {items}.",
        f"To reach the goal {name} needs {goal} - {done} = {goal - done} more {items}.",
    ]
    return _task(f"{question} How many {items} are still missing?", steps, goal - done)


def travel(rng: Random) -> Task:
    """Two legs of a trip at constant speeds."""
    name, a, b = rng.choice(NAMES), *rng.sample(PLACES, 2)
    v, t, w, s = rng.randint(3, 12), rng.randint(2, 9), rng.randint(3, 12), rng.randint(2, 9)
    question = (
        f"{name} rides to the {a} for {t} hours at {v} miles per hour, then to the {b} for {s} hours at {w} miles "
        f"per hour. How many miles does {name} ride?"
    )
    steps = [
        f"The first part is {v} * {t} = {v * t} miles.",
        f"The second part is {w} * {s} = {w * s} miles.",
        f"Together that is {v * t} + {w * s} = {v * t + w * s} miles.",
    ]
    return _task(question, steps, v * t + w * s)


def earnings(rng: Random) -> Task:
    """Hours times a wage, minus what is spent."""
    name, place, items = rng.choice(NAMES), rng.choice(PLACES), rng.choice(ITEMS)
    wage, hours = rng.randint(4, 12), rng.randint(4, 12)
    earned = wage * hours
    spent = rng.randint(3, earned - 1)
    question = (
        f"{name} works {hours} hours at the {place} for {wage} dollars an hour and spends {spent} dollars on {items}. "
        f"How many dollars does {name} keep?"
    )
    steps = [
        f"{name} earns {hours} * {wage} = {earned} dollars.",
        f"After the {items} there are {earned} - {spent} = {earned - spent} dollars.",
    ]
    return _task(question, steps, earned - spent)


FAMILIES: tuple[Family, ...] = (story, story, shopping, containers, sharing, comparison, daily, travel, earnings)
