"""Does a target that is split across processes answer as in one process?

Targets of random weights in three architectures, and nano. The times show what it costs to announce each pass to other
processes of this machine, not what GPUs gain.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.core.types import Answer
from dflash_bench.models.presets import NANO as NANO_FOLDER
from dflash_bench.report.tables import ABSENT, markdown
from dflash_bench.results import store
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.run_info import RunInfo
from helpers import tiny
from studies._study import Made, Work

TAKES = "12 minutes of two cores"
PAGES = ("exactness/tensor-parallel-cpu.md",)
METHODS = ("dflash", "eagle3", "ddtree:nodes=6", "ngram")
SUITES = ("gsm8k", "humaneval")
HEADS, KV_HEADS = 8, 4
SIZES = (1, 2, 4)
RANDOM = ("qwen3", "qwen2", "llama")
"""Architectures, as transformers names them."""
NANO = "nano"
NANO_SIZES = (1, 2)
"""nano has two heads."""
HEAD = """# A target split across processes

```
{command}
```

{machine}.

{random} are small targets of random weights with {heads} attention heads and {kv_heads} key-value heads, whose
drafts are mostly wrong. Every target is split by transformers' plan for its architecture, and one process computes it
with transformers, too. {prompts} embedded prompts each of {suites}, at most {tokens} tokens, float32, greedy, with
{methods}.

{table}

`same answers`: tokens, accepted drafts of every round, and both verdicts are those of one process. `predicted, kB`: the
target's weights in each process, as a run predicts them before it loads them; embedding and head are whole in each.
`held, kB`: the most that a process held, counted in processes of their own. `times as long`: plain decoding per token
beside one process, where all processes share {cores}.

{verdict}
"""
HOLD = """
import os
import sys
import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM
from dflash_bench.models import parallel

distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
options = parallel.options_of(AutoConfig.from_pretrained(sys.argv[1]), size) if size > 1 else {}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **options)
if size > 1:
    parallel.make_whole(model)
parts = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.parameters()]
held = torch.tensor(sum(part.nbytes for part in parts))
distributed.all_reduce(held, distributed.ReduceOp.MAX)
if rank == 0:
    print("held", int(held), flush=True)
distributed.barrier()
os._exit(0)  # Interpreters that end with gloo's threads abort now and then.
"""


@dataclass(frozen=True, slots=True)
class Split:
    """A run of a target by a number of processes."""

    size: int
    info: RunInfo
    rows: Sequence[Answer]
    held_bytes: int

    def answers(self) -> dict[store.Key, tuple[Any, ...]]:
        return {
            store.key(row): (row.generation.token_ids, row.generation.accepted, row.exactness, row.audit)
            for row in self.rows
        }

    def seconds_per_token(self) -> float:
        plain = [row.generation for row in self.rows if row.method == BASELINE]
        return sum(one.decode_s for one in plain) / sum(one.num_tokens for one in plain)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=4, help="prompts of each suite")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")


def make(work: Work, options: Namespace) -> Made:
    found = {name: _splits(work, name, SIZES, options) for name in RANDOM}
    found[NANO] = _splits(work, NANO, NANO_SIZES, options)
    table = [row for name, splits in found.items() for row in _rows(name, splits)]
    differ = [
        f"{name} by {split.size} processes"
        for name, splits in found.items()
        for split in splits
        if split.answers() != splits[0].answers()
    ]
    info = found[NANO][0].info
    page = HEAD.format(
        command=work.command,
        machine=info.environment.one_line(),
        random=", ".join(RANDOM[:-1]) + f" and {RANDOM[-1]}",
        heads=HEADS,
        kv_heads=KV_HEADS,
        prompts=options.limit,
        suites=" and ".join(SUITES),
        tokens=options.tokens,
        methods=", ".join(f"`{method}`" for method in METHODS),
        table=markdown(
            ["target", "processes", "same answers", "predicted, kB", "held, kB", "times as long"], table, left=1
        ),
        cores=f"{info.environment.num_usable_cores} cores",
        verdict=f"**Other answers**: {', '.join(differ)}." if differ else "All answers are the same.",
    )
    return Made({PAGES[0]: page}, [f"{each} gives other answers than one" for each in differ])


def _splits(work: Work, name: str, sizes: Sequence[int], options: Namespace) -> list[Split]:
    """Run a target by each number of processes."""
    folder = NANO_FOLDER if name == NANO else _random_model(work.folder / "models" / name, name)
    splits = []
    for size in sizes:
        run = work.run(
            f"{name}-{size}",
            *("--model", NANO if name == NANO else folder, "--device", "cpu"),
            *(word for suite in SUITES for word in ("--suite", suite)),
            *(word for method in METHODS for word in ("--method", method)),
            *("--limit", options.limit, "--max-new-tokens", options.tokens),
            *(("--engine", "transformers") if size == 1 else ("--tensor-parallel", size)),
        )
        info, rows = store.load(run)
        splits.append(Split(size, info, rows, _held_bytes(folder / "target", size)))
    return splits


def _held_bytes(target: Path, size: int) -> int:
    """Return the most bytes of weights that one of `size` processes holds."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "--no-python")
    done = subprocess.run(
        [sys.executable, *launcher, sys.executable, "-c", HOLD, str(target)], check=True, capture_output=True, text=True
    )
    (held,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("held "))
    return int(held)


def _rows(name: str, splits: Sequence[Split]) -> list[list[str]]:
    alone, alone_s = splits[0].answers(), splits[0].seconds_per_token()
    rows = []
    for split in splits:
        answers, known = split.answers(), split.info.memory
        rows.append(
            [
                name,
                str(split.size),
                f"{sum(answers.get(key) == one for key, one in alone.items())} of {len(alone)}",
                ABSENT if known is None else f"{known.target_weights_bytes / 1e3:,.0f}",
                f"{split.held_bytes / 1e3:,.0f}",
                f"{split.seconds_per_token() / alone_s:.1f}",
            ]
        )
    return rows


def _random_model(folder: Path, architecture: str) -> Path:
    """Return a target of this architecture with drafts, written if it is not there."""
    if folder.exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    begun = folder.with_suffix(".part")
    shutil.rmtree(begun, ignore_errors=True)
    tiny.build(begun, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture, vocab_size=tiny.VOCABULARY, hidden_size=tiny.HIDDEN, intermediate_size=64,
        num_hidden_layers=tiny.LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=16,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(begun / "target")
    return begun.rename(folder)
