"""Does a real llama.cpp server accept drafts at the rates of a profile that our own engine measured?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import dflash_bench as db
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.environment import describe, one_line
from dflash_bench.report.tables import markdown, with_interval
from dflash_bench.results import table
from studies._llamacpp_server import version
from studies._study import bench

pytestmark = pytest.mark.llamacpp
PROGRAM = Path(__file__).parent / "servers" / "llama_server_here"
PROMPTS, MAX_NEW_TOKENS = 16, 256
BASES = ("dflash", "eagle3")


@dataclass(frozen=True, slots=True)
class Imposed:
    """Tokens per round of a base's profile, with its interval over prompts, and as the server counted them."""

    base: str
    measured: Interval
    counted: Interval
    num_rounds: int


@pytest.mark.parametrize("base", BASES)
def test_a_real_server_accepts_at_the_rates_of_a_profile(base: str, found: dict[str, Imposed]) -> None:
    imposed = found[base]
    assert imposed.num_rounds > 100
    assert imposed.measured.low <= imposed.counted.value <= imposed.measured.high, imposed


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    limit: Callable[[int, int], int],
    server_environment: Callable[[str], Path],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
) -> dict[str, Imposed]:
    folder = tmp_path_factory.mktemp("imposed")
    asked = ["--model", "nano", "--suite", "gsm8k", "--limit", limit(PROMPTS, 8), "--max-new-tokens", MAX_NEW_TOKENS]
    bench("run", *asked, "--method", ",".join(BASES), "--threads", 1, "--out", folder / "own")
    made = {base: imposed(base, folder, asked) for base in BASES}
    python = server_environment("llamacpp") / "bin" / "python"
    write_page(
        "servers/imposed-llamacpp-nano-cpu.md", page(command("llamacpp"), asked, version(python), [*made.values()])
    )
    return made


def imposed(base: str, folder: Path, asked: Sequence[object]) -> Imposed:
    path = folder / f"{base}.json"
    bench("card", folder / "own", "--method", base, "--profile", path)
    label = f"synthetic:profile={path},base={base}"
    words = ["--launch", "llama.cpp", "--launch-with", PROGRAM, "--method", label]
    bench("run", *asked, *words, "--out", folder / base)
    rows = table.read_run(folder / base).rows
    rows = rows[rows["method"] == label]
    assert rows["error"].isna().all() and not rows[["exactness", "passed"]].notna().any(axis=None)
    profile = json.loads(path.read_text(encoding="utf-8"))
    metrics = db.load(folder / base).metrics()
    one = metrics[(metrics["method"] == label) & (metrics["metric"] == "al.pooled")].iloc[0]
    return Imposed(
        base,
        Interval(profile["mean_accept_length"], *profile["intervals"]["mean_accept_length"]),
        Interval(one["value"], one["low"], one["high"]),
        int(rows["num_rounds"].sum()),
    )


def page(command: str, asked: Sequence[object], theirs: str, lines: Sequence[Imposed]) -> list[str]:
    heads = ["base", "measured by our engine, tokens per round [95 %]", "counted by the server [95 %]", "rounds"]
    cells = [[one.base, with_interval(one.measured), with_interval(one.counted), str(one.num_rounds)] for one in lines]
    shown = shlex.join(["dflash-bench", "run", *map(str, asked), "--launch", "llama.cpp", "--method"])
    return [
        "# Imposed acceptance on llama.cpp",
        f"```\n{command}\n```",
        f"{one_line(describe())}. The server: xllamacpp {theirs}.",
        "Our engine measures a draft; `card --profile` writes its profile; the server, told the profile's rates, "
        f"accepts its own drafts so, right or wrong:\n\n```\n{shown} synthetic:profile=FILE,base=BASE\n```",
        markdown(heads, cells),
        "The answers are nobody's, and neither judged nor scored. Counted is less than measured by what the ends of "
        "answers cut from their last rounds.",
    ]
