"""`soak` on a real server that drafts with DFlash, and its page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import served
from served import Prompts

from dflash_bench.diagnose.soak import RECORD
from dflash_bench.servers.launch import program_named
from studies._study import bench

HERE = Path(__file__).parent / "servers"
PROGRAMS = {"vllm": "vllm_server_here", "llama.cpp": "llama_server_here"}
EXPECTED = {"vllm": {"speed", "errors"}, "llama.cpp": {"speed"}}
"""Findings caused by other programs on the machine, or by the server: vLLM 0.32 aborts some constrained answers because
its grammar rejects one of its own tokens."""


@pytest.mark.parametrize(
    "name", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("llama.cpp", marks=pytest.mark.llamacpp)]
)
def test_a_real_server_is_soaked(
    name: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
) -> None:
    lasts, model = str(pytestconfig.getoption("--soak")), str(pytestconfig.getoption("--model"))
    program, path = program_named(name), HERE / PROGRAMS[name]
    specs = served.servings(program, path, Prompts(model, 20, 128, ("gsm8k",)), ["dflash"])
    wanted = [spec for spec in specs if spec.method.label == "dflash"]
    with served.started(program, path, wanted, tmp_path / "servers") as urls:
        out = bench("soak", urls["dflash"], "--for", lasts, "-o", tmp_path / "soak", "--json", allowed=(0, 1))
    found = json.loads(out)
    assert found["answers"] == len((tmp_path / "soak" / RECORD).read_text().splitlines()) > 20
    page = (tmp_path / "soak" / "soak.md").read_text().rstrip("\n")
    title, *rest = page.split("\n\n")
    made = f"`{command(name.replace('.', ''))} --soak {lasts}` makes this page, by"
    write_page(f"servers/soak-{name.replace('.', '')}-{model}-cpu.md", [title, made, *rest])
    assert {one["code"] for one in found["findings"]} <= EXPECTED[name], found["findings"]
