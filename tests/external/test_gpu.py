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

from dflash_bench.analysis.roofline import least_s, least_s_of_draft, work
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
from dflash_bench.perf.round_parts import draft_passes
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
    """A method's rounds, with passes captured as graphs or computed one by one. `floor_ms` is the time in which the
    device can read what a round reads, or multiply what it multiplies."""

    method: str
    batch: int
    passes: str
    floor_ms: float
    draft_ms: float
    verify_ms: float
    round_ms: float
    peak_bytes: int | None
    syncs: float | None
    """How often per round the host waits for the GPU; None without a GPU."""
    num_late: int
    """Passes that were captured only after the timed answer."""


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


@dataclass(slots=True)
class Found:
    exactness: list[Exactness]
    timings: list[Timing]
    trainings: list[Training]
    toy: bool
    seconds: float = 0.0

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
    found = Found([], [], [], toy)
    name = "cpu-toy" if toy else torch.cuda.get_device_name(device).lower().replace(" ", "-")
    measured: tuple[tuple[list[Any], Iterator[Any]], ...] = (
        (found.exactness, (row for dtype in (torch.float32, torch.bfloat16) for row in nano(device, dtype, size))),
        (found.timings, timed(device, size)),
        (found.trainings, (trained(method, device) for method in TRAINED)),
    )
    for rows, source in measured:
        for row in source:
            rows.append(row)
            found.seconds = time.monotonic() - start_s
            # Written as it goes: a run that is cut off leaves what it has measured.
            write_page(f"speed/smoke-{name}.md", [page(command("gpu"), device, size, found)])
    return found


def test_no_output_is_wrong(found: Found) -> None:
    assert [note for row in found.exactness if row.num_wrong for note in row.notes or (row.cell,)] == []


@pytest.mark.parametrize("number", range(len(TRAINED)), ids=TRAINED)
def test_a_draft_learns(found: Found, number: int) -> None:
    assert found.trainings[number].learns, found.trainings[number]


# Limits that were fixed before a table had been measured, each against the floor of the same round: a round reads the
# draft's layers and the target's head beside the target, which alone is 1.23 plain steps. `scripts/study gpu` states
# them, too.


@pytest.mark.parametrize(("method", "batch", "most"), [("ar", 1, 1.35), ("dflash", 1, 1.15), ("dflash", 32, 1.15)])
def test_a_round_is_near_its_floor(found: Found, method: str, batch: int, most: float) -> None:
    timing = found.timing(method, batch)
    assert timing.round_ms <= most * timing.floor_ms


@pytest.mark.parametrize("method", METHODS)
def test_the_timed_answer_is_captured_whole(found: Found, method: str) -> None:
    assert all(one.num_late == 0 for one in found.timings if one.method == method)


@pytest.mark.parametrize(("batch", "width", "plain_steps"), [(1, 16, 1.23), (1, 8, 1.33)])
def test_the_floor_is_that_of_the_bytes_that_a_round_reads(batch: int, width: int, plain_steps: float) -> None:
    """Bytes counted by hand for Qwen3-8B: 15.3 GB a plain step; 18.8 GB a DFlash round, and 20.3 GB one of EAGLE-3."""
    with torch.device("meta"):
        model, drafts = random_target(FULL), random_drafts(FULL)
    rates = Rates(3.0e12, 1e15)
    draft = drafts["dflash" if width == 16 else "eagle3"]
    plain, drafted = (floor_s(model, one, n, batch, 1024, rates) for one, n in ((None, 0), (draft, width - 1)))
    assert plain * 3.0e12 == pytest.approx(15.3e9, rel=0.01)
    assert drafted / plain == pytest.approx(plain_steps, rel=0.01)


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
    network = getattr(drafter, "draft", None)
    floor = floor_s(target.model, network, drafter.num_drafts, len(prompts), context, rates) * 1000
    num_captured = backend.captured()["captured"]
    syncs = host_syncs(backend, method, prompts) if target.device.type == "cuda" else None
    backend.generate_ids(method, prompts)
    num_late = int(backend.captured()["captured"] - num_captured)
    peak = generation.peak_memory_bytes
    return Timing(method, len(prompts), passes, floor, draft, verify, whole, peak, syncs, num_late)


def floor_s(model: Any, draft: Any, num_drafts: int, rows: int, context: int, rates: Rates) -> float:
    """The least seconds of a round that drafts `num_drafts` tokens, and reads one of the round before."""
    passes = () if draft is None else draft_passes(draft, model, num_drafts, 1)
    verified = least_s(work(size_of(model), rows, num_drafts + 1, context), rates)
    return verified + least_s_of_draft(passes, rows, context, rates)


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


def random_drafts(size: Size) -> dict[str, Any]:
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
    drafts = {"dflash": dflash.DFlashDraft(block), "eagle3": eagle3.Eagle3Draft(chain)}
    return {name: draft.to(torch.bfloat16) for name, draft in drafts.items()}


def random_drafters(target: Target, size: Size) -> dict[str, Drafter]:
    drafts = random_drafts(size)
    return {
        "ar": NoDrafter(),
        "dflash": DFlashDrafter(drafts["dflash"], target.embedding, target.head),
        "eagle3": Eagle3Drafter(drafts["eagle3"], target.embedding, methods.parse("eagle3").number("n")),
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


def page(command: str, device: torch.device, size: Size, found: Found) -> str:
    """The page of what has been found so far."""
    env, exactness, timings = describe(), found.exactness, found.timings
    plain = {(row.batch, row.passes): row.round_ms for row in timings if row.method == "ar"}
    lines = [
        f"# Smoke test on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'the CPU, toy size'}",
        "",
        f"```\n{command}\n```",
        "",
        f"{one_line(env)}, transformers {env['packages']['transformers']}; {found.seconds:.0f} s in all.",
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
        "| method | graphs | batch | draft ms | verify ms | round ms | in plain steps | over its floor | peak GiB "
        "| host syncs per round |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for timing in timings:
        memory = "n/a" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**30:.1f}"
        syncs = "n/a" if timing.syncs is None else f"{timing.syncs:.2f}"
        lines.append(
            f"| {timing.method} | {timing.passes} | {timing.batch} | {timing.draft_ms:.2f} | {timing.verify_ms:.2f} "
            f"| {timing.round_ms:.2f} | {timing.round_ms / plain[timing.batch, timing.passes]:.2f} "
            f"| {timing.round_ms / timing.floor_ms:.2f} | {memory} | {syncs} |"
        )
    return "\n".join([*lines, *training_lines(found.trainings)])


def training_lines(trainings: Sequence[Training]) -> Iterator[str]:
    yield "\n## Training\n"
    yield f"Drafts for nano, {STEPS} steps on its own answers: the loss must fall.\n"
    yield "| method | loss half way | loss at the end | accepted, tokens per round | seconds |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for one in trainings:
        half, last = one.losses
        yield f"| {one.method} | {half:.3f} | {last:.3f} | {one.al_pooled:.2f} | {one.seconds:.0f} |"
