"""What a round brings to the host: all of it in one tensor, so that the host waits once a round."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

Lists = list[list[int]]


def to_host(parts: Mapping[str, Tensor]) -> dict[str, Lists]:
    """Tensors of integers or booleans [B, n], each n its own, as lists of B rows under the same names."""
    rows: Lists = torch.cat([*parts.values()], dim=1).tolist()
    widths = [part.shape[1] for part in parts.values()]
    places = zip(parts, widths, accumulate(widths), strict=True)
    return {name: [row[end - width : end] for row in rows] for name, width, end in places}
