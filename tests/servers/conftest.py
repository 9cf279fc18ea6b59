"""For tests of servers alone."""

from __future__ import annotations

from helpers.fixtures import with_shared_models
from helpers.servers import plainly

__all__ = ["with_shared_models"]

plainly.apply()
