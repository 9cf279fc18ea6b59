"""One target that answers prompts from Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import api as db
from dflash_bench.core.types import Message
from helpers import tiny
from helpers.each import each

PROMPT = [5, 9, 200, 33, 7, 9]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[db.Engine]:
    with db.Engine(model) as engine:
        yield engine


@each("method", ["dflash", "dflash:2", "eagle3", "eagle3-tree", "ngram", "lookahead", "oracle:3"])
def test_every_method_says_what_plain_decoding_says(engine: db.Engine, method: str) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=24)
    drafted = engine.generate(PROMPT, method=method, max_new_tokens=24)
    assert drafted.token_ids == plain.token_ids
    assert drafted.method == method and plain.method == "ar"
    assert all(one.drafted == () and one.accepted == 0 for one in plain.rounds)
    assert len(plain.rounds) == len(plain.token_ids) - 1


def test_rounds_hold_what_was_drafted_and_add_up(engine: db.Engine) -> None:
    said = engine.generate(PROMPT, method="oracle:3", max_new_tokens=24)
    assert said.token_ids[1:] == tuple(token for one in said.rounds for token in one.token_ids)
    assert all(len(one.drafted) == 3 and one.accepted == 3 for one in said.rounds[:-1])
    assert said.rounds[0].drafted == said.token_ids[1:4] == said.rounds[0].token_ids[:3]
    assert said.acceptance_length is not None and said.acceptance_length > 3
    assert said.prefill_s > 0
    seconds = [one.seconds for one in said.rounds]
    assert all(one is not None and one > 0 for one in seconds)
    assert sum(filter(None, seconds)) <= said.decode_s
    assert said.num_prompt_tokens == len(PROMPT)


def test_trees_say_which_node_follows_which(engine: db.Engine) -> None:
    said = engine.generate(PROMPT, method="eagle3-tree:nodes=9", max_new_tokens=8)
    first = said.rounds[0]
    assert first.parents is not None and len(first.parents) == len(first.drafted) == 9
    assert -1 in first.parents


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_gives_the_same_piece_by_piece(engine: db.Engine, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    whole = engine.generate(PROMPT, method="dflash", **options)
    stream = engine.generate(PROMPT, method="dflash", stream=True, **options)
    pieces = list(stream)
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert whole.text.startswith("".join(piece.text for piece in pieces))
    assert pieces[0].round is None and all(piece.round is not None for piece in pieces[1:])
    assert stream.reply.token_ids == whole.token_ids
    assert [piece.round.accepted for piece in pieces[1:] if piece.round] == [one.accepted for one in whole.rounds]


def test_a_stream_that_is_left_ends_when_the_next_answer_begins(engine: db.Engine) -> None:
    stream = engine.generate(PROMPT, method="dflash", stream=True, max_new_tokens=24)
    next(stream)
    with pytest.raises(db.UserError, match="has not ended"):
        _ = stream.reply
    again = engine.generate(PROMPT, max_new_tokens=24)
    assert list(stream) == []
    assert again.token_ids == engine.generate(PROMPT, method="dflash", max_new_tokens=24).token_ids


def test_sampling_is_the_seeds(engine: db.Engine) -> None:
    first, same, other = (
        engine.generate(PROMPT, method=method, temperature=1.0, seed=seed, max_new_tokens=24).token_ids
        for method, seed in (("ar", 1), ("dflash", 1), ("ar", 2))
    )
    assert first == same != other


def test_stop_ids_end_an_answer(engine: db.Engine) -> None:
    free = engine.generate(PROMPT, max_new_tokens=12, stop_ids=())
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    stop = free.token_ids[5]
    stopped = engine.generate(PROMPT, method="dflash", max_new_tokens=12, stop_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert engine.stop_ids == {2}


def test_text_is_a_users_message(engine: db.Engine) -> None:
    asked = engine.encode("What is 2+2?")
    assert asked == engine.encode([{"role": "user", "content": "What is 2+2?"}])
    assert asked == engine.encode([Message("user", "What is 2+2?")])
    assert "What is 2+2?" in engine.tokenizer.decode(asked)
    said = engine.generate("What is 2+2?", method="dflash", max_new_tokens=8)
    assert said.num_prompt_tokens == len(asked)
    assert said.text == engine.tokenizer.decode(said.token_ids, skip_special_tokens=True)


def test_without_a_tokenizer_token_ids_will_do(model: Path, tmp_path: Path, engine: db.Engine) -> None:
    target = tmp_path / "target"
    shutil.copytree(model / "target", target)
    for name in tiny.TOKENIZER:
        (target / name).unlink()
    with db.Engine(target=target, drafts={"dflash": model / "dflash"}, dtype="float32") as bare:
        said = bare.generate(PROMPT, method="dflash", max_new_tokens=16)
        assert said.token_ids == engine.generate(PROMPT, max_new_tokens=16).token_ids
        assert said.text == "" and bare.tokenizer is None
        with pytest.raises(db.UserError, match="no tokenizer, so it takes token ids alone"):
            bare.generate("2+2?")
        with pytest.raises(db.UserError, match="comes with no draft for eagle3"):
            bare.generate(PROMPT, method="eagle3")


@each(
    "prompt, options, said",
    [
        ([], {}, "an empty prompt"),
        ([1024], {}, "token id 1024 is none of this model's, which are 0 to 1023"),
        ([-1], {}, "token id -1"),
        ([{"role": "user"}], {}, "a message has role and content"),
        (PROMPT, {"method": "dflsh"}, "unknown method 'dflsh'"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is a number from 1 up"),
        (PROMPT, {"temperature": -1.0}, "temperature is a number from 0 up"),
        (PROMPT, {"temperature": float("nan")}, "temperature is a number from 0 up"),
        ([7] * 2048, {}, "leaves no room in a context of 2048"),
    ],
)
def test_what_cannot_be_answered_is_one_line(engine: db.Engine, prompt: Any, options: Any, said: str) -> None:
    with pytest.raises(db.UserError, match=said):
        engine.generate(prompt, **options)


def test_nothing_is_printed(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with db.Engine(model) as engine:
        engine.generate("2+2?", method="eagle3", max_new_tokens=4)
    assert capfd.readouterr() == ("", "")


def test_a_closed_engine_answers_nothing(model: Path) -> None:
    with db.Engine(model) as engine:
        pass
    with pytest.raises(db.UserError, match="was closed"):
        engine.generate(PROMPT)


@each(
    "options, said",
    [
        ({"model": "nanno"}, "unknown model 'nanno'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"drafts": {"dfish": "x"}}, "unknown draft 'dfish'"),
        ({"engine": "native", "attention": "sdpa"}, "--attention has no effect"),
    ],
)
def test_an_engine_that_cannot_be_had_is_one_line(options: Any, said: str) -> None:
    with pytest.raises(db.UserError, match=said):
        db.Engine(**options)
