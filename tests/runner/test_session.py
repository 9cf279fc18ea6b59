"""From options to a run: what is chosen where nothing is given, and what `run.json` remembers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.analysis.cells import summarise
from dflash_bench.core import environment
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Settings
from dflash_bench.models import loading, presets
from dflash_bench.report.findings import findings
from dflash_bench.results import store, table
from dflash_bench.results.identity import settings_to_json
from dflash_bench.runner import session
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_of, model_of, modes_of, prompts_of
from dflash_bench.runner.setup import configure_torch, device_and_dtype, gpu_note, model_note
from dflash_bench.tasks import sandbox
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.runs import known

Main = Callable[..., tuple[int, str, str]]


def request(**changes: object) -> RunRequest:
    return RunRequest(**{"suites": ("gsm8k",), "methods": (), **changes})  # type: ignore[arg-type]


def test_dflash_is_measured_where_no_method_is_named() -> None:
    assert [method.label for method in methods_of(request())] == ["ar", "dflash"]


def test_draft_steps_are_those_of_the_dflash_that_says_none() -> None:
    chosen = methods_of(request(methods=("dflash", "dflash:3", "dflash:steps=4", "eagle3"), draft_steps="2"))
    assert [method.label for method in chosen] == [
        "ar",
        "dflash:steps=2",
        "dflash:n=3,steps=2",
        "dflash:steps=4",
        "eagle3",
    ]


def test_a_block_size_is_that_of_the_dflash_without_a_number() -> None:
    chosen = methods_of(request(methods=("dflash", "dflash:3", "dflash:block=4", "eagle3"), block_size="8"))
    assert [method.label for method in chosen] == ["ar", "dflash:block=8", "dflash:3", "dflash:block=4", "eagle3"]
    once = methods_of(request(methods=("dflash", "dflash:block=8"), block_size="8"))
    assert [method.label for method in once] == ["ar", "dflash:block=8"]


def test_a_draft_alone_says_which_method_is_measured() -> None:
    asked = request(target="a/b", drafts=("eagle3=me/mine@v2",))
    assert [method.label for method in methods_of(asked)] == ["ar", "eagle3"]
    model = model_of(asked, methods_of(asked))
    assert (model.target, model.drafts, asked.name) == ("a/b", {"eagle3": "me/mine@v2"}, "a/b")


@each(
    "model, asked, has_thinking, thinking",
    [
        ("qwen3-8b", None, True, (False,)),
        ("qwen3-8b", "on", True, (True,)),
        ("qwen3.5-9b", None, True, (True,)),
        ("qwen3.5-9b", "off", True, (False,)),
        ("qwen3.5-9b", "both", True, (False, True)),
        ("qwen3.5-9b", None, False, (None,)),
        ("qwen3-8b", None, False, (None,)),
    ],
)
def test_thinking_is_as_asked_or_as_the_drafts_were_trained_or_no_question(
    model: str, asked: str | None, has_thinking: bool, thinking: tuple[bool | None, ...]
) -> None:
    assert modes_of(request(thinking=asked), presets.preset(model), has_thinking) == thinking


@each("asked", ["on", "off", "both"])
def test_thinking_has_no_effect_on_a_template_without_it(asked: str) -> None:
    with pytest.raises(UserError, match=f"--thinking {asked} .*Qwen/Qwen3-8B"):
        modes_of(request(thinking=asked), presets.preset("qwen3-8b"), has_thinking=False)


@each(
    "changes, has_cuda, expected",
    [
        ({}, False, ("cpu", "float32")),
        ({}, True, ("cpu", "float32")),
        ({"model": "mine"}, False, ("cpu", "float32")),
        ({"model": "mine"}, True, ("cuda", "bfloat16")),
        ({"device": "cuda:1"}, True, ("cuda:1", "bfloat16")),
        ({"device": "cuda", "dtype": "float32"}, True, ("cuda", "float32")),
        ({"dtype": "float16"}, False, ("cpu", "float16")),
        ({"dtype": "auto"}, True, ("cpu", "auto")),
        ({"model": "mine", "device_map": "auto"}, True, ("cuda", "bfloat16")),
    ],
)
def test_device_and_type_where_none_is_given(
    changes: dict[str, Any], has_cuda: bool, expected: tuple[str, str]
) -> None:
    assert device_and_dtype(RunRequest(**changes), 2 * has_cuda) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_computes_alike_at_all_lengths(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products, set_to = torch.backends.cuda.matmul, list[bool]()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", set_to.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(products, name) for name in names]
    try:
        assert configure_torch(RunRequest(model="mine", device=device))[0] == device
        assert set_to == ([False] if device == "cuda" else [])
        assert [getattr(products, name) for name in names] == ([False, False] if device == "cuda" else before)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(products, name, value)


@each("device", ["cpu:0", "cpu:99", "cuda:", "cuda:x", "cuda:-1", "cuda:\u0663", "CPU", " cpu", "tpu"])
def test_a_device_that_has_no_such_name_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=r"device '.*'.* cpu, cuda, cuda:N$"):
        device_and_dtype(RunRequest(device=device), 2)


@each("index", ["2", "99", "9" * 5000])
def test_a_gpu_that_is_not_there_is_refused(index: str) -> None:
    with pytest.raises(UserError, match=r"^--device cuda:\d+: .* cuda:0 to cuda:1$"):
        device_and_dtype(RunRequest(device=f"cuda:{index}"), 2)


@each(
    "message, named",
    [
        ("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.", "update the driver"),
        ("CUDA error: no kernel image is available for execution on the device", "install a torch that"),
        ("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`", "nvidia-smi"),
        ("CUDA error: an illegal something", "another --device"),
        (None, "others hold 80.00 of 80.00 GB, too few"),
    ],
)
def test_a_gpu_that_is_full_or_that_torch_cannot_use_is_refused_in_one_line(
    main: Main, monkeypatch: pytest.MonkeyPatch, message: str | None, named: str
) -> None:
    def try_out(gpu: str) -> None:
        if message is not None:
            raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10_000, 80 * 10**9))
    assert "80.00 of 80.00 GB of cuda" in str(gpu_note(RunRequest(device="cuda")))
    monkeypatch.setattr(loading, "try_out", try_out)
    words = ("run", "--suite", "gsm8k", "--limit", 1, "--method", "ngram", "--out", "run", "--device", "cuda")
    assert_refused(main(*words), named, "on cuda")
    assert not Path("run").exists()


@each("dtype, free_mb, fitting", [("float32", 11, "--dtype bfloat16 fits"), ("bfloat16", 7.1, "--quantize int8 fits")])
def test_a_gpu_that_is_too_small_is_told_what_would_fit(
    main: Main, monkeypatch: pytest.MonkeyPatch, dtype: str, free_mb: float, fitting: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free_mb * 1e6), int(free_mb * 1e6)))
    monkeypatch.setattr(loading, "try_out", lambda _: None)
    words = ("run", "--suite", "gsm8k", "--limit", 1, "--method", "ngram", "--out", "run", "--device", "cuda")
    assert_refused(main(*words, "--dtype", dtype), fitting)


def test_a_gpu_that_only_the_driver_knows_is_named(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpus", lambda: [{"name": "H100", "driver": "470.1", "memory_bytes": None}])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ("run", "--suite", "gsm8k", "--limit", 1, "--out", "run", "--device", "cuda")
    assert_refused(main(*words), torch.__version__, "H100 (driver 470.1)", "--device cpu")
    assert "H100" in str(gpu_note(RunRequest(model="qwen3-8b")))
    assert gpu_note(RunRequest(model="qwen3-8b", device="cpu")) is gpu_note(RunRequest()) is None


def test_own_prompts_that_meet_nano_by_default_are_told_what_it_says() -> None:
    mine = RunRequest(prompts=Path("mine.jsonl"))
    assert "says nothing about your model" in str(model_note(mine))
    others = (
        {"model": "nano"},
        {"target": "t"},
        {"servers": ("plain=http://h",)},
        {"prompts": None, "suites": ("gsm8k",)},
    )
    assert not any(model_note(replace(mine, **changes)) for changes in others)


def test_own_prompts_come_after_the_suites_and_share_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    loaded = prompts_of(request(suites=("code", "mbpp"), prompts=path, limit=1), presets.preset("nano"))
    assert [(each.suite.name, len(each.prompts)) for each in loaded] == [
        ("humaneval", 1),
        ("mbpp", 1),
        ("prompts", 1),
    ]


def test_a_run_remembers_what_it_was_made_with(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["dflash-bench", "run", "--suite", "mbpp", "--model", "my model"]
    monkeypatch.setattr(sys, "argv", words)
    asked = request(suites=("mbpp",), model=str(model), limit=1, max_new_tokens=4, prompts=None)
    session.perform(asked, tmp_path / "run", resume=False, caller=session.Caller(print))
    info, records = store.load(tmp_path / "run")
    info = info.to_json()
    assert [record.method for record in records] == ["ar", "dflash"]
    identity = info["identity"]
    assert info["state"] == "complete"
    assert info["command"] == "dflash-bench run --suite mbpp --model 'my model'"
    assert info["options"]["suites"] == ["mbpp"]
    assert info["options"]["max_new_tokens"] == 4
    assert "rlimits" in info["sandbox"]
    assert identity["code"] == "caged"
    assert "torch" in info["environment"]["packages"]
    assert identity["methods"] == {
        "ar": {"name": "ar", "draft": None, "options": {}, "num_drafts": 0},
        "dflash": {"name": "dflash", "draft": "dflash", "options": {}, "num_drafts": 3},
    }
    assert {name: len(sha) for name, sha in identity["revisions"].items()} == {"target": 64, "dflash": 64}
    assert (identity["model"], identity["target"]) == (str(model), model.name)
    assert identity["settings"] == settings_to_json([Settings(thinking=False)])
    assert identity["drafts"] == {
        "dflash": {"name": "dflash", "trained_thinking": None, "verifier": None, "kind": "DFlash"}
    }
    assert (identity["attention"], identity["device_map"]) == ("sdpa", None)
    assert identity["suites"]["mbpp"]["source"] == "embedded"
    assert (identity["device"], identity["dtype"], identity["threads"]) == ("cpu", "float32", 1)
    # Not a word from a library, and no progress where nobody watches.
    assert capfd.readouterr() == ("", "")


def code_run(model: Path, **changes: object) -> RunRequest:
    return request(suites=("mbpp",), model=str(model), limit=1, max_new_tokens=4, **changes)


def test_without_a_cage_code_is_not_run_unless_asked_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "strongest", lambda: None)
    session.perform(code_run(model), tmp_path / "not run", resume=False, caller=session.Caller(print))
    info, records = store.load(tmp_path / "not run")
    info = info.to_json()
    assert (info["sandbox"], info["identity"]["code"]) == (sandbox.describe(None), "not run")
    assert [record.passed for record in records] == [None, None]
    read = table.read_run(tmp_path / "not run")
    noted = findings(read.rows, summarise(read.rows, read.info.identity), read.info.identity)
    assert [note.remedy for note in noted if note.kind == "code_not_run"] == [sandbox.REMEDY]
    with pytest.raises(UserError, match='code was "not run"'):
        session.perform(
            code_run(model, unsafe_code=True), tmp_path / "not run", resume=True, caller=session.Caller(print)
        )
    session.perform(code_run(model, unsafe_code=True), tmp_path / "unsafe", resume=False, caller=session.Caller(print))
    info, records = store.load(tmp_path / "unsafe")
    info = info.to_json()
    assert (info["sandbox"], info["identity"]["code"]) == (sandbox.describe(sandbox.UNSAFE), "unsafe")
    assert [record.passed for record in records] == [False, False]
    read = table.read_run(tmp_path / "unsafe")
    for code, kind in ("unsafe", "code_unsafe"), ("caged", "code_by_heart"):
        identity = known(**(info["identity"] | {"code": code}))
        noted = findings(read.rows, summarise(read.rows, identity), identity)
        assert [note.kind for note in noted if note.kind.startswith("code")] == [kind]


def test_unsafe_code_must_have_an_effect(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "open_local", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match="--unsafe-code"):
        session.perform(
            request(model=str(model), unsafe_code=True), tmp_path / "run", resume=False, caller=session.Caller(print)
        )
    monkeypatch.setattr(sandbox, "strongest", lambda: sandbox.Isolation(landlock=True))
    with pytest.raises(UserError, match=r"--unsafe-code .*\(landlock, seccomp"):
        session.perform(code_run(model, unsafe_code=True), tmp_path / "run", resume=False, caller=session.Caller(print))
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_after_keepers_that_break_down(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "strongest", lambda: sandbox.Isolation(landlock=True))
    monkeypatch.setattr(sandbox, "_SUPERVISOR", (sys.executable, "-c", "raise SystemExit('no room')"))
    session.perform(code_run(model), tmp_path / "run", resume=False, caller=session.Caller(print))
    info, records = store.load(tmp_path / "run")
    info = info.to_json()
    assert (info["state"], [record.passed for record in records]) == ("complete", [False, False])
