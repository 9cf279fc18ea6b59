"""A hub in place of the real one, whose branches move when a test moves them."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from dflash_bench.models import hub

OLD, NEW = "0" * 40, "1" * 40


class FakeHub:
    """Make a hub of ids and their folders; `heads` are the commits of their branches."""

    def __init__(self, folders: dict[str, Path], cache: Path) -> None:
        self.folders, self.heads, self.cache = folders, dict.fromkeys(folders, OLD), cache

    def model_info(self, name: str, revision: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(sha=revision if hub.COMMIT.fullmatch(revision) else self.heads[name])

    def download(self, name: str, revision: str, **_choice: Any) -> str:
        folder = self.cache / name.replace("/", "--") / revision
        if not folder.exists():
            shutil.copytree(self.folders[name], folder)
        return str(folder)

    def applied(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        """Return this hub, which is asked in place of the real one from now on."""
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(self.cache / "none"))
        monkeypatch.setattr(
            huggingface_hub.HfApi, "model_info", lambda _self, *words, **named: self.model_info(*words, **named)
        )
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        return self
