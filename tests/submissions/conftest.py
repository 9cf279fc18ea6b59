"""Tests here run nano, and share what takes long."""

from helpers.fixtures import with_shared_models

__all__ = ["with_shared_models"]
