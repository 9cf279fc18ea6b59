"""Folders and hub ids: pinned to a commit, quick to fail without a network, and only the files that are needed."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from dflash_bench.core.errors import UserError
from dflash_bench.models import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHOLE = {"config.json": "{}", "model.safetensors": ""}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, name: str, files: dict[str, str], revision: str = "main") -> Path:
    """A snapshot as the hub's own client would have left it."""
    stored = cache / f"models--{name.replace('/', '--')}"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / revision).write_text(COMMIT)
    snapshot = stored / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path, content in files.items():
        (snapshot / path).write_text(content)
    return snapshot


def test_a_folder_is_itself_and_known_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = hub.fetch(str(tmp_path))
    assert before.folder == tmp_path and re.fullmatch("[0-9a-f]{64}", before.revision)
    (tmp_path / "pytorch_model.bin").write_bytes(b"beside safetensors these do not count")
    assert hub.fetch(str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert hub.fetch(str(tmp_path)).revision != before.revision


def test_pickles_are_weights_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"one")
    before = hub.weights_sha256(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"two")
    assert hub.weights_sha256(tmp_path) != before


@pytest.mark.parametrize("reference", ["/no/such/folder", "./model", "a/b/c", "a--b/c", "", "@main", "org/name/"])
def test_what_is_neither_a_folder_nor_an_id_is_told_at_once(reference: str) -> None:
    with pytest.raises(UserError, match=r"^no such folder: "):
        hub.fetch(reference)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes the call and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["none", "refusing", "silent"])
def test_without_a_network_one_line_says_what_to_do_and_nothing_waits(
    kind: str, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.ANSWER_WITHIN_S <= 5
    monkeypatch.setattr(hub, "ANSWER_WITHIN_S", 0.5)
    endpoint = {"none": "http://huggingface.invalid", "refusing": "http://127.0.0.1:9", "silent": silent}[kind]
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(UserError, match=r"Qwen/Qwen3-4B .*folder") as told:
        hub.fetch("Qwen/Qwen3-4B")
    assert "\n" not in str(told.value)


def test_a_user_who_works_offline_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"a/b .*offline mode"):
        hub.fetch("a/b")


REFUSALS: dict[type[HfHubHTTPError], str] = {
    GatedRepoError: "org/name is gated: accept its terms on huggingface.co/org/name, then set HF_TOKEN",
    RepositoryNotFoundError: "the hub has no model org/name, or it is private: check the name, or set HF_TOKEN",
    RevisionNotFoundError: "org/name has no revision v1",
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_the_hub_refuses_is_told_with_its_remedy_unless_it_is_cached(
    refusal: type[HfHubHTTPError], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise refusal.__new__(refusal)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(UserError) as told:
        hub.fetch("org/name@v1")
    assert str(told.value) == REFUSALS[refusal]
    snapshot = cached(empty_cache, "org/name", WHOLE, revision="v1")
    assert hub.fetch("org/name@v1") == hub.LocalCheckpoint(snapshot, f"org/name@{COMMIT}")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub of one repository: `files` are what it has, `asked` what was asked of it."""
    hub_ = SimpleNamespace(files=["config.json", "model.safetensors"], asked=[])

    def model_info(_self: object, name: str, revision: str, timeout: float) -> SimpleNamespace:
        hub_.asked.append((name, revision))
        return SimpleNamespace(sha=COMMIT)

    def download(name: str, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        folder = tmp_path / "snapshots" / revision
        folder.mkdir(parents=True, exist_ok=True)
        for file in filter_repo_objects(hub_.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (folder / file).write_text("{}" if file.endswith(".json") else "")
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return hub_


@pytest.mark.parametrize(("reference", "revision"), [("org/name", "main"), ("org/name@v1.0", "v1.0")])
def test_a_hub_id_is_pinned_to_the_commit_it_means_now(reference: str, revision: str, served: Any) -> None:
    fetched = hub.fetch(reference)
    assert served.asked == [("org/name", revision)]
    assert fetched.revision == f"org/name@{COMMIT}"


def test_only_what_is_needed_is_downloaded(served: Any) -> None:
    needed = {"config.json", "model-00001-of-00002.safetensors", "merges.txt", "chat_template.jinja", "tokenizer.model"}
    left = {"modeling_x.py", "original/model.safetensors", "pytorch_model.bin", "training_args.bin", "model.gguf"}
    served.files = sorted(needed | left)
    assert {path.name for path in hub.fetch("org/name", pickles=True).folder.iterdir()} == needed


def test_code_is_downloaded_only_for_who_trusts_it(served: Any) -> None:
    served.files.append("modeling_x.py")
    assert not (hub.fetch("org/name").folder / "modeling_x.py").exists()
    assert (hub.fetch("org/name", code=True).folder / "modeling_x.py").exists()


def test_pickles_are_downloaded_only_for_drafts_and_only_without_safetensors(served: Any) -> None:
    served.files = ["config.json", "pytorch_model.bin", "training_args.bin"]
    with pytest.raises(UserError, match="org/name has no safetensors weights"):
        hub.fetch("org/name")
    names = {path.name for path in hub.fetch("org/name", pickles=True).folder.iterdir()}
    assert names == {"config.json", "pytorch_model.bin"}


INDEX = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
SHARDED = {"config.json": "{}", "model.safetensors.index.json": INDEX, "1.safetensors": ""}


@pytest.mark.parametrize(
    ("files", "here"),
    [
        (WHOLE, True),
        ({"config.json": "{}", "pytorch_model.bin": ""}, True),
        ({"config.json": "{}"}, False),
        ({"model.safetensors": ""}, False),
        (SHARDED, False),
        (SHARDED | {"2.safetensors": ""}, True),
    ],
)
def test_here_is_what_is_here_whole(files: dict[str, str], here: bool, empty_cache: Path) -> None:
    snapshot = cached(empty_cache, "org/name", files)
    assert hub.is_here("org/name") == hub.is_here(str(snapshot)) == hub.is_here(f"org/name@{COMMIT}") == here
    found = huggingface_hub.try_to_load_from_cache("org/name", "config.json")
    assert (found == str(snapshot / "config.json")) == ("config.json" in files)


def test_nothing_is_here_of_what_was_never_fetched(empty_cache: Path) -> None:
    assert not hub.is_here("org/name")
    cached(empty_cache, "org/name", WHOLE, revision="v1")
    assert not hub.is_here("org/name") and not hub.is_here("org/name@main") and hub.is_here("org/name@v1")
