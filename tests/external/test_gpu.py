"""Is decoding exact on this GPU, and what does a round cost at the size of Qwen3-8B?

Nano answers embedded prompts, alone and together, in float32 and bfloat16. Then a target of the shape of Qwen3-8B is
timed with a five-layer DFlash draft and an EAGLE-3 head. The weights are random, so next to nothing is accepted: the
milliseconds are those of a real model, the acceptance is not. At last each kind of draft is trained a little, for nano.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_bench.analysis.roofline import work
from dflash_bench.core import methods
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.forwards import Rates
from dflash_bench.core.types import Generation, Message
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.capturing import capture_passes
from dflash_bench.engine.drafter import Drafter, NoDrafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, presets
from dflash_bench.models.memory import size_of
from dflash_bench.models.nets import dflash, eagle3
from dflash_bench.perf.measure import measure_rates
from dflash_bench.tasks import suites
from dflash_bench.training import session
from dflash_bench.training.config import TrainRequest

pytestmark = pytest.mark.gpu
METHODS = ("ar", "dflash", "eagle3")
TRAINED = ("dflash", "eagle3", "medusa")
STEPS = 40
MOST_S = 480
NUM_WARM_UP = 4
"""Rounds left out at the start of a timed generation."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to run; `body` is the shape that the timed target and its drafts share."""

    title: str
    num_prompts: int
    max_new_tokens: int
    prompt_length: int
    draft_layers: int
    draft_vocabulary: int
    body: dict[str, Any]


def body(hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], vocabulary: int) -> dict[str, Any]:
    """`heads` are query heads, key-value heads, and their size."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_target_layers": layers,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocabulary,
        "rope_theta": 1e6,
    }


FULL = Size("of the shape of Qwen3-8B", 8, 96, 512, 5, 32000, body(4096, 12288, 36, (32, 8, 128), 151936))
TOY = Size("of toy size: these milliseconds mean nothing", 2, 24, 24, 2, 128, body(64, 128, 8, (4, 2, 16), 512))


@dataclass(frozen=True, slots=True)
class Exactness:
    """One cell; `verdicts` has one entry per answer: exact, near_tie, mismatch or failed. `notes` has a line for each
    that is not exact."""

    cell: str
    verdicts: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def num_wrong(self) -> int:
        return self.verdicts.count("mismatch") + self.verdicts.count("failed")


@dataclass(frozen=True, slots=True)
class Timing:
    """A method's rounds, with passes captured as graphs or computed one by one; `bandwidth` is the share of what
    copying reaches that a plain step reads its weights and caches with."""

    method: str
    batch: int
    passes: str
    bandwidth: float | None
    draft_ms: float
    verify_ms: float
    round_ms: float
    peak_bytes: int | None
    syncs: float | None
    """How often per round the host waits for the GPU; None without a GPU."""


@dataclass(frozen=True, slots=True)
class Training:
    """Losses half way and at the end, and what the target accepted."""

    method: str
    losses: tuple[float, float]
    al_pooled: float
    seconds: float

    @property
    def learns(self) -> bool:
        return self.losses[1] < self.losses[0]


@dataclass(frozen=True, slots=True)
class Found:
    exactness: list[Exactness]
    timings: list[Timing]
    trainings: list[Training]
    seconds: float
    toy: bool

    def timing(self, method: str, batch: int, passes: str = "graph") -> Timing:
        if self.toy:
            pytest.skip("milliseconds of toy size on a CPU mean nothing")
        return next(one for one in self.timings if (one.method, one.batch, one.passes) == (method, batch, passes))


@pytest.fixture(scope="module")
def found(
    pytestconfig: pytest.Config, write_page: Callable[[str, Sequence[str]], None], command: Callable[[str], str]
) -> Found:
    toy = pytestconfig.getoption("--toy")
    if not toy and not torch.cuda.is_available():
        pytest.skip("no CUDA device here; --toy runs the same at toy size on the CPU")
    start_s = time.monotonic()
    device, size = torch.device("cpu" if toy else "cuda"), TOY if toy else FULL
    if toy:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    exactness = [row for dtype in (torch.float32, torch.bfloat16) for row in nano(device, dtype, size)]
    timings = list(timed(device, size))
    trainings = [trained(method, device) for method in TRAINED]
    seconds = time.monotonic() - start_s
    text = markdown(command("gpu"), device, size, exactness, timings, seconds) + "\n".join(training_lines(trainings))
    name = "cpu-toy" if toy else torch.cuda.get_device_name(device).lower().replace(" ", "-")
    write_page(f"speed/smoke-{name}.md", [text])
    return Found(exactness, timings, trainings, seconds, toy)


def test_no_output_is_wrong(found: Found) -> None:
    assert [note for row in found.exactness if row.num_wrong for note in row.notes or (row.cell,)] == []


@pytest.mark.parametrize("number", range(len(TRAINED)), ids=TRAINED)
def test_a_draft_learns(found: Found, number: int) -> None:
    assert found.trainings[number].learns, found.trainings[number]


# Limits that were fixed before anything had run on a GPU; `scripts/study gpu` states them, too.


def test_a_plain_step_reads_at_80_percent_of_the_bandwidth(found: Found) -> None:
    share = found.timing("ar", 1).bandwidth
    assert share is not None and share >= 0.8


@pytest.mark.parametrize(("batch", "most"), [(1, 1.25), (32, 1.6)])
def test_a_round_costs_little_more_than_a_plain_step(found: Found, batch: int, most: float) -> None:
    assert found.timing("dflash", batch).round_ms <= most * found.timing("ar", batch).round_ms


@pytest.mark.parametrize("method", METHODS)
def test_graphs_are_faster_than_passes_computed_one_by_one(found: Found, method: str) -> None:
    assert found.timing(method, 1).round_ms < found.timing(method, 1, "off").round_ms


@pytest.mark.parametrize("method", METHODS)
def test_a_round_waits_for_the_gpu_once(found: Found, method: str) -> None:
    syncs = found.timing(method, 1).syncs
    assert syncs is not None and syncs <= 1


def test_all_of_it_takes_less_than_eight_minutes(found: Found) -> None:
    assert found.seconds < MOST_S


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Exactness.


def nano(device: torch.device, dtype: torch.dtype, size: Size) -> Iterator[Exactness]:
    """Every method alone, and every method on all prompts together, against plain decoding of each prompt alone."""
    preset, chosen = presets.preset("nano"), methods.chosen(list(METHODS[1:]))
    drafts = sorted({method.draft for method in chosen if method.draft is not None})
    models = loading.load("nano", drafts, str(device), dtype)
    backend = open_backend(models, preset, chosen, size.max_new_tokens)
    loaded = suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", size.num_prompts)
    messages = [[Message("user", prompt.turns[0])] for prompt in loaded.prompts]
    prompts = [backend.encode(message) for message in messages]
    plain = [backend.generate_ids("ar", [prompt])[0] for prompt in prompts]
    for method in METHODS:
        alone = [backend.generate_ids(method, [prompt])[0] for prompt in prompts]
        for together, generations in (("alone", alone), ("together", backend.generate_ids(method, prompts))):
            cell = f"{str(dtype).removeprefix('torch.')} | {method} | {together}"
            say(f"nano {cell}")
            judged = [verdict(backend, *answers) for answers in zip(messages, plain, generations, strict=True)]
            where = cell.replace(" | ", ", ")
            notes = tuple(f"{where}, prompt {i}: {note}" for i, (_, note) in enumerate(judged) if note)
            yield Exactness(cell, tuple(word for word, _ in judged), notes)


def verdict(backend: LocalBackend, message: list[Message], plain: Generation, other: Generation) -> tuple[str, str]:
    """The verdict, and a note about it (empty if exact)."""
    if other.error or plain.error:
        return "failed", str(other.error or plain.error)
    if other.token_ids == plain.token_ids:
        return "exact", ""
    divergence = backend.divergence(message, plain.token_ids, other.token_ids)
    return divergence.verdict, f"{divergence.verdict} at {divergence}"


# Time.


def timed(device: torch.device, size: Size) -> Iterator[Timing]:
    say("random weights " + size.title)
    with device:
        target = target_of(random_target(size), "native")
        drafters = random_drafters(target, size)
    rates = measure_rates(device, target.model.dtype)
    modes = ((None, (1, 2)),) if device.type == "cpu" else (("off", (1,)), (None, (1, 8, 32)))
    for capture, batches in modes:
        passes = capture_passes(target, drafters.values(), capture)
        for batch in batches:
            # Rows of different lengths, as they are after a few rounds of any real batch.
            lengths = [size.prompt_length - i % 8 for i in range(batch)]
            prompts = [torch.randint(size.body["vocab_size"] - 1, (length,)).tolist() for length in lengths]
            for method, drafter in drafters.items():
                say(f"{method} at batch {batch}, graphs: {passes}")
                yield timing(target, method, drafter, prompts, size, passes, rates)


def timing(
    target: Target, method: str, drafter: Drafter, prompts: list[list[int]], size: Size, passes: str, rates: Rates
) -> Timing:
    backend = LocalBackend(target, NO_TEXT, {method: drafter}, Limits(size.max_new_tokens))
    backend.generate_ids(method, prompts)  # asks for its passes, which are captured before the next answer
    generation = backend.generate_ids(method, prompts)[0]
    if generation.error:
        pytest.fail(f"{method} at batch {len(prompts)} failed: {generation.error}")
    assert generation.draft_s is not None and generation.verify_s is not None and generation.round_s is not None
    times = (generation.draft_s, generation.verify_s, generation.round_s)
    draft, verify, whole = (statistics.median(seconds[NUM_WARM_UP:]) * 1000 for seconds in times)
    context = size.prompt_length + size.max_new_tokens // 2
    read = work(size_of(target.model), len(prompts), 1, context).num_bytes
    share = read / (whole / 1000) / rates.bandwidth if method == "ar" else None
    syncs = host_syncs(backend, method, prompts) if target.device.type == "cuda" else None
    return Timing(method, len(prompts), passes, share, draft, verify, whole, generation.peak_memory_bytes, syncs)


NO_TEXT: Any = SimpleNamespace(decode=lambda *_args, **_options: "")
"""A stand-in for a tokenizer: random tokens are not text."""


def host_syncs(backend: LocalBackend, method: str, prompts: list[list[int]]) -> float:
    """Per round, as torch reports them. Only what a longer answer adds is counted, so not prefill or the clock."""
    limit, counts = backend.limits.max_new_tokens, []
    for length in (limit // 2, limit):
        backend.limits = Limits(length)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                generation = backend.generate_ids(method, prompts)[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append((sum("synchroniz" in str(w.message) for w in caught), len(generation.round_s or ())))
    (few, few_rounds), (many, many_rounds) = counts
    return (many - few) / (many_rounds - few_rounds)


def random_target(size: Size) -> Any:
    shape = size.body
    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_target_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def random_drafters(target: Target, size: Size) -> dict[str, Drafter]:
    """Published shapes: as many DFlash layers as taps, in blocks of 16; a chain of EAGLE-3."""
    depth = size.body["num_target_layers"]
    taps = dflash.default_target_layers(depth, size.draft_layers)
    mask = size.body["vocab_size"] - 1
    block = dflash.DFlashConfig(
        num_layers=size.draft_layers, block_size=16, mask_token_id=mask, target_layer_ids=taps, **size.body
    )
    chain = eagle3.Eagle3Config(
        draft_vocab_size=size.draft_vocabulary, target_layer_ids=eagle3.default_target_layers(depth), **size.body
    )
    first, second = (network.to(torch.bfloat16) for network in (dflash.DFlashDraft(block), eagle3.Eagle3Draft(chain)))
    return {
        "ar": NoDrafter(),
        "dflash": DFlashDrafter(first, target.embedding, target.head),
        "eagle3": Eagle3Drafter(second, target.embedding, methods.parse("eagle3").number("n")),
    }


# Training.


def trained(method: str, device: torch.device) -> Training:
    """On nano's answers to a few prompts: does the loss fall on this device?"""
    say(f"training {method}")
    start_s = time.monotonic()
    with TemporaryDirectory() as folder:
        out = Path(folder)
        request = TrainRequest(
            target="nano",
            method=method,
            out=out,
            written=16,
            max_new_tokens=48,
            batch_size=24,
            steps=STEPS,
            rate=0.02,
            block_size=8 if method == "dflash" else None,
            device=str(device),
        )
        session.perform(request, lambda _: None)
        history = torch.load(out / "work" / f"{method}.pt", weights_only=True)["history"]
    half = next(entry for entry in history if entry["step"] >= STEPS // 2)
    last = history[-1]
    return Training(method, (half["loss"], last["loss"]), last["al_pooled"], time.monotonic() - start_s)


# Text.


def markdown(
    command: str,
    device: torch.device,
    size: Size,
    exactness: Sequence[Exactness],
    timings: Sequence[Timing],
    seconds: float,
) -> str:
    env = describe()
    plain = {(row.batch, row.passes): row.round_ms for row in timings if row.method == "ar"}
    lines = [
        f"# Smoke test on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'the CPU, toy size'}",
        "",
        f"```\n{command}\n```",
        "",
        f"{one_line(env)}, transformers {env['packages']['transformers']}; {seconds:.0f} s in all.",
        "",
        "## Nano, against plain decoding of each prompt alone",
        "",
        "| dtype | method | rows | exact | near ties | wrong |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in exactness:
        count = row.verdicts.count
        lines.append(f"| {row.cell} | {count('exact')}/{len(row.verdicts)} | {count('near_tie')} | {row.num_wrong} |")
    notes = [f"- {note}" for row in exactness for note in row.notes]
    lines += ["", *(notes or ["No output differs."]), "", f"## A round, random bfloat16 weights {size.title}", ""]
    lines += [
        f"Prompts of {size.prompt_length} tokens or slightly fewer; medians over the rounds of one generation.",
        "",
        "| method | graphs | batch | draft ms | verify ms | round ms | in plain steps | bandwidth | peak GiB "
        "| host syncs per round |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for timing in timings:
        memory = "n/a" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**30:.1f}"
        share = "" if timing.bandwidth is None else f"{timing.bandwidth:.0%}"
        syncs = "n/a" if timing.syncs is None else f"{timing.syncs:.2f}"
        lines.append(
            f"| {timing.method} | {timing.passes} | {timing.batch} | {timing.draft_ms:.2f} | {timing.verify_ms:.2f} "
            f"| {timing.round_ms:.2f} | {timing.round_ms / plain[timing.batch, timing.passes]:.2f} | {share} "
            f"| {memory} | {syncs} |"
        )
    return "\n".join(lines) + "\n"


def training_lines(trainings: Sequence[Training]) -> Iterator[str]:
    yield "\n## Training\n"
    yield f"Drafts for nano, {STEPS} steps on its own answers: the loss must fall.\n"
    yield "| method | loss half way | loss at the end | accepted, tokens per round | seconds |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for one in trainings:
        half, last = one.losses
        yield f"| {one.method} | {half:.3f} | {last:.3f} | {one.al_pooled:.2f} | {one.seconds:.0f} |"
