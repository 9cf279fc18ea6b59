"""Layers with a recurrent state by our own code: the gated delta rule (Qwen3.5, Qwen3-Next).

Each token decays a layer's state S [Dk, Dv] per head, and writes at its key what its value adds to the state:

    S'_t = exp(g_t) S_(t-1),  u_t = beta_t (v_t - S'_t^T k_t),  S_t = S'_t + k_t u_t^T,  o_t = S_t^T q_t

The tokens of a block depend on each other only through u, which one triangular solve gives. A pass never changes the
states: it keeps k, u and the decays of its tokens, and `commit` then sums those of the tokens that each row keeps, for
all layers in a dozen operations. So rolling back rejected tokens costs nothing, no token is computed twice, and
a pass can be captured. A prompt, whose length is known, is committed layer by layer.
(Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10 and section 3.3.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from dflash_bench.engine.forward.hf import KeptTokens
from dflash_bench.engine.forward.layers import Linear, NativeFeedForward, Norm, linear_of, norm_of

CHUNK = 64
"""Tokens of a prompt that are solved together."""
EPSILON = 1e-6
"""Added to the squared norms of queries and keys."""


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    num_layers: int
    num_keys: int
    """Heads of queries and keys; each serves as many consecutive heads of values."""
    num_values: int
    key_size: int
    value_size: int
    kernel: int
    """Tokens that the convolution reads, the current one included."""

    @property
    def split(self) -> tuple[int, int, int]:
        """Return the numbers of channels of queries, keys and values."""
        keys = self.num_keys * self.key_size
        return keys, keys, self.num_values * self.value_size

    @property
    def group(self) -> int:
        return self.num_values // self.num_keys


@dataclass(frozen=True, slots=True)
class Written:
    """The keys, values and decays of a pass over N tokens. [...] is [B] for one layer, and [layers, B] for all."""

    keys: Tensor
    """[..., Hk, N, Dk], normalised."""
    values: Tensor
    """u [..., Hv, N, Dv]"""
    decays: Tensor
    """The logarithm of the decay up to each token, [..., Hv, N]."""
    inputs: Tensor
    """Inputs of the convolution, those before the pass included: [..., kernel - 1 + N, C]."""

    def at(self, place: int) -> Written:
        return Written(self.keys[place], self.values[place], self.decays[place], self.inputs[place])


class DeltaStates:
    """The states of all recurrent layers, [layers, B, Hv, Dk, Dv] in float32, and the inputs of their convolutions."""

    def __init__(self, sizes: DeltaSizes, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.num_rows, self.device = sizes, num_rows, device
        shape = sizes.num_layers, num_rows
        self.memory = torch.zeros(*shape, sizes.num_values, sizes.key_size, sizes.value_size, device=device)
        self.inputs = torch.zeros(*shape, sizes.kernel - 1, sum(sizes.split), dtype=dtype, device=device)
        self.known: KeptTokens | None = None
        self.rows = slice(0, num_rows)
        self._kept: dict[int, Written] = {}

    @torch.inference_mode()
    def clear(self, rows: slice | None = None) -> None:
        for states in (self.memory, self.inputs):
            states[:, rows or slice(None)].zero_()

    @contextmanager
    def expecting(self, counts: Sequence[int] | None, rows: slice | None, begins: bool) -> Iterator[None]:
        """Wrap a pass over `rows`, or all. If it is known what each row keeps, the pass itself commits.

        With `begins` the rows have no past.
        """
        if counts is None:
            assert rows is None, "the first pass of a row is not rolled back"
            yield
            return
        self.known, self.rows = KeptTokens.of(counts, self.device), rows or self.rows
        if begins:
            self.clear(self.rows)
        try:
            yield
        finally:
            self.known, self.rows = None, slice(0, self.num_rows)

    def before(self, place: int) -> tuple[Tensor, Tensor]:
        """Return a layer's state [B, Hv, Dk, Dv] and last inputs [B, kernel - 1, C]."""
        return self.memory[place, self.rows], self.inputs[place, self.rows]

    def keep(self, place: int, written: Written) -> None:
        """Keep what a layer wrote for `commit`, at a fixed address per width, or commit it now if that is known."""
        if self.known is not None:
            self._advance(*self.before(place), written, self.known)
            return
        width = written.values.shape[-2]
        if width not in self._kept:
            self._kept[width] = self._buffers(written)
        kept = self._kept[width].at(place)
        kept.keys.copy_(written.keys)
        kept.values.copy_(written.values)
        kept.decays.copy_(written.decays)
        kept.inputs.copy_(written.inputs)

    @torch.inference_mode()
    def commit(self, counts: Sequence[int], width: int) -> None:
        """Advance all states by the first counts[b] of the `width` tokens of row b."""
        self._advance(self.memory, self.inputs, self._kept[width], KeptTokens.of(counts, self.device))

    def _buffers(self, like: Written) -> Written:
        parts = (like.keys, like.values, like.decays, like.inputs)
        return Written(*(part.new_empty((self.sizes.num_layers, *part.shape)) for part in parts))

    def _advance(self, memory: Tensor, inputs: Tensor, written: Written, kept: KeptTokens) -> None:
        inputs.copy_(_last(written.inputs, kept, inputs.shape[-2]))
        if kept.longest == 0:
            return
        keys = written.keys[..., : kept.longest, :].repeat_interleave(self.sizes.group, dim=-3)
        values, decays = written.values[..., : kept.longest, :], written.decays[..., : kept.longest]
        end, weights = _decays(decays, kept)
        memory.mul_(end.exp()[..., None])
        keys = (keys * weights[..., None]).mT
        added = (each.flatten(0, -3) for each in (keys, values))
        memory.view(-1, *memory.shape[-2:]).baddbmm_(*added)


def _decays(decays: Tensor, kept: KeptTokens) -> tuple[Tensor, Tensor]:
    """Return the decay up to each row's last kept token, as a logarithm [..., H, 1], and each token's weight there.

    Tokens behind the last kept one weigh 0.
    """
    if isinstance(kept.counts, int):
        end = decays[..., -1:]
        return end, (end - decays).exp()
    counts = kept.counts[:, None, None]
    place = (counts - 1).clamp(min=0).expand(*decays.shape[:-1], 1)
    end = decays.gather(-1, place).masked_fill(counts == 0, 0)
    is_dropped = torch.arange(decays.shape[-1], device=decays.device) >= counts
    return end, (end - decays).masked_fill(is_dropped, -torch.inf).exp()


def _last(inputs: Tensor, kept: KeptTokens, size: int) -> Tensor:
    """Return the `size` of the inputs [..., B, size + N, C] that end with each row's last kept token."""
    if isinstance(kept.counts, int):
        return inputs[..., kept.counts : kept.counts + size, :]
    places = kept.counts[:, None] + torch.arange(size, device=inputs.device)
    return inputs.gather(-2, places[..., None].expand(*inputs.shape[:-2], size, inputs.shape[-1]))


def convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the causal convolution [B, N, C] of inputs [B, kernel - 1 + N, C] with `weight` [kernel, C]."""
    kernel = len(weight)
    width = inputs.shape[1] - kernel + 1
    out = inputs[:, :width] * weight[0]
    for step in range(1, kernel):
        out.addcmul_(inputs[:, step : step + width], weight[step])
    return out


def read_block(
    memory: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs and u [B, H, N, Dv] of N tokens after a state [B, H, Dk, Dv], and the decays up to each [B, H, N].

    q, k [B, H, N, Dk] and v [B, H, N, Dv]; g and beta are [B, H, N]. Decays are logarithms.
    """
    total = g.cumsum(dim=-1)
    decay = total.exp().repeat(1, 1, 2)[..., None]
    read_by_keys, read = (torch.cat([k, q], dim=-2) @ memory).mul_(decay).chunk(2, dim=-2)
    written = (v - read_by_keys).mul_(beta[..., None])
    if q.shape[-2] == 1:
        return read + (q * k).sum(dim=-1, keepdim=True) * written, written, total
    within = (total[..., :, None] - total[..., None, :]).tril().exp()
    # The solve only reads below the diagonal, so there is no need to zero the rest.
    system = (k @ k.mT).mul_(within).mul_(beta[..., None])
    written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    return read + (q @ k.mT).mul_(within).tril_() @ written, written, total


def read_all(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `read_block` for any number of tokens, in chunks."""
    width = q.shape[-2]
    if width <= CHUNK:
        return read_block(memory, q, k, v, g, beta)
    outs, writtens = [], []
    for begin in range(0, width, CHUNK):
        part = slice(begin, begin + CHUNK)
        own = k[..., part, :]
        out, written, total = read_block(memory, q[..., part, :], own, v[..., part, :], g[..., part], beta[..., part])
        end = total[..., -1:]
        memory = memory * end.exp()[..., None] + (own * (end - total).exp()[..., None]).mT @ written
        outs.append(out)
        writtens.append(written)
    return torch.cat(outs, dim=-2), torch.cat(writtens, dim=-2), g.cumsum(dim=-1)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The gated delta rule up to its heads' results; the caller applies `output` and adds it to the stream."""

    place: int
    """The layer's index among recurrent layers."""
    sizes: DeltaSizes
    inputs: Linear
    """Queries, keys and values; the output's gate; the rate beta; the decay."""
    is_grouped: bool
    """Whether these parts lie side by side for each head of keys (Qwen3-Next), not one after another."""
    conv: Tensor
    """[kernel, C]"""
    decay: Tensor
    """-exp(A) [Hv] in float32"""
    decay_bias: Tensor
    norm: Norm
    output: Linear

    def __call__(self, normed: Tensor, shape: torch.Size, states: DeltaStates) -> Tensor:
        """Return the heads' results [B * N, Hv * Dv] for normed inputs [B * N, H], and keep what they write."""
        rows, width = shape
        channels, gate, rate, decay = self._parts(self.inputs(normed).view(rows, width, -1))
        memory, before = states.before(self.place)
        inputs = torch.cat([before, channels], dim=1)
        mixed = silu(convolved(inputs, self.conv)).float().split(self.sizes.split, dim=-1)
        q, k = (_unit(part.unflatten(-1, (-1, self.sizes.key_size)).transpose(1, 2)) for part in mixed[:2])
        v = mixed[2].unflatten(-1, (-1, self.sizes.value_size)).transpose(1, 2)
        g = (softplus(decay.float() + self.decay_bias) * self.decay).transpose(1, 2)
        beta = rate.sigmoid().float().transpose(1, 2)
        every_q, every_k = q * self.sizes.key_size**-0.5, k
        if self.sizes.group > 1:
            every_q, every_k = (part.repeat_interleave(self.sizes.group, dim=1) for part in (every_q, k))
        out, written, decays = read_all(memory, every_q, every_k, v, g, beta)
        states.keep(self.place, Written(k, written, decays, inputs))
        out = self.norm(out.transpose(1, 2).to(normed.dtype))
        return out.mul_(silu(gate.float()).view_as(out)).reshape(rows * width, -1)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Return channels [B, N, C], gate [B, N, Hv * Dv], rate and decay [B, N, Hv]."""
        sizes = self.sizes
        keys, _, values = sizes.split
        if not self.is_grouped:
            parts = mixed.split([2 * keys + values, values, sizes.num_values, sizes.num_values], dim=-1)
            return tuple(parts)
        wide, narrow = mixed.split([2 * (keys + values), 2 * sizes.num_values], dim=-1)
        own = values // sizes.num_keys
        by_head = wide.unflatten(-1, (sizes.num_keys, -1)).split([sizes.key_size] * 2 + [own] * 2, dim=-1)
        q, k, v, gate = (part.flatten(-2) for part in by_head)
        rate, decay = (part.flatten(-2) for part in narrow.unflatten(-1, (sizes.num_keys, -1)).chunk(2, dim=-1))
        return torch.cat([q, k, v], dim=-1), gate, rate, decay


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + EPSILON).rsqrt()


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A decoder layer that mixes tokens by a recurrent state. It may add to the stream x in place, as `Layer` may."""

    input_norm: Norm
    delta: GatedDelta
    feed_norm: Norm
    feed: NativeFeedForward

    def __call__(self, x: Tensor, shape: torch.Size, states: DeltaStates) -> Tensor:
        """Return the residual stream [B * N, H] after this layer."""
        x = self.delta.output.added_to(x, self.delta(self.input_norm(x), shape, states))
        return self.feed.added_to(x, self.feed_norm(x))


def recurrent_layer_of(layer: Any, place: int, num_layers: int, feed: NativeFeedForward) -> RecurrentLayer:
    """Lay out a module's layer, which is recurrent layer `place` of `num_layers`."""
    delta = delta_of(layer.linear_attn, place, num_layers)
    return RecurrentLayer(norm_of(layer.input_layernorm), delta, norm_of(layer.post_attention_layernorm), feed)


def delta_of(module: Any, place: int, num_layers: int) -> GatedDelta:
    """Lay out a gated delta net's module, which is recurrent layer `place` of `num_layers`."""
    is_grouped = hasattr(module, "in_proj_qkvz")
    parts = ("qkvz", "ba") if is_grouped else ("qkv", "z", "b", "a")
    return GatedDelta(
        place=place,
        sizes=DeltaSizes(
            num_layers=num_layers,
            num_keys=module.num_k_heads,
            num_values=module.num_v_heads,
            key_size=module.head_k_dim,
            value_size=module.head_v_dim,
            kernel=module.conv_kernel_size,
        ),
        inputs=linear_of(*(getattr(module, f"in_proj_{part}") for part in parts)),
        is_grouped=is_grouped,
        conv=module.conv1d.weight.detach()[:, 0].t().clone(memory_format=torch.contiguous_format),
        decay=-module.A_log.detach().float().exp(),
        decay_bias=module.dt_bias.detach().float(),
        norm=norm_of(module.norm),
        output=linear_of(module.out_proj),
    )
