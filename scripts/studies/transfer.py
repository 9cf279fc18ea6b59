"""What does a draft accept on other targets than its own: in int8, trained further, and of the next size?

The others are made here from nano: by further training on its own language, by training on answers without their
steps, and by doubling four of its layers and training the whole again.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dflash_bench.models import presets, targets
from dflash_bench.report import document
from dflash_bench.report.document import Document
from dflash_bench.report.tables import ABSENT, markdown, with_interval
from dflash_bench.results import store
from dflash_bench.results.plan import BASELINE
from dflash_bench.training.trainer import apply_gradients, optimisers, set_rate
from nano.corpus.task import Task
from nano.data import pack, sample_stream, training_tasks
from nano.target import loss_of
from studies._study import Made, Work, tell

TAKES = "half an hour of one core"
PAGES = ("drafts/transfer-nano-cpu.md",)
SUITES = ("gsm8k", "math500", "humaneval", "mt_bench")
DRAFTS = ("dflash", "eagle3")
DOUBLED = range(8, 12)
"""Layers that stand twice in the next size."""
ROWS, LENGTH = 8, 256
MATRIX_RATE, OTHER_RATE, WARMUP = 0.005, 5e-4, 10
SEED = 11
NUM_TOKENS = 192
METRIC = "al.pooled"
HEAD = """# One draft on several targets

```
{command}
```

{machine}.

nano's DFlash and EAGLE-3 drafts, {limit} embedded prompts of each suite, greedy. `same`: the share of plain answers
that are nano's own, token for token. Every answer was exact for its own target.

{made}

{table}

Tokens per round (`{metric}`) with 95 % intervals over prompts.

{refused}
"""


@dataclass(frozen=True, slots=True)
class Other:
    """A target that is made from nano, and the options that measure it."""

    name: str
    about: str
    make: Callable[[Path, Namespace], list[str]]
    """Makes it in a folder; returns the words of `run` for it."""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=24, help="prompts of each suite")
    parser.add_argument("--steps", type=int, default=150, help="of further training; twice as many for the next size")


def make(work: Work, options: Namespace) -> Made:
    runs: dict[str, Document] = {}
    for other in others():
        words = other.make(work.folder / "targets" / other.name.replace(" ", "-"), options)
        usual = ["--data", "embedded", "--limit", options.limit, "--max-new-tokens", NUM_TOKENS, "--threads", 1]
        asked = [*usual, *(word for suite in SUITES for word in ("--suite", suite))]
        asked += [word for method in DRAFTS for word in ("--method", method)]
        runs[other.name] = document.read_document(work.run(other.name.replace(" ", "-"), *words, *asked))
    own = plain_answers(runs["itself"])
    rows = [[name, same(own, plain_answers(run)), *lengths(run)] for name, run in runs.items()]
    page = HEAD.format(
        command=work.command,
        machine=runs["itself"].results.info.environment.one_line(),
        limit=options.limit,
        made="\n".join(f"- **{other.name}**: {other.about.format(steps=options.steps)}." for other in others()),
        table=markdown(["target", "same", *(f"{draft} {suite}" for draft in DRAFTS for suite in SUITES)], rows, left=1),
        metric=METRIC,
        refused=refused(work.folder / "targets" / "next-size"),
    )
    wrong = [
        f"{name} {cell.label} {cell.method}: {cell.exact}"
        for name, run in runs.items()
        for cell in run.cells
        if cell.method != BASELINE and cell.exact is not None and cell.exact[0] < cell.exact[1]
    ]
    return Made({PAGES[0]: page}, wrong)


def others() -> list[Other]:
    nano = ["--model", "nano"]
    return [
        Other("itself", "nano, for which both drafts were trained", lambda *_: nano),
        Other("in int8", "its weights in int8", lambda *_: [*nano, "--quantize", "int8"]),
        Other(
            "trained further",
            "{steps} more steps on other tasks of the generator of its training text",
            lambda folder, options: _tuned(folder, options.steps, training_tasks),
        ),
        Other(
            "without steps",
            "{steps} steps on the same tasks, but with only the last line of each answer",
            lambda folder, options: _tuned(folder, options.steps, terse_tasks),
        ),
        Other(
            "next size",
            "20 layers instead of 16: four stand twice, then trained for twice {steps} steps on its own language. The "
            "drafts read the same layers as before, by their new numbers",
            lambda folder, options: _larger(folder, 2 * options.steps),
        ),
    ]


def terse_tasks(seed: int) -> Iterator[Task]:
    for task in training_tasks(seed):
        yield replace(task, answers=tuple(answer.strip().rpartition("\n")[2] for answer in task.answers))


@cache
def _preset() -> Any:
    return presets.preset("nano")


def _tuned(folder: Path, steps: int, tasks: Callable[[int], Iterator[Task]]) -> list[str]:
    if not (folder / "config.json").exists():
        _save(_trained(_nano(), steps, tasks), folder)
    return ["--target", str(folder), *_draft_words({name: Path(_preset().drafts[name]) for name in DRAFTS})]


def _larger(folder: Path, steps: int) -> list[str]:
    order = [number for number in range(16) for _ in range(1 + (number in DOUBLED))]
    if not (folder / "config.json").exists():
        model = _nano()
        config = type(model.config)(**model.config.to_dict() | {"num_hidden_layers": len(order), "layer_types": None})
        larger = type(model)(config)
        kept = model.state_dict()
        for name in larger.state_dict():
            head, number, rest = _parts(name)
            source = name if number is None else f"{head}{order[number]}{rest}"
            larger.state_dict()[name].copy_(kept[source])
        larger.set_attn_implementation("eager")
        _save(_trained(larger, steps, training_tasks), folder)
    return ["--target", str(folder), *_draft_words({name: _moved(name, folder, order) for name in DRAFTS})]


def _parts(name: str) -> tuple[str, int | None, str]:
    """Return the name of a weight before and after its layer's number; None if it is of no layer."""
    head, layers, rest = name.partition("layers.")
    if not layers:
        return name, None, ""
    number, _, rest = rest.partition(".")
    return head + layers, int(number), f".{rest}"


def _moved(name: str, target: Path, order: Sequence[int]) -> Path:
    """Return a copy of a draft that reads the same layers of the larger target, by their last copies."""
    folder = target.with_name(f"{target.name}-{name}")
    if not folder.exists():
        shutil.copytree(_preset().drafts[name], folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        last = {number: at for at, number in enumerate(order)}
        if "dflash_config" in config:
            config["num_target_layers"] = len(order)
            own = config["dflash_config"]
            own["target_layer_ids"] = [last[number] for number in own["target_layer_ids"]]
        else:  # EAGLE-3 names a layer's input by the layer's number
            own = config["eagle_config"]
            taps = own["eagle_aux_hidden_state_layer_ids"]
            own["eagle_aux_hidden_state_layer_ids"] = [last[number - 1] + 1 for number in taps]
        path.write_text(json.dumps(config))
    return folder


def _draft_words(drafts: dict[str, Path]) -> list[str]:
    return [word for name, path in drafts.items() for word in ("--draft", f"{name}={path}")]


def _nano() -> Any:
    model = targets.load(targets.find_target(_preset().target), "cpu", torch.float32)
    model.set_attn_implementation("eager")
    return model.train().requires_grad_(True)


def _trained(model: Any, steps: int, tasks: Callable[[int], Iterator[Task]]) -> Any:
    torch.set_num_threads(1)
    tokenizer = targets.tokenizer_of(Path(_preset().target), False)
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    made = optimisers(matrices, rest, MATRIX_RATE, OTHER_RATE)
    for step in range(steps):
        set_rate(made, step, (steps,), min(WARMUP, steps // 2))
        samples = sample_stream(SEED * 1_000_003 + step, tokenizer, tasks)
        loss = loss_of(model, pack(samples, ROWS, LENGTH, tokenizer.pad_token_id))
        loss.backward()
        apply_gradients(made, model.parameters())
        if step % 10 == 9:
            tell(f"step {step + 1} of {steps}, loss {loss.item():.4f}")
    return model.eval()


def _save(model: Any, folder: Path) -> None:
    """Save a target with nano's tokenizer; its config comes last, and tells that it is whole."""
    whole = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(whole, ignore_errors=True)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(whole)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(Path(_preset().target) / name, whole)
    whole.rename(folder)


def plain_answers(run: Document) -> dict[tuple[str, str, int], tuple[int, ...]]:
    answers = store.load(run.folder)[1]
    return {(one.suite, one.prompt_id, one.turn): one.generation.token_ids for one in answers if one.method == BASELINE}


def same(own: dict[Any, Any], others: dict[Any, Any]) -> str:
    return f"{100 * sum(own[place] == tokens for place, tokens in others.items()) / len(others):.0f} %"


def lengths(run: Document) -> list[str]:
    figures = {(cell.method, cell.suite): cell.figures.get(METRIC) for cell in run.cells if not cell.slice}
    return [
        ABSENT if (figure := figures.get((draft, suite))) is None else with_interval(figure)
        for draft in DRAFTS
        for suite in SUITES
    ]


def refused(target: Path) -> str:
    """Return what a run says of the next size with nano's DFlash draft as it is."""
    from dflash_bench.core.errors import UserError
    from dflash_bench.models import loading

    preset = replace(_preset(), target=str(target))
    try:
        loading.load(preset, ["dflash"], "cpu", torch.float32)
    except UserError as error:
        return f"As it is, nano's DFlash draft is refused there: {error.what.partition(': ')[2]}."
    return "As it is, nano's DFlash draft loads there, too."
