"""The options of `run`, in the order and under the headings of its help, and what other commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option


def _under(heading: str) -> Callable[..., Any]:
    return lambda *names, **settings: Option(*names, rich_help_panel=heading, **settings)


_asked, _models, _decoding = _under("What is asked"), _under("Models"), _under("Decoding")
_sweeping, _machine, _results = _under("Sweeping"), _under("Machine"), _under("Results")

Suites = Annotated[
    list[str] | None, _asked(metavar="NAME", help="Suite or group; may be repeated. See 'dflash-bench suites'.")
]
Prompts = Annotated[
    Path | None,
    _asked(
        metavar="FILE",
        help="Your own prompts, one JSON object a line: prompt, turns or messages. Spec-Bench's will do.",
    ),
]
Score = Annotated[
    str | None,
    _asked(
        metavar="NAME", help="How the answers to --prompts are scored, by the scorer of a suite: gsm8k_number, math..."
    ),
]
Data = Annotated[str | None, _asked(metavar="FROM", help="Where rows come from: embedded, hub, or a folder.")]
Limit = Annotated[int | None, _asked(metavar="N", min=1, help="Prompts per suite, drawn by id; the same everywhere.")]
For = Annotated[
    str | None,
    _asked(
        "--for",
        metavar="TIME",
        help="Measure so long, as 90s, 5m or 1h: prompts where intervals are widest, at most --limit of a suite. "
        "Models are loaded before. With --resume it is the time of all parts of the run together.",
    ),
]
Thinking = Annotated[
    str | None,
    _asked(
        metavar="MODE",
        help="The chat template's mode: on, off, or both in one run. If absent, the model's own default, else off.",
    ),
]
NoThinking = Annotated[bool, Option("--no-thinking", hidden=True)]
"""The old spelling, refused with the new one."""

Methods = Annotated[
    list[str] | None,
    _models(
        metavar="NAME[@LABEL][:KEY=VALUE,...]",
        help="How tokens are drafted, dflash if absent: see 'dflash-bench methods'. NAME:N drafts N tokens a round. "
        "May be repeated; plain decoding always runs.",
    ),
]
Model = Annotated[
    str | None,
    _models(
        metavar="NAME",
        help="nano (the default), a preset of 'dflash-bench models', or a folder with target/ and a folder per draft.",
    ),
]
Target = Annotated[
    str | None, _models(metavar="PATH|ID[@REV]", help="A target of your own, a folder or hub id, for the model's.")
]
Drafts = Annotated[
    list[str] | None,
    _models(
        metavar="NAME[@LABEL]=PATH|ID[@REV]",
        help="A draft of your own, in place of the model's, or beside it as NAME@LABEL; may be repeated.",
    ),
]
TrustRemoteCode = Annotated[
    bool, _models("--trust-remote-code", help="Run the code that the target's checkpoint brings. Never otherwise.")
]

MaxNewTokens = Annotated[int | None, _decoding(metavar="N", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    str,
    _decoding(
        metavar="T[,T...]",
        help="0 is greedy, and checked token for token. Several, as 0,1, are measured side by side in one run.",
    ),
]
TopK = Annotated[str | None, _decoding(metavar="K[,K...]", help="Draw from the K likeliest tokens only.")]
TopP = Annotated[
    str | None, _decoding(metavar="P[,P...]", help="Draw from the likeliest tokens that together hold the share P.")
]
MinP = Annotated[
    str | None, _decoding(metavar="P[,P...]", help="Draw from tokens at least P times as likely as the likeliest.")
]
RepetitionPenalty = Annotated[
    str | None, _decoding(metavar="R[,R...]", help="Above 1, tokens that were already there become less likely.")
]
Seed = Annotated[int | None, _decoding(metavar="S", min=0, help="Seed of sampling at temperature above 0.")]
BlockSize = Annotated[
    str | None,
    _decoding(
        metavar="B[,B...]",
        help="NAME:block=B for every method that drafts blocks and says no size itself; the draft's own if absent. "
        "Several, as 4,8,16, are measured side by side.",
    ),
]
DraftSteps = Annotated[
    str | None,
    _decoding(
        metavar="S[,S...]",
        help="NAME:steps=S for every method that can draft a block in several passes and says no number.",
    ),
]
Repeats = Annotated[int, _decoding(metavar="R", min=1, help="Generations per prompt and method.")]

Audit = Annotated[
    str | None,
    _decoding(
        metavar="WHICH",
        help="Which answers transformers' own forward checks token by token: all (the default), divergent (those that "
        "leave the plain answer) or none.",
    ),
]

Over = Annotated[
    list[str] | None,
    _sweeping(
        metavar="NAME=V,V...",
        help="Values of an option of a method, or of a setting such as temperature, side by side; may be repeated.",
    ),
]
OneAtATime = Annotated[
    bool,
    _sweeping("--one-at-a-time", help="Vary each option alone, from the methods as given; else all combinations."),
]

Device = Annotated[
    str | None, _machine(metavar="D", help="cpu or cuda; cuda if absent and there is one, but cpu for nano.")
]
DeviceMap = Annotated[
    str | None, _machine(metavar="auto", help="Spread the target over all GPUs, where one cannot hold it.")
]
Dtype = Annotated[
    str | None,
    _machine(
        metavar="T",
        help="float32, bfloat16, float16, or auto, the checkpoint's own. If absent, float32 on the CPU, else bfloat16.",
    ),
]
Attention = Annotated[
    str | None, _machine(metavar="A", help="sdpa or eager; if absent, what transformers takes for the target.")
]
Threads = Annotated[
    int | None, _machine(metavar="N", min=1, help="CPU threads; 1 if absent, which is fastest for nano.")
]
UnsafeCode = Annotated[
    bool,
    _machine(
        "--unsafe-code", help="Without a cage for it, run code that a model wrote all the same; else it is not run."
    ),
]

Out = Annotated[Path | None, _results(metavar="DIR", help="Folder for the results; results/runs/TIME-MODEL if absent.")]
Resume = Annotated[bool, _results("--resume", help="Continue the run in --out.")]
AsJson = Annotated[bool, _results("--json", help="Print one JSON object and nothing else.")]

Run = Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")]
Runs = Annotated[list[Path], Argument(metavar="RUN...", help="Folders of finished runs of one command.")]
Allow = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Go on in spite of a difference, and print it; may be repeated. The refusal says which NAME.",
    ),
]
AllowParts = Annotated[
    list[str] | None,
    Option(metavar="WHAT", help="unfinished, damaged, doubled, foreign or invalid; may be repeated."),
]
AllowFailed = Annotated[
    list[str] | None, _results("--allow", metavar="failed", help="Exit with status 0 although answers failed.")
]
Limits = Annotated[
    Path | None, Option(metavar="FILE", help="TOML: a table per figure, with fall (a share), at_least and run_noise.")
]
