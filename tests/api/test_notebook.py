"""The notebook of the docs: its stored outputs are those of an execution, and it uses public names alone."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import dflash_bench

PATH = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs/python.ipynb"
CODE = [cell for cell in json.loads(PATH.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_it_was_executed_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert all(cell["outputs"] for cell in CODE)
    assert all(one["output_type"] != "error" for cell in CODE for one in cell["outputs"])


def test_it_uses_the_public_api_alone() -> None:
    for cell in CODE:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("dflash_bench")
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
                if isinstance(node.value, ast.Name) and node.value.id == "db":
                    assert node.attr in dflash_bench.__all__
