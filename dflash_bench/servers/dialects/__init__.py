"""How each server is spoken to: one file a dialect, and an entry in `detection.DIALECTS`."""

from __future__ import annotations
