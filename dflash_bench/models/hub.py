"""Sources of checkpoints: folders and the hub, and errors for unreadable checkpoints."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, first_line, is_panic

# A model's folder before it is loaded: its JSON files, and whether all parts are regular files. Needs no torch.


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ENDINGS = (".json", ".safetensors", ".bin", ".pt", ".txt", ".jinja", ".model", ".tiktoken")
"""Endings of the files that this package or transformers reads."""
VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Large files, which are only read where needed."""


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise UserError(f"no model in {path.parent}: {path.name} is missing")
    config = files.json_of(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return config


def require_files(folder: Path) -> None:
    """Raise UserError for a folder with parts that are not regular files, or unreadable settings.

    Libraries would wait forever for a writer to a pipe, and crash on JSON nested a thousand levels deep.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise files.io_error("read", folder, error) from error
    for path in (folder / name for name in names if name.endswith(ENDINGS)):
        files.require_file(path)
        if path.suffix == ".json" and path.name not in VOCABULARIES:
            files.json_of(path)


# Downloading files for a hub id, or using a folder, with a revision that identifies them.


FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken", "mask_embedding.pt")
"""Configuration, weights without code (from the last, torch reads nothing but tensors), and tokenizers."""
PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt")
ANSWER_WITHIN_S = 4.0
"""If the hub does not respond within this time, it counts as unreachable; downloads are not limited."""
COMMIT = re.compile("[0-9a-f]{40}")
_ID = re.compile(r"(?!.*(--|\.\.)|.{97})\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint on this disk. `revision` is ID@COMMIT, or the hash of the weights for a user's folder."""

    folder: Path
    revision: str


def fetch(reference: str, *, pickles: bool = False, code: bool = False) -> LocalCheckpoint:
    """Return a folder unchanged, or a hub snapshot pinned to the current commit of ID or ID@REVISION.

    From the hub, FILES are downloaded; with `pickles`, also PICKLES if there are no safetensors; with `code`, modules.
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
            raise UserError(f"{name} has no safetensors weights, the only format that targets are loaded from")
        snapshot = _snapshot(name, snapshot.name, [*patterns, *PICKLES])
    require_files(snapshot)
    return LocalCheckpoint(snapshot, f"{name}@{snapshot.name}")


def is_pinned(reference: str) -> bool:
    """Return whether it always identifies the same weights: a folder, or a commit; branches and tags can move."""
    return os.path.isdir(os.path.expanduser(reference)) or bool(COMMIT.fullmatch(reference.partition("@")[2]))


def folder_of(reference: str) -> Path | None:
    """Return the folder of this name, or None. Raises UserError for a folder with unreadable files."""
    folder = Path(os.path.expanduser(reference))
    if not reference or not os.path.isdir(folder):
        return None
    require_files(folder)
    return folder


def _snapshot(name: str, revision: str, patterns: list[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Subfolders hold other formats of the same weights.
    choice: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}
    # The base class of the hub's errors covers all errors of its HTTP library, which has changed.
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
    reason = first_line(error)
    return UserError(
        f"cannot get {name} from the hub ({reason}), and it is not in the cache; "
        "give a folder instead, or use nano, which needs no network"
    )


def weights_sha256(folder: Path) -> str:
    """Return one hash over the hashes of all weight files; pickles count only if there are no safetensors."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) or sorted((*folder.glob("*.bin"), *folder.glob("*.pt"))):
        digest.update(bytes.fromhex(files.sha256_of(path)))
    return digest.hexdigest()


def is_here(reference: str) -> bool:
    """Return whether this checkpoint is complete on this disk, without network or a library that could use it."""
    folder = Path(os.path.expanduser(reference))
    if not os.path.isdir(folder):
        folder = cached_folder(reference)
    try:
        shards = set(read_json(folder / INDEX)["weight_map"].values())
    except (UserError, KeyError, AttributeError, TypeError):
        shards = {path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)}
    return (folder / "config.json").exists() and bool(shards) and all((folder / name).exists() for name in shards)


def cached_folder(reference: str) -> Path:
    """Return where the hub's client stores a snapshot: models--ORG--NAME/snapshots/COMMIT, by refs/REVISION."""
    from huggingface_hub import constants

    name, _, revision = reference.partition("@")
    stored = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    ref = stored / "refs" / (revision or "main")
    return stored / "snapshots" / (ref.read_text() if ref.is_file() else revision)


# Errors that transformers raises for damaged files, as opposed to bugs.


UNREADABLE = (
    OSError,
    ValueError,
    ImportError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    StrictDataclassError,
    struct.error,
)


def is_unreadable(error: BaseException) -> bool:
    """Return whether a damaged file caused the error; the tokenizers library raises bare Exceptions, or panics."""
    return isinstance(error, UNREADABLE) or type(error) is Exception or is_panic(error)


def cannot_load(folder: Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return UserError(f"{folder} needs code of its own, which runs only in a run with --trust-remote-code")
    if reason.startswith("Unrecognized configuration class"):  # and a list of all known classes
        what = f"{folder} is of an architecture for which transformers has no causal language model"
        return UserError(what, "use another target")
    return UserError(f"cannot load a causal language model from {folder}: {reason or type(error).__name__}")
