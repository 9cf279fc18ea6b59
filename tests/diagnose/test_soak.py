"""`soak`: eight faults that a server may get in time, each planted and named; and a server that stays as it is."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from dflash_bench.diagnose import soak as soaking
from dflash_bench.diagnose.show_soak import text
from dflash_bench.diagnose.soak import Soak, soak
from dflash_bench.diagnose.soak_findings import CANCELLED, CONSTRAINED, REFERENCE
from dflash_bench.servers.address import Access
from helpers.each import each
from helpers.servers.fake_server import FakeServer
from helpers.servers.fake_words import Count, text_of

Main = Callable[..., tuple[int, str, str]]
BLOCK, ACCEPTS = 15, 15
FROM = 40
"""The answer from which a fault is there."""
LETTERS = 1000
"""Tokens from here on are letters."""
AS_ASKED, FREE = '{"name": "cat", "number": 3}', "a cat, I say, and then another cat, " * 9
SHORT = soaking._references(soaking._texts())["a short answer"][0]


def letters(word: str) -> list[int]:
    return [*(LETTERS + ord(letter) for letter in word), 1]


def worded(tokens: Sequence[int]) -> str:
    return "".join(chr(token - LETTERS) if token > LETTERS else text_of([token]) for token in tokens)


class Ageing(FakeServer):
    """Answers any question with tokens of its own, drafts, and gets a fault at answer `FROM`."""

    def __init__(self, fault: str) -> None:
        super().__init__(answer=self._answer, text=worded, block=BLOCK)
        self.fault, self.num_cancelled, self.first = fault, 0, ""

    @property
    def has(self) -> str:
        return self.fault if self.num_answers > FROM else ""

    def _answer(self, prompt: str, most: int) -> list[int]:
        self.last = prompt
        if "JSON" in prompt:
            return letters(FREE if self.has == "constraint" else AS_ASKED)[:most]  # free text goes on to the limit
        if self.has == "context" and self.num_answers % 3 == 0:
            prompt = self.first
        self.first = self.first or prompt
        return [2 + zlib.crc32(f"{place} {prompt}".encode()) % 97 for place in range(most)]

    def _rounds(self, num_tokens: int) -> list[int]:
        """The rounds of the answer that has just been made."""
        accepts = ACCEPTS
        if self.has == "draft-off" and json.dumps(SHORT)[1:-1] in self.last:
            accepts = 0
        if self.fault == "cancel" and self.num_cancelled:
            accepts = 9
        return [accepts] * ceil((num_tokens - 1) / (accepts + 1))

    def _metrics(self) -> str:
        size = 1e9 + (1e7 * self.num_answers if self.fault == "memory" else 0)
        return f"{super()._metrics()}process_resident_memory_bytes {size:.6e}\n"

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if self.has == "stopped":
            self.stopping.set()
            return False
        if self.fault == "counters" and self.num_answers == FROM:
            self.count = Count()
        self.does.round_s = 0.01 if self.has == "speed" else 2e-3 if self.fault in ("cancel", "speed") else 0.0
        try:
            return await super()._generate(path, body, writer)
        except ConnectionError:
            self.num_cancelled += 1
            raise


def soaked(fault: str, out: Path, answers: int = 170, refuses: tuple[str, ...] = ()) -> Soak:
    """Soak a server until it has given so many answers."""
    with Ageing(fault) as server:
        server.does.refuses = refuses

        def clock() -> float:
            return asyncio.get_event_loop().time() + (1e9 if server.num_answers > answers else 0.0)

        return soak(server.url, out, 1e6, Access(timeout_s=20.0), clock=clock)


FAULTS = ("memory", "cancel", "stopped", "constraint", "context", "counters", "speed", "draft-off")


@each("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_place(fault: str, tmp_path: Path) -> None:
    found = soaked(fault, tmp_path / fault)
    codes = {one.code: one for one in found.findings}
    assert fault in codes, (fault, found.findings)
    begins = {"memory": 1, "cancel": 1}.get(fault, FROM)
    assert begins <= codes[fault].number <= begins + 80, codes[fault]
    assert f"({fault})" in text(found)


def test_a_server_that_stays_as_it_is_has_no_findings(tmp_path: Path) -> None:
    found = soaked("", tmp_path, answers=60)
    assert {one.code for one in found.findings} <= {"speed"}, found.findings
    assert {one.kind for one in found.answers} >= {REFERENCE, CANCELLED, CONSTRAINED}
    assert all(one.fits for one in found.answers if one.fits is not None)
    lines = text(found).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 12


def test_it_goes_on_where_it_stopped_even_in_mid_line(tmp_path: Path) -> None:
    first = soaked("", tmp_path, answers=30)
    record = tmp_path / soaking.RECORD
    record.write_text(record.read_text() + '{"number": 9')
    with FakeServer(answer=lambda prompt, most: [7] * most) as server:
        state = json.loads((tmp_path / soaking.STATE).read_text())
        (tmp_path / soaking.STATE).write_text(json.dumps(state | {"url": server.url}))
        again = soak(server.url, tmp_path, first.answers[-1].seconds, Access(timeout_s=20.0))
    assert len(again.answers) == len(first.answers) + 4
    assert [json.loads(line)["number"] for line in record.read_text().splitlines()] == [
        one.number for one in again.answers
    ]
    # It is another server, whose answers differ from the first ones.
    assert [one.is_same for one in again.answers[-4:]] == [False] * 4
    assert {one.code for one in again.findings} >= {"exactness"}


def test_a_server_that_refuses_constraints_is_soaked_without_them(tmp_path: Path) -> None:
    found = soaked("", tmp_path, answers=30, refuses=("response_format",))
    assert "constrained" in found.notes[0] and not any(one.kind == CONSTRAINED for one in found.answers)


def test_the_command_writes_a_page_and_fails_for_findings(tmp_path: Path, main: Main) -> None:
    with Ageing("") as server:
        code, out, _ = main("soak", server.url, "--for", "1s", "-o", tmp_path / "one", "--json")
    assert code in (0, 1) and json.loads(out)["dialect"] == "vllm"
    assert "dflash-bench soak URL --for 1s" in (tmp_path / "one" / "soak.md").read_text()
    code, out, err = main("soak", "http://127.0.0.1:1", "--for", "1s", "-o", tmp_path / "two")
    assert (code, out) == (2, "") and "correct the address" in err.splitlines()[-1]
    with Ageing("") as server:
        words = ("soak", server.url, "--for", "1s", "--seed", 1, "-o", tmp_path / "one")
        code, _, err = main(*words)
    assert code == 2 and "same options" in err.splitlines()[-1]


@each(
    ("text", "is_whole", "fits"),
    [
        ('{"name": "owl",\n "number": 2}', True, True),
        ('{"number": 1, "name": "dog"}', True, True),
        ('{"name": "owl", "number": 4}', True, False),
        ('{"name": "owl", "number": 2', True, False),
        ('{"name": "owl",\n\n', False, True),
        ("The owl is a bird", False, False),
        ('{"name": "owl", "number": 2} and', False, False),
    ],
)
def test_an_answer_cut_at_its_limit_is_judged_too(text: str, is_whole: bool, fits: bool) -> None:
    assert soaking._fits(text, is_whole) is fits
