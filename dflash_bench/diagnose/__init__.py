"""Why is acceptance low? Is it the weights or the engine? Are tokens drawn as the model would draw them?"""

from __future__ import annotations
