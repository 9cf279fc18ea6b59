"""Servers that a run starts: waited for, kept in view, and gone afterwards, whatever happens."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dflash_bench.core import methods
from dflash_bench.core.dialects import LaunchSpec
from dflash_bench.core.errors import UserError
from dflash_bench.core.secrets import Arguments
from dflash_bench.models.presets import NANO
from dflash_bench.results import store, table
from dflash_bench.runner import launch
from dflash_bench.servers import supervisor
from dflash_bench.servers.launch import LaunchedServers, added_by_draft, program_named
from helpers.each import each
from helpers.faults.matrix import command
from helpers.processes import is_alive
from helpers.refusals import assert_refused
from helpers.servers.nano_words import nano_text

Main = Callable[..., tuple[int, str, str]]
PROGRAM = Path(__file__).parents[1] / "helpers/servers/fake_program.py"
ASKED = "run --suite gsm8k --model nano --limit 2 --max-new-tokens 24".split()
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A program that behaves as told."""

    def make(**does: Any) -> Path:
        path = tmp_path / "fake"
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(PROGRAM))} "$@"\n')
        path.chmod(0o755)
        used = {token for tokens in does.get("answers", {}).values() for token in tokens}
        does["words"] = {token: nano_text([token]) for token in used}
        monkeypatch.setenv("FAKE_PROGRAM", json.dumps(does))
        return path

    return make


def spec(text: str = "ar", **changes: Any) -> LaunchSpec:
    method = methods.parse(text)
    draft = (None, None) if text == "ar" else ("D", 5)
    return LaunchSpec(
        **{
            "method": method,
            "model": "m",
            "target": "T",
            "draft": draft[0],
            "num_drafts": draft[1],
            "length": 512,
            "slots": 4,
            "dtype": "float32",
            "memory_share": 0.3,
            **changes,
        }
    )


def launched(path: Path, folder: Path, name: str = "vllm") -> LaunchedServers:
    return LaunchedServers(program_named(name), str(path), Arguments(()), folder)


def gone(processes: Sequence[int]) -> bool:
    end_s = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < end_s:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


BY_MTP = {"draft": None, "num_drafts": 3, "kind": "MTP"}
LOOKUP = {"draft": None, "num_drafts": 4}
IMPOSED = {"num_drafts": 3, "rates": (0.8, 0.6, 0.0)}
DRAFT = "--speculative-draft-model-path D"


def config(**said: Any) -> str:
    return f"--speculative-config {json.dumps(said)}"


@each(
    ("name", "text", "changes", "told"),
    [
        ("vllm", "dflash@a:5", {}, config(method="dflash", model="D", num_speculative_tokens=5)),
        # A server sees by a draft's files that it is a DFlash 2; DSpark is a method of its own.
        ("vllm", "dflash", {"kind": "DFlash 2"}, config(method="dflash", model="D", num_speculative_tokens=5)),
        ("vllm", "dflash", {"kind": "DSpark", "shifted": True},
         config(method="dspark", model="D", num_speculative_tokens=5)),
        ("vllm", "dflash:cut=auto", {"kind": "DSpark", "shifted": True},
         config(method="dspark", model="D", num_speculative_tokens=5, enable_adaptive_verification=True)),
        ("vllm", "dflash", {"kind": "LiLiCorr"}, config(method="dflash", model="D", num_speculative_tokens=5)),
        ("vllm", "p-eagle:5", {},
         config(method="eagle3", parallel_drafting=True, model="D", num_speculative_tokens=5)),
        ("vllm", "mtp:3", BY_MTP, config(method="mtp", num_speculative_tokens=3)),
        ("vllm", "ngram:n=4,max=5", LOOKUP,
         config(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=5)),
        ("vllm", "synthetic:rates=0.8/0.75/0,base=p-eagle", IMPOSED | {"base": methods.parse("p-eagle:3")},
         config(method="eagle3", parallel_drafting=True, model="D", num_speculative_tokens=3,
                rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.6, 0.0])),
        # It counts the anchor, too.
        ("sglang", "dflash", {"kind": "DFlash 2"},
         f"--speculative-algorithm DFLASH {DRAFT} --speculative-num-draft-tokens 6"),
        ("sglang", "dflash", {"kind": "DSpark", "shifted": True},
         f"--speculative-algorithm DSPARK {DRAFT} --speculative-dspark-block-size 5"),
        # It reads labels, shifted or not, from a Domino's files.
        ("sglang", "dflash", {"kind": "Domino", "shifted": True},
         f"--speculative-algorithm DFLASH {DRAFT} --speculative-num-draft-tokens 6"),
        ("sglang", "eagle3", {}, f"--speculative-algorithm EAGLE3 {DRAFT} --speculative-num-steps 5 "
         "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6"),
        ("sglang", "eagle3-tree:nodes=59,depth=7,top_k=10", {"num_drafts": 59},
         f"--speculative-algorithm EAGLE3 {DRAFT} --speculative-num-steps 7 --speculative-eagle-topk 10 "
         "--speculative-num-draft-tokens 60"),
        ("sglang", "mtp:3", BY_MTP, "--speculative-algorithm NEXTN --speculative-num-steps 3 "
         "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"),
        ("sglang", "ngram:4", LOOKUP, "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5 "
         "--speculative-ngram-max-bfs-breadth 1"),
        # Its block includes the anchor.
        ("lmdeploy", "dflash", {"kind": "DFlash"},
         "--speculative-algorithm dflash --speculative-draft-model D --speculative-dflash-block-size 6"),
        ("lmdeploy", "eagle3", {},
         "--speculative-algorithm eagle3 --speculative-draft-model D --speculative-num-draft-tokens 5"),
        ("llama.cpp", "dflash", {"kind": "DFlash 2"}, "--model-draft D --spec-type draft-dflash --spec-draft-n-max 5"),
        ("llama.cpp", "dflash", {"kind": "DSpark", "shifted": True},
         "--model-draft D --spec-type draft-dspark --spec-draft-n-max 5"),
        ("llama.cpp", "dflash", {"kind": "DFlash", "shifted": True},
         "--model-draft D --spec-type draft-dspark --spec-draft-n-max 5"),
        ("llama.cpp", "eagle3", {}, "--model-draft D --spec-type draft-eagle3 --spec-draft-n-max 5"),
        ("llama.cpp", "mtp:3", BY_MTP, "--spec-type draft-mtp --spec-draft-n-max 3"),
        ("llama.cpp", "synthetic:rates=0.8/0.75/0,base=dflash", IMPOSED | {"base": methods.parse("dflash:3")},
         "--model-draft D --spec-type draft-dflash --spec-draft-n-max 3 --spec-synth-rates 0.8,0.6,0.0"),
        ("llama.cpp", "ngram:n=4,max=5", LOOKUP,
         "--spec-type ngram-simple --spec-ngram-simple-size-n 5 --spec-ngram-simple-size-m 4"),
    ],
)  # fmt: skip
def test_each_server_is_told_in_its_own_words(name: str, text: str, changes: Any, told: str) -> None:
    program = program_named(name)
    drafting, plain = (spec(one, dtype="auto", **more) for one, more in ((text, changes), ("ar", {})))
    assert launch.can_draft(program, drafting.method) and launch.computes(program, drafting)
    flags = added_by_draft(program, plain, drafting)
    assert " ".join(flags.words) == told
    # Flags that only make it report rounds are for measuring, and not part of the advice.
    argv = program.argv(drafting, 81)
    assert (("--per-request-spec-decode-metrics" in argv), argv[len(argv) - len(program.counting) :]) == (
        name == "vllm", [*program.counting]
    )  # fmt: skip


def test_an_option_of_which_a_server_knows_one_value() -> None:
    vllm = program_named("vllm")
    taken = {text: launch.can_draft(vllm, methods.parse(text)) for text in ("dflash:cut=auto", "dflash:cut=0.5")}
    assert taken == {"dflash:cut=auto": True, "dflash:cut=0.5": False}
    assert not launch.can_draft(vllm, methods.parse("dflash:block=auto"))


def test_a_kind_that_a_server_would_compute_as_another_is_refused() -> None:
    vllm, sglang = ("Domino", "JetSpec"), ("JetSpec",)
    others = {"vllm": vllm, "sglang": sglang, "llama.cpp": ("DFlare",), "lmdeploy": ("DFlash 2", "DSpark")}
    for name, kind in ((name, kind) for name, kinds in others.items() for kind in kinds):
        assert not launch.computes(program_named(name), spec("dflash", kind=kind))
    assert launch.computes(program_named("llama.cpp"), spec("dflash", kind="JetSpec"))


@each(
    ("conditional", "shares"),
    [
        ("0.9/0.8/0.5", (0.9, 0.72, 0.36)), ("0/1/1", (0, 0, 0)), ("1/1/1", (1, 1, 1)), ("0.5/0/1", (0.5, 0, 0)),
        ("0.3333333/0.9999999/1/0.9999999", (0.333333,) * 4)
    ]
)  # fmt: skip
def test_imposed_rates_are_shares_of_all_rounds_and_never_rise(conditional: str, shares: tuple[float, ...]) -> None:
    for name in ("vllm", "llama.cpp"):
        base, rates = launch.imposed(program_named(name), methods.parse(f"synthetic:rates={conditional},base=eagle3@a"))
        assert base is not None and base.label == f"eagle3@a:{len(shares)}"
        assert rates == pytest.approx(shares, abs=1e-6) and list(rates) == sorted(rates, reverse=True)
    assert launch.imposed(program_named("vllm"), methods.parse("dflash:3")) == (None, ())


@each(
    ("name", "method", "message"),
    [
        ("sglang", "synthetic:base=dflash", "SGLANG_SIMULATE_ACC_LEN"),
        ("lmdeploy", "mtp", "qwen3_5_mtp"),
        ("vllm", "synthetic", "base=dflash; it can be dflash, eagle3, p-eagle, mtp"),
        ("vllm", "synthetic:base=ngram", "base=ngram"),
        ("vllm", "synthetic:base=dflash:4", "without options"),
        ("vllm", "synthetic:base=dflsh", "unknown method 'dflsh'"),
        ("vllm", "synthetic:base=dflash,seed=3", "seed=3"),
        ("llama.cpp", "synthetic:base=mtp,rates=1/1/1/1/1/1/1", "7 tokens, and its base drafts 6"),
        # nano's draft has blocks of 16, with the anchor.
        ("llama.cpp", "synthetic:base=dflash,rates=" + "/".join("1" * 16), "16 tokens, and its base drafts 15"),
        ("vllm", "synthetic:profile=no-such,base=dflash", "no-such"),
    ],
)
def test_what_cannot_be_imposed_is_refused_in_a_line(
    main: Main, program: Callable[..., Path], tmp_path: Path, name: str, method: str, message: str
) -> None:
    code, _, err = main(*ASKED, "--launch", name, "--launch-with", program(), "--method", method, "--out", "run")
    # A target that is written as a GGUF file for the first time is a note.
    told = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert (code, message in err, len(told)) == (2, True, 1), err
    assert not Path("run").exists() and not Path("run.servers").exists()


def test_a_base_belongs_to_a_launched_server_alone(main: Main) -> None:
    assert_refused(main(*ASKED, "--method", "synthetic:base=dflash", "--out", "run"), "base=")
    served = main(*ASKED, "--server", "synthetic=http://127.0.0.1:9", "--out", "run")
    assert_refused(served, "--launch", "--method synthetic:profile=FILE,base=METHOD")


def test_mtp_is_launched_only_with_the_heads_of_the_targets_own_checkpoint(
    main: Main, program: Callable[..., Path], tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "target").symlink_to(NANO / "target")
    held = load_file(NANO / "target/model.safetensors")
    names = {
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "norm": "shared_head.norm",
    }
    for name, tensor in load_file(NANO / "mtp/model.safetensors").items():
        part, _, kind = name.removeprefix("mtp.").removeprefix("layers.0.").rpartition(".")
        held |= {f"model.layers.{layer}.{names.get(part, part)}.{kind}": tensor.clone() for layer in (16, 17)}
    several = tmp_path / "several/target"
    shutil.copytree(NANO / "target", several)
    save_file(held, several / "model.safetensors", metadata={"format": "pt"})
    asked = [*ASKED, "--launch", "vllm", "--launch-with", str(program()), "--method", "mtp"]
    for model, message in (
        (str(alone), "has no MTP heads"),
        ("nano", "without --draft mtp="),
        (str(several.parent), "cannot draft with several MTP modules"),
    ):
        code, _, err = main(*[model if word == "nano" else word for word in asked])
        assert (code, err.count("\n")) == (2, 1) and message in err


def test_llama_cpp_computes_in_float32_only_where_that_is_asked_for() -> None:
    words = program_named("llama.cpp").argv(spec("eagle3"), 81)
    assert words[words.index("--ctx-size") + 1] == str(4 * 512)
    assert words[words.index("--flash-attn") + 1] == "off"
    assert "--flash-attn" not in program_named("llama.cpp").argv(spec("eagle3", dtype="bfloat16"), 81)
    lookup = program_named("llama.cpp").argv(spec("ngram:4", **LOOKUP), 81)
    assert "--cache-type-k-draft" in words and "--cache-type-k-draft" not in lookup


@pytest.mark.parametrize("name", ["vllm", "sglang", "llama.cpp", "lmdeploy"])
def test_servers_are_waited_for_and_gone_afterwards(program: Callable[..., Path], tmp_path: Path, name: str) -> None:
    with launched(program(late_s=0.3), tmp_path / "logs", name) as servers:
        addresses = servers.start([spec(), spec("dflash")])
        for address in addresses:
            assert urllib.request.urlopen(f"{address.url}/health").status == 200
        assert servers.died() == []
        processes = [process.pid for process in servers.processes.values()]
        servers.move(tmp_path / "moved")
    assert gone(processes)
    assert "loading for" in (tmp_path / "moved" / "ar.log").read_text()
    assert (tmp_path / "moved" / "dflash.log").read_text().startswith(str(tmp_path / "fake"))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{addresses[0].url}/health")


@on_linux
def test_what_ignores_being_ended_and_leaves_its_group_is_ended_all_the_same(
    program: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "keeper.py"
    short.write_text(Path(supervisor.__file__).read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.3"))
    monkeypatch.setattr(supervisor, "__file__", str(short))
    with launched(program(ignores=True, child=str(tmp_path / "pids")), tmp_path / "logs") as servers:
        servers.start([spec()])
        processes = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert all(map(is_alive, processes))
    assert gone(processes)


@on_linux
@pytest.mark.parametrize("victim", ["us", "keeper"])
def test_nothing_is_left_when_we_or_the_keeper_are_killed(
    program: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    path = program(child=str(tmp_path / "pids"))
    command = [sys.executable, supervisor.__file__, str(path), "serve", "T", "--port", "0"]
    # Whoever started the keeper is a process that only holds the other end of its standard input.
    code = "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:], stdin=-1); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", code, *command], start_new_session=True)
    try:
        end_s = time.monotonic() + 20
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        server, child, kept_by = (int(word) for word in (tmp_path / "pids").read_text().split())
        os.kill(starter.pid if victim == "us" else kept_by, signal.SIGKILL)
        # Killed itself, the keeper cannot look after what left the group.
        assert gone([server, child] if victim == "us" else [server])
    finally:
        starter.kill()
        starter.wait()
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_program_that_ends_at_once_is_told_with_its_last_lines(program: Callable[..., Path], tmp_path: Path) -> None:
    with launched(program(exits=3), tmp_path / "logs") as servers, pytest.raises(UserError) as raised:
        servers.start([spec()])
    said = str(raised.value)
    assert "vllm for plain" in said and "exit status 3" in said and "| CUDA error: out of memory" in said


@each(
    ("more", "named"),
    [
        (("--launch", "x"), "'x' llama.cpp, lmdeploy, sglang, vllm"),
        (("--launch", "vllm", "--launch-with", "no-such"), "no-such --launch-with"),
        (("--launch", "vllm", "--launch-with", "sh", "--method", "suffix"), "suffix"),
        (("--launch", "vllm", "--launch-with", "sh", "--method", "dflash:steps=2"), "dflash:steps=2"),
        (("--launch", "vllm", "--launch-with", "sh", "--launch-args", "'"), "--launch-args:"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    main: Main, more: tuple[str, ...], named: str
) -> None:
    assert_refused(main(*ASKED, *more, "--out", "run"), *named.split(" "))
    assert not Path("run").exists()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Our engine's answers, by the prompt's ids as JSON."""
    from dflash_bench.core.types import Message
    from dflash_bench.models import chat, targets
    from dflash_bench.models.presets import NANO
    from dflash_bench.results import run_info

    run = tmp_path_factory.mktemp("engine") / "run"
    assert command(*ASKED, "--method", "ngram", "--out", run)[0] == 0
    tokenizer = targets.tokenizer_of(NANO / "target", False)
    turns = {prompt["prompt_id"]: prompt["turns"][0] for prompt in run_info.read_prompts(run)}
    return {
        json.dumps(chat.encode(tokenizer, [Message("user", turns[record.prompt_id])], False)): [
            *record.generation.token_ids
        ]
        for record in store.load(run)[1]
        if record.method == "ar"
    }


def test_lmdeploy_gets_drafts_as_it_reads_them(
    main: Main, program: Callable[..., Path], engine: dict[str, list[int]]
) -> None:
    path = program(answers=engine, most=24)
    words = [*ASKED, "--launch", "lmdeploy", "--launch-with", path, "--method", "dflash:3", "--out", "run"]
    assert_refused(main(*words), "float32", "bfloat16")
    # nano is a Qwen3, whose layers lmdeploy gives to DFlash alone.
    by_eagle3 = [*words[:-4], "--method", "eagle3:3", "--dtype", "bfloat16", "--out", "run"]
    assert_refused(main(*by_eagle3), "eagle3:3", "LlamaForCausalLM", "Qwen3ForCausalLM")
    # 1: these answers are float32's.
    code, _, err = main(*words, "--dtype", "bfloat16")
    assert code in (0, 1), err
    log = next(Path("run").glob("servers-1/dflash*.log")).read_text().splitlines()[0].split()
    draft = Path(log[log.index("--speculative-draft-model") + 1])
    told = json.loads((draft / "config.json").read_text())
    assert told["dflash_config"]["block_size"] == told["block_size"] == 16
    assert log[log.index("--speculative-dflash-block-size") + 1] == "4"


def test_a_launched_run_is_judged_and_a_death_keeps_its_rows(
    main: Main, program: Callable[..., Path], engine: dict[str, list[int]]
) -> None:
    path = program(answers=engine, most=24, drafting={"dies_at": 1})
    words = [*ASKED, "--launch", "vllm", "--launch-with", path, "--method", "dflash:3", "--out", "run"]
    # Its first answer warms up, and its second one kills it.
    code, _, err = main(*words)
    assert code == 2
    assert "vllm for dflash:3" in err and "signal 9" in err
    assert "| Segmentation fault, as ordered" in err
    assert "--resume" in err
    kept = {record.method for record in store.load(Path("run"))[1]}
    program(answers=engine, most=24)
    code, _, err = main(*words, "--resume")
    assert (code, kept) == (0, {"ar"}), err
    results = table.read_run(Path("run"))
    assert len(results.rows) == 4
    assert results.rows["error"].isna().all()
    assert set(results.rows["exactness"].dropna()) == {"exact"}
    logs = sorted(path.relative_to("run").as_posix() for path in Path("run").glob("servers-*/*.log"))
    assert logs == [f"servers-{part}/{label}.log" for part in (1, 2) for label in ("ar", "dflash:3")]
    assert results.info.identity.to_json()["servers"]["ar"]["address"] == "launched: vllm"
    assert not Path("run.servers").exists()


def test_imposed_acceptance_is_the_profiles_and_its_answers_are_nobodys(
    main: Main, program: Callable[..., Path], engine: dict[str, list[int]]
) -> None:
    Path("of").mkdir()
    path = program(answers=engine, most=24, drafting={"answers": {prompt: ids[::-1] for prompt, ids in engine.items()}})
    label = "synthetic:profile=of/profile.json,base=dflash"
    for name, rates, low, high in (
        ("vllm", [0.9, 0.8, 0.5], 2.7, 3.3),
        ("llama.cpp", [0.0, 0.5], 1.0, 1.0),
        ("llama.cpp", [1.0] * 3, 3.5, 4.0),
    ):
        Path("of/profile.json").write_text(json.dumps({"conditional_accept_rates": rates}))
        run = f"{name}-{rates[0]}"
        code, shown, err = main(*ASKED, "--launch", name, "--launch-with", path, "--method", label, "--out", run)
        assert code == 0, err
        expected = 1 + sum(math.prod(rates[:number]) for number in range(1, len(rates) + 1))
        assert f"from a profile, {expected:.2f} tokens per round" in " ".join(shown.split())
        rows = table.read_run(Path(run)).rows
        rows = rows[rows["method"] == label]
        assert len(rows) == 2 and rows["error"].isna().all()
        assert not rows[["exactness", "audit", "passed", "score"]].notna().any(axis=None)
        assert low <= 1 + rows["num_accepted"].sum() / rows["num_rounds"].sum() <= high
        # Nor is it judged, scored or called a dead draft by who reads the rows again.
        assert main("check", run)[0] == 0
    assert main("card", run, "--method", label, "--profile", "p.json")[0] == 2 and not Path("p.json").exists()


def test_sglang_drafts_with_weights_and_without(
    main: Main, program: Callable[..., Path], engine: dict[str, list[int]]
) -> None:
    path = program(answers=engine, most=24)
    words = (*ASKED, "--launch", "sglang", "--launch-with", path, "--method", "dflash:3,ngram:3", "--out", "run")
    code, _, err = main(*words)
    assert code == 0, err
    rows = table.read_run(Path("run")).rows
    assert set(rows["exactness"].dropna()) == {"exact"} and set(rows["audit"]) == {"exact"}
    counted = rows[rows["method"] != "ar"].groupby("method")["counted_by"].first()
    assert dict(counted) == dict.fromkeys(("dflash:3", "ngram:3"), "sglang.request")
    told = {name: Path(f"run/servers-1/{name}.log").read_text().partition("\n")[0] for name in ("ar", "ngram:3")}
    assert "--speculative-algorithm NGRAM" in told["ngram:3"] and "--speculative" not in told["ar"]


def test_a_server_that_dies_in_a_race_puts_its_own_method_out(
    main: Main, program: Callable[..., Path], engine: dict[str, list[int]]
) -> None:
    path = program(answers=engine, most=24, only="eagle3", drafting={"exits": 3})
    words = ("recommend", *ASKED[1:], "--launch", "vllm", "--launch-with", path, "--method", "dflash:3,eagle3:3")
    code, told, err = main(*words, "--out", "race", "--json")
    assert code == 0, err
    (decision,) = json.loads(told)["decisions"]
    found = {one["method"]: one for one in decision["tried"]}
    # As times have it: a race that drifted as a whole counts for nobody.
    assert found["dflash:3"]["num_prompts"] in {"too_few": (2,), "drifted": (0, 2)}[decision["verdict"]]
    assert found["eagle3:3"]["verdict"] == "failed"
    assert "vllm for eagle3:3" in found["eagle3:3"]["error"] and "exit status 3" in found["eagle3:3"]["error"]
    held = table.read_run(Path("race/c1-1-1")).info.entry("server_memory")
    assert {*held["servers"]} == {"ar", "dflash:3"} and held["free_bytes"]
    # A process of Python, started for as many tokens as nano has positions for.
    assert all(one["bytes"] > 5e6 and one["tokens"] == 4096 for one in held["servers"].values())
    assert json.loads(told)["flags"] == {}  # two prompts recommend nothing
