"""Servers beside the same target in this process: it makes the token ids of prompts, and judges what comes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from dflash_bench.core.types import Message
from dflash_bench.models import chat, targets
from dflash_bench.models.presets import NANO
from dflash_bench.results import recheck, run_info, store
from dflash_bench.servers.backend import is_same_text
from helpers.faults.matrix import command
from helpers.refusals import assert_refused
from helpers.servers.fake_server import FakeServer
from helpers.servers.nano_words import nano_text

Main = Callable[..., tuple[int, str, str]]
ASKED = "--suite gsm8k --model nano --limit 3 --max-new-tokens 24".split()
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of our engine, which all tests read."""
    folder = tmp_path_factory.mktemp("ran") / "engine"
    assert command("run", *ASKED, "--method", "dflash", "--out", folder)[0] == 0
    return folder


@pytest.fixture
def engine(main: Main, ran: Path) -> Mapping[str, list[int]]:
    """Our engine's answers by the ids of the prompt as JSON; the run is in the folder `engine`."""
    shutil.copytree(ran, "engine")
    tokenizer = targets.tokenizer_of(NANO / "target", False)
    turns = {prompt["prompt_id"]: prompt["turns"][0] for prompt in run_info.read_prompts(Path("engine"))}
    return {
        json.dumps(chat.encode(tokenizer, [Message("user", turns[record.prompt_id])], False)): [
            *record.generation.token_ids
        ]
        for record in store.load(Path("engine"))[1]
        if record.method == "ar"
    }


@pytest.fixture
def served(main: Main, engine: Tokens) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A run over servers that say what `bent` makes of the engine's answers under dflash."""

    def run(
        bent: Callable[[list[int]], list[int]] = list, *more: object, says: Callable[[Sequence[int]], str] | None = None
    ) -> tuple[int, str, str]:
        ends = frozenset(tokens[-1] for tokens in engine.values() if len(tokens) < 24)
        plain = FakeServer(answer=lambda prompt, _: engine[prompt], ends=ends, text=nano_text)
        other = FakeServer(
            answer=lambda prompt, _: bent(engine[prompt]),
            ends=ends,
            accepts=(2,),
            block=3,
            round_s=0.002,
            text=says or nano_text,
        )
        with plain, other:
            servers = ("--server", f"plain={plain.url}", "--server", f"dflash={other.url}")
            return main("run", *ASKED, *servers, "--out", "served", *more)

    yield run


def test_a_server_that_says_what_the_model_says_is_exact_and_audited(main: Main, served: Main, engine: Tokens) -> None:
    code, _, err = served()
    assert (code, err) == (0, "")
    info, records = store.load(Path("served"))
    info = info.to_json()
    assert {record.audit for record in records} == {"exact"}
    assert {record.exactness for record in records if record.method == "dflash"} == {"exact"}
    identity = info["identity"]
    assert identity["servers"]["ar"]["prompts"] == "token ids"
    assert (identity["model"], identity["target"], identity["dtype"]) == ("nano", "nano", "unknown")
    assert (identity["judge"]["dtype"], identity["audit"]) == ("float32", "all")
    # Beside a run of our own engine: what differs is named, and allowed.
    assert_refused(main("compare", "engine", "served"), "engine local and server", "--allow engine")
    code, out, err = main("compare", "engine", "served", "--allow", "engine")
    assert code == 0, err
    plain_answers = out.partition("plain decoding's answers to first turns")[2]
    assert "3/3" in plain_answers


def test_a_server_that_says_something_else_fails_the_run(main: Main, served: Main) -> None:
    code, out, _ = served(lambda tokens: [*tokens[:5], tokens[5] ^ 1, *tokens[6:]])
    assert code == 1
    assert "dflash is NOT exact: 3 answers" in out
    found = json.loads(main("report", "served", "--format", "json")[1])["findings"]
    (wrong,) = [one for one in found if one["kind"] == "mismatch" and one["remedy_code"] == "engine"]
    assert [place["values"]["num_answers"] for place in wrong["places"]] == [3]
    _, records = store.load(Path("served"))
    verdicts = {(record.method, record.exactness, record.audit) for record in records if record.method == "dflash"}
    assert verdicts == {("dflash", "mismatch", "mismatch")}
    assert {record.divergence and record.divergence.index for record in records if record.method == "dflash"} == {5}


def test_a_token_that_the_target_has_not_is_a_mismatch(served: Main) -> None:
    code, _, err = served(lambda tokens: [*tokens[:3], 5000, *tokens[4:]])
    assert (code, err) == (1, "")
    _, records = store.load(Path("served"))
    assert {record.audit for record in records if record.method == "dflash"} == {"mismatch"}
    assert {record.departure and record.departure.index for record in records if record.method == "dflash"} == {3}


def test_an_answer_that_breaks_off_is_no_answer_of_the_model(served: Main) -> None:
    code, _, _ = served(lambda tokens: tokens[:-2])
    assert code == 1


def test_only_divergent_answers_are_audited_if_so_asked(served: Main) -> None:
    code, _, _ = served(list, "--audit", "divergent")
    assert code == 0
    assert {record.audit for record in store.load(Path("served"))[1]} == {None}


@pytest.mark.parametrize(
    "says",
    [
        lambda piece: " another text #### 42",
        lambda piece: nano_text(piece).upper(),
        lambda piece: nano_text(piece) + "\n",
        lambda piece: nano_text([*piece][::-1]),
    ],
)
def test_right_tokens_with_another_text_are_a_failed_answer_and_never_scored(
    served: Main, says: Callable[[Sequence[int]], str]
) -> None:
    code, out, err = served(says=says)
    assert (code, "3 of 6 answers failed" in err) == (1, True)
    assert "its text is not that of its tokens" in " ".join(out.split())
    for record in store.load(Path("served"))[1]:
        wrong = record.method == "dflash"
        assert (record.generation.error is not None, record.passed is None) == (wrong, wrong)


def test_a_space_that_tokenizers_take_away_and_half_a_character_are_no_other_text(served: Main) -> None:
    assert served(says=lambda piece: nano_text(piece))[0] == 0
    assert is_same_text(" The trays", "The trays")
    assert is_same_text("caf\u00e9 \ufffd", "caf\u00e9 ")
    assert not is_same_text("The trays", "the trays")
    assert not is_same_text("a b", "ab")
    _, records = store.load(Path("served"))
    # Our own decoding of the tokens is stored and scored.
    assert {record.generation.text for record in records} == {nano_text(one.generation.token_ids) for one in records}


def test_a_run_of_servers_is_judged_by_others(main: Main, served: Main, tmp_path: Path) -> None:
    assert served()[0] == 0
    assert main("submit", "served", "-o", "pack.zip")[0] == 0
    assert main("accept", "pack.zip", "-o", "accepted")[0] == 0
    found = recheck.read(Path("accepted"))
    assert found is not None
    assert {one.check for one in found.of_state("unchecked")} == {"counts", "times"}
    assert {one.check: one.what for one in found.findings}["tokens"].startswith("6 of 6 ")
