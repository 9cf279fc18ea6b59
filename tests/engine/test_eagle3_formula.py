"""Our EAGLE-3 layer against its formula, written out here position by position, in float64 and without a cache.

The formula reads tensors by their names in SafeAILab checkpoints and shares no code with the network. Each convention
it holds (pairing, positions, residual base, what is fed back) is turned around once, to show that this would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.models import loading
from dflash_bench.models.nets.dflash import initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft, vocabulary_map
from helpers.each import each

VOCABULARY, HIDDEN, NUM_DRAFTS = 53, 24, 5
CONFIG = Eagle3Config(
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=VOCABULARY,
    draft_vocab_size=31,
    target_layer_ids=(1, 2, 4),
    num_target_layers=8,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
)


@dataclass(frozen=True)
class Formula:
    """Meaning of the weights; every field but the first three is a convention, right as it stands."""

    config: Eagle3Config
    weights: dict[str, Tensor]
    embedding: Tensor
    first_position: int = 0
    gap_after_prefill: int = 0
    base_is_normed: bool = False
    feedback_is_normed: bool = False
    feature_first: bool = False

    def chain(self, features: Tensor, tokens: Sequence[int], num_drafts: int) -> tuple[Tensor, list[int]]:
        """Logits [num_drafts, Vd] and drafts after features [n, K * H] of positions 0 .. n-1.

        tokens [n] are x_1 .. x_n: each stands beside the feature of the position before it.
        """
        states = [self.weights["fc.weight"] @ feature for feature in features.double()]
        num_read, tokens = len(states), list(tokens)
        logits = []
        for _ in range(num_drafts):
            out = self.outputs(states, tokens, num_read)[-1]
            logits.append(self.weights["lm_head.weight"] @ self.norm(out, "norm"))
            best = int(logits[-1].argmax())
            tokens.append(best + int(self.weights["d2t"][best]))
            states.append(self.norm(out, "norm") if self.feedback_is_normed else out)
        return torch.stack(logits), tokens[num_read:]

    def outputs(self, states: list[Tensor], tokens: list[int], num_read: int) -> list[Tensor]:
        """One causal pass over all pairs (x_{t+1}, h_t)."""
        pairs = [self.pair(token, state) for token, state in zip(tokens, states, strict=True)]
        positions = [
            self.first_position + t + (self.gap_after_prefill if t >= num_read else 0) for t in range(len(pairs))
        ]
        queries = [self.heads("q_proj", pair, at) for pair, at in zip(pairs, positions, strict=True)]
        keys = [self.heads("k_proj", pair, at) for pair, at in zip(pairs, positions, strict=True)]
        values = [self.heads("v_proj", pair, None) for pair in pairs]
        return [self.layer(states[t], queries[t], keys[: t + 1], values[: t + 1]) for t in range(len(pairs))]

    def pair(self, token: int, state: Tensor) -> Tensor:
        both = [
            self.norm(self.embedding[token].double(), "midlayer.input_layernorm"),
            self.norm(state, "midlayer.hidden_norm"),
        ]
        return torch.cat(both[::-1] if self.feature_first else both)

    def heads(self, name: str, pair: Tensor, position: int | None) -> list[Tensor]:
        projected = self.weights[f"midlayer.self_attn.{name}.weight"] @ pair
        heads = projected.split(self.config.head_dim)
        return [head if position is None else self.turned(head, position) for head in heads]

    def turned(self, head: Tensor, position: int) -> Tensor:
        """Component i and the one half a head further are a plane, turned by position * theta^(-2i / D)."""
        half = self.config.head_dim // 2
        out = head.clone()
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2 * i / self.config.head_dim)
            left, right = head[i], head[i + half]
            out[i] = left * math.cos(angle) - right * math.sin(angle)
            out[i + half] = right * math.cos(angle) + left * math.sin(angle)
        return out

    def layer(self, state: Tensor, query: list[Tensor], keys: list[list[Tensor]], values: list[list[Tensor]]) -> Tensor:
        mixed = []
        for head, q in enumerate(query):
            shared = head * self.config.num_kv_heads // self.config.num_heads
            scores = torch.stack([q @ key[shared] for key in keys]) / math.sqrt(self.config.head_dim)
            weights = scores.softmax(dim=0)
            mixed.append(sum(w * value[shared] for w, value in zip(weights, values, strict=True)))
        base = self.norm(state, "midlayer.hidden_norm") if self.base_is_normed else state
        x = base + self.weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
        inner = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (self.weights[f"midlayer.mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        return x + self.weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]


def formula_of(draft: Eagle3Draft, embedding: nn.Module) -> Formula:
    weights = {name: tensor if name == "d2t" else tensor.double() for name, tensor in draft.state_dict().items()}
    return Formula(draft.config, weights, embedding.weight)  # type: ignore[arg-type]


class Case:
    """A random draft, and one row of random text with its features."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.draft = Eagle3Draft(CONFIG)
        initialise(self.draft, 4)
        with torch.no_grad():
            for parameter in self.draft.parameters():
                # Norms that differ from one another tell which of them is applied to what.
                parameter.mul_(9) if parameter.ndim == 2 else parameter.uniform_(0.5, 2, generator=generator)
        counts = torch.randint(0, 1000, (VOCABULARY,), generator=generator)
        self.draft.d2t, self.draft.t2d = vocabulary_map(counts, CONFIG.draft_vocab_size)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.embedding.weight.data.normal_(generator=generator)
        self.features = torch.randn(14, 3 * HIDDEN, generator=generator)
        self.tokens = torch.randint(0, VOCABULARY, (14,), generator=generator).tolist()
        self.formula = formula_of(self.draft, self.embedding)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@torch.inference_mode()
def drafted(
    draft: Eagle3Draft, embedding: nn.Module, features: Tensor, tokens: list[int], parts: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """The engine's proposal after reading the row in parts of these lengths, drafting after each part."""
    drafter = Eagle3Drafter(draft, embedding, NUM_DRAFTS)
    logits: list[Tensor] = []
    head: Any = drafter.network.head
    hook = head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0, -1].clone()))
    drafter.begin(1, len(tokens) + NUM_DRAFTS)
    start, proposed = 0, []
    for length in parts:
        part = slice(start, start + length)
        read = torch.tensor([tokens[part]])
        drafter.observe(Committed(features[None, part], read, read[:, -1], [start], [length]))
        logits.clear()
        proposed = drafter.propose().tokens[0].tolist()
        start += length
    hook.remove()
    return torch.stack(logits).double(), proposed


@each("parts", [[1], [9], [14], [9, 1], [6, 2, 1, 5]])
def test_prefill_with_features_then_stepping_equals_one_causal_pass(case: Case, parts: list[int]) -> None:
    """Rows read in several parts: real features replace what was made up in between."""
    length = sum(parts)
    features, tokens = case.features[:length], case.tokens[:length]
    logits, proposed = drafted(case.draft, case.embedding, features, tokens, parts)
    expected, drafts = case.formula.chain(features, tokens, NUM_DRAFTS)
    assert proposed == drafts
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


CONVENTIONS: dict[str, Any] = {
    "a gap between the positions read and those drafted": {"gap_after_prefill": 1},
    "the normed state as residual base": {"base_is_normed": True},
    "the normed output fed back": {"feedback_is_normed": True},
    "the feature before the embedding": {"feature_first": True},
}


@each("changes", CONVENTIONS.values())
def test_any_other_convention_would_be_seen(case: Case, changes: dict[str, Any]) -> None:
    logits, _ = drafted(case.draft, case.embedding, case.features, case.tokens, [14])
    other, _ = replace(case.formula, **changes).chain(case.features, case.tokens, NUM_DRAFTS)
    assert (logits - other).abs().max() > 0.05 * other.abs().max()


def test_a_token_beside_its_own_feature_would_be_seen(case: Case) -> None:
    logits, _ = drafted(case.draft, case.embedding, case.features[:13], case.tokens[1:], [13])
    shifted, _ = case.formula.chain(case.features[:13], case.tokens[:13], NUM_DRAFTS)
    assert (logits - shifted).abs().max() > 0.05 * shifted.abs().max()


def test_positions_count_from_anywhere(case: Case) -> None:
    """Publishers start at 0 or 1: rotary attention sees differences only, so both are the same draft."""
    here, drafts = case.formula.chain(case.features, case.tokens, NUM_DRAFTS)
    there, same = replace(case.formula, first_position=1).chain(case.features, case.tokens, NUM_DRAFTS)
    assert drafts == same
    torch.testing.assert_close(here, there)


@torch.inference_mode()
def test_nano_drafts_by_the_formula_from_the_inputs_of_layers_2_half_and_n_minus_3() -> None:
    models = loading.load("nano", ["eagle3"], "cpu", torch.float32)
    draft, embedding = models.drafts["eagle3"], models.target.get_input_embeddings()
    assert isinstance(draft, Eagle3Draft)
    ids = models.tokenizer.encode("What is 17 plus 25?", add_special_tokens=False)
    out = models.target(torch.tensor([ids]), output_hidden_states=True)
    depth = models.target.config.num_hidden_layers
    # Index 0 is the embedding's output, so index i is the input of layer i.
    features = torch.cat([out.hidden_states[i][0] for i in (2, depth // 2, depth - 3)], dim=-1)
    tokens = [*ids[1:], int(out.logits[0, -1].argmax())]
    expected, drafts = formula_of(draft, embedding).chain(features, tokens, NUM_DRAFTS)
    logits, proposed = drafted(draft, embedding, features, tokens, [len(ids)])
    assert proposed == drafts
    assert (logits - expected).abs().max() < 1e-3
