"""Profiling: times a backend's forward passes, and compares them with the machine's limits."""
