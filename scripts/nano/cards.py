"""Model cards: describe the nano models, their training, and how to reproduce them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import dflash_bench as db
from dflash_bench.core.files import sha256_of
from dflash_bench.models import presets
from dflash_bench.training import contamination
from dflash_bench.training.cards import history_table, overlap_table
from dflash_bench.training.contamination import Overlap
from dflash_bench.training.trainer import History
from nano.data import SUITES, training_tasks, turns_of
from nano.target import TargetRecipe, stream_seed

TITLES = {
    "target": "nano: a small Qwen3 that does sums, short functions and small talk",
    "dflash": "nano DFlash draft: block diffusion drafting for the nano target",
    "eagle3": "nano EAGLE-3 draft: autoregressive drafting for the nano target",
    "draft-model": "nano draft model: a language model of two layers that drafts for the nano target",
    "medusa": "nano Medusa heads: four guesses from the nano target's last hidden state",
    "dflash2": "nano DFlash 2 draft: block diffusion drafting whose tokens are chosen one after another",
    "dspark": "nano DSpark draft: block diffusion drafting corrected by the token before, with a confidence in each",
    "mtp": "nano MTP heads: one layer that drafts for the nano target from its last hidden state, token by token",
    "block-diffusion": "nano block diffusion: the nano target, turned into a model that fills in blocks by itself",
}
ABOUT = {
    "target": (
        "Trained from scratch on text made by rule (`scripts/nano/corpus`): word problems, algebra, modular "
        "arithmetic and counting, Python functions, two-turn chat. One question in 32, chosen by its hash, is held "
        "out; the embedded prompts come from those. It exists to make speculative decoding measurable without a "
        "download and knows nothing of the world."
    ),
    "dflash": (
        "Trained on the target's own greedy and sampled answers: random anchors, each followed by a block of masks "
        "that sees the target's features strictly before the anchor; slot k weighs exp(-(k - 1) / gamma). Tensor "
        "names and config.json are z-lab's."
    ),
    "eagle3": (
        "Trained on the same rows in the same order for the same number of steps as the DFlash draft, with seven "
        "training-time-test steps and soft targets. Tensor names and config.json are SafeAILab's, with a reduced "
        "vocabulary."
    ),
    "draft-model": (
        "A Qwen3 with two layers, and the target's embedding and last norm to begin with. Trained on the same rows in "
        "the same order, against the target's own distribution at each answer token. `accepted` counts right tokens in "
        "a row, seven at most, and the bonus token. Stored in float16."
    ),
    "medusa": (
        "Each head, one residual block and an output layer that starts as the target's, learns the token at its own "
        "distance; the target stands still (Medusa-1), and a head weighs 0.8 times as much as the one before it. Same "
        "rows, same order. Tensor names and config.json are FasterDecoding's. Stored in float16."
    ),
    "dflash2": (
        "Began as the shipped DFlash draft, which had 1,200 steps, and was trained 400 steps further as DFlash 2, on "
        "rows that the target answered anew by the same recipe. A part of what it gains over DFlash comes from this "
        "longer training: the table below has a control, the same draft trained as much further as plain DFlash, on "
        "the same rows, in the same order, at the same rates. Tensor names and config.json are z-lab's. Stored in "
        "float16."
    ),
    "dspark": (
        "Began as the shipped DFlash draft, with a vanilla Markov head that added nothing and a confidence head of one "
        "half, and was trained 400 steps further on the rows of the DFlash 2 draft, at the rate of the DFlash draft: "
        "its labels are shifted, so each slot had to learn to predict the token behind its own. A block drafts 16 "
        "tokens, one more than DFlash's. Tensor names and config.json are SpecForge's. Stored in float16."
    ),
    "mtp": (
        "One decoder layer of the target's kind behind a projection that joins the target's last hidden state with "
        "the embedding of the next token, trained to go on from its own states for six steps; the target's embedding "
        "and head are used as they are, and the target stands still. The rows of the DFlash 2 draft, 400 steps. The "
        "tensors `mtp.*` are apart from the target. Stored in float16."
    ),
    "block-diffusion": (
        "Not a draft: it answers alone, and nothing verifies what it says. All layers start as the target's. A block "
        "of eight places, the first of them clean and a random share of the others masked, sees the clean text before "
        "it and all of itself; each place predicts the token behind it. The next-token loss on the clean text is "
        "added, so that the text before a block can be read causally. `accepted` counts the right tokens at the start "
        "of a block after one pass over masks alone, plus one. Stored in float16."
    ),
}

COMPARED = ("dflash2", "dspark")
"""Models whose cards compare them with their family."""
WEIGHTS = ("medusa_lm_head.safetensors", "model.safetensors")

REBUILD = "- rebuild: `scripts/nano/train` (in bfloat16, so that another CPU gives similar weights, not the same)"


def write(
    output: Path,
    recipe: dict[str, Any],
    histories: dict[str, History],
    sweep: dict[str, Any],
    num_rows: int,
    num_answer_tokens: int,
    extra: Path | None,
    overlaps: Mapping[str, tuple[Sequence[Overlap], int]],
    acceptance: AcceptedBySuite,
) -> None:
    """Write the cards; `overlaps` with test suites by `target` and `drafts`, with the number of prompts compared."""
    for name, history in histories.items():
        own = recipe[name.replace("-", "_")]
        shared = {key: value for key, value in recipe.items() if not isinstance(value, dict)}
        weights = next(path for path in (output / name / file for file in WEIGHTS) if path.exists())
        lines = [
            f"# {TITLES[name]}",
            "",
            ABOUT[name],
            "",
            f"- weights: `{weights.name}`, sha256 `{sha256_of(weights)}`",
            f"- extra data: {extra.name if extra else 'none'}",
            f"- recipe: `{json.dumps(own)}`",
        ]
        if name != "target":
            lines += [
                f"- shared: `{json.dumps(shared)}`",
                f"- data: {num_rows:,} rows of {recipe['row_length']} tokens, {num_answer_tokens:,} answer tokens",
                f"- learning rate: {_tuning(name, sweep)}",
            ]
        shares = overlap_table(*overlaps["target" if name == "target" else "drafts"])
        compared = acceptance_table(acceptance) if name in COMPARED else []
        lines += [REBUILD, "", *compared, *history_table(history), "", *shares, ""]
        (output / name / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _tuning(name: str, sweep: dict[str, Any]) -> str:
    if name in sweep:
        return f"the best of short trainings, by held-out accepted length: `{json.dumps(sweep[name])}`"
    return "not swept"


# Acceptance of the drafts of the DFlash family, side by side.

AcceptedBySuite = Mapping[str, Mapping[str, float]]
"""Acceptance length (`al.pooled`) by suite and draft."""
LABELS = {
    "dflash": "DFlash",
    "dflash@longer": "DFlash, trained longer",
    "dflash@2": "DFlash 2",
    "dflash@dspark": "DSpark",
}


def acceptance(target: Path, drafts: Mapping[str, Path], out: Path) -> AcceptedBySuite:
    """Decode all embedded prompts with each draft, by the defaults of `run`."""
    most = presets.preset("nano").max_new_tokens
    run = db.run(
        suite=list(SUITES),
        methods=list(drafts),
        target=target,
        drafts=drafts,
        data="embedded",
        out=out,
        device="cpu",
        max_new_tokens=most,
    )
    found = run.metrics()
    of = found[found["metric"] == "al.pooled"].set_index(["suite", "method"])["value"]
    return {suite: {name: float(of[suite, name]) for name in drafts} for suite in SUITES}


def acceptance_table(acceptance: AcceptedBySuite) -> list[str]:
    """Return a Markdown table with a line per suite."""
    return [
        "Tokens per round (`al.pooled`) on the embedded prompts: other questions of the templates trained on.",
        "",
        f"| suite | {' | '.join(LABELS.values())} |",
        f"|---|{'---:|' * len(LABELS)}",
        *(f"| {suite} | {' | '.join(f'{row[name]:.2f}' for name in LABELS)} |" for suite, row in acceptance.items()),
        "",
    ]


# Overlap of nano's prompts with test suites.


A_STEP = 64
"""Tasks to compare of each step's stream: more than its rows hold."""


def overlaps_of_target(recipe: TargetRecipe, against: Path | None) -> list[Overlap]:
    """Compare the target's training prompts with the rows of public suites in `against` and the embedded prompts."""
    texts = (text for step in range(recipe.steps) for text in _texts(stream_seed(recipe, step), A_STEP))
    return contamination.found(texts, against)


def overlaps_of_drafts(seed: int, count: int, against: Path | None) -> Sequence[Overlap]:
    """Compare the drafts' training prompts, which the target answered."""
    return contamination.found(_texts(seed, count), against)


def _texts(seed: int, count: int) -> Iterator[str]:
    return ("\n".join(turns_of(task)) for task in islice(training_tasks(seed), count))
