"""Drafts of random shapes and weights, in their publishers' formats: what nobody has published yet, but might."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

KINDS = tuple(
    """
    dflash jetspec dflash2 dflare dspark deepspec speculators-dspark domino xpress lilicorr speculators-dflash
    """.split()
)


class Made:
    """A draft for a target of `hidden` and `vocabulary`, decided by a seed."""

    def __init__(self, kind: str, seed: int, hidden: int, vocabulary: int, num_target_layers: int) -> None:
        self.kind, self.r = kind, Random(f"{kind} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.hidden, self.vocabulary, self.num_target_layers = hidden, vocabulary, num_target_layers
        self.tensors: dict[str, Tensor] = {}
        self.dtype = self.r.choice([torch.float32, torch.bfloat16])
        self.config = self.body()
        getattr(self, kind.replace("-", "_"))()

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: t.contiguous() for name, t in self.tensors.items()}, folder / "model.safetensors")
        return folder

    def add(self, name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        values = torch.randn(*shape, generator=self.generator) * scale + mean
        self.tensors[name] = values.to(self.dtype)

    def linear(self, name: str, rows: int, columns: int, bias: bool = False, scale: float = 1.0) -> None:
        self.add(f"{name}.weight", rows, columns, scale=scale / columns**0.5)
        if bias:
            self.add(f"{name}.bias", rows, scale=0.2)

    def norm(self, name: str, size: int) -> None:
        self.add(f"{name}.weight", size, scale=0.2, mean=1.0)

    def body(self) -> dict[str, Any]:
        r = self.r
        self.layers, self.block = r.choice([1, 2, 3]), r.choice([2, 3, 5, 8, 11])
        self.groups = r.choice([1, 2, 3])
        self.heads, self.width = self.groups * r.choice([1, 2, 3]), r.choice([4, 6, 8, 10, 16, 24])
        self.inner, self.bias = r.choice([20, 40, 56]), r.random() < 0.3
        self.taps = sorted(r.sample(range(self.num_target_layers - 1), r.choice([1, 2, 3])))
        slides = r.random() < 0.6
        self.types = [
            r.choice(["full_attention", "sliding_attention"]) if slides else "full_attention"
            for _ in range(self.layers)
        ]
        at, keys = self.hidden, self.groups * self.width
        self.linear("fc", at, at * len(self.taps))
        self.norm("hidden_norm", at)
        self.norm("norm", at)
        for layer in range(self.layers):
            name = f"layers.{layer}"
            self.norm(f"{name}.input_layernorm", at)
            self.norm(f"{name}.post_attention_layernorm", at)
            for part, rows in (("q", self.heads * self.width), ("k", keys), ("v", keys)):
                self.linear(f"{name}.self_attn.{part}_proj", rows, at, self.bias)
            self.linear(f"{name}.self_attn.o_proj", at, self.heads * self.width, self.bias)
            for part in "qk":
                self.add(f"{name}.self_attn.{part}_norm.weight", self.width, scale=0.3, mean=2.0)
            self.linear(f"{name}.mlp.gate_proj", self.inner, at)
            self.linear(f"{name}.mlp.up_proj", self.inner, at)
            self.linear(f"{name}.mlp.down_proj", at, self.inner)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": at,
            "head_dim": self.width,
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "intermediate_size": self.inner,
            "hidden_act": "silu",
            "rms_norm_eps": r.choice([1e-6, 1e-5]),
            "rope_theta": r.choice([10000.0, 1e6]),
            "rope_scaling": None,
            "attention_bias": self.bias,
            "max_position_embeddings": 512,
            "block_size": self.block,
            "layer_types": self.types,
            "use_sliding_window": "sliding_attention" in self.types,
            "sliding_window": r.choice([1, 2, 4, 7, 30]) if "sliding_attention" in self.types else None,
            "num_target_layers": self.num_target_layers,
            "tie_word_embeddings": False,
            "dtype": str(self.dtype).removeprefix("torch."),
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": self.taps},
        }

    @property
    def in_block(self) -> dict[str, Any]:
        return self.config["dflash_config"]  # type: ignore[no-any-return]

    def dflash(self) -> None:
        r = self.r
        if r.random() < 0.4:
            self.config["is_causal"] = r.choice([True, False])
        for key, values in (
            ("input_embedding_scale", (0.5, 6.0)),
            ("output_multiplier", (0.3,)),
            ("final_logit_softcapping", (3.0,)),
            ("attention_value_scale", (0.7,)),
        ):
            if r.random() < 0.3:
                self.in_block[key] = r.choice(values)
        if r.random() < 0.25:
            self.in_block.update({"use_swa": True, "swa_window_size": r.choice([2, 5])})
        if r.random() < 0.3:
            self.add("mask_embedding", self.hidden)
        if r.random() < 0.3:
            self.in_block["attention_sink_bias"] = True
            for layer in range(self.layers):
                self.add(f"layers.{layer}.self_attn.attention_sink_bias", self.heads)
        if r.random() < 0.3:
            self.taps[-1] = self.num_target_layers - 1

    def jetspec(self) -> None:
        self.config |= {
            "layer_types": ["full_attention"] * self.layers,
            "use_sliding_window": False,
            "sliding_window": None,
        }
        self.in_block[self.r.choice(["causal_head", "causal"])] = True

    def dflash2(self) -> None:
        r = self.r
        rank, top_k = r.choice([1, 5, 8]), r.choice([2, 4, 16])
        size = r.choice([one for one in (1, 2, 4, 8, 16) if self.hidden % one == 0])
        taps = r.choice([1, 2, 3, 4])
        self.config["architectures"] = ["DFlash2DraftModel"]
        if r.random() < 0.5:
            self.config["is_causal"] = False
        self.in_block.update(
            {"selector_rank": rank, "selector_top_k": top_k, "conv_kernel_size": taps, "conv_group_size": size}
        )
        if r.random() < 0.4:
            self.in_block.update({"output_multiplier": 0.5, "final_logit_softcapping": 4.0})
        self.second(rank, taps, size, self.vocabulary)

    def second(self, rank: int, taps: int, size: int, num_ids: int) -> None:
        self.linear("candidate_selector.hidden_projection", rank, self.hidden)
        self.add("candidate_selector.predecessor_codebook", self.vocabulary, rank)
        self.add("candidate_selector.successor_codebook", num_ids, rank)
        for layer in range(self.layers):
            for part in ("attention_conv", "mlp_conv"):
                self.add(f"layers.{layer}.{part}.base_kernel", 2, taps, self.hidden, scale=0.4)
                self.linear(
                    f"layers.{layer}.{part}.kernel_projection", 2 * taps * self.hidden // size, self.hidden, scale=0.3
                )

    def dflare(self) -> None:
        del self.tensors["fc.weight"]
        self.config["architectures"] = ["QwenDFlareDraftModel"]
        self.add("layer_fusion_weights", self.layers, len(self.taps))
        for layer in range(self.layers):
            for part in "kv":
                name = f"layers.{layer}.self_attn.{part}_proj_target"
                self.linear(name, self.groups * self.width, self.hidden, self.bias)

    def markov(self, num_ids: int) -> dict[str, Any]:
        r = self.r
        kind, rank, confidence = r.choice(["vanilla", "gated", "rnn"]), r.choice([1, 6, 9]), r.random() < 0.7
        self.add("markov_head.markov_w1.weight", self.vocabulary, rank)
        self.linear("markov_head.markov_w2", num_ids, rank)
        if kind == "gated":
            self.linear("markov_head.gate_proj", rank, self.hidden + rank, True)
        if kind == "rnn":
            self.linear("markov_head.joint_proj", 3 * rank, 2 * rank + self.hidden, True)
        with_markov = r.random() < 0.5
        if confidence:
            self.linear("confidence_head.proj", 1, self.hidden + (rank if with_markov else 0), True)
        return {
            "markov_rank": rank,
            "markov_head_type": kind,
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": with_markov,
        }

    def dspark(self) -> None:
        self.config["architectures"] = ["DSparkDraftModel"]
        self.in_block.update({"projector_type": "dspark", "attention_mode": self.r.choice(["gqa", "mha"])})
        self.in_block.update(self.markov(self.vocabulary))

    def deepspec(self) -> None:
        self.config |= self.config.pop("dflash_config")
        self.config |= {"architectures": ["Qwen3DSparkModel"], **self.markov(self.vocabulary)}
        self.config |= {
            "layer_types": ["full_attention"] * self.layers,
            "use_sliding_window": False,
            "sliding_window": None,
        }
        self.own(self.vocabulary)

    def own(self, num_ids: int) -> None:
        self.add("embed_tokens.weight", self.vocabulary, self.hidden)
        self.linear("lm_head", num_ids, self.hidden)

    def speculators(self, kind: str, **more: Any) -> None:
        config = self.config
        num_ids = self.r.choice([self.vocabulary, self.vocabulary - 9])
        if num_ids < self.vocabulary:
            kept = sorted(self.r.sample(range(self.vocabulary), num_ids))
            self.tensors["d2t"] = torch.tensor(kept) - torch.arange(num_ids)
            self.tensors["t2d"] = torch.zeros(self.vocabulary, dtype=torch.bool)
            self.tensors["t2d"][kept] = True
        self.own(num_ids)
        layers = {
            key: value
            for key, value in config.items()
            if key not in ("architectures", "block_size", "dflash_config", "num_target_layers", "dtype")
        }
        self.config = {
            "architectures": [
                {"dspark": "DSparkSpeculator", "xpress": "XPressSpeculator", "dflash": "DFlashSpeculator"}[kind]
            ],
            "aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps],
            "block_size": self.block,
            "draft_vocab_size": num_ids,
            "mask_token_id": 3,
            "speculators_model_type": kind,
            "sliding_window_non_causal": self.r.random() < 0.5,
            "dtype": config["dtype"],
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": layers,
            "speculators_config": {"algorithm": kind, "verifier": {"architectures": [], "name_or_path": None}},
            "speculators_version": "0.5.0",
            **more,
        }
        if kind == "dspark":
            self.config |= self.markov(num_ids)

    def speculators_dspark(self) -> None:
        self.speculators("dspark", sample_from_anchor=True)

    def speculators_dflash(self) -> None:
        self.speculators("dflash", sample_from_anchor=self.r.random() < 0.5)

    def xpress(self) -> None:
        r = self.r
        rank, ratio, b = r.choice([1, 4, 7]), r.choice([1, 2, 3]), self.block
        shifted = r.random() < 0.5
        self.speculators(
            "xpress",
            xpress_rank=rank,
            xpress_mlp_ratio=ratio,
            num_jacobi_passes=r.choice([1, 2, 5]),
            sample_from_anchor=shifted,
        )
        num_ids = self.config["draft_vocab_size"]
        for name, rows, columns in (
            ("down_h", rank, self.hidden),
            ("down_g", rank, self.hidden),
            ("in_proj", rank, 3 * rank),
            ("mlp_gate", ratio * rank, rank),
            ("mlp_up", ratio * rank, rank),
            ("mlp_down", rank, ratio * rank),
            ("readout", num_ids, rank),
        ):
            self.linear(f"refiner_head.{name}", rows, columns)
        self.add("refiner_head.token_embed.weight", self.vocabulary, rank)
        self.add("refiner_head.mix_l", rank, b, b, scale=0.3)

    def domino(self) -> None:
        r = self.r
        shifted, width, size = r.random() < 0.5, r.choice([3, 8]), r.choice([5, 12])
        self.config["architectures"] = ["DominoDraftModel"]
        self.in_block.update(projector_type="domino", emb_dim=width, gru_hidden_dim=size, shift_label=shifted)
        self.in_block["pure_draft_prefix_len"] = r.choice([0, 1, 2])
        self.linear("embed_proj.0", width, self.hidden + size)
        self.linear("embed_proj.2", self.vocabulary, width)
        self.linear("prefix_gru.weight_ih_l0", 3 * size, self.hidden)
        self.linear("prefix_gru.weight_hh_l0", 3 * size, size)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            self.tensors[f"prefix_gru.{name}"] = self.tensors.pop(f"prefix_gru.{name}.weight")

    def lilicorr(self) -> None:
        r = self.r
        heads = r.choice([1, 2, 4])
        width, top_k, factor = (
            r.choice([heads * 6, self.hidden - self.hidden % heads]),
            r.choice([2, 4]),
            r.choice([3, 8]),
        )
        ratio, layers, slots = r.choice([1.0, 2.0, 1.5]), r.choice([1, 2, 3]), self.block - 1
        self.config["architectures"] = ["LiLiCorrDraftModel"]
        told: dict[str, Any] = {
            "candidate_topk": top_k,
            "factor_dim": factor,
            "hidden_size": width,
            "num_layers": layers,
            "num_heads": heads,
            "mlp_ratio": ratio,
            "logit_scale": r.choice([1.0, 8.0]),
            "vector_eps": 1e-4,
        }
        if width == self.hidden and r.random() < 0.5:
            told["hidden_size"] = r.choice([0, None])
        self.in_block.update(
            {"projector_type": "lilicorr", **{f"lilicorr_{key}": value for key, value in told.items()}}
        )
        if r.random() < 0.5:
            self.in_block["lilicorr_enabled"] = True
        if width != self.hidden:
            self.linear("lilicorr.token_proj", width, self.hidden, True)
        for name, rows, columns in (
            ("pass_hidden_proj", width, self.hidden),
            ("feature_mlp.1", width, 5),
            ("feature_mlp.3", width, width),
            ("context_proj", width, self.hidden),
            ("factor_input_proj", width, 3 * width),
            ("out_head", factor, width),
            ("in_head", factor, width),
            ("anchor_out_head", factor, width),
        ):
            self.linear(f"lilicorr.{name}", rows, columns, True)
        self.norm("lilicorr.feature_mlp.0", 5)
        self.add("lilicorr.feature_mlp.0.bias", 5)
        self.add("lilicorr.slot_embedding", 1, 1, slots, 1, width)
        self.add("lilicorr.rank_embedding", 1, 1, 1, top_k, width)
        self.add("lilicorr.relative_slot_bias", heads, 2 * self.block - 1)
        self.add("lilicorr.same_slot_bias", heads)
        for name in ("output_norm", "anchor_norm"):
            self.norm(f"lilicorr.{name}", width)
        inner = int(width * ratio)
        for layer in range(layers):
            at = f"lilicorr.layers.{layer}"
            self.norm(f"{at}.attn_norm", width)
            self.norm(f"{at}.mlp_norm", width)
            self.add(f"{at}.attn.in_proj_weight", 3 * width, width, scale=width**-0.5)
            self.add(f"{at}.attn.in_proj_bias", 3 * width, scale=0.2)
            self.linear(f"{at}.attn.out_proj", width, width, True)
            self.linear(f"{at}.mlp.0", inner, width, True)
            self.linear(f"{at}.mlp.2", width, inner, True)
