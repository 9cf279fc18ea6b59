"""Correction heads of the DFlash family: they turn a block's logits into tokens that agree with each other.

A block predicts its slots independently of each other. A head adds what each slot should know of those before it, at a
small part of the block's own cost. `base.py` is the interface, each other file one kind of head.
"""
