"""How much rounding moves what a target says, which is what the judge's tolerance and its ceilings rest on.

Answers are made plainly, and again from drafts of 3, 7 and 15 tokens, every fifth of which is wrong. All of them are
sound, so whatever the judge finds in them is rounding: between its own two forms, and between it and the engine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dflash_bench.engine.decoding import Committed, Limits, NoDrafter
from dflash_bench.engine.judge import CEILINGS
from dflash_bench.engine.local import LocalBackend, stop_ids
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.environment import describe, one_line
from dflash_bench.models import loading, presets
from dflash_bench.records import Divergence, Message
from dflash_bench.tasks import suites

WIDTHS, WRONG_EVERY = (3, 7, 15), 5
HEADS = (
    "dtype", "answers", "tokens", "two best tokens: median", "99 %", "largest", "leave plain", "not first choice",
    "largest gap", "tolerance there", "most of a tolerance used", "ceiling", "mismatches",
)  # fmt: skip


class Known:
    """Drafts from a text that it knows, and is wrong in every fifth place."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self.num_drafts, self.device, self.text, self.end = num_drafts, device, [0], 0

    def begin(self, num_rows: int, capacity: int) -> None:
        self.end = 0

    def observe(self, committed: Committed) -> None:
        self.end = committed.starts[0] + committed.counts[0]

    def propose(self) -> Draft:
        places = range(self.end + 1, self.end + 1 + self.num_drafts)
        tokens = [self.text[min(place, len(self.text) - 1)] + (place % WRONG_EVERY == 0) for place in places]
        return Draft(torch.tensor([tokens], device=self.device))


@dataclass
class Seen:
    """Of all answers of one dtype."""

    differences: list[float] = field(default_factory=list)
    """Between the judge's two forms, of how far the best token is ahead of the second."""
    num_answers: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    departures: list[Divergence] = field(default_factory=list)

    @property
    def num_mismatches(self) -> int:
        return sum(one.verdict == "mismatch" for one in (*self.divergences, *self.departures))


def main() -> int:
    options = parse()
    print(f"{presets.name(options.target)}, {options.suite} ({options.data}); {one_line(describe())}\n")
    print("| " + " | ".join(HEADS) + " |\n|" + " ---: |" * len(HEADS))
    num_mismatches = 0
    for dtype in options.dtype or ["float32", "float16", "bfloat16"]:
        seen = measure(options, dtype)
        print("| " + " | ".join(row_of(dtype, seen)) + " |", flush=True)
        num_mismatches += seen.num_mismatches
    return int(num_mismatches > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=presets.preset("nano").target, help="a folder or hub id; nano if absent")
    parser.add_argument("--dtype", action="append", choices=["float32", "float16", "bfloat16"], help="all if absent")
    parser.add_argument("--suite", default="gsm8k")
    parser.add_argument("--data", default="embedded", help="embedded, hub or a folder")
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def measure(options: argparse.Namespace, dtype: str) -> Seen:
    torch.set_num_threads(1)
    model = presets.combine(None, options.target, {})
    models = loading.load(model, [], options.device, getattr(torch, dtype))
    target = Target(models.target)
    drafters = {str(width): Known(width, target.device) for width in WIDTHS}
    limits = Limits(options.max_new_tokens, stop_ids(models.target, models.tokenizer))
    backend = LocalBackend(target, models.tokenizer, {"ar": NoDrafter(), **drafters}, limits, Sampling())
    seen = Seen()
    (suite,) = suites.expand([options.suite])
    for prompt in suites.load_prompts(suite, options.data, options.limit).prompts:
        print(f"{dtype}, {seen.num_answers} answers ", end="\r", file=sys.stderr)
        text = backend.encode([Message("user", prompt.turns[0])])
        plain = backend.generate_ids("ar", [text])[0].token_ids
        seen.differences += between_forms(backend, [*text, *plain[:-1]], len(plain))
        for drafter in drafters.values():
            drafter.text = [*text, *plain]
        for label in backend.drafters:
            judge(backend, text, plain, backend.generate_ids(label, [text])[0].token_ids, seen)
    return seen


def between_forms(backend: LocalBackend, text: Sequence[int], places: int) -> Iterator[float]:
    one, steps = (form(text, places).float() for form in (backend.judge._in_one_pass, backend.judge._in_steps))
    best = one.topk(2, dim=-1).indices
    ahead = [logits.gather(1, best[:, :1]) - logits.gather(1, best[:, 1:]) for logits in (one, steps)]
    yield from (ahead[0] - ahead[1])[:, 0].abs().tolist()


def judge(backend: LocalBackend, text: Sequence[int], plain: Sequence[int], answer: Sequence[int], seen: Seen) -> None:
    seen.num_answers += 1
    if departure := backend.judge.audit(text, answer):
        seen.departures.append(departure)
    if tuple(answer) != tuple(plain):
        seen.divergences.append(backend.judge.divergence(text, plain, answer))


def row_of(dtype: str, seen: Seen) -> list[str]:
    differences = torch.tensor(seen.differences)
    gaps = [one for one in (*seen.divergences, *seen.departures) if one.gap is not None]
    worst = max(gaps, key=lambda one: one.gap or 0.0, default=None)
    quantiles = [float(differences.quantile(share)) for share in (0.5, 0.99, 1)]
    cells = [dtype, str(seen.num_answers), str(len(differences)), *(f"{value:.2g}" for value in quantiles)]
    cells += [str(len(seen.divergences)), str(len(seen.departures))]
    used = [one.gap / one.tolerance for one in gaps if one.gap and one.tolerance]
    cells += (
        [f"{worst.gap:.2g}", f"{worst.tolerance:.2g}", f"{max(used, default=0):.0%}"] if worst else ["none", "", ""]
    )
    return [*cells, f"{CEILINGS[getattr(torch, dtype)]:g}", str(seen.num_mismatches)]


if __name__ == "__main__":
    sys.exit(main())
