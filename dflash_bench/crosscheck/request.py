"""What a user asks of `crosscheck`: our side in the words of `run`, and the servers in those of `run --server`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_bench import methods
from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.results.plan import BASELINE
from dflash_bench.run import remote
from dflash_bench.run.request import Request
from dflash_bench.servers import address
from dflash_bench.servers.address import Address

EXAMPLE = "--server dflash=http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Asked:
    """`ours` says nothing of servers, `theirs` of nothing else."""

    ours: Request
    theirs: Request
    sends_chats: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and the method of ours that is to do the same."""

    address: Address
    method: Method


def places(asked: Asked) -> list[Place]:
    """Raises UserError where a server has no method of ours, and a method no server."""
    remote.check_access(asked.theirs)
    addresses = address.parse(asked.theirs.servers, needs_plain=False)
    if not addresses:
        raise UserError(f"nothing to check: give the server, as in {EXAMPLE}")
    if asked.ours.thinking == "both":
        raise UserError("crosscheck asks in one mode of thinking; give --thinking on or off")
    chosen = [methods.parse(text) for text in asked.ours.methods]
    by_server = {_server_of(method): method for method in chosen}
    if len(by_server) < len(chosen):
        raise UserError("each server is held against one method; give --method once for each NAME of --server")
    labels = [one.method.label for one in addresses]
    for label, method in by_server.items():
        if label not in labels:
            raise UserError(f"--method {method.label} has no server; give --server {label}=URL")
    found = [Place(one, by_server.get(one.method.label, one.method)) for one in addresses]
    for place in found:
        _refuse(place.method)
    return found


def _server_of(method: Method) -> str:
    """The NAME of its --server, which takes no options."""
    return method.label.partition(":")[0]


def _refuse(method: Method) -> None:
    if method.name == BASELINE:
        raise UserError("--server plain= drafts nothing; crosscheck is for servers that draft, so leave it out")
    if not method.kind.lossless or method.kind.is_probe:
        raise UserError(f"--server {method.label}= is no method of which a server's answers could be judged")


def with_methods(ours: Request, found: list[Place]) -> Request:
    return replace(ours, methods=tuple(place.method.label for place in found))
