"""A user's own prompts on their way through a run: tools in the template, what is too long, what is drawn."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils.chat_template_utils as clock

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import GREEDY, TOOLS, Generation, Message, Prompt, template_input
from dflash_bench.models import chat, targets
from dflash_bench.results import run_info, store
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_and_model, plan_run
from dflash_bench.runner.setup import fitting
from dflash_bench.runner.work import WorkPlan
from dflash_bench.servers.address import Access
from dflash_bench.servers.backend import ServerBackend
from dflash_bench.servers.dialects import openai
from dflash_bench.tasks import padding, prompts
from dflash_bench.tasks.padding import example
from dflash_bench.tasks.suites import chats
from dflash_bench.training import prompts as training_prompts
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import FakeBackend, metrics_kept_in
from helpers.refusals import assert_refused
from helpers.work import Runs, loaded

Main = Callable[..., tuple[int, str, str]]
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
TOOL = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
SESSION = [
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "31"},
    {"role": "assistant", "content": "Yes."},
]
RENDERED = (
    '<|im_start|>system\n{"type": "function", "function": {"name": "weather"}}<|im_end|>\n'
    "<|im_start|>user\nIs it warm?<|im_end|>\n<|im_start|>assistant\nweather(Rome)<|im_end|>\n"
    "<|im_start|>tool\n31<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template can call tools."""
    folder = tiny.build(tmp_path_factory.mktemp("model"))
    (folder / "target/chat_template.jinja").write_text(TEMPLATE)
    return folder


def write(*rows: Any) -> Path:
    path = Path("p.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def session(folder: Path) -> Prompt:
    path = folder / "session.jsonl"
    path.write_text(json.dumps({"messages": SESSION, "tools": [TOOL]}))
    (prompt,) = prompts.load(path).prompts
    return prompt


# Tools


def test_the_template_renders_calls_and_tools(model: Path, tmp_path: Path) -> None:
    tokenizer = targets.tokenizer_of(model / "target", False)
    messages = session(tmp_path).chat()
    assert chat.render(tokenizer, messages, False) == RENDERED
    assert tokenizer.decode(chat.encode(tokenizer, messages, False)) == RENDERED
    plain, tools = template_input([Message("user", "Hi")])
    assert (plain, tools) == ([{"role": "user", "content": "Hi"}], None)


@each(
    "template, shown",
    [
        ("{{ m.content }}|", "42|more|"),
        (
            "{% if m.reasoning_content and not loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}|",
            "(So 41?)42|more|",
        ),
        ("{{ m.content.split('</think>')[-1] }}|", "42|more|"),
    ],
)
def test_the_template_decides_about_earlier_thinking(model: Path, template: str, shown: str) -> None:
    text = "<think>So 41?</think>\n42"
    earlier = Generation((), text, "stop", 1, 0.1, 0.1, num_thinking_chars=len(text) - 2).as_message()
    tokenizer = targets.tokenizer_of(model / "target", False)
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    assert chat.render(tokenizer, [earlier, Message("user", "more")], False) == shown


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }}{% endfor %}", None])
def test_a_template_that_would_leave_tools_out_is_refused(model: Path, tmp_path: Path, template: str | None) -> None:
    tokenizer = targets.tokenizer_of(model / "target", False)
    tokenizer.chat_template = template
    tools, *rest = session(tmp_path).chat()
    for chats_of, what in (((tools, rest[0]), "tools"), (rest, "tool_calls")):
        told = f"the chat has {what}, and the target's chat template leaves them out; use a target that can call tools"
        for refused in (chat.encode, lambda *given: chat.check(given[0], [("p", given[1])], given[2])):
            with pytest.raises(UserError, match=told):
                refused(tokenizer, chats_of, False)
    chat.check(tokenizer, [("p", rest[:1])], False)


def test_a_session_is_answered_after_its_tools_by_all_methods_and_judged(model: Path, main: Main) -> None:
    write({"messages": SESSION, "tools": [TOOL], "language": "en"}, {"prompt": "Hi", "language": "da"})
    words = ["run", "--model", model, "--prompts", "p.jsonl", "--method", "dflash", "--max-new-tokens", "6"]
    status, _, err = main(*words, "--out", "new")
    assert status == 0, err
    _, records = store.load(Path("new"))
    tokenizer = targets.tokenizer_of(model / "target", False)
    asked = len(tokenizer.encode(RENDERED, add_special_tokens=False))
    rows = [row for row in records if row.prompt_id == "0"]
    assert {(row.method, row.exactness, row.audit) for row in rows} == {
        ("ar", "exact", "exact"),
        ("dflash", "exact", "exact"),
    }
    assert {row.generation.num_prompt_tokens for row in rows} == {asked}
    kept = run_info.read_prompts(Path("new"))[0]
    assert [message["role"] for message in kept["closing"]] == ["assistant", "tool"]
    assert kept["reference"] == "Yes." and kept["slices"] == [{"column": "language", "value": "en"}]
    shown = json.loads(main("compare", "new", "--by", "language", "--json")[1])
    assert list(dict.fromkeys(cell["slice"] for cell in shown["cells"])) == ["da", "en"]
    page = main("report", "new", "-o", "page.html")
    assert page[0] == 0 and "31" in Path("page.html").read_text()


def test_the_runner_asks_a_session_with_its_tools_and_a_server_that_renders_chats_is_refused(tmp_path: Path) -> None:
    prompt = replace(session(tmp_path), suite="gsm8k")
    backend = FakeBackend(text_of=lambda question: "31 degrees")
    Runs(tmp_path / "run")(WorkPlan((loaded(prompt),), ("ar", "dflash")), backend)
    assert {messages for _, messages in backend.calls} == {prompt.chat()}
    assert [list(messages) for _, messages in chats(loaded(prompt))] == [list(prompt.chat())]
    servers = ServerBackend((), Access(), 8)
    try:
        servers.servers["plain"] = SimpleNamespace(method=methods.parse("ar"), dialect=openai.DIALECT)  # type: ignore[assignment]
        servers.check_chats([("p", [Message("user", "Hi")])], [GREEDY])
        with pytest.raises(UserError, match=r"prompt p0 of suite gsm8k .*tools"):
            servers.check_chats([("p0 of suite gsm8k", prompt.chat())], [GREEDY])
    finally:
        servers.servers.clear()
        servers.close()


def test_padding_and_training_take_a_session_whole(tmp_path: Path) -> None:
    prompt = session(tmp_path)
    found = prompts.load(tmp_path / "session.jsonl")
    assert example(found.suite, prompt) == "Is it warm?\n\n31\n\nYes."
    (made,) = training_prompts.from_files([str(tmp_path / "session.jsonl")])
    assert (made.messages, made.later) == (prompt.chat(), ())
    assert [message.role for message in made.messages] == [TOOLS, "user", "assistant", "tool"]
    one = padding.padded([found], (), lambda messages: 10 * len(messages), 100, 5)
    assert one.longest == 45


# Prompts that do not fit


def test_prompts_longer_than_the_context_are_left_out_counted_and_named(model: Path, main: Main) -> None:
    tokenizer, long = targets.tokenizer_of(model / "target", False), "word " * 3000
    of_one, of_two = (len(chat.encode(tokenizer, [Message("user", "a" + " a" * num)], False)) for num in (1, 2))
    assert of_two == of_one + 1
    close = "a" + " a" * (2020 - of_one + 1)
    assert len(chat.encode(tokenizer, [Message("user", close)], False)) == 2020
    write({"prompt": "Hi"}, {"prompt": long, "id": "long"}, {"prompt": close, "id": "close"}, {"turns": [long, "Why?"]})
    words = ["run", "--model", model, "--prompts", "p.jsonl", "--method", "dflash", "--max-new-tokens", "30"]
    words += ["--audit", "none", "--out", "new"]
    status, _, err = main(*words)
    assert status == 0, err
    assert "note: 2 prompts of prompts " in err and "2048 tokens" in err and "such as long, 3\n" in err
    assert "note: 1 prompts of prompts " in err
    info, records = store.load(Path("new"))
    assert (
        {row.prompt_id for row in records}
        == {"0", "close"}
        == {row["prompt_id"] for row in run_info.read_prompts(Path("new"))}
    )
    assert all(row.generation.error is None for row in records)
    assert json.loads(Path("new/run.json").read_text())["left_out"] == {"prompts": ["long", "3"]}
    assert info.identity.suites["prompts"].prompts == 2
    assert main(*words, "--resume")[0] == 0
    write({"prompt": long}, {"prompt": long + "more"})
    assert_refused(main(*words[:-1], "other"), "all 2 prompts", "2048 tokens")
    assert not Path("other").exists()


def test_a_plan_is_cut_to_what_fits_and_refused_if_too_few_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(*({"prompt": f"Hi {n}"} for n in range(4)))
    request = RunRequest(prompts=path, suites=("gsm8k",), limit=4, concurrency=(3,))
    plan = plan_run(*methods_and_model(request))

    def fitted(*ids: str, suite: str = "prompts") -> Any:
        return fitting(plan, {suite: list(ids)})

    assert [prompt.prompt_id for prompt in fitted("1")[1].prompts] == ["0", "2", "3"]
    assert [one.suite.name for one in fitted("0", "1", "2", "3")] == ["gsm8k"]
    with pytest.raises(UserError, match=r"--concurrency 3 .* 2 prompts"):
        fitted("0", "1")
    assert fitting(plan, {}) is plan.suites


# Draws of prompts


def test_a_limit_is_balanced_over_a_column(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(*({"prompt": f"Hi {n}", "language": "da" if n == 7 else "en"} for n in range(40)))

    def drawn(**options: Any) -> list[str]:
        plan = plan_run(*methods_and_model(RunRequest(prompts=path, **options)))
        return [prompt.slices["language"] for prompt in plan.suites[0].prompts]

    assert sorted(drawn(limit=2, balance="language")) == ["da", "en"]
    assert drawn(budget="1s", balance="language")[:2].count("da") == 1
    assert len(drawn()) == 40
    for words, told in (
        (("--balance", "language"), "--balance has no effect without --limit or --for: all prompts are measured"),
        (("--balance", "lang", "--limit", "2"), "unknown --balance column of prompts 'lang'; known: language"),
        (("--balance", "", "--limit", "2"), "--balance is empty; omit it, or give it a value"),
    ):
        status, out, err = main("run", "--prompts", path, *words, "--out", "new")
        assert (status, out, err) == (2, "", f"dflash-bench: {told}\n")
    status, _, err = main("run", "--suite", "gsm8k", "--balance", "category", "--limit", "2", "--out", "new")
    told = "--balance category: the prompts of gsm8k have no column of names; leave it out"
    assert (status, err) == (2, f"dflash-bench: {told}\n")


def test_answers_are_scored_by_a_metric_of_evaluate(
    model: Path, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics_kept_in(tmp_path / "modules", monkeypatch)
    folder = Path("same")
    folder.mkdir()
    (folder / "same.py").write_text(
        "import datasets\nimport evaluate\n\n\nclass Same(evaluate.Metric):\n    def _info(self):\n"
        "        text = datasets.Value('string')\n        return evaluate.MetricInfo(description='', citation='',\n"
        "            features=datasets.Features({'predictions': text, 'references': text}))\n\n"
        "    def _compute(self, predictions, references):\n        return {'size': len(references[0])}\n"
    )
    write({"prompt": "Hi", "reference": "ab"}, {"prompt": "Ho", "reference": "abcd"})
    words = ["run", "--model", model, "--prompts", "p.jsonl", "--method", "dflash", "--max-new-tokens", "4"]
    status, _, err = main(*words, "--score", "evaluate:same", "--out", "new")
    assert status == 0, err
    info, records = store.load(Path("new"))
    assert {(row.prompt_id, row.passed, row.score) for row in records} == {("0", None, 2.0), ("1", None, 4.0)}
    assert len(info.identity.suites["prompts"].metric["sha256"]) == 64
    head, *cells = csv.reader(io.StringIO(main("report", "new", "--format", "csv")[1]))
    assert {float(cell[head.index("score")]) for cell in cells} == {3.0}
    status, out, err = main("check", "new", "--all")
    assert "evaluate:same: a metric is code from elsewhere" in out + err
    status, _, err = main(*words, "--score", "evaluate:gone", "--out", "other")
    assert status == 2 and "needs --trust-remote-code" in err and not Path("other").exists()
    Path("data/cnn_dm").mkdir(parents=True)
    Path("data/cnn_dm/test.jsonl").write_text(json.dumps({"id": "a", "article": "Rain fell.", "highlights": "Rain."}))
    words = ["run", "--model", model, "--method", "dflash", "--max-new-tokens", "4", "--score", "evaluate:same"]
    status, _, err = main(*words, "--suite", "cnn_dm", "--data", "data", "--out", "suite")
    assert status == 0, err
    assert {(row.prompt_id, row.score) for row in store.load(Path("suite"))[1]} == {("a", 5.0)}
    told = "--score evaluate:same has no effect on gsm8k, without references or with a scorer; leave it out"
    assert main(*words, "--suite", "gsm8k", "--out", "other")[2] == f"dflash-bench: {told}\n"


# Templates with a clock, of their own file, or none


BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CLOCKS = {
    "gpt-oss": "Current date: {{ strftime_now('%Y-%m-%d') }}\n" + BODY,
    "Llama": "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = "
    'strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}\n'
    "Today Date: {{ date_string }}\n" + BODY,
    "of seconds": "{{ strftime_now('%H:%M:%S on %-d/%-m, %A') }}\n" + BODY,
    "of a variable form": "{% set form = '%B %Y' %}{{ strftime_now(form) }}" + BODY,
    "in a macro": "{% macro today() %}{{ strftime_now('%x') }}{% endmacro %}{{ today() }}" + BODY,
    "with space before": "\n  {% if true %}{{ strftime_now('%c') }}{% endif %}\n" + BODY,
}


@each("what", CLOCKS)
def test_a_template_is_told_one_date_as_transformers_would_tell_it(
    what: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Message("user", "Hi")]
    real = clock.datetime
    frozen = type("Frozen", (real,), {"now": classmethod(lambda *_: real(2026, 3, 7))})
    told = targets.tokenizer_of(model / "target")
    told.chat_template = CLOCKS[what]
    with monkeypatch.context() as patched:
        patched.setattr(clock, "datetime", frozen)
        expected = chat.render(told, asked, False)
    told = targets.with_template(told, model, "2026-03-07")
    assert chat.render(told, asked, False) == expected and chat.names_date(told)
    told.chat_template = {"default": CLOCKS[what], "tool_use": BODY}
    assert chat.render(targets.with_template(told, model, "2026-03-07"), asked, False) == expected


def with_clock(model: Path, name: str, template: str) -> Path:
    folder = Path(shutil.copytree(model, name))
    (folder / "target/chat_template.jinja").write_text(template)
    return folder


ASKED = ["--prompts", "p.jsonl", "--method", "dflash", "--max-new-tokens", "6", "--limit", "2"]


def test_a_run_has_one_date_which_is_stored_resumed_compared_and_set(
    model: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_clock(model, "clock", "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}" + BODY)
    write({"prompt": "Hi"}, {"prompt": "So?"})
    run = ["run", "--model", folder, *ASKED]
    status, _, err = main(*run, "--date", "2026-03-07", "--out", "old")
    info = run_info.read_info(Path("old"))
    assert status == 0, err
    assert info.identity.date == "2026-03-07"
    assert {(row.exactness, row.audit) for row in store.load(Path("old"))[1]} == {("exact", "exact")}
    assert main(*run, "--out", "old", "--resume")[0] == 0
    assert main(*run, "--out", "new")[0] == 0
    today = run_info.read_info(Path("new")).identity
    assert today.date is not None and today.date != "2026-03-07"
    assert today.suites["prompts"].rendered.keys() == {"off"}
    assert today.suites["prompts"].rendered != info.identity.suites["prompts"].rendered
    main("baseline", "old", "-o", "base.json")
    status, _, err = main("check", "new", "--baseline", "base.json")
    assert status == 2 and "--date 2026-03-07" in err and "--allow prompts" in err


def test_shards_share_a_date_that_is_given(model: Path, main: Main) -> None:
    """The second may start after midnight."""
    folder = with_clock(model, "clock", "{{ strftime_now('%Y-%m-%d') }}" + BODY)
    write(*({"prompt": str(number)} for number in range(4)))
    shard = ["run", "--model", folder, *ASKED[:-2], "--shard", "1/2", "--out", "one"]
    assert_refused(main(*shard), "names the date", "--date")
    assert main(*shard, "--date", "2026-03-07")[0] == 0
    assert main(*shard, "--resume")[0] == 0


def test_prompts_that_are_left_out_leave_no_shard_empty(model: Path, main: Main) -> None:
    write(*({"prompt": str(number) * (1 + 5000 * (number == 2))} for number in range(4)))
    words = ["run", "--model", model, *ASKED[:-2], "--shard", "1/2", "--out", "few"]
    assert_refused(main(*words), "--shard 1/2 needs 4 prompts")


def test_another_template_is_another_prompt(model: Path, main: Main) -> None:
    write({"prompt": "Hi"}, {"prompt": "So?"})
    for name, more in (("one", ""), ("two", "Be brief.\n")):
        folder = with_clock(model, name, more + BODY)
        assert main("run", "--model", folder, *ASKED, "--out", f"of-{name}")[0] == 0
    assert_refused(main("compare", "of-one", "of-two", "--allow", "model"), "chat template", "--allow prompts")


NO_DATES = {
    "without effect": (BODY, "2026-03-07", "--date"),
    "no day": (BODY, "tomorrow", "'tomorrow'"),
    "a moment": (BODY, "2026-03-07T10:00", "--date"),
}


@each("what", NO_DATES)
def test_a_date_that_is_none_or_has_no_effect_is_refused(what: str, model: Path, main: Main) -> None:
    template, date, told = NO_DATES[what]
    write({"prompt": "Hi"})
    folder = with_clock(model, "model", template)
    status, _, err = main("run", "--model", folder, *ASKED, "--date", date, "--out", "new")
    assert status == 2 and told in err and not Path("new").exists()


def test_a_template_that_draws_at_random_is_refused(model: Path) -> None:
    tokenizer = targets.tokenizer_of(model / "target")
    tokenizer.chat_template = "{{ range(10**5) | random }}" + BODY
    with pytest.raises(UserError, match=r"prompt p: .*random"):
        chat.check(tokenizer, [("p", [Message("user", "Hi")])], False)


def test_a_template_in_a_file_of_its_own_is_read_by_engine_and_judge_and_none_is_said(model: Path, main: Main) -> None:
    write({"prompt": "Hi"}, {"prompt": "So?"})
    folder = with_clock(model, "json", BODY)
    path = folder / "target/chat_template.jinja"
    path.with_suffix(".json").write_text(json.dumps({"chat_template": "Be brief.\n" + BODY}))
    path.unlink()
    status, _, err = main("run", "--model", folder, *ASKED, "--out", "json-run")
    assert status == 0 and "chat template" not in err
    rows = store.load(Path("json-run"))[1]
    assert {(row.exactness, row.audit) for row in rows} == {("exact", "exact")}
    asked = len(targets.tokenizer_of(model / "target").encode("Be brief.\nuser: Hi\n", add_special_tokens=False))
    assert {row.generation.num_prompt_tokens for row in rows if row.prompt_id == "0"} == {asked}
    path.with_suffix(".json").write_text("[]")
    assert "holds no chat_template" in main("run", "--model", folder, *ASKED, "--out", "bad")[2]
    path.with_suffix(".json").unlink()
    status, _, err = main("run", "--model", folder, *ASKED, "--out", "none")
    assert status == 0 and "note: " in err and "chat template" in err
