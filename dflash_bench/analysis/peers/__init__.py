"""Figures of others: the authors' published ones, what their harness would have printed, and vLLM's own benchmark."""
