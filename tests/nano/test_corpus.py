"""The synthetic corpus: right answers, the same everywhere, and never what ships as a prompt."""

import json
import re
from itertools import islice

import pytest

from dflash_bench.core.methods import WEIGHTS
from dflash_bench.models.presets import NANO
from dflash_bench.tasks import sandbox, scorers, suites
from dflash_bench.training.cards import overlap_table
from nano import cards, corpus
from nano.builder import NanoRecipe
from nano.data import PER_SUITE, SUITES, held_out_tasks, is_held_out, samples, training_tasks, turns_of, with_id
from nano.target import TargetRecipe

EQUATION = re.compile(r"(-?\d+) ([-+*/]) (-?\d+) = (-?\d+)")
APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def test_the_same_seed_gives_the_same_tasks():
    assert list(islice(corpus.tasks(5), 50)) == list(islice(corpus.tasks(5), 50))
    assert list(islice(corpus.tasks(5), 50)) != list(islice(corpus.tasks(6), 50))


def test_every_equation_in_every_answer_is_right():
    count = 0
    for task in islice(corpus.tasks(1), 4000):
        if task.suite in ("humaneval", "mbpp"):
            continue
        for left, operator, right, result in EQUATION.findall(" ".join(task.answers)):
            assert APPLY[operator](int(left), int(right)) == int(result), task.answers
            count += 1
    assert count > 5000


@pytest.mark.parametrize("suite", ["gsm8k", "math500", "aime"])
def test_worked_answers_score_as_right(suite):
    scorer = SUITES[{"aime": "aime24"}.get(suite, suite)]
    tasks = islice((task for task in corpus.tasks(2) if task.suite == suite), 150)
    for task in tasks:
        prompt = suites.to_prompt(scorer, "task", 0, with_id(scorer.name, 0, task.row))
        assert scorers.score(scorer.scorer, prompt, task.answers[0]).passed, task


@pytest.mark.parametrize("suite", ["humaneval", "mbpp"])
def test_functions_pass_their_own_tests(suite):
    for task in islice((task for task in corpus.tasks(3) if task.suite == suite), 6):
        prompt = suites.to_prompt(SUITES[suite], "task", 0, with_id(suite, 0, task.row))
        assert scorers.score(suite, prompt, task.answers[0], sandbox.strongest() or sandbox.UNSAFE).passed, task


def test_chat_has_two_turns_in_all_eight_categories():
    tasks = list(islice((task for task in corpus.tasks(4) if task.suite == "mt_bench"), 300))
    assert {task.row["category"] for task in tasks} == {
        "writing",
        "roleplay",
        "extraction",
        "reasoning",
        "coding",
        "math",
        "stem",
        "humanities",
    }
    assert all(len(turns_of(task)) == len(task.answers) == 2 for task in tasks)


@pytest.mark.in_full
def test_training_and_held_out_tasks_have_no_question_in_common():
    trained = {corpus.question(task) for task in islice(training_tasks(9), 20_000)}
    held_out = {corpus.question(task) for task in islice(held_out_tasks(10), 500)}
    assert not trained & held_out


@pytest.mark.in_full
def test_everything_that_ships_as_a_prompt_is_held_out():
    shipped = samples()
    assert {name: len(rows) for name, rows in shipped.items()} == dict.fromkeys(SUITES, PER_SUITE)
    rows_on_disk = {
        name: [json.loads(line) for line in (suites.data_folder() / "embedded" / name / f"{suite.split}.jsonl").open()]
        for name, suite in SUITES.items()
    }
    assert rows_on_disk == shipped
    for task in islice(training_tasks(0), 3000):
        assert not is_held_out(task)


@pytest.mark.in_full
def test_the_cards_of_nano_say_what_its_training_shares_with_the_embedded_suites():
    recipe = NanoRecipe()
    count = recipe.num_greedy + recipe.num_sampled
    table = overlap_table(cards.overlaps_of_drafts(recipe.response_seed, count, None), count)
    for name in (*WEIGHTS, "dflash2"):
        if (NANO / name / "README.md").exists():
            card = (NANO / name / "README.md").read_text().splitlines()
            assert set(table) < set(card) and any("(folder)" in line for line in card)
    shared = cards.overlaps_of_target(TargetRecipe(cycles=(2,)), None)
    assert sum(one.num_alike for one in shared) > 50 > sum(one.num_shared for one in shared)
