"""Rounds on a GPU, predicted: launches, waits and captures counted without one, and the milliseconds that follow."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dflash_bench.analysis.roofline import work
from dflash_bench.engine import capturing
from dflash_bench.engine.drafter import Captures, NoDrafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.target import Target
from dflash_bench.models import presets, random_weights
from dflash_bench.models.memory import size_of
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.perf.round_parts import draft_passes
from dflash_bench.report.tables import ABSENT, markdown, number
from helpers.drafts.tiny import DFLASH, EAGLE3, PROMPTS
from helpers.pretended_gpu.pretend import Device, moved
from helpers.pretended_gpu.rounds import attention_by_lengths, watched_rounds
from helpers.pretended_gpu.varlen import flash_attention
from helpers.toy import run, tiny
from studies._study import Made, Work

TAKES = "a minute of one core"
PAGES = ("speed/predicted-gpu.md",)

MODEL = "qwen3-8b"
COPIED = {"H100": 3.0e12, "H200": 4.19e12}
"""Bytes per second that copying reaches; an H200 gave its own, and the H100's is an assumption."""
PRODUCTS = 0.85
"""Share of that bandwidth with which products of few rows read their weights."""
SMALL_MS, ONE_MS, SEVERAL_MS = 0.0022, 0.008, 0.019
"""Time of a small kernel in a graph, and of one layer's attention behind 1,024 tokens: of one token, of several."""
WAIT_MS, LAUNCH_MS = 0.17, 0.008
"""Time that a device idles for each wait of the host, and for each launch behind it."""
ALONE_MS = 0.0195
"""Time of an operation launched alone: an H200 took 10.66 ms for the 547 of a plain step."""
CONTEXTS = (1024, 4096)
DRAFTED = {"ar": 0, "dflash": 15, "eagle3": 7}
NAMES = {"ar": "plain", "dflash": "DFlash, 15 drafted", "eagle3": "EAGLE-3, 7 drafted"}
PRODUCT = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear")
NEW = 24

HEAD = """# Rounds on a GPU, predicted

`{command}` makes this page without a GPU; `scripts/study gpu` measures what it predicts.

## Counted

Greedy rounds of one row on the tests' pretended device, which runs torch's operations on the CPU and counts them. A
layer reads one token in a plain step, and the whole block in a round with a draft. `alone` are operations that are
launched one by one, with masks. `captured` are kernels of a graph, with attention by lengths and fused small
operations. `launches` and `waits` are the host's in a captured round, copies included.

{counts}

## Predicted for {model} in bfloat16

One row. `floor`: what a round reads, at the bandwidth of copying. `captured`: the same at {products:.0%} of that
bandwidth, {small:.1f} us for each small kernel, {one:.0f} us for a layer's attention of one token, for several tokens
{many:.0f} us behind 1,024 and in proportion elsewhere, and the host's {wait:.2f} ms a wait and {launch:.0f} us a
launch. `alone`: {alone:.1f} us an operation, or as captured if that takes longer. An H200 gave the {alone:.1f} us and
its bandwidth; the other constants are assumptions. Counts and bytes are neither.

{times}
"""


@dataclass(frozen=True, slots=True)
class Counted:
    """Launches of a method's round, by kind of operation, per layer of target and draft, and besides."""

    layer: Counter[str]
    draft_layer: Counter[str]
    rest: Counter[str]

    def total(self, layers: int, draft_layers: int) -> Counter[str]:
        scaled = Counter(self.rest)
        for per, times in ((self.layer, layers), (self.draft_layer, draft_layers)):
            scaled.update({kind: times * count for kind, count in per.items()})
        return scaled


@dataclass(frozen=True, slots=True)
class Captured:
    launches: int
    waits: float
    captures: int


def make(work: Work, _options: Any) -> Made:
    torch.set_num_threads(1)
    alone = {method: counted(method, is_fused=False) for method in DRAFTED}
    fused = {method: counted(method, is_fused=True) for method in DRAFTED}
    captured = {method: captured_round(method) for method in DRAFTED}
    page = HEAD.format(
        command=work.command,
        model="Qwen3-8B",
        counts=counts_table(alone, fused, captured),
        times=times_table(alone, fused, captured),
        products=PRODUCTS,
        small=1000 * SMALL_MS,
        one=1000 * ONE_MS,
        many=1000 * SEVERAL_MS,
        wait=WAIT_MS,
        launch=1000 * LAUNCH_MS,
        alone=1000 * ALONE_MS,
    )
    return Made({PAGES[0]: page})


# Counts.


def counted(method: str, is_fused: bool) -> Counted:
    """Count a round at several depths; the difference is a layer's share."""
    base = uncaptured(method, 4, 2, is_fused)
    layer = per(uncaptured(method, 6, 2, is_fused), base, 2)
    draft_layer = per(uncaptured(method, 4, 3, is_fused), base, 1) if method == "dflash" else Counter[str]()
    rest = Counter(base)
    rest.subtract({kind: 4 * count for kind, count in layer.items()})
    rest.subtract({kind: 2 * count for kind, count in draft_layer.items()})
    return Counted(layer, draft_layer, rest)


def per(deeper: Counter[str], shallower: Counter[str], layers: int) -> Counter[str]:
    return Counter({kind: (deeper[kind] - shallower[kind]) // layers for kind in deeper})


def uncaptured(method: str, layers: int, draft_layers: int, is_fused: bool) -> Counter[str]:
    """Return the launches of a round whose passes are not captured, by kind."""
    with watched_rounds() as device, ExitStack() as stack:
        target, drafter = models(method, layers, draft_layers)
        if is_fused:
            stack.enter_context(attention_by_lengths(device.as_one("attention", flash_attention)))
            for network in (target.network, getattr(drafter, "network", None)):
                capturing.fuse(network, partial(one_kernel, device))
            # Counted one by one, as a captured pass launches them.
            assert isinstance(target.network, NativeForward) and target.network.fused is not None
            target.network.layers = target.network.fused
        run(target, drafter, PROMPTS[:1], NEW)
        return kinds(Counter(most_of(device.launches_of_rounds)))


def one_kernel(device: Device, function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    kernel: Callable[..., Any] = device.as_one("fused", function)
    return kernel


def most_of(rounds: list[Counter[str]]) -> Counter[str]:
    """The last rounds may draft less, and the first may allocate."""
    return sorted(rounds, key=lambda one: one.total())[len(rounds) // 2]


def kinds(launches: Counter[str]) -> Counter[str]:
    by_kind = Counter[str]()
    for name, count in launches.items():
        kind = "product" if name in PRODUCT else "attention" if "attention" in name else "small"
        by_kind[kind] += count
    return by_kind


def captured_round(method: str) -> Captured:
    with watched_rounds() as device, attention_by_lengths():
        target, drafter = models(method, 4, 2)
        with captured_by(device):
            capturing.capture_passes(target, [drafter], "graph")
            for _ in range(2):
                run(target, drafter, PROMPTS[:1], NEW)
                target.capture(1, 64)
                if isinstance(drafter, Captures):
                    drafter.capture(1, 64)
            before, reads = len(device.launches_of_rounds), device.num_reads
            run(target, drafter, PROMPTS[:1], NEW)
        rounds = device.launches_of_rounds[before:]
        captures = capturing.capture_stats(target, [drafter])["captured"]
        return Captured(most_of(rounds).total(), (device.num_reads - reads) / len(rounds), int(captures))


@contextmanager
def captured_by(device: Device) -> Iterator[None]:
    def one_launch(function: Any, inputs: Any) -> Any:
        return device.as_one("graph", device.capture(function, inputs))

    with patch.object(capturing, "cuda_graph", one_launch), patch.object(capturing, "fuse", lambda network: None):
        yield


def models(method: str, layers: int, draft_layers: int) -> tuple[Target, Any]:
    model = moved(copy.deepcopy(tiny("qwen3", num_hidden_layers=layers)))
    target = Target(model, NativeForward(model))
    if method == "ar":
        return target, NoDrafter()
    if method == "eagle3":
        draft = moved(Eagle3Draft(EAGLE3))
        return target, Eagle3Drafter(draft, target.embedding, DRAFTED["eagle3"])
    block = moved(DFlashDraft(replace(DFLASH, num_layers=draft_layers)))
    return target, DFlashDrafter(block, target.embedding, target.head)


def counts_table(alone: Mapping[str, Counted], fused: Mapping[str, Counted], captured: Mapping[str, Captured]) -> str:
    rows = [
        [
            NAMES[method],
            str(alone[method].layer.total()),
            str(fused[method].layer.total()),
            str(fused[method].draft_layer.total()) if method == "dflash" else ABSENT,
            str(captured[method].launches),
            number(captured[method].waits, 1),
            str(captured[method].captures),
        ]
        for method in DRAFTED
    ]
    return markdown(
        ["round", "alone, a layer", "captured, a layer", "a layer of the draft", "launches", "waits", "captures"], rows
    )


# Times.


def times_table(alone: Mapping[str, Counted], fused: Mapping[str, Counted], captured: Mapping[str, Captured]) -> str:
    depths, read = shapes()
    rows = []
    for method in DRAFTED:
        for context in CONTEXTS:
            num_bytes = read(method, context)
            operations = alone[method].total(*depths[method]).total()
            for card, bandwidth in COPIED.items():
                floor_ms = 1000 * num_bytes / bandwidth
                whole_ms = floor_ms / PRODUCTS + beside_ms(fused[method].total(*depths[method]), method, context)
                whole_ms += captured[method].waits * WAIT_MS + captured[method].launches * LAUNCH_MS
                rows.append([
                    NAMES[method],
                    str(context),
                    card,
                    number(num_bytes / 1e9, 2),
                    number(floor_ms, 2),
                    number(whole_ms, 2),
                    number(whole_ms / floor_ms, 2),
                    number(max(whole_ms, operations * ALONE_MS), 2),
                ])  # fmt: skip
    return markdown(
        ["round", "context", "card", "GB read", "floor, ms", "captured, ms", "of the floor", "alone, ms"], rows
    )


def beside_ms(kernels: Counter[str], method: str, context: int) -> float:
    """Return the milliseconds of kernels that are no products."""
    # Behind a longer context, attention of one token splits the keys among more multiprocessors.
    attention = ONE_MS if method == "ar" else SEVERAL_MS * context / CONTEXTS[0]
    return SMALL_MS * kernels["small"] + attention * kernels["attention"]


def shapes() -> tuple[Mapping[str, tuple[int, int]], Callable[[str, int], float]]:
    """Return the layers of target and draft of each method, and the bytes that a round behind a context reads."""
    preset = presets.preset(MODEL)
    config = random_weights.config_of(preset.target)
    model = random_weights.empty_target(config, torch.bfloat16)
    depth = config.num_hidden_layers
    drafts: dict[str, Any] = {
        method: random_weights.empty_draft(method, preset.target, config, depth, preset).to(torch.bfloat16)
        for method, drafted in DRAFTED.items()
        if drafted
    }

    def read(method: str, context: int) -> float:
        drafted = DRAFTED[method]
        verified = work(size_of(model), 1, drafted + 1, context).num_bytes
        passes = draft_passes(drafts[method], model, drafted, 1) if drafted else ()
        return verified + sum(one.times * work(one.size, 1, one.width, context).num_bytes for one in passes)

    layers = {"ar": (depth, 0), "eagle3": (depth, 0), "dflash": (depth, drafts["dflash"].config.num_layers)}
    return layers, read
