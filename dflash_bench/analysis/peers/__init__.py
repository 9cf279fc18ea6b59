"""Figures by others: what the authors published, what their harness would have printed, and vLLM's own benchmark."""
