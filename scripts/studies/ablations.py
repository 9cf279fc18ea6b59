"""The paper's ablations on nano: trains 42 small drafts that differ in one thing each, and decodes with them.

Every draft is trained on the same answers with the same steps, and is measured by decoding the same held-out prompts
with it.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_bench.analysis import stats
from dflash_bench.core import environment, files
from dflash_bench.core.types import Message
from dflash_bench.engine.backend import stop_ids
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.loop import measure_acceptance
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Target
from dflash_bench.models import chat, loading
from dflash_bench.models.architecture import final_norm
from dflash_bench.models.loading import Models
from dflash_bench.training import answers, prepare, session, trainer
from dflash_bench.training.answers import AnswerPlan, AnswerRequest, ComputedStates
from dflash_bench.training.data import Batch, PackedRows, TrainingChat, stored
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.trainer import DraftRecipe
from nano.corpus import question, tasks
from nano.corpus.task import Task
from nano.data import turns_of
from studies._ablation_variants import BASE, TABLES, Table, Variant, VariantObjective, new_draft, taps, variants
from studies._study import Made, Work, tell

TAKES = "three hours of one core"
PAGES = ("drafts/ablations-nano-cpu.md",)
NUM_TASKS, TASK_SEED = 2000, 4242
ROW_LENGTH, ROWS, RATE = 256, 8, 0.04
STEPS, SEEDS = 400, 3
MAX_NEW_TOKENS, BATCH = 96, 64
NUM_MEASURED = 32
USED = {"base": (16, 8), "trained 8": (8, 16)}
"""Block sizes to decode with, where they differ from the trained size alone."""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")


def make(work: Work, options: Namespace) -> Made:
    torch.set_num_threads(1)
    ablations = Ablations(work.folder, options.steps)
    for seed in range(options.seeds):
        for variant in variants():
            ablations.measured(variant, seed)
    return Made({PAGES[0]: "\n".join(page(work, options.seeds, options.steps)) + "\n"})


class Ablations:
    """A folder of answers, trainings and measurements."""

    def __init__(self, work: Path, steps: int) -> None:
        self.work, self.steps = work, steps
        self.models: Models = loading.load("nano", [], "cpu", torch.float32)
        self.target = Target(self.models.target)
        depth = self.target.config.num_hidden_layers
        self.layers = (*sorted({layer for variant in variants() for layer in taps(variant, depth)}), depth - 1)
        self.stops = stop_ids(self.models.target, self.models.tokenizer)
        self.tasks = list(islice(_different(tasks(TASK_SEED)), NUM_TASKS))
        self.asked = [AnswerRequest(tuple(self._prompt(task))) for task in self.tasks]
        self.plan = AnswerPlan(self.models.revisions["target"], self.layers, MAX_NEW_TOKENS, BATCH)
        answers.collect(self.target, self.stops, self.asked, self.plan, work / "own", tell)
        self._reference()
        self._rows: dict[str, tuple[PackedRows, Sequence[TrainingChat]]] = {}

    def _prompt(self, task: Task) -> list[int]:
        tokenizer = self.models.tokenizer
        text = chat.render(tokenizer, [Message("user", turns_of(task)[0])], thinking=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _reference(self) -> None:
        """Store the same prompts with the data set's answers, and the target's states on them."""
        tokenizer = self.models.tokenizer
        for number, rows in enumerate(answers.batches(self.asked, BATCH, self.plan.seed)):
            path = answers.part(self.work / "reference", number)
            if path.exists():
                continue
            path.parent.mkdir(exist_ok=True)
            texts = []
            for row in rows:
                answer = tokenizer.encode(self.tasks[row].answers[0], add_special_tokens=False)
                texts.append([*self.asked[row].ids, *answer[: MAX_NEW_TOKENS - 1], tokenizer.eos_token_id])
            states = ComputedStates(self.target, self.layers)(texts)
            tensors = answers.joined(texts, [len(self.asked[row].ids) for row in rows], states)
            answers.write(path, {**tensors, "prompts": torch.tensor(rows)})
            tell(f"reference answers: batch {number + 1}")

    def rows(self, kind: str) -> tuple[PackedRows, Sequence[TrainingChat]]:
        """Return packed rows of a kind of answers; held-out answers are always the target's own."""
        if kind not in self._rows:
            trained, _ = session.split(stored([self.work / kind]), 0)
            _, held_out = session.split(stored([self.work / "own"]), 0)
            norm, pad = final_norm(self.models.target), prepare.pad_id(self.models)
            self._rows[kind] = PackedRows(trained, self.layers, norm, ROW_LENGTH, pad, 0, held_out), held_out
        return self._rows[kind]

    def measured(self, variant: Variant, seed: int) -> None:
        path = self.work / f"{variant.name}-{seed}.json"
        if path.exists():
            return
        embedding = self.models.target.get_input_embeddings().weight
        rows, held_out = self.rows(variant.answers)
        draft = new_draft(variant, self.models.target, len(self.models.tokenizer), seed)
        data: Any = TokenRows(rows, embedding) if variant.conditioning == "tokens" else rows
        objective = VariantObjective(variant, draft, data, DraftVocab.of(embedding, embedding))
        recipe = DraftRecipe(steps=self.steps, matrix_lr=RATE, other_lr=RATE / 10, rows=ROWS, seed=seed, measurements=1)
        history = trainer.train(objective, data, recipe, self.work / f"{variant.name}-{seed}.pt", _silent)
        result: dict[str, Any] = {"accepted": history[-1]["accepted"], "history": history, "decoded": {}}
        if variant.runs_in_engine:
            for block in USED.get(variant.name, (variant.block,)):
                result["decoded"][block] = self._decoded(draft, block, held_out)
        files.write_whole(path, lambda file: file.write(json.dumps(result).encode()))
        path.with_suffix(".pt").unlink()
        tell(f"{variant.name}, seed {seed}: {history[-1]['accepted']:.3f} on given text")

    def _decoded(self, draft: Any, block: int, held_out: Sequence[TrainingChat]) -> list[tuple[int, int]]:
        """Return tokens and rounds of each held-out prompt."""
        prompts = [item.ids[: item.prompt_length].tolist() for item in held_out[:NUM_MEASURED]]
        drafter = DFlashDrafter(draft.eval(), self.target.embedding, self.target.head, block)
        limits = Limits(MAX_NEW_TOKENS, self.stops)
        found = measure_acceptance(self.target, drafter, prompts, limits)
        draft.train()
        return [(sum(one.counts) + len(one.counts), len(one.counts)) for one in found]


def _different(endless: Iterator[Task]) -> Iterator[Task]:
    known: set[str] = set()
    for task in endless:
        if question(task) not in known:
            known.add(question(task))
            yield task


def _silent(text: str) -> None:
    pass


class TokenRows:
    """Rows whose features are the embeddings of their tokens."""

    def __init__(self, rows: PackedRows, embedding: Tensor) -> None:
        self.rows, self.embedding = rows, embedding.detach()
        self.ids, self.answer, self.num_held_out = rows.ids, rows.answer, rows.num_held_out

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        batch, features = self.rows.take(index, layers)
        embedded = self.embedding[batch.ids]
        return batch, embedded.repeat(1, 1, features.shape[-1] // embedded.shape[-1])

    def final(self, index: Sequence[int]) -> Tensor:
        return self.rows.final(index)


# The page.


def page(work: Work, seeds: int, steps: int) -> Iterator[str]:
    results = {
        variant.name: [json.loads((work.folder / f"{variant.name}-{seed}.json").read_text()) for seed in range(seeds)]
        for variant in variants()
    }
    yield "# The paper's ablations, on nano\n"
    yield f"```\n{work.command}\n```\n"
    yield f"{environment.one_line(environment.describe())}.\n"
    seeded = "one seed" if seeds == 1 else f"{seeds} seeds"
    yield (
        f"DFlash drafts for nano: {NUM_TASKS:,} prompts from its generator, answered by nano itself, {steps} steps of "
        f"{ROWS} rows\nof {ROW_LENGTH} tokens, {seeded}; the base has 3 layers, 5 features and a block of 16, as "
        "the paper's own base.\nEach variant changes one thing. `decoded`: tokens per round over the same "
        f"{NUM_MEASURED} held-out prompts, decoded with the\ndraft (seeds pooled; in brackets the ratio to the base "
        "with its 95 % interval over prompts). `given`: right tokens in a\nrow and the bonus token on held-out "
        "answers as they stand, mean over seeds (lowest to highest). A draft that no drafter\nfeeds has `given` "
        "alone. nano is small, its language easy, and 400 steps are few: what holds here need not hold for\nlarge "
        "models, nor the reverse."
    )
    for table in TABLES:
        yield ""
        yield from _section(table, results)


def _section(table: Table, results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield f"## {table.title}\n"
    yield f"{table.paper}.\n"
    yield "| variant | used | decoded | to the base | given |"
    yield "|---|---:|---:|---:|---:|"
    for variant in (BASE, *table.variants):
        runs = results[variant.name]
        given = [run["accepted"] for run in runs]
        shown = f"{np.mean(given):.2f}" + (f" ({min(given):.2f} to {max(given):.2f})" if len(given) > 1 else "")
        used = USED.get(variant.name, (variant.block,)) if table.title.startswith("Block") else (variant.block,)
        if not variant.runs_in_engine:
            yield f"| {variant.name} | {variant.block} | | | {shown} |"
        for block in used if variant.runs_in_engine else ():
            columns, base = _columns(runs, block), _columns(results["base"], 16)
            al = columns[:, 0].sum() / columns[:, 1].sum()
            change = stats.changes(np.hstack([columns, base]), [((0, 3), (1, 2))])[0]
            ratio = "" if (variant == BASE and block == 16) or change is None else _interval(change.ratio)
            yield f"| {variant.name} | {block} | {al:.2f} | {ratio} | {shown} |"
    yield ""
    yield _verdict(table, results)


def _columns(runs: Sequence[dict[str, Any]], block: int) -> stats.Floats:
    """Return tokens and rounds of each prompt, summed over seeds."""
    return np.asarray(np.sum([run["decoded"][str(block)] for run in runs], axis=0), dtype=np.float64)


def _interval(ratio: stats.Interval) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _verdict(table: Table, results: dict[str, list[dict[str, Any]]]) -> str:
    """State whether the paper's order holds, pair by pair."""
    by_name = {variant.name: variant for variant in (BASE, *table.variants)}
    decoded = all(variant.runs_in_engine for variant in by_name.values())
    said = []
    for better, worse in pairwise(table.order):
        compare = _by_decoding if decoded else _by_given
        said.append(f"{better} over {worse}: {compare(by_name[better], by_name[worse], results)}")
    return f"By `{'decoded' if decoded else 'given'}`: {'; '.join(said)}."


def _by_decoding(better: Variant, worse: Variant, results: dict[str, list[dict[str, Any]]]) -> str:
    """Compare variants at their trained blocks; they differ if the 95 % interval excludes 1."""
    both = [_columns(results[variant.name], variant.block) for variant in (better, worse)]
    change = stats.changes(np.hstack(both), [((0, 3), (1, 2))])[0]
    if change is None or change.ratio.low is None or change.ratio.high is None:
        return "not measured"
    if change.ratio.low > 1:
        return "holds"
    return "the reverse holds" if change.ratio.high < 1 else "cannot be told"


def _by_given(better: Variant, worse: Variant, results: dict[str, list[dict[str, Any]]]) -> str:
    """Compare variants; they differ if all seeds of the better variant exceed all seeds of the worse."""
    high, low = ([run["accepted"] for run in results[variant.name]] for variant in (better, worse))
    if min(high) > max(low):
        return "holds"
    return "the reverse holds" if max(high) < min(low) else "cannot be told"
