"""Progress of a run: a bar in a notebook, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from io import StringIO
from typing import Any

from dflash_bench.runner.session import Progress


def progress_display() -> Callable[..., Progress]:
    """Return the display of a run's progress: a bar in a notebook, else a silent one."""
    return InNotebook if in_notebook() else Silent


def in_notebook() -> bool:
    """Return whether a kernel that shows HTML runs this, without importing IPython: a notebook has imported it."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class Silent(Progress):
    """Counts and shows nothing."""

    def __init__(self, total: int, num_stored: int, **options: Any) -> None:
        super().__init__(total, num_stored, stream=StringIO(), **options)

    def _show(self) -> None:
        pass


class InNotebook(Silent):
    """A line of HTML below the cell, updated at most twice a second so that drawing does not slow the measurement."""

    EVERY_S = 0.5

    def __init__(self, total: int, num_stored: int, **options: Any) -> None:
        super().__init__(total, num_stored, **options)
        self.handle: Any = None
        self.last_shown = -self.EVERY_S

    def __enter__(self) -> InNotebook:
        from IPython.display import HTML, display

        self.handle = display(HTML(self._line()), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._update()

    def _show(self) -> None:
        if self.clock() - self.last_shown >= self.EVERY_S:
            self._update()

    def _update(self) -> None:
        from IPython.display import HTML

        self.last_shown = self.clock()
        self.handle.update(HTML(self._line()))

    def _line(self) -> str:
        done = self.num_stored + self.num_new
        most = "" if self.left_s else f' value="{done}" max="{max(self.total, 1)}"'
        of = f"{done}" if self.left_s else f"{done}/{self.total}"
        left = self._left() if done < self.total else "done"
        words = "  ".join(filter(None, [of, left, self.doing]))
        return f"<progress{most}></progress> <code>{escape(words)}</code>"
