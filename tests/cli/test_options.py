"""Options are declared once: what is typed, what a file says and what Python passes come to the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

import dflash_bench as db
from dflash_bench import cli
from dflash_bench.cli import _as_typed, run
from dflash_bench.cli.options import with_options
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.core.option import check_options, options_of, to_json
from dflash_bench.core.secrets import Arguments
from dflash_bench.diagnose import doctor, profile
from dflash_bench.reproduction.options import TrainingOptions
from dflash_bench.runner import session
from dflash_bench.runner.config import DEMO, OutputOptions, RunRequest, ServerOptions, require_prompts, with_demo
from dflash_bench.runner.plan import swept
from dflash_bench.training.config import TrainRequest
from helpers.each import each
from helpers.refusals import assert_refused, names

Main = Callable[..., tuple[int, str, str]]
STOP = "as far as this test goes"
VALUES: dict[str, tuple[Any, Any]] = {
    "suites": (["gsm8k", "code"], ("gsm8k", "code")),
    "prompts": ("p.jsonl", Path("p.jsonl")),
    "prompt_column": ("ask", "ask"),
    "answer_column": ("right", "right"),
    "every_answer": (True, True),
    "score": ("math", "math"),
    "data": ("embedded", "embedded"),
    "prompt_style": ("verbatim", "verbatim"),
    "limit": (4, 4),
    "skip": ("1", 1),
    "balance": ("category", "category"),
    "budget": ("5m", "5m"),
    "thinking": ("both", "both"),
    "date": ("2026-11-26", "2026-11-26"),
    "context": (["none", "4k"], (None, 4096)),
    "methods": (["dflash:8", "eagle3"], ("dflash:8", "eagle3")),
    "model": ("smollm2", "smollm2"),
    "target": ("a/b@c", "a/b@c"),
    "drafts": (["dflash=a/b"], ("dflash=a/b",)),
    "trust_remote_code": (True, True),
    "servers": (["plain=http://127.0.0.1:1", "dflash=http://127.0.0.1:2"],) * 2,
    "dialect": ("vllm", "vllm"),
    "served_model": ("m", "m"),
    "api_key_env": ("KEY", "KEY"),
    "timeout": (2.5, 2.5),
    "env_proxy": (True, True),
    "launch": ("vllm", "vllm"),
    "launch_with": ("/bin/vllm", "/bin/vllm"),
    "launch_args": ("--a 'b c'", Arguments(["--a", "b c"])),
    "rate": ([2, 0.5], (2.0, 0.5)),
    "clients": (4, 4),
    "max_new_tokens": (99, 99),
    "temperature": ([0, 1.5], (0.0, 1.5)),
    "top_k": ([5, 50], (5, 50)),
    "top_p": (0.9, (0.9,)),
    "min_p": (0.1, (0.1,)),
    "repetition_penalty": (1.1, (1.1,)),
    "concurrency": ([1, 4], (1, 4)),
    "slo": ("ttft=500ms,tpot=50ms",) * 2,
    "seed": (3, 3),
    "block_size": ([4, 8], "4,8"),
    "draft_steps": (2, "2"),
    "repeats": (2, 2),
    "audit": ("divergent", "divergent"),
    "shard": ("2/8", "2/8"),
    "unsafe_code": (True, True),
    "over": (["block=4,8", "temperature=0,1"], ("block=4,8", "temperature=0,1")),
    "one_at_a_time": (True, True),
    "record": ("every-position", "every-position"),
    "headroom": (16, 16),
    "energy": (True, True),
    "json_schema": ("s.json", Path("s.json")),
    "prefix_reuse": (True, True),
    "device": ("cpu", "cpu"),
    "device_map": ("auto", "auto"),
    "dtype": ("float16", "float16"),
    "attention": ("eager", "eager"),
    "engine": ("native", "native"),
    "kernels": ("torch", "torch"),
    "graph": ("off", "off"),
    "compile": ("inductor", "inductor"),
    "quantize": ("nf4", "nf4"),
    "tensor_parallel": (2, 2),
    "threads": (1, 1),
    "workers": (2, 2),
    "ray_address": ("10.0.0.1:6379", "10.0.0.1:6379"),
}
"""For each option, its value in a file and the request's value."""


def value_of(name: str) -> Any:
    value = VALUES[name][1]
    return tuple(value) if isinstance(value, list) else value


def key_of(name: str) -> str:
    return options_of(RunRequest)[name].flag.removeprefix("--")


def toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def words(name: str) -> list[str]:
    """The option as it is typed."""
    said, spec = VALUES[name][0], options_of(RunRequest)[name]
    if said is True:
        return [spec.flag]
    if isinstance(said, list) and spec.parse is None and name != "block_size":
        return [word for one in said for word in (spec.flag, str(one))]
    return [spec.flag, ",".join(map(str, said)) if isinstance(said, list) else str(said)]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Main) -> Callable[..., RunRequest]:
    """The request that `run`, or another command, parses from these words."""
    monkeypatch.chdir(tmp_path)
    requests: list[Any] = []

    def perform(request: Any, *_: object, **__: object) -> None:
        requests.append(request)
        raise UserError(STOP)

    monkeypatch.setattr(run, "_with_prompts", lambda request: request)
    for module, entry in ((session, "perform"), (doctor, "diagnose"), (profile, "profile")):
        monkeypatch.setattr(module, entry, perform)

    def made(*typed: object, command: str = "run") -> RunRequest:
        assert main(command, *typed) == (2, "", f"dflash-bench: {STOP}\n")
        request = requests.pop()
        return request.of_run if command == "profile" else request

    return made


def test_every_option_has_a_value_here() -> None:
    assert list(VALUES) == list(options_of(RunRequest)) == [item.name for item in fields(RunRequest)]
    # Each differs from what is taken where nothing is said, or the tests below would show nothing.
    assert all(spec.is_given(RunRequest(**{name: value_of(name)})) for name, spec in options_of(RunRequest).items())


@each("name", VALUES)
def test_a_flag_changes_its_field_and_no_other(name: str, asked: Callable[..., RunRequest]) -> None:
    assert asked() == RunRequest()
    assert asked(*words(name)) == replace(RunRequest(), **{name: value_of(name)})


def test_a_file_says_the_same_as_the_command_line_and_as_python(asked: Callable[..., RunRequest]) -> None:
    lines = [f"{key_of(name)} = {toml(said)}" for name, (said, _) in VALUES.items()]
    Path("all.toml").write_text("\n".join(lines), encoding="utf-8")
    whole = RunRequest(**{name: value_of(name) for name in VALUES})
    assert asked("--config", "all.toml") == whole == asked(*(word for name in VALUES for word in words(name)))


def options_in(text: str) -> str:
    return text.partition("Prompts:")[2].partition("Examples:")[0]


@each("command", ["run", "sweep", "recommend"])
def test_help_is_brief(command: str, main: Main) -> None:
    status, out, _ = main(command, "--help")
    assert status == 0 and len(out.splitlines()) <= 25
    assert {"--suite", "--prompts", "--method", "--target", "--help-all"} <= set(re.findall(r"--[a-z-]+", out))


def test_help_all_names_every_option_once(main: Main) -> None:
    status, out, _ = main("run", "--help-all")
    shown = re.findall(r"^  (?:-[a-z], )?(--[a-z-]+)", out, re.MULTILINE)
    declared = [spec.flag for group in (RunRequest, OutputOptions) for spec in options_of(group).values()]
    assert status == 0 and sorted(shown) == sorted([*declared, "--json", "--config", "--help"])
    of_sweep = main("sweep", "--help-all")[1]
    assert options_in(of_sweep) == options_in(out)


# A configuration file


@pytest.fixture
def configured(asked: Callable[..., RunRequest]) -> Callable[..., RunRequest]:
    def made(text: str, *typed: object) -> RunRequest:
        Path("run.toml").write_text(text, encoding="utf-8")
        return asked("--config", "run.toml", *typed)

    return made


def test_the_command_line_wins_over_the_file(configured: Callable[..., RunRequest]) -> None:
    file = "limit = 4\nmethod = ['dflash', 'eagle3']\nthinking = 'on'\n"
    given = configured(file, "--limit", "2", "--method", "medusa")
    assert given == RunRequest(limit=2, methods=("medusa",), thinking="on")


def test_false_is_as_if_nothing_were_said(configured: Callable[..., RunRequest]) -> None:
    assert configured("resume = false\none-at-a-time = false\ntemperature = -0.0") == RunRequest()


def test_a_value_may_begin_with_a_dash_or_hold_an_equals_sign(configured: Callable[..., RunRequest]) -> None:
    assert configured("draft = 'dflash=-x'\nlaunch-args = '--a=1'") == RunRequest(
        drafts=("dflash=-x",), launch_args=Arguments(["--a=1"])
    )


@each(
    "text, named",
    [
        ("limmit = 4", "run.toml 'limmit' 'limit'"),
        ("limmmit = 4", "allow, api-key-env, attention,"),
        *[
            (line, f"run.toml '{line.split(' ')[0]}'")
            for line in ("max_new_tokens = 4", "config = 'other.toml'", "help = true", "no-thinking = true")
        ],
        ("[run]\nlimit = 4", "run.toml 'run'"),
        ("resume = 1", "run.toml: resume true false"),
        *[
            (line, f"`run.toml: {line.split(' ')[0]}`")
            for line in (
                "limit = true",
                "suite = []",
                "suite = [['gsm8k']]",
                "temperature = {low = 1}",
                "limit = 2024-01-01",
            )
        ],
        *[(line, f"`run.toml: {line.split(' ')[0]}` `not 2`") for line in ("limit = [1, 2]", "out = ['a', 'b']")],
        ("temperature = nan", "--temperature nan"),
        ("limit = 0", "--limit"),
        ("limit = 'four'", "--limit"),
        ("model = ''", "--model"),
        ("limit", "run.toml TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(text: str, named: str, tmp_path: Path, main: Main) -> None:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert_refused(main("run", "--config", "run.toml"), *names(named))


def test_each_command_has_a_file_of_its_own_options(tmp_path: Path, main: Main) -> None:
    (tmp_path / "file.toml").write_text("seed = 4\n")
    for command in ("doctor", "profile", "crosscheck"):
        assert_refused(main(command, "--config", "file.toml"), "file.toml", "'seed'")


# Conditions of options


@each("name", [name for name, spec in options_of(RunRequest).items() if spec.needs])
def test_an_option_without_what_it_needs_is_refused_by_its_flag(name: str) -> None:
    # An audit and a recording have an effect unless all is drawn.
    others = {"temperature": (1.0,)} if name in ("audit", "record", "headroom") else {}
    request = RunRequest(**{name: value_of(name)}, **others)
    flag = options_of(RunRequest)[name].flag
    with pytest.raises(UserError, match=rf"^{flag} (has no effect |needs )"):
        check_options(request)


def against(**given: Any) -> str:
    with pytest.raises(UserError) as raised:
        check_options(RunRequest(**given))
    return str(raised.value)


SERVED: dict[str, Any] = {"servers": ("plain=http://127.0.0.1:1",)}


@each(
    "given, first, named",
    [
        (SERVED | {"compile": "inductor"}, "--compile", "--server"),
        (SERVED | {"drafts": ("dflash=a",)}, "--draft", "--server"),
        (SERVED | {"context": (None, 4096)}, "--context", "--server --model --target"),
        (SERVED | {"launch": "vllm"}, "--server", "--launch"),
        (SERVED | {"methods": ("dflash",)}, "--method", "--server"),
        (SERVED | {"engine": "native"}, "--engine", "--server"),
        (SERVED | {"dtype": "float32"}, "--dtype", "--server --model --target"),
        ({"launch": "vllm", "engine": "native"}, "--engine", "--launch"),
        (SERVED | {"workers": 2}, "--workers", "--server"),
        ({"workers": 2, "device_map": "auto"}, "--workers", "--device-map"),
        ({"quantize": "int3"}, "unknown", "'int3' 'int8' fp8,"),
        ({"quantize": "nf4", "device_map": "auto"}, "--quantize nf4", "--device-map"),
        (SERVED | {"energy": True}, "--energy", "--server"),
        (SERVED | {"one_at_a_time": True}, "--one-at-a-time", "--server"),
        ({"launch": "vllm", "compile": "inductor"}, "--compile", "--launch"),
        ({"workers": 2, "energy": True}, "--workers", "--energy"),
        ({"workers": 2, "launch": "vllm"}, "--workers", "--launch"),
        ({"workers": 2, "device": "cuda:1"}, "--workers", "cuda:1"),
        ({"budget": "5m", "concurrency": (1, 4)}, "--for", "--concurrency"),
        ({"graph": "on", "compile": "inductor"}, "--compile", "--graph on"),
        ({"quantize": "nf4", "engine": "native"}, "--engine native", "int8"),
        ({"attention": "sdpa", "engine": "native"}, "--attention", "--engine native"),
        ({"timeout": 0.0}, "--timeout", "--server"),
        ({"budget": "soon"}, "--for", "90s 5m 1.5h 'soon'"),
        ({"temperature": (0.5, 0.5)}, "--temperature", "0.5,0.5"),
        ({"concurrency": (0, 2)}, "--concurrency", "`not 0`"),
        ({"limit": 10**8}, "--limit", "10,000,000 100000000"),
        ({"repetition_penalty": (1.0,)}, "--repetition-penalty", "above"),
    ],
)
def test_what_takes_an_options_effect_away_is_named(given: dict[str, Any], first: str, named: str) -> None:
    told = against(**given)
    assert told.startswith(first) and [name for name in names(named) if name not in told] == []


def test_what_goes_together_is_not_refused() -> None:
    for given in (
        {"graph": "off", "engine": "transformers"},
        {"temperature": (0.0, 1.0), "audit": "all", "seed": 1, "top_p": (0.9,)},
        SERVED | {"model": "nano", "audit": "all", "context": (4096,), "device": "cpu"},
        {"rate": (2.0,), "slo": "ttft=1s", "timeout": 5.0} | SERVED,
        {"launch": "vllm", "launch_with": "v", "concurrency": (1, 4), "slo": "ttft=1s"},
        {"workers": 2, "ray_address": "a:1", "device": "cuda"},
        {"repetition_penalty": (1.0, 1.2)},
        {"quantize": "int8", "engine": "native"},
    ):
        check_options(RunRequest(**given))


def test_where_a_run_goes_is_checked_likewise() -> None:
    for given, told in (({"resume": True}, "--resume .*--out"), ({"allow": ("all",)}, "'all'")):
        with pytest.raises(UserError, match=told):
            check_options(OutputOptions(**given))  # type: ignore[arg-type]


# Names


def test_a_sweep_gives_settings_as_their_flag_would() -> None:
    over = ("concurrency=1,2", "temperature=0,1", "context=none,4k", "thinking=on,off")
    request, _ = swept(RunRequest(over=over), [parse("ar"), parse("dflash")])
    assert request == RunRequest(
        over=over, concurrency=(1, 2), temperature=(0, 1), context=(None, 4096), thinking="both"
    )
    assert all(isinstance(number, int) for number in request.concurrency)


def test_what_is_kept_holds_no_secret_and_is_plain() -> None:
    kept = to_json(RunRequest(prompts=Path("a/b"), launch_args=Arguments(["--api-key", "geheim-123"])))
    assert kept["prompts"] == "a/b" and kept["launch_args"] == "--api-key ***"
    assert list(kept) == list(VALUES)


def test_a_request_has_two_sides() -> None:
    request = RunRequest(model="nano", limit=2, timeout=3.0, **SERVED)
    assert request.only(ServerOptions) == RunRequest(timeout=3.0, **SERVED)
    assert request.without(ServerOptions) == RunRequest(model="nano", limit=2)


def test_commands_that_need_no_prompts_ask_for_none(asked: Callable[..., RunRequest]) -> None:
    assert asked("--model", "nano", command="doctor") == asked("--model", "nano", command="profile")
    assert asked("--model", "nano", command="profile") == RunRequest(model="nano")
    check_options(RunRequest(model="nano"))
    with pytest.raises(UserError, match="run --suite gsm8k"):
        require_prompts(RunRequest(model="nano"))


def test_a_command_takes_options_in_the_order_that_it_names() -> None:
    @with_options("limit mine suites", helps={"limit": "Otherwise."})
    def command(request: RunRequest, mine: int = 1, last: int = 2) -> None:
        found.append((request, mine, last))

    found: list[Any] = []
    assert list(command.__signature__.parameters) == ["limit", "mine", "suites", "last", "config"]
    command(limit=3, suites=["a"], mine=4, last=5, config=None)
    assert found == [(RunRequest(limit=3, suites=("a",)), 4, 5)]
    assert run.run.__doc__.startswith("Measure methods")


def test_train_takes_its_options_from_a_file_and_from_python_alike(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    requests: list[TrainRequest] = []

    def perform(request: TrainRequest, *_: object) -> None:
        requests.append(request)
        raise UserError(STOP)

    monkeypatch.setattr("dflash_bench.training.session.perform", perform)
    file = "target = 'nano'\nout = 'mine'\nwritten = 8\nopening = ['Write', 'What']\ninvented = 2\nmax-disk = 1.5\n"
    Path("train.toml").write_text(f"{file}on-the-fly = true\nto = 'zlab'\nepochs = 2\n", encoding="utf-8")
    typed = ("--opening", "Write", "--opening", "What", "--max-disk", "1.5", "--to", "zlab", "--on-the-fly")
    rest = ("--target", "nano", "--out", "mine", "--written", "8", "--invented", "2", "--epochs", "2")
    for words in (("--config", "train.toml"), (*typed, *rest)):
        assert main("train", *words) == (2, "", f"dflash-bench: {STOP}\n")
    with pytest.raises(UserError, match=STOP):
        db.train(
            "nano",
            "mine",
            "dflash",
            written=8,
            openings=("Write", "What"),
            invented=2,
            max_disk_gb=1.5,
            on_the_fly=True,
            format="zlab",
            epochs=2.0,
        )
    from_file, typed_words, from_python = requests
    assert from_file == typed_words == from_python


def test_help_of_train_names_every_option_once(main: Main) -> None:
    status, out, _ = main("train", "--help")
    shown = re.findall(r"^  (?:-[a-z], )?(--[a-z-]+)", out, re.MULTILINE)
    declared = [spec.flag for spec in options_of(TrainRequest).values()]
    assert status == 0 and sorted(shown) == sorted([*declared, "--estimate", "--config", "--help"])


WHOLE = (int, int | None, tuple[int, ...], tuple[int | None, ...])


@each("group", [RunRequest, OutputOptions, TrainRequest, TrainingOptions])
def test_every_whole_number_of_a_group_has_an_upper_bound(group: type) -> None:
    kinds = get_type_hints(group)
    whole = [spec for name, spec in options_of(group).items() if kinds[name] in WHOLE]
    assert [spec.flag for spec in whole if spec.most is None and spec.check is None] == []
    assert whole or group is OutputOptions


def test_so_has_every_other_one_of_a_command() -> None:
    declared = {*options_of(RunRequest), *options_of(TrainRequest), *options_of(TrainingOptions)}
    commands = get_command(cli.program()).commands  # type: ignore[attr-defined]
    params = [(name, param) for name, command in commands.items() for param in command.params]
    whole = [(name, param) for name, param in params if getattr(param, "min", None) is not None]
    assert [(name, param.name) for name, param in whole if param.max is None and param.name not in declared] == []
    assert len(whole) > 20


def test_a_suite_may_be_named_without_its_option(asked: Callable[..., RunRequest]) -> None:
    assert asked("gsm8k", "math500", "--limit", 2) == RunRequest(suites=("gsm8k", "math500"), limit=2)


def test_without_prompts_a_few_embedded_ones_are_measured(main: Main) -> None:
    code, _, told = main("run", "--method", "nothing")
    assert code == 2 and told.startswith("no prompts are named, so 4 of each of gsm8k,") and "'nothing'" in told
    assert with_demo(RunRequest(limit=2)) == RunRequest(suites=DEMO, data="embedded", limit=2)


def test_every_command_has_its_job() -> None:
    shown = {name for name, command in get_command(cli.program()).commands.items() if not command.hidden}  # type: ignore[attr-defined]
    assert sorted(name for names in cli.JOBS.values() for name in names.split()) == sorted(shown)


def test_help_of_a_command_is_also_its_own_word() -> None:
    assert _as_typed(["help", "run"]) == ["run", "--help"]
    assert _as_typed(["help"]) == _as_typed([]) == ["--help"]
    assert _as_typed(["run", "help"]) == ["run", "help"]
