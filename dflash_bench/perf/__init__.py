"""Profiling: times a backend's forward passes, and judges them by the machine's limits."""
