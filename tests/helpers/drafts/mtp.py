"""Tiny MTP heads of random weights, and the same heads by their formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from dflash_bench.engine.drafters.mtp import MTPDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft


def heads(model: Any, seed: int = 0) -> MTPDraft:
    """Random heads for this target; every weight matters, norms too."""
    draft = MTPDraft(MTPConfig.of(model.config.get_text_config())).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name) * 0.7)
    return draft.eval()


def drafter(target: Target, num_drafts: int = 3, rule: str = "match", draft: MTPDraft | None = None) -> MTPDrafter:
    return MTPDrafter(draft or heads(target.model), target.embedding, target.head, num_drafts, rule)


class Formula:
    """The heads of one target, for a single row: no cache, no module of theirs, all products in sight."""

    def __init__(self, draft: MTPDraft, model: Any) -> None:
        self.w, self.text, self.model = draft.state_dict(), draft.config.text, model
        self.is_centred = self.text.model_type.startswith(("qwen3_5", "qwen3_next"))
        self.size = draft.config.head_dim

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"] + (1 if self.is_centred else 0)
        return x / (x.square().mean(dim=-1, keepdim=True) + self.text.rms_norm_eps).sqrt() * weight

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.w[f"layers.0.{name}.weight"])

    def turned(self, x: Tensor) -> Tensor:
        """x [N, heads, D] with its first values rotated by their position."""
        share = self.text.rope_parameters.get("partial_rotary_factor", 1.0)
        width, theta = int(self.size * share), self.text.rope_parameters["rope_theta"]
        angle = torch.arange(len(x))[:, None] * theta ** -(torch.arange(0, width, 2) / width)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = x[..., :width].chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, x[..., width:]], dim=-1)

    def attention(self, x: Tensor) -> Tensor:
        heads, groups, size = self.text.num_attention_heads, self.text.num_key_value_heads, self.size
        query, gate = self.project(x, "self_attn.q_proj").view(len(x), heads, -1), None
        if self.is_centred:
            query, gate = query[..., :size], query[..., size:]
        key, value = (self.project(x, f"self_attn.{part}_proj").view(len(x), groups, size) for part in "kv")
        if "layers.0.self_attn.q_norm.weight" in self.w:
            query, key = self.norm(query, "layers.0.self_attn.q_norm"), self.norm(key, "layers.0.self_attn.k_norm")
        query, key = self.turned(query), self.turned(key)
        out, later = torch.zeros_like(query), torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        for head in range(heads):
            group = head // (heads // groups)
            scores = query[:, head] @ key[:, group].T / size**0.5
            out[:, head] = scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value[:, group]
        if gate is not None:
            out = out * gate.sigmoid()
        return self.project(out.flatten(1), "self_attn.o_proj")

    def feed(self, x: Tensor) -> Tensor:
        if "layers.0.mlp.gate_proj.weight" in self.w:
            return self.expert(x, *(self.w[f"layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
        shares = self.project(x, "mlp.gate").softmax(dim=-1)
        rows = []
        for row, share in zip(x, shares, strict=True):
            best = share.topk(self.text.num_experts_per_tok)
            total = best.values.sum() if getattr(self.text, "norm_topk_prob", True) else 1
            out = torch.zeros_like(row)
            for value, index in zip(best.values, best.indices, strict=True):
                gate, up = self.w["layers.0.mlp.experts.gate_up_proj"][index].chunk(2)
                out += value / total * self.expert(row, gate, up, self.w["layers.0.mlp.experts.down_proj"][index])
            rows.append(out)
        mixed = torch.stack(rows)
        if "layers.0.mlp.shared_expert_gate.weight" not in self.w:
            return mixed
        names = (f"layers.0.mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down"))
        shared = self.expert(x, *(self.w[name] for name in names))
        return mixed + self.project(x, "mlp.shared_expert_gate").sigmoid() * shared

    @staticmethod
    def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def states(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Return the head's input [N, H] for the tokens that follow states [N, H]."""
        embedded = self.model.get_input_embeddings().weight[torch.tensor(tokens)]
        pair = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = torch.cat(pair, dim=-1) @ self.w["fc.weight"].T
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"))
        x = x + self.feed(self.norm(x, "layers.0.post_attention_layernorm"))
        return self.norm(x, "norm")

    def last_states(self, text: Sequence[int]) -> Tensor:
        """The target's states [N, H], behind its final norm."""
        states: Tensor = self.model.get_decoder()(torch.tensor([list(text)])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def drafts(self, text: Sequence[int], num_drafts: int) -> tuple[list[int], Tensor]:
        """The tokens drafted behind a text, whose last token the target has not read, and their logits [N, V]."""
        hidden = self.last_states(text[:-1])
        tokens, logits = list(text[1:]), []
        for _ in range(num_drafts):
            out = self.states(tokens, hidden)[-1:]
            logits.append(linear(out, self.model.get_output_embeddings().weight)[0])
            tokens, hidden = [*tokens, int(logits[-1].argmax())], torch.cat([hidden, out])
        return tokens[-num_drafts:], torch.stack(logits)
