"""Forged runs are refuted, or what cannot be told of them is named."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.results import pack, parts, recheck, store
from dflash_bench.results.recheck import CheckedPart
from dflash_bench.submissions import accept as accepting
from dflash_bench.submissions.accept import accept
from dflash_bench.submissions.request import AcceptRequest
from helpers.each import each as cases
from helpers.forging import FORGERIES, Forgery, each, forge

USUAL: dict[str, Any] = {
    "model": "nano",
    "suite": "gsm8k",
    "methods": ["dflash", "ngram"],
    "limit": 4,
    "max_new_tokens": 48,
}
Rechecked = Callable[[Path], dict[str, CheckedPart]]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, shared_models: None) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    db.run(**USUAL, out=folder)
    return folder


@pytest.fixture(scope="module")
def rechecked(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rechecked]:
    """Packs a run unread, as a forger would, and rechecks all of its answers; returns the findings by check."""
    known: dict[Any, Any] = {}
    sound, measured = accepting.open_local, store.read_info(honest).forwards

    def opened(resolved: Any) -> Any:
        """Open each engine once: what is loaded does not depend on what is forged."""
        at = (resolved.model.target, tuple(map(str, resolved.methods)), resolved.request.dtype, resolved.max_new_tokens)
        if at not in known:
            known[at] = sound(resolved)
        return known[at]

    def findings(run: Path) -> dict[str, CheckedPart]:
        folder = tmp_path_factory.mktemp("rechecked")
        pack.write(run, folder / "pack.zip")
        record = accept(AcceptRequest(folder / "pack.zip", share=1.0, seed=1), folder / "out", lambda _: None)
        assert (folder / "out" / recheck.FILE).exists() == record.is_accepted
        return {one.check: one for one in record.findings}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accepting, "open_local", opened)
        patch.setattr(accepting.Here, "forwards", lambda _: measured)
        patch.setattr(pack, "read_run", lambda _: None)
        yield findings


def test_an_honest_run_is_accepted(honest: Path, rechecked: Rechecked) -> None:
    found = rechecked(honest)
    assert found.pop("times").state in ("unchecked", "doubtful")
    assert {one.state for one in found.values()} == {"confirmed"}


@cases("forgery", FORGERIES)
def test_a_forged_run_is_refused_or_its_doubt_named(
    honest: Path, rechecked: Rechecked, tmp_path: Path, forgery: Forgery
) -> None:
    found = rechecked(forge(honest, tmp_path / "run", forgery.rows, forgery.info))
    assert found[forgery.check].state == forgery.state, found


@cases("changes", [{"temperature": 1.0}, {"dtype": "bfloat16"}, {"max_new_tokens": 24}])
def test_a_run_measured_otherwise_than_it_says_is_refused(
    honest: Path, rechecked: Rechecked, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Identity and options are those of the honest run; the rows are of sampling, of rounding or of other limits."""
    db.run(**{**USUAL, **changes}, out=tmp_path / "other")
    like = store.read_info(honest).to_json()
    greedy = store.load(honest)[1][0].settings

    def claim(content: dict[str, Any]) -> None:
        content |= {name: like[name] for name in ("identity", "options", "plan")}

    found = rechecked(
        forge(tmp_path / "other", tmp_path / "run", each(lambda row: replace(row, settings=greedy)), claim)
    )
    assert "refuted" in {one.state for one in found.values()}, found


def test_a_pack_that_was_changed_is_no_pack(honest: Path, tmp_path: Path) -> None:
    pack.write(honest, tmp_path / "pack.zip")
    with zipfile.ZipFile(tmp_path / "pack.zip") as sound, zipfile.ZipFile(tmp_path / "other.zip", "w") as changed:
        for name in sound.namelist():
            changed.writestr(name, sound.read(name).replace(b'"gsm8k"', b'"gsm9k"'))
    with pytest.raises(UserError, match="not the file that was packed"):
        pack.unpack(tmp_path / "other.zip", tmp_path / "out")
    content = bytearray((tmp_path / "pack.zip").read_bytes())
    for place in range(100, len(content), len(content) // 40):
        damaged = tmp_path / "damaged.zip"
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with suppress(UserError):  # a pack has bytes that nobody reads, such as dates
            pack.unpack(damaged, tmp_path / "read")
            shutil.rmtree(tmp_path / "read")
    assert not (tmp_path / "out").exists()


@cases("name", ["../run.json", "/tmp/run.json", "part-000000.parquet/../x", "notes.txt"])
def test_a_member_that_no_pack_has_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "pack.zip", "w") as archive:
        archive.writestr(pack.LIST, json.dumps({"schema": 1, "files": {name: sha256(b"x").hexdigest()}}))
        archive.writestr(name, "x")
    with pytest.raises(UserError, match="unexpected member"):
        pack.unpack(tmp_path / "pack.zip", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"pack.zip"}


@cases(
    "members, limit",
    [
        ({"run.json": b" " * 2000}, {"MOST_JSON_BYTES": 1000}),
        ({pack.LIST: b" " * 2000}, {"MOST_JSON_BYTES": 1000}),
        ({"run.json": b"{}"}, {"MOST_BYTES": 1}),
        ({"run.json": b"{}", "parts.sha256": b""}, {"MOST_MEMBERS": 2}),
    ],
)
def test_what_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes], limit: dict[str, int]
) -> None:
    with zipfile.ZipFile(tmp_path / "pack.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in ({pack.LIST: b'{"schema": 1, "files": {}}'} | members).items():
            archive.writestr(name, content)
    for name, value in limit.items():
        monkeypatch.setattr(pack, name, value)
    with pytest.raises(UserError, match="more than"):
        pack.unpack(tmp_path / "pack.zip", tmp_path / "out")


def zeros(path: Path) -> None:
    """Write a list of a million zeros into each row, which takes a few bytes in a file."""
    table = parquet.read_table(path)
    ids = [[0] * 10**6] * len(table)
    replaced(path, table, "drafted_ids", ids)


def one_text(path: Path) -> None:
    """Write the same long text into each row, which a dictionary stores once."""
    table = parquet.read_table(path)
    replaced(path, table, "text", ["x" * path.stat().st_size] * len(table))


def replaced(path: Path, table: Any, name: str, values: list[Any]) -> None:
    at = table.schema.get_field_index(name)
    column = pa.array(values, table.schema.field(name).type)
    parquet.write_table(table.set_column(at, table.schema.field(name), column), path, dictionary_pagesize_limit=1 << 30)


@cases("bomb", [zeros, one_text])
def test_rows_that_unpack_to_too_much_are_refused(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: Callable[[Path], None]
) -> None:
    shutil.copytree(honest, tmp_path / "run")
    (path,) = parts.of(tmp_path / "run")
    monkeypatch.setattr(pack, "MOST_BYTES", 3 * path.stat().st_size)
    monkeypatch.setattr(pack, "read_run", lambda _: None)
    pack.write(tmp_path / "run", tmp_path / "sound.zip")
    pack.unpack(tmp_path / "sound.zip", tmp_path / "sound")
    bomb(path)
    pack.write(tmp_path / "run", tmp_path / "bomb.zip")
    assert path.stat().st_size < pack.MOST_BYTES and len(parquet.read_table(path)) > 3
    with pytest.raises(UserError, match="would unpack to more than"):
        pack.unpack(tmp_path / "bomb.zip", tmp_path / "out")


def test_another_compression_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pack.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(pack.LIST, '{"schema": 1, "files": {}}')
    with pytest.raises(UserError, match="another compression"):
        pack.unpack(tmp_path / "pack.zip", tmp_path / "out")


def test_what_is_no_pack_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "pack.zip").write_bytes(b"PK\3\4 no more")
    for path in (tmp_path / "pack.zip", tmp_path, tmp_path / "none.zip"):
        with pytest.raises(UserError):
            pack.unpack(path, tmp_path / "out")
