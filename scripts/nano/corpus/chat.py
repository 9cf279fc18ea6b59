"""Two-turn chat in eight categories (MT-Bench columns); the second turn refers to the first answer."""

from __future__ import annotations

from random import Random

from nano.corpus.task import ITEMS, NAMES, PLACES, Family, Task

ANIMALS = "cat dog fox owl bear horse rabbit turtle eagle whale goat duck".split()
MOODS = "happy quiet brave curious clever gentle proud sleepy".split()
WEATHER = "sunny rainy windy snowy cloudy foggy".split()
FACTS = {
    "rain": ("water rises from the sea", "it cools down in the clouds", "it falls back to the ground"),
    "wind": ("the sun warms the air", "warm air rises", "cool air moves in to take its place"),
    "day and night": ("the earth turns around itself", "one side looks at the sun", "the other side is dark"),
    "the moon": ("the moon moves around the earth", "the sun lights one half of it", "we see a part of that half"),
    "seeds": ("a seed takes in water", "a root grows down", "a leaf grows up to the light"),
    "ice": ("water gets very cold", "its parts move slowly", "they hold each other in place"),
    "bread": ("flour and water are mixed", "yeast makes small bubbles", "heat makes the bread firm"),
    "glass": ("sand is made very hot", "it melts and flows", "it becomes clear when it cools"),
}
SECOND_SHORT = ("Make your answer shorter.", "Say the same in one sentence.")


def _task(category: str, turns: tuple[str, str], answers: tuple[str, str]) -> Task:
    return Task("mt_bench", {"category": category, "prompt": list(turns), "reference": []}, answers)


def writing(rng: Random) -> Task:
    name, animal, place, mood = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(MOODS)
    weather, items = rng.choice(WEATHER), rng.choice(ITEMS)
    first = f"Write a short story about a {mood} {animal} named {name} at the {place}."
    opening = rng.choice((f"On a {weather} morning", f"One {weather} day", f"Late on a {weather} evening"))
    answer = (
        f"{opening}, a {mood} {animal} named {name} went to the {place}. There {name} found a box full of {items}. "
        f"Nobody knew who had left the {items} there, so {name} shared them with everyone at the {place}. "
        f"From that day on, all friends of the {place} knew the {mood} {animal}."
    )
    return _task(
        "writing",
        (first, rng.choice(SECOND_SHORT)),
        (answer, f"A {mood} {animal} named {name} found {items} at the {place} and shared them with everyone."),
    )


def roleplay(rng: Random) -> Task:
    animal, place, mood, items = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(MOODS), rng.choice(ITEMS)
    first = f"Pretend that you are a {mood} {animal} who works at the {place}. Tell me about your day."
    answer = (
        f"Hello! I am a {mood} {animal} and I work at the {place}. "
        f"In the morning I open the door and count the {items}. "
        f"At noon I eat with my friends. In the evening I close the door of the {place} and go home, tired but {mood}."
    )
    second = "What do you like most about your work?"
    return _task(
        "roleplay", (first, second), (answer, f"I like to count the {items} most, because it makes me {mood}.")
    )


def extraction(rng: Random) -> Task:
    owners = [(name, rng.choice(ITEMS), rng.randint(2, 40)) for name in rng.sample(NAMES, 3)]
    sentences = ". ".join(f"{name} has {n} {items}" for name, items, n in owners)
    first = f"List who has what in this text: {sentences}."
    answer = "\n".join(f"- {name}: {n} {items}" for name, items, n in owners)
    name, items, n = max(owners, key=lambda owner: owner[2])
    return _task(
        "extraction",
        (first, "Who has the largest number of things?"),
        (answer, f"{name} has the largest number of things, with {n} {items}."),
    )


def reasoning(rng: Random) -> Task:
    a, b, c = rng.sample(NAMES, 3)
    more, less, most, least = rng.choice(
        [("taller", "shorter", "tallest", "shortest"), ("older", "younger", "oldest", "youngest")]
    )
    first = f"{a} is {more} than {b}. {b} is {more} than {c}. Who is the {most}?"
    answer = f"{a} is {more} than {b}, and {b} is {more} than {c}. So {a} is also {more} than {c}. The {most} is {a}."
    second = f"And who is the {least}?"
    return _task("reasoning", (first, second), (answer, f"{c} is {less} than {b} and {a}. The {least} is {c}."))


def coding(rng: Random) -> Task:
    items, k = rng.choice(ITEMS), rng.randint(2, 20)
    first = f"Write a line of Python that makes a list of {items} with the numbers from 1 to {k}."
    answer = (
        f"```python\n{items} = list(range(1, {k + 1}))\n```\nThe range ends before {k + 1}, so the last number is {k}."
    )
    second = "Now add up the numbers in the list."
    return _task(
        "coding", (first, second), (answer, f"```python\ntotal = sum({items})\n```\nThe sum of the list is in total.")
    )


def math(rng: Random) -> Task:
    name, items, a, b = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(3, 60), rng.randint(3, 39)
    k = rng.randint(2, 20)
    first = f"{name} has {a} {items} and gets {b} more. How many {items} are there?"
    answer = f"Adding them gives {a} + {b} = {a + b} {items}."
    second = f"And if {name} gets {k} more after that?"
    return _task("math", (first, second), (answer, f"Adding them gives {a + b} + {k} = {a + b + k} {items}."))


def _explain(rng: Random, category: str) -> Task:
    topic = rng.choice(list(FACTS))
    x, y, z = FACTS[topic]
    mood, name = rng.choice(MOODS), rng.choice(NAMES)
    first = rng.choice(
        (f"Explain {topic} to a {mood} child named {name}.", f"How would you explain {topic} to {name}?")
    )
    answer = (
        f"Dear {name}, here is how to think about {topic}. First, {x}. Then, {y}. At last, {z}. "
        f"That is all there is to know about {topic} for now."
    )
    second = "Which of these steps comes first, and which comes last?"
    return _task(category, (first, second), (answer, f"First, {x}. At last, {z}."))


def stem(rng: Random) -> Task:
    return _explain(rng, "stem")


def humanities(rng: Random) -> Task:
    place, name, items = rng.choice(PLACES), rng.choice(NAMES), rng.choice(ITEMS)
    mood = rng.choice(MOODS)
    first = f"Give {name} two reasons why a town needs a {place}."
    answer = (
        f"There are two good reasons, {name}. First, people meet at the {place} and feel less alone. "
        f"Second, they bring {items} to the {place} and share them. So a town with a {place} is a {mood} town."
    )
    return _task(
        "humanities",
        (first, rng.choice(SECOND_SHORT)),
        (answer, f"At the {place} people meet and share {items}."),
    )


FAMILIES: tuple[Family, ...] = (writing, roleplay, extraction, reasoning, coding, math, stem, humanities)
