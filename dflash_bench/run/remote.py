"""What `--server` makes of a request: its methods are those of the servers, and a target here only judges them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from dflash_bench import plugins
from dflash_bench.errors import UserError, unknown
from dflash_bench.methods import Method
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.run.request import Request
from dflash_bench.secrets import of_environment
from dflash_bench.servers import address, launching
from dflash_bench.servers.address import Access, Address, key_of

DIALECTS = ("vllm", "sglang", "llamacpp", "tensorrt_llm", "lmdeploy", "mlx", "openai")
"""As `servers.detection` has them, which loads an HTTP client."""
OF_SERVERS = ("dialect", "served_model", "api_key_env", "timeout", "env_proxy")
OF_ENGINES = {
    "methods": "--method", "drafts": "--draft", "block_size": "--block-size", "draft_steps": "--draft-steps",
    "one_at_a_time": "--one-at-a-time", "engine": "--engine", "graph": "--graph", "compiler": "--compile",
    "quantize": "--quantize",
}  # fmt: skip
OF_LAUNCHING = ("launch_with", "launch_args")
ALREADY_KNOWN = ("servers", "dialect", "served_model", "api_key_env", "env_proxy")
OF_ENGINES_ALONE = ("draft_steps", "engine", "graph", "compiler", "quantize")
FLAGS = {"servers": "--server", "compiler": "--compile"}
"""Where an option is called otherwise than its field."""
OF_TARGETS = {
    "device": "--device", "device_map": "--device-map", "dtype": "--dtype", "attention": "--attention",
    "threads": "--threads", "trust_remote_code": "--trust-remote-code", "audit": "--audit", "context": "--context",
}  # fmt: skip
"""What a server decides itself, so that it can only be said of a target here."""


def check(request: Request) -> None:
    """Raises UserError for options without effect, with servers or without."""
    if request.launch is None:
        _refuse(request, OF_LAUNCHING, "without --launch")
    if not request.asks_servers:
        _refuse(request, OF_SERVERS, "without --server")
        return
    if request.launch is not None:
        _refuse(request, ALREADY_KNOWN, "with --launch, which starts servers and knows them")
        _refuse(request, OF_ENGINES_ALONE, "with --launch: it is for the engine here")
        _check_timeout(request)
        return
    for name, flag in OF_ENGINES.items():
        if getattr(request, name) not in (None, False, ()):
            raise UserError(
                f"{flag} has no effect with --server: how a server drafts is said where it is started, and its method "
                "is the NAME of NAME=URL"
            )
    if not has_target(request):
        for name, flag in OF_TARGETS.items():
            if getattr(request, name) not in (None, False, ()):
                raise UserError(
                    f"{flag} has no effect with --server alone: give --model or --target too, the same weights as the "
                    "server's, to make its prompts and judge its answers here"
                )
    check_access(request)
    if request.audit == "divergent" and not any(method.name == BASELINE for method in methods_of(request)):
        raise UserError("--audit divergent has no effect without --server plain=URL, from which answers could diverge")


def check_access(request: Request) -> None:
    """Raises UserError for an unknown dialect, and for servers that could not be asked in this way."""
    if request.dialect is not None and request.dialect not in DIALECTS:
        added = plugins.found(plugins.DIALECTS)
        if request.dialect not in added:
            raise unknown("dialect", request.dialect, [*DIALECTS, *added])
    _check_timeout(request)
    access_of(request)


def _refuse(request: Request, names: Sequence[str], where: str) -> None:
    for name in names:
        if getattr(request, name) not in (None, False, ()):
            raise UserError(f"{FLAGS.get(name) or '--' + name.replace('_', '-')} has no effect {where}")


def _check_timeout(request: Request) -> None:
    if request.timeout is not None and not (math.isfinite(request.timeout) and request.timeout > 0):
        raise UserError(f"--timeout is a number of seconds above 0, not {request.timeout:g}")


def has_target(request: Request) -> bool:
    """Are the weights here, too?"""
    return request.model is not None or request.target is not None


def addresses_of(request: Request) -> list[Address]:
    return address.parse(request.servers)


def methods_of(request: Request) -> list[Method]:
    return [one.method for one in addresses_of(request)]


def model_of(request: Request) -> Preset:
    """Without drafts: the servers have their own."""
    if not has_target(request):
        return Preset("", {})
    return replace(presets.combine(request.model, request.target, {}), drafts={})


def access_of(request: Request) -> Access:
    """Raises UserError for a variable that holds no key."""
    timeout_s = request.timeout or Access().timeout_s
    if request.launch is not None:
        # These servers hold our environment, and want the key that they were started with.
        given = request.launch_args
        key = launching.key_of(launching.named(request.launch), given, os.environ)
        return Access(timeout_s, key, others=(*(given.secrets if given else ()), *of_environment(os.environ)))
    others = of_environment(os.environ) if request.env_proxy else ()
    if request.api_key_env is None:
        return Access(timeout_s, None, request.env_proxy, others)
    named = re.fullmatch("[A-Z_][A-Z0-9_]{0,99}", request.api_key_env)
    # What is given in place of a name may be the key itself.
    where = f"--api-key-env: the variable {request.api_key_env if named else 'of the name that was given'}"
    key_text = os.environ.get(request.api_key_env, "").strip()
    if not key_text:
        raise UserError(f"{where} is not set, or empty; give the name of one that holds the key, not the key")
    return Access(timeout_s, key_of(key_text, where), request.env_proxy, others)
