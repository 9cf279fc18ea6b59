"""From a folder or a hub id to files on this disk, and what says which files they were."""

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
"""A hub that is silent for longer is taken for none; a download itself may take as long as it needs."""
_ID = re.compile(r"(?!.*(--|\.\.)|.{97})\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`revision` is ID@COMMIT, or for a folder the hash of its weights."""

    folder: Path
    revision: str


def fetch(reference: str, *, pickles: bool = False, code: bool = False) -> Checkpoint:
    """A folder as it is, or a hub snapshot pinned to the commit that ID or ID@REVISION means now.

    Of a snapshot come FILES; with `pickles`, and only where it has no safetensors, PICKLES; with `code`, modules.
    Raises UserError with the remedy for a folder or id that is not there, and within seconds for a hub that is not.
    """
    if folder := folder_of(reference):
        return Checkpoint(folder, weights_sha256(folder))
    name, _, revision = reference.partition("@")
    if not _ID.fullmatch(name):
        raise UserError(f"{reference} is missing: no such folder, and no hub id (ORG/NAME or ORG/NAME@REVISION)")
    patterns = [*FILES, "*.py"] if code else [*FILES]
    snapshot = _snapshot(name, revision or "main", patterns)
    if not any(snapshot.glob("*.safetensors")):
        if not pickles:
            raise UserError(f"{name} has no safetensors weights, and a target is loaded from no other file")
        snapshot = _snapshot(name, snapshot.name, [*patterns, *PICKLES])
    folders.require_files(snapshot)
    return Checkpoint(snapshot, f"{name}@{snapshot.name}")


def folder_of(reference: str) -> Path | None:
    """The folder of this name, where there is one. Raises UserError for one whose files cannot be read."""
    folder = Path(os.path.expanduser(reference))
    if not reference or not os.path.isdir(folder):
        return None
    folders.require_files(folder)
    return folder


def _snapshot(name: str, revision: str, patterns: list[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # What lies in folders are other forms of the same weights.
    chosen: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}
    # The base of the hub's own errors: whatever the HTTP library, of which there have been several, can raise.
    http_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    try:
        commit = HfApi().model_info(name, revision=revision, timeout=ANSWER_WITHIN_S).sha
        return Path(snapshot_download(name, revision=commit, **chosen))
    except (http_error, OSError) as error:
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True, **chosen))
        except OSError:
            raise _cannot_get(name, revision, error) from error


def _cannot_get(name: str, revision: str, error: BaseException) -> UserError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match error:
        case GatedRepoError():
            return UserError(f"{name} asks for consent: accept its terms on huggingface.co/{name}, then set HF_TOKEN")
        case RevisionNotFoundError():
            return UserError(f"{name} has no revision {revision}")
        case RepositoryNotFoundError():
            return UserError(f"the hub has no model {name}, or it is private: check the name, or set HF_TOKEN")
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(
        f"cannot get {name} from the hub ({reason}), and it is not in the cache; "
        "give a folder in its place, or use nano, which needs no network"
    )


def weights_sha256(folder: Path) -> str:
    """Of the weights' own hashes; pickles count where there is nothing else."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) or sorted((*folder.glob("*.bin"), *folder.glob("*.pt"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def is_here(reference: str) -> bool:
    """Is it on this disk, weights and all? Nothing is asked of the network, and no library loaded that could."""
    folder = Path(os.path.expanduser(reference))
    if not os.path.isdir(folder):
        folder = _cached_folder(reference)
    try:
        shards = set(folders.read_json(folder / folders.INDEX)["weight_map"].values())
    except (UserError, KeyError, AttributeError, TypeError):
        shards = {path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)}
    return (folder / "config.json").exists() and bool(shards) and all((folder / name).exists() for name in shards)


def _cached_folder(reference: str) -> Path:
    """Where the hub's client keeps a snapshot: models--ORG--NAME/snapshots/COMMIT, and refs/REVISION say which."""
    from huggingface_hub import constants

    name, _, revision = reference.partition("@")
    stored = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    ref = stored / "refs" / (revision or "main")
    return stored / "snapshots" / (ref.read_text() if ref.is_file() else revision)
