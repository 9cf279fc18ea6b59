"""What `--server` makes of a request: its methods are those of the servers, and a target here only judges them."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.run.option import options_of, refuse_value
from dflash_bench.run.request import Request
from dflash_bench.secrets import of_environment
from dflash_bench.servers import address, launching
from dflash_bench.servers.address import Access, Address, key_of


def check(request: Request) -> None:
    """Raises UserError for servers that could not be asked in this way."""
    if not request.asks_servers or request.launch is not None:
        return
    check_access(request)
    if request.audit == "divergent" and not any(method.name == BASELINE for method in methods_of(request)):
        raise UserError("--audit divergent has no effect without --server plain=URL, from which answers could diverge")


def check_access(request: Request) -> None:
    """Raises UserError for an unknown dialect, for no time at all, and for a key that is not there."""
    for name in ("dialect", "timeout"):
        spec = options_of(Request)[name]
        if spec.is_given(request):
            refuse_value(spec, getattr(request, name))
    access_of(request)


def addresses_of(request: Request) -> list[Address]:
    return address.parse(request.servers)


def methods_of(request: Request) -> list[Method]:
    return [one.method for one in addresses_of(request)]


def model_of(request: Request) -> Preset:
    """Without drafts: the servers have their own."""
    if not request.has_target:
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
