"""What `dflash-bench models` says: each preset, what of it is on this disk, and whether this machine can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench import environment
from dflash_bench.models import hub, presets
from dflash_bench.models.presets import Preset

GB = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a target would go: on the GPUs in bfloat16, or in memory in float32, as `run` does by itself."""

    memory_bytes: int | None
    gpu_bytes: tuple[int, ...]

    @property
    def bytes_per_parameter(self) -> int:
        return 2 if self.gpu_bytes else 4

    @property
    def largest_bytes(self) -> int | None:
        """What one device holds; None where the machine does not say."""
        return max(self.gpu_bytes) if self.gpu_bytes else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """One preset; `is_here` maps `target` and the methods to whether that checkpoint is on this disk, whole."""

    name: str
    preset: Preset
    is_here: dict[str, bool]


def machine() -> Machine:
    memory, gpus = environment.memory_bytes()
    return Machine(memory, tuple(gpus))


def listing() -> list[Listing]:
    """Asks neither the network nor torch."""
    return [
        Listing(
            name, preset, {"target": hub.is_here(preset.target)} | {m: hub.is_here(d) for m, d in preset.drafts.items()}
        )
        for name, preset in presets.table().items()
    ]


def fits(preset: Preset, machine: Machine) -> tuple[bool | None, str]:
    """Whether the target's weights can be held, and that in words; drafts and cache come on top."""
    if preset.billions is None:
        return None, "size not known"
    needed = preset.billions * 1e9 * machine.bytes_per_parameter
    needs = f"needs about {_gb(needed)}"
    if machine.largest_bytes is None:
        return None, needs
    has = f"{needs}, has {_gb(machine.largest_bytes)}"
    if needed < machine.largest_bytes:
        return True, has
    if needed < sum(machine.gpu_bytes):
        return True, f"{needs}, {len(machine.gpu_bytes)} GPUs have {_gb(sum(machine.gpu_bytes))}: --device-map auto"
    return False, f"{has}: too large"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.0f} GB" if num_bytes >= GB else "1 GB"


def text(listed: Sequence[Listing], machine: Machine) -> str:
    """A block for each preset, in 100 columns."""
    blocks = ["\n".join([f"{one.name}: {fits(one.preset, machine)[1]}", *_rows(one)]) for one in listed]
    where = f"{len(machine.gpu_bytes)} x GPU, bfloat16" if machine.gpu_bytes else "CPU, float32"
    foot = (
        "* is on this disk; the rest is downloaded by the run that needs it.\n"
        f"Needed here ({where}) for the target's weights; drafts and cache come on top.\n"
        "For other targets and drafts: dflash-bench run --target ID --draft METHOD=ID"
    )
    return "\n\n".join([*blocks, foot])


def _rows(each: Listing) -> list[str]:
    """Target and drafts, with what a run takes unless told otherwise."""
    preset = each.preset
    notes = {"target": ["thinking on"] if preset.thinking else []}
    for method in preset.drafts:
        number, trained = (preset.num_drafts or {}).get(method), preset.trained_thinking.get(method)
        notes[method] = [f"{number} tokens a round"] if number else []
        notes[method] += [] if trained is None else [f"trained with thinking {'on' if trained else 'off'}"]
        notes[method] += [f"not supported: {preset.unsupported[method]}"] if method in preset.unsupported else []
    references = {"target": preset.target, **preset.drafts}
    width = max(7, *map(len, references))
    return [
        f"  {'*' if each.is_here[part] else ' '} {part:<{width}} {', '.join([_shown(reference), *notes[part]])}"
        for part, reference in references.items()
    ]


def _shown(reference: str) -> str:
    return "in this package" if Path(reference).is_relative_to(presets.NANO) else reference


def as_json(listed: Sequence[Listing], machine: Machine) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [
        {
            "model": each.name,
            "target": each.preset.target,
            "drafts": dict(each.preset.drafts),
            "num_drafts": dict(each.preset.num_drafts or {}),
            "thinking": each.preset.thinking,
            "trained_thinking": dict(each.preset.trained_thinking),
            "unsupported": dict(each.preset.unsupported),
            "max_new_tokens": each.preset.max_new_tokens,
            "billions": each.preset.billions,
            "source": each.preset.source,
            "cached": each.is_here,
            "fits": fits(each.preset, machine)[0],
            "needs": fits(each.preset, machine)[1],
        }
        for each in listed
    ]
