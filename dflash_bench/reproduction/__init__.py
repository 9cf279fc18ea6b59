"""Reproduces the tables and figures of the DFlash paper, one item each, and reports which figures were reproduced."""
