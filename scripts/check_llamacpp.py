"""Our engine against real llama.cpp servers: the same weights and prompts, by the project's own commands.

Servers of plain decoding, DFlash, EAGLE-3 and n-gram lookup are measured by `run --server`, one answer and four at a
time; those with a draft are held against our engine by `crosscheck`, and must draft as ours does. Besides, the GGUF
file's tokenizer and chat template must give our prompts, and its log-probabilities be those of the published model.
With flash attention the server computes in float16, so that its acceptance may differ; this is shown, not judged.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import served
from dflash_bench import methods
from dflash_bench.analysis.crosscheck import Checked
from dflash_bench.engine.local import LocalBackend, open_backend
from dflash_bench.environment import describe, one_line
from dflash_bench.errors import UserError
from dflash_bench.models import loading
from dflash_bench.models.llamacpp.splitting import ODD_TEXTS
from dflash_bench.records import Message
from dflash_bench.report.crosscheck import sentence
from dflash_bench.servers.programs.llamacpp import LLAMACPP
from dflash_bench.servers.programs.program import Serving
from dflash_bench.tasks import suites
from llamacpp_server import Server, ServerError, Settings, version
from served import Measured, Prompts

PER_SUITE, MAX_NEW_TOKENS = {"nano": 8, "smollm2": 4}, {"nano": 128, "smollm2": 64}
SUITES = {"nano": ("paper",), "smollm2": ("gsm8k", "humaneval", "mt_bench")}
METHODS = ("dflash", "eagle3", "ngram")
COMPARABLE = ("dflash", "eagle3")
"""Methods that draft the same there. llama.cpp's n-gram lookup takes other matches than ours."""
NUM_LOOKED_UP = 8
ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "scripts" / "llama_server_here"
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


def main() -> int:
    options = parse_options()
    # So that the servers are stopped, too, when this script is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    limit = options.limit or PER_SUITE[options.model]
    asked = Prompts(options.model, limit, MAX_NEW_TOKENS[options.model], SUITES[options.model])
    python, drafting = options.server_python, [name for name in COMPARABLE if name in options.method]
    try:
        with TemporaryDirectory(prefix="check_llamacpp-") as name:
            folder = Path(name)
            servings = served.servings(LLAMACPP, PROGRAM, asked, drafting)
            with ExitStack() as stack:
                urls = stack.enter_context(served.started(LLAMACPP, PROGRAM, servings, folder / "servers"))
                if "ngram" in options.method:
                    urls["ngram"] = stack.enter_context(looking_up(python, servings[0])).address
                measurement = served.measured(asked, urls, options.method, folder)
                checked = checks(asked, {label: urls[label] for label in drafting})
            for serving in [serving for serving in servings if serving.method.label == "dflash"]:
                more = ("--flash-attn", "on")
                with served.started(LLAMACPP, PROGRAM, [serving], folder / "flash", more) as urls:
                    checked[FLASH] = checks(asked, urls)["dflash"]
            remarks, wrong = looked_into(python, asked, servings[0].target)
    except (ServerError, UserError) as error:
        print(f"check_llamacpp: {error}", file=sys.stderr)
        return 1
    wrong = [*measurement.problems, *problems(checked), *wrong]
    served.write(options.output or ROOT / "results" / f"llamacpp-{options.model}-cpu.md",
                 page(options.model, measurement, checked, remarks, version(python)))  # fmt: skip
    print("\n".join(wrong) or "llama.cpp and this engine agree")
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    """The options. `scripts/check_llamacpp` puts --server-python before those that the user types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-python", type=Path, required=True, help="the Python with xllamacpp installed")
    parser.add_argument("--model", default="nano", choices=PER_SUITE, help="default: nano")
    parser.add_argument("--limit", type=int, help="number of prompts of each suite")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--output", type=Path, help="default: results/llamacpp-MODEL-cpu.md")
    options = parser.parse_args()
    options.method = options.method or list(METHODS)
    if options.limit is not None and options.limit < max(served.CONCURRENCY):
        parser.error(f"--limit must be at least {max(served.CONCURRENCY)}, as so many answers run at a time")
    return options


def looking_up(python: Path, plain: Serving) -> Server:
    return Server(
        python, Settings(plain.target, "ngram", None, NUM_LOOKED_UP, plain.length * plain.slots, slots=plain.slots)
    )


def checks(asked: Prompts, urls: dict[str, str]) -> dict[str, Checked]:
    return {one.method: one for one in served.checked(asked, urls)} if urls else {}


def problems(checked: dict[str, Checked]) -> Iterator[str]:
    for name, one in checked.items():
        is_wrong = one.verdict != "agree" if name != FLASH else bool(one.base.mismatches or one.failed)
        if is_wrong:
            yield f"{name}: {sentence(one)}"


def looked_into(python: Path, asked: Prompts, target: str) -> tuple[list[str], list[str]]:
    """What is to be said of the file's tokenizer, template and numbers; and what of it is wrong."""
    models, preset = loading.load(asked.model, [], "cpu", torch.float32), loading.preset(asked.model)
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
    model: str, measurement: Measured, checked: dict[str, Checked], remarks: Sequence[str], theirs: str
) -> list[str]:
    env = describe()
    blocks = [
        f"# This engine and llama.cpp, {model}, on the CPU",
        f"```\n{shlex.join(['scripts/check_llamacpp', *sys.argv[3:]])}\n```",
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


if __name__ == "__main__":
    sys.exit(main())
