"""Our engine against a real vLLM server: the same nano weights, prompts and settings, one request at a time.

`comparison.py` says what must agree. If vLLM's norm kernel uses one layer's weight for all layers (its CPU build does),
a DFlash draft is run twice: by vLLM as released, and with that one function computed layer by layer. Only the second
must agree with ours; both are shown.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from comparison import Comparison, agreement, answers, paired, positions, prompts, show, summary_rows, write
from vllm_server import Server, ServerError

from dflash_bench import methods
from dflash_bench.analysis.conventions import Counts, whole
from dflash_bench.analysis.crosscheck import Answer, Pair
from dflash_bench.engine.local import LocalBackend, open_backend
from dflash_bench.environment import describe, one_line
from dflash_bench.models import loading
from dflash_bench.records import Generation, Message

NUM_PROMPTS, MAX_NEW_TOKENS, MODEL = 64, 128, "nano"
PLUGINS = Path(__file__).parent / "vllm_plugin"
AS_RELEASED, NORM_PER_LAYER = "vLLM", "vLLM, norm per layer"
KERNEL_ERROR = 1e-4
"""A float32 norm is within 1e-6 of the formula; one with another layer's weight is wrong in its first digit."""


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
    if all(any(theirs.rounds for _, theirs in comparison.counted) for comparison in compared):
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


def compare(
    server: Server,
    backend: LocalBackend,
    method: str,
    messages: Sequence[list[Message]],
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
) -> tuple[Pair, ...]:
    num_drafts = backend.drafters[method].num_drafts
    compared = []
    for i, message in enumerate(messages):
        if drafted[i].token_ids != plain[i].token_ids:
            raise SystemExit(f"check_vllm: our own {method} differs from our plain decoding in prompt {i}")
        tokens, num_rounds, accepted_at = server.complete(backend.encode(message), MAX_NEW_TOKENS, num_drafts)
        theirs = Answer(tokens, "", Counts(num_rounds, sum(accepted_at), at=accepted_at))
        compared.append(paired(backend, message, plain[i], drafted[i], whole, num_drafts, theirs))
        show(f"vLLM {method}", i + 1, len(messages))
    return tuple(compared)


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
        lines += positions(comparison, "vLLM", title)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
