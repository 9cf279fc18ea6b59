"""For tests of servers alone."""

from __future__ import annotations

import plainly

plainly.apply()
