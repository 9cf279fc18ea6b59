"""Acceptance of llama.cpp at higher concurrency, slot by slot: a page, and its requirements.

Tried are other numbers of slots, one drafted token, prompts of one length, and other sizes of batches.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llamacpp_here import serving

from dflash_bench.core.types import Message
from dflash_bench.models import targets
from dflash_bench.models.convert import convert
from dflash_bench.models.presets import NANO
from dflash_bench.report.tables import markdown
from dflash_bench.tasks import suites

pytestmark = pytest.mark.llamacpp
NUM_PROMPTS, LENGTH, CONTEXT = 16, 200, 512
WIDTHS = {"eagle3": 5, "dflash": 15}


@dataclass(frozen=True, slots=True)
class Trial:
    """`together`: answers at a time. `options`: of the server, besides the usual ones."""

    method: str
    slots: int
    together: int
    drafts: int
    prompts: str = "mixed"
    options: tuple[str, ...] = ()


def trials() -> Iterator[Trial]:
    for method, drafts in WIDTHS.items():
        for slots, together in ((4, 1), (4, 2), (2, 2), (4, 4)):
            yield Trial(method, slots, together, drafts)
        yield Trial(method, 4, 1, 1)
        yield Trial(method, 4, 4, 1)
        for together in (1, 4):
            yield Trial(method, 4, together, drafts, "of one length")
    for size in (6, 12, 24, 2048):
        yield Trial("eagle3", 4, 4, 5, options=("--ubatch-size", str(size)))
    for size in (12, 24, 48):
        yield Trial("eagle3", 4, 4, 5, options=("--batch-size", str(size), "--ubatch-size", str(size)))


def options_of(trial: Trial) -> list[str]:
    words = f"--alias nano --ctx-size {CONTEXT * trial.slots} --parallel {trial.slots} "
    words += f"--spec-type draft-{trial.method} --spec-draft-n-max {trial.drafts}"
    return [*words.split(), *trial.options]


def answers_of(url: str, prompts: Sequence[Sequence[int]], together: int) -> list[dict[str, Any]]:
    def ask(prompt: Sequence[int]) -> dict[str, Any]:
        body = {
            "prompt": list(prompt),
            "n_predict": LENGTH,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
        answer: dict[str, Any] = json.load(urllib.request.urlopen(request))
        return answer

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(ask, prompts))


def rounds_of(url: str) -> float:
    page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    name = "llamacpp:spec_decode_num_drafts_total "
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def by_slot(answers: Sequence[dict[str, Any]]) -> dict[int, float]:
    """The share of drafted tokens that each slot accepts."""
    shares = {}
    for slot in sorted({answer["id_slot"] for answer in answers}):
        timings = [answer["timings"] for answer in answers if answer["id_slot"] == slot]
        drafted = sum(one.get("draft_n", 0) for one in timings)
        shares[slot] = sum(one.get("draft_n_accepted", 0) for one in timings) / max(drafted, 1)
    return shares


def prompts_by_length() -> dict[str, list[list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(targets.find_target("nano"))
    loaded = suites.load_prompts(suites.expand(["gsm8k"])[0], "embedded", 64)
    chats = [[Message("user", one.turns[0])] for one in loaded.prompts]
    ids = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in chat], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for chat in chats
    ]
    lengths = [len(one) for one in ids]
    usual = max(set(lengths), key=lengths.count)
    return {"mixed": ids[:NUM_PROMPTS], "of one length": [one for one in ids if len(one) == usual]}


def test_acceptance_slot_by_slot(
    tmp_path: Path,
    server_environment: Callable[[str], Path],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
) -> None:
    convert("nano", tmp_path / "target.gguf", "gguf", None)
    for method in WIDTHS:
        convert(str(NANO / method), tmp_path / f"{method}.gguf", "gguf", "nano")
    python, prompts = server_environment("llamacpp") / "bin" / "python", prompts_by_length()
    texts: dict[str, set[str]] = {}
    alone: dict[str, float] = {}
    rows = []
    for trial in trials():
        draft = tmp_path / f"{trial.method}.gguf"
        with serving(python, tmp_path / "target.gguf", draft, options_of(trial), tmp_path / "log") as url:
            answers = answers_of(url, prompts[trial.prompts], trial.together)
            rounds = rounds_of(url)
        texts.setdefault(trial.prompts, set()).add(json.dumps([answer["tokens"] for answer in answers]))
        accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
        length = 1 + accepted / max(rounds, 1)
        if trial.together == 1 and trial.drafts > 1 and trial.prompts == "mixed":
            alone[trial.method] = length
        shares = " / ".join(f"{share:.2f}" for share in by_slot(answers).values())
        rows.append(
            [
                trial.method,
                str(trial.slots),
                str(trial.together),
                str(trial.drafts),
                trial.prompts,
                " ".join(trial.options),
                f"{length:.2f}",
                shares,
            ]
        )
    heads = [
        "method",
        "slots",
        "concurrency",
        "drafted",
        "prompts",
        "other options",
        "al.pooled",
        "accepted share, by slot",
    ]
    write_page("servers/llamacpp-slots-nano-cpu.md", page(command("llamacpp"), markdown(heads, rows)))
    assert all(len(same) == 1 for same in texts.values()), "the text depends on how many answers run at a time"
    assert alone["eagle3"] > 4 and alone["dflash"] > 6


def page(made_by: str, table: str) -> list[str]:
    return [
        "# llama.cpp at higher concurrency: nano, on the CPU, slot by slot",
        f"`{made_by}` makes this page. Float32, temperature 0, {NUM_PROMPTS} prompts of gsm8k (embedded), or those\n"
        f"that have the commonest length; {LENGTH} new tokens at most, one thread. Acceptance is the server's count,\n"
        "and no times are told. In all rows with the same prompts the answers are the same tokens.",
        table,
        READING,
    ]


READING = """## What it shows

**EAGLE-3: only the sequence that comes last in a batch drafts well.** At concurrency 4 the last slot
accepts as much as an answer alone, and the others next to nothing; with two slots it is the second. Neither the width
of drafts matters (one drafted token loses as much), nor whether prompts have one length, nor `--ubatch-size`, which
splits a batch's computation. A small `--batch-size`, which lets fewer sequences into one batch, brings much of it
back. This points at the state that each sequence carries from a verified batch to its next draft, and speaks against
blocks of unequal width. It is seen from outside: the server's code was not changed. This engine and vLLM keep their
acceptance with the same weights. For this version: one slot for EAGLE-3 (`--parallel 1`), and a server for each
answer at a time.

**DFlash loses less, and not by that rule.** Two answers in two slots lose nothing, nor does one drafted token in four
slots. Two answers in four slots lose most: it depends on the slots that are in use, not on how many answers run. Why
has not been found."""
