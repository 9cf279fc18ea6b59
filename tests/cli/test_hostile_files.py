"""Folders of models that nobody made in good faith: one line and exit status 2, no wait, nothing written."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.models import chat, weights
from helpers import tiny
from helpers.each import each

Main = Callable[..., tuple[int, str, str]]
Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def asked(model: Path) -> dict[str, list[object]]:
    """The commands that read a folder, each with a place that it would write to."""
    target = ["--target", model / "target"]
    return {
        "run": ["--prompts", "p.jsonl", "--model", model, "--max-new-tokens", "2", "--out", "new"],
        "inspect": [model / "dflash", *target],
        "convert": [model / "dflash", "new", "--to", "speculators", *target],
    }


def refused(main: Main, model: Path, command: str) -> str:
    Path("p.jsonl").write_text('{"prompt": "Hi"}\n')
    code, out, err = main(command, *asked(model)[command])
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert not Path("new").exists()
    assert len(err) < 1500 and err[:-1].isprintable()
    return err


def pipe(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return damage


def folder(name: str) -> Damage:
    return lambda model: ((model / name).unlink(), (model / name).mkdir())


def text(name: str, content: str) -> Damage:
    return lambda model: (model / name).write_text(content)


def edited(name: str, **changes: Any) -> Damage:
    return lambda model: (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))


def mask(token: object) -> Damage:
    def damage(model: Path) -> None:
        path = model / "dflash/config.json"
        config = json.loads(path.read_text())
        config["dflash_config"]["mask_token_id"] = token
        path.write_text(json.dumps(config))

    return damage


def shards(part: str, *names: str) -> Damage:
    """An index that names files which are not there."""

    def damage(model: Path) -> None:
        (model / part / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(names)}}
        (model / part / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def many_tensors(model: Path) -> None:
    count = weights.MOST_TENSORS + 1
    header = {f"w{i}": {"dtype": "I8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
    start = json.dumps(header).encode()
    content = struct.pack("<Q", len(start)) + start + b"\0" * count
    (model / "dflash/model.safetensors").write_bytes(content)


DEEP, DEEPER = (f'{{"model_type": "qwen3", "x": {"[" * depth + "]" * depth}}}' for depth in (900, 100_000))
ALL = ("run", "inspect", "convert")
PIPE, DEEP_SAID = "a pipe", "100 levels"
DAMAGES: dict[str, tuple[Damage, str, tuple[str, ...]]] = {
    "a pipe as the draft's weights": (pipe("dflash/model.safetensors"), PIPE, ALL),
    "a pipe as its config": (pipe("dflash/config.json"), PIPE, ALL),
    "a pipe as the target's weights": (pipe("target/model.safetensors"), PIPE, ALL),
    "a pipe beside them": (pipe("target/more.safetensors"), PIPE, ALL),
    "a pipe as its config, too": (pipe("target/config.json"), PIPE, ALL),
    "a pipe as its settings": (pipe("target/generation_config.json"), PIPE, ALL),
    "a pipe as its tokenizer": (pipe("target/tokenizer.json"), PIPE, ALL),
    "a pipe as its template": (pipe("target/chat_template.jinja"), PIPE, ALL),
    "a folder as weights": (folder("dflash/model.safetensors"), "a folder", ALL),
    "a folder as the target's weights": (folder("target/model.safetensors"), "a folder", ALL),
    "a deep draft": (text("dflash/config.json", DEEP), DEEP_SAID, ALL),
    "a deeper draft": (text("dflash/config.json", DEEPER), DEEP_SAID, ALL),
    "a deep target": (text("target/config.json", DEEP), DEEP_SAID, ALL),
    "a deeper target": (text("target/config.json", DEEPER), DEEP_SAID, ALL),
    "deep settings": (text("target/generation_config.json", DEEPER), DEEP_SAID, ALL),
    "deep settings of the tokenizer": (text("target/tokenizer_config.json", DEEP), DEEP_SAID, ALL),
    "a deep tokenizer": (text("target/tokenizer.json", DEEP), DEEP_SAID, ("run",)),
    "a deep tokenizer of the draft": (text("dflash/tokenizer.json", DEEPER), DEEP_SAID, ("run",)),
    "a tokenizer that Rust cannot read": (edited("target/tokenizer.json", version="9.0"), "cannot load", ("run",)),
    "a number of 10,000 digits": (text("dflash/config.json", f'{{"block_size": {"9" * 10_000}}}'), "digits", ALL),
    "a shard with a name of 5,000 letters": (shards("dflash", "x" * 5000), "which is not beside it", ALL),
    "a shard of the target with such a name": (shards("target", "x" * 5000), "", ("run", "convert")),
    "a shard with no name": (shards("dflash", ""), "which is not beside it", ALL),
    "a shard with half a character": (shards("dflash", "\ud800"), "half of a character", ALL),
    "a shard that writes red": (shards("dflash", "\x1b[31m"), "names the file \\u001b[31m", ALL),
    "too many tensors": (many_tensors, "100,001 tensors", ALL),
    "a mask below nothing": (mask(-5), "mask_token_id cannot be -5", ALL),
    "a mask beyond the vocabulary": (mask(1024), "1024", ("run", "convert")),
    "a mask that is a word": (mask("<mask>"), "mask_token_id cannot be '<mask>'", ALL),
    "a vocabulary of less than nothing": (edited("target/config.json", vocab_size=-5), "vocab_size", ALL),
    "no positions": (edited("target/config.json", max_position_embeddings=0), "max_position_embeddings", ALL),
    "a stop that is a word": (
        edited("target/generation_config.json", eos_token_id=["end"]),
        "eos_token_id in generation",
        ("run",),
    ),
    "a stop that is an object": (
        edited("target/generation_config.json", eos_token_id={"a": 1}),
        "eos_token_id in generation",
        ("run",),
    ),
}
CASES = [(what, command) for what, (_, _, commands) in DAMAGES.items() for command in commands]


@each("what, command", CASES)
def test_a_folder_that_makes_no_sense_is_one_line(what: str, command: str, model: Path, main: Main) -> None:
    damage, message, _ = DAMAGES[what]
    damage(model)
    assert message in refused(main, model, command)


LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES = {
    "raises": ("{{ raise_exception('only users [/] \x1b[31m') }}", r"only users [/] \u001b[31m; "),
    "is no template": ("{% for %}", "the chat template fails: "),
    "asks for what is not there": ("{{ tools.first.name }}", "the chat template fails: "),
    "divides by nothing": ("{{ 1 // (messages | length - 1) }}", "modulo by zero"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion"),
    "wants out": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
    "says nothing": ("{{ '' }}", "makes a prompt of 0 characters"),
    "says too much": ("{{ 'a' * 20000000 }}", "makes a prompt of 20,000,000 characters"),
    "draws one of two": ("{{ [1, 2]|random }}{{ messages }}", "the chat template draws at random"),
    "draws one of two that are equal": ("{{ ['a', 'a']|random }}", "the chat template draws at random"),
    "takes all memory": ("{{ 'a' * 10 ** 11 }}", "the chat template takes more than 1024 MB"),
    "never ends": (LOOP, "the chat template takes longer than 1 s"),
}


@pytest.mark.parametrize("what", TEMPLATES)
def test_a_template_that_does_not_render_is_one_line(
    what: str, model: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = TEMPLATES[what]
    if "all memory" in what and not Path("/proc/self/statm").exists():
        pytest.skip("this system limits no process's memory")
    monkeypatch.setattr(chat, "LIMIT_S", 1.0 if "longer" in message else chat.LIMIT_S)
    (model / "target/chat_template.jinja").write_text(content)
    assert message in refused(main, model, "run")


def test_a_template_that_refuses_a_later_turn_is_one_line_too(model: Path, main: Main) -> None:
    once = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}"
    (model / "target/chat_template.jinja").write_text(once)
    words = ("run", "--model", model, "--max-new-tokens", "2", "--out", "new", "--prompts", "q.jsonl")
    Path("q.jsonl").write_text('{"turns": ["Hi"]}\n')
    assert main(*words)[0] == 0
    shutil.rmtree("new")
    Path("q.jsonl").write_text('{"turns": ["Hi"]}\n{"turns": ["Hi", "And?"], "id": "two"}\n')
    code, _, err = main(*words)
    assert (code, err.count("\n")) == (2, 1) and "prompt two " in err and "one turn" in err
    assert not Path("new").exists()
