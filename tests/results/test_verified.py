"""How many drafted tokens were verified: measured, stored, shown where it differs, and absent from older files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import dflash_bench as db
from dflash_bench.core.types import Answer
from dflash_bench.models.formats import save_draft
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.results import parts, row_checks
from dflash_bench.results.row_arrays import RunFacts
from helpers import tiny
from helpers.each import each
from helpers.rows import generation, record
from helpers.runs import listed

METHODS = ["dflash", "dflash:cut=0.5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a DSpark draft whose confidence goes up and down."""
    folder = tiny.build(tmp_path_factory.mktemp("verified") / "model")
    shutil.rmtree(folder / "dflash")
    head = MarkovConfig(markov_rank=8, markov_head_type="gated", enable_confidence_head=True)
    config = DFlashConfig(
        head_dim=16,
        num_layers=1,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        shifted_labels=True,
        correction=head,
        **tiny.BODY,  # type: ignore[arg-type]
    )
    draft = DFlashDraft(config)
    initialise(draft, 0)
    with torch.no_grad():
        draft.confidence_head.proj.weight.mul_(30)
        draft.confidence_head.proj.bias.zero_()
    save_draft(draft, folder / "dflash")
    return folder


@pytest.fixture(scope="module")
def run(model: Path) -> db.Run:
    prompts = model.parent / "prompts.jsonl"
    texts = ("What is 2+2?", "Name a colour.", "Count to five.", "Say it again.")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return db.run(model=model, prompts=prompts, methods=METHODS, max_new_tokens=16, out=model.parent / "run")


def test_a_run_stores_what_was_verified_beside_what_was_drafted(run: db.Run) -> None:
    rounds = run.rounds
    whole, cut = (rounds[rounds["method"] == method] for method in METHODS)
    assert (whole["verified"] == whole["drafted"]).all()
    assert set(cut["drafted"]) == {4} and (cut["verified"] < 4).any() and (cut["accepted"] <= cut["verified"]).all()
    assert [len(ids) for ids in cut["drafted_ids"]] == [4] * len(cut)
    assert set(run.answers["exactness"].dropna()) == {"exact"}


def test_tables_show_it_where_drafts_are_cut(run: db.Run) -> None:
    table = run.metrics()
    cut = table[(table["metric"] == "verified") & (table["method"] == METHODS[1])].iloc[0]
    rounds = run.rounds[run.rounds["method"] == METHODS[1]]
    assert cut["value"] == pytest.approx(rounds["verified"].mean())
    assert not len(table[(table["metric"] == "verified") & (table["method"] == METHODS[0])])
    assert "verified" in str(run)


def test_a_reply_says_it_of_each_round(model: Path) -> None:
    with db.Engine(model) as engine:
        replies = [engine.generate([5, 9, 200, 7], method=method, max_new_tokens=16) for method in METHODS]
    assert replies[0].token_ids == replies[1].token_ids
    assert all(step.verified == 4 for step in replies[0].rounds)
    assert all(len(step.drafted) == 4 and step.accepted <= step.verified for step in replies[1].rounds)
    assert {step.verified for step in replies[1].rounds} != {4}


# Valid rows.


def rows_of(*records: Answer) -> Any:
    return parts.to_table(records, {}).combine_chunks().to_batches()[0]


@each(
    "verified, why",
    [
        ((4, 2, 0), None),
        ((5, 2, 0), "a round verifies more tokens than it drafts, or fewer than it accepts"),
        ((4, 1, 0), "a round verifies more tokens than it drafts, or fewer than it accepts"),
        ((4, 2), "verified has more or fewer entries than accepted"),
        (None, None),
    ],
)
def test_what_a_row_says_must_lie_between_drafted_and_accepted(verified: Any, why: str | None) -> None:
    row = record("dflash", "p", replace(generation([3, 2, 0], 4), verified=verified))
    facts = RunFacts(blocks={}, ceiling=1e-3)
    assert [*row_checks.faults(rows_of(row), facts)] == ([] if why is None else [why])


@pytest.mark.parametrize("verified", [None, (4, 1)])
def test_a_right_token_that_nobody_verified_is_no_fault(verified: Any) -> None:
    """The second round drafted the right token behind what it accepted: that is wrong unless it was cut before."""
    accepted = generation([1, 1], 4)
    tokens = accepted.token_ids
    ids = (tokens[1], 99, 99, 99, tokens[3], tokens[4], 99, 99)
    row = record("dflash", "p", replace(accepted, drafted_ids=ids, verified=verified))
    found = [*row_checks.faults(rows_of(row), RunFacts(blocks={}, ceiling=1e-3))]
    assert found == (["a round accepted less than was right"] if verified is None else [])


def test_a_run_from_before_is_read(run: db.Run, tmp_path: Path) -> None:
    """Its parts have no such column."""
    folder = Path(shutil.copytree(run.folder, tmp_path / "old"))
    compute, parquet = import_module("pyarrow.compute"), import_module("pyarrow.parquet")
    for part in parts.of(folder):
        table = parquet.read_table(part)
        whole = table.filter(compute.not_equal(table.column("method"), METHODS[1])).drop_columns(["verified"])
        if len(whole):
            parquet.write_table(whole, part)
        else:
            part.unlink()
    listed(folder)
    old = db.load(folder, allow=("unfinished",))
    assert (old.rounds["verified"] == old.rounds["drafted"]).all() and len(old.rounds)
