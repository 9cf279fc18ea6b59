"""Tiny drafts of random weights for the tiny targets of `toy.py`, and what they would compute without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.drafters.eagle3_tree import Eagle3TreeDrafter
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft, vocabulary_map
from dflash_bench.models.nets.layers import Rotary
from helpers.plain_answers import plain_answers
from helpers.toy import Scripted, Watching, run, sometimes_wrong

PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [i * 7 % 97 for i in range(40)]]
BODY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "num_target_layers": 4,
}
DFLASH = DFlashConfig(**BODY, num_layers=2, block_size=8, mask_token_id=96, target_layer_ids=(0, 1, 2))
EAGLE3 = Eagle3Config(**BODY, draft_vocab_size=97, target_layer_ids=(0, 1, 2))


def enlarged(draft: Any) -> Any:
    """Weights large enough that context and positions decide what is drafted."""
    initialise(draft, 3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return draft.eval()


def dflash_drafter(target: Target, block_size: int | None = None) -> DFlashDrafter:
    return DFlashDrafter(enlarged(DFlashDraft(DFLASH)), target.embedding, target.head, block_size)


def eagle3_drafter(target: Target, num_drafts: int = 5, draft: Eagle3Draft | None = None) -> Eagle3Drafter:
    return Eagle3Drafter(draft or enlarged(Eagle3Draft(EAGLE3)), target.embedding, num_drafts)


def eagle3_tree_drafter(
    target: Target, num_drafts: int = 15, top_k: int = 3, steps: int = 4, draft: Eagle3Draft | None = None
) -> Eagle3TreeDrafter:
    return Eagle3TreeDrafter(draft or enlarged(Eagle3Draft(EAGLE3)), target.embedding, num_drafts, top_k, steps)


class Recorded(Watching):
    """Keeps what the drafter at hand proposes and its logits, but hands over what a scripted one does.

    So the target accepts many and few tokens in turn, which a random draft would not bring about.
    """

    def __init__(self, inner: Any, module: nn.Module, scripted: Scripted) -> None:
        super().__init__(inner)
        self.scripted, self.calls, self.proposed = scripted, [], []
        self.hook = module.register_forward_hook(lambda _module, _inputs, logits: self.calls.append(logits.clone()))

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.scripted.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.scripted.observe(committed)

    def propose(self) -> Draft:
        self.calls.clear()
        tokens = self.inner.propose().tokens.clone()
        logits = torch.cat(list(self.calls), dim=1)[:, -tokens.shape[1] :]
        read = [torch.stack(row) for row in self.read]
        self.proposed.append((tokens, logits, read, [list(row) for row in self.following]))
        return self.scripted.propose()


def record(inner: Any, module: nn.Module, target: Target, prompts: Sequence[Sequence[int]]) -> Recorded:
    """A whole generation, ragged rows ending at different rounds, with about two drafts in three accepted."""
    answers = plain_answers(target, prompts, 40)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    recorded = Recorded(inner, module, Scripted(texts, inner.num_drafts, sometimes_wrong(0.7, 97)))
    stop_ids = frozenset({answers[0][9]}) if len(prompts) > 1 else frozenset()
    out = run(target, recorded, prompts, 40, stop_ids=stop_ids)
    recorded.hook.remove()
    assert len({count for step in out.rounds for count in step.accepted}) >= min(3, inner.num_drafts + 1)
    # A row that has ended stands still, and what is drafted for it is thrown away.
    for i, step in enumerate(out.rounds):
        tokens, logits, read, following = recorded.proposed[i]
        alive = [row for row, new in enumerate(step.emitted) if new is not None]
        recorded.proposed[i] = (
            tokens[alive],
            logits[alive],
            [read[row] for row in alive],
            [following[row] for row in alive],
        )
    return recorded


def propose(drafter: Any, hidden: Tensor, tokens: Tensor, counts: list[int]) -> list[list[int]]:
    drafter.begin(len(counts), 32)
    with torch.inference_mode():
        anchor = tokens[torch.arange(len(counts)), torch.tensor(counts) - 1]
        drafter.observe(Committed(hidden, tokens, anchor, [0] * len(counts), counts))
        drafts: list[list[int]] = drafter.propose().tokens.tolist()
    return drafts


@torch.inference_mode()
def eagle3_from_scratch(drafter: Eagle3Drafter, features: Tensor, tokens: list[int]) -> tuple[Tensor, list[int]]:
    """Logits [k, Vd] of one row's chain; every step reads the whole row again in one causal pass.

    Windows count the pairs up to the newest one alone.
    """
    draft, states = drafter.draft, drafter.draft.fuse(features)
    rotary = Rotary(8, drafter.config.rope_theta, len(tokens) + drafter.num_drafts, torch.device("cpu"), torch.float32)
    newest, window = len(tokens) - 1, drafter.config.window or len(tokens) + drafter.num_drafts

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        at, seen = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2])[None]
        mask = (seen <= at) & (seen > at.clamp(max=newest) - window)
        return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    logits, tokens = [], list(tokens)
    for _ in range(drafter.num_drafts):
        positions = rotary.at(torch.arange(len(tokens))[None])
        out = draft(drafter.embedding(torch.tensor([tokens])), states[None], positions, attend)[0, -1:]
        logits.append(draft.logits(out)[0])
        tokens.append(int(draft.target_ids(logits[-1].argmax())))
        states = torch.cat([states, out])
    return torch.stack(logits), tokens[-drafter.num_drafts :]


def reduced() -> Eagle3Draft:
    """A draft that knows 40 of the 97 tokens."""
    config = Eagle3Config(**BODY, draft_vocab_size=40, target_layer_ids=(0, 1, 2))
    draft = enlarged(Eagle3Draft(config))
    counts = torch.randint(0, 1000, (97,), generator=torch.Generator().manual_seed(1))
    draft.d2t, draft.t2d = vocabulary_map(counts, 40)
    return draft


def randomised(draft: Any, seed: int = 0) -> Any:
    """Norm weights and biases too: a variant that ignores one of them must show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    return draft.eval()


def without_head(draft: DFlashDraft) -> DFlashDraft:
    bare = DFlashDraft(replace(draft.config, correction=None))
    bare.load_state_dict({name: draft.state_dict()[name] for name in bare.state_dict()})
    return bare.eval()
