"""A minute with one server: what it is, whether it drafts, and what its answers to three kinds of text show."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Generation, Message
from dflash_bench.diagnose.published import PublishedDraft, drafts_for
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend
from dflash_bench.tasks import suites

KINDS = {"chat": "mt_bench", "code": "humaneval", "mathematics": "gsm8k"}
"""Kinds of text, and the suites whose embedded prompts they are."""
NUM_TOKENS, MOST_PROMPTS = 128, 6
ASKS_FOR_S, ANSWER_S = 40.0, 60.0
"""Seconds after which no further answer is asked for, and the time limit of one."""
CONTEXTS = ("max_model_len", "n_ctx", "context_length")
"""Names of the context's length in the facts of a server."""
SEVERAL = 1.2
"""Tokens at a time in a stream from which on its server probably drafts."""


@dataclass(frozen=True, slots=True)
class KindResult:
    """Answers to one kind of text; None for what the server does not tell."""

    kind: str
    num_answers: int
    num_tokens: int
    tokens_per_s: float | None
    ttft_s: float | None
    """Median time to first token, in seconds."""
    tokens_per_round: float | None
    tokens_at_a_time: float | None
    """Mean number of tokens in an event of the stream, after the first."""


@dataclass(frozen=True, slots=True)
class Tryout:
    """What a server showed. `url` has no credentials."""

    url: str
    dialect: str
    version: str | None
    model: str | None
    context: int | None
    kinds: tuple[KindResult, ...]
    drafts: bool | None
    """Whether it drafts by its counters; None if it counts nothing."""
    tokens_per_round: float | None
    tokens_at_a_time: float | None
    uncounted: str | None
    """What makes it count, if it does not."""
    num_same: int
    num_repeated: int
    """Greedy answers that were asked for again, and how many were the same."""
    errors: tuple[str, ...]
    published: tuple[PublishedDraft, ...]

    @property
    def data(self) -> dict[str, Any]:
        """All of it as codes and numbers, as `--json` prints it."""
        return asdict(self)


def try_out(
    url: str,
    access: Access | None = None,
    model: str | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Tryout:
    """Ask a server for a minute. Raises UserError for an address without a server, and if it answers nothing."""
    tell("connecting")
    with _connected(url, access or Access(ANSWER_S), model) as backend:
        chats = _chats()
        answers, errors = _asked(backend, chats, tell)
        pairs = [(given[0], _answer(backend, chats[kind][0])) for kind, given in answers.items() if given]
        (server,) = backend.servers.values()
        program = server.dialect.program
        return _result(
            server.address,
            answers,
            [(one, other) for one, other in pairs if other.error is None],
            errors,
            dialect=server.dialect.name,
            version=server.info.version,
            model=server.model,
            context=_context(server.info.properties),
            uncounted=server.dialect.remedies.get("uncounted"),
            published=tuple(drafts_for(server.model, program)),
        )


def _connected(url: str, access: Access, model: str | None) -> ServerBackend:
    try:
        return ServerBackend(parse([f"plain={url}"]), access, NUM_TOKENS, model=model)
    except UserError as error:
        raise of_one_address(error) from error


def of_one_address(error: UserError) -> UserError:
    """Return an error of a server's, for a command whose user gave an address and no --server."""
    told = {
        "--server plain=URL": "the address",
        "the plain server": "the server",
        "--server plain: ": "",
        "; an interrupted run continues with --resume": "",
    }
    text = str(error)
    for typed, meant in told.items():
        text = text.replace(typed, meant)
    return UserError(text)


def _chats() -> dict[str, list[Sequence[Message]]]:
    """Return the first turns of embedded prompts by kind of text."""
    known = suites.known_suites()
    return {
        kind: [
            (Message("user", prompt.turns[0]),)
            for prompt in suites.load_prompts(known[name], "embedded", MOST_PROMPTS).prompts
        ]
        for kind, name in KINDS.items()
    }


def _answer(backend: ServerBackend, chat: Sequence[Message]) -> Generation:
    (method,) = backend.servers
    return backend.answer(method, chat)


def _asked(
    backend: ServerBackend,
    chats: Mapping[str, Sequence[Sequence[Message]]],
    tell: Callable[[str], object],
) -> tuple[dict[str, list[Generation]], list[str]]:
    """Return the answers by kind, and errors. Raises UserError if not a single answer succeeds."""
    end_s = time.perf_counter() + ASKS_FOR_S
    answers: dict[str, list[Generation]] = {kind: [] for kind in chats}
    errors: list[str] = []
    tell("warming up")
    _answer(backend, chats["chat"][0])  # not counted: the first one may compile or load
    for number in range(MOST_PROMPTS):
        for kind, several in chats.items():
            if time.perf_counter() > end_s and all(answers.values()):
                return answers, errors
            tell(f"{kind}: answer {number + 1} of {MOST_PROMPTS}")
            given = _answer(backend, several[number])
            if given.error is None:
                answers[kind].append(given)
            else:
                errors.append(given.error)
        if not any(answers.values()):
            raise UserError(f"{backend.servers[next(iter(backend.servers))].address} answers nothing: {errors[-1]}")
        if time.perf_counter() > end_s:
            break
    return answers, errors


def _context(facts: Mapping[str, Any]) -> int | None:
    return next((int(facts[name]) for name in CONTEXTS if isinstance(facts.get(name), int)), None)


def _result(
    url: str,
    answers: Mapping[str, Sequence[Generation]],
    repeated: Sequence[tuple[Generation, Generation]],
    errors: Sequence[str],
    **about: Any,
) -> Tryout:
    every = [one for several in answers.values() for one in several]
    counted = [one for one in every if one.total_rounds is not None]
    length = per_round(every)
    return Tryout(
        url=url,
        kinds=tuple(_kind(kind, several) for kind, several in answers.items()),
        drafts=None if not counted else any(one.total_drafted or one.total_accepted for one in counted),
        tokens_per_round=length,
        tokens_at_a_time=at_a_time(every),
        num_same=sum(one.same_answer(other) for one, other in repeated),
        num_repeated=len(repeated),
        errors=tuple(errors),
        **{**about, "uncounted": None if counted else about["uncounted"]},
    )


def _kind(kind: str, answers: Sequence[Generation]) -> KindResult:
    decoding = [one for one in answers if one.num_decoded and one.decode_s > 0]
    seconds = sum(one.decode_s for one in decoding)
    return KindResult(
        kind,
        len(answers),
        sum(one.num_tokens for one in answers),
        sum(one.num_decoded for one in decoding) / seconds if seconds else None,
        median(one.prefill_s for one in answers) if answers else None,
        per_round(answers),
        at_a_time(answers),
    )


def per_round(answers: Sequence[Generation]) -> float | None:
    """Return the tokens per round by the server's counters; 1 if it drafted nothing, None if it did not count."""
    counted = [one for one in answers if one.total_rounds is not None and one.total_accepted is not None]
    rounds = sum(one.total_rounds or 0 for one in counted)
    if not rounds:
        return 1.0 if counted else None
    return sum((one.total_accepted or 0) + (one.total_rounds or 0) for one in counted) / rounds


def at_a_time(answers: Sequence[Generation]) -> float | None:
    """Return the mean tokens in an event of the streams, after their first."""
    later = [size for one in answers for size in one.pieces[1:]]
    return sum(later) / len(later) if later else None
