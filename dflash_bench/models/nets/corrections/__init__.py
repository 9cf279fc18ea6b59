"""Correction heads of the DFlash family: they make the tokens of a block consistent with each other.

A block predicts its slots independently of each other. A head conditions each slot on the preceding tokens, at a small
fraction of the block's own cost. `base.py` is the interface; each other file is one kind of head.
"""
