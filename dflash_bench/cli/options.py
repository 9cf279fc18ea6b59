"""The options of `run`, in the order and under the headings of its help, and what other commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option


def under(heading: str) -> Callable[..., Any]:
    return lambda *names, **settings: Option(*names, rich_help_panel=heading, **settings)


_prompts, _models, _answers = under("Prompts"), under("Models"), under("Answers")
_drafting, _sweeping, _measuring = under("Drafting"), under("Sweeping"), under("Measuring")
_machine, _results, _servers = under("Machine"), under("Results"), under("Servers")

Suites = Annotated[
    list[str] | None,
    _prompts(metavar="NAME", help="A suite or a group of suites, from 'dflash-bench suites'; may be repeated."),
]
Prompts = Annotated[
    Path | None,
    _prompts(
        metavar="FILE",
        help="Your own prompts: a file with one JSON object a line, with prompt, turns or messages; Spec-Bench files "
        "work too.",
    ),
]
Score = Annotated[
    str | None,
    _prompts(
        metavar="NAME",
        help="How to score the answers to --prompts: a scorer from 'dflash-bench suites', such as gsm8k_number or "
        "math.",
    ),
]
Data = Annotated[
    str | None,
    _prompts(
        metavar="FROM",
        help="Where the suites' prompts come from: embedded (shipped with dflash-bench, the default for nano), hub "
        "(the default for all else), or a folder of files in the hub's columns.",
    ),
]
Limit = Annotated[
    int | None,
    _prompts(metavar="N", min=1, help="Use at most N prompts of each suite, the same ones on every machine."),
]
For = Annotated[
    str | None,
    _prompts(
        "--for",
        metavar="TIME",
        help="Measure for this long, such as 90s, 5m or 1h, and choose prompts where intervals are widest, at most "
        "--limit "
        "of each suite. Loading models does not count; with --resume, earlier parts of the run do.",
    ),
]
Thinking = Annotated[
    str | None,
    _prompts(
        metavar="MODE",
        help="The chat template's thinking mode: on, off, or both in one run. Default: the model's own, else off.",
    ),
]
ContextLength = Annotated[
    str | None,
    _prompts(
        "--context",
        metavar="N[,N...]",
        help="Pad every prompt to about N tokens, such as 4k, with other prompts of its source and their answers. "
        "Several, such as none,1k,4k, are measured side by side.",
    ),
]
"""The old spelling, refused with the new one."""

Methods = Annotated[
    list[str] | None,
    _models(
        metavar="NAME[@LABEL][:KEY=VALUE,...]",
        help="How tokens are drafted, from 'dflash-bench methods'; NAME:N drafts N tokens a round. May be repeated. "
        "Default: dflash. Plain decoding always runs.",
    ),
]
Model = Annotated[
    str | None,
    _models(
        metavar="NAME",
        help="A name from 'dflash-bench models', or a folder with target/ and a folder for each draft. Default: nano.",
    ),
]
Target = Annotated[
    str | None, _models(metavar="PATH|ID[@REV]", help="Your own target instead of the model's: a folder or a hub id.")
]
Drafts = Annotated[
    list[str] | None,
    _models(
        metavar="NAME[@LABEL]=PATH|ID[@REV]",
        help="Your own draft instead of the model's, or beside it as NAME@LABEL: a folder or a hub id; may be "
        "repeated.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    _models(
        "--trust-remote-code",
        help="Run Python code that comes with the target's checkpoint. Without it, such code never runs.",
    ),
]

Servers = Annotated[
    list[str] | None,
    _servers(
        metavar="NAME=URL",
        help="Measure live servers instead of models loaded here: plain=URL for plain decoding, and dflash=URL or "
        "another method (NAME@LABEL=URL) for each server that drafts; a single one is measured without a speed-up. "
        "Give --model or --target too, if the same weights are here, to send prompts as token ids and judge answers.",
    ),
]
Dialect = Annotated[
    str | None,
    _servers(
        metavar="NAME",
        help="What the servers speak: vllm, sglang, llamacpp, tensorrt_llm, lmdeploy, mlx or openai (any compatible "
        "server). Default: what their pages say; mlx must be named.",
    ),
]
ServedModel = Annotated[
    str | None,
    _servers(metavar="NAME", help="The model to ask for, where a server has several. Default: the one that it has."),
]
ApiKeyEnv = Annotated[
    str | None,
    _servers(
        metavar="VARIABLE",
        help="The environment variable that holds the servers' key. The key is sent to them, and never shown or saved.",
    ),
]
Timeout = Annotated[
    float | None,
    _servers(metavar="S", help="Seconds after which an answer that has not ended counts as failed. Default: 600."),
]
EnvProxy = Annotated[
    bool, _servers("--env-proxy", help="Reach the servers through the proxies that environment variables name.")
]
Launch = Annotated[
    str | None,
    _servers(
        metavar="PROGRAM",
        help="Start servers here, measure them and stop them: vllm or llama.cpp, one for plain decoding and one for "
        "each --method. Their logs are kept in the run's folder.",
    ),
]
LaunchWith = Annotated[
    str | None,
    _servers(metavar="PATH", help="The program for --launch. Default: vllm or llama-server, from the PATH."),
]
LaunchArgs = Annotated[
    str | None,
    _servers(metavar="TEXT", help="More options for each server of --launch, as in a shell: '--enforce-eager'."),
]

MaxNewTokens = Annotated[
    int | None, _answers(metavar="N", min=1, help="Stop answers after N tokens. Default: 2048, and fewer for nano.")
]
Temperature = Annotated[
    str,
    _answers(
        metavar="T[,T...]",
        help="0 is greedy decoding, where answers are checked token for token. Several, such as 0,1, are measured side "
        "by side.",
    ),
]
TopK = Annotated[str | None, _answers(metavar="K[,K...]", help="Sample only from the K likeliest tokens.")]
TopP = Annotated[
    str | None,
    _answers(metavar="P[,P...]", help="Sample only from the likeliest tokens whose probabilities add up to P."),
]
MinP = Annotated[
    str | None,
    _answers(metavar="P[,P...]", help="Sample only from tokens at least P times as likely as the likeliest one."),
]
RepetitionPenalty = Annotated[
    str | None, _answers(metavar="R[,R...]", help="Above 1, tokens that have already occurred become less likely.")
]
Concurrency = Annotated[
    str | None,
    _answers(
        metavar="N[,N...]",
        help="Answers decoded at the same time: when one has ended, the next one begins. Several, such as 1,4,16, are "
        "measured one after the other. Default: 1.",
    ),
]
Rate = Annotated[
    str | None,
    _servers(
        metavar="R[,R...]",
        help="Ask for R answers per second, at random times (Poisson, the same ones for each server), whether earlier "
        "ones have ended or not.",
    ),
]
Slo = Annotated[
    str | None,
    _answers(
        metavar="ttft=T,tpot=T",
        help="Count the answers per second that keep to these times, such as ttft=500ms,tpot=50ms (goodput), with "
        "--rate or --concurrency.",
    ),
]
Seed = Annotated[int | None, _answers(metavar="S", min=0, help="Random seed for sampling at temperatures above 0.")]
BlockSize = Annotated[
    str | None,
    _drafting(
        metavar="B[,B...]",
        help="Block size for every method that drafts blocks and does not set block= itself. Several, such as 4,8,16, "
        "are "
        "measured side by side. Default: the draft's own.",
    ),
]
DraftSteps = Annotated[
    str | None,
    _drafting(
        metavar="S[,S...]",
        help="Draft passes per block, for every method that has this option and does not set steps= itself.",
    ),
]
Repeats = Annotated[int, _measuring(metavar="R", min=1, help="Answer every prompt R times with each method.")]

Audit = Annotated[
    str | None,
    _measuring(
        metavar="WHICH",
        help="Which answers are checked token by token against transformers' own code: all (the default), divergent "
        "(only "
        "those that differ from the plain answer) or none.",
    ),
]

Over = Annotated[
    list[str] | None,
    _sweeping(
        metavar="NAME=V,V...",
        help="Measure several values of a method's option (block=4,8,16) or of a setting (temperature=0,1) side by "
        "side; may be repeated.",
    ),
]
OneAtATime = Annotated[
    bool,
    _sweeping(
        "--one-at-a-time", help="Vary one option at a time, starting from --method, instead of trying all combinations."
    ),
]

Device = Annotated[
    str | None, _machine(metavar="D", help="cpu or cuda. Default: cpu for nano; for other models cuda if there is one.")
]
DeviceMap = Annotated[
    str | None, _machine(metavar="auto", help="Spread the target over all GPUs, when one cannot hold it.")
]
Dtype = Annotated[
    str | None,
    _machine(
        metavar="T",
        help="float32, bfloat16, float16, or auto (the checkpoint's own). Default: float32 on the CPU, else bfloat16.",
    ),
]
Attention = Annotated[
    str | None, _machine(metavar="A", help="sdpa or eager. Default: what transformers chooses for the target.")
]
Engine = Annotated[
    str | None,
    _machine(
        metavar="E",
        help="By whose code the target is computed: lean, our own, or transformers. Default: lean where it covers the "
        "target and says the same, for it is faster. The judge always asks transformers.",
    ),
]
Graph = Annotated[
    str | None,
    _machine(
        metavar="on|off",
        help="Capture passes of target and drafts as CUDA graphs. Default: on where a GPU and --engine lean compute.",
    ),
]
Compiler = Annotated[
    str | None,
    _machine(
        "--compile",
        metavar="C",
        help="inductor: compile passes of target and drafts before they are timed, half a minute each the first time. "
        "Needs a C++ compiler on a CPU.",
    ),
]
Quantize = Annotated[
    str | None,
    _machine(
        metavar="Q",
        help="Quantise the weights of the target's linear layers when it is loaded: int8, nf4 or fp8. Drafts stay as "
        "they are. Needs the packages of dflash-bench[quantize].",
    ),
]
Threads = Annotated[
    int | None, _machine(metavar="N", min=1, help="CPU threads. Default: 1, which is fastest for nano.")
]
Workers = Annotated[
    int | None,
    _machine(
        metavar="N",
        min=1,
        help="Measure prompts in N processes at a time, each with its own models and its own processors or GPU. The "
        "answers are the same; times of workers on one machine disturb each other, and are marked. Needs "
        "dflash-bench[ray].",
    ),
]
RayAddress = Annotated[
    str | None,
    _machine(
        metavar="HOST:PORT",
        help="A Ray cluster to run the workers in, whose machines have dflash-bench and the models' files in the same "
        "places as this one. Default: Ray is started here, and listens on 127.0.0.1 only.",
    ),
]
UnsafeCode = Annotated[
    bool,
    _measuring(
        "--unsafe-code",
        help="Run model-written code even where it cannot be sandboxed. Without it, such code is not run there.",
    ),
]

Out = Annotated[Path | None, _results(metavar="DIR", help="Folder for the results. Default: results/runs/TIME-MODEL.")]
Resume = Annotated[
    bool, _results("--resume", help="Continue the unfinished run in --out; give the other options again as they were.")
]
AsJson = Annotated[bool, _results("--json", help="Print one JSON object and nothing else.")]

Run = Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")]
Runs = Annotated[list[Path], Argument(metavar="RUN", help="Folders of finished runs of the same command.")]
Allow = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Continue despite what an error message refused under this name, and print it; may be repeated.",
    ),
]
AllowParts = Annotated[
    list[str] | None,
    Option(
        metavar="WHAT",
        help="Read the run even if parts of it are WHAT: unfinished, damaged, doubled, foreign or invalid; may be "
        "repeated.",
    ),
]
AllowFailed = Annotated[
    list[str] | None, _results("--allow", metavar="failed", help="Exit with status 0 even if answers failed.")
]
Limits = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help='TOML file with a table per figure, such as ["al.pooled"], that holds fall (0.05 for 5 %), at_least '
        "or run_noise.",
    ),
]
