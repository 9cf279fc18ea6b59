"""The local backend: answers prompts with our own decoding loop, in this process."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflash_bench.core.errors import GpuMemoryError, UserError
from dflash_bench.core.files import sha256_of
from dflash_bench.core.labels import dtype_name
from dflash_bench.core.methods import Method
from dflash_bench.core.types import (
    GREEDY,
    NOBODY,
    SHARED_WEIGHTS,
    Divergence,
    FinishReason,
    Generation,
    Listener,
    Message,
    Settings,
)
from dflash_bench.engine import parallel
from dflash_bench.engine.capturing import capture_passes, capture_stats, gpu_paths
from dflash_bench.engine.drafter import Drafter, Foresees
from dflash_bench.engine.judge import Judge
from dflash_bench.engine.judge_weights import ChatJudge, chat_judge_of, judge_of_model
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import Clock, DecodingError, Limits, Round, clock_for, within_memory
from dflash_bench.engine.sampling import Sampling, inverse_cdf, likeliest, probabilities
from dflash_bench.engine.selection import compile_like, network_name, target_of
from dflash_bench.engine.target import Target
from dflash_bench.models import chat, memory, presets
from dflash_bench.models.loading import Models, kind_of
from dflash_bench.models.presets import Preset

if TYPE_CHECKING:
    from dflash_bench.engine.recording import Recorded

PASSES_TIMED = 8
"""Number of passes timed after a plain answer: a few per cent of the answer's own passes."""


@dataclass(slots=True)
class RequestTrace:
    """The rounds of one request, with its row in each round (always the same)."""

    prompt: Sequence[int]
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    has_ended: bool = False

    def add(self, row: int, step: Round) -> None:
        if step.emitted[row] is not None:
            self.rounds.append((row, step))
            self.has_ended = step.ended[row]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for row, step in self.rounds for token in step.emitted[row] or ())

    @property
    def begin(self) -> object:
        return self.rounds[0][1].marks[0]

    def timed(self, generation: Generation, clock: Clock, since: object) -> Generation:
        """Return the generation with its start and end in seconds since `since`; unchanged if it never started."""
        if not self.rounds:
            return generation
        _, first = self.rounds[0]
        _, last = self.rounds[-1]
        end = last.marks[4] if len(self.rounds) > 1 else first.marks[1]
        return replace(generation, start_s=clock.seconds(since, self.begin), end_s=clock.seconds(since, end))

    def generation(
        self, clock: Clock, text: str, stop_ids: frozenset[int], peak_memory_bytes: int | None
    ) -> Generation:
        """Return the generation of a finished answer."""
        _, prefill = self.rounds[0]
        begin, first, _, _, draft_ready = prefill.marks
        steps = self.rounds[1:]
        last = steps[-1][1].marks[4] if steps else first
        stopped = self.tokens[-1] in stop_ids
        finish: FinishReason = "stop" if stopped else "length"
        marks = [step.marks for _, step in steps]
        ends = [draft_ready, *(m[4] for m in marks)]
        seconds = clock.seconds
        return Generation(
            token_ids=self.tokens,
            text=text,
            finish_reason=finish,
            num_prompt_tokens=len(self.prompt),
            prefill_s=seconds(begin, first),
            decode_s=seconds(first, last),
            draft_prefill_s=seconds(first, draft_ready) if steps else 0.0,
            drafted=tuple(step.drafted[row] for row, step in steps),
            drafted_ids=tuple(token for row, step in steps for token in step.drafted_ids[row]),
            drafted_parents=self._parents(),
            accepted=tuple(step.accepted[row] for row, step in steps),
            emitted=tuple(len(step.emitted[row] or ()) for row, step in steps),
            draft_s=tuple(seconds(m[0], m[1]) + seconds(m[3], m[4]) for m in marks),
            verify_s=tuple(seconds(m[1], m[2]) for m in marks),
            # Each round counts from the end of the previous round, so that they add up to the decoding time.
            round_s=tuple(seconds(before, end) for before, end in pairwise(ends)),
            peak_memory_bytes=peak_memory_bytes,
            verified=self._verified(),
        )

    def failed(self, text: str, error: str) -> Generation:
        return Generation(self.tokens, text, "error", len(self.prompt), 0.0, 0.0, error=error)

    def _verified(self) -> tuple[int, ...] | None:
        """Return how many drafted tokens of each round were verified, or None if no draft was cut."""
        steps = self.rounds[1:]
        if all(step.verified is None for _, step in steps):
            return None
        return tuple((step.drafted if step.verified is None else step.verified)[row] for row, step in steps)

    def _parents(self) -> tuple[int, ...] | None:
        """Return the parents of all drafted tokens, or None if every round drafted a chain."""
        if all(step.drafted_parents is None for _, step in self.rounds[1:]):
            return None
        return tuple(
            parent
            for row, step in self.rounds[1:]
            for parent in (
                range(-1, step.drafted[row] - 1) if step.drafted_parents is None else step.drafted_parents[row]
            )
        )


# Opening the backend: target, drafters and judge.


def open_backend(
    models: Models,
    preset: Preset,
    methods: Sequence[Method],
    max_new_tokens: int,
    seed: int = 0,
    machine: Mapping[str, Any] | None = None,
    engine: str | None = None,
    capture: str | None = None,
    cache_bytes: int = 0,
    kernels: str | None = None,
    may_free: bool = False,
) -> LocalBackend:
    """Open the local backend with a drafter for each method, by label.

    `engine` and `kernels` choose the code that computes the target; with `may_free` it drops weights that it no longer
    reads (`selection.target_of`). `capture` is the `how` of `capture_passes`. The judge always uses the publisher's
    code, on its own copy of the weights if that fits beside `cache_bytes` of caches (`judge_weights.py`). Raises
    UserError for an impossible combination.
    """
    if models.followers is not None and models.source is not None:
        chat_judge = parallel.judge_of(models.source, models.followers, max_new_tokens)
        target: Target = parallel.ParallelTarget(models.target, models.followers)
    else:
        ids = partial(stop_ids, models.target, models.tokenizer)
        chat_judge = chat_judge_of(models, max_new_tokens, ids, cache_bytes)
        target = target_of(models.target, engine, kernels, may_free and chat_judge.weights != SHARED_WEIGHTS)
    trees = [method.label for method in methods if method.kind.shape == "tree"]
    if trees and not target.reads_trees:
        kind = target.config.model_type
        raise UserError(
            f"--method {trees[0]}: a {kind} target has recurrent layers, which cannot verify trees; use a chain"
        )
    drafters = {method.label: build_drafter(models, target, method, preset) for method in methods}
    compile_like(target, drafters.values())
    chat_judge.require_unchanged()
    limits = Limits(max_new_tokens, stop_ids(models.target, models.tokenizer))
    captured = capture_passes(target, drafters.values(), capture)
    computed = {
        "network": network_name(target),
        "fallback": target.fallback,
        "why_torch": target.why_torch,
        "capture": captured,
        "paths": gpu_paths(target, captured),
        "stop_ids": sorted(limits.stop_ids),
        "context_length": target.context_length,
    }
    about = _about(models, preset, methods, drafters) | computed | dict(machine or {})
    about["judge"] = {"target": about["target"], "dtype": about["dtype"], "weights": chat_judge.weights}
    drafts = {method.label: models.draft_of(method) for method in methods if method.draft is not None}
    return LocalBackend(target, models.tokenizer, drafters, limits, seed, about, chat_judge, drafts)


def _about(
    models: Models, preset: Preset, methods: Sequence[Method], drafters: Mapping[str, Drafter]
) -> dict[str, Any]:
    """Return the identity of the weights and their publishers' declarations about them."""
    drafts = {
        draft: {
            "name": presets.name(preset.drafts[draft]) if draft in preset.drafts else None,
            "trained_thinking": preset.trained_thinking.get(draft),
            "verifier": models.verifiers.get(draft),
            "kind": kind_of(getattr(network, "config", None)),
        }
        for draft, network in models.drafts.items()
    }
    return {
        "engine": "local",
        "methods": {
            method.label: {
                "name": method.name,
                "draft": method.draft,
                "options": dict(method.options),
                "num_drafts": drafters[method.label].num_drafts,
            }
            for method in methods
        },
        "target": presets.name(preset.target),
        "drafts": drafts,
        "revisions": models.revisions | {method.label: sha for method in methods for sha in _sha256_of_files(method)},
        "dtype": dtype_name(models.target.dtype),
        "attention": models.target.config._attn_implementation,
    }


def _sha256_of_files(method: Method) -> Iterator[str]:
    """Yield hashes of the files in a method's options: a run must not resume with another file of the same name."""
    for option in method.kind.options:
        if option.is_file and (path := method.option(option.name)) is not None:
            yield sha256_of(Path(str(path)))


def build_drafter(models: Models, target: Target, method: Method, preset: Preset) -> Drafter:
    """Build a method's drafter, from the module of its name. A preset's draft length applies to its own draft only.

    Raises UserError if the drafter reads prompts before they are timed, which only probes may do.
    """
    own = f"dflash_bench.engine.drafters.{re.sub('[-+]', '_', method.name)}"
    module = import_module(method.kind.module or own)
    count = (preset.num_drafts or {}).get(method.name) if method.tag is None else None
    drafter: Drafter = module.build(models, target, method.with_count(count))
    if isinstance(drafter, Foresees) and not method.kind.is_probe:
        raise UserError(f"method {method.label}: only probes foresee answers; declare it as one, or draft without")
    return drafter


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends an answer, from the generation config and the tokenizer, if there is a tokenizer."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*listed, getattr(tokenizer, "eos_token_id", None)] if i is not None)


def seed_of(seed: int, repeat: int, prompt: Sequence[int]) -> int:
    """Return the seed of one answer's random numbers, given the run's seed, the repeat and the prompt."""
    return zlib.crc32(repr((seed, repeat, list(prompt))).encode())


class LocalBackend:
    """Answers chats with any of `drafters`, a mapping from method labels that includes `ar`."""

    tells_rounds = True

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafters: Mapping[str, Drafter],
        limits: Limits,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
        chat_judge: ChatJudge | None = None,
        drafts: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Without `chat_judge` the target's own model is the judge, and answers end by `limits`.

        `drafts` are the networks in memory, by the labels of their methods.
        """
        self.about = about or {}
        self.target, self.tokenizer, self.drafters = target, tokenizer, drafters
        self.limits, self.seed = limits, seed
        self.drafts = drafts or {}
        self.clock = clock_for(target.device)
        self.chat_judge = chat_judge or judge_of_model(target.model, lambda: limits.stop_ids, limits.max_new_tokens)

    @property
    def judge(self) -> Judge:
        return self.chat_judge.judge

    def describe(self) -> Mapping[str, Any]:
        return self.about

    def only(self, labels: Sequence[str]) -> LocalBackend:
        """Return a backend for some of the methods, with the same models, as if opened for these methods alone."""
        methods = {label: self.about["methods"][label] for label in labels}
        drafts = {method["draft"] for method in methods.values()}
        others = {*self.about["methods"], *self.about["drafts"]} - {*labels, *drafts}
        about = {
            **self.about,
            "methods": methods,
            "drafts": {name: draft for name, draft in self.about["drafts"].items() if name in drafts},
            "revisions": {part: one for part, one in self.about["revisions"].items() if part not in others},
        }
        self.chat_judge.objections.clear()
        drafters = {label: self.drafters[label] for label in labels}
        return LocalBackend(
            self.target, self.tokenizer, drafters, self.limits, self.seed, about, self.chat_judge, self.drafts
        )

    @property
    def captures(self) -> bool:
        return self.target.graph_cache is not None

    def captured(self) -> dict[str, float | int]:
        """Return counts of captured and replayed passes (`capture_stats`)."""
        return capture_stats(self.target, self.drafters.values())

    @within_memory()
    @torch.inference_mode()
    def pass_s(self, context: int, settings: Settings) -> float | None:
        """Return the seconds of a pass over one token after `context` and the choice of the next: the lower quartile of
        a few such passes; None where passes are captured.

        Timed in the buffers of the latest answer and right after it, this is the least time that a step of the answer
        needed under the same load on the machine.
        """
        target = self.target
        if target.graph_cache is not None:
            return None
        target.begin(1, context + 2)
        token, seconds = torch.zeros(1, 1, dtype=torch.long, device=target.device), list[float]()
        sampling = Sampling.of(settings)
        for _ in range(PASSES_TIMED + 1):
            start = self.clock.mark()
            logits = target.forward(token, [context]).logits
            target.commit([1])
            likeliest(logits) if sampling.greedy else inverse_cdf(
                probabilities(logits, sampling), torch.full((1, 1), 0.5)
            )
            seconds.append(self.clock.seconds(start, self.clock.mark()))
        return sorted(seconds[1:])[PASSES_TIMED // 4]

    @property
    def has_thinking(self) -> bool:
        return chat.has_thinking(self.tokenizer)

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        for thinking in {bool(setting.thinking) for setting in settings}:
            chat.check(self.tokenizer, list(chats), thinking)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def writings(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the texts that engines may produce for these ids, with and without spaces before punctuation."""
        return tuple(
            str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=tidy))
            for tidy in (False, True)
        )

    def encode(self, messages: Sequence[Message], settings: Settings = GREEDY) -> list[int]:
        """Return the token ids of a chat, rendered by the model's own template."""
        return chat.encode(self.tokenizer, messages, bool(settings.thinking), self.target.vocab_size)

    def generate(
        self,
        method: str,
        messages: Sequence[Message],
        settings: Settings = GREEDY,
        repeat: int = 0,
        listener: Listener = NOBODY,
    ) -> Generation:
        """Answer one chat. Every prompt and repeat has its own random numbers, the same for every method."""
        (answer,) = self.serve(method, [(messages, repeat)], settings, listener=listener)
        return answer

    def serve(
        self,
        method: str,
        requests: Sequence[tuple[Sequence[Message], int]],
        settings: Settings,
        ended: Callable[[], object] = lambda: None,
        listener: Listener = NOBODY,
    ) -> list[Generation]:
        """Answer chats, given with their repeats, `settings.concurrency` at a time; call `ended` whenever a chat ends.

        Each chat draws the random numbers that it would draw alone.
        """
        prompts = [self.encode(messages, settings) for messages, _ in requests]
        seeds = [seed_of(self.seed, repeat, prompt) for prompt, (_, repeat) in zip(prompts, requests, strict=True)]
        sampling = Sampling.of(settings)
        traces, error = self._decode(method, prompts, sampling, seeds, settings.concurrency, ended, listener)
        begin = next((trace.begin for trace in traces if trace.rounds), None)
        return [
            trace.timed(self.with_thinking(generation, trace.prompt), self.clock, begin)
            for generation, trace in zip(self._generations(method, traces, error), traces, strict=True)
        ]

    def generate_ids(
        self,
        method: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> list[Generation]:
        """Return a generation per prompt; a failure is recorded as its error, never as a number.

        Prompts are decoded together, or `num_rows` at a time; waiting prompts take the slots of finished ones.
        `seeds` holds a seed per prompt, in place of the seed in `sampling`.
        """
        sampling = sampling or Sampling(seed=self.seed)
        decoded = self._decode(method, prompts, sampling, seeds, num_rows, lambda: None, NOBODY)
        return self._generations(method, *decoded)

    def _decode(
        self,
        method: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None,
        num_rows: int | None,
        ended: Callable[[], object],
        listener: Listener,
    ) -> tuple[list[RequestTrace], str]:
        """Return the trace of each prompt, and the error that stopped unfinished prompts."""
        drafter = self.drafters[method]
        traces = [RequestTrace(prompt) for prompt in prompts]
        try:
            with within_memory():
                if isinstance(drafter, Foresees):
                    drafter.foresee(prompts, self.limits, sampling, seeds)
                self._reset_memory()
                for step in decode(
                    self.target, drafter, prompts, self.limits, sampling, self.clock, seeds, num_rows, listener
                ):
                    for row, request in enumerate(step.requests):
                        traces[request].add(row, step)
                        if step.emitted[row] is not None and step.ended[row]:
                            ended()
        except (DecodingError, GpuMemoryError) as problem:
            return traces, str(problem)
        return traces, "nothing was decoded"

    def _generations(self, method: str, traces: Sequence[RequestTrace], error: str) -> list[Generation]:
        """Return a generation per trace, with `error` for unfinished traces."""
        generations, peak_bytes = [], self._peak_memory(method)
        for trace in traces:
            text = self.decode(trace.tokens)
            generations.append(
                trace.generation(self.clock, text, self.limits.stop_ids, peak_bytes)
                if trace.has_ended
                else trace.failed(text, error)
            )
        return generations

    def with_thinking(self, generation: Generation, prompt: Sequence[int]) -> Generation:
        """Return the answer with its amount of thinking (`chat.with_thinking`)."""
        return chat.with_thinking(self.tokenizer, prompt, generation)

    @within_memory()
    def positions(
        self, method: str, messages: Sequence[Message], settings: Settings, generation: Generation
    ) -> Recorded | None:
        """Return the method's draft at each position of a greedy answer (`recording.py`)."""
        from dflash_bench.engine.recording import record_positions

        prompt, sampling = self.encode(messages, settings), Sampling.of(settings)
        return record_positions(self.target, self.drafters[method], prompt, generation.token_ids, sampling)

    @within_memory()
    def ranks(
        self, method: str, messages: Sequence[Message], settings: Settings, generation: Generation, num: int
    ) -> tuple[int, ...] | None:
        """Return the right tokens' ranks among the draft's `num` likeliest, of a greedy answer (`recording.py`)."""
        from dflash_bench.engine.recording import record_ranks

        prompt, sampling = self.encode(messages, settings), Sampling.of(settings)
        return record_ranks(self.target, self.drafters[method], prompt, generation, sampling, num)

    @within_memory()
    def divergence(
        self,
        messages: Sequence[Message],
        plain: Sequence[int],
        other: Sequence[int],
        settings: Settings = GREEDY,
    ) -> Divergence:
        return self.chat_judge.divergence(messages, settings, self.encode(messages, settings), plain, other)

    @within_memory()
    def audit(
        self, messages: Sequence[Message], answer: Sequence[int], settings: Settings = GREEDY
    ) -> Divergence | None:
        return self.chat_judge.audit(messages, settings, self.encode(messages, settings), answer)

    def _reset_memory(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)

    def _peak_memory(self, method: str) -> int | None:
        """Return peak bytes on the GPU without `unused_bytes`; None on a CPU, which tells only the process's peak."""
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device) - self.unused_bytes(method)
        return None

    def unused_bytes(self, method: str) -> int:
        """Return the bytes of weights beside the target that the method does not use: other drafts, the judge's own."""
        judge, draft = self.chat_judge.loaded, self.drafts.get(method)
        used = [self.target.model] if draft is None else [self.target.model, draft]
        held = memory.held_bytes([*self.drafts.values(), *([] if judge is None else [judge])], self.target.device)
        return sum(held[weight] for weight in held.keys() - memory.held_bytes(used, self.target.device).keys())
