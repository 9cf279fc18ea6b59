"""SGLang's own command line: does it know the options that `--launch` gives, and those of the recipe?

Its server needs CUDA; its parser runs here.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflash_bench.core import methods
from dflash_bench.core.dialects import LaunchSpec
from dflash_bench.servers.launch import program_named

pytestmark = pytest.mark.sglang
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.loads(sys.argv[1]):
    parser.parse_args(words)
print(json.dumps([option for action in parser._actions for option in action.option_strings]))
"""


def spec(text: str, num_drafts: int | None, **changes: object) -> LaunchSpec:
    draft = None if num_drafts is None or text in ("mtp:3", "ngram:4") else "D"
    given = {"dtype": "bfloat16", "memory_share": 0.4, "trust_remote_code": True, **changes}
    return LaunchSpec(methods.parse(text), "m", "T", draft, num_drafts, 4096, 8, **given)  # type: ignore[arg-type]


SPECS = (
    spec("ar", None),
    spec("dflash", 15, kind="DFlash"),
    spec("dflash", 15, kind="DFlash 2"),
    spec("dflash", 7, kind="DSpark", shifted=True),
    spec("dflash", 15, kind="Domino", shifted=True),
    spec("dflash", 6, kind="LiLiCorr"),
    spec("eagle3", 3),
    spec("eagle3-tree:nodes=59,depth=7,top_k=10", 59),
    spec("mtp:3", 3, kind="MTP"),
    spec("ngram:4", 4, dtype="float32"),
)


@pytest.fixture(scope="module")
def parsed(server_environment: Callable[[str], Path]) -> Callable[[Sequence[Sequence[str]]], list[str]]:
    """Parses command lines without `serve`, and returns all options that the parser knows."""
    python = server_environment("sglang") / "bin" / "python"

    def parse(lines: Sequence[Sequence[str]]) -> list[str]:
        done = subprocess.run([python, "-c", PARSE, json.dumps(lines)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        known: list[str] = json.loads(done.stdout.splitlines()[-1])
        return known

    return parse


def test_its_parser_takes_what_launch_gives(parsed: Callable[..., list[str]]) -> None:
    program = program_named("sglang")
    lines = [program.argv(one, 30000) for one in SPECS]
    assert {line[0] for line in lines} == {"serve"}
    assert {one.method.name for one in SPECS[1:]} == {*program.methods}
    parsed([line[1:] for line in lines])


def test_its_parser_knows_the_options_of_the_recipe(parsed: Callable[..., list[str]]) -> None:
    section = RECIPES.read_text().partition("## SGLang")[2].partition("\n## ")[0]
    named = {*re.findall(r"--[a-z][a-z0-9-]+", section)} - {"--launch", "--method"}
    assert len(named) > 8
    assert named <= {*parsed([["--model-path", "T"]])}
