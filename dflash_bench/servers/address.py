"""Parse `--server NAME=URL`: the method that a server's answers are recorded under, and its address."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.core.secrets import Secret, hidden
from dflash_bench.results.plan import BASELINE

LONGEST_URL = 2000
HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
NAME = re.compile(r"[a-z0-9_-]{1,64}(@[A-Za-z0-9._-]{1,64})?")
"""A method and its label, safe to quote in an error."""
KEY = re.compile(r"[!-~]{1,8000}")
"""Anything that fits into a header."""
EXAMPLE = "--server plain=http://127.0.0.1:8000 --server dflash=http://127.0.0.1:8001"


@dataclass(frozen=True, slots=True)
class Address:
    """`url` has no credentials, no query and no /v1 at its end."""

    method: Method
    url: str
    shown: str | None = None
    """Stored in place of a URL that changes from run to run."""
    imposed: tuple[float, ...] = ()
    """The acceptance rates it was started with, as in `LaunchSpec`."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach servers. The key and `others`, which servers may echo, are never printed or stored."""

    timeout_s: float = 600.0
    """Time limit of a complete answer."""
    api_key: Secret | None = None
    uses_proxies: bool = False
    """Use the proxies that the environment names."""
    others: tuple[Secret, ...] = ()

    def hidden(self, text: str) -> str:
        """Hide secrets in a text that a server sent."""
        return hidden(text, self.others if self.api_key is None else (self.api_key, *self.others))


def is_loopback(url: str) -> bool:
    """Return whether an address leads to the machine that uses it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def key_of(text: str, where: str) -> Secret:
    """Return the key. Raises UserError, which does not quote it, for an invalid key."""
    if not KEY.fullmatch(text):
        raise UserError(
            f"{where} holds no key: a key is one line of at most 8000 printable ASCII characters, without spaces"
        )
    return Secret(text)


def parse(texts: Sequence[str], needs_plain: bool = True) -> list[Address]:
    """Return the addresses, plain decoding first. Raises UserError if one is malformed, or several lack plain."""
    addresses: dict[str, Address] = {}
    for text in texts:
        address = _parse(text)
        if address.method.label in addresses:
            raise UserError(f"--server {text}: {address.method.label} is given twice; label one, as in dflash@a=URL")
        addresses[address.method.label] = address
    if not needs_plain or len(addresses) == 1:
        return list(addresses.values())
    if BASELINE not in addresses:
        raise UserError(
            f"--server: there is no server for plain decoding, against which several are measured; add one that drafts "
            f"nothing, as in {EXAMPLE}, or measure each by itself"
        )
    return [addresses.pop(BASELINE), *addresses.values()]


def _parse(text: str) -> Address:
    name, equals, url = text.partition("=")
    # Neither the URL nor a malformed name is shown: either may hold a password.
    if not equals or not NAME.fullmatch(name.partition(":")[0]) or "/" in name:
        raise UserError(f"--server takes NAME=URL, as in {EXAMPLE}")
    if ":" in name:
        name = name.partition(":")[0]
        raise UserError(f"--server {name}: a server decides itself how many tokens it drafts; write {name}=URL")
    method = methods.parse(name)
    if method.name == methods.SYNTHETIC:
        raise UserError(
            f"--server {name}: at which rates a server was started to accept drafts cannot be seen from here; let "
            f"--launch start it, with --method {name}:profile=FILE,base=METHOD"
        )
    return Address(method, _url(name, url))


def _url(name: str, text: str) -> str:
    where = f"--server {name}"
    if len(text) > LONGEST_URL or not re.fullmatch(r"[!-~]*", text) or "\\" in text:
        raise UserError(
            f"{where}: an address is at most {LONGEST_URL} ASCII characters without spaces; write a host name in "
            "another script in its xn-- form"
        )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        # The error may quote part of a password.
        raise UserError(f"{where}: not an address, or not a port from 1 to 65535; write it as in {EXAMPLE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{where}: an address begins with http:// or https://, and names a host")
    if "@" in parts.netloc:
        raise UserError(f"{where}: the address holds a password, which would be stored; use --api-key-env NAME instead")
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        raise UserError(f"{where}: leave out '?' or '#' and everything after it in the address")
    if port == 0 or parts.netloc.endswith(":"):
        raise UserError(f"{where}: a port is a number from 1 to 65535")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if re.search(r"%(?![0-9a-fA-F]{2})", path) or "//" in path:
        raise UserError(f"{where}: the path of the address is malformed; write it as in {EXAMPLE}")
    return f"{parts.scheme}://{_host(where, parts)}{'' if port is None else f':{port}'}{path}"


def _host(where: str, parts: SplitResult) -> str:
    host = parts.hostname or ""
    if "[" in parts.netloc:
        try:
            if "%" in host or not re.fullmatch(r"\[[^\]]*\](:[0-9]+)?", parts.netloc):
                raise ValueError
            return f"[{ipaddress.IPv6Address(host)}]"
        except ValueError as error:
            raise UserError(f"{where}: the text in brackets is not an IPv6 address") from error
    # A host that ends in a number is an IPv4 address; some programs read it as octal, others reject it.
    if HOST.fullmatch(host) and not NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        return host
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError as error:
        raise UserError(
            f"{where}: its host is neither a name of letters, digits and '-' nor an address such as 127.0.0.1 or [::1]"
        ) from error
