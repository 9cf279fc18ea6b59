"""Our engine against real llama.cpp servers: the same weights and prompts, by the project's own commands.

Servers of plain decoding, DFlash, EAGLE-3 and n-gram lookup are measured by `run --server`, one answer and four at a
time; those with a draft are held against our engine by `crosscheck`, and must draft as ours does. Besides, the GGUF
file's tokenizer and chat template must give our prompts, and its log-probabilities be those of the published model.
With flash attention the server computes in float16, so that its acceptance may differ; this is shown, not judged.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import served
import torch
from served import Measured, Prompts

from dflash_bench.analysis.cells import summarise
from dflash_bench.core import methods
from dflash_bench.core.dialects import LaunchSpec
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Message
from dflash_bench.diagnose.compare_counts import CrosscheckResult
from dflash_bench.diagnose.show import sentence
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.models import loading, presets
from dflash_bench.models.gguf_tokenizer import ODD_TEXTS
from dflash_bench.report.tables import ABSENT, markdown, number
from dflash_bench.results import table
from dflash_bench.servers.launch import program_named
from dflash_bench.tasks import suites
from studies._llamacpp_server import Server, Settings, version
from studies._study import bench

pytestmark = pytest.mark.llamacpp
PER_SUITE, MAX_NEW_TOKENS = {"nano": 8, "smollm2": 4}, {"nano": 128, "smollm2": 64}
SUITES = {"nano": ("paper",), "smollm2": ("gsm8k", "humaneval", "mt_bench")}
METHODS = ("dflash", "eagle3", "ngram")
COMPARABLE = ("dflash", "eagle3")
"""Methods that draft the same there. llama.cpp's n-gram lookup takes other matches than ours."""
NUM_LOOKED_UP = 8
LAUNCHED = 16
"""Prompts for servers that `run` starts itself."""
PROGRAM = Path(__file__).parent / "servers" / "llama_server_here"
FLASH = "dflash, flash attention"
COUNTING = (
    "It differs from ours in the last round of an answer only. It drafts no more than may still be emitted besides",
    "the bonus token, and we draft and count a whole block. A stop token that was drafted ends the round as the bonus",
    "token does, and does not count as accepted, unless it is the last of the draft. `run` shows each its own count;",
    "`crosscheck` puts ours its way, before it compares.",
)
PRECISION_PROMPTS, PRECISION_TOKENS, LIKELY = 12, 64, -10.0
LARGEST_GAP = 1e-3
"""Between log-probabilities in float32: rounding gives 3e-5 here, and attention in float16 8e-3."""


@dataclass(frozen=True, slots=True)
class Found:
    """Answers of real servers; `wrong` lists errors of the file's tokenizer, template and numbers."""

    measurement: Measured
    checked: dict[str, CrosscheckResult]
    wrong: list[str]


@pytest.fixture(scope="module")
def python(server_environment: Callable[[str], Path]) -> Path:
    return server_environment("llamacpp") / "bin" / "python"


@pytest.fixture(scope="module")
def found(
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    limit: Callable[[int, int], int],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    python: Path,
) -> Found:
    torch.set_num_threads(1)
    model, folder = pytestconfig.getoption("--model"), tmp_path_factory.mktemp("llamacpp")
    asked = Prompts(model, limit(PER_SUITE[model], max(served.CONCURRENCY)), MAX_NEW_TOKENS[model], SUITES[model])
    servings = served.servings(program_named("llama.cpp"), PROGRAM, asked, COMPARABLE)
    with ExitStack() as stack:
        urls = stack.enter_context(served.started(program_named("llama.cpp"), PROGRAM, servings, folder / "servers"))
        urls["ngram"] = stack.enter_context(looking_up(python, servings[0])).address
        measurement = served.measured(asked, urls, METHODS, folder)
        checked = checks(asked, {label: urls[label] for label in COMPARABLE})
    (drafting,) = (serving for serving in servings if serving.method.label == "dflash")
    with served.started(
        program_named("llama.cpp"), PROGRAM, [drafting], folder / "flash", ("--flash-attn", "on")
    ) as urls:
        checked[FLASH] = checks(asked, urls)["dflash"]
    remarks, wrong = looked_into(python, asked, servings[0].target)
    blocks = page(command("llamacpp"), model, measurement, checked, remarks, version(python))
    write_page(f"servers/llamacpp-{model}-cpu.md", blocks)
    return Found(measurement, checked, wrong)


def test_every_token_is_the_models_own(found: Found) -> None:
    assert found.measurement.problems == ()


def test_it_drafts_and_accepts_as_our_engine_does(found: Found) -> None:
    assert found.checked.keys() == {*COMPARABLE, FLASH}
    assert list(problems(found.checked)) == []


def test_its_file_has_our_tokenizer_our_template_and_the_models_numbers(found: Found) -> None:
    assert found.wrong == []


def test_launched_by_run_itself_every_answer_is_the_models_own(
    pytestconfig: pytest.Config,
    tmp_path: Path,
    limit: Callable[[int, int], int],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    python: Path,
) -> None:
    """`--launch llama.cpp` starts a server for each method, and stops all of them."""
    if pytestconfig.getoption("--model") != "nano":
        pytest.skip("of nano only")
    levels = ",".join(map(str, served.CONCURRENCY))
    words = [
        "run",
        "--launch",
        "llama.cpp",
        "--launch-with",
        PROGRAM,
        *"""
            --model nano --method dflash --method eagle3 --suite gsm8k --limit
            """.split(),
        limit(LAUNCHED, max(served.CONCURRENCY)),
        "--concurrency",
        levels,
    ]
    # 1: an answer is wrong, which the table then shows.
    bench(*words, "--out", tmp_path / "run", allowed=(0, 1), shown=True)
    lines = tuple(served.lines_of(tmp_path / "run", "server", ()))
    here = f"tests/external/servers/{PROGRAM.name}"
    shown = shlex.join(["dflash-bench", *map(str, words)]).replace(str(PROGRAM), here)
    write_page(
        "servers/llamacpp-launch-nano-cpu.md",
        launched_page(command("llamacpp"), shown, version(python), tmp_path / "run"),
    )
    assert {line.method for line in lines} == {"ar", "dflash", "eagle3"}
    assert list(served.wrong(lines)) == []


def looking_up(python: Path, plain: LaunchSpec) -> Server:
    return Server(
        python, Settings(plain.target, "ngram", None, NUM_LOOKED_UP, plain.length * plain.slots, slots=plain.slots)
    )


def checks(asked: Prompts, urls: dict[str, str]) -> dict[str, CrosscheckResult]:
    return {one.method: one for one in served.checked(asked, urls)} if urls else {}


def problems(checked: dict[str, CrosscheckResult]) -> Iterator[str]:
    for name, one in checked.items():
        is_wrong = one.verdict != "agree" if name != FLASH else bool(one.base.mismatches or one.failed)
        if is_wrong:
            yield f"{name}: {sentence(one)}"


def looked_into(python: Path, asked: Prompts, target: str) -> tuple[list[str], list[str]]:
    """Remarks on the file's tokenizer, template and numbers, and errors in them."""
    models, preset = loading.load(asked.model, [], "cpu", torch.float32), presets.preset(asked.model)
    backend = open_backend(models, preset, methods.chosen(["ar"]), asked.max_new_tokens)
    loaded = [suites.load_prompts(suite, "embedded", asked.limit) for suite in suites.expand(list(asked.suites))]
    messages = [[*one.opening, Message("user", one.turns[0])] for of_suite in loaded for one in of_suite.prompts]
    exact = Settings(target)
    remarks, wrong = [texts(python, exact, backend, messages)], []
    if "different" in remarks[0]:
        wrong.append(remarks[0])
    for settings, how in ((exact, "no flash attention"), (replace(exact, flash_attention=True), "flash attention")):
        gap = precision(python, settings, backend, messages)
        said = f"{how}: its log-probabilities are within {gap:.2g} of those of the published model in float32."
        remarks.append(said)
        if gap > LARGEST_GAP and not settings.flash_attention:
            wrong.append(said)
    return remarks, wrong


def texts(python: Path, settings: Settings, backend: LocalBackend, messages: Sequence[list[Message]]) -> str:
    """Do its tokenizer and chat template give our tokens?"""
    with Server(python, settings) as server:
        chats = [[{"role": m.role, "content": m.content} for m in message] for message in messages]
        rendered = [server.tokenize(server.render(chat), special=True) for chat in chats]
        bare = [server.tokenize(text) for text in ODD_TEXTS]
    same_chats = sum(ids == backend.encode(message) for ids, message in zip(rendered, messages, strict=True))
    expected = [list(backend.tokenizer.encode(text, add_special_tokens=False)) for text in ODD_TEXTS]
    same_texts = sum(ids == other for ids, other in zip(bare, expected, strict=True))
    agree = same_chats == len(messages) and same_texts == len(ODD_TEXTS)
    return (
        f"Its own chat template and tokenizer give {'the same' if agree else 'different'} tokens: equal in "
        f"{same_chats} of {len(messages)} prompts and {same_texts} of {len(ODD_TEXTS)} odd texts."
    )


def precision(python: Path, settings: Settings, backend: LocalBackend, messages: Sequence[list[Message]]) -> float:
    """How far are its log-probabilities from the published model's, in float32, of its likeliest tokens?"""
    worst, model = 0.0, backend.target.model
    with Server(python, settings) as server:
        for message in messages[:PRECISION_PROMPTS]:
            prompt = backend.encode(message)
            body = {
                "prompt": prompt,
                "n_predict": PRECISION_TOKENS,
                "temperature": 0,
                "n_probs": 5,
                "return_tokens": True,
            }
            answer = server.ask("/completion", body)
            places = answer["completion_probabilities"]
            if [place["id"] for place in places] != answer["tokens"]:
                continue  # it leaves out tokens that are no whole characters
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer["tokens"]])).logits[0, len(prompt) - 1 : -1]
            for expected, place in zip(logits.log_softmax(-1), places, strict=True):
                gaps = [
                    abs(t["logprob"] - expected[t["id"]].item()) for t in place["top_logprobs"] if t["logprob"] > LIKELY
                ]
                worst = max(worst, *gaps)
    return worst


def page(
    command: str,
    model: str,
    measurement: Measured,
    checked: dict[str, CrosscheckResult],
    remarks: Sequence[str],
    theirs: str,
) -> list[str]:
    env = describe()
    blocks = [
        f"# This engine and llama.cpp, {model}, on the CPU",
        f"```\n{command}\n```",
        f"{one_line(env)}, transformers {env['packages']['transformers']}. The server: xllamacpp {theirs}.\n"
        f"float32, temperature 0, {MAX_NEW_TOKENS[model]} new tokens at most. Files by `convert --to gguf`.\n"
        "Times are not told: the servers share two cores.",
        *served.section(measurement),
        "\n".join(f"- {remark}" for remark in remarks),
        "\n".join(["## How llama.cpp counts\n", *COUNTING]),
    ]
    for name, one in checked.items():
        blocks += served.crosscheck_section(f"`crosscheck`: {name}", one)
    return blocks


def launched_page(command: str, shown: str, theirs: str, run: Path) -> list[str]:
    results = table.read_run(run)
    counted = {(line.method, line.concurrency): line.counted_by for line in served.lines_of(run, "server", ())}
    rows = [
        [
            str(cell.settings.concurrency),
            cell.method,
            "/".join(map(str, cell.audit or ())),
            *(ABSENT if cell.method == "ar" else number(cell.value(name)) for name in ("al.pooled", "al.request_mean")),
            ", ".join(counted[cell.method, cell.settings.concurrency]),
        ]
        for cell in summarise(results.rows, results.info.identity)
    ]
    heads = [
        "concurrency",
        "method",
        "answers that are the model's own",
        "al.pooled",
        "al.request_mean",
        "rounds counted by",
    ]
    return [
        "# llama.cpp, launched and measured at concurrency 1 and 4: nano, on the CPU",
        f"`{command}` makes this page, by",
        f"```\n{shown}\n```",
        f"{one_line(describe())}. The server: xllamacpp {theirs}; one for each method, all stopped at the end.\n"
        "float32, temperature 0. Times are not told: the servers share two cores.",
        markdown(heads, rows),
    ]
