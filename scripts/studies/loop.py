"""Speed of our own decoding loop, as ratios measured in one run on one thread with the nano models; with goals.

How fast is plain decoding beside `transformers.generate`, and DFlash beside transformers' own DFlash, with the same
weights? What does a DFlash round cost in plain steps, and how much of both is not arithmetic? All arms take turns
prompt by prompt, so that drift affects them equally. Keep the machine quiet meanwhile. The study `speed` has the same
beside llama.cpp.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_bench.core import methods
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Generation, Message
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.models import loading, presets
from dflash_bench.tasks import suites
from helpers.assistant import assistant
from studies._study import Made, Work

TAKES = "five minutes of one core"
PAGES = ("speed/loop-nano-cpu.md",)
EXTRA = "dev"

NUM_PROMPTS, MAX_NEW_TOKENS = 24, 64
TimedArm = Callable[[list[Message]], float]
MISSED = ", missed"
LIMITS = {
    "plain decoding, our tokens/s over those of `transformers.generate`": (2.0, "at least"),
    "DFlash, our tokens/s over those of transformers' own DFlash": (2.2, "at least"),
    "plain decoding, our forward's tokens/s over those of transformers' forward in our loop": (1.0, "at least"),
    "plain decoding, numba's kernels over torch's": (1.5, "at least"),
    "DFlash, numba's kernels over torch's": (1.2, "at least"),
    "time of a DFlash round, in plain steps": (1.5, "at most"),
    "share of a plain step outside the kernels": (0.35, "at most"),
    "share of a DFlash round outside the kernels": (0.35, "at most"),
}
"""Goals, not measured values."""
HEAD = """# Our own loop

{machine}.
`{command}` makes this page: nano, float32, one thread, {prompts} embedded
questions of gsm8k, up to {tokens} tokens. A ratio is the median over prompts of each prompt's ratio, all arms in turn.
The kernels are the compiled passes of a round, timed alone on the same buffers, one after the other.

A plain step takes {step:.2f} ms, of which {step_kernels:.2f} ms are kernels; a DFlash round {block:.2f} ms, of which
{block_kernels:.2f} ms are. With transformers' forward a plain step takes {published:.2f} ms.

| what | measured | goal |
|---|---:|---:|
"""


def make(work: Work, options: Namespace) -> Made:
    torch.set_num_threads(1)
    models = loading.load("nano", ["dflash"], "cpu", torch.float32)
    ours = opened(models)
    loaded = suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", NUM_PROMPTS)
    chats = [[Message("user", prompt.turns[0])] for prompt in loaded.prompts]
    kept: dict[str, list[Generation]] = defaultdict(list)
    arms = arms_of(models, ours, kept)
    seconds = in_turn(arms, chats, kept)
    refuse_wrong(kept)
    # Both are timed as rounds: a plain step is a round without drafts.
    step, block, slow = (
        [statistics.median(generation.round_s or ()) for generation in kept[name]]
        for name in ("plain", "dflash", "published")
    )
    kernels = {name: seconds_in_kernels(ours, name, chats[0]) for name in ("ar", "dflash")}
    figures = [
        paired(seconds["generate"], seconds["plain"]),
        paired(seconds["their dflash"], seconds["dflash"]),
        paired(seconds["published"], seconds["plain"]),
        paired(seconds["torch"], seconds["plain"]),
        paired(seconds["torch dflash"], seconds["dflash"]),
        paired(block, step),
        1 - kernels["ar"] / statistics.median(step),
        1 - kernels["dflash"] / statistics.median(block),
    ]
    text = HEAD.format(
        command=work.command,
        machine=one_line(describe()).rstrip("."),
        prompts=NUM_PROMPTS,
        tokens=MAX_NEW_TOKENS,
        step=milliseconds(step),
        block=milliseconds(block),
        published=milliseconds(slow),
        step_kernels=1000 * kernels["ar"],
        block_kernels=1000 * kernels["dflash"],
    )
    lines = [line(what, figure) for what, figure in zip(LIMITS, figures, strict=True)]
    return Made({PAGES[0]: text + "".join(lines)}, [f"missed: {one.strip()}" for one in lines if MISSED in one])


def opened(models: loading.Models, **how: Any) -> LocalBackend:
    return open_backend(models, presets.preset("nano"), methods.chosen(["dflash"]), MAX_NEW_TOKENS, **how)


def arms_of(models: loading.Models, ours: LocalBackend, kept: dict[str, list[Generation]]) -> dict[str, TimedArm]:
    """Return functions that answer a chat and return seconds per token; our engine's answers are kept."""
    published, by_torch = opened(models, engine="transformers"), opened(models, kernels="torch")
    theirs = assistant(models.drafts["dflash"])
    return {
        "plain": lambda chat: per_token(kept["plain"], ours.generate("ar", chat)),
        "dflash": lambda chat: per_token(kept["dflash"], ours.generate("dflash", chat)),
        "published": lambda chat: per_token(kept["published"], published.generate("ar", chat)),
        "torch": lambda chat: per_token(kept["torch"], by_torch.generate("ar", chat)),
        "torch dflash": lambda chat: per_token(kept["torch dflash"], by_torch.generate("dflash", chat)),
        "generate": lambda chat: generate(models, ours, chat),
        "their dflash": lambda chat: generate(models, ours, chat, assistant_model=theirs, speculation_type="dflash"),
    }


def in_turn(
    arms: dict[str, TimedArm], chats: Sequence[list[Message]], kept: dict[str, list[Generation]]
) -> dict[str, list[float]]:
    """Return seconds per token by arm and chat; passes of all lengths are compiled before anything is timed."""
    for chat in chats:
        for arm in arms.values():
            arm(chat)
    for several in kept.values():
        several.clear()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number, chat in enumerate(chats):
        for name in list(arms) if number % 2 else list(arms)[::-1]:
            seconds[name].append(arms[name](chat))
    return seconds


def refuse_wrong(kept: dict[str, list[Generation]]) -> None:
    answers = {name: [generation.token_ids for generation in several] for name, several in kept.items()}
    if wrong := [name for name, ids in answers.items() if ids != answers["plain"]]:
        raise SystemExit(f"other tokens than plain decoding's, so that no speed counts: {', '.join(wrong)}")


def line(what: str, figure: float) -> str:
    limit, kind = LIMITS[what]
    good = figure >= limit if kind == "at least" else figure <= limit
    return f"| {what} | {figure:.2f} | {kind} {limit:g}{'' if good else MISSED} |\n"


def seconds_in_kernels(backend: LocalBackend, method: str, chat: Sequence[Message]) -> float:
    """Return the median seconds of a round's compiled passes only, in the middle of an answer."""
    from unittest.mock import patch

    from dflash_bench.engine.forward import compiled, compiled_drafts
    from dflash_bench.engine.loop import decode
    from dflash_bench.engine.sampling import Sampling

    steps = decode(
        backend.target, backend.drafters[method], [backend.encode(chat)], backend.limits, Sampling(), backend.clock
    )
    for _ in range(3):
        next(steps)
    run, calls, times = compiled.run, list[tuple[Any, ...]](), list[float]()

    def recorded(*call: Any) -> None:
        calls.append(call)
        run(*call)

    with patch.object(compiled, "run", recorded), patch.object(compiled_drafts, "run", recorded):
        next(steps)
    for _ in range(200):
        start = time.perf_counter()
        for call in calls:
            run(*call)
        times.append(time.perf_counter() - start)
    steps.close()  # type: ignore[attr-defined]
    return statistics.median(times)


def paired(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the prompts' ratios, so that a disturbance of the machine affects only a single ratio."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def milliseconds(times: Sequence[float]) -> float:
    return statistics.median(times) * 1000


def per_token(kept: list[Generation], generation: Generation) -> float:
    kept.append(generation)
    return generation.decode_s / (len(generation.token_ids) - 1)


def generate(models: loading.Models, backend: LocalBackend, chat: list[Message], **options: Any) -> float:
    """Return seconds per token of `generate`, without prefill, which a one-token answer measures."""
    ids = torch.tensor([backend.encode(chat)])
    times = []
    for length in (1, MAX_NEW_TOKENS):
        start = time.perf_counter()
        out = models.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
        )
        times.append(time.perf_counter() - start)
    seconds: float = (times[1] - times[0]) / (out.shape[1] - ids.shape[1] - 1)
    return seconds
