"""What a network holds, counted from its parameters: what each pass reads, and what it multiplies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from dflash_bench.engine.architecture import attention_windows, recurrent_layers
from dflash_bench.forwards import Attention, Pass, Size
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.models.eagle3 import Eagle3Draft
from dflash_bench.models.quantizing import num_elements, stored_bytes


def size_of(model: Any) -> Size:
    """Of a target, which may be on the `meta` device."""
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    named = {id(weight): (name, weight) for name, weight in model.named_parameters()}  # what is shared, once
    experts = [weight for name, weight in named.values() if "experts" in name.split(".")]
    apart = {id(weight) for weight in experts} | ({id(embedding)} if embedding is not head else set())
    read = [weight for _, weight in named.values() if id(weight) not in apart]
    num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") if experts else 0
    return Size(
        weight_bytes=_bytes(read),
        matrix_elements=_elements(read),
        row_bytes=embedding.shape[1] * embedding.element_size(),
        stored_bytes=_bytes(weight for _, weight in named.values()),
        num_experts=num_experts,
        experts_per_token=_first(config, "num_experts_per_tok", "experts_per_token") if experts else 0,
        expert_bytes=_bytes(experts) // num_experts if experts else 0,
        expert_elements=sum(weight.numel() for weight in experts) // num_experts if experts else 0,
        attention=tuple(_attention(config, head.element_size())),
        state_bytes=_state_bytes(config),
        num_layers=config.num_hidden_layers,
        vocab_size=embedding.shape[0],
        itemsize=head.element_size(),
    )


def _first(config: Any, *names: str) -> int:
    return next(int(value) for name in names if (value := getattr(config, name, None)))


def _bytes(weights: Iterable[Any]) -> int:
    return sum(map(stored_bytes, weights))


def _elements(weights: Iterable[Any]) -> int:
    """Of matrices: norms and biases multiply nothing to speak of."""
    return sum(num_elements(weight) for weight in weights if weight.ndim == 2)


def _attention(config: Any, itemsize: int) -> Iterable[Attention]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    num_kv = getattr(config, "num_key_value_heads", None) or heads
    windows = attention_windows(config)
    kinds = getattr(config, "layer_types", None) or [next(iter(windows))] * config.num_hidden_layers
    for kind, window in windows.items():
        if num_layers := kinds.count(kind):
            yield Attention(num_layers, window, heads * head_dim, 2 * num_kv * head_dim * itemsize)


def _state_bytes(config: Any) -> int:
    """Of the gated delta rule: a matrix a head, in float32."""
    if not (layers := recurrent_layers(config)):
        return 0
    heads, key, value = (
        getattr(config, f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    return int(len(layers) * heads * key * value * 4)


def draft_passes(draft: Any, target: Any, num_drafts: int, kept: int) -> tuple[Pass, ...]:
    """What drafting `num_drafts` tokens reads, with taking in `kept` tokens of the round before.

    `draft` is a DFlash draft in one step, or an EAGLE-3 draft that drafts a chain.
    """
    if isinstance(draft, DFlashDraft):
        return _of_dflash(draft, target, num_drafts, kept)
    assert isinstance(draft, Eagle3Draft)
    layer = _part([draft.midlayer, draft.norm], draft, 1)
    head, fusing = _part([draft.lm_head], draft), _part([draft.fc], draft)
    passes = [Pass(layer, kept), Pass(fusing, kept), Pass(head, 1, num_drafts)]
    return (*passes, *([Pass(layer, 1, num_drafts - 1)] if num_drafts > 1 else []))


def _of_dflash(draft: DFlashDraft, target: Any, num_drafts: int, kept: int) -> tuple[Pass, ...]:
    head = draft.lm_head if draft.config.own_head else target.get_output_embeddings()
    layers: Any = draft.layers
    taking_in = [draft.fc, *(part for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj))]
    return (
        Pass(_part([*layers, draft.norm], draft, draft.config.num_layers), draft.config.block_for(num_drafts)),
        Pass(_part([head], draft), num_drafts),
        Pass(_part(taking_in, draft), kept),
    )


def _part(modules: Iterable[nn.Module], draft: Any, num_layers: int = 0) -> Size:
    """These modules of a draft, with so many layers of attention."""
    config, itemsize = draft.config, draft.fc.weight.element_size()
    weights = [weight for module in modules for weight in module.parameters()]
    kind = Attention(
        num_layers, None, config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim * itemsize
    )
    return Size(_bytes(weights), _elements(weights), attention=(kind,) if num_layers else (), itemsize=itemsize)
