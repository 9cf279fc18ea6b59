"""Speed of our own decoding loop, as ratios measured in one run on one thread with the nano models.

How fast is plain decoding beside `transformers.generate`, and DFlash beside transformers' own DFlash, with the same
weights? How fast are both beside llama.cpp, if `scripts/check_llamacpp` has set it up? What does a DFlash round cost in
plain steps, and how much of both is not arithmetic? All arms take turns prompt by prompt, so that drift affects them
equally.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_llamacpp
import torch
from assistant import assistant
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_bench import methods
from dflash_bench.engine.local import LocalBackend, open_backend
from dflash_bench.environment import describe, one_line
from dflash_bench.models import loading
from dflash_bench.records import Generation, Message
from dflash_bench.tasks import suites

NUM_PROMPTS, MAX_NEW_TOKENS = 24, 64
LLAMACPP = Path(os.environ.get("LLAMACPP_VENV") or Path(__file__).parent.parent / ".venv-llamacpp")
LIMITS = {
    "plain decoding, our tokens/s over those of `transformers.generate`": (2.0, "at least"),
    "DFlash, our tokens/s over those of transformers' own DFlash": (2.2, "at least"),
    "plain decoding, our forward's tokens/s over those of transformers' forward in our loop": (1.0, "at least"),
    "time of a DFlash round, in plain steps": (1.5, "at most"),
    "share of a plain step outside arithmetic": (0.35, "at most"),
    "share of a DFlash round outside arithmetic": (0.35, "at most"),
}
"""Goals, not what was reached."""
ARITHMETIC = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "_scaled_dot_product_flash_attention_for_cpu")
HEAD = """# Our own loop

{machine}.
`scripts/bench_loop results/loop-nano-cpu.md` makes this page: nano, float32, one thread, {prompts} embedded
questions of gsm8k, up to {tokens} tokens. A ratio is the median over prompts of each prompt's ratio, all arms in turn.
Arithmetic is every matrix product and attention of a step, timed alone on the same tensors, one after the other.

A plain step takes {step:.2f} ms, of which {step_arithmetic:.2f} ms are arithmetic; a DFlash round {block:.2f} ms, of
which {block_arithmetic:.2f} ms are. With transformers' forward a plain step takes {published:.2f} ms.

| what | measured | goal |
|---|---:|---:|
"""


def main() -> int:
    torch.set_num_threads(1)
    chosen = methods.chosen(["dflash"])
    models = loading.load("nano", ["dflash"], "cpu", torch.float32)
    preset = loading.preset("nano")
    ours = open_backend(models, preset, chosen, MAX_NEW_TOKENS)
    published = open_backend(models, preset, chosen, MAX_NEW_TOKENS, engine="transformers")
    theirs = assistant(models.drafts["dflash"])
    loaded = suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", NUM_PROMPTS)
    chats = [[Message("user", prompt.turns[0])] for prompt in loaded.prompts]
    kept: dict[str, list[Generation]] = {name: [] for name in ("plain", "dflash", "published")}
    arms: dict[str, Callable[[list[Message]], float]] = {
        "plain": lambda m: per_token(kept["plain"], ours.generate("ar", m)),
        "dflash": lambda m: per_token(kept["dflash"], ours.generate("dflash", m)),
        "published": lambda m: per_token(kept["published"], published.generate("ar", m)),
        "generate": lambda m: generate(models, ours, m),
        "their dflash": lambda m: generate(models, ours, m, assistant_model=theirs, speculation_type="dflash"),
    }
    for chat in chats[:2]:
        for arm in arms.values():
            arm(chat)
    for several in kept.values():
        several.clear()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number, chat in enumerate(chats):
        for name in list(arms) if number % 2 else list(arms)[::-1]:
            seconds[name].append(arms[name](chat))
    # Both are timed as rounds: a plain step is a round that drafts nothing.
    step, block, slow = (
        [statistics.median(generation.round_s or ()) for generation in kept[name]]
        for name in ("plain", "dflash", "published")
    )
    arithmetic = {name: arithmetic_of(ours, name, chats[0]) for name in ("ar", "dflash")}
    figures = [
        paired(seconds["generate"], seconds["plain"]),
        paired(seconds["their dflash"], seconds["dflash"]),
        paired(seconds["published"], seconds["plain"]),
        paired(block, step),
        1 - arithmetic["ar"] / statistics.median(step),
        1 - arithmetic["dflash"] / statistics.median(block),
    ]
    text = HEAD.format(
        machine=one_line(describe()).rstrip("."), prompts=NUM_PROMPTS, tokens=MAX_NEW_TOKENS,
        step=milliseconds(step), block=milliseconds(block), published=milliseconds(slow),
        step_arithmetic=1000 * arithmetic["ar"], block_arithmetic=1000 * arithmetic["dflash"],
    )  # fmt: skip
    missed = 0
    for (what, (limit, kind)), figure in zip(LIMITS.items(), figures, strict=True):
        good = figure >= limit if kind == "at least" else figure <= limit
        missed += not good
        text += f"| {what} | {figure:.2f} | {kind} {limit:g}{'' if good else ', missed'} |\n"
    text += bench_llamacpp.page(LLAMACPP / "bin" / "python")
    print(text)
    for path in map(Path, sys.argv[1:]):
        path.write_text(text)
    return 1 if missed else 0


class Recorder(TorchDispatchMode):
    """Keeps the arithmetic of what runs inside it: each call with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ARITHMETIC:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def arithmetic_of(backend: LocalBackend, method: str, chat: Sequence[Message]) -> float:
    """Seconds of one round's matrix products and attention alone, the median of many: in the middle of an answer."""
    from dflash_bench.engine.decoding import decode
    from dflash_bench.engine.sampling import Sampling

    times = []
    steps = decode(
        backend.target, backend.drafters[method], [backend.encode(chat)], backend.limits, Sampling(), backend.clock
    )
    for _ in range(3):
        next(steps)
    recorder = Recorder()
    with recorder, torch.inference_mode():
        next(steps)
    with torch.inference_mode():
        for _ in range(200):
            start = time.perf_counter()
            for func, args, kwargs in recorder.calls:
                func(*args, **kwargs)
            times.append(time.perf_counter() - start)
    steps.close()  # type: ignore[attr-defined]
    return statistics.median(times)


def paired(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over prompts of each prompt's ratio, so that a hiccup of the machine spoils only one ratio."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def milliseconds(times: Sequence[float]) -> float:
    return statistics.median(times) * 1000


def per_token(kept: list[Generation], generation: Generation) -> float:
    kept.append(generation)
    return generation.decode_s / (len(generation.token_ids) - 1)


def generate(models: loading.Models, backend: LocalBackend, chat: list[Message], **options: Any) -> float:
    """Seconds per token of `generate`, without prefill, which is measured by a one-token answer and subtracted."""
    ids = torch.tensor([backend.encode(chat)])
    times = []
    for length in (1, MAX_NEW_TOKENS):
        start = time.perf_counter()
        out = models.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
        )
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (out.shape[1] - ids.shape[1] - 1)


if __name__ == "__main__":
    sys.exit(main())
