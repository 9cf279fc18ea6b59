"""The profile of a draft: its rates counted by hand, its file by its schema, and drafts at these rates from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dflash_bench.analysis import speculation
from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafters.synthetic import SyntheticDrafter, rates_of
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.results.table import read_run
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.repeating_targets import PROMPTS, accepted, table
from helpers.rows import failed, pair
from helpers.runs import IDENTITY, answers, stored
from helpers.toy import plain, run

Main = Callable[..., tuple[int, str, str]]
SCHEMA = Path(__file__).parents[2] / "docs" / "speculation_profile.schema.json"
ROUNDS = ([4, 0, 2], [4, 4], [1, 0, 0], [3, 2], [0, 4, 1], [2, 2, 2])
"""Tokens accepted of 4, of six prompts; the even ones are of the category even."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        row
        for number, rounds in enumerate(ROUNDS)
        for row in pair(f"p{number}", rounds, order=2 * number, category="odd" if number % 2 else "even")
    ]
    rows[11:] = [failed("dflash", "p5", "out of memory", order=11, category="odd")]
    methods = IDENTITY["methods"] | {"dflash": {"name": "dflash", "num_drafts": 4, "draft": "dflash"}}
    drafts = {"dflash": {"name": "org/draft"}}
    return stored(tmp_path_factory.mktemp("profiled") / "run", rows, drafts=drafts, methods=methods)


def profile_of(run: Path) -> dict[str, Any]:
    return speculation.as_json(read_run(run), "dflash")


def test_rates_lengths_and_histogram_are_those_counted_by_hand(measured: Path) -> None:
    profile = profile_of(measured)
    kept = [count for rounds in ROUNDS[:5] for count in rounds]  # the sixth answer failed
    reached = [sum(count >= k for count in kept) for k in range(5)]
    assert reached == [13, 9, 7, 5, 4]
    assert profile["marginal_accept_rates"] == [pytest.approx(n / 13, abs=1e-6) for n in reached[1:]]
    conditional = [after / before for before, after in pairwise(reached)]
    assert profile["conditional_accept_rates"] == pytest.approx(conditional, abs=1e-6)
    assert profile["mean_accept_length"] == pytest.approx((sum(kept) + 13) / 13, abs=1e-6)
    means = [sum(rounds) / len(rounds) + 1 for rounds in ROUNDS[:5]]
    assert profile["mean_accept_length_per_request"] == pytest.approx(sum(means) / 5, abs=1e-6)
    assert profile["acceptance_length_histogram"] == {"1": 4, "2": 2, "3": 2, "4": 1, "5": 4}
    assert (profile["num_prompts"], profile["num_rounds"], profile["num_speculative_tokens"]) == (5, 13, 4)
    assert profile["intervals"]["mean_accept_length"] is None  # five prompts


def test_a_mean_length_has_an_interval_from_eight_prompts_on(tmp_path: Path) -> None:
    profile = profile_of(stored(tmp_path / "run", answers(8)))
    low, high = profile["intervals"]["mean_accept_length"]
    assert 1 <= low < profile["mean_accept_length"] < high <= 5


def test_each_category_has_its_own(measured: Path) -> None:
    parts = {part["category"]: part for part in profile_of(measured)["parts"]}
    assert parts.keys() == {"even", "odd"}
    assert parts["odd"]["acceptance_length_histogram"] == {"3": 1, "4": 1, "5": 2}
    assert parts["odd"]["intervals"]["mean_accept_length"] is None  # two prompts


def test_the_file_is_as_its_schema_says(main: Main, measured: Path, tmp_path: Path) -> None:
    schema, out = json.loads(SCHEMA.read_text()), tmp_path / "beside" / "profile.json"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert main("card", measured, "--profile", out)[0] == 0
    profile = json.loads(out.read_text())
    jsonschema.validate(profile, schema)
    assert profile == profile_of(measured)
    assert profile["draft_checkpoint"] == {"name": "org/draft", "revision": "d1", "kind": None}
    assert str(measured.parent) not in out.read_text()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(profile | {"marginal_accept_rates": [1.1]}, schema)


def test_drafts_made_from_it_are_accepted_as_often(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile := profile_of(measured)))
    rates = rates_of(methods.parse(f"synthetic:profile={path}"))
    assert rates == profile["conditional_accept_rates"]
    target = table(context_length=2048)
    drafter = SyntheticDrafter(rates, 0, target)  # type: ignore[arg-type]
    drafter.foresee(PROMPTS[:3], Limits(1000), Sampling())
    out = run(target, drafter, PROMPTS[:3], 1000)
    assert out.tokens == plain(table(2048), PROMPTS[:3], 1000)
    kept = [count for row in range(3) for count in accepted(out, row)]
    # 1,000 rounds are right to a few per cent.
    assert sum(kept) / len(kept) + 1 == pytest.approx(profile["mean_accept_length"], rel=0.05)
    marginal = [sum(count >= k for count in kept) / len(kept) for k in range(1, 5)]
    assert marginal == pytest.approx(profile["marginal_accept_rates"], abs=0.05)


def test_the_last_round_is_as_long_as_any() -> None:
    target = table(context_length=64)
    drafter = SyntheticDrafter([1.0] * 6, 0, target)  # type: ignore[arg-type]
    drafter.foresee(PROMPTS[:2], Limits(9), Sampling())
    assert [accepted(run(target, drafter, PROMPTS[:2], 9), row) for row in range(2)] == [[6, 6], [6, 6]]


@each(
    "content, option, said",
    [
        ("[]", "", "profile.json .*conditional_accept_rates"),
        ('{"measured": false, "conditional_accept_rates": [0.5]}', "", "profile.json "),
        ('{"conditional_accept_rates": [1.5]}', "", "1 to 63"),
        ('{"conditional_accept_rates": ["0.5"]}', "", "1 to 63"),
        ('{"conditional_accept_rates": [0.5]}', ",category=odd", "category .*'odd'"),
        ('{"conditional_accept_rates": [0.5], "parts": [{"category": "even"}]}', ",category=odd", "even"),
    ],
)
def test_another_file_is_refused(content: str, option: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        rates_of(methods.parse(f"synthetic:profile={path}{option}"))


def test_the_method_has_to_be_one_that_drafts(main: Main, measured: Path) -> None:
    with pytest.raises(UserError, match="'ar'"):
        speculation.as_json(read_run(measured), "ar")
    assert_refused(main("card", measured, "--method", "dflash"), "--method", "--profile")
    with pytest.raises(UserError, match=r"category= .*profile"):
        rates_of(methods.parse("synthetic:category=odd"))
