"""The connection to Ray: a cluster that is there, or one started on this machine.

Ray is imported only here, and only when needed. Started here it listens on 127.0.0.1, shows no dashboard and sends no
usage statistics.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from dflash_bench.core.errors import UserError, first_line
from dflash_bench.core.terminal import status

CONNECT_S = 5.0
STORE_BYTES = 100 * 2**20
"""Bytes of Ray's object store, for prompts and rows between driver and workers; weights never pass through it."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    # Otherwise Ray warns that it keeps CUDA_VISIBLE_DEVICES where a worker requests no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
PRIVATE = {
    # Without this Ray replaces 127.0.0.1 by the machine's network address, and listens there.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # With a token in the environment Ray writes none into the user's home.
    "RAY_AUTH_MODE": "token",
}


def require_ray(flag: str) -> None:
    if find_spec("ray") is None:
        raise UserError(f"{flag} needs the package ray: pip install 'dflash-bench[ray]'")


def refuse_silent(address: str) -> None:
    """Raise UserError for an invalid address, and if nothing answers there: Ray would retry for minutes."""
    match = re.fullmatch(r"([^:/\s]+):([0-9]{1,5})", address)
    if match is None:
        raise UserError(f"--ray-address takes HOST:PORT, such as 10.0.0.1:6379, not {address[:60]}")
    try:
        socket.create_connection((match[1], int(match[2])), timeout=CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(f"nothing answers at --ray-address {address}: {error}; see 'ray start --head'") from error


def connect(address: str | None, num_cpus: int = 0) -> Any:
    """Connect Ray to the given cluster, or start one on this machine; return the module."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    if address is None:
        os.environ.update(PRIVATE | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray

    usual = {"log_to_driver": False, "logging_level": logging.ERROR}
    with status() as tell, _sigterm_kept():
        if address is None:
            tell("starting Ray on this machine")
            ray.init(
                address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=STORE_BYTES, **usual
            )
            return ray
        tell(f"connecting to Ray at {address}")
        try:
            ray.init(address=address, **usual)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            remedy = "if that cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            raise UserError(f"--ray-address {address}: {first_line(error)[:200]}; {remedy}") from error
    return ray


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler that `ray.init` replaces: Ray's would end this process with status 1."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    ended = False
    try:
        yield
    except SystemExit:  # Ray's handler, once it has ended its processes
        ended = True
    finally:
        signal.signal(signal.SIGTERM, handler)
    if ended:
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def user_errors(ray: Any) -> Iterator[None]:
    """Raise an actor's UserError as it is, and any other error with the actor's traceback."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise


def leave() -> None:
    """Leave the cluster, which ends what this process started there."""
    import ray

    ray.shutdown()
