"""What every run measures of its machine before it begins, once for all tests of a process, or in fewer turns.

How fast this machine reads, copies and multiplies takes a second each time, and is the same for all runs. Tests of the
measurement itself ask for `measured_in_full`, and one that plants a fault in the clock measures with that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    sound, medians_s = measure.forward_curve, measure.medians_s
    if inspect.unwrap(sound) is not sound:
        return

    def once(measured: Callable[..., Any]) -> Callable[..., Any]:
        def known(*of: Any) -> Any:
            if HostClock.seconds is not SECONDS:
                return measured(*of)
            if (measured, of) not in KNOWN:
                KNOWN[measured, of] = measured(*of)
            return KNOWN[measured, of]

        return known

    rates, bandwidth = once(measure.measure_rates), once(measure.read_bandwidth)

    @wraps(sound)
    def quick(target: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "measure_rates", rates)
            patch.setattr(measure, "read_bandwidth", bandwidth)
            patch.setattr(measure, "medians_s", partial(medians_s, most=MOST_TURNS))
            return sound(target)

    measure.forward_curve = quick
