"""Speed of our own decoding loop, as ratios measured in one run on one thread with the nano models.

Three questions: is plain decoding as fast as `transformers.generate`, what does a DFlash round cost in plain steps,
and how much of a round is spent outside the models? The arms take turns prompt by prompt, so drift affects all equally.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dflash_bench import methods
from dflash_bench.engine.local import LocalBackend, open_backend
from dflash_bench.environment import describe, one_line
from dflash_bench.models import loading
from dflash_bench.records import Generation, Message
from dflash_bench.tasks import suites

NUM_PROMPTS, MAX_NEW_TOKENS = 24, 64
LIMITS = {
    "plain decoding, our tokens/s over those of transformers.generate": (1.0, "at least"),
    "time of a DFlash round, in plain steps": (1.6, "at most"),
    "share of a DFlash round outside model calls": (0.10, "at most"),
}


def main() -> int:
    torch.set_num_threads(1)
    chosen = methods.chosen(["dflash"])
    models = loading.load("nano", ["dflash"], "cpu", torch.float32)
    backend = open_backend(models, loading.preset("nano"), chosen, MAX_NEW_TOKENS)
    loaded = suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", NUM_PROMPTS)
    messages = [[Message("user", prompt.turns[0])] for prompt in loaded.prompts]
    arms: dict[str, Callable[[list[Message]], float]] = {
        "ours": lambda m: per_token(record(steps, backend.generate("ar", m))),
        "generate": lambda m: generate(models, backend, m),
    }
    rounds: list[Generation] = []
    steps: list[Generation] = []
    inside = Stopwatch()
    inside.watch_models(backend)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for message in messages[:2]:
        for arm in arms.values():
            arm(message)
        backend.generate("dflash", message)
    steps.clear()
    for i, message in enumerate(messages):
        for name in list(arms) if i % 2 else list(arms)[::-1]:
            seconds[name].append(arms[name](message))
        with inside:
            rounds.append(backend.generate("dflash", message))
    # Both are timed as rounds: a plain step is a round that drafts nothing.
    step, block = ([statistics.median(generation.round_s or ()) for generation in kind] for kind in (steps, rounds))
    whole = [s for g in rounds for s in g.round_s or ()]
    # Prefill, of target and draft, is spent in model calls too, but not in a round.
    prefill = sum(g.prefill_s + (g.draft_prefill_s or 0.0) for g in rounds)
    figures = [
        paired(seconds["generate"], seconds["ours"]),
        paired(block, step),
        1 - (inside.seconds - prefill) / sum(whole),
    ]
    print(one_line(describe()))
    print(f"a plain step takes {milliseconds(step):.2f} ms, a DFlash round {milliseconds(block):.2f} ms")
    missed = 0
    for (text, (limit, kind)), figure in zip(LIMITS.items(), figures, strict=True):
        good = figure >= limit if kind == "at least" else figure <= limit
        missed += not good
        print(f"{'ok  ' if good else 'MISS'} {text}: {figure:.3f} ({kind} {limit})")
    return 1 if missed else 0


class Stopwatch:
    """A context manager that adds up the time spent in model calls inside it."""

    def __init__(self) -> None:
        self.seconds, self.running = 0.0, False

    def __enter__(self) -> None:
        self.running = True

    def __exit__(self, *_: object) -> None:
        self.running = False

    def watch_models(self, backend: LocalBackend) -> None:
        drafter: Any = backend.drafters["dflash"]
        network: Any = backend.target.network
        network.read = self.timed(network.read)
        drafter.network.forward = self.timed(drafter.network.forward)
        drafter.network.context = self.timed(drafter.network.context)
        drafter.head, drafter.embedding = self.timed(drafter.head), self.timed(drafter.embedding)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            if self.running:
                self.seconds += time.perf_counter() - start
            return result

        return wrapper


def paired(times: list[float], others: list[float]) -> float:
    """The median over prompts of each prompt's ratio, so that a hiccup of the machine spoils only one ratio."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def milliseconds(times: list[float]) -> float:
    return statistics.median(times) * 1000


def record(generations: list[Generation], generation: Generation) -> Generation:
    generations.append(generation)
    return generation


def per_token(generation: Generation) -> float:
    return generation.decode_s / (len(generation.token_ids) - 1)


def generate(models: loading.Models, backend: LocalBackend, messages: list[Message]) -> float:
    """Seconds per token of `generate`, without prefill, which is measured by a one-token answer and subtracted."""
    ids = torch.tensor([backend.encode(messages)])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    times = []
    for length in (1, MAX_NEW_TOKENS):
        start = time.perf_counter()
        out = models.target.generate(ids, max_new_tokens=length, **options)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (out.shape[1] - ids.shape[1] - 1)


if __name__ == "__main__":
    sys.exit(main())
