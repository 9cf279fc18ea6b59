"""Rows from hand-written files, and from a hub that is a small server on this machine."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.tasks import rows
from dflash_bench.tasks.rows import DataSet
from helpers.each import each
from helpers.refusals import refusal

TOY = DataSet("toy", "nobody/toy", "test")
ROWS: list[dict[str, Any]] = [
    {"key": "a", "hints": ["first", "second"]},
    {"key": "b {x}", "hints": []},
    {"key": "Zwölf\u2028für\x0c 日本 🙂?", "hints": ["{}"]},
]


def write(folder: Path, text: str, kind: str = "jsonl") -> Path:
    path = folder / "toy" / f"test.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def lines(*values: object, end: str = "\n") -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + end for value in values)


def read(folder: Path) -> list[rows.Row]:
    return [row for _, row in rows.from_folder(TOY, folder)]


# Folders


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(lines(*ROWS), id="plain"),
        pytest.param(lines(*ROWS, end="\r\n"), id="Windows line ends"),
        pytest.param(lines(*ROWS) + "\n  \n\n", id="blank lines at the end"),
        pytest.param(lines(*ROWS).rstrip("\n"), id="no last line end"),
        pytest.param("\ufeff" + lines(*ROWS), id="a byte-order mark"),
        pytest.param("".join(json.dumps(row) + "\n" for row in ROWS), id="escaped unicode"),
    ],
)
def test_how_lines_are_written_changes_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert read(tmp_path) == ROWS


def test_parquet_rows_equal_json_rows_and_json_is_tried_first(tmp_path: Path) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), write(tmp_path, "", "parquet"))
    assert read(tmp_path) == ROWS
    write(tmp_path, lines(ROWS[1]))
    assert read(tmp_path) == [ROWS[1]]


def test_a_row_comes_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, lines(ROWS[0]) + "\n" + lines(ROWS[1]))
    assert [where for where, _ in rows.json_lines(path)] == [f"{path} line 1", f"{path} line 3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines({}) + '\n{"key": ', "line 3: not valid JSON ("),
        (lines({}) + "[1]", "line 2: "),
    ],
)
def test_a_bad_line_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert refusal(read, tmp_path).startswith(f"{path} {message}")


STRANGE = [*ROWS, {}, {"key": -1.5e-300, "deep": [[{"a": None}], True, '\\u00e9\\ " ]}['], "last": 12}]


@each("chunk", [1, 2, 3, 7, 1 << 20])
@each("options", [{}, {"ensure_ascii": False}, {"indent": 2}])
def test_an_array_is_read_row_by_row_wherever_it_is_cut(
    chunk: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", chunk)
    path = write(tmp_path, f"\ufeff\n {json.dumps(STRANGE, **options)}\r\n ", "json")
    assert list(rows.from_folder(TOY, tmp_path)) == [
        (f"{path} row {number}", row) for number, row in enumerate(STRANGE, start=1)
    ]
    write(tmp_path, "[ ]", "json")
    assert read(tmp_path) == []


@each("chunk", [1, 1 << 20])
@each(
    "text, message",
    [
        (b"", ": "),
        (b"{}", ": "),
        (b"[{},", " row 2: not valid JSON"),
        (b"[{},]", " row 2: not valid JSON"),
        (b"[{}", " row 1: not valid JSON"),
        (b"[{} {}]", " row 1: not valid JSON"),
        (b"[{}]]", ": not valid JSON"),
        (b'[{},\n{"a": 1, "b" 2}]', " row 2: not valid JSON (Expecting ':' delimiter at column 14)"),
        (b'[{}, {"a": "', " row 2: not valid JSON"),
        (b'[{"a": ' + 200 * b"[" + 200 * b"]" + b"}]", " row 1: nested more than 100 levels"),
        (b'[{"a": ' + 5000 * b"1" + b"}]", " row 1: a number"),
        (b'[{"a": "\\ud800"}]', " row 1: it contains half"),
        (b'[{"a": "' + 100 * b"x" + b'"}]', " row 1: longer than 0 MiB"),
        (b"[{}, 12]", " row 2: a row"),
    ],
)
def test_a_bad_array_is_refused_with_the_row(
    text: bytes, message: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", chunk)
    monkeypatch.setattr(files, "LONGEST_LINE", 50 if b"xxx" in text else 10_000)
    path = write(tmp_path, "", "json")
    path.write_bytes(text)
    assert refusal(read, tmp_path).startswith(f"{path}{message}")


@each("chunk", [1, 5, 1 << 20])
def test_bytes_of_an_array_that_are_no_text_are_refused_by_their_place(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", chunk)
    path = write(tmp_path, "", "json")
    path.write_bytes('[{"a": "é"},\n{"b": "'.encode() + b"\xc3(")
    assert refusal(read, tmp_path) == f"cannot read {path}: not UTF-8 (byte 21)"


def test_rows_of_parquet_come_in_batches_of_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    given = [{"key": f"{number} {'x' * 500}"} for number in range(100)]
    parquet.write_table(
        arrow.Table.from_pylist(given), write(tmp_path, "", "parquet"), compression="none", use_dictionary=False
    )
    asked = list[int]()
    plain = parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        parquet.ParquetFile, "iter_batches", lambda file, size, *more: (asked.append(size), plain(file, size, *more))[1]
    )
    monkeypatch.setattr(rows, "BYTES_AT_A_TIME", 5200)
    assert read(tmp_path) == given
    assert 9 <= asked[0] <= 10


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "not Parquet", "parquet")
    assert refusal(read, tmp_path).startswith(f"cannot read {path}: ")
    lines_path = write(tmp_path, "")
    lines_path.write_bytes(b'{"key": "\xff"}')
    assert refusal(read, tmp_path) == f"cannot read {lines_path}: not UTF-8 (byte 9)"
    lines_path.unlink()
    lines_path.mkdir()
    assert f"{lines_path}: it is a folder" in refusal(read, tmp_path)


def test_a_folder_without_the_rows_names_the_files_looked_for(tmp_path: Path) -> None:
    stem = tmp_path / "toy" / "test"
    assert f"{stem}.jsonl, .parquet and .json" in refusal(read, tmp_path) and "'toy'" in refusal(read, tmp_path)


def test_cells_of_csv_may_hold_lines_and_what_is_empty_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffid,text\r\n1,"a\r\nb ""c"", d"\r\n\r\n2,\r\n3\r\n'.encode())
    assert list(rows.csv_rows(path)) == [
        (f"{path} line 3", {"id": "1", "text": 'a\r\nb "c", d'}),
        (f"{path} line 5", {"id": "2", "text": None}),
        (f"{path} line 6", {"id": "3", "text": None}),
    ]


@each(
    "text, message",
    [
        ("id,id\n1,2\n", "line 1: two columns"),
        ("id\n1\n2,3\n", "line 3: it has more cells"),
        ('id\n"1\n2', "line 3: not valid CSV"),
        ('id\n"1"2\n', "line 2: not valid CSV"),
    ],
)
def test_what_is_no_csv_is_refused_with_the_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        list(rows.csv_rows(path))
    assert str(caught.value).startswith(f"{path} {message}")


# The hub

COMMIT = "c0ffee" + 34 * "0"
REMEDY = "use --data PATH with a folder that holds toy/test.jsonl or .parquet"


class FakeTable(list[dict[str, Any]]):
    def __init__(self, cache_file: str) -> None:
        super().__init__(ROWS)
        self.cache_files = [{"filename": cache_file}]


class Hub:
    """The commit from a real HTTP server; the table in place of `datasets`, from a cache of one commit."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.paths: list[str] = []
        self.status, self.reply = 200, json.dumps({"sha": COMMIT})
        self.cached = COMMIT
        self.error: Exception | None = None

    def load_dataset(self, source: str, subset: str | None, **options: str) -> FakeTable:
        if self.error:
            raise self.error
        self.asked = {"source": source, "subset": subset} | options
        return FakeTable(f"/cache/toy/0.0.0/{self.cached}/toy-test.arrow")

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.paths.append(self.path)
                self.send_response(hub.status)
                self.end_headers()
                self.wfile.write(hub.reply.encode())

            def log_message(self, *_: object) -> None:
                """Not on stderr."""

        return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    exceptions = SimpleNamespace(DatasetsError=RuntimeError)
    fake = SimpleNamespace(load_dataset=hub.load_dataset, exceptions=exceptions, config=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), hub.handler()) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        yield hub
        server.shutdown()


def test_the_hub_is_asked_for_the_commit_behind_the_revision(hub: Hub) -> None:
    found, source = rows.from_hub(replace(TOY, subset="small"))
    assert hub.paths == ["/api/datasets/nobody/toy/revision/main"]
    assert hub.asked == {"source": "nobody/toy", "subset": "small", "split": "test", "revision": COMMIT}
    assert source == f"hub nobody/toy@{COMMIT}"
    assert list(found)[1] == (f"hub nobody/toy@{COMMIT} row 2", ROWS[1])


@pytest.mark.usefixtures("hub")
def test_loading_from_the_hub_turns_telemetry_off() -> None:
    from huggingface_hub import constants

    rows.from_hub(TOY)
    assert constants.HF_HUB_DISABLE_TELEMETRY is True


@pytest.mark.usefixtures("hub")
def test_no_network_is_one_line_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connecting is refused
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        message = refusal(rows.from_hub, TOY)
    assert "nobody/toy" in message and message.endswith(f"refused); {REMEDY}")


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr(rows, "HUB_TIMEOUT_S", 0.1)
        assert refusal(rows.from_hub, TOY).endswith(f"(timed out); {REMEDY}")


@pytest.mark.parametrize(("status", "reply", "part"), [(404, "", "404 Not Found"), (200, "<html>", "Expecting value")])
def test_a_strange_answer_is_one_line(hub: Hub, status: int, reply: str, part: str) -> None:
    hub.status, hub.reply = status, reply
    message = refusal(rows.from_hub, TOY)
    assert part in message
    assert message.endswith(f"; {REMEDY}")
    assert "\n" not in message


@each("error", [ConnectionError("gone\nat once"), ValueError("gone"), RuntimeError("gone")])
def test_what_datasets_raises_is_one_line_as_well(hub: Hub, error: Exception) -> None:
    hub.error = error
    assert refusal(rows.from_hub, TOY).endswith(f"(gone); {REMEDY}")


def test_a_cache_that_holds_another_commit_is_refused(hub: Hub) -> None:
    hub.cached = 40 * "b"
    told = refusal(rows.from_hub, TOY)
    assert "nobody/toy" in told and hub.cached in told and COMMIT in told


def test_offline_mode_trusts_a_pinned_revision_without_asking(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _, source = rows.from_hub(replace(TOY, revision=COMMIT))
    assert (source, hub.paths) == (f"hub nobody/toy@{COMMIT}", [])


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "'pip install datasets'" in refusal(rows.from_hub, TOY)
