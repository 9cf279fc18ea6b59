"""The options of `train`: each field defines flag, help, range, config file entry and Python API."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.option import Condition, Range, check_options, check_threads, condition, under

# ruff: noqa: RUF009 - the calls make fields


METHODS = ("dflash", "dflash2", "dspark", "eagle3", "medusa", "mtp")
GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay of the loss by block size (paper, A.1); for other block sizes in proportion."""
WRITTEN = 1_000
"""Number of our own prompts of each kind if a user gives none."""
BLOCKS = ("dflash", "dflash2", "dspark")
"""Kinds of the DFlash family."""
WITH_HEADS = ("dflash2", "dspark")
MOST_SLIM_RANK = 64
ANCHORS = ("random", "uniform")
FUSIONS = ("kv", "input", "none")
OFF = "off"
SLIM = ("zlab", "specforge", "safeailab")
"""Formats of drafts that may leave their head to the target."""

DECISIVE = tuple(
    """
    init layers features fusion autoregressive block_size intermediate_size rank depth draft_vocab mask_token epochs
    steps distil anchors decay patience slim
    """.split()
)
"""Options that determine the draft, besides its rate and seed."""

_options, _prompts, _answers = under("Options"), under("Prompts"), under("Answers")
_draft, _training = under("Draft"), under("Training")
_SHARE = Range(lambda value: 0 <= value <= 1, "is a share from 0 to 1, not {values}")


def _only(*methods: str) -> Condition:
    return Condition(
        lambda options: options.method not in methods, "{flag} has no effect on {options.method}; leave it out"
    )


def _check_decay(value: str) -> None:
    """Raise UserError unless it is a number above 0, or off."""
    if value != OFF and not (_is_number(value) and float(value) > 0):
        raise UserError(f"--decay is a number above 0, or {OFF}, not {value}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_WITHOUT_FEATURES = Condition(
    lambda options: options.fusion != "none" or options.features is None,
    "--fusion none reads no outputs; leave --features out",
)
_OF_INIT = Condition(
    lambda options: options.init is not None, "{flag} has no effect with --init, whose draft has its own; leave it out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One draft for one target; drafts that share `out` share the target's answers, too. None is "not given"."""

    target: str = _options("The target: a folder, a hub id, or a known model.", metavar="PATH|ID|NAME", required=True)
    out: Path = _options(
        "Folder for the draft, in DIR/METHOD, and for intermediate files, in DIR/work.", metavar="DIR", required=True
    )
    method: str = _options(
        "What to train: dflash, dflash2, dspark, eagle3, medusa or mtp.",
        default="dflash",
        metavar="NAME",
        choices=lambda: METHODS,
        kind="method to train",
    )
    prompts: tuple[str, ...] = _prompts(
        "Prompts to train on: a file as for 'run --prompts', or rows of a suite, worded as the suite words them; may "
        "be repeated.",
        default=(),
        metavar="FILE|SUITE=FILE",
    )
    written: int | None = _prompts(
        "Add N of our own prompts each for chat, code and mathematics. Default: 1,000 if no other prompts are given.",
        metavar="N",
        minimum=0,
        most=15_000,
    )
    invented: int = _prompts(
        "Add N prompts made up by the target itself.", default=0, metavar="N", minimum=0, most=10**5
    )
    openings: tuple[str, ...] = _prompts(
        "Opening words of the prompts that the target makes up; may be repeated.",
        default=(),
        flag="--opening",
        metavar="TEXT",
        needs=(condition(lambda options: options.invented > 0, "without --invented"),),
    )
    against: Path | None = _prompts(
        "Rows of test suites, as for 'run --data': prompts that occur in them are refused, as are those that occur in "
        "the embedded suites.",
        metavar="FOLDER",
    )
    allow: tuple[str, ...] = _prompts(
        "overlap: train on prompts of a test suite anyway.",
        default=(),
        metavar="WHAT",
        choices=lambda: ("overlap",),
        kind="thing to allow",
    )
    sampled: float = _answers(
        "Share of the prompts answered again at temperature 1.", default=0.25, metavar="SHARE", range=_SHARE
    )
    max_new_tokens: int = _answers("Stop answers after N tokens.", default=256, metavar="N", minimum=2, most=448)
    answer_tokens: int | None = _answers(
        "Stop answering once the answers have N tokens; which prompts are left out is random. Default: answer all.",
        metavar="N",
        minimum=1,
        most=10**9,
    )
    batch_size: int = _answers("Number of answers decoded together.", default=64, metavar="N", minimum=1, most=4096)
    max_disk_gb: float = _answers(
        "Most disk space that the target's states may take, in gigabytes.",
        default=20.0,
        flag="--max-disk",
        metavar="GB",
        minimum=0,
        most=10**6,
    )
    on_the_fly: bool = _answers(
        "Store only the answers, and compute the target's states at each step: slower, but takes no disk.",
        default=False,
    )
    init: str | None = _draft(
        "Begin with the weights of this DFlash draft; what a new kind adds to it changes nothing at first.",
        metavar="DRAFT",
        conflicts=(_only(*BLOCKS),),
    )
    layers: int | None = _draft(
        "Number of layers of a DFlash draft. Default: 2.",
        metavar="N",
        minimum=1,
        most=32,
        conflicts=(_only(*BLOCKS), _OF_INIT),
    )
    features: int | None = _draft(
        "Number of target layers whose outputs a DFlash draft reads. Default: 5, or fewer of a shallow target.",
        metavar="N",
        minimum=1,
        most=32,
        conflicts=(_only(*BLOCKS), _OF_INIT),
    )
    fusion: str | None = _draft(
        "Where a DFlash draft reads these outputs: kv, as keys and values of each layer; input, added to the "
        "context's embeddings; none, nowhere. Servers run kv only. Default: kv.",
        metavar="PLACE",
        choices=lambda: FUSIONS,
        kind="place of fusion",
        needs=(_WITHOUT_FEATURES,),
        conflicts=(_only("dflash"), _OF_INIT),
    )
    autoregressive: bool = _draft(
        "Let a DFlash draft draft token by token instead of a block at once. Servers do not run it.",
        default=False,
        conflicts=(_only("dflash"), _OF_INIT),
    )
    block_size: int | None = _draft(
        "Block size of a DFlash draft, including the anchor. Default: 16.",
        metavar="N",
        minimum=2,
        most=64,
        conflicts=(_only(*BLOCKS), _OF_INIT),
    )
    intermediate_size: int | None = _draft(
        "Width of the draft's feed-forward layers. Default: the target's.",
        metavar="N",
        minimum=8,
        most=1 << 20,
        conflicts=(_only(*BLOCKS, "eagle3"), _OF_INIT),
    )
    rank: int | None = _draft(
        "Numbers per token in DFlash 2's selector and DSpark's Markov head. Default: 64.",
        metavar="N",
        minimum=1,
        most=1024,
        conflicts=(
            _only(*WITH_HEADS),
            Condition(
                lambda options: options.slim and options.rank > MOST_SLIM_RANK,
                f"{{flag}} is at most {MOST_SLIM_RANK} with --slim",
            ),
        ),
    )
    depth: int | None = _draft(
        "Number of steps on their own outputs that MTP heads are trained for. Default: 3.",
        metavar="N",
        minimum=1,
        most=6,
        conflicts=(_only("mtp"),),
    )
    draft_vocab: int | None = _draft(
        "Let the draft use only the N most frequent tokens: the head of EAGLE-3 (default 8192), and the tokens that "
        "DFlash learns to distinguish (default: all).",
        metavar="N",
        minimum=16,
        most=10**7,
        conflicts=(_only(*BLOCKS, "eagle3"), _OF_INIT),
    )
    slim: bool = _draft(
        "Use rows of the target's head and leave them out of the file: it is smaller, and DFlash with --draft-vocab "
        "drafts faster, but only this tool reads it; 'convert --target' writes it in full.",
        default=False,
        needs=(
            Condition(
                lambda options: options.method not in BLOCKS or options.draft_vocab or options.init is not None,
                "{flag} needs --draft-vocab: a DFlash draft of the whole vocabulary has no head to leave out",
            ),
        ),
        conflicts=(
            _only(*BLOCKS, "eagle3"),
            Condition(
                lambda options: options.format not in (None, *SLIM),
                "{flag} has no effect with --to {options.format}, which stores the head; leave one of them out",
            ),
        ),
    )
    mask_token: str | None = _draft(
        "Token that stands for a masked position. Default: a spare id, or an unused special token.",
        metavar="TOKEN",
        conflicts=(_only(*BLOCKS), _OF_INIT),
    )
    format: str | None = _draft(
        "Format of the draft, as for convert. Default: zlab or safeailab.",
        flag="--to",
        metavar="FORMAT",
        conflicts=(_only(*BLOCKS, "eagle3"),),
    )
    epochs: float | None = _training(
        "Number of passes over the answers. Default: 6.", metavar="N", minimum=0.01, most=10**4
    )
    steps: int | None = _training(
        "Number of steps, instead of --epochs.",
        metavar="N",
        minimum=1,
        most=10**7,
        conflicts=(
            Condition(
                lambda options: options.epochs is not None,
                "--steps and --epochs both say how long to train; give one of them",
            ),
        ),
    )
    rate: float | None = _training(
        "Learning rate of matrices. Default: found by a search.",
        metavar="X",
        most=10,
        range=Range(
            lambda value: math.isfinite(value) and value > 0,
            "is a number above 0, not {values}; leave it out to have it found by a search",
        ),
    )
    distil: float | None = _training(
        "Share of DFlash's loss that is about the target's distribution rather than its tokens. Default: 0.5.",
        metavar="SHARE",
        range=_SHARE,
        conflicts=(_only(*BLOCKS),),
    )
    anchors: str | None = _training(
        "Where DFlash's blocks begin: random, at places drawn anew in each step, or uniform, one after another. "
        "Default: random.",
        metavar="KIND",
        choices=lambda: ANCHORS,
        kind="kind of anchors",
        conflicts=(_only(*BLOCKS),),
    )
    decay: str | None = _training(
        "How slowly the weight of DFlash's loss falls along a block: exp(-(k - 1) / G) at place k; off: not at all. "
        "Default: 7 for a block of 16, 4 for 8, and in proportion.",
        metavar="G|off",
        check=_check_decay,
        conflicts=(_only(*BLOCKS),),
    )
    patience: int | None = _training(
        "Stop after N measurements without improvement, and keep the best weights. There are two per epoch, and at "
        "least eight in total.",
        metavar="N",
        minimum=1,
        most=10**6,
    )
    seed: int = _training(
        "Random seed for prompts, sampling, weights and order.", default=0, metavar="N", minimum=0, most=2**32 - 1
    )
    threads: int | None = _training("CPU threads.", metavar="N", minimum=1, check=check_threads)
    device: str | None = _training(
        "cpu, cuda or cuda:N. Default: cuda if there is one; torchrun uses several.", metavar="D"
    )

    def __post_init__(self) -> None:
        """Convert folders that Python callers give as strings."""
        for name in ("out", "against"):
            if isinstance(folder := getattr(self, name), str):
                object.__setattr__(self, name, Path(folder))

    @property
    def drafter(self) -> str:
        """Return the method that runs the trained draft: kinds of DFlash are one method."""
        return "dflash" if self.method in BLOCKS else self.method

    def gamma(self, block: int) -> float:
        """Return the decay of the loss along a block (paper, A.1)."""
        if self.decay is not None:
            return math.inf if self.decay == OFF else float(self.decay)
        return GAMMAS.get(block, block * 0.45)

    @property
    def num_written(self) -> int:
        """Return how many of our own prompts of each kind to train on."""
        return self.written if self.written is not None else 0 if self.prompts or self.invented else WRITTEN

    def values(self, *names: str) -> dict[str, Any]:
        """Return these options by name."""
        return {name: getattr(self, name) for name in names}


def check(request: TrainRequest) -> None:
    """Raise UserError for options that contradict each other, have no effect or are out of range."""
    check_options(request)
    if not (request.prompts or request.num_written or request.invented):
        raise UserError("no prompts to train on: give --prompts FILE, --written N or --invented N")
