"""Reproduces the tables and figures of the DFlash paper, an item each, and says what became of every figure."""
