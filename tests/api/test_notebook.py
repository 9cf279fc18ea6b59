"""The notebook of the docs: executed again it gives the stored outputs, but for times; it uses public names alone."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dflash_bench

PATH = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs/python.ipynb"
STORED = json.loads(PATH.read_text(encoding="utf-8"))
TIMES = ("speedup.decode", "prefill_s", "decode_s")
"""Marks of a line, or of a cell's source, whose numbers are times."""


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def untimed(cell: Any) -> Iterator[tuple[str, ...]]:
    """Each output of a cell: its type, the types of its data, and the words of the lines that hold no times."""
    is_timed = any(f'"{name}"' in "".join(cell["source"]) for name in TIMES[1:])
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        lines = "".join(text).splitlines()
        kept = [line for line in lines if not any(name in line for name in TIMES)]
        yield output["output_type"], *sorted(output.get("data", {})), *([] if is_timed else " ".join(kept).split())


@pytest.mark.in_full
def test_executed_again_it_gives_the_same_tokens_acceptance_and_counts(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(PATH, as_version=4)
    for cell in code(notebook):
        cell["outputs"] = []
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,  # on a busy machine, what is printed arrives in pieces
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    for stored, cell in zip(code(STORED), code(notebook), strict=True):
        assert list(untimed(cell)) == list(untimed(stored)), "".join(stored["source"])


def test_words_that_differ_are_seen_and_times_are_not() -> None:
    lengths = next(cell for cell in code(STORED) if '"accepted"' in "".join(cell["source"]))
    changed = json.loads(json.dumps(lengths).replace("9.500000", "9.600000"))
    assert changed != lengths and list(untimed(changed)) != list(untimed(lengths))
    seconds = next(cell for cell in code(STORED) if '"prefill_s"' in "".join(cell["source"]))
    assert any("decode_s" in line for output in seconds["outputs"] for line in output["data"]["text/plain"])
    assert not any("decode_s" in word for words in untimed(seconds) for word in words)


def test_it_was_executed_from_top_to_bottom() -> None:
    cells = code(STORED)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])


def test_it_uses_the_public_api_alone() -> None:
    for cell in code(STORED):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("dflash_bench")
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
                if isinstance(node.value, ast.Name) and node.value.id == "db":
                    assert node.attr in dflash_bench.__all__
