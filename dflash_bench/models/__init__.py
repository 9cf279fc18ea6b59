"""Which weights? What a checkpoint is, where it comes from, and how it becomes a network.

This room knows presets, formats and the hub, but nothing of what models are asked.
"""
