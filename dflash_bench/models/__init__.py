"""Which weights: what a checkpoint is, where it comes from, and how it becomes a network.

Knows presets, formats and the hub; never what is asked of a model.
"""
