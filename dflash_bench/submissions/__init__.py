"""Runs of strangers: recompute a random part of their answers, and tell what cannot be recomputed."""
