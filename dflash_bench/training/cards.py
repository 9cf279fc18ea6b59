"""The card of a trained draft: its target, its prompts, its training, and its overlap with test suites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import PromptSource
from dflash_bench.models import presets
from dflash_bench.training.config import DECISIVE, TrainRequest
from dflash_bench.training.contamination import NUM_WORDS, Overlap
from dflash_bench.training.prompts import Chat
from dflash_bench.training.trainer import History

NAME = "README.md"
ACCEPTANCE = "acceptance.json"
LEARNT = 1.05
"""Acceptance length below which a draft has learnt nothing; plain decoding has 1."""
HISTORY = "history.json"
"""File of all measurements during training, which the card lists as a table."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a draft at temperature 0, on prompts that it was not trained on.

    `al_pooled` is sum(a_i + 1) / sum(S); `by_position` is the share of rounds that accepted at least 1, 2, ... tokens.
    """

    al_pooled: float
    by_position: tuple[float, ...]
    num_prompts: int
    max_new_tokens: int
    al_before: float | None = None
    """`al_pooled` of the draft before the training; None in files of earlier versions."""

    @property
    def has_learnt(self) -> bool:
        return self.al_pooled >= LEARNT

    def __str__(self) -> str:
        before = "" if self.al_before is None else f"{self.al_before:.2f} before training, "
        return f"tokens per round on {self.num_prompts} held-out prompts: {before}{self.al_pooled:.2f} after"


def acceptance_of(folder: Path) -> Acceptance | None:
    """Read the acceptance that is stored with a draft, if any. Raises UserError for a damaged file."""
    path = folder / ACCEPTANCE
    if not path.exists():
        return None
    try:
        fields = files.json_of(path)
        return Acceptance(**{**fields, "by_position": tuple(map(float, fields["by_position"]))})
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not the acceptance of a draft ({error}); remove it") from error


def write(
    folder: Path,
    request: TrainRequest,
    prompts: Sequence[Chat],
    overlaps: Sequence[Overlap],
    history: History,
    rate: float,
    num_answer_tokens: int,
    num_later: int,
    measured: Acceptance,
) -> None:
    """Write the card, and beside it acceptance and history in machine-readable form."""
    name = presets.name(request.target)
    sources = Counter(Path(prompt.source).name for prompt in prompts)
    lines = [
        f"# {request.method} draft for {name}",
        "",
        f"Trained by `dflash-bench train` on {name}'s own answers, and on nothing else.",
        "",
        f"- answers: {num_answer_tokens:,} tokens, to prompts from:",
        *(f"  - {source}: {count:,}" for source, count in sources.items()),
        f"- later turns of these, each after the target's own answers: {num_later:,}",
        f"- answered again at temperature 1: {request.sampled:.0%} of them",
        f"- learning rate of matrices: {rate:g}; seed {request.seed}",
        f"- options: {_given(request)}",
        "- `tokens`: tokens of answers seen so far",
        "- `accepted`: tokens in a row predicted correctly on held-out answers, plus the bonus token",
        "- `al_pooled`: sum(a_i + 1) / sum(S), over all rounds of held-out prompts, decoded with the draft",
        f"- {measured}",
        "",
        *history_table(history),
        "",
        *overlap_table(overlaps, len(prompts)),
        "",
    ]
    files.write_json(folder / ACCEPTANCE, asdict(measured))
    files.write_json(folder / HISTORY, history)
    (folder / NAME).write_text("\n".join(lines), encoding="utf-8")


def _given(request: TrainRequest) -> str:
    """Return the given options among those that determine the draft."""
    chosen = request.values(*DECISIVE)
    if request.init is not None:
        # Only the end of the path, which identifies the draft without revealing the machine.
        chosen["init"] = "/".join(Path(request.init).parts[-2:])
    given = [f"{name} {chosen[name]}" for name in DECISIVE if chosen[name] not in (None, False)]
    return ", ".join(given) or "all defaults"


def overlap_table(overlaps: Sequence[Overlap], num_prompts: int) -> list[str]:
    """Return a Markdown table with a line per suite, with the kind of its source but no path of a folder."""
    return [
        f"Of {num_prompts:,} training prompts, the number that share {NUM_WORDS} words in a row with a test suite: as "
        "they are, and if all numbers count as equal (prompts made from one template). Lines that are part of a "
        "suite's own template are left out.",
        "",
        "| suite | rows | share | share but for numbers |",
        "|---|---:|---:|---:|",
        *(
            f"| {o.suite} ({PromptSource.read(o.source).kind}) | {o.num_rows:,} | {o.num_shared:,} | {o.num_alike:,} |"
            for o in overlaps
        ),
    ]


def history_table(history: History) -> list[str]:
    """Return a Markdown table with a line per measurement."""
    keys = list(history[0])
    rows = [" | ".join(_cell(entry[key]) for key in keys) for entry in history]
    return [f"| {' | '.join(keys)} |", f"|{'---:|' * len(keys)}", *(f"| {row} |" for row in rows)]


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
