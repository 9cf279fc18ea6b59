"""Joules per token by counters of the machine: which are counted, how they begin anew, and what answers are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import dflash_bench as db
from dflash_bench.core.types import Generation
from dflash_bench.measurements import energy
from dflash_bench.results.run_info import read_info
from helpers.fake_backend import FakeBackend, install, main

ASKED = ("run", "--suite", "gsm8k", "--limit", "4", "--method", "dflash", "--out", "out")


def plant(folder: Path, zone: str, name: str, microjoules: int = 0, most: int = 999_999_999_999) -> Path:
    """A zone as the kernel shows it; returns its counter."""
    (folder / zone).mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", most)):
        (folder / zone / file).write_text(f"{text}\n")
    return folder / zone / "energy_uj"


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "powercap"


def add(counter: Path, microjoules: float) -> None:
    counter.write_text(str(int(counter.read_text()) + round(microjoules)))


def test_zones_that_contain_one_another_are_counted_once(powercap: Path) -> None:
    for zone, name, joules in (
        ("intel-rapl:0", "package-0", 1),
        ("intel-rapl:0:0", "core", 10),
        ("intel-rapl:0:1", "dram", 100),
        ("intel-rapl:1", "psys", 1000),
        ("intel-rapl-mmio:0", "package-0", 10_000),
    ):
        plant(powercap, zone, name, joules * 1_000_000)
    (powercap / "intel-rapl:2").mkdir()  # one that nobody may read
    meter = energy.meter()
    assert (meter.starts(), meter.joules()) == (["package-0", "dram"], 101.0)


def test_a_counter_begins_anew_behind_its_largest_number(powercap: Path) -> None:
    counter = plant(powercap, "intel-rapl:0", "package-0", 900_000, most=999_999)
    meter = energy.meter()
    before = meter.joules()
    for left in (100_000, 50_000):
        counter.write_text(str(left))
        meter.joules()
    assert meter.joules() - before == pytest.approx(0.2 + 0.95)


def test_gpus_that_count_join_and_others_do_not(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]

    def used(gpu: int) -> int:
        if gpu == 1:
            raise nvml.NVMLError("Not Supported")
        return 2500

    nvml.nvmlInit, nvml.nvmlDeviceGetCount = (lambda: None), (lambda: 2)  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetTotalEnergyConsumption = used  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = energy.meter()
    assert (meter.starts(), meter.joules()) == (["GPU 0"], 2.5)


def test_answers_decoded_together_share_by_their_tokens(powercap: Path) -> None:
    counter = plant(powercap, "intel-rapl:0", "package-0")
    meter = energy.meter()
    meter.call_begins()
    add(counter, 6_000_000)
    few, many = (Generation(tuple(range(num)), "", "stop", 1, 0.1, 0.1) for num in (2, 10))
    meter.call_ends([few, many])
    assert [meter.answer(one)["energy_j"] for one in (few, many)] == [1.0, 5.0]
    meter.num_tokens = 0
    assert meter.answer(few) == {"energy_j": 6.0}


@pytest.fixture
def burning(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """A token of plain decoding takes 2 joules, and one of dflash half a joule."""
    counter = plant(powercap, "intel-rapl:0", "package-0")

    def burn(joules: float) -> Callable[[Generation], Generation]:
        def answered(answer: Generation) -> Generation:
            add(counter, 1e6 * joules * answer.num_tokens)
            return answer

        return answered

    backend = FakeBackend(faults={"ar": burn(2.0), "dflash": burn(0.5), "dflash:7": burn(0.5)})
    install(monkeypatch, backend)
    return backend


def test_a_run_tells_joules_per_token_and_by_which_counters(
    burning: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *ASKED, "--energy", "--json") == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["method"]: cell["joules_per_token"] for cell in cells} == {"ar": 2.0, "dflash": 0.5}
    run = db.load("out")
    of_ar = run.answers[run.answers["method"] == "ar"]
    assert list(of_ar["energy_j"]) == [2.0 * len(tokens) for tokens in of_ar["token_ids"]]
    assert "J/token" in str(run)
    assert read_info(Path("out")).to_json()["energy"] == ["package-0"]


def test_a_race_shows_it_beside_the_speed(burning: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("recommend", *ASKED[1:5], "--method", "dflash:7", "--out", "race", "--energy")
    assert main(monkeypatch, *words) == 0
    assert "J/token" in Path("race/recommendation.md").read_text()
    (decision,) = json.loads(Path("race/recommendation.json").read_text())["decisions"]
    assert [one["joules_per_token"] for one in decision["tried"]] == [2.0, 0.5]


def test_a_machine_that_tells_nothing_is_said_so(
    powercap: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeBackend())
    assert main(monkeypatch, *ASKED, "--energy") == 2
    told = capsys.readouterr().err
    assert told.startswith("dflash-bench: --energy: ") and told.count("\n") == 1
    assert not Path("out").exists()
    # Without the option nothing is measured and nothing is shown.
    assert main(monkeypatch, *ASKED) == 0
    run = db.load("out")
    assert run.answers["energy_j"].isna().all() and "J/token" not in str(run)
