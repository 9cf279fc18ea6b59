"""Joules of this machine, from its own counters, read before and after each call of a backend.

Processors and their memory count microjoules (RAPL, in /sys/class/powercap, usually readable by root only), GPUs
millijoules (NVML, by the package nvidia-ml-py). Counters include idle power and everything else the machine does. RAPL
updates about every millisecond and GPUs several times a second, so the joules of a short answer are rough, while the
sum over many answers is accurate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dflash_bench.core.errors import UserError

POWERCAP = Path("/sys/class/powercap")
ZONES = "intel-rapl:*"
"""Zones of the kernel's driver for Intel and AMD processors; other drivers there repeat the same counters."""
COUNTED = ("package", "dram")
"""Name prefixes of disjoint zones. Other zones are parts of a package, or contain it."""


class EnergyCounter(Protocol):
    @property
    def name(self) -> str: ...

    def joules(self) -> float:
        """Return the energy used since a fixed time; it never decreases."""
        ...


class ZoneCounter:
    """A zone of RAPL. Its counter wraps around at its maximum."""

    def __init__(self, folder: Path) -> None:
        """Raise OSError if this user may not read it."""
        self.name = (folder / "name").read_text().strip()
        self._file, self._size = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()) + 1
        self._last, self._num_turns = int(self._file.read_text()), 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._num_turns += now < self._last
        self._last = now
        return (now + self._num_turns * self._size) / 1e6


class GpuCounter:
    def __init__(self, nvml: Any, index: int) -> None:
        """Raise NVMLError for a GPU that counts no energy."""
        self.name = f"GPU {index}"
        self._nvml, self._gpu = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self.joules()

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / 1000


class EnergyMeter:
    """All counters of the machine together."""

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        self.counters = tuple(counters)

    @property
    def names(self) -> list[str]:
        return [counter.name for counter in self.counters]

    def joules(self) -> float:
        return sum(counter.joules() for counter in self.counters)


def meter() -> EnergyMeter:
    """Return the machine's meter. Raises UserError if there is no counter."""
    found = [*_zones(POWERCAP), *_gpus()]
    if not found:
        raise UserError(
            f"--energy: this machine tells no energy: {POWERCAP} has no counter that this user may read, and no GPU is "
            "known to NVML (which needs dflash-bench[energy]); leave it out, or run as a user who may read them"
        )
    return EnergyMeter(found)


def _zones(powercap: Path) -> Iterator[EnergyCounter]:
    for folder in sorted(powercap.glob(ZONES)):
        try:
            zone = ZoneCounter(folder)
        except (OSError, ValueError):
            continue
        if zone.name.startswith(COUNTED):
            yield zone


def _gpus() -> Iterator[EnergyCounter]:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except nvml.NVMLError:
        return
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            yield GpuCounter(nvml, index)
        except nvml.NVMLError:
            continue
