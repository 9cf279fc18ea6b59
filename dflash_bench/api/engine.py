"""`db.Engine`: a target in this process that answers one prompt at a time with any method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import FinishReason, Generation, Message

if TYPE_CHECKING:
    from dflash_bench.core.methods import Method
    from dflash_bench.engine.drafter import Drafter
    from dflash_bench.engine.rows import Limits, Round
    from dflash_bench.engine.sampling import Sampling

Chat = Sequence[Message | Mapping[str, str]]
PromptInput = str | Chat | Sequence[int]
"""A user's message, a chat, or token ids."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of a character whose last bytes are still missing."""


@dataclass(frozen=True, slots=True)
class ReplyRound:
    """One round of drafting and verification. Times are in seconds, and None until the reply has ended."""

    drafted: tuple[int, ...]
    """The ids of the draft tokens, all nodes for a tree; empty in plain decoding."""
    verified: int
    """The number of draft tokens that the target read: all, unless the draft was cut first."""
    accepted: int
    """The number of draft tokens that were accepted."""
    token_ids: tuple[int, ...]
    """The tokens that the round added: accepted + 1, fewer where a stop token or the limit cut it."""
    parents: tuple[int, ...] | None = None
    """For a tree, the index of each draft token's parent, -1 for the last token before the round; else None."""
    draft_s: float | None = None
    verify_s: float | None = None
    seconds: float | None = None
    """Seconds from the end of the previous round to the end of this round."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. Its first token comes from prefill, all others from `rounds`."""

    text: str
    """Decoded text without special tokens; empty for a target without a tokenizer."""
    token_ids: tuple[int, ...]
    """The token ids [T], including a stop token at the end."""
    rounds: tuple[ReplyRound, ...]
    method: str
    finish_reason: FinishReason
    """"stop" or "length"."""
    num_prompt_tokens: int
    prefill_s: float
    """Seconds until the first token."""
    decode_s: float
    """Seconds from the first token to the last, the draft's own prefill included."""

    @property
    def acceptance_length(self) -> float | None:
        """The mean of accepted + 1 over rounds (al.pooled of this answer); None without rounds."""
        return sum(step.accepted + 1 for step in self.rounds) / len(self.rounds) if self.rounds else None


@dataclass(frozen=True, slots=True)
class Piece:
    """The text and tokens of one round, as soon as it ends; `round` is None for the first token, from prefill."""

    text: str
    token_ids: tuple[int, ...]
    round: ReplyRound | None


class ReplyStream(Iterator[Piece]):
    """The pieces of an answer, one per round; joined, their texts are the reply's but for an incomplete last character.

    `reply` is set once the stream is read to its end. It ends early when its engine begins another answer.
    """

    def __init__(self, pieces: Iterator[Piece | Reply]) -> None:
        self._pieces = pieces
        self._reply: Reply | None = None

    def __iter__(self) -> ReplyStream:
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        if isinstance(piece, Reply):
            self._reply = piece
            raise StopIteration
        return piece

    @property
    def reply(self) -> Reply:
        """The complete answer. Raises UserError before the stream was read to its end."""
        if self._reply is None:
            raise UserError("this answer has not ended: read the stream to its end, before the engine begins another")
        return self._reply

    def close(self) -> None:
        """End the answer here."""
        self._pieces.close()  # type: ignore[attr-defined]


class Engine(AbstractContextManager["Engine"]):
    """A target and its drafts in this process, for one prompt at a time. A draft is loaded when it is first used.

        with db.Engine("nano") as engine:
            print(engine.generate("2+2?", method="dflash").text)

    Answers are not judged; use `db.run` to find out whether they are the model's own.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        target: str | Path | None = None,
        drafts: Mapping[str, str | Path] | None = None,
        device: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        attention: str | None = None,
        engine: str | None = None,
        kernels: str | None = None,
        quantize: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load a target.

        `model` is a name that `dflash-bench models` lists, or a folder with target/ and drafts (default: nano).
        `target` (a folder or hub id) and `drafts` (method to folder or hub id) replace it, or parts of it. The other
        options are those of `dflash-bench run`: `device` cpu or cuda (default: a GPU if there is one, but the CPU for
        nano), `dtype` float32 (default on a CPU), bfloat16 (default on a GPU), float16 or auto, `threads` of torch in
        this process (default 1). A target without tokenizer files accepts only token ids.

        Raises UserError for files that are missing, damaged, do not fit together or into memory, and for options
        without effect.
        """
        from dflash_bench.core.option import check_options
        from dflash_bench.models import presets
        from dflash_bench.runner.config import RunRequest
        from dflash_bench.runner.setup import configure_torch

        texts = tuple(f"{name}={place}" for name, place in (drafts or {}).items())
        request = RunRequest(
            model=None if model is None else str(model),
            target=None if target is None else str(target),
            device=device,
            dtype=dtype,
            threads=threads,
            attention=attention,
            engine=engine,
            kernels=kernels,
            quantize=quantize,
            trust_remote_code=trust_remote_code,
        )
        check_options(request)
        self.preset = presets.combine(request.model, request.target, presets.parse_drafts(texts))
        self._request = request
        self._load(*configure_torch(request)[:2])

    def _load(self, device: str, dtype: str) -> None:
        import torch

        from dflash_bench.engine.backend import stop_ids
        from dflash_bench.engine.capturing import capture_passes
        from dflash_bench.engine.rows import clock_for
        from dflash_bench.engine.selection import target_of
        from dflash_bench.models.loading import load
        from dflash_bench.runner.setup import placement_of

        request = self._request
        kind = "auto" if dtype == "auto" else getattr(torch, dtype)
        self._models = load(self.preset, [], device, kind, placement_of(request), needs_tokenizer=False)
        self._target = target_of(self._models.target, request.engine, request.kernels)
        self._drafters: dict[str, Drafter] = {}
        self._open: Iterator[object] | None = None
        self._clock = clock_for(self._target.device)
        self._stop_ids = stop_ids(self._models.target, self._models.tokenizer)
        capture_passes(self._target, (), None)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, from transformers; None if it has none."""
        return self._models.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token ids that end an answer by default."""
        return self._stop_ids

    def encode(self, prompt: PromptInput, thinking: bool = False) -> list[int]:
        """Return the token ids [P] of a prompt: text is a user's message, and the chat template renders messages.

        Messages have a role (system, user or assistant) and content. `thinking` is for templates with such a switch.
        Raises UserError for text without a tokenizer, for an empty prompt and for an invalid id.
        """
        from dflash_bench.models import chat

        self._require_open()
        if not isinstance(prompt, str) and all(not isinstance(item, Message | Mapping) for item in prompt):
            return _token_ids(prompt, self._target.vocab_size)
        if self.tokenizer is None:
            raise UserError(f"{self.preset.target} has no tokenizer, so it takes token ids alone, not text")
        messages = [Message("user", prompt)] if isinstance(prompt, str) else [_message(item) for item in prompt]
        return chat.encode(self.tokenizer, messages, thinking, self._target.vocab_size)

    @overload
    def generate(
        self,
        prompt: PromptInput,
        method: str = ...,
        *,
        max_new_tokens: int | None = ...,
        stop_ids: Iterable[int] | None = ...,
        temperature: float = ...,
        seed: int = ...,
        thinking: bool = ...,
        stream: Literal[False] = ...,
    ) -> Reply: ...

    @overload
    def generate(
        self,
        prompt: PromptInput,
        method: str = ...,
        *,
        max_new_tokens: int | None = ...,
        stop_ids: Iterable[int] | None = ...,
        temperature: float = ...,
        seed: int = ...,
        thinking: bool = ...,
        stream: Literal[True],
    ) -> ReplyStream: ...

    def generate(
        self,
        prompt: PromptInput,
        method: str = "ar",
        *,
        max_new_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        thinking: bool = False,
        stream: bool = False,
    ) -> Reply | ReplyStream:
        """Answer a prompt: text, messages, or token ids, as `encode` takes them.

        `method` is written as for `dflash-bench run`, such as dflash:8; ar is plain decoding. The answer ends after one
        of `stop_ids` (default: the model's), after `max_new_tokens` (default: the model's in the table of models, or
        2048), or where the context is full. At `temperature` 0 the likeliest token is taken; above it tokens are
        sampled with random numbers that depend on `seed`, prompt and position, so that every lossless method gives the
        same answer.

        Returns a `Reply`, or with `stream` a `ReplyStream`. Raises UserError for an unknown method, a missing draft, a
        prompt that leaves no room, values out of range, and NaN or infinite logits.
        """
        from dflash_bench.engine.backend import seed_of
        from dflash_bench.engine.rows import Limits
        from dflash_bench.engine.sampling import Sampling

        most = self.preset.max_new_tokens if max_new_tokens is None else max_new_tokens
        if most < 1:
            raise UserError(f"max_new_tokens is a number from 1 up, not {most}")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UserError(f"temperature is a number from 0 up, not {temperature}")
        ids = self.encode(prompt, thinking)
        chosen = methods.parse(method)
        limits = Limits(most, self._stop_ids if stop_ids is None else frozenset(stop_ids))
        drafter = self._drafter(chosen)
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]
        pieces = self._pieces(chosen, drafter, ids, limits, Sampling(temperature, seed_of(seed, 0, ids)))
        self._open = pieces
        answer = ReplyStream(pieces)
        if stream:
            return answer
        for _ in answer:
            pass
        return answer.reply

    def close(self) -> None:
        """Free the weights, as leaving `with` does. The engine then cannot answer any more."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]
        self._drafters.clear()
        del self._target, self._models

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not hasattr(self, "_target"):
            raise UserError("this engine was closed; open another one")

    def _drafter(self, method: Method) -> Drafter:
        if method.label not in self._drafters:
            self._drafters[method.label] = self._built(method)
        return self._drafters[method.label]

    def _built(self, method: Method) -> Drafter:
        from dflash_bench.engine.backend import build_drafter
        from dflash_bench.engine.capturing import capture_passes
        from dflash_bench.engine.selection import compile_like
        from dflash_bench.models.loading import with_draft

        if method.kind.shape == "tree" and not self._target.reads_trees:
            raise UserError(f"method {method.label}: recurrent layers read no trees; use a chain, such as dflash")
        if self.tokenizer is None and any(option.name == "datastore" for option in method.kind.options):
            raise UserError(f"method {method.label} needs the target's tokenizer, and {self.preset.target} has none")
        if method.draft is not None:
            self._models = with_draft(self._models, self.preset, method.draft)
        drafter = build_drafter(self._models, self._target, method, self.preset)
        compile_like(self._target, [drafter])
        capture_passes(self._target, [*self._drafters.values(), drafter], None)
        return drafter

    def _pieces(
        self, method: Method, drafter: Drafter, prompt: list[int], limits: Limits, sampling: Sampling
    ) -> Iterator[Piece | Reply]:
        """Yield the pieces round by round, and then the reply."""
        import torch

        from dflash_bench.engine.backend import RequestTrace
        from dflash_bench.engine.drafter import Foresees
        from dflash_bench.engine.loop import decode

        decoded, shown = RequestTrace(prompt), 0
        if isinstance(drafter, Foresees):
            drafter.foresee([prompt], limits, sampling, None)
        try:
            for step in decode(self._target, drafter, [prompt], limits, sampling, self._clock):
                decoded.add(0, step)
                text = self._text(decoded.tokens).rstrip(UNFINISHED)
                new, shown = text[shown:], max(shown, len(text))
                first = len(decoded.rounds) == 1
                yield Piece(new, tuple(step.emitted[0] or ()), None if first else _round(step))
        except torch.cuda.OutOfMemoryError as error:
            raise UserError("out of GPU memory; ask for fewer tokens, or use a smaller dtype") from error
        text = self._text(decoded.tokens)
        yield _reply(method, decoded.generation(self._clock, text, limits.stop_ids, None), decoded.rounds)

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _token_ids(prompt: Any, vocab_size: int) -> list[int]:
    ids = list(map(int, prompt))
    if not ids:
        raise UserError("an empty prompt: give text, messages or at least one token id")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"token id {token} is none of this model's, which are 0 to {vocab_size - 1}")
    return ids


def _message(message: Message | Mapping[str, str] | int) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, Mapping) and message.keys() >= {"role", "content"}:
        return Message(message["role"], message["content"])
    raise UserError(f"a message has role and content, as {{'role': 'user', 'content': '2+2?'}}; not {message!r}")


def _round(step: Round, **seconds: float) -> ReplyRound:
    parents = None if step.drafted_parents is None else tuple(step.drafted_parents[0])
    verified = step.drafted if step.verified is None else step.verified
    return ReplyRound(
        tuple(step.drafted_ids[0]), verified[0], step.accepted[0], tuple(step.emitted[0] or ()), parents, **seconds
    )


def _reply(method: Method, generation: Generation, steps: Sequence[tuple[int, Round]]) -> Reply:
    assert generation.draft_s is not None and generation.verify_s is not None and generation.round_s is not None
    rounds = (
        _round(step, draft_s=draft_s, verify_s=verify_s, seconds=round_s)
        for (_, step), draft_s, verify_s, round_s in zip(
            steps[1:], generation.draft_s, generation.verify_s, generation.round_s, strict=True
        )
    )
    return Reply(
        generation.text,
        generation.token_ids,
        tuple(rounds),
        method.label,
        generation.finish_reason,
        generation.num_prompt_tokens,
        generation.prefill_s,
        generation.decode_s,
    )
