"""A run's page with many answers, in a real browser: how soon they can be read, and how much memory they take."""

from __future__ import annotations

import random
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_bench.core.environment import describe, one_line
from dflash_bench.report import html, read_document
from dflash_bench.report.answers import PageAnswers, page_answers
from dflash_bench.report.tables import markdown
from studies._study import Made, StudyError, Work, tell

TAKES = "two minutes"
PAGES = ("speed/page.md",)
EXTRA = "dev"

RUN = "--suite math --method dflash --method eagle3"
SIZES = (1_000, 10_000)
MOST_SECONDS, MOST_HEAP_MB, MOST_PAGE_MB = 2.0, 60.0, 2.0
"""Goals: the first applies to every size, the last to a thousand answers."""
HEAD = """# A page with many answers

`{command}` makes this page. {machine}; {browser}, headless, a window of 1,400 by 900 pixels.

Answers of one real run (`{run}`: {num} answers of {mean:.0f} tokens in the mean), repeated with their tokens shuffled,
so that copies do not compress to nothing. The static drawings of the whole run are left out: they do not grow.

{table}

- ready: the median of {times} loads from the disk, until all answers are unpacked and the list can be read
- heap: what scripts hold after garbage is collected
- goals: at most {seconds:g} s and {heap:g} MB at both sizes, and {size:g} MB for a page of 1,000 answers{verdict}
"""
READY = """
const done = arguments[0];
const wait = () => document.querySelector("[aria-busy]") ? setTimeout(wait, 5) : done();
wait();
"""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=5, help="how often each page is loaded")


def make(work: Work, options: Namespace) -> Made:
    document = read_document(work.run("math", *RUN.split()))
    read = html.read_page(document)
    few = page_answers(document, read.answers, None)
    rows, missed, version = [], [], ""
    for size in SIZES:
        tell(f"a page of {size:,} answers")
        path = work.folder / f"page-{size}.html"
        path.write_text(html.page(document, {}, repeated(few, size), read), encoding="utf-8")
        seconds, heap, nodes, version = measured(path, options.times)
        megabytes = path.stat().st_size / 1e6
        rows.append([f"{size:,}", f"{megabytes:.2f} MB", f"{seconds:.2f} s", f"{heap / 1e6:.1f} MB", f"{nodes:,}"])
        if seconds > MOST_SECONDS or heap / 1e6 > MOST_HEAP_MB or (size == SIZES[0] and megabytes > MOST_PAGE_MB):
            missed.append(f"{size:,} answers miss a goal: {', '.join(rows[-1][1:])}")
    text = HEAD.format(
        command=work.command,
        machine=one_line(describe()),
        browser=version,
        run=f"dflash-bench run {RUN}",
        num=len(few.rows),
        mean=sum(row["tokens"] for row in few.rows) / len(few.rows),
        times=options.times,
        table=markdown(("answers", "page", "ready", "heap", "nodes of the document"), rows, left=0),
        seconds=MOST_SECONDS,
        heap=MOST_HEAP_MB,
        size=MOST_PAGE_MB,
        verdict="; missed" if missed else ": met",
    )
    return Made({PAGES[0]: text}, missed)


def repeated(few: PageAnswers, size: int) -> PageAnswers:
    """Return `size` answers: copies of a run's, with shuffled tokens and unique prompt ids."""
    order = random.Random(0)
    rows: list[Any] = []
    texts: list[str] = []
    lengths: list[list[int]] = []
    while len(rows) < size:
        first, copy = len(texts), len(rows) // len(few.rows)
        for text, pieces in zip(few.texts, few.lengths, strict=True):
            words, end = [], 0
            for length in pieces or [len(text)]:
                words.append(text[end : end + length])
                end += length
            order.shuffle(words)
            texts.append("".join(words))
            lengths.append([len(word) for word in words])
        rows += [row | {"prompt": f"{row['prompt']}-{copy}", "text": first + row["text"]} for row in few.rows]
    return replace(few, rows=rows[:size], texts=texts, lengths=lengths, num_all=size)


def measured(path: Path, times: int) -> tuple[float, int, int, str]:
    """Return seconds until a page is ready, its heap in bytes, its document's nodes, and the browser's version."""
    seconds = []
    for _ in range(times):
        with browser() as driver:
            driver.get(path.as_uri())
            driver.execute_async_script(READY)
            seconds.append(driver.execute_script("return performance.now()") / 1e3)
            driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
            heap = driver.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"]
            nodes = driver.execute_script("return document.querySelectorAll('*').length")
            version = f"Chromium {driver.capabilities['browserVersion']}"
    return sorted(seconds)[len(seconds) // 2], int(heap), int(nodes), version


@contextmanager
def browser() -> Iterator[Any]:
    """Open a browser with a fresh profile. Raises StudyError if there is none on the machine."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise StudyError("this study needs chromium and chromedriver: install them (apt-get install chromium-driver)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        how = webdriver.ChromeOptions()
        how.binary_location = chromium
        for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-sync"):
            how.add_argument(f"--{flag}")
        how.add_argument(f"--user-data-dir={profile}")
        how.add_argument("--window-size=1400,900")
        opened = webdriver.Chrome(options=how, service=webdriver.ChromeService(driver))
        try:
            opened.set_script_timeout(30)
            yield opened
        finally:
            opened.quit()
