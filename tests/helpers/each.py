"""One test for many cases of one property: all cases are tried, and each that fails is reported by its name."""

from __future__ import annotations

import functools
import inspect
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def seed() -> None:
    """Seed only loaded libraries: most tests need no torch."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        # torch.manual_seed also formats the stack three times, for devices that are not there.
        sys.modules["torch"].default_generator.manual_seed(0)


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but as one test.

    A case has a current folder, `tmp_path`, `monkeypatch` and random numbers of its own: paths below `tmp_path` that
    fixtures made are copied for it. Everything else that fixtures give is shared by all cases.
    """
    words = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    cases = list(cases)
    assert cases, names

    def joined(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in words]
        has_folder = any(one.name == "tmp_path" for one in fixtures)
        if fixtures and not has_folder:
            fixtures.append(inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(test)
        def every_case(**given: Any) -> None:
            failures = []
            for number, case in enumerate(cases):
                values = case if len(words) > 1 else [case]
                seed()
                try:
                    with ExitStack() as stack:
                        own = stack.enter_context(_own(given, number)) if given else {}
                        if "capsys" in own:
                            own["capsys"].readouterr()
                        if "monkeypatch" in own:
                            own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
                        if not has_folder:
                            own.pop("tmp_path", None)
                        test(**own, **dict(zip(words, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - all of them are raised below
                    error.add_note(f"in the case {case!r:.200}")
                    failures.append(error)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of the cases of {', '.join(words)} fail", failures)

        every_case.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        del every_case.__wrapped__  # whose parameters pytest would read
        return every_case

    return joined


@contextmanager
def _own(given: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures of one case, which has a copy of `tmp_path`."""
    shared = given["tmp_path"]
    folder = Path(shutil.copytree(shared, shared.with_name(f"{shared.name}-{number}")))

    def moved(value: Any) -> Any:
        is_below = isinstance(value, Path) and value.is_relative_to(shared)
        return folder / value.relative_to(shared) if is_below else value

    with chdir(moved(Path.cwd())):
        yield {name: moved(value) for name, value in given.items()}
