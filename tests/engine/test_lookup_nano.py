"""Methods that look tokens up, end to end: from what a user types to the tokens of nano's plain decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import METHODS, parse
from dflash_bench.core.types import Generation
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.dflash_ngram import DFlashNGramDrafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.verify import Draft
from dflash_bench.models import datastore, presets
from helpers.each import each
from helpers.nano import encoded, models

QUESTIONS = [
    "Write a Python function that says whether a number is prime.",
    "What is 3 + 4?",
    "Tom has 12 apples and gives 5 to Ann. How many apples does Tom have left?\nPlease reason step by step, and put "
    "your final answer within \\boxed{}.",
]
LENGTH = 30
TYPED = """
    ngram ngram:5 suffix suffix:earlier=no,threshold=0.3 lookahead lookahead:window=3,ngram=3,guesses=2 oracle
    random:4 synthetic:rates=0.9/0.5 dflash+ngram dflash+ngram:block=6,match=2,copy=4
    """.split()


@cache
def backend() -> LocalBackend:
    chosen = [parse(typed) for typed in ("ar", *TYPED)]
    return open_backend(models(), presets.preset("nano"), chosen, LENGTH)


@cache
def prompts() -> list[list[int]]:
    return [encoded(question) for question in QUESTIONS]


@cache
def answers(temperature: float) -> list[tuple[int, ...]]:
    return [given.token_ids for given in generated("ar", temperature)]


def generated(label: str, temperature: float = 0.0) -> list[Generation]:
    given = backend().generate_ids(parse(label).label, prompts(), Sampling(temperature, seed=11))
    assert not any(generation.error for generation in given)
    return given


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("typed", TYPED)
def test_every_method_gives_the_plain_tokens(typed: str, temperature: float) -> None:
    given = generated(typed, temperature)
    assert [generation.token_ids for generation in given] == answers(temperature)
    kept = sum(count for generation in given for count in generation.accepted or ())
    assert kept > 0 or typed == "random:4"


def test_a_datastore_of_the_very_answer_drafts_all_of_it(tmp_path: Path) -> None:
    """The target is right by the user's choice, so the answer has the plain tokens."""
    plain = answers(0.0)[0]
    store = datastore.of_texts([[*prompts()[0], *plain]])
    datastore.write(tmp_path / "store", store, models().tokenizer, [])
    given = with_method(f"rest:datastore={tmp_path / 'store'},depth=12,nodes=12")
    (generation,) = given.generate_ids("it", prompts()[:1])
    assert generation.token_ids == plain
    assert generation.accepted is not None and set(generation.accepted[:-1]) == {12}


def with_method(typed: str) -> LocalBackend:
    """A backend in which the method goes by the name `it`."""
    method = parse(typed)
    opened = open_backend(models(), presets.preset("nano"), [method], LENGTH)
    return LocalBackend(opened.target, models().tokenizer, {"it": opened.drafters[method.label]}, opened.limits)


@each(
    ("typed", "said"),
    [
        ("rest", "needs a datastore"),
        ("rest:datastore=absent.store", "cannot read absent.store"),
        ("ngram:max=2,min=3", "max=2 is less than min=3"),
        ("synthetic:rates=0.9/1.1", "rates=0.9/1.1 is not a list of 1 to 63 probabilities"),
        ("synthetic:rates=often", "rates=often is not a list"),
        ("suffix:earlier=perhaps", "earlier must be yes or no"),
    ],
)
def test_what_cannot_be_is_refused(typed: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        with_method(typed)


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    datastore.write(tmp_path / "store", datastore.of_texts([[0]]), Other(), [])
    with pytest.raises(UserError, match="another tokenizer"):
        with_method(f"rest:datastore={tmp_path / 'store'}")


def test_what_a_datastore_holds_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    """Else a run could be continued after the file was built again from its own answers."""
    chosen = [parse(f"rest:datastore={tmp_path / 'store'}")]
    seen = set()
    for texts in ([[1, 2]], [[1, 3]]):
        datastore.write(tmp_path / "store", datastore.of_texts(texts), models().tokenizer, [])
        revisions = open_backend(models(), presets.preset("nano"), chosen, LENGTH).describe()["revisions"]
        assert "target" in revisions
        seen.add(revisions[chosen[0].label])
    assert len(seen) == 2


class Recording:
    """Passes on to a drafter with a DFlash block, and writes down every block with the length of the text before it."""

    def __init__(self, inner: Any, block: DFlashDrafter, changed: bool = False) -> None:
        self.inner, self.block, self.changed = inner, block, changed
        self.taps, self.num_drafts = inner.taps, inner.num_drafts
        self.begin, self.observe = inner.begin, inner.observe
        self.blocks: dict[int, list[int]] = {}
        self.draft = block.propose
        block.propose = self.recorded  # type: ignore[method-assign]

    def recorded(self) -> Draft:
        draft = self.draft()
        self.blocks[self.block.starts[0]] = draft.tokens[0].tolist()
        return draft

    def propose(self) -> Draft | None:
        draft: Draft | None = self.inner.propose()
        # No proposed token is right, so every position of the answer has a round.
        return Draft((draft.tokens + 1) % 97) if self.changed and draft else draft


def test_a_long_match_skips_the_draft_pass_and_the_next_block_knows_all_that_was_copied() -> None:
    local = with_method("dflash+ngram:match=1,copy=3")
    hybrid = local.drafters["it"]
    assert isinstance(hybrid, DFlashNGramDrafter)
    watched = Recording(hybrid, hybrid.block)
    (given,) = LocalBackend(local.target, local.tokenizer, {"it": watched}, local.limits).generate_ids(
        "it", prompts()[:1]
    )
    assert given.token_ids == answers(0.0)[0]
    copied = [count for count in given.drafted or () if count <= 3]
    assert len(copied) > 3 and len(watched.blocks) == len(given.drafted or ()) - len(copied) > 1
    alone = with_method("dflash").drafters["it"]
    assert isinstance(alone, DFlashDrafter)
    everywhere = Recording(alone, alone, changed=True)
    LocalBackend(local.target, local.tokenizer, {"it": everywhere}, local.limits).generate_ids("it", prompts()[:1])
    assert watched.blocks == {start: everywhere.blocks[start] for start in watched.blocks}


def test_the_table_has_an_entry_for_each_and_says_which_measure_the_engine() -> None:
    for name in ("ngram", "suffix", "rest", "lookahead", "oracle", "random", "synthetic"):
        assert METHODS[name].weights is None and METHODS[name].lossless
    assert METHODS["dflash+ngram"].weights == "dflash"
    assert [name for name, kind in METHODS.items() if kind.is_probe] == ["oracle", "random", "synthetic"]
    assert all("measures the engine" in kind.summary for kind in METHODS.values() if kind.is_probe)
