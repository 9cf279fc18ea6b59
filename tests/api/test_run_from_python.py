"""`db.run` and the tools beside it: quiet, with errors as exceptions, and the run that the command would have made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_bench import api as db
from dflash_bench.api.measuring import InNotebook, Silent, in_notebook, request_of
from helpers.each import each


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(3)))
    return path


def test_a_run_is_measured_and_nothing_is_printed(
    model: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = db.run(
        model=model, prompts=prompts, methods=["dflash", "eagle3"], limit=2, max_new_tokens=8, out=tmp_path / "run"
    )
    assert capfd.readouterr() == ("", "")
    assert run.folder == tmp_path / "run" and run.methods == ["dflash", "eagle3"] and run.suites == ["prompts"]
    assert set(run.answers["exactness"]) == {"exact"} or set(run.answers["audit"]) <= {"exact", "near_tie"}
    command = run.document.results.info.command
    assert command.startswith("db.run(") and "methods=['dflash', 'eagle3']" in command and "limit=2" in command
    with pytest.raises(db.UserError):
        db.run(model=model, prompts=prompts, out=tmp_path / "run")
    again = db.run(
        request_of(model=model, prompts=prompts, methods=["dflash", "eagle3"], limit=2, max_new_tokens=8),
        out=tmp_path / "run",
        resume=True,
    )
    # The cost of a pass is measured again, so findings about it, with their badges, may change.
    of_answers = ["prompt_id", "method", "text", "decode_s", "exactness", "audit"]
    assert again.answers[of_answers].equals(run.answers[of_answers])


@each(
    "options, said",
    [
        ({}, "no prompts given"),
        ({"suite": "maht"}, "unknown suite"),
        ({"suite": "gsm8k", "methods": "dflsh"}, "unknown method 'dflsh'"),
        ({"suite": "gsm8k", "seed": 3}, "--seed has no effect at temperature 0"),
        ({"suite": "gsm8k", "resume": True}, "--resume needs --out"),
    ],
)
def test_errors_are_exceptions(options: Any, said: str) -> None:
    with pytest.raises(db.UserError, match=said):
        db.run(**options)


def test_options_beside_a_request_are_refused() -> None:
    with pytest.raises(db.UserError, match="limit= has no effect beside config"):
        db.run(request_of(suite="gsm8k"), limit=3)


def test_in_a_notebook_a_bar_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda html: shown.append(html))
    python = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    display = SimpleNamespace(HTML=str, display=lambda html, display_id: shown.append(html) or handle)
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert in_notebook()
    clock = iter(range(100))
    with InNotebook(4, 1, clock=lambda: float(next(clock))) as progress:
        progress.begins("gsm8k", "<dflash>")
        progress.num_new = 3
    assert shown[0].startswith('<progress value="1" max="4">')
    assert "&lt;dflash&gt;" in shown[1] and "4/4  done" in shown[-1]


def test_elsewhere_there_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert not in_notebook()
    clock = iter(range(0, 1000, 50))
    with Silent(4, 0, clock=lambda: float(next(clock))) as progress:
        progress.begins("gsm8k", "dflash")
    assert capfd.readouterr() == ("", "")


def test_a_draft_is_inspected(model: Path) -> None:
    seen = db.inspect(model / "dflash", target=model / "target")
    assert (seen.method, seen.block_size, seen.problems) == ("dflash", 4, ())
    with pytest.raises(db.UserError):
        db.inspect(model / "nothing")


def test_tools_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    with pytest.raises(db.UserError, match="unknown option of train 'epoch'"):
        db.train("nano", tmp_path, epoch=3)
    with pytest.raises(db.UserError, match="has no draft that can be examined"):
        db.doctor("ngram")
    with pytest.raises(db.UserError, match="unknown option 'modl'"):
        db.profile("dflash", modl="nano")
    with pytest.raises(db.UserError):
        db.crosscheck({"dflash": "nowhere"}, suite="gsm8k", model="nano")


def test_a_profile_is_data() -> None:
    found = db.profile("dflash", width=[1, 2], context=[16], random_weights=True, layers=1)
    assert found.judged


def test_options_of_a_training_come_in_the_types_of_its_fields() -> None:
    from dflash_bench.runner.requests import typed_options
    from dflash_bench.training.config import TrainRequest

    given = {"against": "rows", "prompts": Path("a.jsonl"), "out": "drafts", "steps": 3, "device": None}
    typed = typed_options(TrainRequest, given, "option of train")
    assert typed == {"against": Path("rows"), "prompts": ("a.jsonl",), "out": Path("drafts"), "steps": 3}
