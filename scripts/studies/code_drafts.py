"""Drafts for a small model for code, trained on its own answers to prompts that were written here, and stored in int8.

The answers are decoded once, and shared by all drafts; DSpark starts from the DFlash draft. Interrupted, all of it goes
on where it stopped.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from studies import _code_invented, _code_prompts
from studies._study import Made, Work, add_data, bench, tell

TAKES = "seven hours of a core for half a billion parameters"
PAGES = ("drafts/code-*/*",)

NUM_TASKS, NUM_DESCRIBED = 300, 1300
"""Prompts composed here, and from docstrings."""
NUM_INVENTED = {"functions": 2700, "tasks": 350}
"""Prompts that the target makes up."""
BATCH = 128
ANSWERS = (
    *("--answer-tokens", 600_000),
    *("--max-new-tokens", 256),
    *("--batch-size", BATCH),
    *("--sampled", 0),
    *("--max-disk", 40),
)
DRAFTS = {
    "dflash": (
        *("--layers", 2),
        *("--block-size", 8),
        *("--draft-vocab", 8192),
        *("--intermediate-size", 1792),
        *("--distil", 0.7),
        *("--epochs", 4),
    ),
    "eagle3": ("--draft-vocab", 8192, "--intermediate-size", 1792, "--epochs", 2),
    "dspark": ("--rank", 16, "--epochs", 1),
}
"""The kinds of drafts in the order in which they are trained, and their options."""
FORMATS = {"dflash": "zlab", "eagle3": "safeailab", "dspark": "specforge"}
FROM_DFLASH = ("dspark",)
RATE = 0.02


def options(parser: ArgumentParser) -> None:
    add_data(parser, "humaneval/test.jsonl and mbpp/test.jsonl, which no prompt may share words with,")
    parser.add_argument("--target", type=Path, required=True, metavar="FILE.gguf", help="the model")
    parser.add_argument(
        "--method", action="append", choices=list(DRAFTS), help="a kind of draft; may be repeated (all of them)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--steps", type=int, help="number of steps of each training, instead of its epochs")


def make(work: Work, options: Namespace) -> Made:
    prompts = work.folder / "prompts"
    if not prompts.exists():
        functions, asked = _invented(work, options)
        tell("writing prompts")
        _code_prompts.write(prompts, NUM_TASKS, NUM_DESCRIBED, functions, asked, Path(options.data))
    name = f"code-{options.target.stem}"
    made: dict[str, Path | str] = {}
    for method in options.method or DRAFTS:
        draft = trained(work, method, options)
        stored = work.folder / "int8" / method
        if not stored.exists():
            bench("convert", draft, stored, "--to", FORMATS[method], "--quantize", "int8", shown=True)
        made |= {f"drafts/{name}/{method}/{file.name}": file for file in sorted(stored.iterdir())}
        made |= {f"drafts/{name}/{method}/{file}": draft / file for file in CARD if (draft / file).exists()}
    return Made(made)


def _invented(work: Work, options: Namespace) -> list[list[_code_prompts.Row]]:
    """Return the functions and the tasks that the target makes up, which are made up once."""

    def made_up() -> str:
        author = _code_invented.Author(options.target, options.threads)
        functions = list(_code_invented.heads(author, NUM_INVENTED["functions"], BATCH, tell))
        return json.dumps([functions, list(_code_invented.tasks(author, NUM_INVENTED["tasks"], BATCH, tell))])

    made: list[list[_code_prompts.Row]] = json.loads(work.once("invented.json", made_up).read_text(encoding="utf-8"))
    return made


CARD = ("README.md", "acceptance.json", "history.json", "training.svg")


def trained(work: Work, method: str, options: Namespace) -> Path:
    """Return the folder of a trained draft, in bfloat16."""
    out = work.folder / "train"
    if not (out / method / CARD[0]).exists():
        given: list[object] = list(DRAFTS[method])
        if options.steps is not None:
            at = given.index("--epochs")
            given[at : at + 2] = ["--steps", options.steps]
        bench(
            "train",
            *("--target", options.target.resolve()),
            *("--out", out),
            *("--prompts", f"humaneval={work.folder / 'prompts' / 'functions.jsonl'}"),
            *("--prompts", f"mbpp={work.folder / 'prompts' / 'tasks.jsonl'}"),
            *(() if options.data == "hub" else ("--against", options.data)),
            *("--method", method),
            *(("--init", out / "dflash") if method in FROM_DFLASH else ()),
            *ANSWERS,
            *given,
            *("--slim", "--rate", RATE, "--threads", options.threads),
            shown=True,
        )
    return out / method
