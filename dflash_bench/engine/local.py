"""The reference backend: a target and its drafts in this process, measured by our own loop."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from dflash_bench.engine.clock import clock_for
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import Drafter, Foresees
from dflash_bench.engine.judge import Judge
from dflash_bench.engine.networks import name_of, target_of
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import DecodingError, Limits, Round
from dflash_bench.engine.target import Target
from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.models import chat, presets
from dflash_bench.models.loading import Models
from dflash_bench.models.presets import Preset
from dflash_bench.records import GREEDY, Divergence, FinishReason, Generation, Message, Settings


def open_backend(
    models: Models,
    preset: Preset,
    methods: Sequence[Method],
    max_new_tokens: int,
    seed: int = 0,
    machine: Mapping[str, Any] | None = None,
    engine: str | None = None,
) -> LocalBackend:
    """The reference backend for these methods, filed under their labels; UserError for what cannot go together.

    `engine` says by whose code the target is computed (`networks.py`); the judge always asks its publisher's.
    """
    target = target_of(models.target, engine)
    trees = [method.label for method in methods if method.kind.shape == "tree"]
    if trees and not target.reads_trees:
        kind = target.config.model_type
        raise UserError(f"--method {trees[0]}: recurrent layers, as a {kind} target has, read no trees; use a chain")
    drafters = {method.label: _drafter(models, target, method, preset) for method in methods}
    limits = Limits(max_new_tokens, stop_ids(models.target, models.tokenizer))
    about = _about(models, preset, methods, drafters) | {"network": name_of(target)} | dict(machine or {})
    return LocalBackend(target, models.tokenizer, drafters, limits, seed, about)


def _about(
    models: Models, preset: Preset, methods: Sequence[Method], drafters: Mapping[str, Drafter]
) -> dict[str, Any]:
    """Which weights these are, what their publishers say of them, and how they are computed."""
    drafts = {
        draft: {
            "name": presets.name(preset.drafts[draft]) if draft in preset.drafts else None,
            "trained_thinking": preset.trained_thinking.get(draft),
            "verifier": models.verifiers.get(draft),
        }
        for draft in models.drafts
    }
    return {
        "engine": "local",
        "concurrency": 1,
        "methods": {
            method.label: {
                "name": method.name, "draft": method.draft, "options": dict(method.options),
                "num_drafts": drafters[method.label].num_drafts,
            }
            for method in methods
        },
        "target": presets.name(preset.target),
        "drafts": drafts,
        "revisions": models.revisions | {method.label: sha for method in methods for sha in _sha256_of_files(method)},
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "attention": models.target.config._attn_implementation,
    }  # fmt: skip


def _sha256_of_files(method: Method) -> Iterator[str]:
    """Of the files that its options name: a run must not go on with another file of the same name."""
    for option in method.kind.options:
        if option.is_file:
            with open(str(method.option(option.name)), "rb") as file:
                yield hashlib.file_digest(file, "sha256").hexdigest()


def _drafter(models: Models, target: Target, method: Method, preset: Preset) -> Drafter:
    """By the file of the method's name; what a preset says holds for its own draft, which has no label."""
    module = import_module(f"dflash_bench.engine.drafters.{re.sub('[-+]', '_', method.name)}")
    count = (preset.num_drafts or {}).get(method.name) if method.tag is None else None
    drafter: Drafter = module.build(models, target, method.with_count(count))
    return drafter


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's, which may list several, and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


@dataclass(slots=True)
class _Decoded:
    """The rounds of one prompt, each with the row that it was in, the same one in all."""

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


class LocalBackend:
    """Answers chats with any of its drafters; `drafters` maps method names, `ar` among them, to drafters."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafters: Mapping[str, Drafter],
        limits: Limits,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.about = about or {}
        self.target, self.tokenizer, self.drafters = target, tokenizer, drafters
        self.limits, self.seed = limits, seed
        self.clock = clock_for(target.device)
        self.judge = Judge(target.model, limits.stop_ids, limits.max_new_tokens)

    def describe(self) -> Mapping[str, Any]:
        return self.about

    @property
    def has_thinking(self) -> bool:
        return "enable_thinking" in (self.tokenizer.chat_template or "")

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        for thinking in {bool(one.thinking) for one in settings}:
            chat.check(self.tokenizer, list(chats), thinking)

    def encode(self, messages: Sequence[Message], settings: Settings = GREEDY) -> list[int]:
        """The chat as the model's own template renders it."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer.encode("\n".join(message.content for message in messages)))
        text = chat.rendered(self.tokenizer, messages, bool(settings.thinking))
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def generate(
        self, method: str, messages: Sequence[Message], settings: Settings = GREEDY, repeat: int = 0
    ) -> Generation:
        """Every prompt and repeat draws random numbers of its own, the same ones under every method."""
        prompt = self.encode(messages, settings)
        seed = zlib.crc32(repr((self.seed, repeat, prompt)).encode())
        generation = self.generate_ids(method, [prompt], Sampling.of(settings, seed))[0]
        if settings.thinking is None:
            return generation
        return replace(
            generation, num_thinking_tokens=chat.thinking_tokens(self.tokenizer, prompt, generation.token_ids)
        )

    def generate_ids(
        self,
        method: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> list[Generation]:
        """One generation per prompt; what goes wrong becomes its error, never a number.

        They are decoded together, or `num_rows` at a time, each beginning when another has ended. `seeds` are the
        prompts' own, in place of the one of `sampling`.
        """
        drafter, sampling = self.drafters[method], sampling or Sampling(seed=self.seed)
        decoded = [_Decoded(prompt) for prompt in prompts]
        try:
            if isinstance(drafter, Foresees):
                drafter.foresee(prompts, self.limits, sampling, seeds)
            self._reset_memory()
            for step in decode(self.target, drafter, prompts, self.limits, sampling, self.clock, seeds, num_rows):
                for place, request in enumerate(step.requests):
                    decoded[request].add(place, step)
        except DecodingError as problem:
            return self._generations(decoded, str(problem))
        except torch.cuda.OutOfMemoryError:
            return self._generations(decoded, "out of GPU memory")
        return self._generations(decoded, "nothing was decoded")

    def _generations(self, decoded: Sequence[_Decoded], error: str) -> list[Generation]:
        """What has not ended says the error; what has is whole."""
        return [self._generation(one, None if one.has_ended else error) for one in decoded]

    def _generation(self, decoded: _Decoded, error: str | None) -> Generation:
        token_ids, prompt = decoded.tokens, decoded.prompt
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        seconds = self.clock.seconds
        if error:
            return Generation(token_ids, text, "error", len(prompt), 0.0, 0.0, error=error)
        (row, prefill), *rest = decoded.rounds
        steps = [step for _, step in rest]
        begin, first, _, _, draft_ready = prefill.marks
        last = steps[-1].marks[4] if steps else first
        stopped = token_ids[-1] in self.limits.stop_ids
        finish: FinishReason = "stop" if stopped else "length"
        return Generation(
            token_ids=token_ids,
            text=text,
            finish_reason=finish,
            num_prompt_tokens=len(prompt),
            prefill_s=seconds(begin, first),
            decode_s=seconds(first, last),
            draft_prefill_s=seconds(first, draft_ready) if steps else 0.0,
            drafted=tuple(step.drafted[row] for step in steps),
            drafted_ids=tuple(token for step in steps for token in step.drafted_ids[row]),
            drafted_parents=_parents(row, steps),
            accepted=tuple(step.accepted[row] for step in steps),
            emitted=tuple(len(step.emitted[row] or ()) for step in steps),
            draft_s=tuple(seconds(s.marks[0], s.marks[1]) + seconds(s.marks[3], s.marks[4]) for s in steps),
            verify_s=tuple(seconds(s.marks[1], s.marks[2]) for s in steps),
            round_s=tuple(seconds(s.marks[0], s.marks[4]) for s in steps),
            peak_memory_bytes=self._peak_memory(),
        )

    def divergence(
        self,
        messages: Sequence[Message],
        plain: Sequence[int],
        other: Sequence[int],
        settings: Settings = GREEDY,
    ) -> Divergence:
        return self.judge.divergence(self.encode(messages, settings), plain, other, settings.repetition_penalty)

    def audit(
        self, messages: Sequence[Message], answer: Sequence[int], settings: Settings = GREEDY
    ) -> Divergence | None:
        return self.judge.audit(self.encode(messages, settings), answer, settings.repetition_penalty)

    def _reset_memory(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)

    def _peak_memory(self) -> int | None:
        """Bytes on the GPU; on the CPU the process's peak says nothing about one generation."""
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        return None


def _parents(row: int, rounds: Sequence[Round]) -> tuple[int, ...] | None:
    """None where every round drafted a chain."""
    if all(step.drafted_parents is None for step in rounds):
        return None
    return tuple(
        parent
        for step in rounds
        for parent in (range(-1, step.drafted[row] - 1) if step.drafted_parents is None else step.drafted_parents[row])
    )
