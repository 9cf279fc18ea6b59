"""From a folder or a hub id to files on this disk, and a revision that identifies them."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dflash_bench.errors import UserError
from dflash_bench.models import folders

FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Configuration, weights without code in them, and tokenizers."""
PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt")
ANSWER_WITHIN_S = 4.0
"""If the hub does not answer within this time, we take it as unreachable; a download may take as long as it needs."""
COMMIT = re.compile("[0-9a-f]{40}")
_ID = re.compile(r"(?!.*(--|\.\.)|.{97})\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint on this disk. `revision` is ID@COMMIT, or the hash of the weights for a folder of the user's."""

    folder: Path
    revision: str


def fetch(reference: str, *, pickles: bool = False, code: bool = False) -> LocalCheckpoint:
    """A folder as it is, or a hub snapshot pinned to the commit that ID or ID@REVISION means now.

    From the hub we take FILES; with `pickles`, also PICKLES if there are no safetensors; with `code`, also modules.
    Raises UserError with the remedy if the folder or id does not exist, and within seconds if the hub is unreachable.
    """
    if folder := folder_of(reference):
        return LocalCheckpoint(folder, weights_sha256(folder))
    name, _, revision = reference.partition("@")
    if not _ID.fullmatch(name):
        raise UserError(f"no such folder: {reference}; it is not a hub id either (ORG/NAME or ORG/NAME@REVISION)")
    patterns = [*FILES, "*.py"] if code else [*FILES]
    snapshot = _snapshot(name, revision or "main", patterns)
    if not any(snapshot.glob("*.safetensors")):
        if not pickles:
            raise UserError(f"{name} has no safetensors weights, and targets are loaded from nothing else")
        snapshot = _snapshot(name, snapshot.name, [*patterns, *PICKLES])
    folders.require_files(snapshot)
    return LocalCheckpoint(snapshot, f"{name}@{snapshot.name}")


def is_pinned(reference: str) -> bool:
    """Does it mean the same weights at any time? A folder is known by its weights; a branch or a tag can move."""
    return os.path.isdir(os.path.expanduser(reference)) or bool(COMMIT.fullmatch(reference.partition("@")[2]))


def folder_of(reference: str) -> Path | None:
    """The folder of this name, or None. Raises UserError for a folder whose files cannot be read."""
    folder = Path(os.path.expanduser(reference))
    if not reference or not os.path.isdir(folder):
        return None
    folders.require_files(folder)
    return folder


def _snapshot(name: str, revision: str, patterns: list[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Subfolders hold other forms of the same weights.
    choice: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}
    # The base class of the hub's errors. It covers all that the HTTP library can raise, and has changed with it.
    http_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    try:
        commit = HfApi().model_info(name, revision=revision, timeout=ANSWER_WITHIN_S).sha
        return Path(snapshot_download(name, revision=commit, **choice))
    except (http_error, OSError) as error:
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True, **choice))
        except OSError:
            raise _cannot_get(name, revision, error) from error


def _cannot_get(name: str, revision: str, error: BaseException) -> UserError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match error:
        case GatedRepoError():
            return UserError(f"{name} is gated: accept its terms on huggingface.co/{name}, then set HF_TOKEN")
        case RevisionNotFoundError():
            return UserError(f"{name} has no revision {revision}")
        case RepositoryNotFoundError():
            return UserError(f"the hub has no model {name}, or it is private: check the name, or set HF_TOKEN")
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(
        f"cannot get {name} from the hub ({reason}), and it is not in the cache; "
        "give a folder instead, or use nano, which needs no network"
    )


def weights_sha256(folder: Path) -> str:
    """One hash over the hashes of all weight files; of pickles only if there are no safetensors."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) or sorted((*folder.glob("*.bin"), *folder.glob("*.pt"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def is_here(reference: str) -> bool:
    """Is this checkpoint complete on this disk? Uses no network, and loads no library that could."""
    folder = Path(os.path.expanduser(reference))
    if not os.path.isdir(folder):
        folder = cached_folder(reference)
    try:
        shards = set(folders.read_json(folder / folders.INDEX)["weight_map"].values())
    except (UserError, KeyError, AttributeError, TypeError):
        shards = {path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)}
    return (folder / "config.json").exists() and bool(shards) and all((folder / name).exists() for name in shards)


def cached_folder(reference: str) -> Path:
    """Where the hub's client keeps a snapshot: models--ORG--NAME/snapshots/COMMIT; refs/REVISION names the commit."""
    from huggingface_hub import constants

    name, _, revision = reference.partition("@")
    stored = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    ref = stored / "refs" / (revision or "main")
    return stored / "snapshots" / (ref.read_text() if ref.is_file() else revision)
