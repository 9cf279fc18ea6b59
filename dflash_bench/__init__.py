"""Measure speculative decoding honestly: acceptance, speed and token-for-token exactness."""

__version__ = "0.1.0"
