"""The recipe of each server that runs here, from its start to the answer, with the screens that one gets.

A small model's weights, plain and with its DFlash draft: the same commands for each server, whose screens are a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import served
from served import Prompts

from dflash_bench.core.environment import describe, one_line
from dflash_bench.servers.launch import program_named
from studies._study import bench

HERE = Path(__file__).parent / "servers"
PROGRAMS = {"vllm": "vllm_server_here", "llama.cpp": "llama_server_here"}
PUBLIC = {"ar": "http://127.0.0.1:8000", "dflash": "http://127.0.0.1:8001"}
"""The addresses in the recipes, which the page shows in place of those measured."""
PROMPTS, MAX_NEW_TOKENS = 20, 128


@dataclass(frozen=True, slots=True)
class Screen:
    command: str
    text: str


@pytest.fixture
def model(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--model"))


@pytest.fixture(
    params=[pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("llama.cpp", marks=pytest.mark.llamacpp)]
)
def served_twice(request: pytest.FixtureRequest, tmp_path: Path, model: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A server's name, and the addresses of two of it: plain, and with DFlash."""
    program, path = program_named(request.param), HERE / PROGRAMS[request.param]
    wanted = served.servings(program, path, Prompts(model, PROMPTS, MAX_NEW_TOKENS, ("gsm8k",)), ["dflash"])
    with served.started(program, path, wanted, tmp_path / "servers") as urls:
        yield program.name, urls


def test_the_recipe_ends_in_an_answer(
    served_twice: tuple[str, dict[str, str]],
    model: str,
    tmp_path: Path,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name, urls = served_twice
    run = tmp_path / "r"
    two = [f"--server=plain={urls['ar']}", f"--server=dflash={urls['dflash']}", "--model", model]
    asked = ["--suite", "gsm8k", "--data", "embedded", "--limit", PROMPTS, "--max-new-tokens", MAX_NEW_TOKENS]
    screens = [
        screen("try", urls["dflash"], urls=urls),
        screen("run", *two, *asked, "--out", run, urls=urls),
        screen("compare", run, urls=urls),
    ]
    mark = name.replace(".", "")
    blocks = [
        f"# The recipe for {name}, with its screens",
        f"```\n{command(mark)}\n```",
        f"{one_line(describe())}. The two servers shared its cores, so that times say little about {name}.",
        *(f"```text\n$ {one.command}\n{one.text}\n```" for one in screens),
    ]
    write_page(f"servers/recipe-{mark}-{model}-cpu.md", blocks)
    lines = list(served.lines_of(run, name, ()))
    assert [line.method for line in lines if line.method != "ar"] == ["dflash"]
    assert list(served.wrong(lines)) == []
    found = json.loads(bench("try", urls["dflash"], "--json"))
    assert found["drafts"] is True


def screen(*words: object, urls: dict[str, str]) -> Screen:
    """What a command shows, with the recipes' addresses and folder."""
    text = bench(*words)
    shown = " ".join(["dflash-bench", *map(str, words)]).replace("--server=", "--server ")
    for label, url in urls.items():
        text, shown = text.replace(url, PUBLIC[label]), shown.replace(url, PUBLIC[label])
    folder = str(next((word for word in words if isinstance(word, Path)), "r"))
    return Screen(shown.replace(folder, "r"), text.replace(folder, "r").rstrip())
