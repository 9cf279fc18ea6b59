"""Verification of submitted runs: recompute a random sample of the answers, and list what cannot be recomputed."""
