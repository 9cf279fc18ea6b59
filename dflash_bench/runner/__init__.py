"""From a request to rows: resolve a run once, then run it prompt by prompt and save it.

This package decodes only through the interface `Backend`, and judges no figure.
"""
