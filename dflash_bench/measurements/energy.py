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
from typing import TYPE_CHECKING, Any, Protocol

from dflash_bench.core.errors import UserError
from dflash_bench.core.measurement import Columns, Instrument, Measurement
from dflash_bench.core.metric import Metric, Shown
from dflash_bench.core.option import condition, under
from dflash_bench.runner import rules

if TYPE_CHECKING:
    from dflash_bench.core.types import Generation

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


class EnergyMeter(Instrument):
    """All counters of the machine together; answers of one call share its joules by their tokens."""

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        self.counters = tuple(counters)
        self.num_tokens, self._joules = 0, 0.0

    def joules(self) -> float:
        return sum(counter.joules() for counter in self.counters)

    def starts(self) -> list[str]:
        return [counter.name for counter in self.counters]

    def call_begins(self) -> None:
        self._joules = self.joules()

    def call_ends(self, answers: Sequence[Generation]) -> None:
        self._joules = self.joules() - self._joules
        self.num_tokens = sum(answer.num_tokens for answer in answers)

    def answer(self, answer: Generation) -> Columns:
        share = answer.num_tokens / self.num_tokens if self.num_tokens else 1.0
        return {"energy_j": self._joules * share}


def meter(*_: object) -> EnergyMeter:
    """Return the machine's meter. Raises UserError if there is no counter."""
    found = [*_zones(POWERCAP), *_gpus()]
    if not found:
        raise UserError(
            f"--energy: this machine reports no energy: {POWERCAP} has no counter that this user may read, and NVML "
            "(dflash-bench[energy]) finds no GPU; leave it out, or run as a user who may read the counters"
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


MEASUREMENT = Measurement(
    name="energy",
    option=(
        bool,
        under("Measuring")(
            "Also measure joules per token, by the counters of this machine's processors (Linux; as a rule they want "
            "root) and GPUs (dflash-bench[energy]).",
            default=False,
            conflicts=(
                condition(rules.is_served, "with --server, which spends energy elsewhere"),
                rules.one_process("--energy", lambda options: options.workers is not None),
            ),
        ),
    ),
    opens=meter,
    entry=list[str],
    columns={"energy_j": "double"},
    sums={
        "energy_j": lambda rows: rows["energy_j"],
        "energy_tokens": lambda rows: rows.where_known("energy_j", "num_tokens"),
    },
    metrics=(
        Metric(
            id="joules_per_token",
            formula="energy of the machine while answers were made, prompts included / sum(T); its idle power counts",
            unit="J/token",
            top=("energy_j",),
            bottom=("energy_tokens",),
            higher_is_better=False,
            is_timing=True,
            shown=(Shown("results", 8, "J/token", digits=3, is_optional=True),),
        ),
    ),
)
