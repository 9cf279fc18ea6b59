"""Why is acceptance low, is it the weights or the engine, does it draw as the model does?"""

from __future__ import annotations
