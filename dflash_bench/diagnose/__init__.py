"""Diagnose low acceptance (the weights or the engine?), and test whether tokens are sampled as the model would."""

from __future__ import annotations
