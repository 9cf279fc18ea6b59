"""torch's attention by lengths (`aten._flash_attention_forward`) by its documentation, as its own runs on GPUs alone.

It computes on any device, in any type, and asks the host for nothing, so that passes with it can be captured. What a
kernel would not check and read wrongly is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return [Tq, heads, D] for queries [Tq, heads, D], and keys and values [Tk, KV, D]; sequences lie end to end.

    Then, as the operator does, the logarithms of each query's sum of exp(score), [heads, Tq]. Where there are no keys,
    the result is 0, and the logarithm is positive infinity.

    Sequence i has the queries cum_seq_q[i] ... and the keys from cum_seq_k[i] on, of which the first seqused_k[i]
    count. Its last query stands at its last key, and a query sees as many keys to its left and right as the window has.
    """
    _refuse(query, key, value, cum_seq_q, cum_seq_k, seqused_k)
    assert dropout_p == 0 and not return_debug_mask
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    num_sequences, group = len(cum_seq_q) - 1, query.shape[1] // key.shape[1]
    first_q, num_q = cum_seq_q[:-1, None], (cum_seq_q[1:] - cum_seq_q[:-1])[:, None]
    first_k, num_k = cum_seq_k[:-1, None], (cum_seq_k[1:] - cum_seq_k[:-1] if seqused_k is None else seqused_k)[:, None]
    steps_q = torch.arange(max_q, device=query.device)[None].expand(num_sequences, -1)
    steps_k = torch.arange(max_k, device=query.device)[None].expand(num_sequences, -1)
    places_q = (first_q + torch.minimum(steps_q, num_q - 1)).flatten()
    places_k = (first_k + torch.minimum(steps_k, (num_k - 1).clamp(min=0))).flatten()
    q = query.index_select(0, places_q).view(num_sequences, max_q, key.shape[1], group, -1)
    k, v = (x.index_select(0, places_k).view(num_sequences, max_k, *x.shape[1:]) for x in (key, value))
    scores = torch.einsum("sqhgd,skhd->shgqk", q.float(), k.float()) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    distance = steps_k[:, None, :] - (steps_q + num_k - num_q)[:, :, None]
    hidden = (steps_k >= num_k)[:, None, :].expand_as(distance)
    if left >= 0:
        hidden = hidden | (distance < -left)
    if right >= 0:
        hidden = hidden | (distance > right)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    is_empty = (num_k == 0)[:, :, None, None]
    shares = scores.softmax(dim=-1).masked_fill(is_empty[..., None], 0)
    log_sums = scores.logsumexp(dim=-1).masked_fill(is_empty, torch.inf)
    log_sums = log_sums.permute(1, 2, 0, 3).reshape(query.shape[1], -1)
    attended = (
        torch.einsum("shgqk,skhd->sqhgd", shares, v.float())
        .to(v.dtype)
        .reshape(num_sequences * max_q, *query.shape[1:])
    )
    # Sequences that are shorter than the longest write their last query again.
    of_queries = log_sums.new_empty(query.shape[1], len(query)).index_copy_(1, places_q, log_sums)
    return torch.empty_like(query).index_copy_(0, places_q, attended), of_queries


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, seqused_k: Tensor | None
) -> None:
    assert query.ndim == key.ndim == value.ndim == 3 and key.shape == value.shape and query.shape[2] == key.shape[2]
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert query.dtype == key.dtype == value.dtype and query.device == key.device == value.device
    assert cum_seq_q.shape == cum_seq_k.shape and cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    assert seqused_k is None or (seqused_k.shape == cum_seq_q[1:].shape and seqused_k.dtype == torch.int32)
    assert query.shape[1] % key.shape[1] == 0
