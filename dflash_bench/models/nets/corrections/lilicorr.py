"""LiLiCorr: a small transformer over all candidates of a block, and a path through them by cosines (2608.20530).

The `candidate_topk` likeliest tokens of each slot are its candidates, in descending order. A candidate's input is the
sum of its token's embedding, its slot's hidden state, five features of its log-probability and rank (all projected),
and embeddings of slot and rank. Layers attend over all candidates of all slots, unmasked, with a learned bias per head
by the distance of the slots. The newest position that the target has processed, fused like the draft's context, is the
anchor: it takes part in no attention. With x the transformer's output, a the anchor, and all vectors of unit length:

    f = silu(F [x; a; x * a]),   out = O f,   in = I f,   start = S a

The first slot's candidates score `logit_scale` * (start . in); those of each next slot `logit_scale` * (out . in), with
the `out` of the candidate chosen before. Log-probabilities are not added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from dflash_bench.models.nets.corrections.base import (
    BlockPass,
    Corrected,
    CorrectionConfig,
    CorrectionHead,
    HeadSizes,
    Pick,
)
from dflash_bench.models.nets.layers import RMSNorm

NUM_FEATURES = 5
MOST_LAYERS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LiLiCorrConfig(CorrectionConfig):
    kind: ClassVar[str] = "LiLiCorr"
    lookups: ClassVar[tuple[str, ...]] = ("slot_embedding", "rank_embedding", "relative_slot_bias")
    reads_context: ClassVar[bool] = True
    is_of_slots: ClassVar[bool] = True
    lilicorr_candidate_topk: int
    lilicorr_factor_dim: int
    lilicorr_hidden_size: int
    lilicorr_num_layers: int
    lilicorr_num_heads: int
    lilicorr_mlp_ratio: float
    lilicorr_logit_scale: float
    lilicorr_vector_eps: float

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        return {"lilicorr": LiLiCorrHead(self, sizes)}

    def passes(self, num_drafts: int) -> tuple[int, int]:
        return num_drafts * self.lilicorr_candidate_topk, 1

    def head(self, draft: Any) -> CorrectionHead:
        head: LiLiCorrHead = draft.lilicorr
        return head

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        wrong = dict(CorrectionConfig.unsound(self, sizes))
        yield from wrong.items()
        if not wrong:
            # A single candidate has no rank, and leaves no choice.
            if not 2 <= self.lilicorr_candidate_topk <= sizes.num_ids:
                yield "lilicorr_candidate_topk", self.lilicorr_candidate_topk
            if self.lilicorr_num_layers > MOST_LAYERS:
                yield "lilicorr_num_layers", self.lilicorr_num_layers
            if self.lilicorr_hidden_size % self.lilicorr_num_heads:
                yield "lilicorr_num_heads", self.lilicorr_num_heads


class CandidateAttention(nn.Module):
    """torch's MultiheadAttention by its parameters, with a bias [heads, M, M] added to the scores."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        joined = linear(x, self.in_proj_weight, self.in_proj_bias)
        query, key, value = joined.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=bias)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class CandidateLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(width, eps)
        self.attn = CandidateAttention(width, num_heads)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LiLiCorrHead(nn.Module):
    def __init__(self, config: LiLiCorrConfig, sizes: HeadSizes) -> None:
        super().__init__()
        self.config = config
        width, hidden, top_k = config.lilicorr_hidden_size, sizes.hidden_size, config.lilicorr_candidate_topk
        heads, eps, self.block_size = config.lilicorr_num_heads, sizes.rms_norm_eps, sizes.block_size
        self.token_proj: nn.Module = nn.Identity() if width == hidden else nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(NUM_FEATURES), nn.Linear(NUM_FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, sizes.block_size - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, top_k, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * sizes.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        inner = int(width * config.lilicorr_mlp_ratio)
        self.layers = nn.ModuleList(CandidateLayer(width, heads, inner, eps) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.context_proj = nn.Linear(hidden, width)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(width, config.lilicorr_factor_dim) for _ in range(3)
        )

    def correct(self, block: BlockPass, pick: Pick) -> Corrected:
        candidates, outs, ins, start = self.vectors(block)
        chosen, vector = [], start
        for slot in range(block.num_drafts):
            scores = self.config.lilicorr_logit_scale * torch.bmm(ins[:, slot], vector[..., None])[..., 0]
            index = pick.among(candidates[:, slot], scores, slot)
            chosen.append(candidates[:, slot].gather(1, index[:, None])[:, 0])
            vector = outs[:, slot].take_along_dim(index[:, None, None], dim=1)[:, 0]
        return Corrected(torch.stack(chosen, dim=1))

    def vectors(self, block: BlockPass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the candidates [B, N, C] as target ids, their out and in [B, N, C, F], and start [B, F]."""
        assert block.context is not None
        log_p = block.logits.float().log_softmax(dim=-1)
        best, ids = log_p.topk(self.config.lilicorr_candidate_topk, dim=-1)
        candidates = block.to_target(ids)
        x = self._inputs(best, block.embed(candidates), block.drafting)
        bias, flat = self._biases(x.shape[1], x.shape[2]), x.flatten(1, 2)
        for layer in self.layers:
            flat = layer(flat, bias)
        x = self.output_norm(flat).view(x.shape)
        anchor = self.anchor_norm(self.context_proj(block.context))
        beside = anchor[:, None, None].expand_as(x)
        factors = silu(self.factor_input_proj(torch.cat([x, beside, x * beside], dim=-1)))
        outs, ins = self._unit(self.out_head(factors)), self._unit(self.in_head(factors))
        return candidates, outs, ins, self._unit(self.anchor_out_head(anchor))

    def _inputs(self, log_p: Tensor, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return [B, N, C, width], given log-probabilities [B, N, C], embeddings [B, N, C, H] and outputs [B, N, H]."""
        weight = self.pass_hidden_proj.weight
        rank = torch.arange(log_p.shape[-1], device=log_p.device).expand_as(log_p)
        features = torch.stack(
            [log_p, log_p.exp(), log_p - log_p[..., :1], rank / (log_p.shape[-1] - 1), (rank == 0).float()], dim=-1
        )
        x = self.token_proj(embedded.to(weight.dtype)) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(features.to(weight.dtype))
        out: Tensor = x + self.slot_embedding[0, :, : x.shape[1]] + self.rank_embedding[0]
        return out

    def _biases(self, num_slots: int, top_k: int) -> Tensor:
        """Return the bias of the attention scores of each head, [heads, N * C, N * C]."""
        slot = torch.arange(num_slots * top_k, device=self.same_slot_bias.device) // top_k
        distance = slot[:, None] - slot
        same = (distance == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, distance + self.block_size - 1] + same

    def _unit(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=-1, eps=self.config.lilicorr_vector_eps)
