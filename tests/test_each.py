"""`helpers.each`: every case is tried in a folder of its own, and those that fail are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.each import each

tried: list[tuple[int, int, list[str]]] = []


@each("a", [1, 2, 3])
@each("b", [1, 2])
def takes(a: int, b: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"CASE_{a}_{b}", "")
    tried.append((a, b, [path.name for path in tmp_path.iterdir()]))
    (tmp_path / f"{a}{b}").touch()
    assert a != 2


def test_all_cases_are_tried_alone_and_those_that_fail_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from a fixture").touch()
    with pytest.raises(BaseExceptionGroup, match="1 of the cases of a fail") as failed:
        takes(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert tried == [(a, b, ["from a fixture"]) for a in (1, 2, 3) for b in (1, 2)]
    (of_two,) = failed.value.exceptions
    assert of_two.__notes__ == ["in the case 2"] and len(of_two.exceptions) == 2  # type: ignore[attr-defined]
