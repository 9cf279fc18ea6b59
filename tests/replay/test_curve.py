"""`card --curve`: the acceptance length by drafted tokens, as measured one by one, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import dflash_bench as db
from dflash_bench.analysis.peers import benches
from dflash_bench.core.errors import UserError
from dflash_bench.replay import curve
from helpers.each import each
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]
MOST = 4


def measured(folder: Path, method: str, **more: object) -> db.Run:
    return db.run(
        model="nano",
        suite="gsm8k",
        methods=[method],
        limit=3,
        max_new_tokens=32,
        out=folder / method,
        audit="none",
        **more,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> db.Run:
    return measured(tmp_path_factory.mktemp("curve"), f"eagle3:{MOST}", record="every-position")


def test_each_entry_is_what_a_run_with_so_many_tokens_measures(recorded: db.Run, tmp_path: Path) -> None:
    results = recorded.document.results
    (found,) = curve.curves_of(results, f"eagle3:{MOST}")
    assert found.is_exact and [*found.lengths] == [1, 2, 3, 4]
    for number in (1, 2, MOST):
        own = results if number == MOST else measured(tmp_path, f"eagle3:{number}").document.results
        rows = own.rows[own.rows["method"] == f"eagle3:{number}"]
        length = 1 + rows["num_accepted"].sum() / rows["num_rounds"].sum()
        assert found.lengths[number].value == pytest.approx(length, abs=1e-9)


def test_the_file_is_yaml_that_import_reads(recorded: db.Run, main: Main) -> None:
    folder = recorded.document.results.name
    code, _, err = main("card", folder, "--curve", "c.yaml")
    assert code == 0, err
    (modes,) = yaml.safe_load(Path("c.yaml").read_text()).values()
    assert [*modes] == [curve.OFF] and [*modes[curve.OFF]] == [1, 2, 3, 4]
    found = benches.read_results(Path("c.yaml"))
    assert [one.figures["al.pooled"] for one in found] == [*modes[curve.OFF].values()]
    assert {one.model for one in found} == {"nano"}
    code, out, _ = main("import", "c.yaml", "--json")
    assert code == 0 and len(json.loads(out)) == MOST
    assert_refused(main("card", folder, "--curve", "c.yaml", "--method", "dflash"), "dflash", "eagle3:4")
    assert_refused(main("card", folder, "--method", "eagle3:4"), "--curve")


def test_prompts_of_two_suites_are_not_taken_for_one(tmp_path: Path) -> None:
    run = db.run(
        model="nano", suite=["gsm8k", "math500"], methods=["eagle3:2"], limit=2, max_new_tokens=8, audit="none",
        out=tmp_path / "run",
    )  # fmt: skip
    (found,) = curve.curves_of(run.document.results, "eagle3:2")
    assert found.num_prompts == 4


@each(
    "text",
    [
        "m:\n  thinking_on: 3\n",
        "m:\n  thinking_on:\n    1: much\n",
        "m:\n  thinking_on:\n    1: -2\n",
        "m:\n  sometimes:\n    1: 2\n",
        "m: [1, 2\n",
        "- 1\n",
        "",
    ],
)
def test_what_is_no_curve_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"c\.yaml"):
        benches.read_results(path)
