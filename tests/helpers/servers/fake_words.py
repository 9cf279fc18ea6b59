"""Responses of the fake server: its settings, and one answer in the words of each dialect."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FAULTS = tuple(
    """
    hangup reset cut 429 500 503 redirect slow bad_json bad_utf8 no_object no_usage endless duplicate one_piece
    error_event bad_ids odd_finish counters_back others
    """.split()
)
MODEL = "fake-model"
END = 1
"""The token that ends an answer, which has no text."""
Answerer = Callable[[str, int], Sequence[int]]


def tokens_of(prompt: str, most: int) -> list[int]:
    """5 to 14 tokens that depend on the prompt alone; the last one ends the text."""
    size = 5 + zlib.crc32(prompt.encode()) % 10
    tokens = [2 + zlib.crc32(f"{place} {prompt}".encode()) % 97 for place in range(size - 1)]
    return [*tokens, END][:most]


def text_of(tokens: Sequence[int]) -> str:
    return "".join("" if token == END else f" t{token}" for token in tokens)


@dataclass
class Count:
    """A server's counts, of one answer or of all."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    at: list[int] = field(default_factory=list)
    """Counts per position in the draft."""
    tokens: int = 0
    in_order: list[int] | None = None
    """What each round of an answer accepted, if it is told."""

    def add(self, other: Count) -> None:
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.accepted += other.accepted
        longest = max(len(self.at), len(other.at))
        padded = [[*one, *[0] * (longest - len(one))] for one in (self.at, other.at)]
        self.at = [sum(at) for at in zip(*padded, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """How many rounds accepted 0, 1, 2, ... drafts."""
        return [more - less for more, less in zip([self.drafts, *self.at], [*self.at, 0], strict=True)]


@dataclass
class Behaviour:
    """`accepts` is what the rounds of each answer accept, over and over; all zero is plain decoding."""

    dialect: str = "vllm"
    host: str = "127.0.0.1"
    port: int = 0
    """0 is any that is free."""
    accepts: Sequence[int] = (0,)
    counts: Callable[[str], Count] | None = None
    """Totals for the answer to a prompt, replacing those from `accepts`."""
    rounds: Callable[[str], Sequence[int]] | None = None
    """Tokens accepted per round of the answer to a prompt, instead of `accepts`."""
    block: int = 0
    """Tokens drafted per round; 0 is a server that does not speculate."""
    waits_for: int = 0
    """Answers that must be under way at a time, once, before any begins."""
    ttft_s: float = 0.0
    round_s: float = 5e-4
    answer: Answerer = tokens_of
    text: Callable[[Sequence[int]], str] = text_of
    ends: frozenset[int] = frozenset((END,))
    faults: dict[int, str] = field(default_factory=dict)
    """Values by the number of the answer, counted from 0."""
    has_metrics: bool = True
    resets_cache: bool = True
    keeps_prompts: bool = False
    """Does it say that it had the prompt before, unless its cache was reset?"""
    gives_ids: bool = True
    counts_by_request: bool = False
    counts_positions: bool = True
    counts_in_order: bool = False
    """Does it tell each round, if it counts by request?"""
    refuses: tuple[str, ...] = ()
    """Fields that it answers with 422."""
    models: tuple[str, ...] = (MODEL,)
    key: str | None = None
    is_loading: bool = False
    spec_names: str = "new"
    """How SGLang names drafts: new, none (only spec_verify_ct), or details (0.5.23, in a chat beside the choices)."""
    has_cumulative_ids: bool = True
    raw: Callable[[str], Iterable[bytes] | None] = lambda _: None
    """Responses by path, byte for byte, instead of everything else; then the connection ends."""
    bent: Callable[[Any], Any] = lambda event: event
    """A change to each event of a stream before it is sent."""
    between: bytes = b""
    """Bytes between the second and the third event."""


@dataclass
class Said:
    """One answer in the words of a dialect."""

    does: Behaviour
    path: str
    tokens: Sequence[int]
    count: Count
    hits: int
    num_prompt: int
    finish: str
    names_tokens: bool = False
    """Does it name tokens in place of text, as TensorRT-LLM does where it is asked to?"""
    counts: bool = False
    """Is it asked to count tokens in each piece?"""

    def so_far(self, num: int) -> dict[str, Any]:
        if not self.counts or self.does.dialect not in ("vllm", "sglang", "llamacpp", "tensorrt_llm"):
            return {}
        if self.does.dialect == "llamacpp":
            return {"timings": {"predicted_n": num}}
        return {"usage": {"prompt_tokens": self.num_prompt, "completion_tokens": num}}

    def piece(self, piece: Sequence[int], num: int, is_last: bool = False) -> Any:
        text, finish = self.does.text(piece), self.finish if is_last else None
        ids = list(piece) if self.does.gives_ids else None
        if self.path == "/generate" and self.does.dialect == "lmdeploy":
            # The end of the answer arrives by itself, last.
            kept = [token for token in piece if token != END]
            told = num - len(piece) + len(kept)
            return {"text": self.does.text(kept), "output_ids": kept, "meta_info": self.lmdeploy_meta(told, None)}
        if self.path == "/generate":
            so_far = list(self.tokens[:num]) if self.does.has_cumulative_ids else list(piece)
            meta: dict[str, Any] = {"id": "x", "prompt_tokens": self.num_prompt, "completion_tokens": num}
            meta |= {"cached_tokens": self.hits, "finish_reason": finish and {"type": finish, "matched": END}}
            whole = self.does.text(self.tokens[:num])
            return {"text": whole, "output_ids": so_far, "meta_info": meta | (self.spec_meta() if is_last else {})}
        if self.path == "/completion":
            return {"index": 0, "content": text, "tokens": ids or [], "stop": False, "id_slot": 0, **self.so_far(num)}
        if self.path == "/v1/completions":
            choice: dict[str, Any] = {"index": 0, "text": "" if self.names_tokens else text, "finish_reason": finish}
        else:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        if self.does.dialect == "vllm" or self.names_tokens:
            choice["token_ids"] = ids
        if self.does.dialect == "tensorrt_llm" and self.does.block:
            choice["speculative_decoding"] = self.tensorrt_llm_stats() if is_last else None
        if self.does.dialect == "sglang" and self.does.spec_names != "details" and is_last:
            choice["meta_info"] = self.spec_meta() | {"completion_tokens": num}
        return {"id": "c", "object": "chunk", "choices": [choice], **self.so_far(num)}

    def tensorrt_llm_stats(self) -> dict[str, Any]:
        return {
            "acceptance_rate": self.count.accepted / self.count.drafted if self.count.drafted else 0.0,
            "num_spec_steps": self.count.drafts,
            "total_accepted_draft_tokens": self.count.accepted,
            "total_draft_tokens": self.count.drafted,
            "num_spec_tokens": self.does.block,
            **({"acceptance_histogram": self.count.histogram} if self.does.counts_positions else {}),
        }

    def lmdeploy_meta(self, num: int, finish: str | None) -> dict[str, Any]:
        reason = None if finish is None else {"type": finish}
        return {"prompt_tokens": self.num_prompt, "completion_tokens": num, "finish_reason": reason}

    def spec_meta(self) -> dict[str, Any]:
        if not self.does.block:
            return {}
        meta: dict[str, Any] = {"spec_verify_ct": self.count.drafts}
        if self.does.spec_names == "details":
            meta |= {"spec_num_correct_drafts": self.count.accepted, "spec_num_proposed_drafts": self.count.drafted}
            meta |= {"spec_correct_drafts_histogram": self.count.histogram}
        if self.does.spec_names == "new":
            meta |= {"spec_accepted_drafts": self.count.accepted, "spec_proposed_drafts": self.count.drafted}
            meta |= {"spec_accept_histogram": self.count.histogram} if self.does.counts_positions else {}
        return meta

    def end(self, fault: str) -> list[Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.num_prompt, "completion_tokens": len(self.tokens)}
        if self.hits:
            usage["prompt_tokens_details"] = {"cached_tokens": self.hits}
        timings = {"cache_n": self.hits, "prompt_n": self.num_prompt, "predicted_n": len(self.tokens)}
        if self.does.block:
            timings |= {"draft_n": self.count.drafted, "draft_n_accepted": self.count.accepted}
        if self.path == "/completion":
            stop = {"stop": "eos", "length": "limit"}.get(self.finish, "none")
            last: dict[str, Any] = {"content": "", "tokens": [], "stop": True, "stop_type": stop}
            last |= {"tokens_evaluated": self.num_prompt}
            return [last if fault == "no_usage" else last | {"timings": timings}]
        if self.path == "/generate" and self.does.dialect == "lmdeploy":
            ends = [END] if self.tokens[-1:] == [END] else []
            meta = self.lmdeploy_meta(len(self.tokens), self.finish)
            return [{"text": "<end>" if ends else "", "output_ids": ends, "meta_info": meta}, b"data: [DONE]\n\n"]
        if self.path == "/generate":
            return [b"data: [DONE]\n\n"]
        event: dict[str, Any] = {"choices": [], "usage": usage}
        if self.does.dialect == "llamacpp":
            event["timings"] = timings
        if self.does.counts_by_request:
            spoken = {
                "num_spec_steps": self.count.drafts,
                "num_accepted_draft_tokens": self.count.accepted,
                "num_draft_tokens": self.count.drafted,
            }
            spoken |= {"acceptance_histogram": self.count.histogram} if self.does.counts_positions else {}
            if self.does.counts_in_order and self.count.in_order:
                accepted = self.count.in_order
                spoken |= {"per_step_accepted": accepted, "per_step_drafted": [self.does.block] * len(accepted)}
            event["metrics"] = {"speculative_decoding": spoken}
        counts: list[Any] = []
        if self.does.dialect == "sglang" and self.does.spec_names == "details":
            counts = [{"choices": [], "sglext": {"spec_tokens_details": self.spec_meta()}}]
        return [*counts, *([] if fault == "no_usage" else [event]), b"data: [DONE]\n\n"]
