"""Our engine against a real llama.cpp server: the same nano weights, prompts and settings, one request at a time.

`comparison.py` says what must agree. Besides, the GGUF file's tokenizer and chat template must give our prompts. Before
counts are compared, ours are put as llama.cpp counts, which differs in the last round of an answer. At the end
`dflash-bench crosscheck` asks the same servers, and must come to the same.
With flash attention the server computes in float16, so that its acceptance may differ; this is shown, not judged.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from comparison import (
    Comparison,
    agreement,
    answers,
    crosschecked,
    paired,
    positions,
    prompts,
    show,
    summary_rows,
    write,
)
from llamacpp_server import Server, ServerError, Settings, version

from dflash_bench import methods
from dflash_bench.analysis.conventions import Counts, llamacpp
from dflash_bench.analysis.crosscheck import Answer
from dflash_bench.engine.local import LocalBackend, open_backend
from dflash_bench.environment import describe, one_line
from dflash_bench.models import loading
from dflash_bench.models.conversion import convert
from dflash_bench.models.llamacpp.splitting import ODD_TEXTS
from dflash_bench.records import Generation, Message
from dflash_bench.report.crosscheck import sentence

NUM_PROMPTS, MAX_NEW_TOKENS, MODEL = 64, 128, "nano"
EXACT, FLASH = "llama.cpp", "llama.cpp, flash attention"
METHODS = ("dflash", "eagle3", "ngram")
COMPARABLE = ("dflash", "eagle3")
"""Methods that draft the same there. llama.cpp's n-gram lookup takes other matches than ours."""
COUNTING = (
    "It differs from ours in the last round of an answer only; all of our counts on this page but those in the first",
    "column of this table are put its way. It drafts no more than may still be emitted besides the bonus token, and we",
    "draft and count a whole block. A stop token that was drafted ends the round as the bonus token does, and does not",
    "count as accepted, unless it is the last of the draft.",
)
LEAST_IDENTICAL = 0.95
"""Of the answers must have the very same counts. Rounding may decide a draft where two tokens are as good; few do."""
PRECISION_PROMPTS, PRECISION_TOKENS, LIKELY = 12, 64, -10.0
LARGEST_GAP = 1e-3
"""Between log-probabilities in float32: rounding gives 3e-5 here, and attention in float16 8e-3."""


def main() -> int:
    options = parse_options()
    # So that the server is stopped, too, when this script is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    chosen = methods.chosen(options.method)
    names = [method.name for method in chosen if method.name != "ar"]
    preset = loading.preset(MODEL)
    models = loading.load(MODEL, [name for name in names if name in preset.drafts], "cpu", torch.float32)
    backend = open_backend(models, preset, chosen, MAX_NEW_TOKENS)
    messages = prompts(options.limit)
    plain = answers(backend, "ar", messages)
    drafted = {name: answers(backend, name, messages) for name in names}
    try:
        with TemporaryDirectory(prefix="check_llamacpp-") as folder:
            served = written(Path(folder), backend, names)
            compared = [
                compare(options.server_python, settings, backend, messages, plain, drafted.get(settings.method, plain))
                for settings in served
            ]
            flash = [with_flash(settings) for settings in served if settings.method == "dflash"]
            compared += [
                compare(options.server_python, settings, backend, messages, plain, drafted["dflash"])
                for settings in flash
            ]
            remarks = [texts(options.server_python, served[0], backend, messages)]
            said = [check_with_command(options.server_python, one) for one in served if one.method in COMPARABLE]
            gaps = [precision(options.server_python, s, backend, messages) for s in (served[0], with_flash(served[0]))]
    except ServerError as error:
        print(f"check_llamacpp: {error}", file=sys.stderr)
        return 1
    wrong = [problem for comparison in compared for problem in problems(comparison)]
    if "different" in remarks[0]:
        wrong.append(remarks[0])
    names_of_both = (f"{EXACT}, no flash attention", FLASH)
    remarks += [
        f"{name}: its log-probabilities are within {gap:.2g} of those of the published model in float32."
        for name, gap in zip(names_of_both, gaps, strict=True)
    ]
    if gaps[0] > LARGEST_GAP:
        wrong.append(remarks[1])
    remarks += [says for says, _ in said]
    wrong += [problem for _, problem in said if problem]
    write(options.output, markdown(compared, drafted, remarks, version(options.server_python)))
    print("\n".join(wrong) or "llama.cpp and this engine agree")
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    """The options. `scripts/check_llamacpp` puts --server-python before those that the user types."""
    root = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-python", type=Path, required=True, help="the Python with xllamacpp installed")
    parser.add_argument("--limit", type=int, default=NUM_PROMPTS, help="number of prompts")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--output", type=Path, default=root / "results" / "llamacpp-nano-cpu.md")
    options = parser.parse_args()
    options.method = options.method or list(METHODS)
    if options.limit < 2:
        parser.error("--limit must be at least 2, for an interval over prompts")
    return options


def written(folder: Path, backend: LocalBackend, names: Sequence[str]) -> list[Settings]:
    """The weights as GGUF files, and the servers to start: plain decoding, then each method."""
    preset = loading.preset(MODEL)
    target = folder / "target.gguf"
    convert(MODEL, target, "gguf", None)
    served = [Settings(str(target))]
    for name in names:
        draft = None
        if name in preset.drafts:
            draft = str(folder / f"{name}.gguf")
            convert(preset.drafts[name], Path(draft), "gguf", MODEL)
        served.append(Settings(str(target), name, draft, backend.drafters[name].num_drafts))
    return served


def with_flash(settings: Settings) -> Settings:
    return replace(settings, flash_attention=True)


def compare(
    python: Path,
    settings: Settings,
    backend: LocalBackend,
    messages: Sequence[list[Message]],
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
) -> Comparison:
    engine, compared = FLASH if settings.flash_attention else EXACT, []
    with Server(python, settings) as server:
        for i, message in enumerate(messages):
            if drafted[i].token_ids != plain[i].token_ids:
                raise SystemExit(f"our own {settings.method} differs from our plain decoding in prompt {i}")
            done = server.complete(backend.encode(message), MAX_NEW_TOKENS)
            counts = Counts(done.num_rounds, done.num_accepted, done.num_drafted, done.accepted_at)
            theirs = Answer(done.tokens, "", counts)
            compared.append(paired(backend, message, plain[i], drafted[i], llamacpp, settings.num_drafts, theirs))
            show(f"{engine} {settings.method}", i + 1, len(messages))
    return Comparison(settings.method, engine, settings.num_drafts, tuple(compared))


def check_with_command(python: Path, settings: Settings) -> tuple[str, str]:
    """What `dflash-bench crosscheck` says of this server, and what is wrong with that, if anything is."""
    with Server(python, settings) as server:
        checked = crosschecked(server.address, settings.method, settings.num_drafts, MAX_NEW_TOKENS)
    says = f"`dflash-bench crosscheck`, {settings.method}: {sentence(checked)}"
    return says, "" if checked.verdict == "agree" else says


def problems(comparison: Comparison) -> list[str]:
    judged = comparison.engine == EXACT and comparison.method in COMPARABLE
    wrong = comparison.problems() if judged else comparison.mismatches()
    identical, counted = comparison.compared.num_identical, len(comparison.counted)
    if judged and identical < LEAST_IDENTICAL * counted:
        wrong.append(f"only {identical} of {counted} answers have the same counts")
    return [f"{comparison.method}, {comparison.engine}: {problem}" for problem in wrong]


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


def markdown(
    compared: Sequence[Comparison],
    drafted: dict[str, list[Generation]],
    remarks: Sequence[str],
    theirs: str,
) -> str:
    env = describe()
    judged = [comparison for comparison in compared if comparison.method in COMPARABLE]
    others = [comparison for comparison in compared if comparison.method not in COMPARABLE]
    lines = [
        "# This engine and llama.cpp, nano, on the CPU",
        "",
        "```",
        shlex.join(["scripts/check_llamacpp", *sys.argv[3:]]),
        "```",
        "",
        f"{one_line(env)}, transformers {env['packages']['transformers']}. The server: xllamacpp {theirs}.",
        f"float32, temperature 0, {MAX_NEW_TOKENS} new tokens at most, one request at a time. Files by "
        "`dflash-bench convert --to gguf`.",
        "",
        "| method | drafts | engine | prompts | tokens equal to ar | rounds | al.pooled | al.emitted |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *dict.fromkeys(row for comparison in judged for row in summary_rows(comparison)),
        "",
        *agreement(judged),
        *(f"- {c.method}, {c.engine}: {equal(c)}; {accepted(c)}" for c in others),
        *(f"- {remark}" for remark in remarks),
        "",
        "## How llama.cpp counts",
        "",
        *counting(judged, drafted),
    ]
    for comparison in [comparison for comparison in judged if comparison.engine == EXACT]:
        lines += positions(comparison, comparison.engine, f"{comparison.method}, {comparison.engine}")
    return "\n".join(lines) + "\n"


def equal(comparison: Comparison) -> str:
    return f"{comparison.compared.num_equal} of {len(comparison.pairs)} answers equal ours token for token"


def accepted(comparison: Comparison) -> str:
    theirs = [pair.theirs.counts for pair in comparison.pairs if pair.theirs.counts is not None]
    return f"{sum(one.accepted for one in theirs)} drafts accepted in {sum(one.rounds for one in theirs)} rounds"


def counting(judged: Sequence[Comparison], drafted: dict[str, list[Generation]]) -> list[str]:
    lines = [
        *COUNTING,
        "",
        "| method | engine | accepted, as we count | accepted, put its way | its own count |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for c in judged:
        ours = sum(sum(generation.accepted or ()) for generation in drafted[c.method])
        rounds = sum(len(generation.accepted or ()) for generation in drafted[c.method])
        put, own = (sum(counts[side].accepted for counts in c.counted) for side in (0, 1))
        put_rounds, own_rounds = (sum(counts[side].rounds for counts in c.counted) for side in (0, 1))
        lines.append(
            f"| {c.method} | {c.engine} | {ours} in {rounds} rounds | {put} in {put_rounds} | {own} in {own_rounds} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
