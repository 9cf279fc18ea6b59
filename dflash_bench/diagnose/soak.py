"""Asks a server for hours, and finds what changes.

Mixed traffic, with answers at several temperatures and lengths, cancelled and constrained ones, takes turns with the
references: greedy questions, asked one at a time, whose answers, rounds and speed are known from their first answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
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
NUM_CONSTRAINED = 64
"""Tokens that a constrained answer may have."""
TOKEN_S = 0.01
"""Seconds per token before any is known."""
LEAST_SHARED = 8
"""Tokens with which a wrong answer has to begin like another reference's to count as taken from it."""
LETTERS = 4
"""Characters of text that count as a token, where the server returns no token ids."""
MOST_ERRORS = 24
"""Errors in a row after which the server counts as gone."""


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

    @property
    def data(self) -> dict[str, Any]:
        """The findings and what they are about, as `--json` prints them."""
        found = asdict(self)
        return found | {"answers": len(self.answers)}


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
    """Ask a server for `seconds`; answers are kept in `out`, and the same call goes on where it was stopped.

    `process` is the server's, on this machine, whose memory is read; without one, its own metrics are. Raises UserError
    for an address without a server, and for a folder of another soak.
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
    spent_s: float = 0.0
    """The time of earlier parts of this soak."""

    async def perform(self) -> None:
        self._go_on()
        texts = _texts()
        references = _references(texts)
        began_s = self.clock()
        cycle = 0
        self.tell("asking the references")
        try:
            await self._ask_references(references, began_s)
            while self.spent_s + self.clock() - began_s < self.plan.seconds and not self._has_stopped():
                cycle += 1
                await self._ask_traffic(texts, Random(f"{self.plan.seed} {self.number}"), cycle, began_s)
                await self._ask_references(references, began_s)
                self._tell_progress(began_s)
        except UserError as error:
            why = str(of_one_address(error))
            self._record(SoakAnswer(self._next(), self._now(began_s), SAMPLED, error=why, is_gone=True))

    def _go_on(self) -> None:
        path = self.plan.out / RECORD
        if not path.exists():
            return
        # The last line may be half of one.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("}\n")]
        files.write_text(path, "".join(lines))
        whole = [json.loads(line) for line in lines]
        self.answers = [SoakAnswer(**{name: value for name, value in row.items() if name != "answer"}) for row in whole]
        self.first = {
            row["name"]: _First(row["answer"][0], tuple(row["answer"][1])) for row in whole if "answer" in row
        }
        if self.answers:
            self.number, self.spent_s = self.answers[-1].number, self.answers[-1].seconds

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _now(self, began_s: float) -> float:
        return self.spent_s + self.clock() - began_s

    def _has_stopped(self) -> bool:
        last = [one.error for one in self.answers if one.kind != CANCELLED][-MOST_ERRORS:]
        return len(last) == MOST_ERRORS and all(last)

    def _tell_progress(self, began_s: float) -> None:
        left = max(0.0, self.plan.seconds - self._now(began_s))
        failed = sum(one.error is not None for one in self.answers)
        changed = sum(one.is_same is False for one in self.answers)
        self.tell(f"{self.number:,} answers, {failed} failed, {changed} changed, {left / 60:.0f} min left")

    def _record(self, answer: SoakAnswer, first: _First | None = None) -> None:
        self.answers.append(answer)
        row = asdict(answer) | ({} if first is None else {"answer": [first.text, first.token_ids]})
        with (self.plan.out / RECORD).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    async def _ask_references(self, references: dict[str, tuple[str, int]], began_s: float) -> None:
        for name, (text, length) in references.items():
            given = await sequential(self.server, self._request(text, GREEDY, length), self.clock)
            answer = SoakAnswer(
                self._next(),
                self._now(began_s),
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

    async def _ask_traffic(self, texts: Sequence[str], random: Random, cycle: int, began_s: float) -> None:
        """Send mixed requests, `concurrency` at a time; every other turn cancels some."""
        wanted = iter(list(_mixed(texts, random, may_cancel=cycle % 2 == 0, may_constrain=self.constrains)))
        token_s = next((1 / one.tokens_per_s for one in reversed(self.answers) if one.tokens_per_s), TOKEN_S)

        async def worker() -> None:
            for kind, text, settings, length, share in wanted:
                await self._ask_one(kind, text, settings, length, share * length * token_s, began_s)

        workers = [asyncio.ensure_future(worker()) for _ in range(self.plan.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for one in workers:
                one.cancel()

    async def _ask_one(
        self, kind: str, text: str, settings: Settings, length: int, within_s: float, began_s: float
    ) -> None:
        number = self._next()
        request = self._request(text, settings, length)
        if kind == CANCELLED:
            self.cancels = True
            try:
                async with asyncio.timeout(within_s):
                    await ask(self.server, request, self.clock)
            except TimeoutError:
                pass
            self._record(SoakAnswer(number, self._now(began_s), CANCELLED))
            return
        if kind == CONSTRAINED:
            request = replace(request, in_chats=AS_SCHEMA)
        given = await ask(self.server, request, self.clock)
        if kind == CONSTRAINED and _refuses(given):
            if self.constrains:
                self.notes.append(f"it refuses constrained answers, which are left out: {given.error}")
            self.constrains = False
            return
        answer = SoakAnswer(number, self._now(began_s), kind, num_tokens=given.num_tokens, error=given.error)
        if kind == CONSTRAINED and given.error is None and given.finish_reason == "stop":
            answer = replace(answer, fits=_fits(given.text))
        self._record(answer)

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


def _mixed(
    texts: Sequence[str], random: Random, *, may_cancel: bool, may_constrain: bool
) -> Iterator[tuple[str, str, Settings, int, float]]:
    """Yield a turn of traffic: kind, prompt, settings, length, and the share of it after which it is cancelled."""
    kinds = [SAMPLED] * AT_A_TIME
    if may_constrain:
        kinds[0] = CONSTRAINED
    if may_cancel:
        kinds[-2:] = [CANCELLED] * 2
    random.shuffle(kinds)
    for kind in kinds:
        settings = Settings(temperature=random.choice(TEMPERATURES))
        length = NUM_CONSTRAINED if kind == CONSTRAINED else random.choice(LENGTHS)
        text = random.choice(texts[9:])
        if kind == CONSTRAINED:
            text = (
                f"Name an animal and a number up to 3, as JSON with the keys name and number. {random.randrange(1000)}"
            )
        yield kind, text, settings, length, random.uniform(0.1, 0.9)


def _fits(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    known = isinstance(value, dict) and value.keys() == {"name", "number"}
    return known and value["name"] in NAMES and value["number"] in NUMBERS
