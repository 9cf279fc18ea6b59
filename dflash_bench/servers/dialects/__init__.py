"""The known kinds of servers: files with a `DIALECT`, found by their name (see `core/dialects.py`)."""

from __future__ import annotations
