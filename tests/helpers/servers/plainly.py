"""The servers of tests speak plain HTTP. What each client reads at its start, all authorities' certificates, is read
once for all clients that ask for the machine's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import httpcore2

_SOUND = httpcore2.default_ssl_context


def apply() -> None:
    """For the rest of this process."""
    known = cache(_SOUND)

    def context(**asked: Any) -> Any:
        return known(**asked) if asked == {"_trust_env": False} else _SOUND(**asked)

    httpcore2.default_ssl_context = context
