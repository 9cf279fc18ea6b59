"""Our loop beside a llama.cpp server: the same weights, as GGUF files, one thread each, all arms in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.models import loading, presets
from dflash_bench.models.convert import convert
from dflash_bench.tasks import suites
from studies._llamacpp_server import Server, Settings, version

OURS, EXACT, FLASH = "ours", "llama.cpp", "llama.cpp, flash attention"
METHODS = ("ar", "dflash")
SIZES = {"nano": (24, 64), "smollm2": (6, 48)}
"""Models, each with its number of prompts, and of tokens of an answer at most."""
HEAD = """
## Beside llama.cpp

{version}, one thread, embedded questions of gsm8k, all arms in turn; the same weights in float32, as
files by `dflash-bench convert --to gguf`. Each engine measures its own time after the first token; ours includes the
draft's reading of the prompt, llama.cpp's does not. "flash": with flash attention, its default, which computes
attention in float16 on a CPU. "equal": answers with the same tokens as our plain decoding.
Goals, set before any of it was measured, ours / llama.cpp: nano 1.0 by plain decoding and 1.3 by DFlash, SmolLM2 1.0 by
either.

| model | method | ours, tok/s | llama.cpp, tok/s (equal) | ... flash (equal) | ours / llama.cpp | ours / flash |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""
ABSENT = "\nllama.cpp was not there to compare with; `nox -s llamacpp` sets it up.\n"
Arm = tuple[str, str]
"""An engine and a method."""
Timed = dict[Arm, list[tuple[tuple[int, ...], float]]]
"""Per prompt, the answer and its seconds per token."""


def page(python: Path) -> str:
    """The section of the report; `python` is the one with xllamacpp, which may not exist."""
    if not python.exists():
        return ABSENT
    text = HEAD.format(version=f"xllamacpp {version(python)}")
    for model, (num_prompts, max_tokens) in SIZES.items():
        try:
            text += "".join(f"{row}\n" for row in rows(model, measured(python, model, num_prompts, max_tokens)))
        except UserError as error:
            text += f"| {model} | not measured: {error} | | | | | |\n"
    return text


def measured(python: Path, model: str, num_prompts: int, max_tokens: int) -> Timed:
    """Raises UserError if the model is not on this machine."""
    backend = ours(model, max_tokens)
    loaded = suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", num_prompts)
    chats = [[Message("user", prompt.turns[0])] for prompt in loaded.prompts]
    timed: Timed = {(engine, method): [] for engine in (OURS, EXACT, FLASH) for method in METHODS}
    with TemporaryDirectory(prefix="bench_llamacpp-") as folder, ExitStack() as stack:
        servers = {
            arm: stack.enter_context(Server(python, settings))
            for arm, settings in served(Path(folder), model, backend).items()
        }
        for arm in timed:
            answer(backend, servers, arm, chats[0], max_tokens)
        for number, chat in enumerate(chats):
            for arm in list(timed) if number % 2 else list(timed)[::-1]:
                timed[arm].append(answer(backend, servers, arm, chat, max_tokens))
    return timed


def ours(model: str, max_tokens: int) -> LocalBackend:
    models = loading.load(model, ["dflash"], "cpu", torch.float32)
    return open_backend(models, presets.preset(model), methods.chosen(["dflash"]), max_tokens)


def served(folder: Path, model: str, backend: LocalBackend) -> dict[Arm, Settings]:
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    convert(model, target, "gguf", None)
    convert(presets.preset(model).drafts["dflash"], draft, "gguf", model)
    num_drafts = backend.drafters["dflash"].num_drafts
    arms = {}
    for engine in (EXACT, FLASH):
        flash = engine == FLASH
        arms[engine, "ar"] = Settings(str(target), flash_attention=flash)
        arms[engine, "dflash"] = Settings(str(target), "dflash", str(draft), num_drafts, flash_attention=flash)
    return arms


def answer(
    backend: LocalBackend, servers: dict[Arm, Server], arm: Arm, chat: list[Message], max_tokens: int
) -> tuple[tuple[int, ...], float]:
    if arm in servers:
        done = servers[arm].complete(backend.encode(chat), max_tokens)
        return done.tokens, done.decode_s / (len(done.tokens) - 1)
    generation = backend.generate(arm[1], chat)
    return generation.token_ids, generation.decode_s / (len(generation.token_ids) - 1)


def rows(model: str, timed: Timed) -> Iterator[str]:
    plain = [tokens for tokens, _ in timed[OURS, "ar"]]
    for method in METHODS:
        seconds = {engine: [s for _, s in timed[engine, method]] for engine in (OURS, EXACT, FLASH)}
        speeds, ratios = [f"{per_second(seconds[OURS]):.0f}"], []
        for engine in (EXACT, FLASH):
            equal = sum(a == b for a, (b, _) in zip(plain, timed[engine, method], strict=True))
            speeds.append(f"{per_second(seconds[engine]):.0f} ({equal}/{len(plain)})")
            both = zip(seconds[engine], seconds[OURS], strict=True)
            ratios.append(f"{statistics.median(theirs / own for theirs, own in both):.2f}")
        yield f"| {' | '.join([model, method, *speeds, *ratios])} |"


def per_second(seconds: Sequence[float]) -> float:
    return 1 / statistics.median(seconds)
