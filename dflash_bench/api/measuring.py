"""`db.run`: measures methods against plain decoding, with a progress bar in a notebook, and returns the run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dflash_bench.core.errors import UserError
from dflash_bench.models import presets
from dflash_bench.results.store import RUNS
from dflash_bench.runner import session
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.requests import ALIASES, request_of
from dflash_bench.runner.session import Progress

if TYPE_CHECKING:
    from dflash_bench.api.options import Options
    from dflash_bench.api.reading import Run

Words = str | Sequence[str]
"""One value, or several."""


def run(
    config: RunRequest | None = None,
    *,
    suite: Words = (),
    methods: Words = (),
    model: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    tell: Callable[[str], object] | None = None,
    **options: Unpack[Options],
) -> Run:
    """Measure `methods` and plain decoding on the prompts of `suite`, store every answer, and return the `Run`.

    `suite`: a suite, a group or several, as `dflash-bench suites` lists them. `methods`: as `dflash-bench methods`
    writes them, such as "dflash:8" (default: dflash). `model`: a name that `dflash-bench models` lists, or a folder
    (default: nano, the included model). `limit`: most prompts per suite. `out`: the folder to write, which must not
    exist (default: results/runs/TIME-MODEL); with `resume` the run to continue. `tell` is called with notes, which are
    also in `Run.notes`. `options` are all others of `dflash-bench run --help-all` by their names, with _ for -: those
    with several values take one or a sequence, drafts and servers map a method to a place, and `over` a name to values.
    `config` is a whole request, in place of everything except `out`, `resume` and `tell`.

    Raises UserError for options that contradict each other or have no effect, for models and prompts that cannot be
    loaded, and if no answer succeeded. A run with wrong answers raises nothing; see `Run.findings`. An interrupted run
    has stored the finished answers; `resume=True` continues it.
    """
    given = {"suite": suite, "methods": methods, "model": model, "limit": limit, **options}
    chosen = {name: value for name, value in given.items() if value not in (None, ())}
    if config is not None and chosen:
        raise UserError(f"{next(iter(chosen))}= has no effect beside config, which holds all options")
    request = config or request_of(**chosen)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text.removeprefix("note: "))
        if tell is not None:
            tell(text)

    folder = measure(request, None if out is None else Path(out), resume, note, words=_call(request, chosen))
    from dflash_bench.api.reading import Run

    return Run(folder, notes=notes)


def measure(request: RunRequest, out: Path | None, resume: bool, tell: Callable[[str], object], **shown: Any) -> Path:
    """Run or continue a request, for `db.run` and the command, and return its folder.

    `shown` are fields of `session.Caller`; without them only a notebook shows progress.
    """
    if resume and out is None:
        raise UserError("--resume needs --out FOLDER, the run to continue")
    # tqdm warns of missing widgets in a notebook, although no bar of it is shown.
    warnings.filterwarnings("ignore", message="IProgress not found")
    folder = out or default_folder(request)
    session.perform(request, folder, resume, session.Caller(tell, **{"progress": progress_display(), **shown}))
    return folder


def default_folder(request: RunRequest) -> Path:
    """Return the folder of a run without `out`: results/runs/TIME-MODEL below the current folder."""
    name = presets.name(request.name).rpartition("/")[2]
    return RUNS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"


def _call(request: RunRequest, options: Mapping[str, Any]) -> str:
    """Return the call as text for run.json, with the name of a key's variable, never the key."""
    given = {name: getattr(request, ALIASES.get(name, name)) for name in options}
    shown = (f"{name}={str(value) if name == 'launch_args' else _plain(value)!r}" for name, value in given.items())
    return f"db.run({', '.join(shown) or 'config'})"


def _plain(value: Any) -> Any:
    """Convert a path to text, a tuple to a list, and a tuple of one value to the value."""
    if isinstance(value, tuple):
        return _plain(value[0]) if len(value) == 1 else list(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


# Progress of a run: a bar in a notebook, and nothing elsewhere.


def progress_display() -> Callable[..., Progress]:
    """Return the display of a run's progress: a bar in a notebook, else a silent display."""
    return InNotebook if in_notebook() else Silent


def in_notebook() -> bool:
    """Return whether this runs in a notebook kernel, without importing IPython: a notebook has imported it."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class Silent(Progress):
    """Progress that shows nothing."""

    def __init__(self, total: int, num_stored: int, **options: Any) -> None:
        super().__init__(total, num_stored, stream=StringIO(), **options)

    def _show(self) -> None:
        pass


class InNotebook(Silent):
    """Progress as HTML below the cell, updated at most twice a second so that drawing does not slow the measurement."""

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
