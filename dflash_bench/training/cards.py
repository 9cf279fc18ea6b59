"""The card of a trained draft: for which target, from which prompts, how it learnt, and what it may have seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.models import presets
from dflash_bench.training.config import TrainRequest
from dflash_bench.training.contamination import NUM_WORDS, Overlap
from dflash_bench.training.prompts import Chat
from dflash_bench.training.trainer import History

NAME = "README.md"
ACCEPTANCE = "acceptance.json"
HISTORY = "history.json"
"""Every measurement of the training, as in the card."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the target accepted of a draft on prompts that it was not trained on, at temperature 0.

    `by_position` is the share of rounds that accepted at least 1, 2, ... drafted tokens.
    """

    al_pooled: float
    by_position: tuple[float, ...]
    num_prompts: int
    max_new_tokens: int


def acceptance_of(folder: Path) -> Acceptance | None:
    """As the draft's card says, if it says so. Raises UserError for a damaged file."""
    path = folder / ACCEPTANCE
    if not path.exists():
        return None
    try:
        fields = files.json_of(path)
        return Acceptance(**{**fields, "by_position": tuple(map(float, fields["by_position"]))})
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} does not say what was accepted of this draft ({error}); remove it") from error


def write(
    folder: Path, request: TrainRequest, prompts: Sequence[Chat], overlaps: Sequence[Overlap], history: History,
    rate: float, num_answer_tokens: int, num_later: int, measured: Acceptance,
) -> None:  # fmt: skip
    name = presets.name(request.target)
    sources = Counter(prompt.source if Path(prompt.source).name == prompt.source else Path(prompt.source).name
                      for prompt in prompts)  # fmt: skip
    lines = [
        f"# {request.method} draft for {name}",
        "",
        f"Trained by `dflash-bench train` on {name}'s own answers; nothing else taught it.",
        "",
        f"- answers: {num_answer_tokens:,} tokens, to prompts from:",
        *(f"  - {source}: {count:,}" for source, count in sources.items()),
        f"- later turns of these, asked after the target's own answers: {num_later:,}",
        f"- answered again at temperature 1: {request.sampled:.0%} of them",
        f"- learning rate of matrices: {rate:g}; seed {request.seed}",
        f"- options: {_given(request)}",
        "- `tokens`: of answers, read so far",
        "- `accepted`: right tokens in a row and the bonus token, on held-out answers as they stand",
        "- `al_pooled`: sum(a_i + 1) / sum(S), over all rounds of held-out prompts, decoded with the draft",
        "",
        *history_table(history),
        "",
        *overlap_table(overlaps, len(prompts)),
        "",
    ]
    _write_json(folder / ACCEPTANCE, asdict(measured))
    _write_json(folder / HISTORY, history)
    (folder / NAME).write_text("\n".join(lines), encoding="utf-8")


def _write_json(path: Path, content: Any) -> None:
    files.write_whole(path, lambda file: file.write(json.dumps(content, indent=1).encode()))


def _given(request: TrainRequest) -> str:
    """What decides the draft and was not left open."""
    names = ("layers", "block_size", "draft_vocab", "mask_token", "epochs", "steps", "distil", "patience", "slim")
    given = [f"{name} {getattr(request, name)}" for name in names if getattr(request, name) not in (None, False)]
    return ", ".join(given) or "all as the command leaves them"


def _short(source: str) -> str:
    """Without the path of a folder, which says nothing elsewhere."""
    return source.partition(" ")[0]


def overlap_table(overlaps: Sequence[Overlap], num_prompts: int) -> list[str]:
    """Lines of Markdown, one for each suite."""
    return [
        f"Of {num_prompts:,} training prompts, those that share {NUM_WORDS} words in a row with a test suite, "
        "as they are, and if every number counts as the same (made from one template). "
        "Lines that a suite always asks with are left out.",
        "",
        "| suite | rows | share | share but for numbers |",
        "|---|---:|---:|---:|",
        *(
            f"| {o.suite} ({_short(o.source)}) | {o.num_rows:,} | {o.num_shared:,} | {o.num_alike:,} |"
            for o in overlaps
        ),
    ]


def history_table(history: History) -> list[str]:
    """Lines of Markdown, one for each measurement."""
    keys = list(history[0])
    rows = [" | ".join(_cell(entry[key]) for key in keys) for entry in history]
    return [f"| {' | '.join(keys)} |", f"|{'---:|' * len(keys)}", *(f"| {row} |" for row in rows)]


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
