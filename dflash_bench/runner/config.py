"""The options of a run as the user gave them, and which of them servers or engines need."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dflash_bench.core import shard
from dflash_bench.core.dialects import DIALECTS
from dflash_bench.core.errors import UserError
from dflash_bench.core.measurement import measurements
from dflash_bench.core.option import (
    MOST_AT_A_TIME,
    MOST_TOKENS,
    Condition,
    Range,
    check_threads,
    condition,
    context_lengths,
    numbers,
    under,
    unified,
    whole_numbers,
)
from dflash_bench.core.secrets import Arguments, arguments
from dflash_bench.core.types import Audit, is_greedy
from dflash_bench.runner import rules

# The options of a run as fields, in the order and under the headings of --help.
#
# A field defines its flag, its help, its key in a configuration file, when it has no effect, and its form in
# `run.json`. Contradictions that need no model or file are refused here.


# ruff: noqa: RUF009 - the calls make fields


_prompts, _models, _servers, _answers = under("Prompts"), under("Models"), under("Servers"), under("Answers")
_drafting, _measuring, _sweeping = under("Drafting"), under("Measuring"), under("Sweeping")
_machine, _results = under("Machine"), under("Results")
_ONE_WAY = "{{flag}} splits the target across processes that run transformers' code; leave {} out"
_SHARE = Range(
    lambda value: 0 < value < 1, "is a share between 0 and 1, not {values}; leave it out to draw from all tokens"
)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts."""

    suites: tuple[str, ...] = _prompts(
        "A suite or a group of suites, from 'dflash-bench suites', or several with commas.",
        brief="Suites of prompts, such as gsm8k or math.",
        default=(),
        flag="--suite",
        metavar="NAME[,NAME...]",
        has_commas=True,
    )
    prompts: Path | None = _prompts(
        "Your own prompts: JSON lines, a JSON array, Parquet, CSV or TSV with a prompt, question, instruction, text, "
        "turns or messages in each row; text with a prompt per line; or a folder of such files, of text with a prompt "
        "per file. Files of Spec-Bench, SPEED-Bench and ShareGPT work as they are.",
        brief="Your own prompts.",
        metavar="FILE|FOLDER",
    )
    prompt_column: str | None = _prompts(
        "The column of --prompts that holds the prompt, if it has another name.",
        metavar="NAME",
        needs=(condition(lambda options: options.prompts is not None, "without --prompts"),),
    )
    answer_column: str | None = _prompts(
        "The column of --prompts that holds the right answer, if it has another name.",
        metavar="NAME",
        needs=(condition(lambda options: options.prompts is not None, "without --prompts"),),
    )
    every_answer: bool = _prompts(
        "Of conversations in --prompts, generate each recorded answer again from what stood before it, not only the "
        "last. Intervals are then over conversations.",
        default=False,
        needs=(condition(lambda options: options.prompts is not None, "without --prompts"),),
        in_race=False,
    )
    score: str | None = _prompts(
        "How to score the answers to --prompts: a scorer from 'dflash-bench suites', such as gsm8k_number or math; or "
        "evaluate:FOLDER, a metric of the evaluate library on this disk (evaluate:FOLDER#FIGURE if it has several "
        "figures). With --trust-remote-code, also evaluate:NAME, a metric of the hub. These two also score suites that "
        "have references and no scorer.",
        metavar="NAME",
        check=rules.check_scorer,
        needs=(
            condition(
                lambda options: options.prompts is not None or (options.score or "").startswith("evaluate:"),
                "without --prompts: a suite says itself how it is scored",
            ),
        ),
        in_race=False,
    )
    """The scorer of `prompts`, and of suites without one if it is a metric of evaluate."""
    data: str | None = _prompts(
        "Where the suites' prompts come from: embedded (shipped with dflash-bench, the default for nano), hub (the "
        "default for all others), or a folder of files in the hub's columns.",
        metavar="FROM",
        needs=(condition(lambda options: bool(options.suites), "without --suite"),),
    )
    prompt_style: str = _prompts(
        "How the suites' prompts are worded: paper, with the instructions of the paper's harness (the default), or "
        "verbatim, the data set's text alone, as AIPerf asks.",
        default="paper",
        metavar="STYLE",
        kind="prompt style",
        choices=rules.prompt_styles,
        needs=(condition(lambda options: bool(options.suites), "without --suite"),),
        in_race=False,
    )
    limit: int | None = _prompts(
        "Use at most N prompts of each suite, the same ones on every machine.",
        brief="At most N prompts of each.",
        metavar="N",
        minimum=1,
        most=10**7,
    )
    skip: int | None = _prompts(
        "Leave out the first N prompts of those that --limit draws: --skip 8 --limit 16 measures the second eight.",
        metavar="N",
        minimum=1,
        most=10**7,
        in_race=False,
    )
    balance: str | None = _prompts(
        "Draw equally many prompts of each value of a column, such as category or language.",
        metavar="COLUMN",
        needs=(
            condition(
                lambda options: options.limit is not None or options.budget is not None,
                "without --limit or --for: all prompts are measured",
            ),
        ),
    )
    budget: str | None = _prompts(
        "Measure for this long, such as 90s, 5m or 1h, and choose prompts where intervals are widest, at most "
        "--limit of each suite. Loading models does not count; with --resume, earlier parts of the run do.",
        brief="Measure for this long, such as 5m.",
        flag="--for",
        metavar="TIME",
        check=rules.check_budget,
        conflicts=(
            rules.all_together("--concurrency", rules.is_concurrent),
            rules.all_together("--rate", lambda options: bool(options.rate)),
        ),
    )
    """The time limit, such as 5m; all prompts if absent."""
    thinking: str | None = _prompts(
        "The chat template's thinking mode: on, off, or both in one run. Default: the model's own, else off.",
        metavar="MODE",
        choices=lambda: list(rules.THINKING),
        kind="mode of thinking",
    )
    date: str | None = _prompts(
        "The date, such as 2026-11-26, that chat templates with a clock see. Default: today, or with --resume the "
        "run's own.",
        metavar="DATE",
        check=rules.check_date,
        conflicts=(rules.SERVED_ALONE,),
        in_race=False,
    )
    context: tuple[int | None, ...] = _prompts(
        "Pad every prompt to about N tokens, such as 4k, with other prompts of its source and their answers. "
        "Several, such as none,1k,4k, are measured side by side.",
        default=(),
        metavar="N[,N...]",
        parse=context_lengths,
        most=MOST_TOKENS,
        conflicts=(rules.SERVED_ALONE,),
    )
    """The lengths in tokens that prompts are padded to; None leaves them unpadded."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The weights, and how they draft."""

    methods: tuple[str, ...] = _models(
        "How tokens are drafted, from 'dflash-bench methods', or several with commas; NAME:N drafts N tokens per "
        "round. Default: dflash. Plain decoding always runs.",
        brief="How tokens are drafted.",
        default=(),
        flag="--method",
        metavar="NAME[@LABEL][:KEY=VALUE,...]",
        has_commas=True,
        conflicts=(rules.SERVED,),
    )
    model: str | None = _models(
        "A name from 'dflash-bench models', or a folder with target/ and a folder for each draft. Default: nano.",
        brief="A known model. Default: nano.",
        metavar="NAME",
    )
    target: str | None = _models(
        "Your own target instead of the model's: a folder or a hub id.",
        brief="Your own model.",
        metavar="PATH|ID[@REV]",
    )
    drafts: tuple[str, ...] = _models(
        "Your own draft instead of the model's, or beside it as NAME@LABEL: a folder or a hub id; may be repeated.",
        brief="Your own draft.",
        default=(),
        flag="--draft",
        metavar="NAME[@LABEL]=PATH|ID[@REV]",
        conflicts=(rules.SERVED,),
    )
    """METHOD=REFERENCE"""
    trust_remote_code: bool = _models(
        "Run Python code that comes with the target's checkpoint, or with a metric of the hub that --score names. "
        "Without it, such code never runs.",
        default=False,
        conflicts=(
            Condition(
                lambda options: rules.is_alone(options) and not (options.score or "").startswith("evaluate:"),
                rules.SERVED_ALONE.error,
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers that answer in place of the engine in this process."""

    servers: tuple[str, ...] = _servers(
        "Measure live servers instead of models loaded here: plain=URL for plain decoding, and dflash=URL or "
        "another method (NAME@LABEL=URL) for each server that drafts; a single one is measured without a speed-up. "
        "Give --model or --target, too, if the same weights are here, to send prompts as token ids and judge "
        "answers.",
        brief="A live server; plain=URL decodes without drafts.",
        default=(),
        flag="--server",
        metavar="NAME=URL",
        conflicts=(rules.LAUNCHED,),
    )
    """NAME=URL"""
    dialect: str | None = _servers(
        f"Kind of the servers: {', '.join(DIALECTS.own)} (openai is any compatible server). Default: recognised from "
        "their responses; mlx must be named.",
        metavar="NAME",
        choices=lambda: tuple(DIALECTS),
        needs=(rules.SERVERS,),
        conflicts=(rules.LAUNCHED,),
    )
    served_model: str | None = _servers(
        "The model to request, if a server has several. Default: its only one.",
        metavar="NAME",
        needs=(rules.SERVERS,),
        conflicts=(rules.LAUNCHED,),
    )
    api_key_env: str | None = _servers(
        "The environment variable that holds the servers' key. The key is sent to them, and never shown or saved.",
        metavar="VARIABLE",
        needs=(rules.SERVERS,),
        conflicts=(rules.LAUNCHED,),
    )
    """The environment variable that holds the key; a request never holds the key itself."""
    timeout: float | None = _servers(
        "Seconds after which an unfinished answer counts as failed. Default: 600.",
        metavar="S",
        range=Range(rules.above_zero, "is a number of seconds above 0, not {values}"),
        needs=(rules.SERVERS,),
    )
    env_proxy: bool = _servers(
        "Connect to the servers through the proxies named by environment variables.",
        default=False,
        needs=(rules.SERVERS,),
        conflicts=(rules.LAUNCHED,),
    )
    launch: str | None = _servers(
        "Start servers here, measure them and stop them: vllm, sglang, lmdeploy or llama.cpp, one for plain decoding "
        "and one for each --method. Their logs are kept in the run's folder.",
        metavar="PROGRAM",
    )
    """The name of a `dialects.Program`."""
    launch_with: str | None = _servers(
        "The program for --launch. Default: vllm, sglang, lmdeploy or llama-server, from the PATH.",
        metavar="PATH",
        needs=(rules.LAUNCH,),
    )
    launch_args: Arguments | None = _servers(
        "More options for each server of --launch, as in a shell: '--enforce-eager'.",
        metavar="TEXT",
        parse=arguments,
        needs=(rules.LAUNCH,),
    )
    rate: tuple[float, ...] = _servers(
        "Send R requests per second, at random times (Poisson, the same for each server), whether or not earlier "
        "ones have finished.",
        default=(),
        metavar="R[,R...]",
        parse=numbers,
        most=10**6,
        range=Range(rules.above_zero, "is a number of answers per second above 0, not {values}"),
        needs=(condition(rules.SERVERS.holds, "without --server: the engine here takes the next prompt when it can"),),
        conflicts=(
            Condition(
                lambda options: bool(options.concurrency),
                "--rate and --concurrency both say when a prompt is sent; give one of them",
                is_of_sweep=True,
            ),
        ),
        in_race=False,
    )
    clients: int = _servers(
        "Client processes that send the requests of --concurrency or --rate. A single process can time a few thousand "
        "chunks per second. With --ray-address they are spread over the machines of that cluster.",
        default=1,
        metavar="N",
        minimum=1,
        most=64,
        needs=(
            rules.SERVERS,
            condition(
                lambda options: bool(options.rate) or rules.is_concurrent(options),
                "without --rate or --concurrency: one request at a time needs one process",
                is_of_sweep=True,
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Decoding, drafting and checking of answers, and the settings that a sweep varies."""

    max_new_tokens: int | None = _answers(
        "Stop answers after N tokens. Default: 2048, and fewer for nano.", metavar="N", minimum=1, most=MOST_TOKENS
    )
    temperature: tuple[float, ...] = _answers(
        "0 is greedy decoding, where answers are checked token for token. Several, such as 0,1, are measured side "
        "by side.",
        default=(0.0,),
        metavar="T[,T...]",
        parse=numbers,
        range=Range(lambda value: math.isfinite(value) and value >= 0, "takes numbers from 0 up, not {values}"),
    )
    top_k: tuple[int, ...] = _answers(
        "Sample only from the K likeliest tokens.",
        default=(),
        metavar="K[,K...]",
        parse=whole_numbers,
        most=MOST_TOKENS,
        range=Range(lambda value: value >= 1, "is a number of tokens from 1 up, not {values}"),
        needs=(rules.TRUNCATES,),
    )
    top_p: tuple[float, ...] = _answers(
        "Sample only from the likeliest tokens whose probabilities add up to P.",
        default=(),
        metavar="P[,P...]",
        parse=numbers,
        range=_SHARE,
        needs=(rules.TRUNCATES,),
    )
    min_p: tuple[float, ...] = _answers(
        "Sample only from tokens at least P times as likely as the likeliest one.",
        default=(),
        metavar="P[,P...]",
        parse=numbers,
        range=_SHARE,
        needs=(rules.TRUNCATES,),
    )
    repetition_penalty: tuple[float, ...] = _answers(
        "Above 1, tokens that have already occurred become less likely.",
        default=(),
        metavar="R[,R...]",
        parse=numbers,
        range=Range(rules.above_zero, "takes numbers above 0 other than 1, which changes nothing; not {values}"),
        conflicts=(
            Condition(
                lambda options: options.repetition_penalty == (1,),
                "{flag} takes numbers above 0 other than 1, which changes nothing; not 1",
                is_of_sweep=True,
            ),
        ),
    )
    concurrency: tuple[int, ...] = _answers(
        "Answers decoded at the same time: when one ends, the next begins. Several, such as 1,4,16, are measured one "
        "after the other. Default: 1.",
        default=(),
        metavar="N[,N...]",
        parse=whole_numbers,
        most=MOST_AT_A_TIME,
        range=Range(lambda value: value >= 1, "is a number of answers from 1 up, not {values}"),
    )
    slo: str | None = _answers(
        "Count the answers per second that meet these limits, such as ttft=500ms,tpot=50ms (goodput), with --rate or "
        "--concurrency.",
        metavar="ttft=T,tpot=T",
        check=rules.objectives,
        needs=(
            condition(
                lambda options: bool(options.rate) or rules.is_concurrent(options),
                "without --rate or --concurrency: it counts answers per second",
                is_of_sweep=True,
            ),
        ),
        in_race=False,
    )
    """The latency objectives of a good answer, such as ttft=500ms,tpot=50ms."""
    seed: int | None = _answers(
        "Random seed for sampling at temperatures above 0.",
        metavar="S",
        minimum=0,
        most=2**63 - 1,
        needs=(
            condition(
                lambda options: options.samples,
                f"{rules.SAMPLES}; it seeds sampling (prompts are drawn by the suite's own seed)",
                is_of_sweep=True,
            ),
        ),
    )
    block_size: str | None = _drafting(
        "Block size for every method that drafts blocks and does not set block= itself. Several, such as 4,8,16, "
        "are measured side by side. Default: the draft's own.",
        metavar="B[,B...]",
        conflicts=(rules.SERVED,),
        in_race=False,
    )
    """A comma-separated list, like `draft_steps`."""
    draft_steps: str | None = _drafting(
        "Draft passes per block, for every method that has this option and does not set steps= itself.",
        metavar="S[,S...]",
        conflicts=(rules.SERVED, rules.ENGINE_HERE),
        in_race=False,
    )
    repeats: int = _measuring(
        "Answer every prompt R times with each method.",
        default=1,
        metavar="R",
        minimum=1,
        most=10**5,
        in_race=False,
    )
    audit: str | None = _measuring(
        "Which answers are checked token by token against transformers' own code: all (the default), divergent "
        "(only those that differ from the plain answer) or none.",
        metavar="WHICH",
        choices=lambda: get_args(Audit),
        needs=(rules.greedy("no single token is then the right one"),),
        conflicts=(rules.SERVED_ALONE,),
    )
    shard: str | None = _measuring(
        "Measure only part I of N, with prompts of every suite. 'dflash-bench merge' combines all N parts, which can "
        "be measured on different machines.",
        metavar="I/N",
        check=shard.parse,
        conflicts=(
            rules.unsharded("--concurrency", rules.is_concurrent),
            rules.unsharded("--rate", lambda options: bool(options.rate)),
            rules.unsharded("--for", lambda options: options.budget is not None),
            rules.unsharded("--workers", lambda options: options.workers is not None),
        ),
        in_race=False,
    )
    """I/N, see `core.shard.Shard`."""
    unsafe_code: bool = _measuring(
        "Run model-written code even where it cannot be sandboxed. Without it, such code is not run there.",
        default=False,
    )
    over: tuple[str, ...] = _sweeping(
        "Measure several values of a method's option (block=4,8,16) or of a setting (temperature=0,1) side by side; "
        "may be repeated.",
        default=(),
        metavar="NAME=V,V...",
        in_race=False,
    )
    """NAME=VALUE,VALUE, of an option or a setting."""
    one_at_a_time: bool = _sweeping(
        "Vary one option at a time, starting from --method, instead of trying all combinations.",
        default=False,
        needs=(condition(lambda options: bool(options.over), "without --over"),),
        conflicts=(rules.SERVED,),
        in_race=False,
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The device, dtype and engine that compute a model."""

    device: str | None = _machine(
        "cpu or cuda. Default: cpu for nano; for other models cuda if there is one.",
        metavar="D",
        conflicts=(rules.SERVED_ALONE, condition(lambda options: options.device_map is not None, "with --device-map")),
    )
    device_map: str | None = _machine(
        "Spread the target over all GPUs, if one cannot hold it.",
        metavar="auto",
        choices=lambda: ("auto",),
        kind="device map",
        conflicts=(rules.SERVED_ALONE,),
        in_race=False,
    )
    dtype: str | None = _machine(
        "float32, bfloat16, float16, or auto (the checkpoint's own). Default: float32 on the CPU, else bfloat16.",
        metavar="T",
        choices=lambda: rules.DTYPES,
        conflicts=(rules.SERVED_ALONE,),
    )
    attention: str | None = _machine(
        "sdpa or eager. Default: what transformers chooses for the target.",
        metavar="A",
        check=rules.check_attention,
        choices=lambda: rules.ATTENTION,
        conflicts=(
            rules.SERVED_ALONE,
            condition(
                lambda options: options.engine == "native",
                "on --engine native, which has its own; leave one of them out",
            ),
        ),
    )
    engine: str | None = _machine(
        "Forward pass of the target: native (our own) or transformers. Default: native, which is faster, if it covers "
        "the target and agrees with transformers. The judge always uses transformers.",
        metavar="E",
        choices=lambda: rules.ENGINES,
        conflicts=(rules.SERVED, rules.ENGINE_HERE),
    )
    """The code that computes the target."""
    kernels: str | None = _machine(
        "Kernels of --engine native on a CPU: numba, compiled for this processor (ten seconds, once), or torch. "
        "Default: numba, which is faster, if it covers the target and agrees with transformers.",
        metavar="K",
        choices=lambda: rules.KERNELS,
        conflicts=(
            rules.SERVED,
            rules.ENGINE_HERE,
            condition(
                lambda options: options.engine == "transformers", "on --engine transformers; leave one of them out"
            ),
            Condition(
                lambda options: options.kernels == "numba" and options.compile is not None,
                "--kernels numba are compiled already; leave them or --compile out",
            ),
        ),
    )
    graph: str | None = _machine(
        "Capture forward passes of target and drafts as CUDA graphs. Default: on with a GPU.",
        metavar="on|off",
        choices=lambda: ("on", "off"),
        conflicts=(
            rules.SERVED,
            rules.ENGINE_HERE,
        ),
    )
    compile: str | None = _machine(
        "inductor: compile forward passes of target and drafts before they are timed, half a minute each the first "
        "time. Needs a GPU: on a CPU, --kernels numba compiles.",
        metavar="C",
        kind="compiler",
        choices=lambda: ("inductor",),
        conflicts=(
            rules.SERVED,
            rules.ENGINE_HERE,
            Condition(
                lambda options: options.graph == "on",
                "--compile and --graph on: a pass is compiled or captured as a graph; leave one of them out",
            ),
            condition(
                lambda options: options.engine == "transformers", "on --engine transformers; leave one of them out"
            ),
            Condition(
                lambda options: options.quantize is not None,
                "{flag} is for --engine native, which computes plain weights only; leave it or --quantize out",
            ),
        ),
    )
    quantize: str | None = _machine(
        "Quantise the weights of the target's linear layers when it is loaded: int8, or nf4 or fp8, which need the "
        "packages of dflash-bench[quantize]. Drafts are not quantised.",
        metavar="Q",
        kind="quantisation",
        choices=rules.quantizations,
        conflicts=(
            rules.SERVED,
            rules.ENGINE_HERE,
            Condition(
                lambda options: (
                    options.quantize != "int8" and (options.engine == "native" or options.kernels is not None)
                ),
                "--engine native computes plain and int8 weights only; leave it and --kernels out, or {flag} {value}",
            ),
            Condition(
                lambda options: options.device_map is not None,
                "{flag} {value} is for one device, and --device-map for several; leave one of them out",
            ),
        ),
    )
    tensor_parallel: int = _machine(
        "Split every layer of the target across N processes, one per GPU, by transformers' plan for the architecture. "
        "Answers do not change.",
        default=1,
        metavar="N",
        minimum=1,
        most=64,
        conflicts=(
            rules.SERVED_ALONE,
            Condition(lambda options: options.workers is not None, _ONE_WAY.format("--workers")),
            Condition(lambda options: options.device_map is not None, _ONE_WAY.format("--device-map")),
            Condition(lambda options: options.quantize is not None, _ONE_WAY.format("--quantize")),
            Condition(lambda options: options.engine == "native", _ONE_WAY.format("--engine native")),
            Condition(lambda options: options.kernels is not None, _ONE_WAY.format("--kernels")),
            Condition(lambda options: options.capture is not None, _ONE_WAY.format("--graph and --compile")),
        ),
        in_race=False,
    )
    threads: int | None = _machine(
        "CPU threads. Default: 1, which is fastest for nano.",
        metavar="N",
        minimum=1,
        check=check_threads,
        conflicts=(rules.SERVED_ALONE,),
    )
    workers: int | None = _machine(
        "Measure prompts in N processes at the same time, each with its own models and its own processors or GPU; with "
        "--concurrency, one of them measures all prompts of a suite. The answers are the same; workers on one machine "
        "slow each other down, and their times are marked. Needs dflash-bench[ray].",
        metavar="N",
        minimum=1,
        most=10**4,
        conflicts=(
            rules.served_work("--launch", rules.LAUNCH.holds),
            rules.served_work("--server", rules.is_served),
            Condition(
                lambda options: options.device_map is not None,
                "{flag} take one GPU each, and --device-map all of them; leave one of them out",
            ),
            Condition(
                lambda options: (options.device or "").startswith("cuda:"),
                "{flag} take a GPU each: give --device cuda, not {options.device}",
            ),
        ),
    )
    """The number of worker processes; None: measure in this process."""
    ray_address: str | None = _machine(
        "A Ray cluster to run the workers or --clients in, whose machines have dflash-bench and the models' files in "
        "the same places as this one. Default: Ray is started here for workers, and listens on 127.0.0.1 only.",
        metavar="HOST:PORT",
        needs=(
            condition(
                lambda options: options.workers is not None or options.clients > 1, "without --workers or --clients"
            ),
            Condition(
                lambda options: options.device is not None or options.workers is None,
                "{flag} needs --device cpu or cuda: this machine does not show what the cluster has",
            ),
        ),
    )
    """The address of the cluster that workers or clients run in; None: on this machine."""


if TYPE_CHECKING:

    class MeasurementOptions:
        """The options of measurements, which only their files know by name."""
else:
    MeasurementOptions = make_dataclass(
        "MeasurementOptions",
        [(one.name, *one.option) for one in measurements() if one.option is not None],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class RunRequest(MachineOptions, MeasurementOptions, DecodingOptions, ServerOptions, ModelOptions, PromptOptions):
    """Everything that decides a measurement; the fields of the groups come from the last group to the first."""

    def __post_init__(self) -> None:
        unified(self)

    @property
    def name(self) -> str:
        """The name of the model, for people."""
        if self.servers and self.launch is None and self.model is None and self.target is None:
            return "server"
        return self.model or (self.target or "nano").partition("@")[0]

    @property
    def is_small(self) -> bool:
        """Whether it is nano, for which a GPU is slow."""
        return self.name == "nano"

    @property
    def asks_servers(self) -> bool:
        """Whether servers answer, already running or launched."""
        return bool(self.servers) or self.launch is not None

    @property
    def has_target(self) -> bool:
        """Whether this process has the target's weights, too, besides the servers."""
        return self.model is not None or self.target is not None

    @property
    def samples(self) -> bool:
        """Whether any temperature samples tokens."""
        return not all(map(is_greedy, self.temperature))

    @property
    def is_published_code(self) -> bool:
        """Whether the options require transformers' code for the target, and so rule out compiled kernels."""
        return self.engine == "transformers" or self.tensor_parallel > 1

    @property
    def capture(self) -> str | None:
        """How passes are captured (`engine/backend.py`); None is decided by the device."""
        return self.compile or {None: None, "on": "graph", "off": "off"}[self.graph]

    def only(self, group: type) -> RunRequest:
        """Return the options of one group, and defaults for all others."""
        return RunRequest(**{item.name: getattr(self, item.name) for item in fields(group)})

    def without(self, group: type) -> RunRequest:
        """Return the options with defaults for one group."""
        usual: dict[str, Any] = {item.name: item.default for item in fields(group)}
        return replace(self, **usual)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where a run is stored, and when it counts as failed; no measurement depends on it."""

    out: Path | None = _results(
        "Folder for the results. Default: results/runs/TIME-MODEL.",
        brief="Folder for the results.",
        letter="-o",
        metavar="DIR",
    )
    resume: bool = _results(
        "Continue the unfinished run in --out; give the other options again as they were. With --shard, start it if it "
        "does not exist.",
        default=False,
        needs=(Condition(lambda options: options.out is not None, "{flag} needs --out FOLDER, the run to continue"),),
    )
    save_config: Path | None = _results(
        "Also write the options of this run as a TOML file, for --config.", metavar="FILE"
    )
    allow: tuple[str, ...] = _results(
        "Exit with status 0 even if answers failed.",
        default=(),
        metavar="failed",
        kind="thing to allow",
        choices=lambda: ("failed",),
    )


DEMO = ("gsm8k", "math500", "humaneval", "mt_bench")
"""Embedded suites that are measured where no prompts are named."""
DEMO_LIMIT = 4


def with_demo(request: RunRequest) -> RunRequest:
    """Return the request with a few embedded prompts."""
    return replace(request, suites=DEMO, data="embedded", limit=request.limit or DEMO_LIMIT)


def require_prompts(request: RunRequest) -> None:
    """Raise UserError for a request without prompts."""
    if not request.suites and request.prompts is None:
        raise UserError(
            "no prompts given; try dflash-bench run --suite gsm8k ('dflash-bench suites' lists all), or --prompts FILE"
        )
