"""What every run measures of its machine before it begins, once for all tests of a process, or in fewer turns.

How fast this machine copies and multiplies takes a second each time, and is the same for all runs. Tests of the
measurement itself ask for `measured_in_full`, and one that plants a fault in the clock measures with that.
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

import pytest

from dflash_bench.engine.rows import HostClock
from dflash_bench.perf import measure

MOST_TURNS = 3
SECONDS = HostClock.seconds
KNOWN: dict[Any, Any] = {}


def apply() -> None:
    """For the rest of this process."""
    sound, rates_of, medians_s = measure.forward_curve, measure.measure_rates, measure.medians_s
    if inspect.unwrap(sound) is not sound:
        return

    def known(device: Any, dtype: Any) -> Any:
        if HostClock.seconds is not SECONDS:
            return rates_of(device, dtype)
        if (device, dtype) not in KNOWN:
            KNOWN[device, dtype] = rates_of(device, dtype)
        return KNOWN[device, dtype]

    @wraps(sound)
    def quick(target: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "measure_rates", known)
            patch.setattr(measure, "medians_s", partial(medians_s, most=MOST_TURNS))
            return sound(target)

    measure.forward_curve = quick
