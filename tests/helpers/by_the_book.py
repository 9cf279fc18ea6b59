"""Block drafts computed once more, from their files alone: no cache, no module of ours, one row, everything in sight.

It is written from the published descriptions of each kind, not from our code, and reads `config.json` and tensors as a
publisher's loader would. A round is read anew from the target's states up to the anchor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class Drafted:
    tokens: list[int]
    margin: float
    """The least distance between the best and the second best in any choice: below rounding, tokens may differ."""
    confidence: list[float] = field(default_factory=list)
    """How likely each token is to be accepted if all before it are, by a draft's own head."""

    def before(self, threshold: float) -> int:
        """How many tokens stand before the first whose confidence is below the threshold."""
        return next((i for i, one in enumerate(self.confidence) if one < threshold), len(self.confidence))

    def is_near(self, threshold: float, rounding: float) -> bool:
        return any(abs(one - threshold) < rounding for one in self.confidence)


class Book:
    """A draft's folder beside its target, a model of transformers."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.whole = json.loads((folder / "config.json").read_text())
        self.w: dict[str, Tensor] = {
            name: t.float() if t.is_floating_point() else t
            for name, t in load_file(folder / "model.safetensors").items()
        }
        self.model, self.inner = model, self.whole.get("dflash_config") or {}
        self.body = self.whole.get("transformer_layer_config") or self.whole
        self.is_speculators = "speculators_model_type" in self.whole
        self.size = self.key("block_size", 16)
        self.heads, self.groups = self.body["num_attention_heads"], self.body["num_key_value_heads"]
        self.width = self.body["head_dim"]

    def key(self, name: str, default: Any = None) -> Any:
        return self.inner.get(name, self.whole.get(name, default))

    @property
    def is_shifted(self) -> bool:
        kind = self.kind
        if kind == "dspark":
            return True
        return bool(self.key("shift_label") if kind == "domino" else self.key("sample_from_anchor", False))

    @property
    def kind(self) -> str:
        markers = {
            "candidate_selector": "dflash2",
            "markov_head": "dspark",
            "prefix_gru": "domino",
            "lilicorr": "lilicorr",
            "refiner_head": "xpress",
        }
        return next((kind for name, kind in markers.items() if any(one.startswith(name) for one in self.w)), "dflash")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.body["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [heads, N, D]"""
        parameters = self.body.get("rope_parameters") or {}
        theta = parameters.get("rope_theta", self.body.get("rope_theta", 10000.0))
        angle = positions[:, None] * theta ** -(torch.arange(0, self.width, 2) / self.width)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        half = self.width // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def embed(self, ids: Any) -> Tensor:
        table = self.w.get("embed_tokens.weight")
        return (self.model.get_input_embeddings().weight if table is None else table)[torch.as_tensor(ids)].float()

    def head(self, hidden: Tensor) -> Tensor:
        own = self.w.get("lm_head.weight")
        logits = linear(hidden, self.model.get_output_embeddings().weight.float() if own is None else own)
        logits = logits * (self.key("output_multiplier") or 1)
        cap = self.key("final_logit_softcapping")
        return cap * (logits / cap).tanh() if cap else logits

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids + self.w["d2t"][ids] if "d2t" in self.w else ids

    def contexts(self, features: list[Tensor]) -> list[Tensor]:
        """The target's states [N, H] that each layer reads, one per tap."""
        count = self.body["num_hidden_layers"]
        mix = self.w.get("layer_fusion_weights", self.w.get("fusion_weights"))
        if mix is None:
            return [self.norm(self.project(torch.cat(features, -1), "fc"), "hidden_norm")] * count
        mixed = [sum(share * one for share, one in zip(row.softmax(0), features, strict=True)) for row in mix]
        return [
            self.norm(one, f"fusion_norms.{i}" if "fusion_norms.0.weight" in self.w else "hidden_norm")
            for i, one in enumerate(mixed)
        ]

    def sees(self, layer: int, anchor: int) -> Tensor:
        """Whether query i of the block sees key j, [B, anchor + B]."""
        types = self.body.get("layer_types") or ["full_attention"] * self.body["num_hidden_layers"]
        slides = types[layer] == "sliding_attention"
        i, j = torch.arange(anchor, anchor + self.size)[:, None], torch.arange(anchor + self.size)[None]
        window = self.body.get("sliding_window") if self.body.get("use_sliding_window") else None
        if self.is_speculators:
            non_causal = self.whole.get("sliding_window_non_causal", self.kind == "dflash2")
            if not slides or window is None:
                return torch.ones_like(i >= j)
            inside = (j >= anchor) & (torch.ones_like(i >= j) if non_causal else j <= i)
            return inside | ((j < anchor) & (j >= anchor - window)).expand_as(inside)
        if self.inner.get("use_swa"):
            slides, window = True, self.inner["swa_window_size"]
        given = [
            self.whole.get("is_causal"),
            self.inner.get("is_causal"),
            self.inner.get("causal"),
            self.inner.get("causal_head"),
        ]
        causal = next((one for one in given if one is not None), types[layer] == "sliding_attention")
        seen = (j <= i) if causal else torch.ones_like(i >= j)
        if slides and window is not None:
            seen = seen & (i - j < window)
            if not causal:
                seen = seen & (j - i < window)
        return seen

    def filter(self, x: Tensor, normed: Tensor, name: str, side: int) -> Tensor:
        base = self.w[f"{name}.base_kernel"]
        taps, hidden = base.shape[1:]
        projected = linear(normed, self.w[f"{name}.kernel_projection.weight"]).view(len(x), 2, taps, -1)
        group = hidden // projected.shape[-1]
        out = torch.zeros_like(x)
        for slot in range(len(x)):
            for tap in range(min(taps, slot + 1)):
                factor = base[side, tap] + projected[slot, side, tap].repeat_interleave(group)
                out[slot] += factor * x[slot - tap]
        return out

    def hidden(self, features: list[Tensor], anchor: int, token: int) -> Tensor:
        """The final-normed outputs [B, H] of the block whose anchor stands at this place."""
        mask = self.key("mask_token_id")
        x = self.embed([token, *[mask] * (self.size - 1)])
        if "mask_embedding" in self.w:
            x[1:] = self.w["mask_embedding"]
        x = x * (self.key("input_embedding_scale") or 1)
        positions = torch.arange(anchor + self.size)
        scale = self.key("attention_value_scale") or 1
        for layer, context in enumerate(self.contexts([one[:anchor] for one in features])):
            at = f"layers.{layer}"
            has_conv = f"{at}.attention_conv.base_kernel" in self.w

            def split(y: Tensor) -> Tensor:
                return y.unflatten(-1, (-1, self.width)).transpose(0, 1)

            normed = self.norm(x, f"{at}.input_layernorm")
            read = self.filter(normed, normed, f"{at}.attention_conv", 0) if has_conv else normed
            query = self.norm(split(self.project(read, f"{at}.self_attn.q_proj")), f"{at}.self_attn.q_norm")
            ours = "_target" if f"{at}.self_attn.k_proj_target.weight" in self.w else ""
            keys = [self.project(context, f"{at}.self_attn.k_proj{ours}"), self.project(read, f"{at}.self_attn.k_proj")]
            values = [
                self.project(context, f"{at}.self_attn.v_proj{ours}"),
                self.project(read, f"{at}.self_attn.v_proj"),
            ]
            key = self.turned(self.norm(split(torch.cat(keys)), f"{at}.self_attn.k_norm"), positions)
            value, query = split(torch.cat(values)) * scale, self.turned(query, positions[anchor:])
            seen, out = self.sees(layer, anchor), torch.zeros_like(query)
            for head in range(self.heads):
                group = head // (self.heads // self.groups)
                scores = (query[head] @ key[group].T / self.width**0.5).masked_fill(~seen, -torch.inf)
                if (sinks := self.w.get(f"{at}.self_attn.attention_sink_bias")) is not None:
                    total = scores.exp().sum(-1, keepdim=True) + sinks[head].exp()
                    out[head] = scores.exp() / total @ value[group]
                else:
                    out[head] = scores.softmax(-1) @ value[group]
            added = self.project(out.transpose(0, 1).flatten(1), f"{at}.self_attn.o_proj")
            x = x + (self.filter(added, normed, f"{at}.attention_conv", 1) if has_conv else added)
            normed = self.norm(x, f"{at}.post_attention_layernorm")
            read = self.filter(normed, normed, f"{at}.mlp_conv", 0) if has_conv else normed
            gate, up = (self.project(read, f"{at}.mlp.{part}_proj") for part in ("gate", "up"))
            added = self.project(silu(gate) * up, f"{at}.mlp.down_proj")
            x = x + (self.filter(added, normed, f"{at}.mlp_conv", 1) if has_conv else added)
        return self.norm(x, "norm")

    @torch.inference_mode()
    def drafts(self, features: list[Tensor], text: Sequence[int]) -> Drafted:
        """Draft after a text, given the target's states [N, H] by tap, for all tokens but the last."""
        anchor = len(text) - 1
        hidden = self.hidden(features, anchor, text[-1])
        self.margin, self.confidence = float("inf"), []
        slots = hidden if self.is_shifted else hidden[1:]
        if self.kind == "domino" and self.is_shifted:
            slots = hidden[:-1]
        draft = getattr(self, self.kind)(hidden, slots, list(text), [one[:anchor] for one in features])
        return Drafted([int(token) for token in draft], self.margin, self.confidence)

    def best(self, scores: Tensor) -> int:
        top = scores.topk(2).values
        self.margin = min(self.margin, float(top[0] - top[1]))
        return int(scores.argmax())

    def dflash(self, _hidden: Tensor, slots: Tensor, _text: list[int], _features: Any) -> list[int]:
        return [int(self.target_ids(torch.tensor(self.best(row)))) for row in self.head(slots)]

    def dflash2(self, _hidden: Tensor, slots: Tensor, text: list[int], _features: Any) -> list[int]:
        last, out = text[-1], []
        for h, logits in zip(slots, self.head(slots), strict=True):
            values, ids = logits.topk(self.key("selector_top_k", 16))
            projected = linear(h, self.w["candidate_selector.hidden_projection.weight"])
            joined = self.w["candidate_selector.predecessor_codebook"][last] * projected
            gains = self.w["candidate_selector.successor_codebook"][ids] @ joined
            last = int(self.target_ids(ids[self.best(values + gains)]))
            out.append(last)
        return out

    def dspark(self, _hidden: Tensor, slots: Tensor, text: list[int], _features: Any) -> list[int]:
        kind = self.key("markov_head_type", "vanilla")
        first, second = self.w["markov_head.markov_w1.weight"], self.w["markov_head.markov_w2.weight"]
        state, last, out = torch.zeros(first.shape[1]), text[-1], []
        for h, logits in zip(slots, self.head(slots), strict=True):
            e = first[last]
            if "confidence_head.proj.weight" in self.w:
                read = torch.cat([h, e]) if self.key("confidence_head_with_markov") else h
                self.confidence.append(float(self.project(read, "confidence_head.proj").sigmoid()))
            if kind == "vanilla":
                bias = e
            elif kind == "gated":
                bias = self.project(torch.cat([h, e]), "markov_head.gate_proj").sigmoid() * e
            else:
                gate, candidate, output = self.project(torch.cat([state, e, h]), "markov_head.joint_proj").chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                bias = output.tanh()
            last = int(self.target_ids(torch.tensor(self.best(logits + second @ bias))))
            out.append(last)
        return out

    def domino(self, _hidden: Tensor, slots: Tensor, text: list[int], _features: Any) -> list[int]:
        size = self.w["prefix_gru.weight_hh_l0"].shape[1]
        gru = torch.nn.GRU(self.body["hidden_size"], size, bias=False, batch_first=True)
        gru.load_state_dict({name.removeprefix("prefix_gru."): t for name, t in self.w.items() if "prefix_gru" in name})
        read, out = [text[-1]], []
        for slot, (h, logits) in enumerate(zip(slots, self.head(slots), strict=True)):
            state = gru(self.embed(read)[None])[1][0, 0]
            if slot >= self.key("pure_draft_prefix_len"):
                joined = silu(linear(torch.cat([h, state]), self.w["embed_proj.0.weight"]))
                logits = logits + linear(joined, self.w["embed_proj.2.weight"])
            out.append(int(self.target_ids(torch.tensor(self.best(logits)))))
            read.append(out[-1])
        return out

    def xpress(self, hidden: Tensor, slots: Tensor, text: list[int], _features: Any) -> list[int]:
        w = {name.removeprefix("refiner_head."): t for name, t in self.w.items()}
        base, passes = self.head(slots), self.key("num_jacobi_passes", self.key("xpress_num_passes", 6))
        guesses = [int(self.target_ids(torch.tensor(self.best(row)))) for row in base]
        down = torch.cat(
            [hidden @ w["down_h.weight"].T, (hidden.mean(0) @ w["down_g.weight"].T).expand(self.size, -1)], -1
        )
        for _ in range(passes):
            before = [text[-1], *guesses[:-1]] if self.is_shifted else [text[-2], text[-1], *guesses[:-1]]
            x = linear(torch.cat([down, w["token_embed.weight"][torch.tensor(before)]], -1), w["in_proj.weight"])
            mixed = x.clone()
            for k in range(self.size):
                for j in range(k + 1):
                    mixed[k] += w["mix_l"][:, k, j] * x[j]
            x = mixed
            x = x + linear(silu(linear(x, w["mlp_gate.weight"])) * linear(x, w["mlp_up.weight"]), w["mlp_down.weight"])
            bias = linear(x if self.is_shifted else x[1:], w["readout.weight"])
            guesses = [int(self.target_ids(torch.tensor(self.best(row)))) for row in base + bias]
        return guesses

    def lilicorr(self, _hidden: Tensor, slots: Tensor, _text: list[int], features: list[Tensor]) -> list[int]:
        w = {name.removeprefix("lilicorr."): t for name, t in self.w.items()}
        top_k, eps = self.key("lilicorr_candidate_topk"), self.key("lilicorr_vector_eps")
        heads = self.key("lilicorr_num_heads")

        def at(x: Tensor, name: str) -> Tensor:
            return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return self.norm(x, f"lilicorr.{name}")

        def unit(x: Tensor) -> Tensor:
            return x / x.norm(dim=-1, keepdim=True).clamp(min=eps)

        log_p, ids = self.head(slots).log_softmax(-1).topk(top_k)
        rank = torch.arange(top_k).expand_as(log_p)
        told = torch.stack([log_p, log_p.exp(), log_p - log_p[:, :1], rank / (top_k - 1), (rank == 0).float()], -1)
        told = torch.nn.functional.layer_norm(told, (5,), w["feature_mlp.0.weight"], w["feature_mlp.0.bias"])
        tokens = self.target_ids(ids)
        x = self.embed(tokens)
        x = at(x, "token_proj") if "token_proj.weight" in w else x
        x = x + at(slots, "pass_hidden_proj")[:, None] + at(silu(at(told, "feature_mlp.1")), "feature_mlp.3")
        x = x + w["slot_embedding"][0, 0, : len(slots)] + w["rank_embedding"][0, 0]
        x = x.flatten(0, 1)
        slot = torch.arange(len(x)) // top_k
        bias = w["relative_slot_bias"][:, slot[:, None] - slot + self.size - 1]
        bias = bias + (slot[:, None] == slot) * w["same_slot_bias"][:, None, None]
        for layer in range(self.key("lilicorr_num_layers")):
            part = f"layers.{layer}"
            normed = norm(x, f"{part}.attn_norm")
            q, k, v = linear(normed, w[f"{part}.attn.in_proj_weight"], w[f"{part}.attn.in_proj_bias"]).chunk(3, -1)
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(0, 1) for y in (q, k, v))
            mixed = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
            x = x + at(mixed.transpose(0, 1).flatten(1), f"{part}.attn.out_proj")
            x = x + at(silu(at(norm(x, f"{part}.mlp_norm"), f"{part}.mlp.0")), f"{part}.mlp.2")
        x = norm(x, "output_norm").view(len(slots), top_k, -1)
        anchor = norm(at(self.contexts([one[-1:] for one in features])[0][0], "context_proj"), "anchor_norm")
        beside = anchor.expand_as(x)
        f = silu(at(torch.cat([x, beside, x * beside], -1), "factor_input_proj"))
        outs, ins, vector = unit(at(f, "out_head")), unit(at(f, "in_head")), unit(at(anchor, "anchor_out_head"))
        chosen = []
        for i in range(len(slots)):
            index = self.best(self.key("lilicorr_logit_scale") * ins[i] @ vector)
            chosen.append(int(tokens[i, index]))
            vector = outs[i, index]
        return chosen


def states_of(model: Any, text: Sequence[int], taps: Sequence[int]) -> list[Tensor]:
    """The states [N, H] behind the tapped layers, as transformers counts them: the last is behind the final norm."""
    with torch.inference_mode():
        states = model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    return [states[tap + 1][0] for tap in taps]
