"""Models: checkpoints, where they come from, and how they become networks.

This room knows presets, formats and the hub, but nothing of the prompts that models answer.
"""
