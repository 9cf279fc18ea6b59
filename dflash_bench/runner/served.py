"""The servers of a request: which methods they are, and how they are reached.

With `--server`, the servers name the methods, and a target in this process only judges them.
"""

from __future__ import annotations

import os
import re

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.core.option import options_of, refuse_value
from dflash_bench.core.secrets import of_environment
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner.config import RunRequest
from dflash_bench.servers import address, launch
from dflash_bench.servers.address import Access, Address, key_of


def check(request: RunRequest) -> None:
    """Raise UserError for servers that cannot be measured with these options."""
    if not request.asks_servers or request.launch is not None:
        return
    check_access(request)
    if request.audit == "divergent" and not any(method.name == BASELINE for method in methods_of(request)):
        raise UserError("--audit divergent has no effect without --server plain=URL, from which answers could diverge")


def check_access(request: RunRequest) -> None:
    """Raise UserError for an unknown dialect, a time limit of zero, and a missing key."""
    for name in ("dialect", "timeout"):
        spec = options_of(RunRequest)[name]
        if spec.is_given(request):
            refuse_value(spec, getattr(request, name))
    access_of(request)


def addresses_of(request: RunRequest) -> list[Address]:
    return address.parse(request.servers)


def methods_of(request: RunRequest) -> list[Method]:
    return [one.method for one in addresses_of(request)]


def access_of(request: RunRequest) -> Access:
    """Return how to reach the servers. Raises UserError for a variable that holds no key."""
    timeout_s = request.timeout or Access().timeout_s
    if request.launch is not None:
        # Launched servers inherit our environment, and require the key they were started with.
        given = request.launch_args
        key = launch.key_of(launch.program_named(request.launch), given, os.environ)
        return Access(timeout_s, key, others=(*(given.secrets if given else ()), *of_environment(os.environ)))
    others = of_environment(os.environ) if request.env_proxy else ()
    if request.api_key_env is None:
        return Access(timeout_s, None, request.env_proxy, others)
    named = re.fullmatch("[A-Z_][A-Z0-9_]{0,99}", request.api_key_env)
    # The user may have given the key itself in place of its name.
    where = f"--api-key-env: the variable {request.api_key_env if named else 'of the name that was given'}"
    key_text = os.environ.get(request.api_key_env, "").strip()
    if not key_text:
        raise UserError(f"{where} is not set, or empty; give the name of one that holds the key, not the key")
    return Access(timeout_s, key_of(key_text, where), request.env_proxy, others)
