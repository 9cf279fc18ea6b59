"""Mistakes in what the engine loads: weights, hooks, stop ids, template and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_bench.engine import backend
from dflash_bench.models import chat, loading
from helpers.faults import matrix
from helpers.faults.in_engine import Plant


def in_loading(change: Callable[[Any], None]) -> Plant:
    """`change` gets the engine's own models, which are no other test's."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def load(*asked: Any) -> loading.Models:
            models = matrix.LOAD(*asked)
            change(models)
            return models

        patch.setattr(loading, "load", load)

    return plant


@torch.no_grad()
def zeroed_down_proj(models: loading.Models) -> None:
    models.target.model.layers[3].mlp.down_proj.weight.zero_()


@torch.no_grad()
def rows_in_another_order(models: loading.Models) -> None:
    weight = models.target.model.embed_tokens.weight
    weight[5:] = weight[5:].roll(1, dims=0)


def hooked_head(models: loading.Models) -> None:
    models.target.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.roll(1, dims=-1))


def hooked_layer(models: loading.Models) -> None:
    """Which our own forward pass does not call, and transformers' does."""
    models.target.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, out: out.roll(1, dims=-1))


def other_template(models: loading.Models) -> None:
    template = models.tokenizer.chat_template
    models.tokenizer.chat_template = template.replace("assistant", "user")
    assert models.tokenizer.chat_template != template


def other_stop_in_config(models: loading.Models) -> None:
    models.target.generation_config.eos_token_id = 17
    models.tokenizer.eos_token = models.tokenizer.convert_ids_to_tokens(17)


def lost_stop_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "stop_ids", lambda *_: frozenset())


def a_space_more(patch: pytest.MonkeyPatch) -> None:
    """Before each message: answers of nano hardly change, and the prompts do."""
    rendered = chat.render

    def faulty(tokenizer: Any, messages: Sequence[Any], thinking: bool) -> str:
        return rendered(tokenizer, [replace(one, content=" " + one.content) for one in messages], thinking)

    patch.setattr(chat, "render", faulty)


def first_token_lost(patch: pytest.MonkeyPatch) -> None:
    encode = backend.LocalBackend.encode
    patch.setattr(backend.LocalBackend, "encode", lambda self, *asked: encode(self, *asked)[1:])


BOTH, OURS, THEIRS = ("native", "transformers"), ("native",), ("transformers",)
PLANTS: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "a zeroed down_proj": (in_loading(zeroed_down_proj), BOTH),
    "embeddings that are not the file's": (in_loading(rows_in_another_order), BOTH),
    "a hook on lm_head": (in_loading(hooked_head), BOTH),
    "a hook on a layer": (in_loading(hooked_layer), THEIRS),
    "stop ids that are lost": (lost_stop_ids, BOTH),
    "stop ids that are others": (in_loading(other_stop_in_config), OURS),
    "another template": (in_loading(other_template), OURS),
    "another rendering": (a_space_more, OURS),
    "a prompt without its first token": (first_token_lost, OURS),
}
