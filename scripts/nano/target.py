"""Train the nano target: a small Qwen3 on packed synthetic conversations, resumable from its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dflash_bench.training.data import Batch
from dflash_bench.training.masks import additive, causal
from dflash_bench.training.trainer import History, apply_gradients, optimisers, restore, save, set_rate
from nano.corpus.task import Task
from nano.data import held_out_tasks, pack, sample_stream
from nano.tokenizer import NUM_EMBEDDINGS


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """Everything that decides the weights of the target."""

    layers: int = 16
    hidden: int = 128
    intermediate: int = 384
    heads: int = 2
    kv_heads: int = 2
    cycles: tuple[int, ...] = (1500, 1000)
    rows: int = 16
    length: int = 256
    matrix_lr: float = 0.02
    other_lr: float = 2e-3
    warmup: int = 60
    seed: int = 2602

    @property
    def steps(self) -> int:
        return sum(self.cycles)


def build(recipe: TargetRecipe, tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=NUM_EMBEDDINGS,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=64,
        max_position_embeddings=4096,
        use_cache=False,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # On rows this short, plain matrix products train faster on a CPU than the fused kernel.
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the weighted mean cross-entropy of the next token, never across samples."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.ids, attention_mask=additive(causal(batch)), position_ids=batch.position).logits
    weights = batch.weights[:, 1:] * (batch.document[:, 1:] == batch.document[:, :-1])
    losses = cross_entropy(logits[:, :-1].float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def stream_seed(recipe: TargetRecipe, step: int) -> int:
    """Return the seed of a step's batch, which depends only on the step, so that a training can be resumed."""
    return recipe.seed * 1_000_003 + step


def train(
    recipe: TargetRecipe, tokenizer: Any, path: Path, report: Callable[[str], None], extra: Sequence[Task] = ()
) -> tuple[Any, History]:
    """Return the trained model and the history of its losses; `path` is the checkpoint to resume from."""
    model = build(recipe, tokenizer)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    made = optimisers(matrices, others, recipe.matrix_lr, recipe.other_lr)
    start, history = restore(path, model, made)
    for layer in model.model.layers:
        layer.compile()
    pad = tokenizer.pad_token_id
    test = pack(sample_stream(1, tokenizer, tasks=held_out_tasks), recipe.rows, recipe.length, pad)
    running = history[-1]["loss"] if history else 0.0
    for step in range(start, recipe.steps):
        set_rate(made, step, recipe.cycles, recipe.warmup)
        samples = sample_stream(stream_seed(recipe, step), tokenizer, extra=extra)
        batch = pack(samples, recipe.rows, recipe.length, pad)
        loss = loss_of(model, batch)
        loss.backward()
        apply_gradients(made, model.parameters())
        running = 0.95 * running + 0.05 * loss.item() if running else loss.item()
        report(f"target: step {step + 1} of {recipe.steps}, loss {running:.4f}")
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            model.eval()
            with torch.no_grad():
                history.append({"step": step + 1, "loss": running, "held_out_loss": loss_of(model, test).item()})
            model.train()
            save(path, model, made, step + 1, history)
    # Trained layers are compiled for a fixed shape; later stages need all shapes.
    plain = build(recipe, tokenizer)
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    return plain.eval(), history
