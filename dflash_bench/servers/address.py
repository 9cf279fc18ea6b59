"""What `--server NAME=URL` says: under which method the answers of which address are filed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dflash_bench import methods
from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.results.plan import BASELINE

PLAIN = "plain"
"""What a user may write for the baseline's name."""
EXAMPLE = "--server plain=http://127.0.0.1:8000 --server dflash=http://127.0.0.1:8001"


@dataclass(frozen=True, slots=True)
class Address:
    """`url` has no credentials, no query and no /v1 at its end."""

    method: Method
    url: str
    shown: str | None = None
    """What is stored in its place, where it changes from time to time."""


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are reached; the key is in no text that this prints or stores."""

    timeout_s: float = 600.0
    """For one whole answer."""
    api_key: str | None = field(default=None, repr=False)
    uses_proxies: bool = False
    """Are the proxies that the environment names used?"""

    def hidden(self, text: str) -> str:
        """The text without the key, which a server may repeat in an error."""
        return text.replace(self.api_key, "***") if self.api_key else text


def parse(texts: Sequence[str], needs_plain: bool = True) -> list[Address]:
    """Plain decoding first, or a single one. Raises UserError for no NAME=URL, and for several without plain."""
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
            f"--server: there is no server for plain decoding, against which several are measured; give one that "
            f"drafts nothing, as in {EXAMPLE}, or measure each by itself"
        )
    return [addresses.pop(BASELINE), *addresses.values()]


def _parse(text: str) -> Address:
    name, equals, url = text.partition("=")
    # The URL may hold a password, so it is not shown.
    if not equals or not name or "://" in name:
        raise UserError(f"--server takes NAME=URL, as in {EXAMPLE}")
    if ":" in name:
        raise UserError(
            f"--server {name}: a server decides itself how many tokens it drafts; write {name.partition(':')[0]}=URL"
        )
    return Address(methods.parse(BASELINE if name == PLAIN else name), _url(name, url))


def _url(name: str, text: str) -> str:
    where = f"--server {name}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UserError(f"{where}: not an address ({error}); write it as in {EXAMPLE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{where}: an address begins with http:// or https://, and names a host")
    if parts.username is not None or parts.password is not None:
        raise UserError(f"{where}: the address holds a password, which would be stored; use --api-key-env NAME instead")
    if parts.query or parts.fragment:
        raise UserError(f"{where}: leave out what follows '?' or '#' in the address")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"
