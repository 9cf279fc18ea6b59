"""Answers for reports and pages, hostile texts, and what a page holds."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.core.types import Answer
from dflash_bench.report import Document
from dflash_bench.report import answers as report_answers
from dflash_bench.report.findings import Finding
from dflash_bench.report.findings import findings as find
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.table import RunTable
from helpers.rows import generation, record
from helpers.runs import ENVIRONMENT, about, frame_of, known

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>"
NANO = Tokenizer.from_file(str(report_answers.NANO / "tokenizer.json"))
TEXT = "The answer is 7 € naïvely, so \\boxed{7}.<|im_end|>"
SAID = " of them"
"""Return the rejected end of a draft: up to two tokens after the accepted ones."""
REJECTED = tuple(NANO.encode(SAID, add_special_tokens=False).ids)


class Elements(HTMLParser):
    """Every start tag, with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def told(prompt: str = "p0", text: str = TEXT, **place: Any) -> list[Answer]:
    """The same answer plainly and in rounds of up to 2 kept tokens, with ids of the embedded tokenizer."""
    ids = tuple(NANO.encode(text, add_special_tokens=False).ids)
    rounds = [2] * ((len(ids) - 1) // 3) + ([(len(ids) - 1) % 3 - 1] if (len(ids) - 1) % 3 else [])
    bare = NANO.decode(list(ids), skip_special_tokens=True)
    rest = {"token_ids": ids, "text": bare}
    plain = generation([0] * (len(ids) - 1), **rest)
    drafted, at = [], 1
    for kept in rounds:
        drafted += [*ids[at : at + kept], *(2 * REJECTED)[: 4 - kept]]
        at += kept + 1
    return [
        record("ar", prompt, plain, **place),
        record("dflash", prompt, generation(rounds, 4, drafted_ids=tuple(drafted), **rest), exactness="exact", **place),
    ]


def data(page: str) -> dict[str, Any]:
    """Return the data that the page's script unpacks, with texts cut into pieces."""
    (found,) = re.findall(r'<script id="data" type="application/octet-stream">(.*?)</script>', page, re.DOTALL)
    loaded: dict[str, Any] = json.loads(zlib.decompress(b64decode(found, validate=True)))
    loaded["pieces"] = [
        None if lengths is None else cut(text, lengths)
        for text, lengths in zip(loaded["texts"], loaded["lengths"], strict=True)
    ]
    return loaded


def cut(text: str, lengths: list[int]) -> list[str]:
    units, ends = text.encode("utf-16-le"), [0, *accumulate(lengths)]
    assert 2 * ends[-1] == len(units)
    return [units[2 * begin : 2 * end].decode("utf-16-le") for begin, end in pairwise(ends)]


INFO = about(command="dflash-bench run --suite gsm8k --data 'my data'", environment=ENVIRONMENT)


def cells_of(records: Sequence[Answer]) -> list[Cell]:
    return _cells_in(frame_of(records), records)


def _cells_in(frame: Any, records: Sequence[Answer]) -> list[Cell]:
    return summarise(frame, known(settings=settings_to_json(list(dict.fromkeys(row.settings for row in records)))))


def found(records: Sequence[Answer], identity: dict[str, Any] | None = None) -> list[Finding]:
    """All findings of a run of these answers."""
    frame = frame_of(records)
    return find(frame, _cells_in(frame, records), known(**(identity or {})))


def findings(records: Sequence[Answer], cells: Sequence[Cell], identity: dict[str, Any] | None = None) -> list[Finding]:
    return find(frame_of(records), cells, known(**(identity or {})))


def document(cells: Sequence[Cell], findings: Sequence[Finding] = ()) -> Document:
    return Document(Path("results/runs/r1"), RunTable("results/runs/r1", INFO, None), cells, findings)
