"""Packs from elsewhere: weights from a hub that moved, copies, other default dtypes, and options of no run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.results import pack
from dflash_bench.results.recheck import CheckedPart
from dflash_bench.results.run_info import ResumedProcess, RunInfo, read_info
from dflash_bench.runner import setup
from dflash_bench.submissions import checks
from dflash_bench.submissions.accept import accept
from dflash_bench.submissions.request import AcceptRequest
from helpers import runs, tiny
from helpers.each import each
from helpers.fake_hub import NEW, FakeHub
from helpers.forging import forge

USUAL: dict[str, Any] = {
    "suite": "gsm8k",
    "data": "embedded",
    "methods": ["dflash"],
    "limit": 2,
    "max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def nano_run(tmp_path_factory: pytest.TempPathFactory, shared_models: None) -> Path:
    folder = tmp_path_factory.mktemp("nano") / "run"
    db.run(**{**USUAL, "model": "nano"}, out=folder)
    return folder


def accepted(run: Path, **changes: Any) -> dict[str, CheckedPart]:
    """Pack the run and accept it; return the findings by check."""
    shutil.rmtree(run.with_name("accepted"), ignore_errors=True)
    file = run.with_suffix(".zip")
    pack.write(run, file)
    record = accept(AcceptRequest(file, seed=1, **changes), run.with_name("accepted"), lambda _: None)
    return {one.check: one for one in record.findings}


def states(found: dict[str, CheckedPart]) -> dict[str, str]:
    return {name: found[name].state for name in ("models", "tokens", "counts")}


def copied(weights: Path, to: Path) -> dict[str, Any]:
    """Copy the model; return the options of `accept` that name the copy."""
    shutil.copytree(weights, to)
    return {"target": str(to / "target"), "drafts": (f"dflash={to / 'dflash'}",)}


def test_a_hub_that_moved_is_asked_for_the_commits_of_the_run(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"org/target": weights / "target", "org/draft": weights / "dflash"}
    hub = FakeHub(folders, tmp_path / "cache").applied(monkeypatch)
    db.run(**USUAL, target="org/target", draft={"dflash": "org/draft"}, out=tmp_path / "run")
    hub.heads = dict.fromkeys(hub.heads, NEW)
    assert states(accepted(tmp_path / "run")) == {"models": "confirmed", "tokens": "confirmed", "counts": "confirmed"}
    # A folder has no commit: whether its weights are the same, its tokens tell.
    found = accepted(tmp_path / "run", **copied(weights, tmp_path / "copy"))
    assert states(found) == {"models": "unchecked", "tokens": "confirmed", "counts": "confirmed"}
    other = tiny.build(tmp_path / "other", seed=1)
    assert accepted(tmp_path / "run", target=str(other / "target"))["tokens"].state == "refuted"


def test_copies_of_a_folder_are_told_by_their_weights(weights: Path, tmp_path: Path) -> None:
    own = copied(weights, tmp_path / "theirs")
    db.run(**USUAL, target=own["target"], draft=own["drafts"], out=tmp_path / "run")
    with pytest.raises(UserError, match="pass your copy with --target"):
        accepted(tmp_path / "run")
    copy = copied(weights, tmp_path / "mine")
    with pytest.raises(UserError, match="pass your copy with --draft dflash=PATH"):
        accepted(tmp_path / "run", target=copy["target"])
    (tmp_path / "mine" / "target").rename(tmp_path / "named")
    assert states(accepted(tmp_path / "run", **copy | {"target": str(tmp_path / "named")}))["models"] == "confirmed"
    draft = tiny.build(tmp_path / "other", seed=1) / "dflash"
    found = accepted(tmp_path / "run", target=str(tmp_path / "named"), drafts=(f"dflash={draft}",))
    assert found["models"].state == "refuted"


def test_the_dtype_is_that_of_the_run_where_another_is_usual(nano_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "default_dtype", lambda _device: "bfloat16")
    assert states(accepted(nano_run)) == {"models": "confirmed", "tokens": "confirmed", "counts": "confirmed"}


@each(
    "changes, named",
    [
        ({"limit": "x"}, "its option limit is not"),
        ({"limit": [1]}, "its option limit is not"),
        ({"methods": 3}, "its option methods is not"),
        ({"temperature": ["hot"]}, "its option temperature is not"),
        ({"temperature": None}, "its option temperature is not"),
        ({"seed": 1.5}, "its option seed is not"),
        ({"context": [[]]}, "its option context is not"),
        ({"over": ["block=x"]}, "block"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_options_of_no_run_are_refused_in_a_line(
    nano_run: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    run = forge(nano_run, tmp_path / "run", list, lambda content: content["options"].update(changes))
    with pytest.raises(UserError, match=named) as refused:
        accepted(run)
    assert "\n" not in str(refused.value)


@each(
    "option, value, named",
    [
        ("model", "{}/weights", "pass your copy with --target"),
        ("target", "{}/weights/target", "pass your copy with --target"),
        ("drafts", ["dflash={}/weights/dflash"], "pass your copy with --draft dflash=PATH"),
        ("prompts", "{}/p.jsonl", "pass your copy with --prompts"),
        ("data", "{}/data", "pass yours with --data"),
        ("json_schema", "{}/schema.json", "schema.json, and cannot be recomputed"),
        ("score", "evaluate:{}/data", "data, and cannot be recomputed"),
        ("methods", ["rest:datastore={}/p.jsonl"], "p.jsonl, and cannot be recomputed"),
    ],
)
def test_files_that_the_sender_names_are_not_read(
    nano_run: Path, weights: Path, tmp_path: Path, option: str, value: Any, named: str
) -> None:
    """They are here, and would do."""
    shutil.copytree(weights, tmp_path / "weights")
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "schema.json").write_text("{}")
    (tmp_path / "data").mkdir()
    own = [one.format(tmp_path) for one in value] if isinstance(value, list) else value.format(tmp_path)
    run = forge(nano_run, tmp_path / "run", list, lambda content: content["options"].update({option: own}))
    with pytest.raises(UserError, match=named):
        accepted(run)


def machine(**changes: Any) -> dict[str, Any]:
    return {**runs.ENVIRONMENT, **changes}


def of_processes(*others: dict[str, Any], **identity: Any) -> RunInfo:
    """A run that other processes continued on these machines."""
    about = runs.about(identity=identity)
    resumed = [ResumedProcess.model_validate({"environment": one}) for one in others]
    return about.model_copy(update={"resumed": resumed})


@each(
    "info, is_alike",
    [
        (of_processes(), True),
        (of_processes(machine()), True),
        (of_processes(machine(cpu="Another")), False),
        (of_processes(machine(packages={**runs.ENVIRONMENT["packages"], "torch": "1.0"})), False),
        (of_processes(threads=2), False),
        (of_processes(device="cuda:0"), False),
        (of_processes(tensor_parallel=2), False),
        (of_processes(workers={"number": 2, "on_one_machine": 1, "kinds": ["Another"]}), False),
    ],
)
def test_machines_are_alike_if_all_that_rounds_is(info: RunInfo, is_alike: bool) -> None:
    unlike = checks.unlike(info, runs.about().identity, runs.ENVIRONMENT)
    assert (not unlike) == is_alike, unlike


def test_sampled_answers_of_another_seed_are_refuted(tmp_path: Path, shared_models: None) -> None:
    sampled = {**USUAL, "model": "nano", "limit": 4, "max_new_tokens": 48, "temperature": 1.5}
    db.run(**sampled, out=tmp_path / "sound")
    assert states(accepted(tmp_path / "sound"))["tokens"] == "confirmed"
    db.run(**sampled, seed=1, out=tmp_path / "other")
    like = read_info(tmp_path / "sound").to_json()
    run = forge(tmp_path / "other", tmp_path / "run", list, lambda content: content.update(
        {name: like[name] for name in ("identity", "options")}
    ))  # fmt: skip
    assert states(accepted(run))["tokens"] == "refuted"


def test_answers_of_code_are_scored_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db.run(**{**USUAL, "model": "nano", "suite": "humaneval"}, out=tmp_path / "sound")
    keep: list[bool] = []

    def some(rows: Any) -> Any:
        return [replace(row, passed=row.passed if keep.append(True) or len(keep) == 1 else None) for row in rows]  # type: ignore[func-returns-value]

    monkeypatch.setattr(pack, "read_run", lambda _: None)
    run = forge(tmp_path / "sound", tmp_path / "run", some, lambda content: content["identity"].update(code="not run"))
    assert accepted(run)["arithmetic"].state == "refuted"
