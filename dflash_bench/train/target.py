"""Train the nano target: a small Qwen3 on packed synthetic conversations, resumable from its last checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dflash_bench.train.data import Batch, held_out_tasks, pack, sample_stream
from dflash_bench.train.tokenizer import NUM_EMBEDDINGS


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """Everything that decides the weights."""

    layers: int = 16
    hidden: int = 128
    intermediate: int = 384
    heads: int = 2
    kv_heads: int = 2
    steps: int = 1500
    rows: int = 16
    length: int = 256
    matrix_lr: float = 0.02
    other_lr: float = 2e-3
    warmup: int = 60
    seed: int = 2602
    muon: bool = True


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
        attn_implementation="eager",  # with short rows, plain matrix products train faster on a CPU than the fused kernel
    )
    return Qwen3ForCausalLM(config)


def optimizers(model: Any, recipe: TargetRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    if not recipe.muon:
        return [torch.optim.AdamW(model.parameters(), lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def scale(step: int, recipe: TargetRecipe) -> float:
    """Warm-up, then cosine to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - recipe.warmup) / (recipe.steps - recipe.warmup)))


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.ids, attention_mask=batch.mask(torch.float32), position_ids=batch.position).logits
    return weighted_loss(logits[:, :-1].float(), batch)


def weighted_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the next token [R, N-1, V], weighted, never across samples."""
    weights = batch.weights[:, 1:] * (batch.document[:, 1:] == batch.document[:, :-1])
    losses = cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train(recipe: TargetRecipe, tokenizer: Any, folder: Path, report: Callable[[str], None]) -> Any:
    model = build(recipe, tokenizer)
    opts = optimizers(model, recipe)
    base = [[group["lr"] for group in opt.param_groups] for opt in opts]
    path, start, history = folder / "target.pt", 0, []
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        start, history = state["step"], state["history"]
    for layer in model.model.layers:
        layer.compile()
    pad = tokenizer.pad_token_id
    test = pack(sample_stream(1, tokenizer, tasks=held_out_tasks), recipe.rows, recipe.length, pad)
    running, began = 0.0, time.time()
    for step in range(start, recipe.steps):
        for opt, lrs in zip(opts, base, strict=True):
            for group, lr in zip(opt.param_groups, lrs, strict=True):
                group["lr"] = lr * scale(step, recipe)
        # Batch s depends on s alone, so a resumed run sees what an unbroken one sees.
        batch = pack(sample_stream(recipe.seed * 1_000_003 + step, tokenizer), recipe.rows, recipe.length, pad)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        running = loss.item() if running == 0 else 0.95 * running + 0.05 * loss.item()
        if (step + 1) % 25 == 0:
            report(f"target step {step + 1}/{recipe.steps} loss {running:.4f} {(time.time() - began) / (step + 1 - start):.2f} s/step")
        if (step + 1) % 200 == 0 or step + 1 == recipe.steps:
            model.eval()
            with torch.no_grad():
                held_out = loss_of(model, test).item()
            model.train()
            history.append({"step": step + 1, "loss": running, "held_out_loss": held_out})
            report(f"target held-out loss {held_out:.4f}")
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "step": step + 1, "history": history}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
    (folder / "target.json").write_text(json.dumps({"recipe": asdict(recipe), "history": history}, indent=1))
    return model
