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

from dflash_bench.core.methods import parse
from dflash_bench.engine.drafters import dflash as dflash_drafter
from dflash_bench.engine.forward import native_drafts
from dflash_bench.engine.selection import compile_like, target_of
from dflash_bench.engine.target import Target
from dflash_bench.models.formats import TargetShape, load_draft
from dflash_bench.models.formats import bodies as formats_of_bodies
from dflash_bench.models.loading import Models
from dflash_bench.models.nets import bodies, dflash
from dflash_bench.models.nets.bodies import mixed_features
from dflash_bench.models.nets.corrections import domino, lilicorr, markov, selector, xpress
from dflash_bench.models.nets.corrections.base import BlockPass
from dflash_bench.models.nets.dflash import DFlashConfig
from helpers.by_the_book import Book, states_of
from helpers.each import each
from helpers.random_drafts import KINDS, Made
from helpers.toy import run, tiny

HIDDEN, VOCABULARY, LAYERS = 32, 97, 6
CUT = "dflash:cut=0.5"
ROUNDING = 1e-3
"""Choices closer than this are not compared: float32 does not decide them."""


SHAPE = TargetShape(HIDDEN, VOCABULARY, LAYERS)
PROMPT_LENGTHS = (9, 5, 12)


@cache
def target_by(kernels: str | None) -> Target:
    return target_of(tiny("qwen3", num_hidden_layers=LAYERS), kernels=kernels)


def differences(
    kind: str, seed: int, folder: Path, num_rows: int = 1, method: str = "dflash", kernels: str | None = "torch"
) -> int:
    """In how many rounds of any row the engine drafts, or verifies, something else than the book."""
    made, model, target = (
        Made(kind, seed, HIDDEN, VOCABULARY, LAYERS),
        tiny("qwen3", num_hidden_layers=LAYERS),
        target_by(kernels),
    )
    files, asked = made.save(folder / kind), parse(method)
    models = Models(model, None, {"dflash": load_draft(files, SHAPE, torch.float32, "cpu")}, {})
    drafter = dflash_drafter.build(models, target, asked)
    compile_like(target, [drafter])
    prompts = [
        [(seed * 7 + row * 11 + place * 5) % VOCABULARY for place in range(length)]
        for row, length in enumerate(PROMPT_LENGTHS[:num_rows])
    ]
    out = run(target, drafter, prompts, 8)
    book, count, threshold = Book(files, model), 0, None if asked.option("cut") == "off" else asked.real("cut")
    for row, prompt in enumerate(prompts):
        text, end = [*prompt, *out.tokens[row]], len(prompt)
        states = states_of(model, text, made.taps)
        for step in out.rounds:
            if step.emitted[row] is None:
                continue
            expected = book.drafts(states, text[: end + 1])
            assert step.drafted[row] == len(expected.tokens)
            same = step.drafted_ids[row] == expected.tokens
            if same and threshold is not None:
                assert step.verified is not None
                same = step.verified[row] == expected.before(threshold) or expected.is_near(threshold, ROUNDING)
            count += not same and expected.margin > ROUNDING
            end += step.accepted[row] + 1
    return count


@each("kind", KINDS)
def test_shapes_that_nobody_has_published_draft_by_the_book(kind: str, tmp_path: Path) -> None:
    forwards: tuple[dict[str, Any], ...] = ({"num_rows": 3}, {"kernels": None})
    for seed, forward in enumerate(forwards):
        assert differences(kind, seed, tmp_path / str(seed), **forward) == 0


def test_a_draft_is_cut_by_the_book(tmp_path: Path) -> None:
    for seed in seeds("cut one token late"):
        assert differences("dspark", seed, tmp_path / str(seed), 3, CUT) == 0


Patch = Callable[[pytest.MonkeyPatch], None]


def seen_otherwise(change: Callable[[bodies.BlockView], bodies.BlockView]) -> Patch:
    usual = bodies.DraftBody.view
    return lambda patch: patch.setattr(bodies.DraftBody, "view", lambda body, layer: change(usual(body, layer)))


def _seam(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The position before slot 0 is taken from the end of the block, as if rows were one after another."""
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


def _over_the_rows(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Rows are filtered as one long block: before a row's slot 0 stands the last slot of the row above."""
    filtered = bodies.filtered(x.flatten(0, 1)[None], coefficients.flatten(0, 1)[None])
    return filtered.view(x.shape)


def _state_of_another_row(patch: pytest.MonkeyPatch) -> None:
    usual = markov.MarkovHead.bias

    def bias(self: Any, hidden: Any, row: Any, state: Any) -> Any:
        return usual(self, hidden, row, state.roll(1, dims=0))

    patch.setattr(markov.MarkovHead, "bias", bias)


def _candidates_of_another_row(patch: pytest.MonkeyPatch) -> None:
    usual = selector.CandidateSelector.correct

    def correct(self: Any, block: BlockPass, pick: Any) -> Any:
        return usual(self, replace(block, logits=block.logits.roll(1, dims=0)), pick)

    patch.setattr(selector.CandidateSelector, "correct", correct)


def _cut(by: int) -> Patch:
    usual = dflash_drafter.verified_in_part

    def moved(tokens: Any, probs: Any, width: int, lengths: Any) -> Any:
        lengths = [min(max(length + by, 0), tokens.shape[1]) for length in lengths]
        return usual(tokens, probs, max(lengths), lengths)

    return lambda patch: patch.setattr(dflash_drafter, "verified_in_part", moved)


FAULTS: dict[str, tuple[str, Callable[[Made], bool], Patch]] = {
    "window off by one": (
        "dflash",
        lambda made: "sliding_attention" in made.types and made.config["sliding_window"] < 8,
        seen_otherwise(lambda view: view if view.window is None else replace(view, window=view.window + 1)),
    ),
    "causal read as bidirectional": (
        "jetspec",
        lambda made: made.block > 2,
        seen_otherwise(lambda view: replace(view, is_causal=False)),
    ),
    "convolution over the seam of a block": (
        "dflash2",
        lambda made: made.in_block["conv_kernel_size"] > 1,
        lambda patch: patch.setattr(native_drafts, "filtered", _seam),
    ),
    "convolution over the seam of two rows": (
        "dflash2",
        lambda made: made.in_block["conv_kernel_size"] > 1,
        lambda patch: patch.setattr(native_drafts, "filtered", _over_the_rows),
    ),
    "candidates of another row": ("dflash2", lambda made: made.block > 2, _candidates_of_another_row),
    "Markov state of another row": (
        "dspark",
        lambda made: made.in_block["markov_head_type"] == "rnn" and made.block > 2,
        _state_of_another_row,
    ),
    "cut one token late": ("dspark", lambda made: made.in_block["enable_confidence_head"], _cut(1)),
    "cut one token early": ("dspark", lambda made: made.in_block["enable_confidence_head"], _cut(-1)),
    "fewer candidates": ("dflash2", lambda made: made.in_block["selector_top_k"] > 2, _fewer_candidates),
    "Markov state not reset": (
        "dspark",
        lambda made: made.in_block["markov_head_type"] == "rnn",
        lambda patch: patch.setattr(
            markov.MarkovHead, "start", lambda self, rows: self.markov_w1.weight.new_full((rows, self.rank), 2.0)
        ),
    ),
    "GRU forgets": (
        "domino",
        lambda made: made.block > 3 and made.in_block["pure_draft_prefix_len"] < 2,
        lambda patch: patch.setattr(
            domino.PrefixGRU,
            "forward",
            lambda self, x, state, usual=domino.PrefixGRU.forward: usual(self, x, torch.zeros_like(state)),
        ),
    ),
    "embedding scale dropped": (
        "dflash",
        lambda made: made.in_block.get("input_embedding_scale") is not None,
        lambda patch: patch.setattr(dflash.DFlashDraft, "embed_block", lambda self, block, embed: embed(block)),
    ),
    "last layer read before the final norm": (
        "dflash",
        lambda made: LAYERS - 1 in made.taps,
        lambda patch: patch.setattr(DFlashConfig, "taps", property(lambda config: config.target_layer_ids)),
    ),
    "value scale dropped": (
        "dflash",
        lambda made: "attention_value_scale" in made.in_block,
        lambda patch: patch.setattr(
            formats_of_bodies,
            "_attention",
            lambda both, usual=formats_of_bodies._attention: {**usual(both), "value_scale": 1.0},
        ),
    ),
    "one pass of many": ("xpress", lambda made: made.config["num_jacobi_passes"] > 1, _one_pass_less),
    "paths by lengths that are not one": (
        "lilicorr",
        lambda made: made.block > 3,
        lambda patch: patch.setattr(lilicorr.LiLiCorrHead, "_unit", lambda self, vectors: vectors),
    ),
    "one mix for all layers": (
        "dflare",
        lambda made: made.layers > 1 and len(made.taps) > 1,
        lambda patch: patch.setattr(
            dflash,
            "mixed_features",
            lambda weights, features, usual=mixed_features: usual(weights[:1].expand_as(weights), features),
        ),
    ),
}


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


@each("what", FAULTS)
def test_a_planted_fault_changes_what_is_drafted(what: str, tmp_path: Path) -> None:
    kind, _, patch = FAULTS[what]
    num_rows, method = 3 if "row" in what else 1, CUT if "cut" in what else "dflash"
    assert len(seeds(what)) == 3
    with planted(patch):
        assert any(differences(kind, seed, tmp_path / str(seed), num_rows, method) for seed in seeds(what))
