"""Measurements: each file declares one, whole; `core.measurement` is the interface that all others know."""
