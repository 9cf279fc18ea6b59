"""For tests of servers alone."""

from __future__ import annotations

from helpers.servers import plainly

plainly.apply()
