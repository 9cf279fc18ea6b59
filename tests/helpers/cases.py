"""Many cases of one property in one test: each is tried, and those that fail are reported together."""

from __future__ import annotations

import inspect
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

Test = Callable[..., None]
FAILED = (AssertionError, pytest.fail.Exception, BaseExceptionGroup)


def seed() -> None:
    """Of what is loaded: most tests need no torch."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def in_one_test(names: str | tuple[str, ...], cases: Iterable[Any], copying: str = "") -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, for cases that are too cheap to be tests of their own.

    Each case has its own random numbers, patches, folder and output, and its own copy of the folder that the fixture
    `copying` gives. It shares what other fixtures give.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    several = list(cases)

    def decorate(test: Test) -> Test:
        @wraps(test)
        def tried(**given: Any) -> None:
            failed: list[BaseException] = []
            for number, case in enumerate(several):
                values = dict(zip(fields, case if len(fields) > 1 else [case], strict=True))
                seed()
                try:
                    with _copied(given, copying) as copies:
                        _try(test, number, {**given, **values, **copies})
                except FAILED as error:
                    error.add_note(f"case {number}: {values}")
                    failed.append(error)
                except Exception as error:
                    error.add_note(f"case {number}: {values}")
                    raise
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(several)} cases failed", failed)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in fields]
        tried.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return tried

    return decorate


@contextmanager
def _copied(given: dict[str, Any], name: str) -> Iterator[dict[str, Path]]:
    if not name:
        yield {}
        return
    with TemporaryDirectory() as folder:
        yield {name: shutil.copytree(given[name], Path(folder) / given[name].name)}


def _try(test: Test, number: int, given: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if "tmp_path" in given or "main" in given:
            folder = given.get("tmp_path", Path.cwd()) / str(number)
            folder.mkdir()
            given |= {"tmp_path": folder} if "tmp_path" in given else {}
            if "main" in given:
                patch.chdir(folder)
        if "monkeypatch" in given:
            given["monkeypatch"] = patch
        test(**given)
    if "capsys" in given:
        given["capsys"].readouterr()
