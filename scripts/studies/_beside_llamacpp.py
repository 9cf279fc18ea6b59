"""Our engine and llama.cpp servers with the same weights, one thread each, timed in turn, prompt by prompt.

Times are written after every turn, so that an interrupted measurement can be resumed. A turn is a prompt answered by
every arm, with a measurement of memory bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.models import loading, memory, presets, quantization, targets
from dflash_bench.models.convert import convert
from dflash_bench.perf.measure import read_bandwidth
from dflash_bench.tasks import suites
from studies._llamacpp_server import Server, Settings
from studies._study import StudyError, tell, write

OURS, THEIRS = "ours", "llama.cpp"
FLOAT32, EIGHT_BITS = "float32", {OURS: "int8", THEIRS: "Q8_0"}
DRAFTING = ("dflash", "eagle3")
TIMES = 3
"""Answers per prompt and arm."""
READ_BYTES = 2 * 2**30
"""Bytes read by the sum that measures bandwidth, if as much memory is free."""
Q8_0_BLOCK = 32


class Arm(NamedTuple):
    engine: str
    weights: str
    method: str
    flash: bool = False

    @property
    def name(self) -> str:
        return " ".join([*self[:3], *["flash"] * self.flash])


Answered = tuple[float, list[int]]
"""Seconds per token after the first, and the answer's tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int
    bandwidth: float
    """Bytes per second read by a sum."""
    answers: Mapping[str, Answered]
    """Answers by the name of the arm."""


@dataclass(frozen=True, slots=True)
class Timed:
    """All measurements of a model. `step_bytes` by engine and weights: "ours float32"."""

    begun: str
    network: str
    step_bytes: Mapping[str, int]
    absent: Mapping[str, str]
    """Reasons for missing measurements, by the name of the arm."""
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Timed:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**stored, "turns": [Turn(**turn) for turn in stored["turns"]]})

    def write(self, path: Path) -> None:
        write(path, json.dumps(asdict(self)) + "\n")

    def seconds(self, arm: Arm) -> list[list[float]]:
        """Return seconds per token, [prompts, times]."""
        return self._by_prompt(lambda turn: turn.answers[arm.name][0])

    def seconds_per_byte(self) -> list[list[float]]:
        """Return the seconds per byte of the sum, [prompts, times]."""
        return self._by_prompt(lambda turn: 1 / turn.bandwidth)

    def _by_prompt(self, value: Callable[[Turn], float]) -> list[list[float]]:
        prompts = sorted({turn.prompt for turn in self.turns})
        return [[value(turn) for turn in self.turns if turn.prompt == prompt] for prompt in prompts]

    def tokens(self, arm: Arm) -> list[list[int]]:
        return [turn.answers[arm.name][1] for turn in self.turns]

    def has(self, arm: Arm) -> bool:
        return all(arm.name in turn.answers for turn in self.turns)


def measured(path: Path, python: Path, model: str, num_prompts: int, max_tokens: int) -> Timed:
    """Time the turns missing in the file; `python` has xllamacpp. Raises StudyError if an answer is empty."""
    if path.exists() and len(Timed.read(path).turns) == TIMES * num_prompts:
        return Timed.read(path)
    loaded = suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", num_prompts)
    chats = [[Message("user", prompt.turns[0])] for prompt in loaded.prompts]
    with TemporaryDirectory(prefix="bench_llamacpp-") as folder, ExitStack() as stack:
        engines, absent = opened(model, max_tokens)
        ours = engines[FLOAT32]
        settings, file_bytes = served(Path(folder), model, ours)
        servers = {arm: stack.enter_context(Server(python, one)) for arm, one in settings.items()}
        arms = [*arms_of(engines), *servers]
        step_bytes = {f"{OURS} {kind}": memory.size_of(one.target.model).step_bytes for kind, one in engines.items()}
        begun = datetime.now(UTC).isoformat(timespec="minutes")
        timed = Timed(begun, str(ours.about["network"]), step_bytes | file_bytes, absent)
        timed = Timed.read(path) if path.exists() else timed

        def answer(arm: Arm, chat: list[Message]) -> Answered:
            if arm in servers:
                done = servers[arm].complete(ours.encode(chat), max_tokens)
                return per_token(done.decode_s, done.tokens)
            generation = engines[arm.weights].generate(arm.method, chat)
            return per_token(generation.decode_s, generation.token_ids)

        for arm in arms:
            answer(arm, chats[0])
        for number in range(len(timed.turns), TIMES * num_prompts):
            tell(f"{model}: turn {number + 1} of {TIMES * num_prompts}")
            prompt = number % num_prompts
            bandwidth = read_bandwidth(torch.device("cpu"), READ_BYTES)
            answers = {arm.name: answer(arm, chats[prompt]) for arm in (arms if number % 2 else arms[::-1])}
            timed.turns.append(Turn(prompt, bandwidth, answers))
            timed.write(path)
    return timed


def per_token(seconds: float, tokens: Sequence[int]) -> Answered:
    if len(tokens) < 2:
        raise StudyError("an answer has fewer than two tokens, so that nothing was timed")
    return seconds / (len(tokens) - 1), list(tokens)


# Our engine: the original weights, and in eight bits if it supports them.


def opened(model: str, max_tokens: int) -> tuple[dict[str, LocalBackend], dict[str, str]]:
    """Return backends by weights, and the reasons for absent arms. Raises UserError without the model."""
    preset, eight_bits = presets.preset(model), EIGHT_BITS[OURS]
    plain = loading.load(model, DRAFTING, "cpu", torch.float32)
    engines = {FLOAT32: open_backend(plain, preset, methods.chosen(list(DRAFTING)), max_tokens)}
    try:
        quantization.check(eight_bits, "cpu")
        quantised = loading.load(model, [], "cpu", torch.float32, targets.Placement(quantize=eight_bits))
        engines[eight_bits] = open_backend(quantised, preset, methods.chosen([]), max_tokens)
    except UserError as error:
        return engines, {Arm(OURS, eight_bits, "ar").name: str(error)}
    return engines, {}


def arms_of(engines: Mapping[str, LocalBackend]) -> Iterator[Arm]:
    for weights, backend in engines.items():
        yield from (Arm(OURS, weights, method) for method in backend.drafters)


# llama.cpp: the same weights as GGUF files, with and without flash attention.


def served(folder: Path, model: str, ours: LocalBackend) -> tuple[dict[Arm, Settings], dict[str, int]]:
    """Write the files; return the settings of each server, and the bytes of weights read per step from each file."""
    plain, eight_bits = folder / "target.gguf", folder / "q8_0.gguf"
    convert(model, plain, "gguf", None)
    quantise(plain, eight_bits)
    drafts = {method: folder / f"{method}.gguf" for method in DRAFTING}
    for method, draft in drafts.items():
        convert(presets.preset(model).drafts[method], draft, "gguf", model)
    arms = {}
    for flash in (False, True):
        for weights, file in ((FLOAT32, plain), (EIGHT_BITS[THEIRS], eight_bits)):
            arms[Arm(THEIRS, weights, "ar", flash)] = Settings(str(file), flash_attention=flash)
        for method, draft in drafts.items():
            num_drafts = ours.drafters[method].num_drafts
            arms[Arm(THEIRS, FLOAT32, method, flash)] = Settings(
                str(plain), method, str(draft), num_drafts, flash_attention=flash
            )
    return arms, {
        f"{THEIRS} {FLOAT32}": step_bytes(plain),
        f"{THEIRS} {EIGHT_BITS[THEIRS]}": step_bytes(eight_bits),
    }


def quantise(source: Path, destination: Path) -> None:
    """Write a float32 GGUF file's matrices in Q8_0, including embedding and head, as llama.cpp's tool does."""
    read = GGUFReader(source)
    writer = GGUFWriter(destination, str(read.fields["general.architecture"].contents()))
    for one in read.fields.values():
        if one.name.startswith("GGUF.") or one.name in ("general.architecture", "general.file_type"):
            continue
        of_items = one.types[-1] if one.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(one.name, one.contents(), one.types[0], of_items)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for tensor in read.tensors:
        is_matrix = len(tensor.shape) > 1 and tensor.shape[0] % Q8_0_BLOCK == 0
        kind = GGMLQuantizationType.Q8_0 if is_matrix else tensor.tensor_type
        data = quants.quantize(tensor.data, kind) if is_matrix else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def step_bytes(file: Path) -> int:
    """Return the bytes of weights read per step: all except the embedding's table, unless it is also the head."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
