"""Published drafts of the model that a server serves, and the arguments with which its program uses them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_bench.core.dialects import LaunchSpec, Program
from dflash_bench.core.draft_kinds import name_of_kind
from dflash_bench.core.methods import BASELINE, parse
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from dflash_bench.servers.launch import ServerFlags, flags_of

QUANTISED = re.compile(r"[-_.](i?q\d|[bf]+p?16|fp8|int[48]|w\d|awq|gptq|gguf|nvfp4|mxfp4).*", re.IGNORECASE)
"""What publishers append to a model's name for the same model in another form."""


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A draft of a preset; `flags` are None if the server's program cannot use it, or how is unknown."""

    preset: str
    draft: str
    """Its key in the preset: `dflash`, `dflash@2`."""
    kind: str
    reference: str
    flags: ServerFlags | None = None

    @property
    def method(self) -> str:
        return self.draft.partition("@")[0]


def preset_of(served: str | None) -> tuple[str, Preset] | None:
    """Return the preset whose target has this name, also quantised; the one with the longest name if several do."""
    name = QUANTISED.sub("", _bare(served or ""))
    matching = [(key, one) for key, one in presets.table().items() if one.drafts and _bare(one.target) == name]
    return matching[0] if matching else None


def _bare(reference: str) -> str:
    """Return a model's name without its owner, folders and revision."""
    return reference.partition("@")[0].rstrip("/").rpartition("/")[2].lower()


def drafts_for(served: str | None, program: Program | None) -> Iterator[PublishedDraft]:
    """Yield the published drafts for a served model, those that its program can use first."""
    found = preset_of(served)
    if found is None:
        return
    name, preset = found
    drafts = [
        PublishedDraft(name, key, name_of_kind(preset.kind(key)), reference, _flags(name, preset, key, program))
        for key, reference in preset.drafts.items()
        if key not in preset.unsupported and not reference.startswith("/")
    ]
    yield from sorted(drafts, key=lambda one: one.flags is None)


def _flags(name: str, preset: Preset, key: str, program: Program | None) -> ServerFlags | None:
    """Return the arguments if they follow without reading the draft's files."""
    method = parse(key.partition("@")[0])
    number = (preset.num_drafts or {}).get(key)
    if program is None or method.name not in program.methods or number is None:
        return None
    kind = name_of_kind(preset.kind(key))
    if method.name in program.targets or (method.name == "dflash" and kind not in program.kinds):
        return None
    reference = preset.drafts[key].partition("@")[0]
    target = preset.target.partition("@")[0]
    plain = LaunchSpec(parse(BASELINE), name, target, None, None, 1, 1, "auto", 0.9, kind=kind)
    drafting = LaunchSpec(method, name, target, None, number, 1, 1, "auto", 0.9, kind=kind)
    return flags_of(program, plain, drafting, reference, name)
