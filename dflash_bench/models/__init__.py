"""Models: checkpoints, their sources, and their conversion to networks.

Covers presets, formats and the hub, but not the prompts that models answer.
"""
