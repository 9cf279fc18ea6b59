"""The command line: what it prints, where, and with which exit status. Bad input is one line and leaves nothing.

DFLASH_BENCH_UPDATE_GOLDEN=1 rewrites the stored text; read the difference before it is committed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import METHODS, WEIGHTS
from dflash_bench.core.types import Divergence, Generation
from dflash_bench.models import presets
from dflash_bench.results import store
from dflash_bench.results.run_info import read_info
from dflash_bench.runner import session
from dflash_bench.tasks import sandbox, scorers
from helpers.each import each
from helpers.fake_backend import FakeBackend, install, main, other_tokens
from helpers.golden import assert_golden
from helpers.refusals import assert_refused, names

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    # On a slow machine a line of progress would stand between a test and what it compares.
    monkeypatch.setattr(session, "LINE_EVERY_S", math.inf)
    return tmp_path


def write_lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def gsm8k(folder: Path, number: int) -> Path:
    write_lines(folder / "gsm8k/test.jsonl", *({"question": "?" * i, "answer": f"#### {i % 3}"} for i in range(number)))
    return folder


# Loading and listing


@each("command", ["--help", "run --help", "suites", "methods", "methods dflash", "models", "--version"])
def test_help_and_lists_load_nothing_heavy(command: str) -> None:
    code = (
        "import atexit, sys\nfrom dflash_bench import cli\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\ncli.main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout
    heavy = {"torch", "transformers", "pandas", "pyarrow", "datasets", "rich"}
    # typer loads pydantic to read arguments, and help has none.
    heavy |= {"numpy", "pydantic"} if command.endswith("--help") else set()
    assert not heavy & set(done.stderr.split())


def test_suites_are_listed_with_source_rows_and_licence_in_100_columns(monkeypatch: Patch, capsys: Captured) -> None:
    assert main(monkeypatch, "suites") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    (line,) = [line for line in out.splitlines() if line.startswith("gsm8k ")]
    assert line.split() == ["gsm8k", "32", "gsm8k_number", "MIT"]
    assert "hub: openai/gsm8k main test" in out and "code: humaneval, mbpp\n" in out


def test_the_list_of_suites_says_where_code_runs(monkeypatch: Patch, capsys: Captured) -> None:
    for found, said in ((sandbox.Isolation(landlock=True), "landlock, seccomp, rlimits"), (None, "--unsafe-code")):
        monkeypatch.setattr(sandbox, "strongest", lambda found=found: found)
        assert main(monkeypatch, "suites") == 0
        assert said in capsys.readouterr().out


# The whole output


def fake_run(monkeypatch: Patch, *words: object, out: str = "out", **fields: Any) -> tuple[int, FakeBackend]:
    backend = FakeBackend(text_of=lambda question: rf"\boxed{{{question.count('?') % 2}}}", **fields)
    install(monkeypatch, backend)
    return main(monkeypatch, "run", "--out", out, *words), backend


ASKED = ("--suite", "gsm8k", "--data", "data", "--method", "dflash", "--method", "eagle3:2")


def test_the_whole_output_of_a_run(here: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("dflash_bench.core.environment.free_bytes", lambda: 8 * 10**9)
    gsm8k(here / "data", 24)
    write_lines(here / "mine.jsonl", {"prompt": "one"}, {"turns": ["two", "more"]}, {"prompt": "three"})
    code, _ = fake_run(monkeypatch, *ASKED, "--prompts", "mine.jsonl", "--model", "nano")
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    named, _, rest = captured.out.partition("\n\n")
    assert named.startswith("fake on ")
    assert_golden("cli_run.txt", rest)


def test_the_json_of_a_run_is_one_object_with_the_promised_keys(
    here: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    gsm8k(here / "data", 4)
    code, _ = fake_run(monkeypatch, *ASKED, "--json")
    captured = capsys.readouterr()
    shown = json.loads(captured.out)
    assert (code, captured.err) == (0, "")
    assert list(shown) == ["run", "cells", "findings"]
    assert shown["run"] == "out"
    assert [(cell["suite"], cell["method"]) for cell in shown["cells"]] == [
        ("gsm8k", method) for method in ("ar", "dflash", "eagle3:2")
    ]
    promised = (
        "suite source settings_id settings method num_prompts num_tokens al_pooled al_request_mean verified score "
        "tps_decode speedup_decode speedup_decode_geometric "
        "speedup_e2e bandwidth_share draft_ms verify_ms other_ms break_even_al joules_per_token exact audit passed cut "
        "exact_as_text"
    )
    assert {tuple(cell) for cell in shown["cells"]} == {tuple(promised.split())}
    plain, dflash, _ = shown["cells"]
    assert (len(dflash["speedup_decode"]), len(dflash["speedup_e2e"])) == (3, 3)
    assert (plain["exact"], dflash["exact"], dflash["passed"]) == ([3, 3], [4, 4], [2, 4])
    assert [cell["audit"] for cell in shown["cells"]] == [[4, 4]] * 3
    assert plain["break_even_al"] is None
    assert {tuple(finding) for finding in shown["findings"]} == {
        ("kind", "text", "remedy", "remedy_code", "forbids_speedup", "places")
    }


def test_a_mismatch_is_exit_status_1_after_everything_is_saved(
    here: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    gsm8k(here / "data", 4)
    code, _ = fake_run(monkeypatch, *ASKED, faults={"dflash": other_tokens})
    assert code == 1
    info, records = store.load(here / "out")
    info = info.to_json()
    assert (info["state"], len(records)) == ("complete", 12)
    assert "dflash is NOT exact: 4 answers" in capsys.readouterr().out
    assert ("mismatch", "method", "dflash", 4) in mismatches(monkeypatch, capsys, "out")


@pytest.mark.parametrize("temperature", ["0", "1e-6"])
def test_whatever_is_decoded_greedily_is_checked(here: Path, monkeypatch: Patch, temperature: str) -> None:
    gsm8k(here / "data", 4)
    words = [*ASKED, "--temperature", temperature]
    code, backend = fake_run(monkeypatch, *words, faults={"dflash": other_tokens})
    assert (code, len(backend.audited)) == (1, 8)


def test_an_audit_that_fails_is_exit_status_1_though_all_methods_agree(
    here: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    gsm8k(here / "data", 4)
    code, backend = fake_run(monkeypatch, *ASKED)
    assert (code, len(backend.audited)) == (0, 4)
    departures = dict.fromkeys(backend.audited[:1], Divergence(1, 2.0, 0.001))
    capsys.readouterr()
    code, _ = fake_run(monkeypatch, *ASKED, out="again", departures=departures)
    assert code == 1
    screen = capsys.readouterr().out
    assert "NOT exact: " in screen and "✗" in screen
    assert {place[:2] for place in mismatches(monkeypatch, capsys, "again")} == {("mismatch", "engine")}
    code, backend = fake_run(monkeypatch, *ASKED, "--audit", "none", out="unread", departures=departures)
    assert (code, backend.audited) == (0, [])


def mismatches(monkeypatch: Patch, capsys: Captured, run: str) -> list[tuple[str, str, str, int]]:
    """(code, code of the remedy, method, answers) of each finding of this kind that a report shows."""
    assert main(monkeypatch, "report", run, "--format", "json") == 0
    return [
        (one["kind"], one["remedy_code"], place["method"], place["values"]["num_answers"])
        for one in json.loads(capsys.readouterr().out)["findings"]
        for place in one["places"]
        if one["kind"] == "mismatch"
    ]


def test_failed_answers_are_rows_and_exit_status_1(here: Path, monkeypatch: Patch, capsys: Captured) -> None:
    def nan(answer: Generation) -> Generation:
        return Generation((), "", "error", 5, 0.0, 0.0, error="NaN logits after 3 tokens (row 0)")

    gsm8k(here / "data", 2)
    code, _ = fake_run(monkeypatch, *ASKED, "--json", faults={"dflash": nan})
    captured = capsys.readouterr()
    shown = json.loads(captured.out)
    assert (code, shown["cells"][1]["tps_decode"]) == (1, None)
    assert "2 of 6 answers" in captured.err and "--allow failed" in captured.err
    assert "NaN logits" in shown["findings"][0]["text"]


def test_ctrl_c_says_how_to_go_on_and_that_goes_on(here: Path, monkeypatch: Patch, capsys: Captured) -> None:
    gsm8k(here / "my data", 4)
    words = ["--suite", "gsm8k", "--data", "my data"]
    # Two calls for the warm-up, two for the first prompt, three for the second one and its control, one of the third.
    code, _ = fake_run(monkeypatch, *words, "--json", fails_at={9: KeyboardInterrupt()})
    captured = capsys.readouterr()
    assert (code, captured.out) == (130, "")
    command = "dflash-bench run --out out --suite gsm8k --data 'my data' --json --resume"
    assert captured.err.count("\n") == 1 and captured.err.endswith(f": {command}\n")
    assert len(store.load(here / "out")[1]) == 5
    code, backend = fake_run(monkeypatch, *words, "--resume")
    assert (code, len(backend.calls)) == (0, 6)
    assert store.load(here / "out")[0].to_json()["state"] == "complete"


def test_ctrl_c_names_a_folder_that_nobody_named(here: Path, monkeypatch: Patch, capsys: Captured) -> None:
    gsm8k(here / "data", 2)
    install(monkeypatch, FakeBackend(fails_at={4: KeyboardInterrupt()}))
    assert main(monkeypatch, "run", "--suite", "gsm8k", "--data", "data") == 130
    (folder,) = (here / "results/runs").iterdir()
    assert capsys.readouterr().err.endswith(f" --out {folder.relative_to(here)} --resume\n")
    install(monkeypatch, FakeBackend(fails_at={1: KeyboardInterrupt()}))
    monkeypatch.setattr(store, "create", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(monkeypatch, "run", "--suite", "gsm8k", "--data", "data", "--out", "none") == 130
    assert capsys.readouterr().err.startswith("stopped") and not (here / "none").exists()


# Real models, sampling, own prompts


def test_real_models_answer_own_prompts_exactly(here: Path, model: Path, monkeypatch: Patch, capsys: Captured) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    write_lines(here / "p.jsonl", {"prompt": "one"}, {"turns": ["two", "and?"]}, {"messages": messages})
    asked = [word for name in ("dflash", "eagle3:2", "eagle3-tree:nodes=8") for word in ("--method", name)]
    words = ["--prompts", "p.jsonl", *asked, "--max-new-tokens", "8", "--json"]
    assert main(monkeypatch, "run", "--model", model, "--out", "out", "--repeats", 2, *words) == 0
    captured = capsys.readouterr()
    cells = json.loads(captured.out)["cells"]
    assert [cell["exact"] for cell in cells] == [[7, 7], *[[8, 8]] * 3]
    assert [cell["audit"] for cell in cells] == [[8, 8]] * 4
    assert [(cell["num_prompts"], cell["passed"]) for cell in cells] == [(3, None)] * 4
    assert captured.err == ""


def test_any_target_with_any_draft_in_the_mode_that_was_asked_for(
    here: Path, model: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    write_lines(here / "p.jsonl", {"prompt": "one"}, {"prompt": "two"})
    made_for = presets.Preset(
        str(model / "target"), {"dflash": str(model / "dflash")}, trained_thinking={"dflash": False}
    )
    monkeypatch.setitem(presets.table(), "mine", made_for)
    asked = ["run", "--prompts", "p.jsonl", "--max-new-tokens", 6, "--json"]

    def kinds(*words: object) -> tuple[set[str], dict[str, Any]]:
        assert main(monkeypatch, *asked, "--device", "cpu", "--dtype", "float32", *words) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [cell["exact"] for cell in shown["cells"]] == [[2, 2], [2, 2]]
        return {finding["kind"] for finding in shown["findings"]}, read_info(Path(shown["run"])).to_json()["identity"]

    found, identity = kinds("--model", "mine", "--out", "off")
    assert (identity["settings"][0]["thinking"], "other_mode" in found) == (False, False)
    found, identity = kinds("--model", "mine", "--thinking", "on", "--attention", "eager", "--out", "on")
    assert (identity["settings"][0]["thinking"], identity["attention"], "other_mode" in found) == (True, "eager", True)
    # Nothing is known about a draft that replaces the preset's.
    found, identity = kinds(
        "--model", "mine", "--thinking", "on", "--draft", f"dflash={model / 'dflash'}", "--out", "own"
    )
    assert (identity["drafts"]["dflash"]["trained_thinking"], "other_mode" in found) == (None, False)
    _, identity = kinds("--target", model / "target", "--draft", f"eagle3={model / 'eagle3'}", "--out", "free")
    assert (identity["model"], set(identity["methods"])) == (str(model / "target"), {"ar", "eagle3"})
    assert set(identity["revisions"]) == {"target", "eagle3"}


def test_sampled_answers_are_not_judged(here: Path, model: Path, monkeypatch: Patch, capsys: Captured) -> None:
    words = ["--suite", "gsm8k", "--limit", 2, "--method", "dflash", "--max-new-tokens", 6, "--json"]
    assert main(monkeypatch, "run", "--model", model, "--out", "out", "--temperature", 0.8, "--seed", 3, *words) == 0
    assert [cell["exact"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [None, None]
    identity = store.load(here / "out")[0].to_json()["identity"]
    assert (identity["settings"][0]["temperature"], identity["seed"]) == (0.8, 3)


# Bad input


@pytest.fixture
def refused(here: Path, monkeypatch: Patch, capsys: Captured) -> Callable[..., None]:
    """Runs what must end in exit status 2, one line on stderr that names all of these, and no new folder."""

    def run(words: Sequence[object], *named: object) -> None:
        before = sorted(here.rglob("*"))
        code = main(monkeypatch, "run", *words)
        captured = capsys.readouterr()
        assert_refused((code, captured.out, captured.err), *map(str, named))
        assert sorted(here.rglob("*")) == before

    return run


NO_EFFECT = {
    "--suite gsm8k --method eagle3 --block-size 8": "--block-size --method dflash",
    "--suite gsm8k --method eagle3 --draft-steps 2": "--draft-steps --method dflash",
    "--suite gsm8k --method dflash:7 --block-size 8": "--block-size --method dflash",
    "--suite gsm8k --seed 3 --temperature 1e-6": "--seed temperature",
    "--suite gsm8k --audit all --temperature 1": "--audit temperature",
    "--suite gsm8k --draft eagle3=a/b --method dflash": "--draft eagle3= --method",
    "--suite gsm8k --target a/b": "a/b --draft dflash=PATH",
    "--suite gsm8k --draft dflash": "--draft dflash: dflash=org/name",
    "--suite gsm8k --draft dflash=a --draft dflash=b": "--draft dflash= twice",
    "--suite gsm8k --attention flash_attention_2": "--attention flash_attention_2",
    "--suite gsm8k --device-map auto --device cpu": "--device --device-map",
    "--suite gsm8k --trust-remote-code": "--trust-remote-code",
    "--suite gsm8k --temperature inf": "--temperature inf",
    "--suite gsm8k --temperature=-1": "--temperature -1",
    "--suite gsm8k --temperature 0,hot": "--temperature 0,hot",
    "--suite gsm8k --temperature 1 --top-p 1.5": "--top-p 1.5",
    "--suite gsm8k --temperature 1 --min-p nan": "--min-p nan",
    "--suite gsm8k --thinking maybe": "thinking 'maybe'",
    # Unknown names, with the known ones.
    "--suite gsm9k": "'gsm9k' 'gsm8k' agentic_coding,",
    "--suite gsm8k --audit some": "audit 'some'",
    "--suite gsm8k --method nonsense": f"'nonsense' {', '.join(sorted({*METHODS} - {'ar'} | {'plain'}))}",
    "--suite gsm8k --model none": "model 'none'",
    "--suite gsm8k --device tpu": "device 'tpu' cpu, cuda, cuda:N",
    "--suite gsm8k --dtype int8": "dtype 'int8' auto, bfloat16, float16, float32",
    "--suite gsm8k --attention linear": "attention 'linear' eager, sdpa",
    "--suite gsm8k --device-map balanced": "'balanced' auto",
    "--suite gsm8k --method dflash --draft nonsense=a/b": f"'nonsense' {', '.join(sorted(WEIGHTS))}",
    # Machines.
    "--suite gsm8k --device-map auto (no GPU)": "--device-map CPU",
    "--suite gsm8k --device cuda:0 (no GPU)": "--device cpu",
    "--suite gsm8k --device cuda --threads 1 (GPU)": "--threads GPU",
}


@each("words", NO_EFFECT)
def test_a_flag_that_has_no_effect_or_no_sense_is_refused(
    words: str, monkeypatch: Patch, refused: Callable[..., None]
) -> None:
    given, _, machine = words.partition(" (")
    if machine:
        monkeypatch.setattr("torch.cuda.device_count", lambda: int(machine == "GPU)"))
    refused(given.split(), *names(NO_EFFECT[words]))


def test_a_hub_id_without_a_network_is_one_line(here: Path, monkeypatch: Patch, refused: Callable[..., None]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "no cache"))
    refused(("--suite", "gsm8k", "--data", "hub"), "openai/gsm8k", "--data", "gsm8k/test.jsonl or .parquet")
    own = write_lines(here / "p.jsonl", {"prompt": "a"})
    named = {
        "z-lab/Qwen3-8B-DFlash-b16": ("--model", "qwen3-8b"),
        "c/d": ("--target", "a/b@v1", "--draft", "dflash=c/d"),
    }
    for draft, words in named.items():
        refused(("--prompts", own, *words), draft, "hub", "folder")


def test_bad_rows_are_named_by_file_and_line(here: Path, refused: Callable[..., None]) -> None:
    ask = ("--suite", "gsm8k", "--data", here / "data")
    refused(ask, "'gsm8k'", f"{here}/data/gsm8k/test.jsonl")
    path = write_lines(here / "data/gsm8k/test.jsonl", {"question": "?", "answer": "1"}, {"question": "?"})
    refused(ask, f"{path} line 2", "'answer'", "question")
    path.write_text('{"question": "?", "answer": "1"}\n{"question": \n')
    refused(ask, f"{path} line 2", "JSON")
    path.write_text("\n")
    refused(ask, "'gsm8k'")
    own = write_lines(here / "mine.jsonl", {"prompt": "a"}, {"prompts": "b"})
    refused(("--prompts", own), f"{own} line 2", "its columns are prompts")


def refuse_to_load(*_: object) -> None:
    pytest.fail("the model was loaded before the cheap checks")


def test_an_output_folder_is_looked_at_before_a_model_is_loaded(
    here: Path, monkeypatch: Patch, refused: Callable[..., None]
) -> None:
    monkeypatch.setattr("dflash_bench.runner.session.open_local", refuse_to_load)
    ask = ("--suite", "gsm8k", "--out")
    used = write_lines(here / "used/notes.txt", "mine").parent
    refused((*ask, used), used, "--out")
    refused((*ask, used, "--resume"), used, "run.json")
    refused((*ask, here / "none", "--resume"), here / "none", "dflash-bench runs")
    refused((*ask, used / "notes.txt/run"), used / "notes.txt/run", "Not a directory")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != here)
    refused((*ask, here / "new/run"), here / "new/run", "Permission denied")


def test_a_run_that_is_there_is_not_written_over(
    here: Path, monkeypatch: Patch, capsys: Captured, refused: Callable[..., None]
) -> None:
    gsm8k(here / "data", 2)
    assert fake_run(monkeypatch, *ASKED)[0] == 0
    capsys.readouterr()
    monkeypatch.setattr("dflash_bench.runner.session.open_local", refuse_to_load)
    refused(("--out", "out", *ASKED), "out ", "--resume", "--out")


def test_a_missing_scorer_is_noticed_before_a_model_is_loaded(monkeypatch: Patch, refused: Callable[..., None]) -> None:
    monkeypatch.setattr("dflash_bench.runner.session.open_local", refuse_to_load)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    refused(("--suite", "math500"), "pip install math-verify")
    with pytest.raises(UserError, match="unknown scorer 'x'"):
        scorers.require({"x"})


@each("part", ["target", "dflash", "eagle3"])
@each("damage", ["truncated", "foreign"])
def test_damaged_weights_are_refused(
    here: Path, model: Path, part: str, damage: str, refused: Callable[..., None]
) -> None:
    copy = shutil.copytree(model, here / "model")
    weights = copy / part / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] if damage == "truncated" else b"PK\x03\x04 a zip of pickles")
    methods = ("--method", "dflash", "--method", "eagle3")
    refused(("--suite", "gsm8k", "--model", copy, "--out", here / "out", *methods), part)


def test_a_model_folder_without_a_draft_or_target_says_so(
    here: Path, model: Path, refused: Callable[..., None]
) -> None:
    copy = shutil.copytree(model, here / "model")
    shutil.rmtree(copy / "eagle3")
    refused(("--suite", "gsm8k", "--model", copy, "--method", "eagle3"), f"{copy}/target", "eagle3", "--draft")
    shutil.rmtree(copy / "target")
    refused(("--suite", "gsm8k", "--model", copy), copy, "target/config.json")


@each("words", ["--limit 0", "--limit many", "--repeats 0", "--block-size 1", "--temperature nan", "--nonsense"])
def test_a_value_out_of_range_is_exit_status_2(words: str, here: Path, monkeypatch: Patch, capsys: Captured) -> None:
    assert main(monkeypatch, "run", "--suite", "gsm8k", "--method", "dflash", *words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words.split()[0] in captured.err
    assert list(here.iterdir()) == []
