"""A sweep with the nano models, killed on the way and continued: one run, exact throughout, its answer at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_bench.results import store
from helpers.fake_backend import main
from helpers.runs import Stop, stop_after

WORDS = ("sweep --suite gsm8k --limit 2 --max-new-tokens 12 --over block=4,8 --over temperature=0,1 --out out").split()


def test_a_killed_sweep_goes_on_to_the_run_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    append = store.RunStore.append
    stop_after(monkeypatch, 5)
    with pytest.raises(Stop):
        main(monkeypatch, *WORDS)
    monkeypatch.setattr(store.RunStore, "append", append)
    before = {store.key(record) for record in store.load(Path("out"))[1]}
    assert before
    assert main(monkeypatch, *WORDS, "--resume") == 0
    records = store.load(Path("out"))[1]
    assert before < {store.key(record) for record in records}
    places = {(record.prompt_id, record.method, record.settings.temperature) for record in records}
    assert len(places) == len(records) == 2 * 3 * 2
    greedy = [record for record in records if record.settings.greedy]
    assert {record.exactness for record in greedy if record.method != "ar"} == {"exact"}
    assert {record.audit for record in greedy} == {"exact"}
    capsys.readouterr()
    assert main(monkeypatch, "report", "out") == 0
    told = capsys.readouterr().out
    assert "\nsweep over block (tokens)\n" in told and "\nsweep over temperature\n" in told
    assert "\ndflash (temperature 1): speedup.decode " in told
