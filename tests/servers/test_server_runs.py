"""`run --server`: a live server measured as our engine is, from the command line to what is read of it later."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench.analysis.cells import summarise
from dflash_bench.core.dialects import UNKNOWN_RULE
from dflash_bench.replay.stored_answers import cells_of
from dflash_bench.results import parts, store, table
from dflash_bench.servers import dialects
from helpers.each import each
from helpers.faults.matrix import command
from helpers.refusals import assert_refused
from helpers.runs import listed
from helpers.servers.fake_server import MODEL, FakeServer, tokens_of

Main = Callable[..., tuple[int, str, str]]
PROMPTS = 4
TOTALS = "its totals of rounds are not those of its tokens"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "p.jsonl")


def written(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(PROMPTS)))
    return path


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[FakeServer, FakeServer]]]:
    """A server that decodes plainly, and one that accepts 2, 0 and 4 of 5 drafted tokens."""
    with ExitStack() as stack:

        def start(plain: dict[str, Any] | None = None, **changes: Any) -> tuple[FakeServer, FakeServer]:
            same = {name: changes[name] for name in ("dialect", "answer", "gives_ids") if name in changes}
            first = FakeServer(**{"round_s": 0.002, **same, **(plain or {})})
            second = FakeServer(**{"round_s": 0.002, "accepts": (2, 0, 4), "block": 5, **changes})
            return stack.enter_context(first), stack.enter_context(second)

        yield start


def words(servers: Sequence[FakeServer], prompts: Path, out: str = "run", *more: object) -> list[object]:
    plain, dflash = servers
    return [
        "run",
        "--server",
        f"dflash={dflash.url}",
        "--server",
        f"plain={plain.url}",
        "--prompts",
        prompts,
        "--max-new-tokens",
        32,
        "--out",
        out,
        *more,
    ]


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which a check finds nothing."""
    folder = tmp_path_factory.mktemp("sound")
    with FakeServer(round_s=0.002) as plain, FakeServer(round_s=0.002, accepts=(2, 0, 4), block=5) as dflash:
        asked = words((plain, dflash), written(folder / "p.jsonl"), str(folder / "run"))
        assert command(*asked)[0] == 0
    assert command("check", folder / "run")[0] == 0
    return folder / "run"


def test_dialects_are_one_file_each_and_light_to_load() -> None:
    """Reading runs and offering `--dialect` need their facts, and neither an HTTP client nor torch."""
    code = (
        "import sys; from dflash_bench.core.dialects import DIALECTS; before = {*sys.modules}; names = list(DIALECTS); "
        "assert before == {*sys.modules}; found = [d.name for d in DIALECTS.values()]; assert names == found; "
        "heavy = {'torch', 'transformers', 'httpx2', 'httpx', 'numpy', 'pandas'} & {*sys.modules}; "
        "assert not heavy, heavy; print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = {path.stem for path in Path(dialects.__file__).parent.glob("*.py")} - {"__init__"}
    assert {*done.stdout.split()} == files


def test_rounds_that_a_server_tells_in_order_are_replayed_and_located(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]], tmp_path: Path
) -> None:
    servers = pair(counts_by_request=True, counts_in_order=True)
    code, _, err = main(*words(servers, prompts))
    assert (code, err) == (0, "")
    drafted = [one.generation for one in store.load(tmp_path / "run")[1] if one.method == "dflash"]
    for answer in drafted:
        told = [*servers[1]._rounds(answer.num_tokens)]
        assert (list(answer.accepted or ()), set(answer.drafted or ())) == (told, {5})
        assert sum(answer.emitted or ()) == answer.num_tokens - 1
    (cell,) = (one for one in cells_of(table.read_run(tmp_path / "run")) if one.method == "dflash")
    assert [one.accepted.tolist() for one in cell.answers] == [list(one.accepted or ()) for one in drafted]
    code, out, err = main("replay", "run", "--n", "2", "--json")
    assert (code, err) == (0, "")
    measured, shorter = json.loads(out)
    assert (measured["speedup"], shorter["tokens_per_s"]) == (None, None)
    assert 1 <= shorter["length"][0] < measured["length"][0]
    assert main("check", "run")[0] == 0


def test_a_run_over_servers_holds_what_they_did(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]], tmp_path: Path
) -> None:
    servers = pair()
    code, _, err = main(*words(servers, prompts))
    assert (code, err) == (0, "")
    out = main("report", "run", "--full")[1]
    info, records = store.load(tmp_path / "run")
    info = info.to_json()
    assert [(record.prompt_id, record.method) for record in records] == [
        (str(n), method) for n in range(PROMPTS) for method in (("ar", "dflash") if n % 2 == 0 else ("dflash", "ar"))
    ]
    for record in records:
        n = int(record.prompt_id)
        tokens = tokens_of(json.dumps([{"role": "user", "content": f"What is {n} times 7?"}]), 32)
        rounds = servers[record.method == "dflash"]._rounds(len(tokens))
        assert record.generation.token_ids == tuple(tokens)
        drafted = (len(rounds), 5 * len(rounds), sum(rounds)) if record.method == "dflash" else (0, 0, 0)
        totals = record.generation.total_rounds, record.generation.total_drafted, record.generation.total_accepted
        assert totals == drafted
        assert record.generation.counted_by == "vllm.counters"
        assert record.exactness == ("exact" if record.method == "dflash" or n in (0, 1, 3) else None)
        assert record.audit is None
    identity = info["identity"]
    assert (identity["model"], identity["engine"], identity["audit"]) == (MODEL, "server", "none")
    assert identity["servers"]["dflash"] == {
        "address": servers[1].url,
        "dialect": "vllm",
        "version": "0.32.0",
        "model": MODEL,
        "prompts": "chat",
        "prefix_cache": "flushed",
        "facts": {},
    }
    assert "dflash by vllm.counters: " in " ".join(out.split())
    assert "memory, as predicted" not in out


@each(
    ("forged", "why"),
    [
        (lambda row: {"total_rounds": row["total_rounds"] // 2}, TOTALS),
        (lambda row: {"total_accepted": row["total_accepted"] + row["total_rounds"]}, TOTALS),
        (lambda row: {"total_drafted": None, "counted_by": "vllm.counters"}, TOTALS),
        (lambda row: {"counted_by": "sglang.derived", "total_accepted": row["total_accepted"] - 1}, TOTALS),
        (lambda row: {"counted_by": "unheard.of"}, f"its rounds follow {UNKNOWN_RULE}"),
    ],
)
def test_totals_that_are_not_those_of_the_tokens_are_found_by_check(
    main: Main, sound_run: Path, tmp_path: Path, forged: Callable[[dict[str, Any]], dict[str, Any]], why: str
) -> None:
    shutil.copytree(sound_run, tmp_path / "run")
    for part in parts.of(tmp_path / "run"):
        rows = parquet.read_table(part)
        changed = [row | forged(row) if row["method"] == "dflash" else row for row in rows.to_pylist()]
        parquet.write_table(pa.Table.from_pylist(changed, rows.schema), part)
    listed(tmp_path / "run")
    code, out, _ = main("check", "run")
    assert code == 1 and why in " ".join(out.split())


def test_figures_are_those_of_the_rounds(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    servers = pair(counts_by_request=True)
    main(*words(servers, prompts))
    read = table.read_run(Path("run"))
    cells = {cell.method: cell for cell in summarise(read.rows, read.info.identity)}
    rounds = []
    for n in range(PROMPTS):
        chat = json.dumps([{"role": "user", "content": f"What is {n} times 7?"}])
        rounds.append(servers[1]._rounds(len(tokens_of(chat, 32))))
    num, accepted = sum(map(len, rounds)), sum(map(sum, rounds))
    value = cells["dflash"].value
    assert value("al.pooled") == pytest.approx(1 + accepted / num)
    assert value("accept_rate") == pytest.approx(accepted / (5 * num))
    assert value("al.request_mean") == pytest.approx(sum(1 + sum(of) / len(of) for of in rounds) / PROMPTS)
    assert cells["dflash"].exact == (PROMPTS, PROMPTS)
    assert cells["dflash"].counted_by == ("vllm.request",)


def test_all_commands_read_such_a_run(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    servers = pair()
    for out in ("one", "two"):
        assert main(*words(servers, prompts, out))[0] == 0
    for asked in (
        ("compare", "one"),
        ("compare", "one", "two"),
        ("report", "one", "--format", "markdown"),
        ("report", "one", "--format", "csv"),
        ("report", "one"),
        ("card", "one"),
        ("plot", "one"),
        ("baseline", "one", "-o", "base.json"),
    ):
        code, _, err = main(*asked)
        assert code == 0, (asked, err)
    _, out, _ = main("check", "two", "--baseline", "base.json", "--all")
    judged = [
        line.split() for line in out.splitlines() if any(name in line for name in ("mismatch", "al.pooled", "exact"))
    ]
    # Speed is that of a busy machine; the rest is the same twice.
    assert len(judged) >= 4
    assert {line[0] for line in judged} == {"ok"}, out
    _, text, _ = main("card", "one")
    assert "client" in text and "dflash, as its server" in text


def test_an_interrupted_run_goes_on_and_asks_for_nothing_twice(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = pair()
    with monkeypatch.context() as patched:
        patched.setattr("dflash_bench.results.store.RunStore.append", _stopping(3))
        code, _, err = main(*words(servers, prompts))
    assert (code, "--resume" in err) == (130, True)
    asked = servers[1].num_answers
    assert main(*words(servers, prompts), "--resume")[0] == 0
    assert table.read_run(Path("run")).info.state == "complete"
    # One more to warm up, and those that were not saved.
    assert servers[1].num_answers <= asked + 1 + PROMPTS
    code, _, err = main(*words((servers[1], servers[0]), prompts), "--resume")
    assert (code, "servers.ar.address was" in err) == (2, True)


def _stopping(after: int) -> Callable[..., None]:
    append, calls = store.RunStore.append, iter(range(after))

    def stopping(run: store.RunStore, records: Sequence[Any]) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        append(run, records)

    return stopping


def test_a_failed_answer_is_a_row_and_fails_the_run(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    code, out, err = main(*words(pair(faults={2: "500"}), prompts))
    assert (code, "1 of 8 answers failed" in err) == (1, True)
    assert "HTTP 500: fault 500" in " ".join(out.split())
    rows = table.read_run(Path("run")).rows
    assert rows["error"].notna().sum() == 1
    assert main(*words(pair(faults={2: "500"}), prompts, "run2", "--allow", "failed"))[0] == 0


def found_of(main: Main) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Return the remedy's code and the first place's values of each finding, by its code."""
    findings = json.loads(main("report", "run", "--format", "json")[1])["findings"]
    return {one["kind"]: (one["remedy_code"], one["places"][0]["values"]) for one in findings}


def test_answers_that_differ_are_said_to_and_not_judged_without_a_judge(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    def other(prompt: str, most: int) -> list[int]:
        tokens = tokens_of(prompt, most)
        return [*tokens[:2], 55, *tokens[3:]] if " 2 times" in prompt else tokens

    assert main(*words(pair(answer=other, plain={"answer": tokens_of}), prompts))[0] == 0
    remedy, values = found_of(main)["unjudged"]
    assert remedy == "judge" and (values["num_answers"], values["num_all"], values["prompt_id"]) == (1, 4, "2")
    _, records = store.load(Path("run"))
    (record,) = [record for record in records if record.exactness == "differs"]
    assert (record.method, record.prompt_id, record.divergence and record.divergence.index) == ("dflash", "2", 2)


def test_without_ids_texts_are_compared_and_that_is_said(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    code, _, _ = main(*words(pair(dialect="openai"), prompts))
    found = found_of(main)
    assert code == 0
    assert [found["compared_by_text"][1][name] for name in ("num_answers", "num_all")] == [3, 4]
    assert [found["uncounted"][1][name] for name in ("num_answers", "num_all")] == [4, 4]
    rows = table.read_run(Path("run")).rows
    assert (rows["num_tokens"] == rows["num_hidden_tokens"]).all()
    assert (rows["num_tokens"] > 4).all()


def test_a_plain_server_that_drafts_is_no_baseline(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    assert main(*words(pair(plain={"accepts": (1,), "block": 2}), prompts))[0] == 1
    assert "plain_drafts" in found_of(main)


@pytest.mark.parametrize(
    ("plain", "does", "kind", "values"),
    [
        ({}, {"dialect": "openai", "keeps_prompts": True}, "reused_prompts", {}),
        ({"dialect": "llamacpp"}, {}, "other_servers", {"plain": "llamacpp b9-abc", "own": "vllm 0.32.0"}),
        ({}, {"block": 0}, "nothing_drafted", {"num_answers": 4}),
        ({}, {"dialect": "llamacpp", "has_metrics": False}, "derived_rounds", {"counted_by": "llamacpp.timings"}),
        ({}, {"faults": {1: "others"}}, "uncounted", {"num_answers": 1, "num_all": 4}),
    ],
)
def test_what_weakens_a_servers_numbers_is_found(
    main: Main,
    prompts: Path,
    pair: Callable[..., tuple[FakeServer, FakeServer]],
    plain: dict[str, Any],
    does: dict[str, Any],
    kind: str,
    values: dict[str, Any],
) -> None:
    code, _, _ = main(*words(pair(plain, **does), prompts))
    # A server that never drafts measures nothing of its method.
    assert code == (1 if does == {"block": 0} else 0)
    found = found_of(main)[kind][1]
    assert {name: found[name] for name in values} == values


def test_a_server_that_counts_by_request_is_disturbed_by_no_other(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    main(*words(pair(counts_by_request=True, faults={1: "others"}), prompts))
    assert "uncounted" not in found_of(main)
    assert "dflash by vllm.request" in " ".join(main("report", "run", "--full")[1].split())


def test_a_run_over_servers_can_have_a_time_limit(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    code, _, err = main(*words(pair(), prompts), "--for", "60s")
    assert (code, err) == (0, "")
    assert len(table.read_run(Path("run")).rows) == 2 * PROMPTS
    _, out, _ = main("compare", "run", "--compat", "zlab")
    assert "first draft" in out


def test_waves_over_servers_are_as_over_our_engine(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    servers = pair(counts_by_request=True, ttft_s=0.05)
    code, _, err = main(*words(servers, prompts, "run", "--concurrency", "1,4"))
    assert code == 0
    assert all("noticed arrivals" in line for line in err.splitlines()), err
    assert servers[1].most_at_once == 4
    rows = table.read_run(Path("run")).rows
    assert rows.groupby("settings_id", observed=True).size().tolist() == [2 * PROMPTS] * 2
    assert rows["error"].isna().all()
    assert "tps.total" in main("report", "run")[1]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--method", "dflash"), "--method --server"),
        (("--over", "block=4,8"), "--over block"),
        (("--dialect", "x"), "dialect 'x'"),
        (("--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY"),
    ],
)
def test_options_without_effect_on_a_server_are_refused_before_it_is_asked(
    main: Main, prompts: Path, pair: Callable[..., tuple[FakeServer, FakeServer]], more: tuple[str, ...], named: str
) -> None:
    servers = pair()
    assert_refused(main(*words(servers, prompts), *more), *named.split(" "))
    assert servers[0].asked == []
    assert not Path("run").exists()


def test_servers_that_run_are_raced_as_they_were_started(
    main: Main, tmp_path: Path, pair: Callable[..., tuple[FakeServer, FakeServer]]
) -> None:
    asked = tmp_path / "eight.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(8)))
    plain, dflash = pair({"round_s": 0.008}, round_s=0.012)
    shown = ("recommend", "--server", f"dflash={dflash.url}", "--server", f"plain={plain.url}", "--prompts", asked)
    code, told, err = main(*shown, "--max-new-tokens", 32, "--out", "race")
    assert code == 0, err
    assert "\nconcurrency 1: dflash, " in told and "dflash: as its server" in told
    assert "longest context" not in told
    assert Path("race/c1-1/run.json").exists()
    assert main(*shown, "--method", "dflash", "--out", "other")[0] == 2
    swapped = ("--server", f"plain={dflash.url}", "--server", f"dflash={plain.url}", *shown[5:])
    code, told, err = main("recommend", *swapped, "--out", "swapped")
    assert (code, told) == (2, "") and "plain decoding drafts" in err
    idle = ("--server", f"plain={plain.url}", "--server", f"dflash={plain.url}", *shown[5:])
    assert main("recommend", *idle, "--out", "idle")[0] == 0
    (decision,) = json.loads(Path("idle/recommendation.json").read_text())["decisions"]
    assert decision["choice"] == "ar" and decision["tried"][1]["verdict"] == "failed"
