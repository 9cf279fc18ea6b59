"""Measures time: by the host's clock on the CPU, by events on a GPU, where the host runs ahead of the device."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    def mark(self) -> object: ...

    def seconds(self, start: object, end: object) -> float: ...

    def settle(self) -> None:
        """Waits for what the device still has to do, so that what begins now is not charged with it."""
        ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def settle(self) -> None:
        pass


class CudaClock:
    """Recording an event does not wait for the device; reading its time does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # On the target's device: if that is not the first GPU, the default stream would not see its work.
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
