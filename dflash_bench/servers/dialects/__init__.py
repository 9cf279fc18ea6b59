"""The kinds of servers that we know. Each is one file with a `DIALECT`, found by its name (see `core/dialects.py`)."""

from __future__ import annotations
