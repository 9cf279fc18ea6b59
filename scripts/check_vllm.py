"""Our engine against a real vLLM server: the same nano weights, prompts and settings, one request at a time.

Tokens must equal those of our plain decoding. Acceptance must agree within sampling error, position by position
(two-proportion intervals, 95 % over all positions together) and as a whole (the ratio of both al.pooled, resampled over
prompts, which is much sharper because both answered the same prompts).

If vLLM's norm kernel uses one layer's weight for all layers (its CPU build does), a DFlash draft is run twice: by vLLM
as released, and with that one function computed layer by layer. Only the second must agree with ours; both are shown.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from vllm_server import Server, ServerError

from dflash_bench import methods
from dflash_bench.analysis import stats
from dflash_bench.engine.local import LocalBackend, open_backend
from dflash_bench.environment import describe, one_line
from dflash_bench.models import loading
from dflash_bench.records import Generation, Message
from dflash_bench.tasks import suites

NUM_PROMPTS, MAX_NEW_TOKENS, MODEL = 64, 128, "nano"
LEVEL = 0.95
PLUGINS = Path(__file__).parent / "vllm_plugin"
AS_RELEASED, NORM_PER_LAYER = "vLLM", "vLLM, norm per layer"
KERNEL_ERROR = 1e-4
"""A float32 norm is within 1e-6 of the formula; one with another layer's weight is wrong in its first digit."""


@dataclass(frozen=True, slots=True)
class Counts:
    """One answer's tokens, its number of rounds, and how many rounds accepted each position of the draft."""

    tokens: tuple[int, ...]
    num_rounds: int
    accepted_at: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt under one method; `verdict` is None if vLLM's tokens equal those of our plain decoding."""

    ours: Counts
    theirs: Counts
    verdict: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`excused`, if not empty, is a measured fault of vLLM; then acceptance may differ, but tokens still may not."""

    method: str
    engine: str
    num_drafts: int
    answers: tuple[Answer, ...]
    excused: str = ""

    @property
    def equal(self) -> list[Answer]:
        """The answers with the same text; only their acceptance is compared."""
        return [answer for answer in self.answers if answer.verdict is None]

    @property
    def num_identical(self) -> int:
        return sum(answer.ours == answer.theirs for answer in self.equal)

    def positions(self) -> list[tuple[int, float, float, float]]:
        """(position counted from 1, our share of rounds, theirs, the allowed difference)."""
        mine, other = ([getattr(answer, side) for answer in self.equal] for side in ("ours", "theirs"))
        n, m = (sum(counts.num_rounds for counts in side) for side in (mine, other))
        z = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * self.num_drafts))
        rows = []
        for k in range(self.num_drafts):
            x, y = (sum(counts.accepted_at[k] for counts in side) for side in (mine, other))
            both = (x + y) / (n + m)
            rows.append((k + 1, x / n, y / m, z * (both * (1 - both) * (1 / n + 1 / m)) ** 0.5))
        return rows

    def ratio(self) -> stats.Interval:
        """Their al.pooled over ours."""
        both = [(answer.theirs, answer.ours) for answer in self.equal]
        columns = [[float(n) for c in sides for n in (c.num_rounds + c.num_accepted, c.num_rounds)] for sides in both]
        (interval,) = stats.intervals(np.array(columns), [stats.ratio([0, 3], [1, 2])])
        assert interval is not None, "every answer has rounds"
        return interval

    def mismatches(self) -> list[str]:
        return [
            f"prompt {i}: {answer.verdict}"
            for i, answer in enumerate(self.answers)
            if answer.verdict is not None and "mismatch" in answer.verdict
        ]

    def problems(self) -> list[str]:
        problems = self.mismatches()
        if not any(answer.theirs.num_accepted for answer in self.equal):
            return [*problems, "vLLM accepted no draft at all"]
        problems += [
            f"position {k}: {ours:.3f} here, {theirs:.3f} in vLLM, more than {bound:.3f} apart"
            for k, ours, theirs, bound in self.positions()
            if abs(ours - theirs) > bound
        ]
        ratio = self.ratio()
        if ratio.low is None or ratio.high is None or not ratio.low <= 1 <= ratio.high:
            bounds = "none" if ratio.low is None else f"[{ratio.low:.4f}, {ratio.high:.4f}]"
            problems.append(f"al.pooled of vLLM is {ratio.value:.4f} of ours, interval {bounds}")
        return problems


def main() -> int:
    options = parse_options()
    # So that the server is stopped, too, when this script is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    chosen = methods.chosen(options.method)
    names = [method.name for method in chosen if method.name != "ar"]
    models = loading.load(MODEL, names, "cpu", torch.float32)
    preset = loading.preset(MODEL)
    backend = open_backend(models, preset, chosen, MAX_NEW_TOKENS)
    messages = prompts(options.limit)
    plain = answers(backend, "ar", messages)
    compared = []
    try:
        for name in names:
            drafted = answers(backend, name, messages)
            settings = {
                "method": name,
                "model": preset.drafts[name],
                "num_speculative_tokens": backend.drafters[name].num_drafts,
            }
            fault = norm_fault(options.server_python) if name == "dflash" else ""
            for engine in (AS_RELEASED, NORM_PER_LAYER) if fault else (AS_RELEASED,):
                plugins = PLUGINS if engine == NORM_PER_LAYER else None
                with Server(options.server_python, preset.target, settings, plugins) as server:
                    answered = compare(server, backend, name, messages, plain, drafted)
                    versions = server.versions()
                excused = fault if engine == AS_RELEASED else ""
                compared.append(Comparison(name, engine, settings["num_speculative_tokens"], answered, excused))
    except ServerError as error:
        print(f"check_vllm: {error}", file=sys.stderr)
        return 1
    if all(any(answer.theirs.num_rounds for answer in comparison.equal) for comparison in compared):
        write(options.output, markdown(compared, versions))
    problems = [
        f"{comparison.method}, {comparison.engine}: {problem}"
        for comparison in compared
        for problem in (comparison.mismatches() if comparison.excused else comparison.problems())
    ]
    print("\n".join(problems) or "vLLM and this engine agree")
    print(
        "".join(
            f"{comparison.method}, {comparison.engine}: {comparison.excused}\n"
            for comparison in compared
            if comparison.excused
        ),
        end="",
    )
    return 1 if problems else 0


def norm_fault(python: Path) -> str:
    """What is wrong with vLLM's norm of several layers' keys at once; empty if it is right."""
    process = subprocess.run([python, PLUGINS / "norm_per_layer.py"], capture_output=True, text=True)
    if process.returncode:
        raise ServerError(f"vLLM's norm kernel could not be tested:\n{process.stderr[-2000:]}")
    error = float(process.stdout.split()[-1])
    if error < KERNEL_ERROR:
        return ""
    return (
        "its norm kernel uses the first layer's k_norm for the context keys of every draft layer "
        f"(off by {error:.2g} on random keys of three layers)"
    )


def parse_options() -> argparse.Namespace:
    """The options. `scripts/check_vllm` puts --server-python before those that the user types."""
    root = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-python", type=Path, required=True, help="the Python with vLLM installed")
    parser.add_argument("--limit", type=int, default=NUM_PROMPTS, help="number of prompts")
    parser.add_argument("--method", action="append", choices=["dflash", "eagle3"], help="default: both")
    parser.add_argument("--output", type=Path, default=root / "results" / "vllm-nano-cpu.md")
    options = parser.parse_args()
    options.method = options.method or ["dflash", "eagle3"]
    if options.limit < 2:
        parser.error("--limit must be at least 2, for an interval over prompts")
    return options


def prompts(limit: int) -> list[list[Message]]:
    """The first turns of embedded prompts, equally many from every suite."""
    known = suites.expand(["paper"])
    per_suite = -(-limit // len(known))
    loaded = [suites.load_prompts(suite, "embedded", per_suite).prompts for suite in known]
    mixed = [suite_prompts[i] for i in range(per_suite) for suite_prompts in loaded if i < len(suite_prompts)]
    return [[*prompt.opening, Message("user", prompt.turns[0])] for prompt in mixed[:limit]]


def answers(backend: LocalBackend, method: str, messages: Sequence[list[Message]]) -> list[Generation]:
    out = []
    for i, message in enumerate(messages):
        out.append(backend.generate(method, message))
        show(f"ours {method}", i + 1, len(messages))
        if out[-1].error:
            raise SystemExit(f"check_vllm: our {method} failed: {out[-1].error}")
    return out


def compare(
    server: Server,
    backend: LocalBackend,
    method: str,
    messages: Sequence[list[Message]],
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
) -> tuple[Answer, ...]:
    num_drafts = backend.drafters[method].num_drafts
    compared = []
    for i, message in enumerate(messages):
        if drafted[i].token_ids != plain[i].token_ids:
            raise SystemExit(f"check_vllm: our own {method} differs from our plain decoding in prompt {i}")
        theirs = Counts(*server.complete(backend.encode(message), MAX_NEW_TOKENS, num_drafts))
        compared.append(Answer(counts(drafted[i], num_drafts), theirs, verdict(backend, message, plain[i], theirs)))
        show(f"vLLM {method}", i + 1, len(messages))
    return tuple(compared)


def counts(generation: Generation, num_drafts: int) -> Counts:
    accepted = generation.accepted or ()
    at = tuple(sum(count > k for count in accepted) for k in range(num_drafts))
    return Counts(generation.token_ids, len(accepted), at)


def verdict(backend: LocalBackend, message: list[Message], plain: Generation, theirs: Counts) -> str | None:
    if theirs.tokens == plain.token_ids:
        return None
    divergence = backend.divergence(message, plain.token_ids, theirs.tokens)
    return f"{divergence.verdict} at {divergence}"


def show(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done % 16 == 0 or done == total:
        print(f"{what} {done}/{total}", file=sys.stderr, flush=True)


def markdown(compared: Sequence[Comparison], versions: dict[str, Any]) -> str:
    env = describe()
    theirs = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# This engine and vLLM, nano, on the CPU",
        "",
        "```",
        shlex.join(["scripts/check_vllm", *sys.argv[3:]]),
        "```",
        "",
        f"{one_line(env)}, transformers {env['packages']['transformers']}. The server: {theirs}.",
        f"float32, temperature 0, {MAX_NEW_TOKENS} new tokens at most, one request at a time.",
        "",
        "| method | drafts | engine | prompts | tokens equal to ar | rounds | al.pooled | al.emitted |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *dict.fromkeys(row for comparison in compared for row in summary_rows(comparison)),
        "",
        *agreement(compared),
        "",
        "- `al.pooled`: sum(a_i + 1) / sum(S); drafts accepted past a stop or the limit count, in both engines",
        "- `al.emitted`: sum(T - 1) / sum(S); only tokens of the answer count",
    ]
    for comparison in compared:
        title = comparison.method + ("" if comparison.engine == AS_RELEASED else f" ({comparison.engine})")
        lines += ["", f"## {title}: share of rounds that accept the draft at a position", ""]
        lines += ["| position | here | vLLM | difference | allowed |", "| ---: | ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {k} | {ours:.4f} | {theirs:.4f} | {theirs - ours:+.4f} | {bound:.4f} |"
            for k, ours, theirs, bound in comparison.positions()
        ]
    return "\n".join(lines) + "\n"


def summary_rows(comparison: Comparison) -> list[str]:
    rows = []
    for engine, side in (("here", "ours"), (comparison.engine, "theirs")):
        all_counts = [getattr(answer, side) for answer in comparison.equal]
        num_rounds = sum(c.num_rounds for c in all_counts)
        pooled = 1 + sum(c.num_accepted for c in all_counts) / num_rounds
        emitted = sum(len(c.tokens) - 1 for c in all_counts) / num_rounds
        equal = f"{len(comparison.equal)}/{len(comparison.answers)}"
        rows.append(
            f"| {comparison.method} | {comparison.num_drafts} | {engine} | {len(comparison.answers)} | {equal} "
            f"| {num_rounds} | {pooled:.4f} | {emitted:.4f} |"
        )
    return rows


def agreement(compared: Sequence[Comparison]) -> list[str]:
    lines = []
    for comparison in compared:
        ratio = comparison.ratio()
        problems = comparison.problems()
        why = f" A known fault: {comparison.excused}." if comparison.excused else ""
        lines.append(
            f"- {comparison.method}, {comparison.engine}: its al.pooled is {ratio.value:.4f} of ours, "
            f"[{ratio.low:.4f}, {ratio.high:.4f}] (95 %, over prompts); "
            f"all counts are the same in {comparison.num_identical} of {len(comparison.equal)} answers; "
            f"{'they agree' if not problems else 'THEY DISAGREE: ' + '; '.join(problems)}.{why}"
        )
        lines += [
            f"- {comparison.method}, {comparison.engine}, prompt {i}: {a.verdict}"
            for i, a in enumerate(comparison.answers)
            if a.verdict
        ]
    return lines


def write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
