"""Query a server for hours and find what changes.

Mixed traffic (several temperatures and lengths, cancelled and constrained requests) alternates with reference
requests: greedy, one at a time, and compared with the first answer to the same prompt.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.dialects import ServerRequest
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import common_prefix_length
from dflash_bench.core.types import GREEDY, Generation, Message, Settings
from dflash_bench.diagnose.soak_findings import (
    CANCELLED,
    CONSTRAINED,
    REFERENCE,
    SAMPLED,
    SoakAnswer,
    SoakFinding,
    findings,
)
from dflash_bench.diagnose.tryout import of_one_address, per_round
from dflash_bench.servers import connect
from dflash_bench.servers.address import Access, Address, parse
from dflash_bench.servers.connect import Server
from dflash_bench.servers.launch import resident_bytes
from dflash_bench.servers.prometheus import ROUNDS
from dflash_bench.servers.requests import ask, sequential
from dflash_bench.tasks import suites

RECORD = "soak.jsonl"
"""The file of answers, one JSON object each, written as they end."""
STATE = "soak.json"
ANSWER_S = 120.0
"""The time limit of an answer, in seconds."""
SHORT, LONG = 24, 128
"""Tokens of short and of long answers."""
NUM_JOINED = 6
"""Prompts that the reference with a long prompt consists of."""
AT_A_TIME = 8
"""Answers of the traffic between two turns of the references."""
TEMPERATURES = (0.0, 0.7, 1.0)
LENGTHS = (16, 48, 128)
NAMES, NUMBERS = ("cat", "dog", "owl"), (1, 2, 3)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": [*NAMES]}, "number": {"enum": [*NUMBERS]}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}}
QUESTION = "Name an animal and a number up to 3, as JSON with the keys name and number."
NUM_CONSTRAINED = 64
"""The most tokens of a constrained answer."""
TOKEN_S = 0.01
"""Seconds per token before any is known."""
LEAST_SHARED = 8
"""The number of first tokens that a wrong answer shares with another reference's to count as that answer."""
LETTERS = 4
"""Characters of text that count as a token, where the server returns no token ids."""
GONE_AFTER = 24
"""Consecutive errors after which the server counts as gone."""


@dataclass(frozen=True, slots=True)
class Soak:
    """A finished soak. `url` has no credentials."""

    url: str
    dialect: str
    version: str | None
    model: str | None
    answers: tuple[SoakAnswer, ...]
    findings: tuple[SoakFinding, ...]
    notes: tuple[str, ...]
    memory_of: str
    """Which process the memory figures cover, as a suffix of "memory" in the output."""

    @property
    def data(self) -> dict[str, Any]:
        """The findings and what they are about, as `--json` prints them."""
        return asdict(replace(self, answers=())) | {"answers": len(self.answers)}


def soak(
    url: str,
    out: Path,
    seconds: float,
    access: Access,
    *,
    model: str | None = None,
    concurrency: int = 4,
    seed: int = 0,
    process: int | None = None,
    tell: Callable[[str], object] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Soak:
    """Query a server for `seconds`. Answers are kept in `out`, and the same call resumes an interrupted soak.

    Memory is that of `process` and its children, on this machine; without one, it is what the server's metrics report.
    Raises UserError if no server responds, and for a folder of another soak.
    """
    tell("connecting")
    try:
        (address,) = parse([f"plain={url}"])
        out.mkdir(parents=True, exist_ok=True)
        given = {"url": address.shown or address.url, "concurrency": concurrency, "seed": seed}
        files.check_same_options(out / STATE, given, "a soak")
        plan = _Plan(address, out, seconds, access, model, concurrency, seed, process)
        return asyncio.run(_soak(plan, tell, clock))
    except UserError as error:
        raise of_one_address(error) from error


@dataclass(frozen=True, slots=True)
class _Plan:
    address: Address
    out: Path
    seconds: float
    access: Access
    model: str | None
    concurrency: int
    seed: int
    process: int | None


async def _soak(plan: _Plan, tell: Callable[[str], object], clock: Callable[[], float]) -> Soak:
    server = await connect.connect(plan.address, plan.access, None, plan.model)
    try:
        run = _Run(server, plan, tell, clock)
        await run.perform()
    finally:
        await server.client.close()
    return Soak(
        server.address,
        server.dialect.name,
        server.info.version,
        server.model,
        tuple(run.answers),
        tuple(findings(run.answers)),
        tuple(run.notes),
        " of the process that serves /metrics" if plan.process is None else "",
    )


@dataclass(frozen=True, slots=True)
class _First:
    """The first answer to a reference; without token ids where the server returns none."""

    text: str
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, given: Generation) -> _First:
        return cls(given.text, tuple(given.token_ids))

    def shared(self, given: Generation) -> int:
        """Return the number of tokens with which another answer begins like this one."""
        if self.token_ids and given.token_ids:
            return common_prefix_length(self.token_ids, given.token_ids)
        return common_prefix_length(self.text, given.text) // LETTERS

    def is_same(self, given: Generation) -> bool:
        if self.token_ids and given.token_ids:
            return self.token_ids == tuple(given.token_ids)
        return self.text == given.text


@dataclass(slots=True)
class _Run:
    server: Server
    plan: _Plan
    tell: Callable[[str], object]
    clock: Callable[[], float]
    answers: list[SoakAnswer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: dict[str, _First] = field(default_factory=dict)
    """The first answer to each reference."""
    constrains: bool = True
    cancels: bool = False
    """Whether answers were cancelled since the last references."""
    number: int = 0
    began_s: float = 0.0
    """The time on the clock at which this soak would have begun without interruptions."""

    async def perform(self) -> None:
        self.began_s = self.clock() - self._resume()
        texts = _texts()
        references = _references(texts)
        may_cancel = False
        self.tell("asking the references")
        try:
            await self._ask_references(references)
            while self._now() < self.plan.seconds and not self._has_stopped():
                requests = _mixed(texts, Random(f"{self.plan.seed} {self.number}"), may_cancel, self.constrains)
                await self._ask_traffic(requests)
                await self._ask_references(references)
                may_cancel = not may_cancel
                self._tell_progress()
        except UserError as error:
            why = str(of_one_address(error))
            self._record(SoakAnswer(self._next(), self._now(), SAMPLED, error=why, is_gone=True))

    def _resume(self) -> float:
        """Read the answers of an interrupted soak, and return how many seconds it had lasted."""
        path = self.plan.out / RECORD
        if not path.exists():
            return 0.0
        # The last line may be half of one.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("}\n")]
        files.write_text(path, "".join(lines))
        whole = [json.loads(line) for line in lines]
        self.answers = [SoakAnswer(**{name: value for name, value in row.items() if name != "answer"}) for row in whole]
        self.first = {
            row["name"]: _First(row["answer"][0], tuple(row["answer"][1])) for row in whole if "answer" in row
        }
        # Answers of the traffic are recorded as they end, and so not by number.
        self.number = max((one.number for one in self.answers), default=0)
        return max((one.seconds for one in self.answers), default=0.0)

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _now(self) -> float:
        return self.clock() - self.began_s

    def _has_stopped(self) -> bool:
        last = [one.error for one in self.answers if one.kind != CANCELLED][-GONE_AFTER:]
        return len(last) == GONE_AFTER and all(last)

    def _tell_progress(self) -> None:
        left = max(0.0, self.plan.seconds - self._now())
        failed = sum(one.error is not None for one in self.answers)
        changed = sum(one.is_same is False for one in self.answers)
        self.tell(f"{self.number:,} answers, {failed} failed, {changed} changed, {left / 60:.0f} min left")

    def _record(self, answer: SoakAnswer, first: _First | None = None) -> None:
        self.answers.append(answer)
        row = asdict(answer) | ({} if first is None else {"answer": [first.text, first.token_ids]})
        with (self.plan.out / RECORD).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    async def _ask_references(self, references: dict[str, tuple[str, int]]) -> None:
        for name, (text, length) in references.items():
            given = await sequential(self.server, self._request(text, GREEDY, length), self.clock)
            answer = SoakAnswer(
                self._next(),
                self._now(),
                REFERENCE,
                name,
                self.cancels,
                given.num_tokens,
                given.error,
                resident_bytes=await self._resident(),
                total_rounds=await self._rounds(),
            )
            if given.error is not None:
                self._record(answer)
                continue
            first = None if name in self.first else _First.of(given)
            if first is not None:
                self.first[name] = first
            self._record(replace(answer, **self._compared(name, given)), first)
        self.cancels = False

    def _compared(self, name: str, given: Generation) -> dict[str, Any]:
        """Return how a reference's answer compares with its first, and its figures."""
        same = self.first[name].is_same(given)
        others = [other for other in self.first if other != name] if not same else []
        closest = max(others, key=lambda other: self.first[other].shared(given), default=None)
        is_borrowed = closest is not None and self.first[closest].shared(given) >= LEAST_SHARED
        return {
            "is_same": same,
            "borrowed": closest if is_borrowed else None,
            "tokens_per_round": per_round([given]),
            "tokens_per_s": given.num_decoded / given.decode_s if given.num_decoded and given.decode_s > 0 else None,
        }

    async def _ask_traffic(self, requests: Iterator[_Request]) -> None:
        """Send the requests, `concurrency` at a time."""
        token_s = next((1 / one.tokens_per_s for one in reversed(self.answers) if one.tokens_per_s), TOKEN_S)

        async def worker() -> None:
            for one in requests:
                await (self._cancel(one, token_s) if one.kind == CANCELLED else self._ask(one))

        workers = [asyncio.ensure_future(worker()) for _ in range(self.plan.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()

    async def _cancel(self, one: _Request, token_s: float) -> None:
        """Close the connection when about the request's share of the answer has arrived."""
        number, self.cancels = self._next(), True
        with suppress(TimeoutError):
            async with asyncio.timeout(one.share * one.length * token_s):
                await ask(self.server, self._request(one.text, one.settings, one.length), self.clock)
        self._record(SoakAnswer(number, self._now(), CANCELLED))

    async def _ask(self, one: _Request) -> None:
        number = self._next()
        request = self._request(one.text, one.settings, one.length)
        is_constrained = one.kind == CONSTRAINED
        given = await ask(self.server, replace(request, in_chats=AS_SCHEMA if is_constrained else {}), self.clock)
        if is_constrained and _refuses(given):
            if self.constrains:
                self.notes.append(f"constrained requests are refused, and were skipped: {given.error}")
            self.constrains = False
            return
        fits = _fits(given.text, is_whole=given.finish_reason == "stop") if is_constrained and not given.error else None
        self._record(
            SoakAnswer(number, self._now(), one.kind, num_tokens=given.num_tokens, error=given.error, fits=fits)
        )

    def _request(self, text: str, settings: Settings, length: int) -> ServerRequest:
        chat = (Message("user", text),)
        salt = f"soak-{self.plan.seed}-{self.number}"
        return ServerRequest(self.server.model, chat, None, settings, length, self.plan.seed, salt)

    async def _rounds(self) -> int | None:
        page = await self.server.counters()
        return None if page is None or page.wrong or ROUNDS not in page.values else int(page.values[ROUNDS])

    async def _resident(self) -> int | None:
        if self.plan.process is not None:
            return resident_bytes(self.plan.process) or None
        return await self.server.resident_bytes()


def _refuses(given: Generation) -> bool:
    return given.error is not None and given.error.startswith(("HTTP 400", "HTTP 422"))


def _texts() -> list[str]:
    """Return the first turns of embedded prompts: chat, code and mathematics, in turn."""
    known = suites.known_suites()
    lists = [suites.load_prompts(known[name], "embedded", 32).prompts for name in ("mt_bench", "humaneval", "gsm8k")]
    return [prompt.turns[0] for several in zip(*lists, strict=False) for prompt in several]


def _references(texts: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the references by name: a prompt, and the length of its answer."""
    chat, code, mathematics = texts[:3]
    joined = "\n\n".join(texts[3 : 3 + NUM_JOINED])
    return {
        "a short answer": (chat, SHORT),
        "code": (code, LONG),
        "mathematics": (mathematics, LONG),
        "a long prompt": (joined, LONG),
    }


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of the mixed traffic; a cancelled one is cancelled at `share` of its answer."""

    kind: str
    text: str
    settings: Settings
    length: int
    share: float


def _mixed(texts: Sequence[str], random: Random, may_cancel: bool, may_constrain: bool) -> Iterator[_Request]:
    """Yield the requests between two turns of the references."""
    kinds = [SAMPLED] * AT_A_TIME
    if may_constrain:
        kinds[0] = CONSTRAINED
    if may_cancel:
        kinds[-2:] = [CANCELLED] * 2
    random.shuffle(kinds)
    for kind in kinds:
        text, length = random.choice(texts[3 + NUM_JOINED :]), random.choice(LENGTHS)
        if kind == CONSTRAINED:
            text, length = f"{QUESTION} {random.randrange(1000)}", NUM_CONSTRAINED
        settings = Settings(temperature=random.choice(TEMPERATURES))
        yield _Request(kind, text, settings, length, random.uniform(0.1, 0.9))


def _fits(text: str, is_whole: bool) -> bool:
    """Return whether a text is what the schema allows, or, if it was cut at the limit, the beginning of it."""
    compact = "".join(text.split())
    known = [f'{{"name":"{name}","number":{number}}}' for name in NAMES for number in NUMBERS]
    known += [f'{{"number":{number},"name":"{name}"}}' for name in NAMES for number in NUMBERS]
    return compact in known if is_whole else any(one.startswith(compact) for one in known)
