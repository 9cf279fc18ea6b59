"""Drafts of any shape draft what their published descriptions say; and each misreading of one shows in its tokens.

A fault in a draft leaves every answer exact, so it is looked for where it can be seen: in what is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_the_book import Book, states_of
from random_drafts import KINDS, Made
from toy import tiny

import dflash_bench as db
from dflash_bench.engine.forward import native_drafts
from dflash_bench.models.formats import bodies as formats_of_bodies
from dflash_bench.models.nets import bodies, dflash
from dflash_bench.models.nets.bodies import mixed_features
from dflash_bench.models.nets.corrections import domino, lilicorr, markov, selector, xpress

HIDDEN, VOCABULARY, LAYERS = 32, 97, 6
ROUNDING = 1e-3
"""Choices closer than this are not compared: float32 does not decide them."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    tiny("qwen3").save_pretrained(folder)
    return folder


def differences(kind: str, seed: int, target: Path, folder: Path, **forward: Any) -> int:
    """In how many rounds the engine drafts something else than the book."""
    made, model = Made(kind, seed, HIDDEN, VOCABULARY, LAYERS), tiny("qwen3")
    draft = made.save(folder / kind)
    prompt = [(seed * 7 + place * 5) % VOCABULARY for place in range(9)]
    with db.Engine(target=target, drafts={"dflash": draft}, dtype="float32", **forward) as engine:
        answer = engine.generate(prompt, method="dflash", max_new_tokens=8, stop_ids=())
    book, text, end = Book(draft, model), [*prompt, *answer.token_ids], len(prompt)
    states, count = states_of(model, text, made.taps), 0
    for step in answer.rounds:
        expected = book.drafts(states, text[: end + 1])
        assert len(step.drafted) == len(expected.tokens)
        count += list(step.drafted) != expected.tokens and expected.margin > ROUNDING
        end += step.accepted + 1
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_nobody_has_published_draft_by_the_book(kind: str, target: Path, tmp_path: Path) -> None:
    forwards: tuple[dict[str, Any], ...] = ({"kernels": "torch"}, {})
    for seed, forward in enumerate(forwards):
        assert differences(kind, seed, target, tmp_path / str(seed), **forward) == 0


Patch = Callable[[pytest.MonkeyPatch], None]


def seen_otherwise(change: Callable[[bodies.BlockView], bodies.BlockView]) -> Patch:
    usual = bodies.DraftBody.view
    return lambda patch: patch.setattr(bodies.DraftBody, "view", lambda body, layer: change(usual(body, layer)))


def _seam(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """What stands before slot 0 is taken from the end of the block, as if rows were one after another."""
    return sum(x.roll(tap, dims=1) * coefficients[:, :, tap] for tap in range(coefficients.shape[2]))  # type: ignore[return-value]


def _fewer_candidates(patch: pytest.MonkeyPatch) -> None:
    usual = selector.CandidateSelector.correct

    def correct(self: Any, block: Any, pick: Any) -> Any:
        self.top_k = 1
        return usual(self, block, pick)

    patch.setattr(selector.CandidateSelector, "correct", correct)


def _one_pass_less(patch: pytest.MonkeyPatch) -> None:
    usual = xpress.RefinerHead.correct

    def correct(self: Any, block: Any, pick: Any) -> Any:
        self.num_passes = 1
        return usual(self, block, pick)

    patch.setattr(xpress.RefinerHead, "correct", correct)


FAULTS: dict[str, tuple[str, Callable[[Made], bool], Patch]] = {
    "window off by one": (
        "dflash", lambda made: "sliding_attention" in made.types and made.config["sliding_window"] < 8,
        seen_otherwise(lambda view: view if view.window is None else replace(view, window=view.window + 1)),
    ),
    "causal read as bidirectional": (
        "jetspec", lambda made: made.block > 2, seen_otherwise(lambda view: replace(view, is_causal=False)),
    ),
    "convolution over the seam of a block": (
        "dflash2", lambda made: made.in_block["conv_kernel_size"] > 1,
        lambda patch: patch.setattr(native_drafts, "filtered", _seam),
    ),
    "fewer candidates": ("dflash2", lambda made: made.in_block["selector_top_k"] > 2, _fewer_candidates),
    "Markov state not reset": (
        "dspark", lambda made: made.in_block["markov_head_type"] == "rnn",
        lambda patch: patch.setattr(
            markov.MarkovHead, "start", lambda self, rows: self.markov_w1.weight.new_full((rows, self.rank), 2.0)
        ),
    ),
    "GRU forgets": (
        "domino", lambda made: made.block > 3 and made.in_block["pure_draft_prefix_len"] < 2,
        lambda patch: patch.setattr(
            domino.PrefixGRU, "forward",
            lambda self, x, state, usual=domino.PrefixGRU.forward: usual(self, x, torch.zeros_like(state)),
        ),
    ),
    "embedding scale dropped": (
        "dflash", lambda made: made.in_block.get("input_embedding_scale") is not None,
        lambda patch: patch.setattr(dflash.DFlashDraft, "embed_block", lambda self, block, embed: embed(block)),
    ),
    "value scale dropped": (
        "dflash", lambda made: "attention_value_scale" in made.in_block,
        lambda patch: patch.setattr(
            formats_of_bodies, "_attention",
            lambda both, usual=formats_of_bodies._attention: {**usual(both), "value_scale": 1.0},
        ),
    ),
    "one pass of many": ("xpress", lambda made: made.config["num_jacobi_passes"] > 1, _one_pass_less),
    "paths by lengths that are not one": (
        "lilicorr", lambda made: made.block > 3,
        lambda patch: patch.setattr(lilicorr.LiLiCorrHead, "_unit", lambda self, vectors: vectors),
    ),
    "one mix for all layers": (
        "dflare", lambda made: made.layers > 1 and len(made.taps) > 1,
        lambda patch: patch.setattr(
            dflash, "mixed_features",
            lambda weights, features, usual=mixed_features: usual(weights[:1].expand_as(weights), features),
        ),
    ),
}  # fmt: skip


@cache
def seeds(what: str) -> tuple[int, ...]:
    """Drafts that have what the fault is about."""
    kind, has_it, _ = FAULTS[what]
    return tuple(seed for seed in range(60) if has_it(Made(kind, seed, HIDDEN, VOCABULARY, LAYERS)))[:3]


@contextmanager
def planted(patch: Patch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as context:
        patch(context)
        yield


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_changes_what_is_drafted(what: str, target: Path, tmp_path: Path) -> None:
    kind, _, patch = FAULTS[what]
    assert len(seeds(what)) == 3
    with planted(patch):
        assert any(differences(kind, seed, target, tmp_path / str(seed), kernels="torch") for seed in seeds(what))
