"""The options of `run` as the user gave them, and those that make no sense before anything is looked at."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from dflash_bench.errors import UserError, unknown
from dflash_bench.models import quantizing
from dflash_bench.records import Audit, is_greedy
from dflash_bench.run import budget
from dflash_bench.secrets import Arguments
from dflash_bench.tasks import scoring, suites
from dflash_bench.text import shortened

DTYPES = ("float32", "bfloat16", "float16", "auto")
ATTENTION = ("sdpa", "eager")
ENGINES = ("lean", "transformers")
"""What takes the mask of this engine, which tells ragged rows and the branches of a tree apart."""
THINKING: dict[str, tuple[bool, ...]] = {"on": (True,), "off": (False,), "both": (False, True)}


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `run` as the user gave them; None is "not given"."""

    suites: tuple[str, ...]
    methods: tuple[str, ...]
    model: str | None = None
    target: str | None = None
    drafts: tuple[str, ...] = ()
    """METHOD=REFERENCE"""
    data: str | None = None
    prompts: Path | None = None
    score: str | None = None
    """The scorer of `prompts`."""
    limit: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    temperatures: tuple[float, ...] = (0.0,)
    top_k: tuple[int, ...] = ()
    top_p: tuple[float, ...] = ()
    min_p: tuple[float, ...] = ()
    repetition_penalty: tuple[float, ...] = ()
    concurrency: tuple[int, ...] = ()
    context: tuple[int | None, ...] = ()
    """Tokens that prompts are padded to; None among them is as they are."""
    block_size: str | None = None
    """One, or several with commas between them; and so `draft_steps`."""
    draft_steps: str | None = None
    budget: str | None = None
    """How long to measure, such as 5m; all prompts if absent."""
    over: tuple[str, ...] = ()
    """NAME=VALUE,VALUE, of an option or a setting."""
    one_at_a_time: bool = False
    repeats: int = 1
    threads: int | None = None
    device: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    attention: str | None = None
    engine: str | None = None
    """By whose code the target is computed: lean or transformers."""
    graph: str | None = None
    """on or off."""
    compiler: str | None = None
    """inductor."""
    quantize: str | None = None
    """A key of `quantizing.PACKAGES`."""
    thinking: str | None = None
    """A key of `THINKING`."""
    trust_remote_code: bool = False
    unsafe_code: bool = False
    audit: str | None = None
    servers: tuple[str, ...] = ()
    """NAME=URL"""
    launch: str | None = None
    """A key of `launching.PROGRAMS`."""
    launch_with: str | None = None
    launch_args: Arguments | None = None
    dialect: str | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    """The variable of the environment that holds the key; the key itself is nowhere in a request."""
    timeout: float | None = None
    env_proxy: bool = False
    workers: int | None = None
    """Processes that measure; None: this one."""
    ray_address: str | None = None
    """Of the cluster that they are to run in; None: on this machine."""
    rate: tuple[float, ...] = ()
    slo: str | None = None
    """What a good answer keeps to, such as ttft=500ms,tpot=50ms."""

    @property
    def name(self) -> str:
        """Of the model, for people."""
        if self.servers and self.launch is None and self.model is None and self.target is None:
            return "server"
        return self.model or (self.target or "nano").partition("@")[0]

    @property
    def asks_servers(self) -> bool:
        """Those that run already, or that are launched?"""
        return bool(self.servers) or self.launch is not None

    @property
    def samples(self) -> bool:
        """Is there a temperature at which tokens are drawn?"""
        return not all(map(is_greedy, self.temperatures))

    @property
    def capture(self) -> str | None:
        """How passes are captured (`engine/capturing.py`); None is decided by the device."""
        return self.compiler or {None: None, "on": "graph", "off": "off"}[self.graph]


def check(request: Request) -> None:
    """Raises UserError for options without effect, and for values that nothing here knows."""
    _refuse_what_has_no_effect(request)
    _refuse_unknown_values(request)


def _refuse_what_has_no_effect(request: Request) -> None:
    if not request.suites and request.prompts is None:
        known = [*suites.known_suites(), *suites.known_groups()]
        raise UserError(f"nothing to run: give --suite ({', '.join(known)}) or --prompts FILE.jsonl")
    if request.data is not None and not request.suites:
        raise UserError("--data has no effect without --suite")
    if request.score is not None and request.prompts is None:
        raise UserError("--score has no effect without --prompts: a suite says itself how it is scored")
    if request.score is not None and request.score not in scoring.SCORERS:
        raise unknown("scorer", request.score, list(scoring.SCORERS))
    if request.seed is not None and not request.samples:
        raise UserError(
            "--seed has no effect at temperature 0; it seeds sampling (prompts are drawn by the suite's own seed)"
        )
    for flag in ("top_k", "top_p", "min_p"):
        if getattr(request, flag) and not request.samples:
            raise UserError(f"--{flag.replace('_', '-')} has no effect at temperature 0, where the best token is taken")


MOST = {"limit": 10**7, "max_new_tokens": 10**7, "repeats": 10**5, "seed": 2**63 - 1}
"""Far more than any run takes: a slip of the keyboard must not run for ever."""


def _refuse_endless(request: Request) -> None:
    for name, most in MOST.items():
        value = getattr(request, name)
        if value is not None and value > most:
            raise UserError(f"--{name.replace('_', '-')} takes at most {most:,}, not {shortened(str(value), 40)}")


def _refuse_unknown_values(request: Request) -> None:
    """What can be told before anything heavy is loaded."""
    _refuse_endless(request)
    if not all(math.isfinite(temperature) and temperature >= 0 for temperature in request.temperatures):
        raise UserError(f"--temperature takes numbers from 0 up, not {_listed(request.temperatures)}")
    if len(set(request.temperatures)) < len(request.temperatures):
        raise UserError(f"--temperature names one twice: {_listed(request.temperatures)}")
    _refuse_unknown_sampling(request)
    if request.thinking is not None and request.thinking not in THINKING:
        raise unknown("mode of thinking", request.thinking, list(THINKING))
    if request.audit is not None and request.audit not in get_args(Audit):
        raise unknown("audit", request.audit, list(get_args(Audit)))
    if request.audit is not None and not any(map(is_greedy, request.temperatures)):
        raise UserError("--audit has no effect above temperature 0: no single token is then the right one")
    if request.budget is not None:
        budget.seconds(request.budget)
    _refuse_concurrency(request)
    _refuse_rates(request)
    _refuse_workers(request)
    if request.dtype not in (None, *DTYPES):
        raise unknown("dtype", request.dtype, list(DTYPES))
    if request.threads is not None and request.threads > (os.cpu_count() or 1):
        raise UserError(f"--threads {request.threads} is more than the processors of this machine, {os.cpu_count()}")
    if request.device_map not in (None, "auto"):
        raise unknown("device map", request.device_map, ["auto"])
    if request.device_map is not None and request.device is not None:
        raise UserError("--device has no effect with --device-map")
    if request.engine not in (None, *ENGINES):
        raise unknown("engine", request.engine, list(ENGINES))
    if request.engine == "lean" and request.attention is not None:
        raise UserError("--attention has no effect on --engine lean, which has its own; leave one of them out")
    _refuse_captures(request)
    if request.quantize is not None:
        _refuse_quantization(request, request.quantize)
    if (request.attention or "").startswith("flash"):
        raise UserError(
            f"--attention {request.attention} takes no mask, and this engine needs one for ragged rows and trees; "
            f"use {' or '.join(ATTENTION)}"
        )
    if request.attention not in (None, *ATTENTION):
        raise unknown("attention", request.attention, list(ATTENTION))


def _refuse_captures(request: Request) -> None:
    if request.graph not in (None, "on", "off"):
        raise unknown("graph", request.graph, ["on", "off"])
    if request.compiler not in (None, "inductor"):
        raise unknown("compiler", request.compiler, ["inductor"])
    if request.compiler is not None and request.graph == "on":
        raise UserError("--compile and --graph on: a pass is compiled or captured as a graph; leave one of them out")
    option = "--compile" if request.compiler is not None else "--graph on" if request.graph == "on" else None
    if option is None:
        return
    if request.engine == "transformers":
        raise UserError(f"{option} has no effect on --engine transformers; leave one of them out")
    if request.quantize is not None:
        raise UserError(f"{option} is for --engine lean, which computes plain weights only; leave it or --quantize out")


def _refuse_quantization(request: Request, kind: str) -> None:
    if kind not in quantizing.PACKAGES:
        raise unknown("quantisation", kind, list(quantizing.PACKAGES))
    if request.engine == "lean":
        raise UserError(f"--engine lean computes plain weights only; leave it out, or --quantize {kind}")
    if request.device_map is not None:
        raise UserError(f"--quantize {kind} is for one device, and --device-map for several; leave one of them out")


def _refuse_concurrency(request: Request) -> None:
    if any(value < 1 for value in request.concurrency):
        raise UserError(f"--concurrency is a number of answers from 1 up, not {_listed(request.concurrency)}")
    if request.budget is not None and max(request.concurrency, default=1) > 1:
        raise UserError(
            "--for measures prompt by prompt, and --concurrency all prompts of a suite together; use --limit instead"
        )


def _refuse_workers(request: Request) -> None:
    if request.workers is None:
        if request.ray_address is not None:
            raise UserError("--ray-address has no effect without --workers")
        return
    if request.asks_servers:
        flag = "--launch" if request.launch else "--server"
        raise UserError(
            f"--workers has no effect with {flag}: a server does the work; --concurrency asks it for several answers "
            "at a time"
        )
    for flag, given in (("--for", request.budget), ("--concurrency", max(request.concurrency, default=1) > 1)):
        if given:
            raise UserError(
                f"--workers measure one prompt each at a time, and {flag} is for one process; leave one out"
            )
    if request.device_map is not None:
        raise UserError("--workers take one GPU each, and --device-map all of them; leave one of them out")
    if (request.device or "").startswith("cuda:"):
        raise UserError(f"--workers take a GPU each: give --device cuda, not {request.device}")
    if request.ray_address is not None and request.device is None:
        raise UserError("--ray-address needs --device cpu or cuda: this machine does not show what the cluster has")


def _refuse_rates(request: Request) -> None:
    if request.rate and not request.asks_servers:
        raise UserError("--rate has no effect without --server: the engine here takes the next prompt when it can")
    if any(not math.isfinite(value) or value <= 0 for value in request.rate):
        raise UserError(f"--rate is a number of answers per second above 0, not {_listed(request.rate)}")
    if request.rate and request.concurrency:
        raise UserError("--rate and --concurrency both say when a prompt is sent; give one of them")
    if request.rate and request.budget is not None:
        raise UserError(
            "--for measures prompt by prompt, and --rate all prompts of a suite together; use --limit instead"
        )
    if request.slo is not None:
        objectives(request.slo)
        if not request.rate and max(request.concurrency, default=1) == 1:
            raise UserError("--slo has no effect without --rate or --concurrency: it counts answers per second")


def objectives(text: str) -> dict[str, float]:
    """Seconds by `ttft_s` and `tpot_s`, of `ttft=500ms,tpot=0.05s` or one of them. Raises UserError otherwise."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot)=([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|s)", part)
        if match is None or float(match[2]) == 0 or f"{match[1]}_s" in limits:
            raise UserError(f"--slo takes times with their units, such as ttft=500ms,tpot=50ms, not '{text[:40]}'")
        limits[f"{match[1]}_s"] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return limits


def _refuse_unknown_sampling(request: Request) -> None:
    if any(value < 1 for value in request.top_k):
        raise UserError(f"--top-k is a number of tokens from 1 up, not {_listed(request.top_k)}")
    for flag, value in [*(("--top-p", p) for p in request.top_p), *(("--min-p", p) for p in request.min_p)]:
        if not 0 < value < 1:
            raise UserError(f"{flag} is a share between 0 and 1, not {value:g}; leave it out to draw from all tokens")
    for penalty in request.repetition_penalty:
        if not math.isfinite(penalty) or penalty <= 0 or (penalty == 1 and len(request.repetition_penalty) == 1):
            raise UserError(
                f"--repetition-penalty is a number above 0 other than 1, which changes nothing; not {penalty:g}"
            )


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
